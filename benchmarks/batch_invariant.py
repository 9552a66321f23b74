"""The price of `batch_invariant` on a CPU: each kind of call in the mode and outside, in turn.

    python -m benchmarks.batch_invariant --out benchmarks/records/avx2

`batch-invariant.json`: median milliseconds of both, on one thread, their quotient, the density
of visited tiles, and the largest error of the forward in the mode in sampled rows. Dense causal
attention by torch, timed twice in the same way, is the control, which shows the noise.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsering as sr

from .measure import Row, gradient_of, inputs_of, interleaved, sampled_error, write_record

TOKENS, HEADS, WIDTH, BLOCK = 4096, 4, 64, 64


def patterns() -> dict[str, sr.Pattern]:
    """Returns a pattern of each kind of call."""
    generator = torch.Generator().manual_seed(0)
    active = torch.rand(2 * (TOKENS // BLOCK,), generator=generator) < 0.1
    return {
        "blocks": sr.Blocks(active | torch.eye(len(active), dtype=torch.bool), BLOCK),
        "window": sr.Causal() & sr.SlidingWindow(512),
        "causal": sr.Causal(),
        "LongNet": sr.Causal() & sr.LongNet((512, 1024, 2048), (1, 2, 4)),
    }


def in_mode(call: Callable[[], object], enabled: bool) -> object:
    """Runs a call in the mode, or outside of it."""
    with sr.batch_invariant(enabled):
        return call()


def price(call: Callable[[], object], rounds: int) -> Row:
    """Returns milliseconds of a call in the mode and outside, and how many times as long it is."""
    calls = {str(mode): partial(in_mode, call, mode) for mode in (True, False)}
    times = interleaved(calls, rounds)
    return {
        "in_mode_ms": times["True"], "ms": times["False"], "price": times["True"] / times["False"]
    }  # fmt: skip


def gradients(tensors: list[Tensor], pattern: sr.Pattern, mode: bool) -> Callable[[], object]:
    """Returns a call of the backward of attention, whose forward was in the mode, or was not."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with sr.batch_invariant(mode):
        out = sr.attention(*leaves, pattern)
    return partial(torch.autograd.grad, out, leaves, gradient_of(out), retain_graph=True)


def rows(dtype: torch.dtype, rounds: int) -> list[Row]:
    """Measures all kinds of calls in a dtype."""
    tensors, found = inputs_of(HEADS, TOKENS, WIDTH, dtype), []
    kind = str(dtype).removeprefix("torch.")
    for name, pattern in patterns().items():
        call = partial(sr.attention, *tensors, pattern)
        with sr.batch_invariant():
            error = sampled_error(call(), *tensors, pattern)
        same = {
            "dtype": kind,
            "pattern": name,
            "density": pattern.layout(TOKENS, num_heads=HEADS).density,
            "error": error,
        }
        found.append({**same, "call": "forward", **price(call, rounds)})
        both = {str(mode): gradients(tensors, pattern, mode) for mode in (True, False)}
        times = interleaved(both, rounds)
        quotient = times["True"] / times["False"]
        backward = {"in_mode_ms": times["True"], "ms": times["False"], "price": quotient}
        found.append({**same, "call": "backward", **backward})
        last = [tensors[0][:, :, -1:], *tensors[1:]]
        if not pattern.tensors:
            found.append(
                {
                    **same,
                    "call": "one query",
                    **price(partial(sr.attention, *last, pattern), rounds),
                }
            )
    dense = partial(F.scaled_dot_product_attention, *tensors, is_causal=True)
    found.append(
        {"dtype": kind, "pattern": "dense, by torch", "call": "control", **price(dense, rounds)}
    )
    return found


def main() -> None:
    """Measures and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [x for dtype in (torch.float32, torch.bfloat16) for x in rows(dtype, arguments.rounds)]
    for row in found:
        print(row["dtype"], row["pattern"], row["call"], f"{row['price']:.3f}")
    write_record(arguments.out, "batch-invariant", found)


if __name__ == "__main__":
    main()
