"""A multiprocessor of Hopper, running a loop: which cycle each warp issues what in.

One of its four schedulers is followed; the other three do the same, for a group of four warps is
spread over all. Each cycle it issues one instruction of one warp whose stall count has passed,
whose barriers are free and whose pipe is not taken. Products are queued for the tensor core, and
waited for where the code does so; `BAR` waits for all warps of a program.

Rates are those of NVIDIA's CUDA C++ Programming Guide (instructions a cycle and multiprocessor,
compute capability 9.0) and of the data sheet; latencies are of the size that published
micro-benchmarks found. Data that is copied in bulk is taken to be there in time; what a copy costs
in bandwidth is counted apart.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .compiled import Compiled, Instruction, columns_of

FLOPS = 4096  # of dense half precision products, a cycle and multiprocessor
SHARED_BYTES = 128  # that a multiprocessor's shared memory gives, a cycle
ROWS_OF_PRODUCT, DEPTH_OF_PRODUCT, ITEM = 64, 16, 2  # of HGMMA; bytes of an item

# Cycles that a warp's instruction takes a scheduler's pipe: 32 lanes over a quarter of the rate.
PIPES = {
    "MUFU": ("special", 8),
    **dict.fromkeys(("FFMA", "FMUL", "FADD"), ("float", 1)),
    **dict.fromkeys(("IMAD",), ("float", 2)),
    **dict.fromkeys(
        ("FMNMX", "FSEL", "SEL", "LOP3", "IADD3", "ISETP", "FSETP", "PRMT", "VIADD", "LEA", "SHF",
         "F2FP", "VIMNMX", "PLOP3", "SGXT", "FSWZADD"), ("integer", 2),
    ),
    **dict.fromkeys(("LDS", "STS", "LDSM", "STSM", "SHFL", "LDG", "STG", "LDGSTS"), ("memory", 4)),
}  # fmt: skip
LATENCIES = {"MUFU": 22, "LDS": 30, "LDSM": 33, "SHFL": 25, "LDG": 250, "SYNCS": 25, "S2R": 25}
_OTHER_LATENCY = 15
_QUEUED = 4  # products of a warp that may wait for the tensor core
_START = 30  # cycles from a group of products being issued to its first rows
_STEPS, _SKIPPED = 24, 8
_LATE = (0, 90, 170, 310, 450, 620)  # cycles that warps begin after one another: the mean of these


class Forecast(NamedTuple):
    """What a step of all programs on a multiprocessor takes, in cycles.

    Attributes:
        cycles: of a step, with everything in each other's way.
        bounds: what each unit alone would take: "tensor", "issue", "special", "float", "integer",
            "memory", "shared".
        waiting: the share of a step in which the tensor core has nothing to do.
    """

    cycles: float
    bounds: dict[str, float]
    waiting: float

    @property
    def limiter(self) -> str:
        """The unit that takes longest; "waits" where none is busy for 85% of the time."""
        unit = max(self.bounds, key=lambda name: self.bounds[name])
        return unit if self.bounds[unit] >= 0.85 * self.cycles else "waits"


def product_cycles(x: Instruction) -> tuple[float, float]:
    """Cycles of the tensor core, and of shared memory, for an HGMMA."""
    columns = columns_of(x)
    in_shared = "gdesc" in x.text.split(",")[1]  # and not in registers
    flops = 2 * ROWS_OF_PRODUCT * DEPTH_OF_PRODUCT * columns
    items = columns * DEPTH_OF_PRODUCT + in_shared * ROWS_OF_PRODUCT * DEPTH_OF_PRODUCT
    return flops / FLOPS, ITEM * items / SHARED_BYTES


def forecast(made: Compiled) -> Forecast:
    """Runs the loop of a kernel on as many programs as fit a multiprocessor."""
    programs, groups = made.per_processor, made.warps // 4
    runs = [_run(made.loop, programs, groups, late) for late in _LATE]
    cycles, busy = (sum(x) / len(runs) for x in zip(*runs, strict=True))
    return Forecast(cycles, _bounds(made.loop, programs * groups), 1 - busy / cycles)


def _bounds(loop: Sequence[Instruction], warps: int) -> dict[str, float]:
    """What each unit takes for a step of `warps` warps of a scheduler."""
    total: Counter[str] = Counter({"issue": len(loop)})
    for x in loop:
        if x.name == "HGMMA":
            tensor, shared = product_cycles(x)
            total["tensor"] += tensor  # type: ignore[assignment]
            total["shared"] += shared  # type: ignore[assignment]
        elif x.name in PIPES:
            pipe, taken = PIPES[x.name]
            total[pipe] += taken
    return {name: float(n * warps) for name, n in total.items()}


class _Warp:
    """Where a warp is, and what it waits for."""

    def __init__(self, program: int, begin: float) -> None:
        self.program = program
        self.at = self.step = 0
        self.next = begin
        self.barriers = [0.0] * 6
        self.products: list[float] = []  # when each group of products ends
        self.open: list[float] = []  # when each product of the group under way ends
        self.waits_at: float | None = None  # a barrier of the program


def _run(
    loop: Sequence[Instruction], programs: int, groups: int, late: float
) -> tuple[float, float]:
    """(cycles of a step, of which the tensor core works), in the steady state."""
    warps = [_Warp(n // groups, n * late) for n in range(programs * groups)]
    pipes: Counter[str] = Counter()
    costs = [max(product_cycles(x)) if x.name == "HGMMA" else 0.0 for x in loop]
    tensor_free = busy = now = 0.0
    begin: tuple[float, float] | None = None
    while any(w.step < _STEPS for w in warps):
        if begin is None and min(w.step for w in warps) >= _SKIPPED:
            begin = now, busy
        best: tuple[float, int, float] | None = None
        for number, w in enumerate(warps):
            if w.waits_at is not None:
                continue
            x = loop[w.at]
            ready = max(w.next, *(w.barriers[b] for b in range(6) if x.waits >> b & 1), 0.0)
            if x.name in PIPES:
                ready = max(ready, pipes[PIPES[x.name][0]])
            if x.name == "HGMMA" and len(w.open) >= _QUEUED:
                ready = max(ready, w.open[-_QUEUED])
            if "DEPBAR" in x.text and "gsb" in x.text:
                left = int(x.text.split(",")[-1].strip(), 16)
                if len(w.products) > left:
                    ready = max(ready, w.products[len(w.products) - left - 1])
            if best is None or (ready, w.step, w.at) < best[:1] + best[2:]:
                best = (ready, number, float(w.step))
        if best is None:
            break
        ready, number, _ = best
        w, now = warps[number], max(now, ready)
        x, cost = loop[w.at], costs[w.at]
        if x.name in PIPES:
            pipe, taken = PIPES[x.name]
            pipes[pipe] = now + taken  # type: ignore[assignment]
        if x.name == "HGMMA":
            start = max(tensor_free, now + (_START if not w.open else 0))
            tensor_free = start + cost
            busy += cost
            w.open.append(tensor_free)
            if "gsb" in x.text:
                w.products.append(tensor_free)
                w.open = []
        for b in x.sets:
            w.barriers[b] = max(w.barriers[b], now + LATENCIES.get(x.name, _OTHER_LATENCY))
        w.next = now + max(1, x.stall)
        w.at += 1
        if x.name == "BAR":
            w.waits_at = now
            mates = [m for m in warps if m.program == w.program]
            if all(m.waits_at is not None for m in mates):
                for m in mates:
                    m.waits_at, m.next = None, now + 20
        if w.at == len(loop):
            w.at, w.step = 0, w.step + 1
        now += 1
    assert begin is not None
    steps = sum(w.step for w in warps) / len(warps) - _SKIPPED
    return (now - begin[0]) / steps, (busy - begin[1]) / steps
