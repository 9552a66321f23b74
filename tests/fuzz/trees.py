"""Calls with trees: joined chains, nodes without tokens, one tree per batch entry, distances."""

from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import hypothesis.strategies as st
from oracles import strategies as drawn
from oracles.patterns_oracle import Spec, leaves
from oracles.strategies import Scene

from . import calls, specs
from .attack import Cell

SHAPES = ("chain", "nodes without tokens", "one tree per entry", "packed", "joined")
OPTIONS = ("none", "q_start", "block_size", "groups", "distance_bias", "sink", "dropout")
CELLS = [
    Cell(option, *rest)
    for option, *rest in product(OPTIONS, SHAPES, ("default", "cpu", "gather"), calls.DTYPES)
    if (option, rest[0]) != ("distance_bias", "packed")
]
INNER = st.one_of(
    st.just(("Causal",)),
    st.tuples(st.just("SlidingWindow"), st.integers(0, 12) | st.just(100), st.just(0)),
    st.sampled_from((("Full",), ("Dilated", 9, 2), ("GlobalTokens", 3))),
    st.just(("LongNet", (4, 9), (1, 2))),
)


@dataclass(frozen=True)
class InTree(calls.Call):
    """One call whose pattern has trees."""

    def cells(self) -> list[Cell]:
        trees = [leaf[1:3] for leaf in leaves(self.spec) if leaf[0] == "Tree"]
        nested = [is_nested(lengths) for lengths, _ in trees]
        entries = [tree for tree, each in zip(trees, nested, strict=True) if not each]
        for tree, each in zip(trees, nested, strict=True):
            entries += zip(*tree, strict=True) if each else []
        is_there = (
            any(up == i - 1 >= 0 for _, parents in entries for i, up in enumerate(parents)),
            any(0 in lengths for lengths, _ in entries),
            any(nested),
            "Packed" in specs.classes_of(self.spec),
            self.spec[0] != "Tree",
        )
        shapes = [shape for shape, holds in zip(SHAPES, is_there, strict=True) if holds]
        return [Cell(o, s, self.backend, self.dtype) for o in self.options() for s in shapes]


def is_nested(lengths: tuple) -> bool:
    return bool(lengths) and isinstance(lengths[0], tuple)


@st.composite
def forests(draw: st.DrawFn, total: int, shape: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draws (lengths, parents) of nodes of `total` tokens; most hang below the node before."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=2, max_size=6)))
    if shape == "nodes without tokens":
        cuts = sorted([*cuts, cuts[0]])
    lengths = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    near = st.integers(0, 3)
    parents = [-1]
    for i in range(1, len(lengths)):
        follows = draw(near) or (shape == "chain" and i == 1)
        parents.append(i - 1 if follows else draw(st.integers(-1, i - 1)))
    return lengths, tuple(parents)


@st.composite
def trees(draw: st.DrawFn, scene: Scene, shape: str) -> Spec:
    if shape == "one tree per entry":
        both = [draw(forests(scene.kv_len, shape)) for _ in range(scene.batch)]
        lengths, parents = (tuple(x) for x in zip(*both, strict=True))
    else:
        lengths, parents = draw(forests(scene.kv_len, shape))
    if draw(st.integers(0, 3)) == 0:
        length, bound = draw(drawn.bound_masks(scene, lengths, parents))
        return ("Tree", lengths, parents, length, ("&", bound, ("Causal",)))
    return ("Tree", lengths, parents, draw(INNER))


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> InTree:
    """Draws calls with a cell's option and shape of tree."""
    # Few enough pairs for the oracle to look at each, without the library's `to_dense`.
    total, batch = 2 * draw(st.integers(2, 10)), draw(st.integers(1, 2))
    heads = draw(st.sampled_from(((1, 1), (2, 2), (2, 1))))
    q_len = draw(st.sampled_from((total, total, total // 2)))
    scene = Scene(q_len, total, *heads, None, batch)
    shape = cell.pattern
    if shape == "packed":
        half = replace(scene, q_len=total // 2, kv_len=total // 2)
        spec: Spec = ("Packed", (total // 2,) * 2, draw(trees(half, "chain")))
    else:
        spec = draw(trees(scene, shape))
    if shape == "joined":
        lengths, parents = spec[1:3]
        others = [st.tuples(st.just("Tree"), st.just(lengths), st.just(parents), INNER)]
        if cell.option != "distance_bias":
            others += [trees(scene, "chain")]
            others += [drawn.drawn(name, scene) for name in ("SlidingWindow", "Documents")]
        spec = ("+" if specs.is_mixture(spec) else draw(st.sampled_from("&|+")), spec,
                draw(st.one_of(others)))  # fmt: skip
        if specs.is_mixture(spec[2]):
            spec = ("+", *spec[1:])
    call = draw(calls.cases(cell._replace(pattern="Full"), scene))
    given: dict[str, Any] = {field.name: getattr(call, field.name) for field in fields(call)}
    given |= {"spec": spec, "block_bias": None, "slot_bias": None}
    if not specs.has_distances(spec):
        given["distance_bias"] = None
    elif cell.option == "distance_bias":
        given["distance_bias"] = draw(st.tuples(st.sampled_from((3, 100)), st.booleans()))
    return InTree(**given)
