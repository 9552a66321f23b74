"""`sr.estimate`: predicts the costs of a call before anything runs.

    print(sr.estimate(sr.LongNet((2048, 32768), (1, 12)) & sr.Causal(), tokens=1 << 20, ranks=8))

Counts and bytes are computed from the pattern. Seconds come from short calls, measured on this
machine, or from the published peaks of a named machine. `Figure.known` says which.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..checks import check_pattern
from ..ground.arguments import checked_flag, checked_integer, shortened
from ..ground.keywords import class_with_hints, with_hints
from ..kernels.backends import BACKENDS, block_size_of, choose
from ..kernels.cpu.build import build_failure
from ..layouts.compile import default_block_size
from ..layouts.lists import tiles_of
from ..patterns.algebra import Frame, Pattern
from .counts import Counts, counts_of, flops
from .machines import OTHER_NAMES, Machine, machine_of
from .memory import MEMORY, CallSizes, Memory
from .seconds import seconds_of
from .sizes import parse_tokens, show_bytes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STACKS = 4 << 20  # bytes of thread stacks, and of freed memory that the allocator keeps


@class_with_hints
class Figure(NamedTuple):
    """A number, and how `estimate` obtained it.

    Attributes:
        value: the number.
        known: "arithmetic" (counted), "measured here" (computed from rates measured on this
            machine) or "published" (computed from the peak rates that the maker publishes). If
            some counts are extrapolated, the text ends by saying so.
    """

    value: float
    known: str


@dataclass(frozen=True)
class Scenario:
    """The checked arguments of `estimate`: a call, its machine, and the ranks that share it."""

    pattern: Pattern
    tokens: int
    num_heads: int
    num_kv_heads: int | None
    head_dim: int
    dtype: torch.dtype
    batch_size: int
    backward: bool
    machine: Machine | None
    ranks: int
    sharding: str
    backend: str | None
    block_size: int | None

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        for name in ("tokens", "num_heads", "head_dim", "ranks", "batch_size"):
            object.__setattr__(self, name, checked_integer(name, getattr(self, name), 1))
        checked_flag("backward", self.backward)
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in _DTYPES:
            raise ValueError(
                f"dtype must be torch.float32, torch.bfloat16 or torch.float16, got "
                f"{shortened(repr(self.dtype))}; the costs of other dtypes are not known"
            )
        if (batches := self.pattern.num_batches()) not in (None, self.batch_size):
            raise ValueError(
                f"the pattern is for a batch of {batches}, got batch_size={self.batch_size}; pass "
                f"batch_size={batches}"
            )
        object.__setattr__(self, "num_kv_heads", self._frame.num_kv_heads)
        if not self.num_kv_heads:
            raise ValueError("num_kv_heads must be at least 1, got 0; omit it to use num_heads")
        if self.batch_size * self.num_heads * self.tokens * self.head_dim >= 1 << 60:
            raise ValueError(
                "the query must have fewer than 2^60 numbers, got batch_size * num_heads * tokens "
                f"* head_dim = {self.batch_size} * {self.num_heads} * {self.tokens} * "
                f"{self.head_dim}; no machine has that much memory"
            )

    @property
    def _frame(self) -> Frame:
        return Frame.build(self.tokens, self.tokens, self.num_heads, self.num_kv_heads, 0)


@class_with_hints
@dataclass(frozen=True, repr=False)
class Estimate(Scenario):
    """Predicted costs of a call, and the arguments of `estimate`; `print` shows a table.

    Attributes:
        pattern, tokens, num_heads, num_kv_heads, head_dim, dtype, batch_size, backward, ranks: the
            arguments of `estimate`.
        machine: the machine whose published figures are used; None for this machine.
        sharding: the rule for which rank owns which tokens.
        backend, block_size: the backend and the tokens per tile of the call.
        density: share of all pairs that lies in visited blocks, as `BlockLayout.density`.
        pairs: (query, key) pairs of all heads and batch entries; a pair counts once in each branch
            that contains it.
        seconds: time of the call with its layout cached; over ranks, time of the busiest rank
            without waiting for data.
        peak_bytes: most memory in use at once, inputs included; of one rank.
        memory: the parts of `peak_bytes`.
        flops: FLOPs of the products on `pairs`, over all ranks.
        received_bytes: bytes that each rank receives, in the forward and the backward pass.
        link_seconds: transfer time of the rank that receives most; None for an unknown link.
        balance: pairs of the rank that has most, divided by the mean over ranks.
    """

    num_kv_heads: int
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

    def __repr__(self) -> str:
        bound = self.seconds.known.startswith("published")
        lines = [
            f"Estimate of {shortened(str(self.pattern), 60)}, {self.tokens} tokens, backend "
            f"{self.backend}, blocks of {self.block_size}, density {self.density:.3g}",
            f"  seconds  {'at least ' * bound}{self.seconds.value:.3g} ({self.seconds.known})",
            f"  peak     {show_bytes(self.peak_bytes.value)} ({self.peak_bytes.known}): "
            + ", ".join(f"{part} {show_bytes(x)}" for part, x in self.memory._asdict().items()),
            f"  FLOPs    {self.flops.value:.3g} ({self.flops.known}) on {self.pairs:.3g} pairs",
        ]
        if self.ranks > 1:
            link = self.link_seconds
            transfer = "" if link is None else f", {link.value:.3g} s ({link.known})"
            lines.append(
                f"  ranks    {self.ranks}, {shortened(self.sharding, 40)}: at most "
                f"{show_bytes(max(self.received_bytes))} received{transfer}, balance "
                f"{self.balance.value:.3g}"
            )
        return "\n".join(lines)


@with_hints(OTHER_NAMES)
def estimate(
    pattern: Pattern,
    *,
    tokens: int | str,
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
        tokens: number of queries, and of keys, or a text such as "64K" (2^16).
        num_heads, num_kv_heads: number of query heads, and of key/value heads (default: equal).
        head_dim: channels of each head of query, key and value.
        dtype: float32, bfloat16 or float16.
        batch_size: number of batch entries.
        backward: adds the backward pass, and the tensors that it needs.
        machine: a machine or its name, as in `sparsering plan --gpu`; default this machine.
        ranks: number of devices that share the sequence.
        sharding: as in `RingPlan.build`, for more than one rank.
        backend: default the backend that `attention` would run; "triton" on a named GPU.
        block_size: tokens per tile, default as in `attention`.

    Returns: an `Estimate`; each figure says how it is known.

    Raises: ValueError for an argument out of range, a pattern for other lengths or heads, or a
        backend whose costs are not known. ImportError, NotImplementedError as `attention`.

    Cost: building the layout, which `layout_cache` stores. For a layout of over two million blocks
        only some query tiles are counted, which takes seconds. Without a named machine, the first
        estimate of a backend, dtype and head dim measures three short calls, some 0.2 s.

    Example:
        >>> estimate(Causal(), tokens=4096, backward=True).peak_bytes
        Figure(value=78718212, known='arithmetic')
    """
    return estimate_of(
        Scenario(
            pattern=pattern,
            tokens=parse_tokens(tokens) if isinstance(tokens, str) else tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            batch_size=batch_size,
            backward=backward,
            machine=machine_of(machine),
            ranks=ranks,
            sharding=sharding,
            backend=backend,
            block_size=block_size,
        )
    )


class _Plan(NamedTuple):
    """All that is known of a call without running anything: how it runs, its counts and bytes."""

    backend: str
    block_size: int
    counts: Counts
    sharding: str
    balance: float  # largest load of a rank / mean load
    received: tuple[int, ...]  # bytes that each rank receives
    memory: Memory  # of a rank


def memory_of_call(scenario: Scenario) -> Memory:
    """Returns the bytes of a call, as `estimate` predicts them, without measuring anything."""
    return _plan(scenario).memory


def _plan(scenario: Scenario) -> _Plan:
    """Chooses backend, block size and sharding of a call, and counts its work and bytes."""
    frame = scenario._frame
    backend, block_size = _backend_and_block_size(scenario, frame)
    counts = counts_of(
        scenario.pattern,
        frame,
        block_size,
        cut=backend == "cpu" and not build_failure(),
        lists=BACKENDS[backend].runs_lists,
    )
    sharding, balance, received = _shares(scenario, frame, block_size)
    whole = MEMORY[backend](counts, _call(scenario), scenario.backward)
    memory = Memory(*(-(-size // scenario.ranks) for size in whole))
    memory = memory._replace(workspace=memory.workspace + max(received) + _STACKS)
    return _Plan(
        backend=backend,
        block_size=block_size,
        counts=counts,
        sharding=sharding,
        balance=balance,
        received=received,
        memory=memory,
    )


def _call(scenario: Scenario) -> CallSizes:
    return CallSizes(scenario.batch_size, scenario.head_dim, scenario.dtype)


def estimate_of(scenario: Scenario) -> Estimate:
    """Predicts the costs of a call whose arguments are checked; `estimate` calls it."""
    machine, plan = scenario.machine, _plan(scenario)
    counts, memory = plan.counts, plan.memory
    extrapolated = "" if counts.known == "arithmetic" else f", {counts.known}"
    pairs = counts.pairs * scenario.num_heads * scenario.batch_size
    products = flops(pairs, scenario.head_dim, scenario.backward)
    link = None
    if machine is None:
        measured = seconds_of(plan.backend, counts, _call(scenario), scenario.backward)
        seconds = Figure(measured, "measured here")
    else:
        moved = memory.inputs + memory.results + memory.saved
        peak = machine.peak(str(scenario.dtype).removeprefix("torch."))
        seconds = Figure(max(products / peak, moved / machine.bandwidth), machine.known)
        if machine.link_bandwidth is not None and scenario.ranks > 1:
            link = Figure(max(plan.received) / machine.link_bandwidth, machine.known)
    chosen = {
        "sharding": plan.sharding,
        "backend": plan.backend,
        "block_size": plan.block_size,
    }
    return Estimate(
        **vars(scenario) | chosen,
        density=counts.density,
        pairs=pairs,
        seconds=Figure(
            seconds.value * (plan.balance / scenario.ranks), seconds.known + extrapolated
        ),
        peak_bytes=Figure(memory.peak, "arithmetic" + extrapolated),
        memory=memory,
        flops=Figure(products, "arithmetic" + extrapolated),
        received_bytes=plan.received,
        link_seconds=link,
        balance=Figure(plan.balance, "arithmetic"),
    )


def _backend_and_block_size(scenario: Scenario, frame: Frame) -> tuple[str, int]:
    """Returns the call's backend and block size.

    ValueError if no costs of that backend are known.
    """
    pattern, machine, size = scenario.pattern, scenario.machine, scenario.block_size
    shape = scenario.batch_size, scenario.num_heads, scenario.tokens, scenario.head_dim
    query = torch.empty(1, dtype=scenario.dtype).expand(shape)
    gpu = machine is not None and machine.kind == "gpu"
    backend: object = scenario.backend
    if backend is None:
        backend = "triton" if gpu else "cpu"
    if machine is None and isinstance(backend, str):
        backend = choose(scenario.backend, (query, query, query), (), pattern)
    if not isinstance(backend, str) or backend not in MEMORY:
        raise ValueError(
            f"backend must be one whose costs are known, {', '.join(MEMORY)}, got "
            f"{shortened(repr(backend))}; leave it out for the default backend"
        )
    if size is not None:
        return backend, size
    if gpu:
        return backend, default_block_size(pattern, scenario.tokens)
    tiles = tiles_of(pattern) if BACKENDS[backend].runs_lists else pattern
    return backend, block_size_of(backend, tiles, query, frame)


def _shares(scenario: Scenario, frame: Frame, size: int) -> tuple[str, float, tuple[int, ...]]:
    """Returns (sharding, largest load of a rank / mean load, bytes that each rank receives)."""
    if scenario.ranks == 1:
        if scenario.sharding not in ("auto", "balanced"):
            from ..distributed.sharding import chunk_owners

            chunk_owners(scenario.sharding, 1)  # raises ValueError for unknown names
        return "contiguous", 1.0, (0,)
    from ..distributed.plan import RingPlan  # slow, so `import sparsering` must not load it

    heads = {"num_heads": frame.num_heads, "num_kv_heads": frame.num_kv_heads}
    options: dict[str, Any] = {"block_size": size, "sharding": scenario.sharding, **heads}
    plan = RingPlan.build(scenario.pattern, scenario.tokens, scenario.ranks, **options)
    sizes: dict[str, Any] = {"head_dim": scenario.head_dim, "dtype": scenario.dtype}
    received = []
    for rank in range(scenario.ranks):
        parts = (plan.bytes_received(rank, backward=x, **sizes) for x in {False, scenario.backward})
        received.append(int(scenario.batch_size * sum(parts)))
    return plan.sharding, float(plan.loads.max() / plan.loads.mean().clamp(min=1)), tuple(received)
