"""Launches the kernels over lists of keys.

Results are merged into those of a layout, if there is one. The host never waits for the GPU: the
device finds repeats, and sorts the items of lists by key.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ground.dropout import threshold
from ...ground.numerics import power_of_2
from ...ground.rows import distinct_in_rows
from ...ground.streams import moved
from ...layouts.lists import Coordinates, Lists
from ..problem import Problem
from .configs import Config, generation, shared_memory
from .launch import Launch, kept, kind_of, launch, padded, precision, processors, strides

MOST_LIST_DIM = 576
_FIRST = 512  # channels of a row before its rest (list_kernels.py)
_SPLITS, _COUNT = 16, 256  # parts of a distance's pairs; numbers that a program adds at a time
_PAIRS_OF_KEY = 4096  # numbers of query rows in the registers of a program that sums dK
_BYTES_OF_GROUP = 16  # least bytes of a channel of all heads of a list that sum dK by item
_BYTES_OF_ITEMS = 256 << 20  # bytes of dK and dV of items that any call may take
# programs that a multiprocessor runs at a time, keys of the smallest part of a row, parts of a row
_PROGRAMS_OF_PROCESSOR, _LEAST_KEYS, _MOST_PIECES = 2, 64, 64
_CHANNELS, _ITEMS = 512, 8  # most channels of a program that sums items; items loaded at a time


class DeviceLists(NamedTuple):
    """Lists on the device of a call, in the form that kernels read."""

    # int32 [B or 1, tables, Nq, n]: in a row, keys ascend without repeats, and -1 is behind them
    keys: Tensor
    counts: Tensor  # int32 [B or 1, tables, Nq], the number of keys of each row
    place: Tensor | None  # int32 like `keys`: `Lists.place`, if the call has a slot bias
    coordinates: Coordinates | None
    branch: int
    heads: int  # heads whose lists are read separately: those with a table, or kv heads if more


def ready_lists(lists: Lists, kv_len: int, device: torch.device) -> Lists:
    """Returns lists of kv_len keys on a call's device, in the order that kernels read.

    A row's steps are then those of the keys that it sees, whatever the slots of a list are.
    """
    keys, counts, place = moved(lists.keys, device), lists.counts, lists.place
    if counts is not None:
        return lists._replace(keys=keys, counts=moved(counts, device))
    keys, counts, slot = distinct_in_rows(keys, kv_len)
    if place is not None:
        place = moved(place, device).gather(-1, slot)
    return lists._replace(keys=keys, counts=counts, place=place)


def on_device(problem: Problem, lists: Lists) -> DeviceLists:
    """Returns lists as kernels read them, on the call's device."""
    device, at = problem.query.device, lists.coordinates
    ready = ready_lists(lists, problem.key.shape[2], device)
    assert ready.counts is not None
    if at is not None:
        at = Coordinates(*(moved(x, device).contiguous() for x in at))
    return DeviceLists(
        keys=ready.keys,
        counts=ready.counts,
        place=None if problem.block_bias is None else ready.place,
        coordinates=at,
        branch=lists.branch,
        heads=max(ready.keys.shape[1], problem.key.shape[1]),
    )


def attend_lists(
    problem: Problem, listed: DeviceLists, fresh: bool, out: Tensor, lse: Tensor
) -> None:
    """Merges attention over listed keys into `out` [B, Hq, Nq, Dv] and `lse`, in place.

    If `fresh`, it overwrites all of `out`, and `lse` holds -inf or the sinks; else `out` is
    float32.
    """
    from .list_kernels import list_forward_kernel, list_merge_kernel

    config = _config(problem, listed)
    rows = math.prod(out.shape[:3])
    pieces = _pieces(problem, listed, config)
    piece_out = piece_lse = lse  # placeholders: if no list is cut, no program writes pieces
    if pieces > 1:
        piece_lse = lse.new_empty(rows, pieces)
        piece_out = lse.new_empty(rows, pieces, out.shape[3])
    tensors = {
        **_tensors(problem, listed), "out": out, "lse": lse,
        "piece_out": piece_out, "piece_lse": piece_lse,
    }  # fmt: skip

    def build() -> list[Launch]:
        fixed = _fixed(problem, listed)
        fixed |= {
            **strides(q=problem.query, k=problem.key, v=problem.value),
            "RUNNING": not fresh,
            "SINK": problem.sink is not None,
            "CUT": pieces > 1,
            "pieces": pieces,
            **_shape(problem, listed, config),
        }
        programs = fixed["parts"] * pieces * listed.heads * len(problem.query)
        cut = Launch(list_forward_kernel, programs * problem.query.shape[2], config, fixed)
        return [cut, *[Launch(list_merge_kernel, rows, None, fixed)] * (pieces > 1)]

    kind = "forward", fresh, problem.sink is None, pieces, *_kind(problem, listed, out)
    launch(
        kept(kind, build, out.device),
        tensors | _numbers(problem, listed),
        out.device,
    )


def _pieces(problem: Problem, listed: DeviceLists, config: Config) -> int:
    """Returns in how many parts programs take the keys of a row: several if queries are few.

    A part has at least 64 keys. In order there is one, since a row's sums must not depend on how
    many rows a call has.
    """
    if problem.in_order:
        return 1
    group = problem.query.shape[1] // listed.heads
    programs = -(-group // config.rows) * listed.heads * problem.query.shape[2] * len(problem.query)
    wanted = _PROGRAMS_OF_PROCESSOR * processors(problem.query.device) // max(1, programs)
    most = listed.keys.shape[3] // _LEAST_KEYS
    return 1 << max(0, min(wanted, most, _MOST_PIECES).bit_length() - 1)


class ListGradients(NamedTuple):
    """Tensors to which the gradients of lists are written, or added if `running`."""

    query: Tensor
    key: Tensor
    value: Tensor
    running: bool


def add_gradients(
    problem: Problem,
    listed: DeviceLists,
    grad_out: Tensor,
    rows: tuple[Tensor, Tensor],
    to: ListGradients,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes dQ, dK, dV of lists; returns the gradients of the slot bias and distance bias.

    `rows` are delta and lse [B, Hq, Nq] (+inf for rows without keys). The gradient of the distance
    bias is float32 [B, Hq, 2R + 1].
    """
    from .list_kernels import list_query_kernel

    query, bias = problem.query, problem.block_bias
    delta, row_lse = rows
    learns = problem.distance_bias is not None and problem.learns_distances
    of_pairs = (*query.shape[:3], listed.keys.shape[3])
    grad_bias = None if bias is None else bias.new_zeros(of_pairs, dtype=torch.float32)
    grad_score = query.new_empty(of_pairs, dtype=torch.float32) if learns else None
    tensors = {
        **_tensors(problem, listed), "grad_out": grad_out, "delta": delta, "row_lse": row_lse,
        "grad_query": to.query,
        "grad_bias": row_lse if grad_bias is None else grad_bias,
        "grad_score": row_lse if grad_score is None else grad_score,
    }  # fmt: skip

    def build() -> list[Launch]:
        config, fixed = _config(problem, listed), _fixed_backward(problem, listed, tensors)
        fixed |= {"RUNNING": to.running, "LEARNS_DISTANCES": learns}
        fixed |= _shape(problem, listed, config)
        programs = fixed["parts"] * listed.heads * len(query) * query.shape[2]
        return [Launch(list_query_kernel, programs, config, fixed)]

    kind = "dq", to.running, learns, *_kind(problem, listed, to.query, grad_out)
    numbers = _numbers(problem, listed)
    launch(kept(kind, build, query.device), tensors | numbers, query.device)
    group, width = query.shape[1] // listed.heads, max(query.shape[3], problem.value.shape[3])
    of_keys = _by_item if sums_heads_first(group, width, query.dtype) else _by_key
    of_keys(problem, listed, tensors, to)
    return grad_bias, None if grad_score is None else _by_distance(problem, listed, grad_score)


def _fixed_backward(
    problem: Problem, listed: DeviceLists, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Returns `_fixed`, with the strides of the tensors that a backward kernel reads."""
    inputs = {"q": problem.query, "k": problem.key, "v": problem.value, "g": tensors["grad_out"]}
    row_head = tensors["delta"].stride(1)
    return {**_fixed(problem, listed), **strides(**inputs), "row_head": row_head}


def _by_key(
    problem: Problem, listed: DeviceLists, tensors: dict[str, Tensor], to: ListGradients
) -> None:
    """Writes dK and dV by a program for each key, which reads the heads of all its items."""
    from .list_kernels import list_key_kernel

    key = problem.key
    order, start = _sorted_by(listed.keys, key.shape[2])

    def build() -> list[Launch]:
        width = max(padded(problem.query), padded(problem.value))
        config = Config(rows=max(1, min(32, _PAIRS_OF_KEY // width)), streamed=0, warps=4, stages=2)
        fixed = _fixed_backward(problem, listed, tensors)
        fixed |= {"RUNNING": to.running, "ROWS": config.rows}
        return [Launch(list_key_kernel, len(key) * key.shape[1] * key.shape[2], config, fixed)]

    kind = "by key", to.running, key.shape[2], *_kind(problem, listed, to.key, tensors["grad_out"])
    sums = {"order": order, "start": start, "grad_key": to.key, "grad_value": to.value}
    numbers = _numbers(problem, listed) | _strides_of(order, start)
    launch(kept(kind, build, key.device), tensors | sums | numbers, key.device)


def sums_heads_first(group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether dK and dV are summed over the `group` heads of a list first, item by item.

    An item then writes and reads 8 bytes of each channel, where a program for each key reads the
    channel of all heads. Products of float32 leave no registers for heads wider than 256.
    """
    fits = dtype.itemsize < 4 or head_dim <= 256
    return fits and group * dtype.itemsize >= _BYTES_OF_GROUP


def queries_at_a_time(q_len: int, query_bytes: int, item_bytes: int) -> int:
    """Returns for how many queries the items' dK and dV, in float32, are in memory at a time.

    They take at most 256 MB, or as much as the query tensor if that is more, but at least those of
    a query. `item_bytes` are those of one query. Parts of a call are of nearly equal length.
    """
    most = max(1, max(_BYTES_OF_ITEMS, query_bytes) // max(1, item_bytes))
    parts = -(-q_len // most)
    return -(-q_len // parts) if parts else 1


def _by_item(
    problem: Problem, listed: DeviceLists, tensors: dict[str, Tensor], to: ListGradients
) -> None:
    """Writes dK and dV, for some queries at a time: first of each listed key, then their sums."""
    query, key, slots = problem.query, problem.key, listed.keys.shape[3]
    q_len, width = query.shape[2], query.shape[3] + problem.value.shape[3]
    item_bytes = 4 * len(query) * listed.heads * slots * width
    most = queries_at_a_time(q_len, query.nbytes, item_bytes)
    sums = to
    if most < q_len and to.key.dtype != torch.float32:
        of_key, of_value = (x.new_empty(x.shape, dtype=torch.float32) for x in to[1:3])
        sums = to._replace(key=of_key, value=of_value)
    shape = len(query), key.shape[1], most, listed.heads // key.shape[1], slots, width
    tensors = tensors | {
        "of_item": query.new_empty(shape, dtype=torch.float32),
        "grad_key": sums.key,
        "grad_value": sums.value,
    }
    for first in range(0, max(1, q_len), most):
        queries = slice(first, min(first + most, q_len))
        _add_items(problem, listed, tensors, queries, running=to.running or first > 0)
    if sums is not to:
        to.key.copy_(sums.key)
        to.value.copy_(sums.value)


def _add_items(
    problem: Problem,
    listed: DeviceLists,
    tensors: dict[str, Tensor],
    of_queries: slice,
    *,
    running: bool,
) -> None:
    """Computes dK and dV of the items of some queries, and sums them by key."""
    from .list_kernels import list_item_kernel, list_sum_kernel

    key, slots, keys = problem.key, listed.keys.shape[3], listed.keys[:, :, of_queries]
    queries, (batch, kv_heads, kv_len, head_dim) = keys.shape[2], key.shape
    if listed.heads > kv_heads:  # the lists of a kv head stand side by side, as one
        keys = keys.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(3)
    order, start = _sorted_by(keys, kv_len)
    value_dim = problem.value.shape[3]

    def build() -> list[Launch]:
        config = _config_of_items(problem, listed)
        fixed = _fixed_backward(problem, listed, tensors)
        fixed |= {"ROWS": config.rows, "KEYS": config.streamed, "STAGES": config.stages}
        blocks = -(-slots // config.streamed)
        channels = min(_CHANNELS, power_of_2(max(32, head_dim + value_dim)))
        by_key = Config(rows=1, streamed=_ITEMS, warps=max(1, channels // 128), stages=2)
        sums = {
            "kv_heads": kv_heads, "tables": order.shape[1],
            "parts": -(-(head_dim + value_dim) // channels), "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim, "CHANNELS": channels, "COUNT": _ITEMS, "RUNNING": running,
        }  # fmt: skip
        programs = blocks * queries * listed.heads * batch, batch * kv_heads * kv_len
        return [
            Launch(list_item_kernel, programs[0], config, fixed),
            Launch(list_sum_kernel, programs[1] * sums["parts"], by_key, sums),
        ]

    kind = (
        "by item", running, queries, -(-slots // 16), kv_len,
        *_kind(problem, listed, *(tensors[x] for x in ("grad_key", "grad_value", "grad_out"))),
    )  # fmt: skip
    of_call = {**tensors, "order": order, "start": start, **_numbers(problem, listed)}
    of_call |= _strides_of(order, start)
    of_call |= {"first_query": of_queries.start, "queries": queries, "items": order.shape[2]}
    launch(kept(kind, build, key.device), of_call, key.device)


def _strides_of(order: Tensor, start: Tensor) -> dict[str, int]:
    """Returns the strides between batch entries of what `_sorted_by` returned, by name."""
    several = len(order) > 1
    return {
        "order_batch": order.stride(0) if several else 0,
        "start_batch": start.stride(0) if several else 0,
    }


def _by_distance(problem: Problem, listed: DeviceLists, grad_score: Tensor) -> Tensor:
    """Sums dS [B, Hq, Nq, n] over the pairs of each distance: float32 [B, Hq, 2R + 1]."""
    from .list_kernels import list_distance_kernel

    table = problem.distance_bias
    assert table is not None
    heads, size, at = problem.query.shape[1], table.shape[2], listed.coordinates
    keys = listed.keys.repeat_interleave(listed.heads // listed.keys.shape[1], 1).long()
    if at is None:
        first = problem.layout.frame.q_start
        query = torch.arange(first, first + keys.shape[2], device=keys.device)[:, None]
        depth = keys
    else:
        query = at.query[:, 1, None, :, None]
        of_head = at.key[:, 1].repeat_interleave(listed.heads // at.key.shape[2], 1)
        of_head = of_head.expand(max(len(of_head), len(keys)), -1, -1)
        at_key = keys.clamp(min=0).flatten(2).expand(len(of_head), -1, -1)
        depth = of_head.gather(2, at_key).unflatten(2, keys.shape[2:])
    distance = (depth - query).clamp(-(size // 2), size // 2) + size // 2
    distance = torch.where(keys >= 0, distance, -1)
    order, start = _sorted_by(distance.int(), size)
    new = grad_score.new_empty(len(problem.query), heads, size, _SPLITS)
    named = {
        **_strides_of(order, start),
        "entries": order.shape[2], "lists": listed.heads, "heads": heads, "size": size,
        "splits": _SPLITS, "COUNT": _COUNT,
    }  # fmt: skip
    sums = Launch(list_distance_kernel, new.numel(), None, named)
    launch(
        [sums],
        {"grad_score": grad_score, "order": order, "start": start, "grad": new},
        grad_score.device,
    )
    return new.sum(3)


def _sorted_by(numbers: Tensor, stop: int) -> tuple[Tensor, Tensor]:
    """Sorts the items of lists [B or 1, T, Nq, n] by a number below `stop`; -1 counts as none.

    Returns: order, int64 [B or 1, T, Nq * n], the indices of the items, where equal numbers keep
    their order; start, int64 [B or 1, T, stop + 1], the place in `order` where each number begins.
    """
    ordered, order = numbers.flatten(2).sort(dim=2, stable=True)
    each = torch.arange(stop + 1, dtype=ordered.dtype, device=ordered.device)
    each = each.expand(*ordered.shape[:2], -1).contiguous()
    return order, torch.searchsorted(ordered, each)


def _tensors(problem: Problem, listed: DeviceLists) -> dict[str, Tensor]:
    """Returns the tensors that list kernels read, by name; unused ones get a placeholder."""
    at, seed, table = listed.coordinates, problem.dropout_seed, problem.distance_bias
    optional = {
        "place": listed.place,
        "bias": problem.block_bias,
        "distance_bias": table,
        "seed": None if seed is None else seed.contiguous(),
        "of_query": None if at is None else at.query,
        "of_key": None if at is None else at.key,
    }
    given = {name: listed.keys if x is None else x for name, x in optional.items()}
    inputs = {"query": problem.query, "key": problem.key, "value": problem.value}
    return {**inputs, "keys": listed.keys, "counts": listed.counts, **given}


def _numbers(problem: Problem, listed: DeviceLists) -> dict[str, int]:
    """Returns the integers that may differ between calls which share a `Launch`.

    They are lengths and strides between batch entries. The launch keeps the other integers.
    """
    return {
        "q_start": problem.layout.frame.q_start, "q_len": problem.query.shape[2],
        "kv_len": problem.key.shape[2], "slots": listed.keys.shape[3],
        **_batches(problem, listed),
    }  # fmt: skip


def _batches(problem: Problem, listed: DeviceLists) -> dict[str, int]:
    """Returns strides between batch entries, 0 where all entries share a tensor."""
    at, seed = listed.coordinates, problem.dropout_seed
    return {
        "keys_batch": listed.keys.stride(0) if len(listed.keys) > 1 else 0,
        "counts_batch": listed.counts.stride(0) if len(listed.counts) > 1 else 0,
        "query_batch": at.query.stride(0) if at is not None and len(at.query) > 1 else 0,
        "key_batch": at.key.stride(0) if at is not None and len(at.key) > 1 else 0,
        "seed_batch": 0 if seed is None else seed.shape[1],
    }


def _fixed(problem: Problem, listed: DeviceLists) -> dict[str, Any]:
    """Returns the kernel arguments that are equal for all calls that share a `Launch`."""
    query, value, table = problem.query, problem.value, problem.distance_bias
    at, dropped = listed.coordinates, problem.dropout_p or 0.0
    wide = query.shape[3] > _FIRST
    return {
        "HEAD_DIM": query.shape[3], "PADDED_DIM": _FIRST if wide else padded(query),
        "REST": max(16, power_of_2(query.shape[3] - _FIRST)) if wide else 0,
        "VALUE_DIM": value.shape[3], "PADDED_VALUE_DIM": padded(value),
        "key_heads": 1 if at is None else at.key.shape[2], "PLACED": at is not None,
        "distance_batch": 0 if table is None else table.stride(0),
        "distance_head": 0 if table is None else table.stride(1),
        "lists": listed.heads, "heads": query.shape[1], "kv_heads": problem.key.shape[1],
        "tables": listed.keys.shape[1],
        "reach": 0 if table is None else table.shape[2] // 2, "DISTANCES": table is not None,
        "branch": listed.branch, "DROPPING": bool(dropped), "least": threshold(dropped),
        "kept_scale": 1 / (1 - dropped), "scale": problem.scale,
        "CAPPED": problem.softcap is not None, "cap": problem.softcap or 1.0,
        "BIASED": problem.block_bias is not None, "PRECISION": precision(query.dtype),
        "SHARED": _values_are_keys(problem),
    }  # fmt: skip


def _values_are_keys(problem: Problem) -> bool:
    """Whether each value is the first channels of its key in memory, as with latents (MLA)."""
    key, value = problem.key, problem.value
    width = min(key.shape[3], _FIRST)
    same = key.data_ptr() == value.data_ptr() and key.stride() == value.stride()
    return same and value.shape[3] == width and padded(value) == min(padded(key), _FIRST)


def _shape(problem: Problem, listed: DeviceLists, config: Config) -> dict[str, int]:
    """Returns the sizes of a program's work: heads (rows), keys per step, parts of the heads."""
    group = problem.query.shape[1] // listed.heads
    return {
        "ROWS": config.rows, "KEYS": config.streamed, "STAGES": config.stages,
        "parts": -(-group // config.rows),
    }  # fmt: skip


def _kind(problem: Problem, listed: DeviceLists, *results: Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for calls that can share a `Launch`.

    It holds no tensor values.
    """
    at, extras = listed.coordinates, (problem.block_bias, problem.distance_bias)
    return (
        "lists", problem.query.device, problem.query.shape[2], listed.heads, listed.keys.shape[1],
        _values_are_keys(problem),
        _most_keys(problem, listed), listed.branch, problem.scale, problem.softcap,
        problem.dropout_p, None if at is None else at.key.shape[2],
        *((x is None, x is not None and (x.shape[2], x.stride())) for x in extras),
        precision(problem.query.dtype), problem.key.shape[:2], problem.key.shape[3],
        problem.value.shape[3], *(x[1:] for x in kind_of(problem.key, problem.value)),
        *kind_of(problem.query, *results),
    )  # fmt: skip


def _most_keys(problem: Problem, listed: DeviceLists) -> int:
    """Returns the list length that a config is chosen for: 16, 32 or 64 keys; in order 64."""
    return 64 if problem.in_order else min(64, max(16, power_of_2(listed.keys.shape[3])))


def _config(problem: Problem, listed: DeviceLists) -> Config:
    """Chooses rows (heads), keys per step, warps and stages, so that registers suffice."""
    group = problem.query.shape[1] // listed.heads
    width = max(problem.query.shape[3], problem.value.shape[3])
    single = problem.query.dtype == torch.float32
    size = sum(width > most for most in (64, 128, 256))
    if single:
        rows, keys, warps, stages = (
            (32, 32, 4, 2),
            (32, 32, 4, 2),
            (16, 16, 4, 2),
            (16, 16, 8, 2),
        )[size]
    else:
        rows, keys, warps, stages = (
            (64, 64, 4, 3),
            (64, 64, 8, 2),
            (32, 32, 4, 2),
            (32, 32, 8, 2),
        )[size]
    device = problem.query.device
    adds = _has_extras(problem)
    if not single and size == 3 and (generation(device) == 80 or adds):
        keys = 16
    rows = min(rows, max(16, power_of_2(group)))
    chosen = Config(
        rows=rows,
        streamed=min(keys, _most_keys(problem, listed)),
        warps=warps,
        stages=stages,
    )
    while _shared_bytes(problem, chosen, adds) > shared_memory(device) and chosen.rows > 16:
        chosen = chosen._replace(rows=chosen.rows // 2)
    return chosen


def _config_of_items(problem: Problem, listed: DeviceLists) -> Config:
    """Chooses heads per step (rows), keys of a program (streamed), warps and stages."""
    query, device = problem.query, problem.query.device
    width, single = max(query.shape[3], problem.value.shape[3]), query.dtype == torch.float32
    size = sum(width > most for most in (64, 128, 256))
    if single:
        rows, keys, warps = ((16, 32, 4), (16, 16, 8), (16, 16, 8), (16, 16, 8))[size]
    else:
        rows, keys, warps = ((32, 64, 4), (32, 64, 8), (32, 32, 8), (16, 32, 8))[size]
    most = _most_keys(problem, listed)
    wide = not single and size == 3
    if _has_extras(problem):
        rows, most = (32, 16) if wide else (rows, min(most, 32))
    rows = min(rows, max(16, power_of_2(query.shape[1] // listed.heads)))
    chosen = Config(rows=rows, streamed=min(keys, most), warps=warps, stages=2)
    if _shared_bytes_of_items(problem, chosen) > shared_memory(device):
        chosen = chosen._replace(rows=16, streamed=16 if wide else chosen.streamed)
    return chosen


def _has_extras(problem: Problem) -> bool:
    """Whether options of the call change scores or weights, which takes registers, too."""
    extras = problem.block_bias, problem.distance_bias, problem.softcap, problem.dropout_p
    return any(x is not None for x in extras)


def _shared_bytes_of_items(problem: Problem, config: Config) -> int:
    """Returns an upper bound of the shared memory that a program of `list_item_kernel` takes."""
    steps = config.stages - (generation(problem.query.device) == 80)
    tokens, pairs = config.streamed + steps * config.rows, config.rows * config.streamed
    numbers = tokens * _padded_width(problem) + 2 * pairs  # weights and gradients of scores
    return numbers * problem.query.element_size() + 12 * pairs * _has_extras(problem)


def _padded_width(problem: Problem) -> int:
    """Returns the channels of a key and its value together, as kernels compute with them."""
    width = padded(problem.query)
    if problem.query.shape[3] > _FIRST:
        width = _FIRST + max(16, power_of_2(problem.query.shape[3] - _FIRST))
    return width + padded(problem.value)


def _shared_bytes(problem: Problem, config: Config, adds: bool) -> int:
    """Returns an upper bound of the shared memory that a program of a list kernel takes."""
    width = _padded_width(problem)
    tokens = config.rows + (config.stages - 1) * config.streamed
    pairs = config.rows * config.streamed  # weights; extras stand beside them in float32
    return (tokens * width + pairs) * problem.query.element_size() + 12 * pairs * adds
