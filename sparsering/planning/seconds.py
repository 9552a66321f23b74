"""Predicts the seconds of a call: amounts of work times this machine's rates.

    seconds = sum over kinds of work of amount x rate

`amounts` computes the amounts; `calibrate` fits the rates to measured calls, for each backend,
dtype and part of the call. Nothing is measured here. The time to build a layout does not count.
"""

import torch

from ..numerics import round_up
from .memory import Call, is_walked, takes_heads
from .work import Work, flops

Rates = dict[str, float]
"""Seconds that an amount of 1 takes, for each kind of work in `KINDS`."""

KINDS = (
    "call", "cells", "products", "entries", "masked", "rows", "strided", "merged", "keys", "bytes",
)  # fmt: skip
"""Kinds of work in a part of a call. call: always 1. cells: (query, key) pairs in visited blocks.
products: cells x head dim. entries: visited blocks. masked: pairs in blocks with a bitmap. rows:
elements of queries. strided: elements of queries and keys in tiles of step > 1. merged: elements of
queries that several passes add up. keys: elements of copied keys. bytes: bytes of results so large
that each call gets new memory for them."""

_NEW_EACH_TIME = 32 << 20  # bytes: glibc maps new, zeroed pages for larger tensors


def parts_of(backend: str, work: Work, call: Call, backward: bool) -> tuple[str, ...]:
    """Names the forward pass and the backward pass of a call, as keys of measured rates."""
    in_bfloat16 = backend != "gather" and multiplies_bfloat16(call.dtype)
    name = f"{backend} {'bfloat16' if in_bfloat16 else 'float32'}"
    unit = "heads" if backend == "gather" or takes_heads(work, call) else "tiles"
    return (f"{name} forward", *([f"{name} backward by {unit}"] if backward else []))


def amounts(part: str, work: Work, call: Call) -> list[float]:
    """Returns the amounts of all kinds of work, ordered as `KINDS`, in a part of a call."""
    frame, d = work.frame, call.head_dim
    heads = call.batch_size * frame.num_heads
    kv_heads = call.batch_size * frame.num_kv_heads
    cells = entries = masked = rows = strided = keys = 0.0
    for p in work.passes:
        cells += p.wide_cells if " bfloat16 " in part else p.cells
        entries += p.entries
        masked += p.masked * work.block_size**2
        own_rows = heads * p.rows
        own_keys = kv_heads * p.key_tiles_seen * min(work.block_size, p.longest[1])
        rows += own_rows
        keys += own_keys
        strided += (own_rows + 2 * own_keys) * (p.step > 1)
    size = d * call.dtype.itemsize
    results = [heads * frame.q_len * size]
    if "backward" in part:
        results += 2 * [kv_heads * frame.kv_len * size]
        if "heads" in part:  # some threads compute one kv head more than others
            uneven = round_up(kv_heads, torch.get_num_threads()) / kv_heads
            cells, entries, masked = cells * uneven, entries * uneven, masked * uneven
    return [
        1.0, heads * cells, heads * cells * d, heads * entries, heads * masked, rows * d,
        strided * d, rows * d * (len(work.passes) > 1), keys * d,
        float(sum(x for x in results if x >= _NEW_EACH_TIME)),
    ]  # fmt: skip


def multiplies_bfloat16(dtype: torch.dtype) -> bool:
    """Whether the dtype is bfloat16, and this machine has instructions that multiply it."""
    features: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    has_products = torch.backends.mkldnn.is_available() and features.get("avx512_f")
    return dtype == torch.bfloat16 and bool(has_products)


def seconds_of(
    backend: str, work: Work, call: Call, backward: bool, rates: dict[str, Rates]
) -> float | None:
    """Predicts the seconds of a call from measured rates.

    None if a part has no rates, or if the kernel loops over the key tiles of a pass (`is_walked`),
    which `calibrate` does not measure.
    """
    parts = parts_of(backend, work, call, backward)
    group = work.frame.num_heads / work.frame.num_kv_heads
    if not rates.keys() >= set(parts) or any(is_walked(p, group) for p in work.passes):
        return None
    return sum(seconds_by(rates[part], amounts(part, work, call)) for part in parts)


def seconds_by(rates: Rates, amount: list[float]) -> float:
    """Predicts the seconds of a part of a call from its `amounts`."""
    return sum(rates.get(kind, 0.0) * x for kind, x in zip(KINDS, amount, strict=True))


def default_seconds(work: Work, call: Call, backward: bool) -> float:
    """Guesses seconds without a calibration: 40 GFLOP/s a core, 2.5 times as many in bfloat16."""
    peak = 40e9 * (2.5 if multiplies_bfloat16(call.dtype) else 1.0)
    cells = amounts("cpu float32 forward", work, call)[1]
    return 1e-4 + flops(cells, call.head_dim, backward) / (peak * torch.get_num_threads())
