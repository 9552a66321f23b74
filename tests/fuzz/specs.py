"""Pattern expressions for the fuzzer: draws specs with a given class, and prints them as source.

A spec is a nested tuple as in `kinds`, whose rows say what the fuzzer may do with each class.
"""

import functools
import random
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from oracles import blocks_oracle
from oracles import strategies as drawn
from oracles.kinds import (
    EQUAL_DOCUMENTS,
    KINDS,
    OPERATORS,
    WHOLE,
    Scene,
    Spec,
    depth_in_tree,
    parts_of,
    slots_shape,
    with_parts,
)
from oracles.patterns_oracle import is_mixture, leaves

LEAVES = {
    name: functools.partial(drawn.drawn, name) for name, kind in KINDS.items() if not kind.inner
} | {"PerHead": drawn.per_heads}
CLASSES = tuple(KINDS)
LISTED = "lists of keys"
"""Class of a `SelectedBlocks` of single keys, for which backends have kernels of their own."""
INSIDE = tuple(name for name, kind in KINDS.items() if kind.inner == "last")
# Masks over the whole sequence (its length or row numbers) are not put inside `Packed`.
OF_WHOLE_ROWS = tuple(
    name for name, kind in KINDS.items() if kind.stands in (EQUAL_DOCUMENTS, WHOLE)
)


def classes_of(spec: Spec) -> list[str]:
    """Returns every class and operator of a spec."""
    listed = spec[0] == "SelectedBlocks" and spec[2] == 1
    own = {spec[0], LISTED} if listed else {spec[0]}
    return sorted(own.union(*map(classes_of, parts_of(spec))))


def branches(spec: Spec) -> list[Spec]:
    """Splits a mixture into its masks, in the pattern's order."""
    name, *args = spec
    if name == "+":
        return branches(args[0]) + branches(args[1])
    if name == "&":
        return [("&", a, b) for a in branches(args[0]) for b in branches(args[1])]
    if name == "-":
        return [("-", a, args[1]) for a in branches(args[0])]
    if name in INSIDE:
        return [(name, *args[:-1], inner) for inner in branches(args[-1])]
    if name == "PerHead":
        rows = [branches(part) for part in args[0]]
        none = ("GlobalTokens", 0, False, True)
        columns = zip_longest(*rows, fillvalue=none)
        return [("PerHead", column) for column in columns]
    if name == "LongNet":
        pairs = zip(args[0], args[1], strict=True)
        return [("Dilated", w, r, *args[2:]) for w, r in pairs]
    return [spec]


def with_tensors(spec: Spec, turned: bool = False) -> Spec:
    """Returns the spec with lengths and parents as tensors; `turned` turns lengths around."""
    parts = tuple(with_tensors(part, turned) for part in parts_of(spec))
    name, *args = with_parts(spec, parts)
    if KINDS[name].has_lengths:
        args[0] = _tensor(args[0], 0)
        args[0] = args[0].flip(-1) if turned else args[0]
    if name == "Tree":
        args[1] = _tensor(args[1], -1)
    return (name, *args)


def _tensor(numbers: Any, padding: int) -> torch.Tensor:
    """Returns nested numbers as int64; shorter rows end with `padding`, as empty documents do."""
    if numbers and isinstance(numbers[0], tuple):
        most = max(map(len, numbers))
        numbers = [(*row, *(padding,) * (most - len(row))) for row in numbers]
    return torch.tensor(numbers, dtype=torch.int64)


def common_tree(spec: Spec) -> Spec | None:
    """Returns the one tree whose depths are the positions of all branches; None if there is none.

    It may be nested: a tree for each batch entry.

    Raises: ValueError if there are trees, but no such tree.
    """
    found = {leaf[1:3] for leaf in leaves(spec) if leaf[0] == "Tree"}
    if not found:
        return None
    tree, *others = found
    whole = all(any(part[0] == "Tree" for part in outer(branch)) for branch in branches(spec))
    hidden = any("Tree" in classes_of(part) for part in outer(spec) if part[0] == "Packed")
    if others or not whole or hidden:
        raise ValueError("no tree of all branches")
    return ("Tree", *tree)


def has_distances(spec: Spec) -> bool:
    """Whether a call with this pattern may have a distance bias."""
    try:
        common_tree(spec)
    except ValueError:
        return False
    return True


def distance_places(spec: Spec, positions: np.ndarray) -> np.ndarray:
    """Returns the positions that distances count, [B or 1, n]: in a tree, depths."""
    tree = common_tree(spec)
    if tree is None:
        return positions[None]
    nested = bool(tree[1]) and isinstance(tree[1][0], tuple)
    entries = list(zip(*tree[1:], strict=True)) if nested else [tree[1:]]
    if not entries or not sum(entries[0][0]):
        return positions[None]
    depths = [[depth_in_tree(int(x), *entry) for x in positions] for entry in entries]
    return np.array(depths, dtype=np.int64).reshape(len(entries), len(positions))


def outer(spec: Spec) -> list[Spec]:
    """Returns the constructor calls that operators join."""
    name, *args = spec
    return [part for side in args for part in outer(side)] if name in OPERATORS else [spec]


def selections(spec: Spec) -> list[Spec]:
    """Returns every `SelectedBlocks` of every branch; those inside `Packed` have no slots."""
    name, *args = spec
    if name in OPERATORS:
        parts = branches(spec) if is_mixture(spec) else args
        return [found for part in parts for found in selections(part)]
    return [spec] if name == "SelectedBlocks" else []


def slots(spec: Spec, scene: Scene) -> np.ndarray:
    """[J, B, H, Nq, Nk] slot of each pair's block; R * k if no slot lists it."""
    shape = (scene.batch, scene.num_heads, scene.q_len, scene.kv_len)
    found = []
    for branch in branches(spec):
        listed = selections(branch)
        if listed:
            _, indices, *rest = listed[0]
            first = scene.first_position
            found.append(blocks_oracle.slots_of_pairs(indices, shape, first, *rest))
        else:
            (selection,) = selections(spec)
            found.append(np.full(shape, np.prod(slots_shape(selection[1]))))
    return np.stack(found)


@st.composite
def specs_with(
    draw: st.DrawFn, kind: str, scene: Scene, *, selected: bool = False
) -> tuple[Spec, Scene]:
    """Draws a spec that contains a class or operator, and a scene that fits it.

    With `selected`, exactly one branch has exactly one `SelectedBlocks`.
    """
    selection = drawn.selected_keys if kind == LISTED else LEAVES["SelectedBlocks"]
    if scene.first_position < 0 and (selected or kind in ("SelectedBlocks", LISTED)):
        scene = replace(scene, q_start=0)
    if kind == "Dense" and not (scene.q_len and scene.kv_len):
        scene = replace(scene, q_len=max(1, scene.q_len), kv_len=max(1, scene.kv_len))
    if kind == "Neighbourhood" and not scene.kv_len:
        scene = replace(scene, q_len=max(1, scene.q_len), kv_len=1)
    others = drawn.masks(scene, 1, with_random=True)
    other = draw(others)
    if kind == "Tree":
        spec = draw(drawn.trees(scene))
    elif kind == "Packed":
        spec = draw(drawn.packed(scene, lambda inside: drawn.masks(inside, 1, nested=True)))
    elif kind == "Rearranged":
        spec = draw(drawn.rearranged(scene))
    elif kind in OPERATORS:
        spec = (kind, draw(others), other)
    elif kind == LISTED:
        spec = draw(selection(scene))
    else:
        spec = draw(LEAVES[kind](scene))
    forms = ["alone", "alone", "& other", "other &", "+ other", "- other"]
    if not is_mixture(spec):
        forms += ["| other", "other |", "other +"]
        forms += ["other -"] if kind not in ("SelectedBlocks", LISTED) else []
        if kind not in (*OF_WHOLE_ROWS, LISTED, *OPERATORS, *INSIDE):
            forms.append("packed")
    form = draw(st.sampled_from(forms))
    if form == "packed":
        spec = draw(drawn.packed(scene, LEAVES[kind]))
    elif form != "alone":
        sides = (spec, other) if form.endswith("other") else (other, spec)
        spec = (form.replace("other", "").strip(), *sides)
    if selected and len(selections(spec)) != 1:
        if not selections(spec):
            beside = draw(selection(scene))
            joins = ["+", "other +"] if is_mixture(spec) else ["&", "|", "other |", "+", "other +"]
            join = draw(st.sampled_from(joins))
            sides = (spec, beside) if not join.startswith("other") else (beside, spec)
            spec = (join.removeprefix("other "), *sides)
        else:
            spec = draw(selection(scene))
    return spec, scene


@st.composite
def chosen_blocks(draw: st.DrawFn, scene: Scene, size: int, row: int, top_p: float | None) -> Spec:
    """Draws a `SelectedBlocks` that the definition of `select_blocks` gives for random scores."""
    first, blocks = scene.first_position // row, -(-scene.kv_len // size)
    rows = max(1, -(-(scene.first_position + scene.q_len) // row) - first)
    sink, local = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    k = max(1, sink + local + draw(st.integers(0, 3)))
    options = {"top_p": top_p, "sink": sink, "local": local, "causal": draw(st.booleans())}
    numbers = random.Random(draw(st.integers(0, 99)))

    def chosen(number: int) -> tuple[int, ...]:
        scores = [numbers.gauss(0, 2) for _ in range(blocks)]
        current = (first + number) * row // size
        return tuple(blocks_oracle.chosen_blocks(scores, k, current, **options))

    heads = draw(st.sampled_from((1, scene.num_kv_heads, scene.num_heads)))
    table: Any = [
        tuple(tuple(map(chosen, range(rows))) for _ in range(heads)) for _ in range(scene.batch)
    ]
    table = tuple(table) if draw(st.booleans()) else table[0]
    return ("SelectedBlocks", table, size, row, first)
