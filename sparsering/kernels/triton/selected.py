"""Selections on a GPU: ranks blocks and builds the tables of selected blocks, in four launches.

One launch ranks (`best_blocks`), two build the layout and its work units by query tile
(`selected_layout`), and one the units by key tile, on first use. walk.py explains units. The tables
have the same bits as those of `layouts.selected_on_device` and walk.py, which are used for layouts
that are too large for these kernels. The host never waits for the device.
"""

import math
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...ground.streams import Built, capturing
from ...layouts.compile import checked_block_size
from ...layouts.layout import BlockLayout, Pass
from ...layouts.selected_on_device import selection_of
from ...patterns.algebra import Frame, Pattern, check_fits
from .call import interpreting, reasons
from .launch import Launch, kept, launch, power_of_2
from .walk import Walk, hand_over

# The numbers of best blocks that `rank_kernel` is compiled for. 256 is the most that registers
# hold.
# There are few, because a cache that grows would compile at each doubling. 1 is not among them,
# because `tl.topk` of 1 fails for a single row.
_RANKED = (2, 8, 32, 128, 256)
_MOST_ENTRIES = 128  # largest number of entries of a query tile
_MOST_KEY_TILES = 4096  # with more, counting entries by key tile would take too much memory
_LANES = 2048  # entries that one program computes
_BINS, _TILES = 1024, 128  # bins counted per loop step; bins added up per program

_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cached layouts of each selection, by its index tensor; `remember` adds the tensors."""


def best_blocks(
    scores: Tensor, k: int, *, sink: int, local: int, causal: bool, **numbers: int
) -> Tensor:
    """Ranks blocks on the GPU: the k best [entries, rows, k] by scores [entries, rows, blocks].

    `numbers` are first_row, query_block and block_size, as the kernel names them.
    """
    from .ranking import rank_kernel

    entries, rows, blocks = scores.shape
    chosen = scores.new_empty(entries, rows, k, dtype=torch.int64)
    best = next(x for x in _RANKED if x >= k)
    at_a_time = max(best, min(64 if blocks <= 64 else 256, _LANES // 2))
    of_program = max(1, _LANES // 2 // at_a_time)
    arguments = {
        "scores": scores, "chosen": chosen, "num_rows": rows, "num_blocks": blocks, "k": k,
        **dict(zip(("outer", "of_row", "of_block"), scores.stride(), strict=True)),
        "sink": min(sink, blocks), "local": min(local, blocks), "CAUSAL": causal, **numbers,
        "ROWS": of_program, "BLOCKS": at_a_time, "BEST": best,
    }  # fmt: skip
    _run(rank_kernel, entries * -(-rows // of_program), arguments, scores.device)
    return chosen


def ranks(k: int, device: torch.device) -> bool:
    """Whether `best_blocks` can rank the k best blocks on this device."""
    return 0 < k <= _RANKED[-1] and _compiles_for(device)


@cache
def _compiles_for(device: torch.device) -> bool:
    """Whether a device is a GPU on which these kernels run compiled, not interpreted."""
    if device.type != "cuda" or interpreting():
        return False
    with torch.cuda.device(device):
        return not reasons()


def remember(pattern: Pattern) -> None:
    """Marks a selection's index tensors, so that later calls store the layouts they build of them.

    The layouts of a tensor are dropped when the tensor is freed. Only tensors on a GPU count.
    """
    for x in pattern.tensors:
        if x.is_cuda and not x.is_inference():
            _kept.setdefault(x, {})


def selected_layout(
    pattern: Pattern, frame: Frame, block_size: int, device: torch.device
) -> BlockLayout | None:
    """Builds the layout of a selection on the GPU, or finds it; None if these kernels cannot."""
    if (found := selection_of(pattern, frame, block_size)) is None:
        return None
    selection, causal = found
    indices = selection.indices
    width = indices.shape[-1] * selection.block_size // block_size
    fits = width <= _MOST_ENTRIES and -(-frame.kv_len // block_size) <= _MOST_KEY_TILES
    if indices.device != device or not indices.numel() or not fits:
        return None
    if width * (frame.q_len + 2 * block_size) >= 1 << 30:
        return None
    layouts = None if capturing(device) else _kept.get(indices)
    kind = pattern.expression, frame, block_size, 0 if layouts is None else indices._version
    if layouts and (layout := layouts.get(kind)) is not None:
        return layout.ready()
    block_size = checked_block_size(block_size)
    check_fits(pattern, frame)
    rows = math.gcd(selection.row_size, block_size), selection.row_size, selection.first_row
    layout = _built(indices, rows, selection.block_size // block_size, causal, frame, block_size)
    if layouts is not None:
        layouts[kind] = layout
    return layout


def _built(
    indices: Tensor, rows: tuple[int, int, int], parts: int, causal: bool, frame: Frame, tile: int
) -> BlockLayout:
    """Builds the layout and its work units from selected blocks [B, H, R, k], by two launches.

    `rows` is (tokens per query tile, queries per row of the selection, first row); `parts` is the
    number of key tiles per block.
    """
    from .ranking import place_kernel, rows_kernel

    tokens, device = rows[0], indices.device
    indices = indices.view((1,) * (4 - indices.dim()) + indices.shape).contiguous()
    batch, heads, num_rows, slots = indices.shape
    q_start, q_stop = frame.q_start, frame.q_start + frame.q_len
    num_tiles, num_keys = -(-q_stop // tokens) - q_start // tokens, -(-frame.kv_len // tile)
    width, tables = slots * parts, batch * heads
    lanes = max(16, power_of_2(width))
    per_run, apart = _LANES // lanes, tile // tokens
    runs, bins = -(-num_tiles // per_run), 2 * num_keys + 1
    bitmaps = num_tiles if num_tiles <= apart else apart + (q_start % tokens > 0)

    new = partial(torch.empty, dtype=torch.int32, device=device)
    entries = batch, heads, num_tiles * width
    long, byte = torch.int64, torch.uint8
    query_start, query_stop = new(1, num_tiles, dtype=long), new(1, num_tiles, dtype=long)
    key_start, key_stop = new(1, num_keys, dtype=long), new(1, num_keys, dtype=long)
    of_pairs, turned = (new(bitmaps * causal, tile * tile // 8, dtype=byte) for _ in range(2))
    row_ptr, key_tile, bitmap = new(batch, heads, num_tiles + 1), new(*entries), new(*entries)
    slot, units = new(*entries, dtype=long), new(batch, heads, num_tiles, 5)
    start, count, entry = new(*entries), new(*entries), new(*entries)
    counts, offsets, begins = new(tables, num_tiles), new(tables, runs, bins), new(tables, bins)
    spans = new(tables, 2 * num_tiles + 1)
    arguments = {
        "indices": indices, "lists": new(*entries), "counts": counts,
        "lengths": new(tables, runs, width + 1), "bins": new(tables, runs, bins),
        "query_start": query_start, "query_stop": query_stop, "key_start": key_start,
        "key_stop": key_stop, "bitmaps": of_pairs, "turned": turned, "offsets": offsets,
        "begins": begins, "spans": spans, "row_ptr": row_ptr, "key_tile": key_tile,
        "bitmap": bitmap, "slot": slot, "units": units, "start": start, "count": count,
        "entry": entry, "num_rows": num_rows, "slots": slots, "parts": parts, "tokens": tokens,
        "row_size": rows[1], "first_row": rows[2], "q_start": q_start, "q_stop": q_stop,
        "kv_len": frame.kv_len, "num_tiles": num_tiles, "num_keys": num_keys, "width": width,
        "tables": tables, "num_bitmaps": bitmaps * causal, "TILE": tile, "CAUSAL": causal,
        "ROWS": per_run, "LANES": lanes, "LENGTHS": power_of_2(width + 1), "BINS": _BINS,
    }  # fmt: skip
    _run(rows_kernel, tables * runs, arguments, device)
    _run(place_kernel, tables * (runs + -(-bins // _TILES)), arguments, device)
    built = None if capturing(device) else Built.now(device)
    p = Pass(
        step=1,
        query_start=query_start,
        query_stop=query_stop,
        key_start=key_start,
        key_stop=key_stop,
        row_ptr=row_ptr,
        key_tile=key_tile,
        bitmap=bitmap,
        bitmaps=of_pairs,
        covers=(True, True),
        longest=(width, num_tiles),
        slot=slot,
    )
    Pass.transposed_bitmaps.store(p, turned)
    w = Walk(
        units=units,
        start=start,
        tokens=count,
        bitmap=bitmap,
        entry=entry,
        cuts=new(batch, heads, 0, 3),
        slots=0,
        bitmaps=of_pairs,
        built=built,
    )
    by_query = partial(_cut, w._replace(built=None), spans)
    names = "tokens q_start q_stop num_tiles num_keys width tables TILE ROWS LANES counts row_ptr"
    names = f"{names} bitmap key_tile offsets begins"
    given = {name: arguments[name] for name in names.split()}
    hand_over(p, w, by_query, partial(_walk_by_key, given, turned, tables * (runs + 1)))
    return BlockLayout(frame, tile, (p,), math.nan, built=built)


def _cut(w: Walk, spans: Tensor, limit: int) -> Walk:
    """Returns the walk by query tiles with tiles of over `limit` entries cut into several units."""
    from .ranking import units_kernel

    num_tiles = w.units.shape[2]
    arguments = _of_units(w.start, num_tiles, limit)
    given = {"spans": spans, "num_tiles": num_tiles, **arguments}
    _run(units_kernel, len(spans), given, spans.device)
    slots = 2 * w.start.shape[2] // limit
    return w._replace(units=arguments["units"], cuts=arguments["cuts"], slots=slots)


def _walk_by_key(given: dict[str, Any], bitmaps: Tensor, programs: int, limit: int) -> Walk:
    """Returns the walk by key tiles with tiles of over `limit` entries cut into several units."""
    from .ranking import keys_kernel

    like = given["bitmap"]
    start, count, key_bitmap, entry = (torch.empty_like(like) for _ in range(4))
    arguments = _of_units(like, given["num_keys"], limit)
    tables = {"start": start, "count": count, "key_bitmap": key_bitmap, "entry": entry}
    _run(keys_kernel, programs, given | arguments | tables, like.device)
    slots = 2 * like.shape[2] // limit if limit <= like.shape[2] else 0
    units, cuts = arguments["units"], arguments["cuts"]
    return Walk(
        units=units,
        start=start,
        tokens=count,
        bitmap=key_bitmap,
        entry=entry,
        cuts=cuts,
        slots=slots,
        bitmaps=bitmaps,
    )


def _of_units(like: Tensor, num_tiles: int, limit: int) -> dict[str, Any]:
    """Allocates the tensors of a walk with at most `limit` entries per unit, as kernel arguments.

    `like` is [B, H, entries].
    """
    batch, heads, size = like.shape
    spare = size // limit
    units = like.new_empty(batch, heads, num_tiles + spare, 5)
    cuts = like.new_empty(batch, heads, min(num_tiles, spare), 3)
    return {
        "units": units, "unit_lengths": like.new_empty(units.shape[:3]), "cuts": cuts,
        "limit": limit, "num_units": units.shape[2], "num_cuts": cuts.shape[2],
    }  # fmt: skip


def _run(kernel: Any, programs: int, arguments: dict[str, Any], device: torch.device) -> None:
    """Launches a kernel; calls of equal grids, options and alignments share a `Launch`.

    Lengths and positions are numbers of each call, since every token of a cache has others.
    """
    kind: list[Any] = [kernel.fn, programs, device]
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            kind.append((x.dtype, x.data_ptr() % 16))
        elif name.isupper():
            kind.append(x)

    def build() -> list[Launch]:
        fixed = {name: x for name, x in arguments.items() if name.isupper()}
        names = {name: name for name in kernel.arg_names}  # `num_tiles` is no descriptor of `num`
        return [Launch(kernel, programs, None, fixed, **names)]

    launches = kept(tuple(kind), build, device)
    launch(launches, arguments, device)
