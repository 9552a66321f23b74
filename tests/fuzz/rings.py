"""Rings of ranks in one process: cases of `simulate_ring` and its plan, with all its options."""

from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, ClassVar

import hypothesis.strategies as st
from oracles import ring_oracle
from oracles.attention_oracle import Case
from oracles.patterns_oracle import build
from oracles.strategies import scenes

from . import calls, specs
from .attack import Cell

SHARDINGS = ("contiguous", "zigzag", "auto", "balanced")
NOT_IN_A_RING = ("none", "q_start", "block_size", "block_bias", "slot_bias")
OPTIONS = (
    *SHARDINGS,
    "offload",
    "more ranks than tokens",
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

    world_size: int = 1
    sharding: str = "contiguous"
    offload: bool = False
    function: ClassVar[str] = "sr.distributed.simulate_ring"

    def options(self) -> list[str]:
        few = self.world_size > self.scene.kv_len
        ranks = ["offload"] * self.offload + ["more ranks than tokens"] * few
        return [self.sharding, *ranks, *super().options()]

    def keywords(self) -> dict[str, Any]:
        ranks = {name: getattr(self, name) for name in ("world_size", "sharding", "offload")}
        given = super().keywords() | ranks
        given.pop("backend")
        return given

    def check(self) -> None:
        """Compares the plan with the dense counts, and the call's results with the oracle's."""
        super().check()
        case = Case.of(self.scene, self.head_dim, self.value_dim, None)
        of_dtype = calls.DTYPES[self.dtype]
        ring_oracle.assert_plan_is_exact(
            build(self.spec), case, self.world_size, self.sharding, of_dtype
        )


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Ring:
    """Draws rings with the option, class of patterns and dtype of a cell."""
    few = cell.option == "more ranks than tokens"
    scene = draw(scenes(max_length=8 if few else 40, max_heads=4))
    scene = replace(scene, q_len=scene.kv_len, q_start=None)
    call = draw(calls.cases(cell, scene))
    given = {field.name: getattr(call, field.name) for field in fields(call)}
    given |= {"block_size": None, "block_bias": None, "slot_bias": None}
    sharding = cell.option if cell.option in SHARDINGS else draw(st.sampled_from(SHARDINGS))
    least = min(9, call.scene.kv_len + 1) if few else 1
    offload = cell.option == "offload" or draw(st.booleans())
    ranks = max(least, draw(st.one_of(st.integers(1, 3), st.integers(1, 9))))
    return Ring(**given, world_size=ranks, sharding=sharding, offload=offload)
