"""`sr.estimate`: predicts the costs of a call before anything runs.

    print(sr.estimate(sr.LongNet((2048, 32768), (1, 12)) & sr.Causal(), tokens=1 << 20, ranks=8))

Counts and bytes are arithmetic on the pattern. Seconds come from rates that `sparsering calibrate`
measured on this machine, or from the published peaks of a named machine. Each figure says which.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..checks import check_pattern
from ..dispatch import block_size_of, choose
from ..kernels.cpu.build import build_failure
from ..layouts.compile import default_block_size
from ..patterns.algebra import Frame, Pattern
from ..patterns.arguments import checked_flag, checked_integer, shortened
from .calibrate import calibrated, why_not
from .machines import Machine, named
from .memory import MEMORY, Call, Memory
from .seconds import default_seconds, is_modelled, seconds_of
from .work import Work, flops, work_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STACKS = 4 << 20  # bytes of thread stacks, and of leftovers from the allocator and first layout


class Figure(NamedTuple):
    """A number, and how it is known.

    Attributes:
        value: the number.
        known: "arithmetic"; "measured here" (from measured rates); "published" (a bound by a
            maker's peaks); "uncalibrated" (a guess). A suffix says if counts are extrapolated.
    """

    value: float
    known: str


@dataclass(frozen=True, repr=False)
class Estimate:
    """Predicted costs of a call, with the arguments that they are for; `print` shows a table.

    Attributes:
        pattern, tokens, num_heads, num_kv_heads, head_dim, dtype, batch_size, backward, ranks: the
            arguments of `estimate`.
        machine: the machine whose published figures are used; None for this machine.
        backend, block_size: those that the call would run with.
        density: share of pairs in visited blocks, as `BlockLayout.density`.
        pairs: (query, key) pairs of all heads and batch entries, with multiplicity.
        seconds: time of the call with its layout cached; over ranks, time of the busiest rank
            without waiting for data.
        peak_bytes: most memory in use at once, inputs included; of one rank.
        memory: the parts of `peak_bytes`.
        flops: FLOPs of the products on these pairs, over all ranks.
        received_bytes: bytes that each rank receives, those of the backward pass included.
        link_seconds: transfer time of the rank that receives most; None for an unknown link.
        balance: the largest number of pairs of a rank over the mean.
        sharding: the rule for which rank owns which tokens.
        hint: a way to better figures, or "".
    """

    pattern: Pattern
    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    batch_size: int
    backward: bool
    machine: Machine | None
    ranks: int
    backend: str
    block_size: int
    density: float
    pairs: float
    seconds: Figure
    peak_bytes: Figure
    memory: Memory
    flops: Figure
    received_bytes: tuple[int, ...]
    link_seconds: Figure | None
    balance: Figure
    sharding: str
    hint: str = ""

    def __repr__(self) -> str:
        told = [
            f"Estimate of {shortened(str(self.pattern), 60)}, {self.tokens} tokens, backend "
            f"{self.backend}, blocks of {self.block_size}, density {self.density:.3g}",
            f"  seconds  {self.seconds.value:.3g} ({self.seconds.known})",
            f"  peak     {_bytes(self.peak_bytes.value)} ({self.peak_bytes.known}): "
            + ", ".join(f"{name} {_bytes(size)}" for name, size in self.memory._asdict().items()),
            f"  FLOPs    {self.flops.value:.3g} ({self.flops.known}) on {self.pairs:.3g} pairs",
        ]
        if self.ranks > 1:
            link = self.link_seconds
            took = "" if link is None else f", {link.value:.3g} s ({link.known})"
            told.append(
                f"  ranks    {self.ranks}, {shortened(self.sharding, 40)}: at most "
                f"{_bytes(max(self.received_bytes))} received{took}, balance "
                f"{self.balance.value:.3g}"
            )
        return "\n".join([*told, f"  {self.hint}"] if self.hint else told)


def estimate(
    pattern: Pattern,
    *,
    tokens: int,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 1,
    backward: bool = False,
    machine: Machine | str | None = None,
    ranks: int = 1,
    sharding: str = "auto",
    backend: str | None = None,
    block_size: int | None = None,
) -> Estimate:
    """Predicts the costs of `attention`: seconds, bytes, FLOPs, and traffic between ranks.

    Args:
        pattern: a mask or a mixture.
        tokens: number of queries, and of keys.
        num_heads, num_kv_heads: query heads, and key/value heads, default as many.
        head_dim: channels of each head of query, key and value.
        dtype: float32, bfloat16 or float16.
        batch_size: number of batch entries.
        backward: adds the backward pass, and the tensors that it needs.
        machine: a machine or its name, as in `sparsering plan --gpu`; default this one.
        ranks: number of devices that share the sequence.
        sharding: as `RingPlan.build`, for more than one rank.
        backend: default the one that `attention` would run; "triton" on a named GPU.
        block_size: tokens per tile, default as `attention`.

    Returns: an `Estimate`; each figure says how it is known.

    Raises: ValueError if an argument or the pattern does not fit, or if no costs of the backend are
        known. ImportError, NotImplementedError as `attention` for a backend that cannot run here.

    Cost: that of the layout, which stays in `layout_cache`. A layout of over two million blocks
        takes at most seconds, because only some query tiles are counted. Nothing is measured.

    Example:
        >>> estimate(Causal(), tokens=4096, backward=True).peak_bytes
        Figure(value=78718212, known='arithmetic')
    """
    check_pattern(pattern)
    tokens, num_heads = (
        checked_integer("tokens", tokens, 1),
        checked_integer("num_heads", num_heads, 1),
    )
    head_dim, ranks = checked_integer("head_dim", head_dim, 1), checked_integer("ranks", ranks, 1)
    batch_size = checked_integer("batch_size", batch_size, 1)
    backward = checked_flag("backward", backward)
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        raise ValueError(
            f"dtype must be torch.float32, torch.bfloat16 or torch.float16, got "
            f"{shortened(repr(dtype))}; costs of others are not known"
        )
    batches = pattern.num_batches()
    if batches not in (None, batch_size):
        raise ValueError(
            f"batch_size must be the pattern's own {batches}, got {batch_size}; pass "
            f"batch_size={batches}"
        )
    found = machine if machine is None or isinstance(machine, Machine) else named(machine)
    frame = Frame.build(tokens, tokens, num_heads, num_kv_heads, 0)
    if not frame.num_kv_heads:
        raise ValueError("num_kv_heads must be at least 1, got 0; leave it out for num_heads")
    if batch_size * num_heads * tokens * head_dim >= 1 << 60:
        raise ValueError(
            "batch_size, num_heads, tokens and head_dim must be of fewer than 2^60 numbers, got "
            f"{batch_size} * {num_heads} * {tokens} * {head_dim}; no machine holds them"
        )
    like = torch.empty(1, dtype=dtype).expand(batch_size, num_heads, tokens, head_dim)
    chosen = _backend(backend, found, like)
    if block_size is None and found is not None and found.kind == "gpu":
        block_size = default_block_size(pattern, tokens)
    elif block_size is None:
        block_size = block_size_of(chosen, pattern, like, frame)
    cut = chosen == "cpu" and not build_failure()
    work = work_of(pattern, frame, block_size, cut=cut)
    call = Call(batch_size, head_dim, dtype)
    pairs = work.pairs * num_heads * batch_size
    rest = "" if work.known == "arithmetic" else f", {work.known}"
    shares = _shares(pattern, frame, call, backward, found, ranks, sharding, block_size)
    memory = _memory(chosen, work, call, backward, ranks, shares.received)
    total = Figure(flops(pairs, head_dim, backward), "arithmetic" + rest)
    seconds, hint = _seconds(chosen, work, call, backward, found, total.value, memory)
    busiest = shares.balance.value / ranks
    return Estimate(
        pattern=pattern,
        tokens=tokens,
        num_heads=num_heads,
        num_kv_heads=frame.num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        batch_size=batch_size,
        backward=backward,
        machine=found,
        ranks=ranks,
        backend=chosen,
        block_size=block_size,
        density=work.density,
        pairs=pairs,
        seconds=Figure(seconds.value * busiest, seconds.known + rest),
        peak_bytes=Figure(memory.peak, "arithmetic" + rest),
        memory=memory,
        flops=total,
        received_bytes=shares.received,
        link_seconds=shares.link,
        balance=shares.balance,
        sharding=shares.sharding,
        hint=hint,
    )


def _backend(backend: str | None, machine: Machine | None, like: torch.Tensor) -> str:
    """Returns the backend that would run; raises ValueError if its costs are not known."""
    if machine is None:
        chosen = choose(backend, (like, like, like))
    else:
        chosen = backend or ("triton" if machine.kind == "gpu" else "cpu")
    if chosen not in MEMORY:
        raise ValueError(
            f"backend must be one whose costs are known, {', '.join(MEMORY)}, got {chosen!r}; "
            "leave it out for the one that would run"
        )
    return chosen


class _Shares(NamedTuple):
    """Shares of the ranks: tokens they own, pairs they compute, bytes they receive."""

    sharding: str
    balance: Figure
    received: tuple[int, ...]
    link: Figure | None


def _shares(
    pattern: Pattern,
    frame: Frame,
    call: Call,
    backward: bool,
    machine: Machine | None,
    ranks: int,
    sharding: str,
    block_size: int,
) -> _Shares:
    """Returns the shares by the plan that `ring_attention` would follow."""
    if ranks == 1:
        if sharding not in ("auto", "contiguous", "zigzag", "balanced"):
            from ..distributed.sharding import chunk_owners

            chunk_owners(sharding, 1)  # raises for unknown names
        return _Shares("contiguous", Figure(1.0, "arithmetic"), (0,), None)
    from ..distributed.plan import RingPlan  # `import sparsering` must not load it

    plan = RingPlan.build(
        pattern,
        frame.kv_len,
        ranks,
        num_heads=frame.num_heads,
        num_kv_heads=frame.num_kv_heads,
        block_size=block_size,
        sharding=sharding,
    )
    loads = plan.loads
    balance = Figure(float(loads.max() / loads.mean().clamp(min=1)), "arithmetic")
    ways = (False, True) if backward else (False,)
    received = tuple(
        int(
            call.batch_size
            * sum(
                plan.bytes_received(rank, head_dim=call.head_dim, dtype=call.dtype, backward=way)
                for way in ways
            )
        )
        for rank in range(ranks)
    )
    link = None
    if machine is not None and machine.link_bandwidth is not None:
        link = Figure(max(received) / machine.link_bandwidth, machine.known)
    return _Shares(plan.sharding, balance, received, link)


def _memory(
    backend: str, work: Work, call: Call, backward: bool, ranks: int, received: tuple[int, ...]
) -> Memory:
    """Returns the memory of the call, or of one rank: an even share plus the received bytes."""
    whole = MEMORY[backend](work, call, backward)
    if ranks == 1:
        return whole._replace(workspace=whole.workspace + _STACKS)
    inputs, results, saved, workspace, layout = (-(-size // ranks) for size in whole)
    return Memory(inputs, results, saved, workspace + max(received) + _STACKS, layout)


def _seconds(
    backend: str,
    work: Work,
    call: Call,
    backward: bool,
    machine: Machine | None,
    flops: float,
    memory: Memory,
) -> tuple[Figure, str]:
    """Predicts the seconds of the whole call on one device; returns them with a hint."""
    if machine is not None:
        name = str(call.dtype).removeprefix("torch.")
        moved = memory.inputs + memory.results + memory.saved
        bound = max(flops / machine.peak(name), moved / machine.bandwidth)
        return Figure(bound, machine.known), "seconds are a bound by peaks: at least so long"
    kept = calibrated()
    if kept is not None and is_modelled(backend, work):
        try:
            return Figure(
                seconds_of(backend, work, call, backward, kept.rates), "measured here"
            ), ""
        except KeyError:  # the backend could not run during calibration
            pass
    hint = why_not() if kept is None else f"no rates of such calls of {backend} are measured"
    return Figure(default_seconds(work, call, backward), "uncalibrated"), hint


def _bytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
