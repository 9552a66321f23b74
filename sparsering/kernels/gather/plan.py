"""How the gather backend cuts a pass into batched calls: groups of rows of one shape, and chunks
of a group.

Everything is index arithmetic on the layout's tables; no query, key or value is touched here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layouts.bitmaps import unpack
from ...layouts.layout import BlockLayout, Pass, tile_counts
from ...rows import expand_counts, mix, number_rows


@dataclass(frozen=True)
class Group:
    """Rows of one shape. A row is a few query tiles that all visit one list of key tiles.

    Attributes:
        head: [rows] which of the plan's heads the row belongs to; batch: likewise, 0 where all
            batch entries share it.
        query_tiles: [rows, t]; key_tiles: [rows, e].
        entries: [rows, e] number of each entry in its table.
        masks: [rows, e] bitmap of each entry (-1: all pairs), [1, e] where all rows share them,
            None where all pairs of all entries are in.
        num_queries, num_keys: tokens in a row's query tiles and in its key tiles.
        fresh: whether no earlier group of the pass writes these query tiles.
    """

    batch: Tensor
    head: Tensor
    query_tiles: Tensor
    key_tiles: Tensor
    entries: Tensor
    masks: Tensor | None
    num_queries: int
    num_keys: int
    fresh: bool


_plans: WeakKeyDictionary[Pass, dict[tuple[int, int], list[Group]]] = WeakKeyDictionary()


def plan(p: Pass, block_size: int, most_queries: int, most_keys: int) -> list[Group]:
    """Groups of the entries of a pass, kept for the life of the pass.

    Neighbouring query tiles with equal key lists are joined, at most `most_queries` to a row; key
    lists are cut into pieces of at most `most_keys` tiles. Entries with a bitmap are grouped apart
    from those without.
    """
    plans = _plans.setdefault(p, {})
    if (most_queries, most_keys) not in plans:
        plans[most_queries, most_keys] = list(_groups(p, block_size, most_queries, most_keys))
    return plans[most_queries, most_keys]


def _groups(p: Pass, block_size: int, most_queries: int, most_keys: int) -> Iterator[Group]:
    heads, tiles = max(p.row_ptr.shape[1], len(p.query_start)), p.query_start.shape[-1]
    tables = p.row_ptr.shape[1]
    table, entry = torch.nonzero(
        (torch.arange(p.mask.shape[-1], device=p.mask.device) < p.num_entries[..., None])
        .repeat_interleave(heads // tables, 1)
        .flatten(0, 1),
        as_tuple=True,
    )
    head = table % heads
    own = (table // heads, head * tables // heads, entry)
    row, key, mask = p.query_tiles()[own], p.key_tile[own].long(), p.mask[own].long()
    lane = head * len(p.query_start) // heads
    queries = tile_counts(p.query_start, p.query_stop, p.step, block_size)[lane, row]
    keys = tile_counts(p.key_start, p.key_stop, p.step, block_size)[lane, key]
    written = torch.zeros(len(p.row_ptr) * heads * tiles, dtype=torch.bool, device=mask.device)
    row = table * tiles + row
    with_mask = (mask >= 0) | _folded(row, mask, most_keys)[row]
    for masked in (False, True):
        kept = torch.nonzero((with_mask == masked) & (queries > 0) & (keys > 0))[:, 0]
        if not len(kept):
            continue
        begin, length, piece = _runs(row[kept], most_keys)
        if masked or most_queries == 1:
            joined = torch.arange(len(begin), device=begin.device)
        else:
            order = ((table[kept][begin] * (piece.max() + 1)) + piece).argsort(stable=True)
            begin, length, piece = begin[order], length[order], piece[order]
            lane = table[kept][begin] * (piece.max() + 1) + piece
            joined = _joined(begin, length, lane, key[kept], most_queries)
        width = torch.diff(joined, append=joined.new_tensor([len(begin)]))
        num_queries = _sums(queries[kept][begin], joined)
        num_keys = _sums(keys[kept], begin, length)[joined]
        shape = [piece[joined], width, length[joined], num_queries, num_keys]
        for rows in _equal_rows(shape):
            run = joined[rows][:, None] + torch.arange(int(width[rows[0]]), device=rows.device)
            entries = kept[
                begin[run[:, :1]] + torch.arange(int(length[run[0, 0]]), device=rows.device)
            ]
            for part, masks in _by_masks(mask[entries]) if masked else ((slice(None), None),):
                tile_rows = row[kept][begin[run[part]]]
                fresh = not written[tile_rows].any()
                written[tile_rows] = True
                yield Group(
                    batch=table[entries[part, 0]] // heads,
                    head=table[entries[part, 0]] % heads,
                    query_tiles=tile_rows % tiles,
                    key_tiles=key[entries[part]],
                    entries=entry[entries[part]],
                    masks=masks,
                    num_queries=int(num_queries[rows[0]]),
                    num_keys=int(num_keys[rows[0]]),
                    fresh=fresh,
                )


def _folded(row: Tensor, mask: Tensor, most_keys: int) -> Tensor:
    """Rows whose full entries go along with the masked ones, in one unit instead of two to merge.

    That pays where the unit is no longer than others and its mask is made once for several rows.
    """
    index = torch.arange(len(row), device=row.device)
    total = torch.bincount(row)
    place = index - (total.cumsum(0) - total)[row]
    likeness = torch.zeros_like(total).index_add_(0, row, mix(place) * (mask + 2))
    _, kind, rows_alike = likeness.unique(return_inverse=True, return_counts=True)
    masked = torch.bincount(row[mask >= 0], minlength=len(total)) > 0
    return masked & (total <= most_keys) & ((rows_alike[kind] > 1) | (len(total) <= 64))


def _runs(row: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts sorted entries into runs of one row, at most `longest` each: (begin, length, number
    within the row).
    """
    index = torch.arange(len(row), device=row.device)
    head = torch.diff(row, prepend=row[:1] - 1) != 0
    place = index - index[head][head.cumsum(0) - 1]
    begin = torch.nonzero(place % longest == 0)[:, 0]
    return begin, torch.diff(begin, append=begin.new_tensor([len(row)])), place[begin] // longest


def _joined(begin: Tensor, length: Tensor, lane: Tensor, key: Tensor, most: int) -> Tensor:
    """The first run of each row: neighbours of one lane with equal keys are joined, at most `most`
    of them.
    """
    index = torch.arange(len(begin), device=begin.device)
    before = (index - 1).clamp(min=0)
    same = (lane == lane[before]) & (length == length[before]) & (index > 0)
    run, place = expand_counts(length)
    twin = begin[before][run] + torch.minimum(place, (length[before] - 1)[run])
    differ = torch.bincount(run[key[begin[run] + place] != key[twin]], minlength=len(begin))
    head = ~same | (differ > 0)
    place = index - index[head][head.cumsum(0) - 1]
    return torch.nonzero(place % most == 0)[:, 0]


def _sums(values: Tensor, begin: Tensor, length: Tensor | None = None) -> Tensor:
    """Sums of runs of values; runs that follow each other need no lengths."""
    total = F.pad(values.cumsum(0), (1, 0))
    if length is None:
        return torch.diff(total[begin], append=total[-1:])
    return total[begin + length] - total[begin]


def _equal_rows(columns: list[Tensor]) -> Iterator[Tensor]:
    """Indices of the rows that are equal in all columns, set by set."""
    number, _ = number_rows(columns)
    order = number.argsort(stable=True)
    yield from order.split(torch.bincount(number).tolist())


def _by_masks(masks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows that share all their bitmaps set by set with [1, e]; all at once with [rows, e] where
    few share.
    """
    sets = list(_equal_rows(list(masks.unbind(1))))
    if len(sets) > max(8, len(masks) // 16):
        yield torch.arange(len(masks), device=masks.device), masks
        return
    for rows in sets:
        yield rows, masks[rows[:1]]


@dataclass(frozen=True)
class Chunk:
    """Some rows of a group for some heads: where their tokens are.

    Attributes:
        q: [C, g, m] rows of the flattened [B * Hq * Nq, ...] tensors, g the query heads that share
            the keys.
        k: [C, n] rows of the flattened [B * Hkv * Nk, ...] tensors.
        cells: bool [C or 1, m, n], the pairs that are in, or None where all are.
        bias: positions in a flattened [B, Hq, num_blocks] block bias, [C, g, e], and which of the
            e entries each key belongs to, [C, n]; None where there is no bias.
    """

    q: Tensor
    k: Tensor
    cells: Tensor | None
    bias: tuple[Tensor, Tensor] | None


def chunks(
    layout: BlockLayout,
    number: int,
    group: Group,
    batch: int,
    workspace: int,
    per_token: int,
    per_pair: int,
    biased: bool,
) -> Iterator[Chunk]:
    """Cuts a group of pass `number` into chunks of at most `workspace` bytes.

    `per_token` and `per_pair` are the bytes that the caller keeps of a query or key token and of a
    pair of them.
    """
    p, frame, b = layout.passes[number], layout.frame, layout.block_size
    batch_tables, heads = len(p.row_ptr), max(p.row_ptr.shape[1], len(p.query_start))
    unit_heads = max(heads, frame.num_kv_heads)  # heads that gather keys of their own
    share = frame.num_heads // unit_heads  # query heads to each of them
    device = group.head.device
    units = torch.cartesian_prod(
        torch.arange(batch // batch_tables, device=device),
        torch.arange(unit_heads // heads, device=device),
        torch.arange(len(group.head), device=device),
    )
    if not len(units):  # an empty batch
        return
    m, n = group.num_queries, group.num_keys
    per_pair = per_pair * share + 6 * (group.masks is not None and len(group.masks) > 1)
    per_unit = (share * m + n) * (per_token + 40) + m * n * per_pair
    bias = None
    for bat, hd, rows in (part.unbind(1) for part in units.split(max(1, workspace // per_unit))):
        lane = group.head[rows] * len(p.query_start) // heads
        bat, hd = bat + group.batch[rows], hd + group.head[rows] * (unit_heads // heads)
        q_head = hd[:, None] * share + torch.arange(share, device=device)
        kv_head = hd * frame.num_kv_heads // unit_heads
        q, real_q = _positions(
            p.query_start, p.query_stop, lane, group.query_tiles[rows], p.step, b
        )
        k, real_k = _positions(p.key_start, p.key_stop, lane, group.key_tiles[rows], p.step, b)
        ragged = q[0].numel() * k[0].numel() != m * n
        cells = None
        if group.masks is not None:
            masks = group.masks if len(group.masks) == 1 else group.masks[rows]
            full = torch.full_like(p.bitmaps[:1], 255)
            cells = (
                unpack(torch.cat((p.bitmaps, full))[masks], b).transpose(1, 2).flatten(2)
            )  # [C or 1, b, e * b]
            if ragged:
                pairs = real_q[:, :, None] & real_k[:, None, :]
                cells = cells.expand(pairs.shape)[pairs].view(-1, m, n)
        if biased:
            tables = layout.table_shape
            table = (bat[:, None] * (tables[0] > 1), q_head * tables[1] // frame.num_heads)
            first = (bat[:, None] * frame.num_heads + q_head) * layout.num_blocks
            first = first + layout.first_entry[number][table]
            slots = torch.arange(k.shape[1], device=device).div(b, rounding_mode="floor")
            slots = slots.expand(k.shape)
            bias = (
                first[..., None] + group.entries[rows][:, None],
                slots[real_k].view(-1, n) if ragged else slots,
            )
        if ragged:
            q, k = q[real_q].view(-1, m), k[real_k].view(-1, n)
        first_q = (bat[:, None] * frame.num_heads + q_head) * frame.q_len
        first_k = (bat * frame.num_kv_heads + kv_head) * frame.kv_len
        yield Chunk(first_q[..., None] + q[:, None], first_k[:, None] + k, cells, bias)


def _positions(
    start: Tensor, stop: Tensor, lane: Tensor, tiles: Tensor, step: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """[C, t * block_size] positions of some tiles, and which of them are real."""
    first, end = (edge[lane[:, None], tiles][..., None] for edge in (start, stop))
    positions = (first + step * torch.arange(block_size, device=start.device)).flatten(1)
    return positions, positions < end.expand(-1, -1, block_size).flatten(1)
