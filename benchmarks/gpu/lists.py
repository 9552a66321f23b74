"""Attention over lists of single keys, as an indexer chooses them: right, without waits, timed."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.ground.rows import first_in_row

from ..measure import Row
from .calls import BOUND, exact
from .device import DEVICE, HALF, captured, inputs, refuse, sized, synchronize, waits_are_errors
from .peers import checked, dense, flops
from .speed import sums
from .timing import Call, error_of_rows, largest, prepared, relative, taken, with_gradients


def drawn(tables: int, length: int, slots: int, seed: int = 0) -> Tensor:
    """Draws lists [1, tables, length, slots] of earlier keys, with empty slots and repeats."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(1, tables, length, slots, generator=generator)
    found = (places * torch.arange(1, length + 1)[:, None]).long()
    found[..., 0] = torch.where(found[..., 0] % 3 == 0, -1, found[..., 0])
    return found.to(DEVICE)


def args_of(
    heads: int, kv_heads: int, length: int, width: int, value_dim: int, seed: int = 0
) -> list[Tensor]:
    """Draws query, key and value, the values of another head dim than the keys."""
    query, key, value = inputs(heads, length, width, kv_heads=kv_heads, seed=seed)
    return [query, key, value[..., :value_dim].contiguous()]


def right() -> Iterator[Row]:
    """Checks lists alone, beside a window, and of latents, forward and backward."""
    length = sized(700, 40)
    small, wide = sized((64, 128), (16, 16)), sized((576, 512), (48, 32))
    shapes: dict[str, tuple[int, int, tuple[int, int], int]] = {
        "a list for each kv head": (8, 2, (small[0], small[0]), sized(96, 9)),
        "one list for 16 heads": (16, 1, (small[1], small[1]), sized(200, 12)),
        "latents, one list": (16, 1, wide, sized(128, 10)),
    }
    for name, (heads, kv_heads, (width, value_dim), slots) in shapes.items():
        args = [x.requires_grad_() for x in args_of(heads, kv_heads, length, width, value_dim)]
        chosen = sr.SelectedBlocks(drawn(kv_heads, length, slots), 1)
        patterns = {"alone": chosen & sr.Causal()}
        if width <= 256:  # tiles hold narrower keys than lists
            patterns["beside a window"] = (chosen | sr.SlidingWindow(sized(63, 5))) & sr.Causal()
        for case, pattern in patterns.items():
            options: dict[str, Any] = {"softcap": 20.0} if case == "alone" else {}
            out = sr.attention(*args, pattern, backend="triton", **options)
            grad = torch.randn_like(out)
            got = [out, *torch.autograd.grad(out, args, grad)]
            errors = [relative(a, b) for a, b in zip(got, exact(args, pattern, grad, **options),
                                                     strict=True)]  # fmt: skip
            yield {"pattern": name, "case": case, "slots": slots, "head_dim": width,
                   "error": largest(errors, BOUND, f"{name}, {case}")}  # fmt: skip


def without_waiting() -> Iterator[Row]:
    """Checks that a call over new lists waits for nothing, and that a graph of it replays."""
    heads, kv_heads, length, width, slots = sized((8, 2, 1024, 64, 128), (2, 1, 40, 16, 8))

    def call(args: Sequence[Tensor], indices: Tensor) -> tuple[Tensor, ...]:
        pattern = sr.SelectedBlocks(indices, 1) & sr.Causal()
        out = sr.attention(*args, pattern, backend="triton")
        return (out, *torch.autograd.grad(out, args, out.detach()))

    for attempt in range(3):
        args = [x.requires_grad_() for x in inputs(heads, length, width, kv_heads=kv_heads)]
        indices = drawn(kv_heads, length, slots, attempt)
        synchronize()
        if attempt < 2:  # these compile kernels and fill caches
            call(args, indices)
            continue
        with waits_are_errors():
            found = call(args, indices)
        synchronize()
        if not all(bool(x.isfinite().all()) for x in found):
            refuse("lists without waiting are no numbers")
    yield {"pattern": "lists", "case": "forward+backward", "waits": 0}
    replay, errors = captured(partial(call, args, indices)), []
    for seed in (7, 8):
        indices.copy_(drawn(kv_heads, length, slots, seed))
        got = replay()
        synchronize()
        pattern = sr.SelectedBlocks(indices.clone(), 1) & sr.Causal()
        want = exact(args, pattern, got[0])
        errors += [relative(a, b) for a, b in zip(got, want, strict=True)]
    yield {"pattern": "lists", "case": "a replayed graph",
           "error": largest(errors, BOUND, "a graph over lists")}  # fmt: skip


def distinct(chosen: Tensor) -> int:
    """Counts the pairs of lists [1, 1, length, slots]: a repeated key of a query is one pair."""
    return int(first_in_row(chosen, torch.iinfo(chosen.dtype).max).sum())


def timed(heads: int, width: int, value_dim: int, slots: int, length: int) -> Iterator[Row]:
    """Times one list for all heads, forward and then with backward, beside dense attention."""
    args = args_of(heads, 1, length, width, value_dim)
    grad = torch.randn(1, heads, length, value_dim, device=DEVICE, dtype=HALF)
    chosen = drawn(1, length, slots)
    pattern = sr.SelectedBlocks(chosen, 1) & sr.Causal()
    share = distinct(chosen) / length**2
    calls: dict[str, Callable[[], Tensor]] = {
        "ours": partial(sr.attention, *args, pattern, backend="triton")
    }
    if width == value_dim:
        calls |= dense(args)
    for backward in (False, True):
        errors: dict[str, float] = {}

        def ready(name: str, call: Any, backward: bool = backward, errors: Any = errors) -> Call:
            own = pattern if name == "ours" else sr.Full()
            if not backward:
                return checked(name, call, partial(error_of_rows, args=args, pattern=own), errors)

            def error(got: Sequence[Tensor]) -> float:
                return largest([sums(args, grad, got, call)], 0.05, f"the gradient of {name}")

            return checked(name, with_gradients(call, args, grad), error, errors)

        running, failed = prepared(dict(calls), ready)
        case = "forward+backward" if backward else "forward"
        yield from ({**row, "case": case} for row in failed)
        for name, time in taken(running).items():
            density = share if name == "ours" else 1.0
            work = flops(heads, density * length**2, (width + value_dim) / 2, backward)
            yield {"backend": name, "case": case, "dtype": str(HALF)[6:], "tokens": length,
                   "heads": heads, "kv_heads": 1, "head_dim": width, "value_dim": value_dim,
                   "slots": slots, "density": density, **time,
                   "tflops": work / time["ms"] / 1e9, "error": errors[name]}  # fmt: skip
