"""Rings of ranks in one process: cases of `simulate_ring` and its plan, with all its options."""

from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, ClassVar

import hypothesis.strategies as st
from oracles import ring_oracle
from oracles.attention_oracle import Case, dense_counts
from oracles.patterns_oracle import build
from oracles.strategies import scenes

from sparsering.distributed import RingPlan

from . import calls, specs
from .attack import Cell

SHARDINGS = ("contiguous", "zigzag", "auto", "balanced")
NOT_IN_A_RING = ("none", "q_start", "block_size", "block_bias", "slot_bias")
OPTIONS = (
    *SHARDINGS,
    "offload",
    "more ranks than tokens",
    "heads and tokens",
    *(option for option in calls.OPTIONS if option not in NOT_IN_A_RING),
)
CELLS = [
    Cell(option, pattern, "ring", dtype)
    for option, pattern, dtype in product(OPTIONS, specs.CLASSES, calls.DTYPES)
    if dtype != "float64" or option not in calls.HALF_ALONE
]


@dataclass(frozen=True)
class Ring(calls.Call):
    """One call of `simulate_ring`, and its plan."""

    world_size: int = 1  # with groups: ranks of the axis of tokens
    groups: int = 1  # ranks of the axis of heads
    sharding: str = "contiguous"
    offload: bool = False
    function: ClassVar[str] = "sr.distributed.simulate_ring"

    def options(self) -> list[str]:
        few = self.world_size > self.scene.kv_len
        ranks = ["offload"] * self.offload + ["more ranks than tokens"] * few
        ranks += ["heads and tokens"] * (self.groups > 1)
        return [self.sharding, *ranks, *super().options()]

    def keywords(self) -> dict[str, Any]:
        ranks = {name: getattr(self, name) for name in ("world_size", "sharding", "offload")}
        if self.groups > 1:
            ranks["world_size"] = self.groups, self.world_size
        given = super().keywords() | ranks
        given.pop("backend")
        return given

    def check(self) -> None:
        """Compares the plan with the dense counts, and the call's results with the oracle's."""
        super().check()
        case = Case.of(self.scene, self.head_dim, self.value_dim, None)
        if self.groups > 1:
            self.check_mesh(case)
            return
        of_dtype = calls.DTYPES[self.dtype]
        ring_oracle.assert_plan_is_exact(
            build(self.spec), case, self.world_size, self.sharding, of_dtype
        )

    def check_mesh(self, case: Case) -> None:
        """Compares a mesh's loads and shards with the dense counts."""
        pattern, shape = build(self.spec), (self.groups, self.world_size)
        heads = {"num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads}
        plan = RingPlan.build(pattern, case.kv_len, shape, sharding=self.sharding, **heads)
        pairs = dense_counts(pattern, case).double().mean(0).sum()
        assert abs(float(plan.loads.sum() - pairs)) < 1e-6 * (1 + float(pairs)), plan.loads
        tokens = [p for ranges in plan.ranges for a, b in ranges for p in range(a, b)]
        assert sorted(tokens) == list(range(case.kv_len)), plan.ranges


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Ring:
    """Draws rings with the option, class of patterns and dtype of a cell."""
    few = cell.option == "more ranks than tokens"
    on_mesh = cell.option == "heads and tokens"
    drawn = scenes(max_length=8 if few else 40, max_heads=4)
    scene = draw(drawn.filter(lambda x: x.num_heads > 1) if on_mesh else drawn)
    scene = replace(scene, q_len=scene.kv_len, q_start=None)
    call = draw(calls.cases(cell, scene))
    given = {field.name: getattr(call, field.name) for field in fields(call)}
    given |= {"block_size": None, "block_bias": None, "slot_bias": None}
    sharding = cell.option if cell.option in SHARDINGS else draw(st.sampled_from(SHARDINGS))
    least = min(9, call.scene.kv_len + 1) if few else 1
    offload = cell.option == "offload" or draw(st.booleans())
    ranks = max(least, draw(st.one_of(st.integers(1, 3), st.integers(1, 9))))
    heads = max(1, call.scene.num_heads)
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and n >= min(heads, 1 + on_mesh)]
    if call.dropout is not None:  # heads / groups is a power of two
        divisors = [n for n in divisors if n == 1 or (each := heads // n) & (each - 1) == 0]
    groups = draw(st.sampled_from(divisors))
    return Ring(**given, world_size=ranks, groups=groups, sharding=sharding, offload=offload)
