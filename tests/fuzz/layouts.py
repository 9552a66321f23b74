"""Tables of layouts: the compiled kernel's equal those of torch's operators, bit for bit."""

from dataclasses import dataclass
from itertools import product

import hypothesis.strategies as st
from layouts.test_native import check
from oracles.patterns_oracle import Spec, build
from oracles.strategies import Scene, scenes

from sparsering.patterns.algebra import Frame

from . import long, specs
from .attack import Cell

SIZES = ("16", "32", "48", "64", "112", "128", "256")
FEW, MANY = "few tokens", "to 4,096 tokens"
CELLS = [Cell(size, name, FEW, "-") for size, name in product(SIZES, specs.CLASSES)]
CELLS += [Cell(size, name, MANY, "-") for size, name in product(SIZES, long.CLASSES)]


@dataclass(frozen=True)
class Tables:
    """One layout, compiled twice."""

    spec: Spec
    scene: Scene
    block_size: int

    def cells(self) -> list[Cell]:
        form = FEW if self.scene.kv_len <= 70 else MANY
        return [Cell(str(self.block_size), c, form, "-") for c in specs.classes_of(self.spec)]

    def check(self) -> None:
        frame = Frame.build(*self.scene.arguments.values())
        check(build(self.spec), frame, self.block_size)


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Tables:
    """Draws layouts of a cell's block size, class of patterns and length."""
    if cell.backend == FEW:
        spec, scene = draw(specs.specs_with(cell.pattern, draw(scenes(max_length=70))))
    else:
        scene = draw(scenes(max_length=1, max_heads=4))
        kv_len = draw(long.lengths(71))
        q_len = kv_len if draw(st.booleans()) else draw(st.integers(0, kv_len))
        heads = scene.num_heads, scene.num_kv_heads
        scene = Scene(q_len, kv_len, *heads, scene.q_start, 1 + draw(st.integers(0, 1)))
        spec = draw(long.long_specs(cell.pattern, scene))
    return Tables(spec, scene, int(cell.option))
