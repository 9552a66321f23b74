"""Hypothesis strategies: pattern expressions, and scenes (lengths, heads, batch) that fit them.

`cases()` draws `(spec, scene)`: a nested spec of `patterns_oracle` that is legal in its scene.
Lengths are mostly below 70, so that the oracle's Python loops stay cheap, with ragged, rectangular,
empty and one-token scenes and queries that start before the first key or after the last.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from oracles.patterns_oracle import MASK_MODS, Spec, is_mixture, path_of

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


@dataclass(frozen=True)
class Scene:
    """Arguments of `to_dense` and `layout`, and the batch size of batch-dependent masks."""

    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    q_start: int | None
    batch: int

    @property
    def first_position(self) -> int:
        return self.kv_len - self.q_len if self.q_start is None else self.q_start

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `to_dense` and `layout`."""
        return {
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "q_start": self.q_start,
        }


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
def partitions(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """Draws document lengths that sum to `total`, some of them 0."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
    edges = [0, *cuts, total]
    return tuple(b - a for a, b in pairwise(edges))


@st.composite
def tables(draw: st.DrawFn, *shape: int) -> Any:
    """Draws nested tuples of booleans; a row is all False, all True, or random."""
    *outer, rows, columns = shape
    if outer:
        return tuple(draw(tables(*outer[1:], rows, columns)) for _ in range(outer[0]))
    row = st.one_of(
        st.just((False,) * columns),
        st.just((True,) * columns),
        st.lists(st.booleans(), min_size=columns, max_size=columns).map(tuple),
    )
    return tuple(draw(row) for _ in range(rows))


def distances(scene: Scene) -> st.SearchStrategy[int]:
    """Strategy of window sides, counts and segment lengths: short ones, and ones past the end."""
    longest = max(scene.q_len, scene.kv_len)
    return st.one_of(st.integers(0, 9), st.integers(0, longest + 5))


# Sizes of a pattern's own blocks: below, above, and not dividing those of the layout.
PATTERN_BLOCK_SIZES = st.sampled_from((1, 2, 3, 5, 8, 16, 24, 32, 64, 128))


@st.composite
def head_offsets(draw: st.DrawFn, scene: Scene) -> Any:
    residues = st.integers(-3, 9)
    per_head = st.lists(residues, min_size=scene.num_kv_heads, max_size=scene.num_kv_heads)
    return draw(st.one_of(st.sampled_from(("head", "block")), residues, per_head.map(tuple)))


@st.composite
def windows(draw: st.DrawFn, scene: Scene) -> Spec:
    side = st.one_of(st.none(), distances(scene))
    return ("SlidingWindow", draw(side), draw(side), draw(st.sampled_from((1, 1, 2, 3, 4, 7))))


@st.composite
def pooled(draw: st.DrawFn, scene: Scene) -> Spec:
    return ("PooledCausal", max(1, draw(distances(scene))), draw(st.integers(1, 7)))


@st.composite
def global_tokens(draw: st.DrawFn, scene: Scene) -> Spec:
    rows, columns = draw(st.sampled_from(((True, True), (True, False), (False, True))))
    return ("GlobalTokens", draw(distances(scene)), rows, columns)


@st.composite
def dilated(draw: st.DrawFn, scene: Scene) -> Spec:
    segment_length = max(1, draw(distances(scene)))
    return ("Dilated", segment_length, draw(st.integers(1, 7)), draw(head_offsets(scene)))


@st.composite
def longnets(draw: st.DrawFn, scene: Scene) -> Spec:
    branch = st.tuples(distances(scene).map(lambda w: max(1, w)), st.integers(1, 7))
    branches = draw(st.lists(branch, min_size=2, max_size=3))
    segment_lengths, dilation_rates = zip(*branches, strict=True)
    return ("LongNet", segment_lengths, dilation_rates, draw(head_offsets(scene)))


@st.composite
def block_dilated(draw: st.DrawFn, scene: Scene) -> Spec:
    rates = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True)))
    return ("BlockDilated", rates, draw(PATTERN_BLOCK_SIZES))


@st.composite
def block_windows(draw: st.DrawFn, scene: Scene) -> Spec:
    return ("BlockWindow", draw(st.integers(0, 4)), draw(PATTERN_BLOCK_SIZES))


@st.composite
def block_causal(draw: st.DrawFn, scene: Scene) -> Spec:
    return ("BlockCausal", draw(PATTERN_BLOCK_SIZES))


@st.composite
def block_diffusions(draw: st.DrawFn, scene: Scene) -> Spec:
    size = draw(PATTERN_BLOCK_SIZES)
    least = max(1, scene.kv_len, scene.first_position + scene.q_len)
    n = size * (-(-least // (2 * size)) + draw(st.sampled_from((0, 0, 1))))
    return ("BlockDiffusion", n, size)


@st.composite
def neighbourhoods(draw: st.DrawFn, scene: Scene) -> Spec:
    """Draws windows over a grid of 1 to 3 dims with as many tokens as the scene has keys."""
    if not scene.kv_len:
        return ("Full",)  # no grid is empty
    shape, rest = [], scene.kv_len
    for _ in range(draw(st.integers(0, 2))):
        shape.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= shape[-1]
    shape.append(rest)
    windows = []
    for size in shape:
        dilation = draw(st.integers(1, min(3, size)))
        radius = draw(st.integers(0, min(4, (size // dilation - 1) // 2)))
        windows.append((radius, dilation))
    radii, dilations = zip(*windows, strict=True)
    return ("Neighbourhood", tuple(shape), radii, dilations)


@st.composite
def chunks(draw: st.DrawFn, scene: Scene) -> Spec:
    return ("ChunkedCausal", max(1, draw(distances(scene))))


@st.composite
def hierarchicals(draw: st.DrawFn, scene: Scene) -> Spec:
    window = st.one_of(st.none(), st.integers(0, 3 * max(8, scene.kv_len)))
    level = st.tuples(st.integers(1, max(8, scene.kv_len)), window)
    levels = tuple(draw(st.lists(level, min_size=1, max_size=3)))
    return ("Hierarchical", levels, draw(PATTERN_BLOCK_SIZES))


def document_lengths(scene: Scene) -> st.SearchStrategy[Any]:
    """Strategy of document lengths, shared by all batch entries or different for each."""
    one = partitions(scene.kv_len)
    each = st.lists(one, min_size=scene.batch, max_size=scene.batch).map(tuple)
    return st.one_of(one, one, each)


@st.composite
def documents(draw: st.DrawFn, scene: Scene) -> Spec:
    return ("Documents", draw(document_lengths(scene)))


@st.composite
def causal_blocks(draw: st.DrawFn, scene: Scene) -> Spec:
    return ("CausalBlocks", draw(document_lengths(scene)))


@st.composite
def key_paddings(draw: st.DrawFn, scene: Scene) -> Spec:
    length = st.integers(0, scene.kv_len + 2)
    lengths = draw(st.lists(length, min_size=scene.batch, max_size=scene.batch))
    return ("KeyPadding", tuple(lengths))


@st.composite
def key_masks(draw: st.DrawFn, scene: Scene) -> Spec:
    """Draws key masks, shared by all batch entries or different for each."""
    if draw(st.booleans()):
        return ("KeyMask", draw(tables(1, scene.kv_len))[0])
    return ("KeyMask", draw(tables(scene.batch, scene.kv_len)))


@st.composite
def block_tables(draw: st.DrawFn, scene: Scene) -> Spec:
    last_position = scene.first_position + scene.q_len - 1
    fitting = st.sampled_from((4, 16, 24, 32, 64) if scene.kv_len <= 70 else (24, 32, 64))
    block_size = draw(fitting)
    rows = max(0, last_position) // block_size + 1 + draw(st.integers(0, 1))
    columns = max(0, scene.kv_len - 1) // block_size + 1 + draw(st.integers(0, 1))
    num_tables = draw(st.sampled_from((1, scene.num_kv_heads, scene.num_heads)))
    shapes = ((), (num_tables,), (scene.batch, num_tables))
    outer = draw(st.sampled_from(shapes))
    return ("Blocks", draw(tables(*outer, rows, columns)), block_size)


@st.composite
def dense_masks(draw: st.DrawFn, scene: Scene) -> Spec:
    outer = draw(st.sampled_from(((), (1,), (scene.num_heads,))))
    return ("Dense", draw(tables(*outer, scene.q_len, scene.kv_len)))


@st.composite
def random_blocks(draw: st.DrawFn, scene: Scene) -> Spec:
    density = draw(st.one_of(st.floats(0.05, 1.0), st.just(1.0)))
    seed, per_head = draw(st.integers(0, 5)), draw(st.booleans())
    return ("RandomBlocks", density, draw(PATTERN_BLOCK_SIZES), seed, per_head)


@st.composite
def selected_blocks(draw: st.DrawFn, scene: Scene) -> Spec:
    """Draws selected blocks; their rows cover the queries and may begin before the first."""
    query_block = draw(st.sampled_from((1, 2, 4, 16)))
    block_size = query_block * draw(st.sampled_from((1, 2, 8)))
    return draw(_selections(scene, block_size, query_block, st.integers(1, 4)))


@st.composite
def selected_keys(draw: st.DrawFn, scene: Scene) -> Spec:
    """Draws lists of single keys for each query, some of them longer than a step of a kernel."""
    return draw(_selections(scene, 1, 1, st.sampled_from((1, 2, 4, 9, 20, 70))))


@st.composite
def _selections(
    draw: st.DrawFn, scene: Scene, block_size: int, query_block: int, slots: Any
) -> Spec:
    """Draws the table of a selection; it has repeats, -1, and numbers past the last block."""
    first = max(0, scene.first_position) // query_block
    first_row = draw(st.sampled_from((0, first)))
    last = max(0, scene.first_position + scene.q_len)
    rows = max(0, -(-last // query_block) - first_row) + draw(st.integers(0, 1))
    rows = max(1, rows)
    blocks = -(-scene.kv_len // block_size)
    heads = draw(st.sampled_from((1, scene.num_kv_heads, scene.num_heads)))
    batch = draw(st.sampled_from((1, scene.batch)))
    seed = draw(st.integers(0, 20))
    listed = draw(slots)
    numbers = random.Random(seed)

    def row() -> tuple[int, ...]:
        return tuple(numbers.randint(-1, blocks) for _ in range(listed))

    table = tuple(tuple(row() for _ in range(rows)) for _ in range(heads))
    if batch > 1 or draw(st.booleans()):
        rest = [tuple(tuple(row() for _ in range(rows)) for _ in range(heads))] * (batch - 1)
        return ("SelectedBlocks", (table, *rest), block_size, query_block, first_row)
    return ("SelectedBlocks", table, block_size, query_block, first_row)


@st.composite
def mask_mods(draw: st.DrawFn, scene: Scene) -> Spec:
    name = draw(st.sampled_from(tuple(MASK_MODS)))
    return ("MaskMod", name, scene.batch if name == "of entries" else None)


@st.composite
def per_heads(draw: st.DrawFn, scene: Scene, inner: Any = None) -> Spec:
    """Draws `PerHead` of one to three distinct patterns, so that heads share some of them."""
    some = masks(scene, 1, nested=True) if inner is None else inner(scene)
    distinct = draw(st.lists(some, min_size=1, max_size=3))
    heads = scene.num_kv_heads
    return ("PerHead", tuple(draw(st.sampled_from(distinct)) for _ in range(heads)))


@st.composite
def packed(draw: st.DrawFn, scene: Scene, inner: Any) -> Spec:
    """Draws `Packed` around `inner(inside)`; the scene `inside` is as long as the longest document.

    Patterns that fix the length of their sequence go into documents of equal length.
    """
    lengths = draw(document_lengths(scene))
    longest = max(max(entry) if isinstance(entry, tuple) else entry for entry in lengths)
    inside = replace(scene, q_len=longest, kv_len=longest, q_start=0)
    if scene.kv_len and scene.kv_len % 2 == 0 and draw(st.integers(0, 4)) == 0:
        half = scene.kv_len // 2
        halves = replace(scene, q_len=half, kv_len=half, q_start=0)
        tree = trees(halves).filter(lambda spec: not is_mixture(spec))
        nested = [
            documents(halves),
            causal_blocks(halves),
            key_masks(halves),
            packed(halves, inner),
            tree,
        ]
        return ("Packed", (half, half), draw(st.one_of(nested)))
    return ("Packed", lengths, draw(inner(inside)))


@st.composite
def trees(draw: st.DrawFn, scene: Scene, inner: Any = None) -> Spec:
    """Draws `Tree` around `inner(scene)`, by default a mask that fits any length."""
    lengths = draw(document_lengths(scene))
    nested = bool(lengths) and isinstance(lengths[0], tuple)

    def parents(entry: tuple[int, ...]) -> tuple[int, ...]:
        near = [draw(st.sampled_from((i - 1, i - 1, -1, i // 2 - 1))) for i in range(len(entry))]
        return tuple(near)

    above = tuple(map(parents, lengths)) if nested else parents(lengths)
    if inner is not None:
        return ("Tree", lengths, above, draw(inner(scene)))
    kinds = [windows, pooled, global_tokens, dilated, block_dilated, block_windows, hierarchicals]
    kinds += [block_causal, chunks]
    fixed = st.sampled_from((("Full",), ("Causal",), ("Causal",)))
    mask = st.one_of(fixed, *(kind(scene) for kind in (*kinds, key_paddings)))
    joined = st.tuples(st.sampled_from(("&", "&", "|", "-")), mask, mask)
    summed = st.tuples(st.just("+"), mask, mask)
    if draw(st.integers(0, 2)) == 0:
        length, bound = draw(bound_masks(scene, lengths, above))
        some = st.one_of(
            st.just(bound),
            st.tuples(st.sampled_from("&|-"), mask, st.just(bound)),
            st.tuples(st.sampled_from("&&|+"), st.just(bound), mask),
        )
        return ("Tree", lengths, above, length, draw(some))
    return ("Tree", lengths, above, draw(st.one_of(mask, mask, joined, summed, longnets(scene))))


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
    kinds = [documents(inside), documents(inside), packed_causal]
    kinds += [key_masks(inside)] if length <= 200 else []  # source of a number per key
    return length, draw(st.one_of(kinds))


def leaf_masks(scene: Scene, with_random: bool) -> st.SearchStrategy[Spec]:
    """Strategy of masks that fit any length, so that they may also stand inside `Packed`."""
    kinds = [windows, pooled, global_tokens, dilated, block_dilated, block_windows, hierarchicals]
    kinds += [block_causal, block_diffusions, chunks]
    kinds += [key_paddings, block_tables] + [random_blocks] * with_random
    fixed = st.sampled_from((("Full",), ("Causal",)))
    return st.one_of(fixed, *(kind(scene) for kind in kinds))


def masks(
    scene: Scene, depth: int = 2, with_random: bool = False, nested: bool = False
) -> st.SearchStrategy[Spec]:
    """Strategy of masks joined by `&`, `|` and `-`, at most `depth` operators deep."""

    def inner(inside: Scene) -> st.SearchStrategy[Spec]:
        return masks(inside, 1, with_random, nested=True)

    simple = leaf_masks(scene, with_random)
    if not nested and 0 < scene.q_len <= 70 and scene.kv_len <= 70:  # an empty tuple has no width
        simple = st.one_of(simple, dense_masks(scene))
    if not nested:
        whole = documents(scene), causal_blocks(scene), key_masks(scene), packed(scene, inner)
        whole = *whole, neighbourhoods(scene), per_heads(scene)
        simple = st.one_of(simple, *whole)
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

    total = st.one_of(st.tuples(st.just("+"), mask, mask), longnets(scene))
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
