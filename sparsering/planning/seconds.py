"""Predicts the seconds of a call on this machine from three short calls, which it measures once.

    seconds = a + b x pairs in visited blocks x head dim + c x elements of queries and keys

A tiny call gives a. Causal attention and a narrow window then give b and c. They are measured when
a process first asks for a backend, dtype, head dim and number of threads. Building a layout does
not count. Keys that queries list one by one have rates of their own, from two more calls.
"""

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..functional import attention
from ..ground.numerics import round_up
from ..ground.turns import timed
from ..kernels.backends import block_size_of
from ..patterns.algebra import Frame, Pattern
from ..patterns.positions import Causal, SlidingWindow
from ..patterns.selected import SelectedBlocks
from .counts import Counts, counts_of
from .memory import CallSizes, takes_heads

_PROBES: tuple[tuple[Pattern, int], ...] = (
    (Causal(), 64),
    (Causal(), 2048),
    (SlidingWindow(64), 8192),
)
_HEADS = 4
_LISTED = (2048, 8), (1024, 128)  # (tokens, keys per query) of the calls that give rates of lists
_BLOCK_SIZE = 64
_ROUNDS = 3  # only the fastest round counts, because other work on the machine only adds time


class _Rates(NamedTuple):
    """The constants a, b and c of the module's formula, measured for a backend on this machine."""

    call: float  # seconds of any call
    pair: float  # seconds of a channel of a pair in a visited block
    row: float  # seconds of a channel of a query, or of a key that is copied


def seconds_of(backend: str, counts: Counts, call: CallSizes, backward: bool) -> float:
    """Predicts the seconds of a call from measured rates.

    Rates of a new backend, dtype, head dim or number of threads are measured first, in some 0.2 s.
    """
    kind = backend, call.dtype, call.head_dim, backward, torch.get_num_threads()
    rates = _rates(*kind)
    pairs, rows = _amounts(counts, call, backward)
    seconds = rates.call + rates.pair * pairs + rates.row * rows
    if counts.listed_pairs:
        pair, query = _rates_of_lists(*kind)
        heads = call.batch_size * counts.frame.num_heads
        seconds += pair * heads * counts.listed_pairs * call.head_dim
        seconds += query * counts.frame.q_len * heads / _HEADS
    return seconds


def _amounts(counts: Counts, call: CallSizes, backward: bool) -> tuple[float, float]:
    """Returns what the rates b and c are multiplied with: (pairs x head dim, rows x head dim).

    They are the pairs in visited blocks, and the queries and copied keys.
    """
    heads, kv_heads = (
        call.batch_size * n for n in (counts.frame.num_heads, counts.frame.num_kv_heads)
    )
    pairs = rows = 0.0
    for p in counts.passes:
        pairs += heads * p.cells
        rows += heads * p.rows
        rows += kv_heads * p.key_tiles_seen * min(counts.block_size, p.longest[1])
    if backward and takes_heads(counts, call):  # some threads compute one kv head more than others
        pairs *= round_up(kv_heads, torch.get_num_threads()) / kv_heads
    return call.head_dim * pairs, call.head_dim * rows


@cache
@torch.inference_mode(False)
def _rates(backend: str, dtype: torch.dtype, head_dim: int, backward: bool, threads: int) -> _Rates:
    """Measures the rates by the calls of `_PROBES`, once for each combination of arguments.

    `threads` is the number that torch uses. It is an argument because cached rates depend on it.
    """
    device = torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")
    seconds, amounts = [], []
    for pattern, tokens in _PROBES:
        frame = Frame.build(tokens, tokens, _HEADS, _HEADS, 0)
        shape = 1, _HEADS, tokens, head_dim
        inputs = [torch.ones(shape, dtype=dtype, device=device) for _ in range(3)]  # no draws
        size = block_size_of(backend, pattern, inputs[0], frame)
        run = partial(_call, inputs, pattern, size, backend, backward)
        run()
        seconds.append(min(timed(run, device) for _ in range(_ROUNDS)))
        counts = counts_of(pattern, frame, size)
        amounts.append(_amounts(counts, CallSizes(1, head_dim, dtype), backward))
    first, *others = seconds
    a, b = (max(x - first, 1e-9) for x in others)
    (a_pairs, a_rows), (b_pairs, b_rows) = amounts[1:]
    row = max(0.0, (b * a_pairs - a * b_pairs) / (b_rows * a_pairs - a_rows * b_pairs))
    return _Rates(first, max(0.0, a - row * a_rows) / a_pairs, row)


@cache
@torch.inference_mode(False)
def _rates_of_lists(
    backend: str, dtype: torch.dtype, head_dim: int, backward: bool, threads: int
) -> tuple[float, float]:
    """Measures seconds per channel of a listed pair, and per query in all `_HEADS` heads."""
    base = _rates(backend, dtype, head_dim, backward, threads).call
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for tokens, slots in _LISTED:
        keys = torch.randint(tokens, (tokens, slots), generator=generator)
        inputs = [torch.ones(1, _HEADS, tokens, head_dim, dtype=dtype) for _ in range(3)]
        pattern = SelectedBlocks(keys, 1) & Causal()
        run = partial(_call, inputs, pattern, _BLOCK_SIZE, backend, backward)
        run()
        fastest = min(timed(run, torch.device("cpu")) for _ in range(_ROUNDS))
        seconds.append(max(0.0, fastest - base) / tokens)
    (_, few), (_, many) = _LISTED
    pair = max(0.0, seconds[1] - seconds[0]) / ((many - few) / 2)  # half of the keys are later
    return pair / (_HEADS * head_dim), max(0.0, seconds[0] - pair * few / 2)


def _call(inputs: list[Tensor], pattern: Pattern, size: int, backend: str, backward: bool) -> None:
    """Runs one attention call, with backward if wanted; `_rates` measures its time."""
    query, key, value = (x.detach().requires_grad_(backward) for x in inputs)
    with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        out = attention(query, key, value, pattern, block_size=size, backend=backend)
        if backward:
            out.backward(inputs[0])
