"""Compiles a pattern to a layout, in time proportional to the pairs of tiles it visits.

1. `terms` splits a mask into a union of masks, its terms, that each fit one way to cut positions
   into tiles: plain, dilated or per document.
2. Each term becomes one `Pass`, without the pairs of earlier passes, so that passes are disjoint.
3. For each distinct mask of a head and batch entry, its condition (`lower`) finds the pairs of
   tiles and their status: all, none or some of their positions attend. Where some do, the mask's
   definition is evaluated once for all pairs of tiles that must have equal bitmaps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import index_of, shortened
from ..ground.once import one_thread
from ..ground.progress import progress
from ..ground.rows import distinct_rows, number_rows
from ..patterns.algebra import Frame, Mask, Mixture, Pattern, check_fits, joined_masks
from ..patterns.blocks import BlockwiseMask
from ..patterns.keys import without_key_masks
from ..patterns.selected import selections_of
from .bitmaps import Table, count_pairs, pack, share_bitmaps, share_tables
from .documents import Ground, ground_of, laid_in_documents
from .layout import BlockLayout, Pass, if_several
from .leaves import EMPTY, FULL, Condition
from .lower import condition, native_table
from .selected_on_device import selected_layout, with_slots
from .terms import disjoint_terms, is_in_tiles, terms, typical
from .tiles import Axis, Grid, Origin, Ranges, Spans, TilePairs

BLOCK_SIZES = range(16, 257, 16)
_MOST_CELLS = 1 << 20  # most (query, key) pairs evaluated at once, to bound memory; tuned on CPUs
_MOST_BITMAPS = 1 << 12  # tile pairs evaluated before their equal bitmaps are merged

_MOST_PAIRS_OF_TILES = 1 << 35  # more take an hour, and a table of 256 GB
_TILES_OF_SAMPLE = 8  # query tiles from which the size of a large table is estimated
_PARTS = 1024  # ranges of keys that `check_not_dense` looks at

_SAMPLE = 2048  # queries whose tiles are counted to choose a block size
_LEAST_KEYS = 128  # a shorter sequence has too few tiles for a choice to matter
_MOST_KEYS = 2048  # with more keys per query, smaller tiles save little, unless a mask has blocks

# The default block size counts pairs in a sample of the layout; constants were measured on CPUs.
# Smaller tiles cost more per pair, but contain fewer pairs outside the pattern. `_SMALLER` lists
# (size, share): the size is chosen if its tiles contain at most that share of the pairs in the
# tiles of the next larger size.
_LARGEST = 128
_SMALLER = ((64, 0.92), (32, 0.6))
_SMALLER_OF_BLOCKS = ((64, 0.95), (32, 0.85), (16, 0.6))  # tiles of whole blocks have no bitmaps
_LARGE_BLOCKS = 64  # tokens; tiles of several such blocks are not faster


@dataclass(frozen=True)
class CompiledPass:
    """Tiles and tables of one term of a mask, before `assemble` stacks them to a `Pass`."""

    queries: list[Axis]  # query tiles of each kv head, or one Axis for all heads
    keys: list[Axis]  # key tiles of each kv head, or one Axis for all heads
    tables: list[list[Table]]  # [batch][head]; a list has one item if all would be equal
    bitmaps: Tensor  # the distinct bitmaps, to which `Table.bitmap` refers
    num_pairs: float  # number of (query, key) pairs, mean over batch entries and heads
    branch: int  # index of the mask in a mixture `a + b`
    origins: dict[str, Tensor]  # further fields of `Pass`, by name


@one_thread()
def build_layout(pattern: Pattern, frame: Frame, size: int, device: torch.device) -> BlockLayout:
    """Compiles a pattern to a layout without the cache; the host does not wait for copies to a GPU.

    Raises: ValueError for an illegal block size, a pattern for other lengths or heads, or tables
    that would take an hour.
    """
    size = checked_block_size(size)
    check_fits(pattern, frame)
    check_not_dense(pattern, frame, size)
    if (selected := selected_layout(pattern, frame, size)) is not None:
        return replace(selected, passes=tuple(p.to(device) for p in selected.passes))
    has_tables = frame.num_heads and pattern.num_batches() != 0
    compiled = compile_passes(pattern, frame, size) if has_tables else []
    passes, branches = [], [part.branch for part in compiled]
    for part in compiled:
        p, branch = assemble(part, frame), pattern.branches[part.branch]
        alone = branches.count(part.branch) == 1
        passes.append(with_slots(p, branch, frame, size, alone).to(device))
    return BlockLayout(frame, size, tuple(passes), sum(c.num_pairs for c in compiled))


def check_not_dense(pattern: Pattern, frame: Frame, size: int) -> None:
    """Raises ValueError if a long sequence attends so densely that its layout would take an hour.

    Cost: some milliseconds at any length, because it estimates from a few queries before any tile
    is listed.
    """
    most = (frame.q_len // size) * (frame.kv_len // size)
    if most <= _MOST_PAIRS_OF_TILES or pattern.restarts is not None or not frame.num_heads:
        return
    part, rows = -(-frame.kv_len // _PARTS), frame.q_len // size
    step = -(-frame.q_len // _TILES_OF_SAMPLE)
    query = torch.arange(step // 2, frame.q_len, step) + frame.q_start
    first, key = (
        x.flatten() for x in torch.meshgrid(query, torch.arange(_PARTS) * part, indexing="ij")
    )
    of_query = Axis(step=1, residue=key * 0, start=first, stop=first + 1, last=first)
    of_key = Axis(step=1, residue=key * 0, start=key, stop=key + part, last=key + part - 1)
    tiles = TilePairs.of_sequence(of_query, of_key, frame.kv_len)
    pairs = 0
    for branch in pattern.branches:
        status = condition(branch.at(0, 0, frame), frame).status(tiles)
        whole = int(((status == FULL) & (key + part <= frame.kv_len)).sum())
        pairs += whole * (part // size) * rows // len(query)
    if pairs > _MOST_PAIRS_OF_TILES:
        raise _too_many(pairs, frame)


def checked_block_size(block_size: object) -> int:
    """Returns the block size; raises ValueError unless it is a multiple of 16 from 16 to 256."""
    if (size := index_of(block_size)) is None or size not in BLOCK_SIZES:
        got = shortened(repr(block_size))
        raise ValueError(
            f"block_size must be a multiple of 16 from 16 to 256, got {got}; for example 128"
        )
    return size


def assemble(compiled: CompiledPass, frame: Frame) -> Pass:
    """Stacks the tables of heads and batch entries to one `Pass`; pads shorter ones with 0."""
    tables = compiled.tables
    longest = max(len(t.key_tile) for row in tables for t in row)
    of_query, of_key = zip(*(t.longest for row in tables for t in row), strict=True)

    def stack(name: str, length: int) -> Tensor:
        if len(tables) == len(tables[0]) == 1:
            return getattr(tables[0][0], name)[None, None]
        padded = torch.zeros(len(tables), len(tables[0]), length, dtype=torch.int32)
        for b, row in enumerate(tables):
            for h, table in enumerate(row):
                values: Tensor = getattr(table, name)
                padded[b, h, : len(values)] = values
        return padded

    queries, keys = compiled.queries, compiled.keys
    all_queries = all(x.tokens[0] == frame.q_len for x in queries)
    all_keys = all(x.tokens[0] == frame.kv_len for x in keys)
    found = Pass(
        step=queries[0].step,
        query_start=torch.stack([axis.start for axis in queries]) - frame.q_start,
        query_stop=torch.stack([axis.stop for axis in queries]) - frame.q_start,
        key_start=torch.stack([axis.start for axis in keys]),
        key_stop=torch.stack([axis.stop for axis in keys]),
        row_ptr=stack("row_ptr", len(queries[0]) + 1),
        key_tile=stack("key_tile", longest),
        bitmap=stack("bitmap", longest),
        bitmaps=compiled.bitmaps,
        covers=(all_queries, all_keys),
        longest=(max(of_query), max(of_key)),
        branch=compiled.branch,
        **compiled.origins,
    )
    found.memo["most tokens"] = tuple(max(x.tokens[1] for x in axes) for axes in (queries, keys))
    return found


def default_block_size(pattern: Pattern, kv_len: int) -> int:
    """Returns the default number of tokens per tile, a multiple of 16 between 16 and 256.

    The default is the smallest `block_size` of the pattern's blockwise masks, if it is such a
    multiple. Otherwise, a pattern with a selection gets the largest multiple of 16 up to 128 that
    divides the selection's `block_size`, or 128 if there is none. A `Neighbourhood` in the order of
    tiles of 16 to 128 tokens gets the tokens of its tile, rounded up to a multiple of 16. All other
    patterns get 128 tokens for more than 64 keys, 64 for 33 to 64 keys, and 32 for fewer. If
    positions restart in documents, the longest document decides instead of `kv_len`.
    """
    if pattern.restarts is not None:
        inner = Mixture(tuple(map(laid_in_documents, pattern.branches)))
        return default_block_size(inner, max(pattern.restarts[1], default=0))
    own = [mask.block_size for mask in joined_masks(pattern) if isinstance(mask, BlockwiseMask)]
    if own and min(own) in BLOCK_SIZES:
        return min(own)
    if selections := selections_of(pattern):
        sizes = [b for b in BLOCK_SIZES if b <= 128 and selections[0].block_size % b == 0]
        return max(sizes, default=128)
    grids = [x.grid.sizes for x in joined_masks(pattern) if is_in_tiles(x)]
    if grids and 16 <= (volume := math.prod(grids[0])) <= _LARGEST:
        return -(-volume // 16) * 16
    return 128 if kv_len > 64 else 64 if kv_len > 32 else 32


@one_thread()
def chosen_block_size(pattern: Pattern, frame: Frame, device: torch.device) -> int:
    """Returns the default tokens per tile: on a CPU by the pairs in tiles, or `default_block_size`.

    A sparse pattern gets smaller tiles if they have far fewer pairs outside the pattern. A pattern
    of small blocks gets tiles of several blocks if they have few more. Cost: counts pairs in the
    tiles of some thousand queries, once per `typical` pattern and length.
    """
    size = default_block_size(pattern, frame.kv_len)
    if device.type != "cpu" or frame.q_len <= 1 or frame.kv_len < _LEAST_KEYS:
        return size
    rest, _ = without_key_masks(pattern)
    blocks = [mask.block_size for mask in joined_masks(rest) if isinstance(mask, BlockwiseMask)]
    small = bool(blocks) and size == min(blocks) < _LARGE_BLOCKS and _LARGEST % size == 0
    if not small and (blocks or size != _LARGEST):
        return size
    if rest.tensors or rest.restarts is not None or not frame.num_heads:
        return size
    check_fits(rest, frame)
    return _by_density(*typical(rest, frame), size if small else None)


@lru_cache(256)
def _by_density(pattern: Pattern, frame: Frame, block: int | None) -> int:
    """Chooses 128, 64, 32 or 16 tokens per tile: fewer if smaller tiles contain far fewer pairs.

    It compiles a sample of queries from the middle of the sequence with each size (see `_SMALLER`).
    `block` is the size of the pattern's blocks, below which no tiles are smaller, or None.
    """
    steps = (grid.step for branch in pattern.branches for grid, _ in terms(branch, _LARGEST))
    sample = max(_SAMPLE, 2 * _LARGEST * max(steps, default=1))
    first = max(0, frame.q_len - sample) // 2 // sample * sample + frame.q_start
    queries = first, min(first + sample, frame.q_start + frame.q_len)
    chosen, pairs = _LARGEST, _pairs_in_tiles(pattern, frame, _LARGEST, queries)
    most = 1.0  # share of the pairs in tiles of the chosen size that a smaller size may have
    for size, share in _SMALLER if block is None else _SMALLER_OF_BLOCKS:
        if size < (block or 0) or (pairs > _MOST_KEYS and block is None):
            break
        most *= share
        smaller = _pairs_in_tiles(pattern, frame, size, queries)
        if smaller <= most * pairs:
            chosen, pairs, most = size, smaller, 1.0
        elif block is None:  # tiles of a band shrink with it; those of blocks may do so at last
            break
    return chosen


def _pairs_in_tiles(pattern: Pattern, frame: Frame, size: int, queries: tuple[int, int]) -> float:
    """Returns how many keys a query's visited tiles contain, as a mean over a range of queries.

    Queries are [first, exclusive end); the mean is over queries, heads and batch entries.
    """
    total, ground = 0.0, ground_of(pattern, frame, size, [queries], None)
    for _, grid, mask in terms_of(pattern, ground):
        term = _Term.of(ground, grid, mask)
        count = {x: _count_in_tiles(ground, x, *tiles) for x, tiles in term.tiles_of.items()}
        total += sum(count[own] for row in term.rows for own in row) / term.num_tables
    return total / (queries[1] - queries[0])


def _count_in_tiles(ground: Ground, mask: Mask, queries: Axis, keys: Axis) -> int:
    """Counts all (query, key) pairs inside the tile pairs that a mask visits, attending or not."""
    rule = condition(mask, ground.frame, ground.in_document)
    if (counted := native_table(rule, queries, keys, ground.block_size, count=True)) is not None:
        return int(counted[0])
    table, _ = compile_table(ground, mask, queries, keys)
    # Kernels round a partial tile up to a multiple of 16 tokens, not to a whole tile.
    rows, columns = (-(-x.count.clamp(min=0) // 16) * 16 for x in (queries, keys))
    return int((rows.repeat_interleave(table.row_ptr.diff()) * columns[table.key_tile]).sum())


def terms_of(pattern: Pattern, ground: Ground) -> Iterator[tuple[int, Grid, Mask]]:
    """Yields (branch of the mixture, grid that cuts tokens into tiles, mask) of each pass."""
    for number, branch in enumerate(pattern.branches):
        mask = laid_in_documents(branch) if ground.in_document else branch
        for grid, term in disjoint_terms(mask, ground.block_size):
            yield number, ground.fitting(grid), term


def compile_passes(
    pattern: Pattern,
    frame: Frame,
    block_size: int,
    queries: Ranges | None = None,
    keys: Ranges | None = None,
) -> list[CompiledPass]:
    """Compiles each mask of a mixture to passes (tables of tiles), none of which share a pair.

    `queries`, `keys`: ranges of positions to compile, as (first, exclusive end); default all.
    """
    ground = ground_of(pattern, frame, block_size, queries, keys)
    return [_compile_pass(ground, *term) for term in terms_of(pattern, ground)]


class _Term(NamedTuple):
    """One term of a mask, cut into tiles, with its mask for each head and batch entry."""

    queries: list[Axis]  # query tiles of each kv head, or one Axis for all heads
    keys: list[Axis]  # key tiles of each kv head, or one Axis for all heads
    rows: list[list[Mask]]  # [batch][head]; a list has one item if all would be equal
    tiles_of: dict[Mask, tuple[Axis, Axis]]  # (query tiles, key tiles) of each distinct mask

    @classmethod
    def of(cls, ground: Ground, grid: Grid, mask: Mask) -> "_Term":
        frame = ground.frame
        num_axes = 1 if grid.anchor is None else grid.anchor.num_tables(frame)
        offsets = (grid.offset_of(head, frame.num_kv_heads) for head in range(num_axes))
        axes = [axes_of(ground, grid, mask, offset) for offset in offsets]
        queries, keys = [tiles for tiles, _ in axes], [tiles for _, tiles in axes]
        num_tables = mask.num_tables(frame)
        rows: list[list[Mask]] = []
        tiles_of: dict[Mask, tuple[Axis, Axis]] = {}
        for batch in range(mask.num_batches() or 1):
            heads = [table * frame.num_heads // num_tables for table in range(num_tables)]
            rows.append([mask.at(batch, head, frame) for head in heads])
            for head, own in zip(heads, rows[-1], strict=True):
                tiles_of.setdefault(own, axes[frame.kv_head(head) if num_axes > 1 else 0])
        return cls(queries, keys, rows, tiles_of)

    @property
    def num_tables(self) -> int:
        return len(self.rows) * len(self.rows[0])


def _compile_pass(ground: Ground, branch: int, grid: Grid, mask: Mask) -> CompiledPass:
    """Compiles one term to a pass: a table for each distinct mask among heads and batch entries."""
    term = _Term.of(ground, grid, mask)
    tables = [compile_table(ground, x, *tiles) for x, tiles in term.tiles_of.items()]
    number = {own: index for index, own in enumerate(term.tiles_of)}
    rows = [[number[own] for own in row] for row in term.rows]
    # Two heads with equal tables may have different numbers of pairs, since their tiles may differ.
    mean = sum(tables[index][0].num_pairs for row in rows for index in row) / term.num_tables
    bitmaps, shared = share_tables(tables, rows)
    queries, keys, origins = ground.placed(term.queries, term.keys)
    segments = {}
    for name, axes in (("query_segment", term.queries), ("key_segment", term.keys)):
        of = tuple(map(id, axes))  # queries and keys often have the same tiles
        if of not in segments:
            rows_of = [grid.segment_of(x.start, ground.block_size) for x in axes]
            segments[of] = if_several(torch.stack(rows_of).int())
        origins[name] = segments[of]
    return CompiledPass(
        queries=queries,
        keys=keys,
        tables=shared,
        bitmaps=bitmaps,
        num_pairs=mean,
        branch=branch,
        origins=origins,
    )


def axes_of(ground: Ground, grid: Grid, mask: Mask, offset: int) -> tuple[Axis, Axis]:
    """Cuts (query tiles, key tiles); the first tile of a segment begins at its token `offset`.

    In each segment, the first tile begins at token `offset`.
    """
    keys, block_size = ground.keys(grid, offset), ground.block_size
    rows = [x.row_size for x in selections_of(mask)] if grid == Grid(1, block_size) else []
    tokens = math.gcd(block_size, *rows)  # so that no query tile spans two rows of a selection
    if tokens == block_size and ground.is_square:
        return keys, keys
    return ground.queries(grid, tokens, offset), keys


def compile_table(
    ground: Ground, mask: Mask, queries: Axis, keys: Axis, among: Spans | None = None
) -> tuple[Table, Tensor]:
    """Compiles the table and bitmaps of one mask, for all tile pairs or those in `among`."""
    rule, block_size = condition(mask, ground.frame, ground.in_document), ground.block_size
    if among is None:
        _check_size(ground, rule, queries, keys)
    native = native_table(rule, queries, keys, block_size) if among is None else None
    if native is not None:
        row_ptr, key_tile, bitmap, bitmaps, counts = native
        pairs_of_table, of_query, of_key = counts.tolist()
        table = Table(
            row_ptr=row_ptr,
            key_tile=key_tile,
            bitmap=bitmap,
            num_pairs=pairs_of_table,
            longest=(of_query, of_key),
        )
        return table, bitmaps
    origin = ground.origin(queries)
    places = (rule.candidates(queries, keys, origin) if among is None else among).expand()
    row, column = places // max(1, len(keys)), places % max(1, len(keys))
    q_count, k_count = queries.count[row], keys.count[column]
    pairs = TilePairs(queries[row], keys[column], Origin(*(x[row] for x in origin)))
    status = torch.where((q_count > 0) & (k_count > 0), rule.status(pairs), EMPTY)

    number = torch.full_like(row, -1)
    num_pairs = torch.where(status == FULL, q_count * k_count, 0)
    varies = torch.nonzero((status != EMPTY) & (status != FULL))[:, 0]
    bitmaps = torch.zeros(0, block_size * block_size // 8, dtype=torch.uint8)
    if len(varies):
        bitmaps, bitmap, count = _cells(ground, mask, rule, pairs[varies])
        num_pairs[varies] = count
        number[varies] = torch.where(count == (q_count * k_count)[varies], -1, bitmap)
    visited = num_pairs > 0
    row_ptr = torch.zeros(len(queries) + 1, dtype=torch.int32)
    row_ptr[1:] = torch.bincount(row[visited], minlength=len(queries)).cumsum(0)
    key_tile = column[visited]
    of_query, of_key = (max(x.tolist(), default=0) for x in (row_ptr.diff(), key_tile.bincount()))
    tables = row_ptr, key_tile.int(), number[visited].int()
    table = Table(*tables, int(num_pairs.sum()), (of_query, of_key))
    distinct, (table,) = share_bitmaps([(table, bitmaps)])
    return table, distinct


def _check_size(ground: Ground, rule: Condition, queries: Axis, keys: Axis) -> None:
    """Raises ValueError if a table would take an hour, as estimated from 8 of its query tiles."""
    if len(queries) * len(keys) <= _MOST_PAIRS_OF_TILES:
        return
    step = -(-len(queries) // _TILES_OF_SAMPLE)
    some = queries[torch.arange(step // 2, len(queries), step)]
    candidates = rule.candidates(some, keys, ground.origin(some))
    pairs = int((candidates.end - candidates.begin).sum()) * len(queries) // len(some)
    if pairs > _MOST_PAIRS_OF_TILES:
        raise _too_many(pairs, ground.frame)


def _too_many(pairs: int, frame: Frame) -> ValueError:
    return ValueError(
        f"a layout has at most {_MOST_PAIRS_OF_TILES:,} pairs of tiles, got about {pairs:,} of "
        f"{frame.q_len:,} queries and {frame.kv_len:,} keys; pass fewer tokens, a larger "
        "block_size, or a sparser pattern"
    )


def _cells(
    ground: Ground, mask: Mask, rule: Condition, pairs: TilePairs
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluates a mask on the n tile pairs in which only some positions attend, and packs the bits.

    Returns: the bitmaps; for each tile pair, the index of its bitmap [n] and its number of 1 bits
    [n]. Tile pairs that differ only in length share the bitmap of the longest one.
    """
    q_count, k_count, block_size = pairs.q.count, pairs.k.count, ground.block_size
    kind, largest = _largest_of_kind(rule.signature(pairs), q_count, k_count)
    bitmaps, numbers, total = [], [], 0
    with progress("layout", len(largest), "tile", after_s=2.0) as work:
        for part in largest.split(_MOST_BITMAPS):
            tiles = pairs[part]
            packed = torch.empty(len(part), block_size**2 // 8, dtype=torch.uint8)
            whole = [(torch.arange(len(part)), ground.frame)]
            frames = tiles.origin.frames(ground.frame, mask.asks_frame)
            for which, own in frames if ground.in_document else whole:
                packed[which] = evaluate(mask, tiles[which], own, block_size)
            cut = torch.nonzero((q_count[part] < block_size) | (k_count[part] < block_size))[:, 0]
            if len(cut):  # clear the bits of positions past the end of a short tile
                slots = torch.arange(block_size)
                real_q, real_k = (slots < count[part][cut, None] for count in (q_count, k_count))
                packed[cut] &= pack(real_q[:, :, None] & real_k[:, None, :])
            distinct, number = distinct_rows(packed)
            bitmaps.append(distinct)
            numbers.append(number + total)
            total += len(distinct)
            work.advance(len(part))
    joined, bitmap = torch.cat(bitmaps), torch.cat(numbers)[kind]
    return joined, bitmap, count_pairs(joined, bitmap, q_count, k_count)


def _largest_of_kind(
    signature: list[Tensor], q_count: Tensor, k_count: Tensor
) -> tuple[Tensor, Tensor]:
    """Finds which of n tile pairs to evaluate: pairs of one kind share the largest one's bitmap.

    Returns: the group of each tile pair [n]; for each group, the index of its longest pair.
    """
    kind, _ = number_rows(signature)
    zero, counts = torch.zeros_like(kind), (q_count, k_count)
    most_q, most_k = (zero.scatter_reduce(0, kind, x, "amax")[kind] for x in counts)
    largest = (q_count == most_q) & (k_count == most_k)
    has_one = torch.zeros_like(largest).index_put((kind[largest],), torch.tensor(True))[kind]
    # where no pair has both the most queries and the most keys, split by size
    if not has_one.all():
        apart = ~has_one
        kind, _ = number_rows([kind, apart * q_count, apart * k_count])
        largest = largest | apart
    number = torch.where(largest, torch.arange(len(kind)), -1)
    return kind, torch.full((int(kind.max()) + 1,), -1).scatter_reduce(0, kind, number, "amax")


def evaluate(mask: Mask, pairs: TilePairs, frame: Frame, block_size: int) -> Tensor:
    """Evaluates a mask on every position of n tile pairs: bitmaps [n, block_size ** 2 / 8]."""
    bitmaps = [torch.zeros(0, block_size**2 // 8, dtype=torch.uint8)]
    for part in torch.arange(len(pairs)).split(max(1, _MOST_CELLS // block_size**2)):
        p, k = (tiles[part].positions(block_size) for tiles in (pairs.q, pairs.k))
        cells = mask.holds(p[:, :, None], k[:, None, :], frame)
        bitmaps.append(pack(cells.expand(len(part), block_size, block_size)))
    return torch.cat(bitmaps)
