"""Long calls: to 4,096 tokens with small blocks, on 1 to 8 threads; the oracle goes by rows."""

from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from oracles import strategies as drawn
from oracles.kinds import KINDS, Scene, Spec
from oracles.patterns_oracle import is_mixture
from torch import Tensor

from . import calls, oracle, specs
from .attack import Cell

CLASSES = tuple(name for name, kind in KINDS.items() if kind.long)
OPTIONS = ("threads", "groups", "none", "scale", "q_start", "strides", "softcap", "distance_bias")
OPTIONS += ("sink", "dropout", "large scores")
CELLS = [
    Cell(*cell)
    for cell in product(OPTIONS, CLASSES, ("cpu", "gather"), ("float32", "bfloat16"))
    if cell[2:] != ("gather", "bfloat16")
]
ROWS = 128  # of the oracle at once


@dataclass(frozen=True)
class Long(calls.Call):
    """One call on some threads."""

    threads: int = 1

    def options(self) -> list[str]:
        return ["threads"] * (self.threads > 1) + super().options()

    def check(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            super().check()
        finally:
            torch.set_num_threads(before)

    def expected(
        self, tensors: dict[str, Tensor], grad_out: Tensor, grad_lse: Tensor
    ) -> oracle.Results:
        """Adds the oracle's results of some rows at a time."""
        torch.set_num_threads(1)
        scene, of_rows = self.scene, ["out", "lse", "query"]
        of_rows += ["sink"] * (self.sink == "[B, H, N]")
        parts = []
        for start in range(0, scene.q_len, ROWS):
            rows = slice(start, min(start + ROWS, scene.q_len))
            first = scene.first_position + start
            part = replace(self, scene=replace(scene, q_len=rows.stop - start, q_start=first))
            some = {n: x[:, :, rows] if n in of_rows else x for n, x in tensors.items()}
            grads = grad_out[:, :, rows], grad_lse[:, :, rows]
            parts.append(calls.Call.expected(part, some, *grads))

        def joined(of_parts: list[dict[str, Any]]) -> dict[str, Any]:
            arrays = {name: [part[name] for part in of_parts] for name in of_parts[0]}
            return {n: np.concatenate(x, 2) if n in of_rows else sum(x) for n, x in arrays.items()}

        exact, magnitude = ([getattr(x, y) for x in parts] for y in ("exact", "magnitude"))
        largest = max(part.largest_score for part in parts)
        return oracle.Results(joined(exact), joined(magnitude), largest)


@st.composite
def lengths(draw: st.DrawFn, least: int = 150) -> int:
    """Draws a number of tokens to 4,096, mostly some hundreds."""
    octave = draw(st.sampled_from((0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4)))
    return min(4096, draw(st.integers(least << octave, (least << octave + 1))))


def light(scene: Scene) -> st.SearchStrategy[Spec]:
    """Strategy of patterns of few pairs and small source."""
    kinds = ("SlidingWindow", "GlobalTokens", "Dilated", "BlockWindow")
    window = st.tuples(st.just("SlidingWindow"), st.integers(0, 20), st.integers(0, 9), st.just(1))
    columns = st.tuples(st.just("GlobalTokens"), st.integers(1, 9), st.booleans(), st.just(True))
    few = st.one_of(window, columns, st.tuples(st.just("|"), columns, window))
    return st.one_of(few, few, few, *(drawn.drawn(kind, scene) for kind in kinds))


@st.composite
def long_specs(draw: st.DrawFn, kind: str, scene: Scene) -> Spec:
    """Draws a spec of a class, at any length."""
    other = draw(light(scene))
    if kind in specs.OPERATORS:
        return (kind, draw(light(scene)), other)
    if kind == "Tree":
        spec = draw(drawn.trees(scene))
    elif kind == "Packed":
        spec = draw(drawn.packed(scene, light))
        while spec[2][0] == "KeyMask":  # of a row number each
            spec = ("Packed", spec[1], other)
    else:
        spec = draw(specs.LEAVES[kind](scene))
    form = draw(st.sampled_from(("alone", "&", "|", "+")))
    if form == "alone" or (is_mixture(spec) and form == "|"):
        return spec
    return (form, spec, other)


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Long:
    """Draws long calls with a cell's option, class of patterns, backend and dtype."""
    grouped = ((4, 1), (2, 1), (4, 2))
    heads = grouped if cell.option == "groups" else ((1, 1), (2, 2), *grouped)
    num_heads, num_kv_heads = draw(st.sampled_from(heads))
    kv_len = draw(lengths())
    batch = draw(st.integers(1, 2)) if kv_len * num_heads < 2000 else 1
    q_len = kv_len if draw(st.integers(0, 3)) else draw(st.integers(1, kv_len))
    scene = Scene(q_len, kv_len, num_heads, num_kv_heads, None, batch)
    call = draw(calls.cases(cell._replace(pattern="Full"), scene))
    given: dict[str, Any] = {field.name: getattr(call, field.name) for field in fields(call)}
    given["spec"] = draw(long_specs(cell.pattern, call.scene))
    given |= {"block_bias": None, "slot_bias": None, "half_tables": False, "autocast": False}
    given["block_size"] = draw(st.sampled_from((16, 16, 32, None)))
    given |= {name: draw(st.sampled_from((8, 8, 16, 5))) for name in ("head_dim", "value_dim")}
    if not specs.has_distances(given["spec"]):
        given["distance_bias"] = None
    threads = st.integers(2, 8)
    return Long(
        **given, threads=draw(threads if cell.option == "threads" else threads | st.just(1))
    )
