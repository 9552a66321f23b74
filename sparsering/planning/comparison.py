"""`sr.compare`: a pattern beside dense attention, measured here on the caller's own tensors.

    print(sr.compare(query, key, value, sr.SlidingWindow(1023) & sr.Causal()))

`sparsering try` compares a whole model by the same functions.
"""

import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..checks import check_inputs
from ..functional import attention
from ..ground.arguments import checked_number, shortened
from ..ground.keywords import class_with_hints, with_hints
from ..ground.progress import progress
from ..ground.turns import in_turns, timed
from ..patterns.algebra import Pattern
from ..patterns.positions import Causal
from .fit import numbers_in
from .sizes import show_bytes, show_seconds

_ROUNDS = 5
_ROWS = 64  # number of queries whose outputs are compared, if comparing all takes too long
_ALL_ROWS = 1 << 24  # all outputs are compared up to this number of pairs
_BACKWARD = 3.5  # a dense call with backward takes at most this many times a forward call

Calls = Mapping[str, Callable[[], object]]


class Cost(NamedTuple):
    """Median seconds of a call, and the memory that it adds at its peak (0 bytes if unknown)."""

    seconds: float
    bytes: int


@class_with_hints
@dataclass(frozen=True, repr=False)
class Comparison:
    """Holds what `compare` measured; `print` shows it in four lines.

    Attributes:
        pattern: the pattern.
        error: largest difference from float64 softmax over the pattern, relative to its largest
            number.
        density: pairs of the pattern over those of the dense attention, `Causal()` or `Full()`.
        forward, training: costs of a forward pass, and of one with its backward pass.
        dense_forward, dense_training: the same of `scaled_dot_product_attention` over all pairs,
            causal where the pattern is; None where it would take more than the time given.
    """

    pattern: Pattern
    error: float
    density: float
    forward: Cost
    training: Cost
    dense_forward: Cost | None
    dense_training: Cost | None

    def __repr__(self) -> str:
        call = f"attention(query, key, value, {shortened(str(self.pattern), 120)})"
        lines = [
            f"equal     to float64 softmax over the pattern within {self.error:.0e} of its largest",
            beside("forward", self.forward, self.dense_forward, "dense"),
            beside("training", self.training, self.dense_training, "dense"),
            f"write     {call}",
        ]
        return "\n".join(lines)


@with_hints()
def compare(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, seconds: float = 20.0
) -> Comparison:
    """Measures a pattern beside dense attention on these tensors, on this machine.

    The error is taken on all outputs, or on 64 queries where there are more than 2^24 pairs. Times
    are medians of calls in turns. Memory is what a first call adds: workspace, results, layout and,
    with a backward pass, what it saves and the gradients.

    Args:
        query, key, value: as for `attention`; only their values and shapes are used.
        pattern: a mask or a mixture, as for `attention`.
        seconds: about the most time for dense attention, forward and with backward each. It is
            left out where even one call is expected to take longer.

    Returns: a `Comparison`, which `print` shows.

    Raises: as `attention`; ValueError for `seconds` that are not above 0.

    Example:
        >>> query, key, value = torch.randn(3, 1, 8, 16384, 64)
        >>> print(compare(query, key, value, SlidingWindow(1023) & Causal()))
    """
    if not checked_number("seconds", seconds, 0):
        raise ValueError("seconds must be above 0, got 0; leave it out for 20")
    check_inputs(query, key, value, pattern)
    query, key, value = (x.detach() for x in (query, key, value))
    (heads, q_len), (kv_heads, kv_len) = query.shape[1:3], key.shape[1:3]
    causal = q_len == kv_len and hides_later_keys(pattern, q_len, heads)
    dense = partial(_dense, causal=causal)
    layout = pattern.layout(q_len, kv_len, num_heads=heads, num_kv_heads=kv_heads)
    pairs = q_len * (q_len + 1) / 2 if causal else q_len * kv_len
    with torch.no_grad():
        error = error_of(attention(query, key, value, pattern), query, key, value, pattern)
        few = query[:, :, :1024]
        expected = timed(partial(_dense, few, key, value, False), query.device)
        expected *= q_len / max(1, few.shape[2]) / (2 if causal else 1)
    costs: list[Cost | None] = []
    for title, run, factor in (("forward", _forward, 1.0), ("training", _training, _BACKWARD)):
        calls: dict[str, Callable[[], object]] = {
            "ours": partial(run, lambda q, k, v: attention(q, k, v, pattern), query, key, value)
        }
        if factor * expected <= seconds:
            calls["dense"] = partial(run, dense, query, key, value)
        found = measured(title, calls, query.device, seconds)
        costs += [found["ours"], found.get("dense")]
    forward, dense_forward, training, dense_training = costs
    assert forward is not None and training is not None
    density = layout.num_pairs / max(1.0, pairs)
    return Comparison(
        pattern=pattern,
        error=error,
        density=density,
        forward=forward,
        training=training,
        dense_forward=dense_forward,
        dense_training=dense_training,
    )


def error_of(out: Tensor, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> float:
    """Returns the largest difference of `out` from a float64 softmax, over the largest output.

    If there are many pairs, only some queries are compared.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    if not out.numel():
        return 0.0
    exact = partial(
        attention, key=key.double(), value=value.double(), pattern=pattern, backend="reference"
    )
    first = kv_len - q_len
    if out.shape[:3].numel() * kv_len <= _ALL_ROWS:
        wanted = exact(query.double())
    else:
        rows = torch.linspace(0, q_len - 1, min(q_len, _ROWS)).long().tolist()
        found = [exact(query[:, :, r : r + 1].double(), q_start=first + r) for r in rows]
        wanted, out = torch.cat(found, 2), out[:, :, rows]
    largest = wanted.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    return float((out - wanted).abs().amax() / largest)


def hides_later_keys(pattern: Pattern, length: int, heads: int) -> bool:
    """Whether no query sees a later key, tested on at most 2,048 tokens."""
    length = min(length, 2048)
    try:
        both = (pattern, pattern & Causal())
        own, within = (x.layout(length, num_heads=heads).num_pairs for x in both)
    except (ValueError, TypeError):  # a pattern of fixed length, or one that `&` refuses
        return False
    return bool(own == within)


def measured(title: str, calls: Calls, device: torch.device, seconds: float) -> dict[str, Cost]:
    """Measures calls by name: the memory of each first, then times in rounds of one run each.

    The rounds end once they have taken about `seconds`. `title` names the progress that is shown.
    """
    peaks: dict[str, int] = {}
    with progress(title, len(calls) * (1 + _ROUNDS), "call") as work:
        for name, call in calls.items():
            peaks[name] = peak_of(call, device)
            work.advance(note=name)

        def after(name: str, rounds: int) -> None:
            work.expect(len(calls) * (1 + rounds))
            work.advance(note=name)

        clock = partial(timed, device=device)
        times = in_turns(calls, clock, most=_ROUNDS, seconds=seconds, after=after)
    return {name: Cost(statistics.median(times[name]), peaks[name]) for name in calls}


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Runs a call; returns by how many bytes it raised the peak of memory.

    On a GPU that is memory of torch's allocator, elsewhere resident memory of the process. Returns
    0 if the system does not report it, or reports the rise only after the call.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    status, before = Path("/proc/self/status"), 0
    with suppress(OSError, KeyError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = numbers_in(status)["VmRSS:"]
    call()
    return 1024 * max(0, numbers_in(status)["VmHWM:"] - before) if before else 0


def beside(name: str, ours: Cost, theirs: Cost | None, peer: str) -> str:
    """Returns a line that compares time and memory of our call with those of another, `peer`."""
    if theirs is None:
        memory = f"; memory {show_bytes(ours.bytes)}" if ours.bytes else ""
        own = f"{name:<9} {show_seconds(ours.seconds)}{memory}"
        return f"{own}; {peer} takes longer than the seconds given"
    faster = theirs.seconds / ours.seconds
    word = f"{faster:.1f} times faster" if faster >= 1 else f"{1 / faster:.1f} times slower"
    text = f"{name:<9} {show_seconds(ours.seconds)}, {peer} {show_seconds(theirs.seconds)}: {word}"
    if not (ours.bytes and theirs.bytes):
        return text
    return f"{text}; memory {show_bytes(ours.bytes)}, {peer} {show_bytes(theirs.bytes)}"


def _dense(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Computes dense attention with torch's own function, causal or over all pairs."""
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)


def _forward(call: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Runs `call(*inputs)` without gradients; `compare` measures its time and memory."""
    with torch.no_grad():
        call(*inputs)


def _training(call: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Runs `call(*inputs)` forward and backward; `compare` measures its time and memory."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    call(*leaves).sum().backward()
