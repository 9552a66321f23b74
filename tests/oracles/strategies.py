"""Hypothesis strategies: pattern expressions, and scenes (lengths, heads, batch) that fit them.

`cases()` draws `(spec, scene)`: a nested spec of `kinds` that is legal in its scene.
Lengths are mostly below 70, so that the oracle's Python loops stay cheap, with ragged, rectangular,
empty and one-token scenes and queries that start before the first key or after the last.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from oracles import kinds
from oracles.kinds import KINDS, Scene, Spec, path_of
from oracles.patterns_oracle import is_mixture

LAYOUT_BLOCK_SIZES = (16, 32, 64, 128)
HEADS = ((1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (6, 3))  # (query heads, kv heads)


def examples(few: int, many: int, *drawn: Any) -> Callable[[Callable[..., None]], Any]:
    """Decorates a check as a fast test of `few` examples and a slow test of `many`."""

    def decorate(check: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])
        def test(count: int) -> None:
            suppressed = settings(max_examples=count, suppress_health_check=list(HealthCheck))
            suppressed(given(*drawn)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


@st.composite
def scenes(draw: st.DrawFn, max_length: int = 70, min_length: int = 0, max_heads: int = 6) -> Scene:
    lengths = st.integers(min_length, max_length)
    kv_len = draw(lengths)
    q_len = kv_len if draw(st.booleans()) else draw(lengths)
    starts = st.one_of(
        st.none(), st.none(), st.just(0), st.integers(-20, 5), st.integers(-20, kv_len + 20)
    )
    num_heads, num_kv_heads = draw(st.sampled_from([h for h in HEADS if h[0] <= max_heads]))
    batch = draw(st.integers(1, 3 if max_length <= 70 else 2))
    return Scene(q_len, kv_len, num_heads, num_kv_heads, draw(starts), batch)


@st.composite
def _drawn_by(draw: st.DrawFn, draws: Callable[..., Any], *given: Any) -> Any:
    return draws(draw, *given)


partitions = functools.partial(_drawn_by, kinds.partition)
head_offsets = functools.partial(_drawn_by, kinds.head_offset)
selected_keys = functools.partial(_drawn_by, kinds.draw_selected_keys)


def drawn(name: str, scene: Scene, *inner: Any) -> st.SearchStrategy[Spec]:
    """Strategy of specs of a kind; `inner(scene)` is the strategy of what a container has."""
    return _drawn_by(KINDS[name].draw, scene, *inner)


def named(*stands: str) -> list[str]:
    """Returns the kinds that random masks join and that stand in such a place."""
    return [
        kind.name
        for kind in KINDS.values()
        if kind.stands in stands and kind.joined and not (kind.inner or kind.is_mixture)
    ]


def per_heads(scene: Scene) -> st.SearchStrategy[Spec]:
    """Strategy of `PerHead` of masks."""
    return drawn("PerHead", scene, lambda inside: masks(inside, 1, nested=True))


@st.composite
def packed(draw: st.DrawFn, scene: Scene, inner: Any) -> Spec:
    """Draws `Packed` around `inner(inside)`; the scene `inside` is as long as the longest document.

    Patterns that fix the length of their sequence go into documents of equal length.
    """
    if scene.kv_len and scene.kv_len % 2 == 0 and draw(st.integers(0, 4)) == 0:
        half = scene.kv_len // 2
        halves = replace(scene, q_len=half, kv_len=half, q_start=0)
        whole = [drawn(name, halves) for name in named(kinds.EQUAL_DOCUMENTS)]
        tree = trees(halves).filter(lambda spec: not is_mixture(spec))
        return ("Packed", (half, half), draw(st.one_of(*whole, packed(halves, inner), tree)))
    return draw(drawn("Packed", scene, inner))


def rearranged(scene: Scene, with_random: bool = False) -> st.SearchStrategy[Spec]:
    """Strategy of `Rearranged` of masks; tables of a size of their own stay in their order."""
    return drawn("Rearranged", scene, lambda inside: masks(inside, 1, with_random, nested=True))


@st.composite
def trees(draw: st.DrawFn, scene: Scene, inner: Any = None) -> Spec:
    """Draws `Tree` around `inner(scene)`, by default a mask that fits any length."""
    if inner is not None:
        return draw(drawn("Tree", scene, inner))
    mask = st.one_of(*(drawn(name, scene) for name in named(kinds.PATHS)))
    joined = st.tuples(st.sampled_from(("&", "&", "|", "-")), mask, mask)
    summed = st.tuples(st.just("+"), mask, mask)
    along = st.one_of(mask, mask, joined, summed, drawn("LongNet", scene))
    tree = draw(drawn("Tree", scene, lambda _: along))
    if draw(st.integers(0, 2)) == 0:
        _, lengths, above, _ = tree
        length, bound = draw(bound_masks(scene, lengths, above))
        some = st.one_of(
            st.just(bound),
            st.tuples(st.sampled_from("&|-"), mask, st.just(bound)),
            st.tuples(st.sampled_from("&&|+"), st.just(bound), mask),
        )
        return ("Tree", lengths, above, length, draw(some))
    return tree


def longest_path(lengths: tuple[int, ...], parents: tuple[int, ...]) -> int:
    """Returns the most tokens on a path of a tree."""
    paths = (path_of(node, parents) for node in range(len(lengths)))
    return max((sum(lengths[i] for i in path) for path in paths), default=0)


@st.composite
def bound_masks(draw: st.DrawFn, scene: Scene, lengths: Any, parents: Any) -> tuple[int, Spec]:
    """Draws a length of at least a tree's longest path, and a mask that is bound to this length."""
    nested = bool(lengths) and isinstance(lengths[0], tuple)
    entries = zip(lengths, parents, strict=True) if nested else [(lengths, parents)]
    longest = max(longest_path(*entry) for entry in entries)
    length = longest + draw(st.sampled_from((0, 0, 1, 9)))
    inside = replace(scene, q_len=length, kv_len=length, q_start=0)
    packed_causal = packed(inside, lambda _: st.sampled_from((("Full",), ("Causal",))))
    bound = [drawn("Documents", inside), drawn("Documents", inside), packed_causal]
    bound += [drawn("KeyMask", inside)] if length <= 200 else []  # source of a number per key
    return length, draw(st.one_of(bound))


def leaf_masks(scene: Scene, with_random: bool) -> st.SearchStrategy[Spec]:
    """Strategy of masks that fit any length, so that they may also stand inside `Packed`."""
    names = named(kinds.PATHS, kinds.DOCUMENTS)
    ruled = [name for name in names if with_random or KINDS[name].rule is not None]
    return st.one_of(*(drawn(name, scene) for name in ruled))


def whole_masks(scene: Scene) -> st.SearchStrategy[Spec]:
    """Strategy of masks that are made for the length of the scene."""
    names = named(kinds.EQUAL_DOCUMENTS, kinds.WHOLE)
    if not (0 < scene.q_len <= 70 and scene.kv_len <= 70):  # an empty tuple has no width
        names.remove("Dense")
    return st.one_of(*(drawn(name, scene) for name in names))


def masks(
    scene: Scene, depth: int = 2, with_random: bool = False, nested: bool = False
) -> st.SearchStrategy[Spec]:
    """Strategy of masks joined by `&`, `|` and `-`, at most `depth` operators deep."""

    def inner(inside: Scene) -> st.SearchStrategy[Spec]:
        return masks(inside, 1, with_random, nested=True)

    simple = leaf_masks(scene, with_random)
    if not nested:
        own = [packed(scene, inner), per_heads(scene), rearranged(scene, with_random)]
        simple = st.one_of(simple, whole_masks(scene), *own)
    if depth == 0:
        return simple
    below = masks(scene, depth - 1, with_random, nested)
    joined = st.tuples(st.sampled_from(("&", "&", "|", "-")), below, below)
    return st.one_of(simple, joined)


def mixtures(
    scene: Scene, depth: int = 1, with_random: bool = False, nested: bool = False
) -> st.SearchStrategy[Spec]:
    """Strategy of mixtures: sums of masks, LongNets, mixtures under a mask, packed mixtures."""
    mask = masks(scene, 1, with_random, nested)

    def inner(inside: Scene) -> st.SearchStrategy[Spec]:
        return mixtures(inside, 0, with_random, nested=True)

    total = st.one_of(st.tuples(st.just("+"), mask, mask), drawn("LongNet", scene))
    if depth == 0:
        return total
    below = mixtures(scene, depth - 1, with_random, nested)
    either = st.one_of(below, mask)
    forms = [
        total,
        st.tuples(st.just("+"), below, either),
        st.tuples(st.just("+"), mask, below),
        st.tuples(st.just("&"), below, mask),
        st.tuples(st.just("&"), mask, below),
        st.tuples(st.just("-"), below, mask),
    ]
    return st.one_of(*forms, *([] if nested else [packed(scene, inner)]))


def specs(scene: Scene, with_random: bool = False) -> st.SearchStrategy[Spec]:
    """Strategy of all pattern expressions that are legal in the scene, masks and mixtures."""
    return st.one_of(masks(scene, 2, with_random), mixtures(scene, 1, with_random))


@st.composite
def cases(
    draw: st.DrawFn,
    max_length: int = 70,
    min_length: int = 0,
    max_heads: int = 6,
    with_random: bool = False,
) -> tuple[Spec, Scene]:
    """Draws a spec and its scene. `with_random` adds `RandomBlocks`, which has no oracle."""
    scene = draw(scenes(max_length, min_length, max_heads))
    return draw(specs(scene, with_random)), scene
