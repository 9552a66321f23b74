"""Models of transformers under `parallelize`: gloo processes compute what one process computes."""

import functools
from dataclasses import dataclass
from itertools import product
from typing import Any

import hypothesis.strategies as st
import torch
from helpers.ring_workers import Workers
from oracles.patterns_oracle import Spec, build

from .attack import Cell
from .models import layer_specs

# isort: split
from parallel_cases import BUILDERS, Case, batch, check  # its folder is on the path now

SHARDINGS = ("contiguous", "zigzag", "balanced", "auto")
ROWS = ("whole", "left", "right", "packed")
CELLS = [Cell(*cell) for cell in product(SHARDINGS, ROWS, BUILDERS, ("float64", "float32"))]
MOST = 3  # ranks


@dataclass(frozen=True)
class Shared:
    """One training step of a model by some ranks."""

    family: str
    rows: str
    sharding: str
    dtype: str
    world: int
    length: int
    cut: int  # tokens of padding, or of the first document
    spec: Spec | None
    loss: str

    def cells(self) -> list[Cell]:
        return [Cell(self.sharding, self.rows, self.family, self.dtype)]

    def check(self) -> None:
        padding = {self.rows: (self.cut, self.cut // 2)} if self.rows in ("left", "right") else {}
        inputs: dict[str, Any] = batch(self.length, **padding)
        if self.rows == "packed":
            places = torch.arange(self.length)
            places[self.cut :] -= self.cut
            inputs["position_ids"] = places[None].expand(2, -1)
        if self.family.endswith("-tokens"):
            labels = inputs["labels"]
            inputs["labels"] = torch.where(labels < 0, labels, labels % 5)
        implementation = "eager" if self.spec is None else "sparsering"
        if self.rows == "packed" and self.family.startswith(("bert", "modernbert", "gpt-oss")):
            implementation = "sparsering"  # eager does not see their documents
        case = Case(
            self.family,
            inputs,
            apply=None if self.spec is None else build(self.spec),
            sharding=self.sharding,
            loss=self.loss,
            dtype=getattr(torch, self.dtype),
            implementation=implementation,
        )
        check(workers(), case, self.world)


@functools.cache
def workers() -> Workers:
    return Workers(MOST)


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Shared:
    """Draws a model and a batch of a cell's sharding, rows, family and dtype."""
    length = draw(st.integers(5, 30))
    return Shared(
        cell.backend,
        cell.pattern,
        cell.option,
        cell.dtype,
        draw(st.integers(1, MOST)),
        length,
        draw(st.integers(1, length - 3)),
        draw(st.none() | layer_specs()),
        draw(st.sampled_from(("mean", "share"))),
    )
