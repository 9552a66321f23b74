"""Every kind of pattern, one row each: all that tests must know of it.

A new pattern is a new row of `KINDS`. Its rule says in plain Python which pairs it has, `draw`
draws it for hypothesis, `examples` are instances for tests of all patterns, `cases` for tests of
`attention`, `drawing` is a matrix drawn by hand, `sane` are arguments for the fuzzer to spoil.
`patterns_oracle`, `strategies`, `drawings`, `every_pattern`, `attention_oracle` and `fuzz` read
the rows; `tests/patterns/test_kinds.py` fails for a pattern of the library that has no row.

A *spec* is a nested tuple that reads like the constructor call: `("SlidingWindow", 4, 0, 2)`,
`("&", ("Causal",), ("Documents", (3, 4)))`. The rules evaluate one integer comparison at a time,
without tensors. They come from the table of the contract, not from the library's code.
"""

import functools
import math
import operator
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.patterns.selected import EdgeLists

with suppress(ModuleNotFoundError):  # a GPU machine may lack hypothesis: it draws nothing
    import hypothesis.strategies as st

Spec = tuple[Any, ...]
Draw = Any  # hypothesis's function that draws from a strategy


# Scenes, and what draws share.


def lengths_and_heads(shape: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `to_dense` and `layout`, of a `Scene` or a `Case`."""
    names = "q_len", "kv_len", "num_heads", "num_kv_heads", "q_start"
    return {name: getattr(shape, name) for name in names}


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
        return lengths_and_heads(self)


BLOCK_SIZES = (1, 2, 3, 5, 8, 16, 24, 32, 64, 128)
"""A pattern's own blocks: smaller, larger, and not dividing those of the layout."""


def distance(draw: Draw, scene: Scene) -> int:
    """Draws a window's side, a count or a segment length: short, or to past the end."""
    longest = max(scene.q_len, scene.kv_len)
    return draw(st.one_of(st.integers(0, 9), st.integers(0, longest + 5)))


def partition(draw: Draw, total: int) -> tuple[int, ...]:
    """Draws document lengths that sum to `total`, some of them 0."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
    return tuple(b - a for a, b in pairwise([0, *cuts, total]))


def document_lengths(draw: Draw, scene: Scene) -> tuple:
    """Draws document lengths that all batch entries share, or different ones for each."""
    if draw(st.sampled_from((True, True, False))):
        return partition(draw, scene.kv_len)
    return tuple(partition(draw, scene.kv_len) for _ in range(scene.batch))


def table(draw: Draw, *shape: int) -> Any:
    """Draws nested tuples of booleans; a row is all False, all True, or random."""
    *outer, rows, columns = shape
    if outer:
        return tuple(table(draw, *outer[1:], rows, columns) for _ in range(outer[0]))
    row = st.one_of(
        st.just((False,) * columns),
        st.just((True,) * columns),
        st.lists(st.booleans(), min_size=columns, max_size=columns).map(tuple),
    )
    return tuple(draw(row) for _ in range(rows))


def head_offset(draw: Draw, scene: Scene) -> Any:
    """Draws the `offset` of a dilated pattern."""
    residues = st.integers(-3, 9)
    per_head = st.lists(residues, min_size=scene.num_kv_heads, max_size=scene.num_kv_heads)
    return draw(st.one_of(st.sampled_from(("head", "block")), residues, per_head.map(tuple)))


# Places, and what rules share.


@dataclass(frozen=True)
class Place:
    """Everything that a rule may read besides the two positions of a pair."""

    row: int  # index of the query, which `Dense` and `MaskMod` read
    batch: int
    head: int  # query head
    num_heads: int
    num_kv_heads: int
    kv_len: int  # inside `Packed`: the length of the document

    @property
    def kv_head(self) -> int:
        return self.head // (self.num_heads // self.num_kv_heads)


def block_of(p: int, block_size: int) -> int | None:
    """Number of the block with a position; None for a negative position."""
    return p // block_size if p >= 0 else None


def document_of(x: int, lengths: tuple[int, ...]) -> tuple[int, int] | None:
    """(number, first position) of the document with position `x`; None if there is none."""
    first = 0
    for number, length in enumerate(lengths):
        if first <= x < first + length:
            return number, first
        first += length
    return None


def documents_of(at: Place, lengths: tuple) -> tuple[int, ...]:
    """Document lengths of the batch entry, or those that all entries share."""
    return lengths[at.batch] if lengths and isinstance(lengths[0], tuple) else lengths


def table_depth(table: Any) -> int:
    if not isinstance(table, tuple):
        return 0
    return 1 + table_depth(table[0]) if table else 1


def head_of_table(at: Place, num_tables: int) -> int:
    """Number of the table, of 1, Hkv or Hq tables, that a query head reads."""
    return {1: 0, at.num_kv_heads: at.kv_head, at.num_heads: at.head}[num_tables]


def nested(depth: int) -> Callable[..., bool]:
    """Returns whether the first argument of a spec is a table of `depth` dims."""
    return lambda first, *_: table_depth(first) == depth


def pair_count(spec: Spec, at: Place, p: int, k: int) -> int:
    """Multiplicity of the pair of query position `p` and key position `k` in the pattern."""
    name, *args = spec
    return int(KINDS[name].rule(at, p, k, *args))


# Tables of examples, of cases and for the fuzzer.

B, HQ, H, N = 2, 4, 2, 40  # batch, query heads, kv heads and tokens of `sane` arguments
TABLE = torch.tensor([[True, False], [True, True]])
KEYS = torch.tensor([True, True, False, False, True, True, False])


def some(*size: int) -> Tensor:
    return torch.rand(size) < 0.7


def chosen() -> Tensor:
    """Block numbers [B, H, 3 rows, 2 slots]."""
    return torch.tensor([[0, 1], [1, 0], [0, 2]]).expand(B, H, 3, 2).contiguous()


def narrow() -> Any:
    """A mask for the inside of containers."""
    return sr.Causal() & sr.SlidingWindow(9)


def random_table(*shape: int) -> Tensor:
    """Draws bools; the first row is all False, and the second (if any) all True."""
    table = torch.rand(*shape, generator=torch.Generator().manual_seed(5)) < 0.4
    table[..., 0, :] = False
    table[..., 1:2, :] = True
    return table


def _parts(total: int) -> tuple[int, ...]:
    """Lengths of three documents and an empty one that sum to `total`."""
    first, second = total // 5, total // 2
    return (first, 0, second, total - first - second)


def _end(case: Any) -> int:
    """The position behind the last query and the last key."""
    return case.kv_len if case.q_start is None else max(case.kv_len, case.q_start + case.q_len)


def _per_head(case: Any) -> tuple[int, ...]:
    return tuple(3 * h + 1 for h in range(case.num_kv_heads))


def _of_heads(case: Any, *patterns: sr.Pattern) -> tuple[sr.Pattern, ...]:
    """Returns a pattern for each kv head, in turns; the first is `Full()`."""
    turns = sr.Full(), *patterns
    return tuple(turns[head % len(turns)] for head in range(case.num_kv_heads))


def _paddings(case: Any) -> tuple[int, ...]:
    return tuple(case.kv_len * (b + 1) // (case.batch + 1) for b in range(case.batch))


def _blocks(case: Any, *outer: int, block_size: int = 24) -> sr.Pattern:
    size = case.last_position // block_size + 1
    return sr.Blocks(random_table(*outer, size, size), block_size)


def _dense(case: Any, *outer: int) -> sr.Pattern:
    table = random_table(*outer, case.q_len, case.kv_len)
    table[..., -1:] = False  # a key that no query sees
    return sr.Dense(table)


def _grid(tokens: int) -> tuple[int, int]:
    rows = next((n for n in (5, 3, 2) if tokens % n == 0 and tokens >= 3 * n), 1)
    return rows, tokens // rows


# Where a pattern may stand: the pattern of a longer or shorter sequence is another one for some.
PATHS = "along the paths of trees"  # of any length; these also stand in documents
DOCUMENTS = "in documents of any lengths"
EQUAL_DOCUMENTS = "in documents of one length, which is its own"
WHOLE = "over the whole sequence only"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One constructor or operator of patterns."""

    name: str
    """First element of its specs; the constructor's name, if `build` does not say another."""

    rule: Callable[..., int] | None
    """Multiplicity of a pair: (place, query position, key position, arguments of the spec)."""

    draw: Callable[..., Spec]
    """Draws a legal spec for a scene: (draw, scene), and for a container a strategy of specs."""

    examples: Callable[[], list[Any]]
    """Patterns of this kind, new ones at each call."""

    cases: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Patterns for tests of `attention`, as functions of a `Case`, by what they show."""

    drawing: str = ""
    """A matrix drawn by hand, as in `drawings`."""

    sane: Callable[[], dict[str, Any]] | None = None
    """Keyword arguments for `B`, `H` and `N` above, of which the fuzzer spoils one."""

    constructor: str = ""
    """Public name in `sparsering`, where it is not `name`; empty for operators as well."""

    build: Callable[..., Any] | None = None
    """Makes the pattern of a spec's arguments; by default `constructor`."""

    stands: str = DOCUMENTS
    """PATHS, DOCUMENTS, EQUAL_DOCUMENTS or WHOLE."""

    inner: str = ""
    """Which arguments are specs: "last", "each head" (the first, a tuple of them), "both"."""

    is_mixture: bool = False
    """Whether its counts may exceed 1."""

    batched: Callable[..., bool] = lambda *args: False
    """Whether pairs may differ between batch entries, by the arguments."""

    joined: bool = True
    """Whether random masks join it with others; otherwise only the fuzzer does."""

    has_lengths: bool = False
    """Whether its first argument, lengths, may be a tensor."""

    long: bool = True
    """Whether it can be drawn for thousands of tokens: not a table with a number per token."""

    max_length: str = ""
    """Whether a cache of it must be told a length: "always", or "if blocks are selected"."""

    elsewhere: dict[str, str] = field(default_factory=dict)
    """For each of `rule`, `examples`, `cases`, `drawing` and `sane` that it lacks: where it is."""

    @property
    def public(self) -> str:
        """Name in `sparsering`; empty for an operator."""
        return self.constructor or ("" if self.inner == "both" else self.name)


# The kinds: a rule, a draw and a row each.


KINDS: dict[str, Kind] = {}
"""Rows by name. Tests of `attention` take their cases in this order."""


def add_kind(**row: Any) -> None:
    """Adds a row, by the fields of `Kind`."""
    kind = Kind(**row)
    KINDS[kind.name] = kind


def full(at: Place, p: int, k: int) -> int:
    return 1


add_kind(
    name="Full",
    rule=full,
    draw=lambda draw, scene: ("Full",),
    examples=lambda: [sr.Full()],
    cases={"full": lambda case: sr.Full()},
    sane=dict,
    stands=PATHS,
    drawing="""
        ("Full",), 2, kv_len=3  # full holds every pair of a rectangle
        1 1 1
        1 1 1
    """,
)


def causal(at: Place, p: int, k: int) -> int:
    return k <= p


add_kind(
    name="Causal",
    rule=causal,
    draw=lambda draw, scene: ("Causal",),
    examples=lambda: [sr.Causal()],
    cases={"causal": lambda case: sr.Causal()},
    sane=dict,
    stands=PATHS,
    drawing="""
        ("Causal",), 4  # causal is the lower triangle
        1 . . .
        1 1 . .
        1 1 1 .
        1 1 1 1
    """,
)


def sliding_window(
    at: Place, p: int, k: int, left: int | None, right: int | None = 0, dilation: int = 1
) -> int:
    if left is not None and k < p - left:
        return 0
    if right is not None and k > p + right:
        return 0
    return (p - k) % dilation == 0


def draw_window(draw: Draw, scene: Scene) -> Spec:
    left, right = (
        distance(draw, scene) if draw(st.booleans()) else None for _ in ("left", "right")
    )
    return ("SlidingWindow", left, right, draw(st.sampled_from((1, 1, 2, 3, 4, 7))))


add_kind(
    name="SlidingWindow",
    rule=sliding_window,
    draw=draw_window,
    examples=lambda: [sr.SlidingWindow(4, 2, 2), sr.SlidingWindow(None, 7)],
    cases={
        "window": lambda case: sr.SlidingWindow(9),
        "two-sided window": lambda case: sr.SlidingWindow(5, 19),
        "window without left end": lambda case: sr.SlidingWindow(None, 3),
        "dilated window": lambda case: sr.SlidingWindow(20, 20, 3),
    },
    sane=lambda: {"left": 5, "right": 2, "dilation": 2},
    stands=PATHS,
    drawing="""
        ("SlidingWindow", 2), 5  # a window to the left includes the query's own key
        1 . . . .
        1 1 . . .
        1 1 1 . .
        . 1 1 1 .
        . . 1 1 1
    """,
)


def global_tokens(
    at: Place, p: int, k: int, count: int, rows: bool = True, columns: bool = True
) -> int:
    return (rows and 0 <= p < count) or (columns and k < count)


def draw_global_tokens(draw: Draw, scene: Scene) -> Spec:
    rows, columns = draw(st.sampled_from(((True, True), (True, False), (False, True))))
    return ("GlobalTokens", distance(draw, scene), rows, columns)


add_kind(
    name="GlobalTokens",
    rule=global_tokens,
    draw=draw_global_tokens,
    examples=lambda: [sr.GlobalTokens(3, rows=False)],
    cases={
        "global tokens": lambda case: sr.GlobalTokens(5),
        "global rows": lambda case: sr.GlobalTokens(20, columns=False),
        "global columns": lambda case: sr.GlobalTokens(20, rows=False),
    },
    sane=lambda: {"count": 3, "rows": True, "columns": False},
    stands=PATHS,
    drawing="""
        ("GlobalTokens", 2), 4  # global tokens are rows and columns
        1 1 1 1
        1 1 1 1
        1 1 . .
        1 1 . .
    """,
)


def dilated(
    at: Place, p: int, k: int, segment_length: int, dilation_rate: int, offset: Any = "head"
) -> int:
    if offset == "head":
        residue = at.kv_head % dilation_rate
    elif offset == "block":
        heads_per_residue = -(-at.num_kv_heads // dilation_rate)
        residue = at.kv_head // heads_per_residue
    elif isinstance(offset, tuple):
        residue = offset[at.kv_head] % dilation_rate
    else:
        residue = offset % dilation_rate
    if p // segment_length != k // segment_length:
        return 0
    on_grid = [(x % segment_length) % dilation_rate == residue for x in (p, k)]
    return all(on_grid)


def draw_dilated(draw: Draw, scene: Scene) -> Spec:
    segment_length = max(1, distance(draw, scene))
    return ("Dilated", segment_length, draw(st.integers(1, 7)), head_offset(draw, scene))


add_kind(
    name="Dilated",
    rule=dilated,
    draw=draw_dilated,
    examples=lambda: [sr.Dilated(8, 2), sr.Dilated(8, 2, offset=(1, 0))],
    cases={
        "dilated": lambda case: sr.Dilated(16, 4),
        "dilated, rate not dividing": lambda case: sr.Dilated(13, 3, "block"),
        "dilated, segment past the end": lambda case: sr.Dilated(1000, 7, 5),
        "dilated, offset of each head": lambda case: sr.Dilated(24, 4, _per_head(case)),
    },
    sane=lambda: {"segment_length": 16, "dilation_rate": 4, "offset": (0, 1)},
    stands=PATHS,
    drawing="""
        # a branch stays in its segment, and a ragged last segment has only real keys
        ("Dilated", 4, 2, 0), 7
        1 . 1 . . . .
        . . . . . . .
        1 . 1 . . . .
        . . . . . . .
        . . . . 1 . 1
        . . . . . . .
        . . . . 1 . 1
    """,
)


def longnet(
    at: Place,
    p: int,
    k: int,
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    offset: Any = "head",
) -> int:
    branches = zip(segment_lengths, dilation_rates, strict=True)
    return sum(bool(dilated(at, p, k, w, r, offset)) for w, r in branches)


def draw_longnet(draw: Draw, scene: Scene) -> Spec:
    count = draw(st.integers(2, 3))
    segment_lengths = tuple(max(1, distance(draw, scene)) for _ in range(count))
    dilation_rates = tuple(draw(st.integers(1, 7)) for _ in range(count))
    return ("LongNet", segment_lengths, dilation_rates, head_offset(draw, scene))


add_kind(
    name="LongNet",
    rule=longnet,
    draw=draw_longnet,
    examples=lambda: [sr.LongNet((4, 8), (1, 2))],
    cases={
        "longnet": lambda case: sr.LongNet((8, 16, 64), (1, 2, 4)),
        "longnet, every rate above 1": lambda case: sr.LongNet((7, 30), (2, 3), "block"),
        "longnet, offset of each head": lambda case: sr.LongNet((11, 64), (2, 5), _per_head(case)),
    },
    sane=lambda: {"segment_lengths": (8, 16), "dilation_rates": (1, 2), "offset": "head"},
    is_mixture=True,
    drawing="""
        ("LongNet", (2, 4), (1, 2)), 6  # a LongNet counts a pair once per branch
        2 1 1 . . .
        1 1 . . . .
        1 . 2 1 . .
        . . 1 1 . .
        . . . . 2 1
        . . . . 1 1
    """,
)


def block_dilated(at: Place, p: int, k: int, rates: tuple[int, ...], block_size: int) -> int:
    b, key_block = block_of(p, block_size), k // block_size
    return b is not None and (b == key_block or abs(b - key_block) in rates)


def draw_block_dilated(draw: Draw, scene: Scene) -> Spec:
    rates = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True)))
    return ("BlockDilated", rates, draw(st.sampled_from(BLOCK_SIZES)))


add_kind(
    name="BlockDilated",
    rule=block_dilated,
    draw=draw_block_dilated,
    examples=lambda: [sr.BlockDilated((1, 4), 16)],
    cases={"block dilated": lambda case: sr.BlockDilated((1, 3), 16)},
    sane=lambda: {"rates": (1, 2), "block_size": 8},
    stands=PATHS,
    drawing="""
        # block-dilated sees its own block and those at a rate
        ("BlockDilated", (2,), 2), 7
        # blocks 0 0 1 1 2 2 3
        1 1 . . 1 1 .
        1 1 . . 1 1 .
        . . 1 1 . . 1
        . . 1 1 . . 1
        1 1 . . 1 1 .
        1 1 . . 1 1 .
        . . 1 1 . . 1
    """,
)


def block_window(at: Place, p: int, k: int, radius: int, block_size: int) -> int:
    b = block_of(p, block_size)
    return b is not None and abs(b - k // block_size) <= radius


def draw_block_window(draw: Draw, scene: Scene) -> Spec:
    return ("BlockWindow", draw(st.integers(0, 4)), draw(st.sampled_from(BLOCK_SIZES)))


add_kind(
    name="BlockWindow",
    rule=block_window,
    draw=draw_block_window,
    examples=lambda: [sr.BlockWindow(2, 16)],
    cases={"block window": lambda case: sr.BlockWindow(1, 24)},
    sane=lambda: {"radius": 1, "block_size": 8},
    stands=PATHS,
    drawing="""
        ("BlockWindow", 1, 2), 7  # a block window has a radius in blocks
        1 1 1 1 . . .
        1 1 1 1 . . .
        1 1 1 1 1 1 .
        1 1 1 1 1 1 .
        . . 1 1 1 1 1
        . . 1 1 1 1 1
        . . . . 1 1 1
    """,
)


def block_causal(at: Place, p: int, k: int, block_size: int) -> int:
    b = block_of(p, block_size)
    return b is not None and k // block_size <= b


def draw_block_causal(draw: Draw, scene: Scene) -> Spec:
    return ("BlockCausal", draw(st.sampled_from(BLOCK_SIZES)))


add_kind(
    name="BlockCausal",
    rule=block_causal,
    draw=draw_block_causal,
    examples=lambda: [sr.BlockCausal(16)],
    cases={"block causal": lambda case: sr.BlockCausal(24)},
    sane=lambda: {"block_size": 8},
    stands=PATHS,
    drawing="""
        ("BlockCausal", 2), 5  # block causal sees its own block whole, and earlier ones
        1 1 . . .
        1 1 . . .
        1 1 1 1 .
        1 1 1 1 .
        1 1 1 1 1
    """,
)


def causal_blocks(at: Place, p: int, k: int, sizes: tuple) -> int:
    """Blocks of unlike sizes, written out token by token."""
    if p < 0:
        return 0
    blocks = [i for i, size in enumerate(documents_of(at, sizes)) for _ in range(size)]
    return k < len(blocks) and (p >= len(blocks) or blocks[k] <= blocks[p])


def draw_causal_blocks(draw: Draw, scene: Scene) -> Spec:
    return ("CausalBlocks", document_lengths(draw, scene))


add_kind(
    name="CausalBlocks",
    rule=causal_blocks,
    draw=draw_causal_blocks,
    examples=lambda: [sr.BlockCausal((3, 4)), sr.BlockCausal(((3, 4), (7, 0)))],
    cases={"blocks of unlike sizes": lambda case: sr.BlockCausal(_parts(case.kv_len))},
    constructor="BlockCausal",
    stands=EQUAL_DOCUMENTS,
    batched=nested(2),
    has_lengths=True,
    elsewhere={"sane": "the row of BlockCausal"},
    drawing="""
        # blocks of unlike sizes; an empty one is nothing
        ("CausalBlocks", (1, 3, 0, 2)), 6
        1 . . . . .
        1 1 1 1 . .
        1 1 1 1 . .
        1 1 1 1 . .
        1 1 1 1 1 1
        1 1 1 1 1 1
    """,
)


def block_diffusion(at: Place, p: int, k: int, n: int, block_size: int) -> int:
    """Noisy tokens 0 .. n - 1 in blocks, then the clean ones; as in the paper's three parts."""
    if p < 0:
        return 0
    (q_clean, b), (k_clean, b_of_k) = ((x >= n, x % n // block_size) for x in (p, k))
    own_block = b == b_of_k and q_clean == k_clean
    earlier_clean = b > b_of_k and k_clean and not q_clean
    clean_causal = b >= b_of_k and k_clean and q_clean
    return own_block or earlier_clean or clean_causal


def draw_block_diffusion(draw: Draw, scene: Scene) -> Spec:
    size = draw(st.sampled_from(BLOCK_SIZES))
    least = max(1, scene.kv_len, scene.first_position + scene.q_len)
    n = size * (-(-least // (2 * size)) + draw(st.sampled_from((0, 0, 1))))
    return ("BlockDiffusion", n, size)


add_kind(
    name="BlockDiffusion",
    rule=block_diffusion,
    draw=draw_block_diffusion,
    examples=lambda: [sr.BlockDiffusion(32, 16)],
    cases={"block diffusion": lambda case: sr.BlockDiffusion(24 * -(-_end(case) // 48), 24)},
    sane=lambda: {"n": 24, "block_size": 8},
    max_length="if blocks are selected",
    drawing="""
        # noisy blocks see themselves and earlier clean ones; clean ones up to their own
        ("BlockDiffusion", 4, 2), 8
        1 1 . . . . . .
        1 1 . . . . . .
        . . 1 1 1 1 . .
        . . 1 1 1 1 . .
        . . . . 1 1 . .
        . . . . 1 1 . .
        . . . . 1 1 1 1
        . . . . 1 1 1 1
    """,
)


def window_start(index: int, length: int, kernel: int, dilation: int) -> int:
    """First key of a window; the function of NATTEN's reference kernels (get_window_start)."""
    radius = kernel // 2
    first = index - radius * dilation
    if first < 0:
        return index % dilation
    if index + radius * dilation >= length:
        residue, whole = index % dilation, length // dilation * dilation
        rest = length - whole
        if residue < rest:
            return length - rest + residue - 2 * radius * dilation
        return whole + residue - kernel * dilation
    return first


def seen_of_dim(
    index: int, length: int, kernel: int, dilation: int, stride: int, is_causal: bool
) -> list[int]:
    """Keys that a coordinate sees in one dim, listed class by class: NATTEN 0.21's rules."""
    if stride == 1 and kernel % 2 and not is_causal:
        first = window_start(index, length, kernel, dilation)
        return list(range(first, first + kernel * dilation, dilation))
    own = [j for j in range(length) if j % dilation == index % dilation]
    at = own.index(index)
    if is_causal:
        leader = min(at // stride * stride + stride - 1, len(own) - 1)
        return [own[j] for j in range(at + 1) if leader - j < kernel]
    leader = min(at // stride * stride + stride // 2, len(own) - 1)
    first = min(max(leader - kernel // 2, 0), len(own) - kernel)
    return own[first : first + kernel]


@functools.lru_cache(256)
def in_tiles(shape: tuple[int, ...], tile: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    """The coordinates of a grid's tokens in their order: sorted by tile, then inside it."""
    points = list(product(*map(range, shape)))
    if tile is None:
        return points
    return sorted(points, key=lambda c: (tuple(x // t for x, t in zip(c, tile, strict=True)), c))


def neighbourhood(
    at: Place,
    p: int,
    k: int,
    shape: tuple[int, ...],
    radius: Any,
    dilation: Any = 1,
    window: Any = None,
    stride: Any = 1,
    causal: Any = False,
    tile: Any = None,
) -> int:
    """Reads NATTEN's semantics dim by dim."""
    if not 0 <= p < math.prod(shape) or k >= math.prod(shape):
        return 0
    points = in_tiles(shape, tile)
    for dim, (n, i, j) in enumerate(zip(shape, points[p], points[k], strict=True)):
        r, d, w, s, c = (
            x[dim] if isinstance(x, tuple) else x
            for x in (radius, dilation, window, stride, causal)
        )
        if j not in seen_of_dim(i, n, 2 * r + 1 if w is None else w, d, s, c):
            return 0
    return 1


def draw_neighbourhood(draw: Draw, scene: Scene) -> Spec:
    """Draws windows over a grid of 1 to 3 dims with as many tokens as the scene has keys."""
    if not scene.kv_len:
        return ("Full",)  # no grid is empty
    shape, rest = [], scene.kv_len
    for _ in range(draw(st.integers(0, 2))):
        shape.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= shape[-1]
    shape.append(rest)
    windows = []
    by_radius = draw(st.booleans())
    for size in shape:
        dilation = draw(st.integers(1, min(3, size)))
        causal = not by_radius and draw(st.booleans())
        if by_radius:
            window = 2 * draw(st.integers(0, min(4, (size // dilation - 1) // 2))) + 1
        else:
            window = draw(st.integers(1, 9 if causal else min(9, size // dilation)))
        stride = 1 if by_radius else draw(st.integers(1, window))
        windows.append((window, dilation, stride, causal))
    widths, dilations, strides, causals = zip(*windows, strict=True)
    tile = None
    if draw(st.booleans()):
        tile = tuple(draw(st.integers(1, n + 1)) for n in shape)
    if not by_radius:
        return ("Neighbourhood", tuple(shape), None, dilations, widths, strides, causals, tile)
    radii = tuple(window // 2 for window in widths)
    if tile is None:
        return ("Neighbourhood", tuple(shape), radii, dilations)
    return ("Neighbourhood", tuple(shape), radii, dilations, None, 1, False, tile)


def build_neighbourhood(shape: Any, radius: Any, dilation: Any = 1, *rest: Any) -> sr.Pattern:
    names = ("window", "stride", "causal", "tile")
    return sr.Neighbourhood(shape, radius, dilation, **dict(zip(names, rest, strict=False)))


def _neighbourhood(shape: tuple[int, ...]) -> sr.Pattern:
    """A window of 3 along the last dim, or of 1 where the dim has less."""
    radius = min(1, (shape[-1] - 1) // 2)
    return sr.Neighbourhood(shape, (0,) * (len(shape) - 1) + (radius,))


def _in_tiles(shape: tuple[int, ...]) -> sr.Pattern:
    """Causal in the first dim, in tiles of 2 tokens there and 3 in the last."""
    window = (2, *(min(2, n) for n in shape[1:]))
    causal = (True, *(False for _ in shape[1:]))
    tile = (2, *(3 for _ in shape[1:]))
    return sr.Neighbourhood(shape, window=window, stride=window, causal=causal, tile=tile)


add_kind(
    name="Neighbourhood",
    rule=neighbourhood,
    draw=draw_neighbourhood,
    build=build_neighbourhood,
    examples=lambda: [
        sr.Neighbourhood((1, 7), (0, 1), (1, 2)),
        sr.Neighbourhood((7,), window=4, stride=3, causal=True),
        sr.Neighbourhood((7, 1), window=(2, 1), tile=(3, 1)),
    ],
    cases={
        "neighbourhood": lambda case: _neighbourhood((case.kv_len,)),
        "neighbourhood of a grid": lambda case: _neighbourhood(_grid(case.kv_len)),
        "neighbourhood in tiles": lambda case: _in_tiles(_grid(case.kv_len)),
    },
    sane=lambda: {
        "shape": (5, 8),
        "window": (2, 3),
        "dilation": (1, 2),
        "stride": (2, 1),
        "causal": (True, False),
        "tile": (2, 3),
    },
    stands=WHOLE,
    drawing="""
        # a neighbourhood is shifted inwards at both borders
        ("Neighbourhood", (6,), 1), 6
        1 1 1 . . .
        1 1 1 . . .
        . 1 1 1 . .
        . . 1 1 1 .
        . . . 1 1 1
        . . . 1 1 1
    """,
)


def rearranged(at: Place, p: int, k: int, order: tuple[int, ...], inner: Spec) -> int:
    """The token at place i stood at place order[i]."""
    if not (0 <= p < len(order) and 0 <= k < len(order)):
        return 0
    old = Place(at.row, at.batch, at.head, at.num_heads, at.num_kv_heads, len(order))
    return pair_count(inner, old, order[p], order[k])


def draw_rearranged(draw: Draw, scene: Scene, inner: Any) -> Spec:
    """Draws `inner` for all tokens as queries, and an order: any, or one that turns the tokens."""
    length = scene.kv_len
    order = list(range(length))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    if draw(st.booleans()):
        rng.shuffle(order)
    elif length:
        by = rng.randrange(length)
        order = order[by:] + order[:by]
    inside = replace(scene, q_len=length, q_start=0)
    return ("Rearranged", tuple(order), draw(inner(inside)))


def build_rearranged(order: tuple[int, ...], inner: Any) -> Any:
    return sr.Rearranged(inner, torch.tensor(order, dtype=torch.int64))


def _turned(length: int) -> tuple[int, ...]:
    return (*range(length // 3, length), *range(length // 3))[::-1]


add_kind(
    name="Rearranged",
    rule=rearranged,
    draw=draw_rearranged,
    build=build_rearranged,
    examples=lambda: [
        build_rearranged((2, 0, 1, 4, 3, 6, 5), sr.Causal() & sr.SlidingWindow(2)),
        build_rearranged((2, 0, 1, 4, 3, 6, 5), sr.LongNet((2, 4), (1, 2))),
    ],
    cases={
        "rearranged": lambda case: build_rearranged(
            _turned(case.kv_len), sr.SlidingWindow(9, 4) | sr.GlobalTokens(2)
        ),
    },
    sane=lambda: {"mask": narrow(), "order": torch.arange(N - 1, -1, -1)},
    stands=WHOLE,
    inner="last",
    long=False,
    drawing="""
        # a triangle whose last token stands first: it sees all, and it alone sees itself
        ("Rearranged", (2, 0, 1), ("Causal",)), 3
        1 1 1
        . 1 .
        . 1 1
    """,
)


def difference(at: Place, p: int, k: int, left: Spec, right: Spec) -> int:
    return pair_count(left, at, p, k) * (1 - pair_count(right, at, p, k))


def draw_sides(name: str) -> Callable[..., Spec]:
    """Returns a function that draws an operator's two sides."""
    return lambda draw, scene, inner: (name, draw(inner(scene)), draw(inner(scene)))


add_kind(
    name="-",
    rule=difference,
    draw=draw_sides("-"),
    examples=lambda: [sr.Causal() - sr.SlidingWindow(2)],
    cases={"causal but for a window": lambda case: sr.Causal() - sr.SlidingWindow(9, 2)},
    build=operator.sub,
    inner="both",
    drawing="""
        ("-", ("Causal",), ("SlidingWindow", 1, 0)), 5  # all but the window
        . . . . .
        . . . . .
        1 . . . .
        1 1 . . .
        1 1 1 . .
    """,
)


def draw_random_blocks(draw: Draw, scene: Scene) -> Spec:
    density = draw(st.one_of(st.floats(0.05, 1.0), st.just(1.0)))
    seed, per_head = draw(st.integers(0, 5)), draw(st.booleans())
    return ("RandomBlocks", density, draw(st.sampled_from(BLOCK_SIZES)), seed, per_head)


add_kind(
    name="RandomBlocks",
    rule=None,
    draw=draw_random_blocks,
    examples=lambda: [sr.RandomBlocks(0.25, 16, seed=3, per_head=False)],
    cases={
        "random blocks": lambda case: sr.RandomBlocks(0.4, 16),
        "random blocks of one choice": lambda case: sr.RandomBlocks(0.2, 8, 3, per_head=False),
    },
    sane=lambda: {"density": 0.5, "block_size": 8, "seed": 3, "per_head": True},
    max_length="always",
    elsewhere={
        "rule": "its choice is random: tests/patterns/test_random_blocks.py",
        "drawing": "its choice is random: tests/patterns/test_random_blocks.py",
    },
)


def hierarchical(at: Place, p: int, k: int, levels: tuple, block_size: int) -> int:
    b = block_of(p, block_size)
    if b is None:
        return 0
    for stride, window in levels:
        if b % max(1, stride // block_size) != 0:
            continue
        if window is None or abs(b - k // block_size) <= (window // block_size) // 2:
            return 1
    return 0


def draw_hierarchical(draw: Draw, scene: Scene) -> Spec:
    window = st.one_of(st.none(), st.integers(0, 3 * max(8, scene.kv_len)))
    level = st.tuples(st.integers(1, max(8, scene.kv_len)), window)
    levels = tuple(draw(st.lists(level, min_size=1, max_size=3)))
    return ("Hierarchical", levels, draw(st.sampled_from(BLOCK_SIZES)))


add_kind(
    name="Hierarchical",
    rule=hierarchical,
    draw=draw_hierarchical,
    examples=lambda: [sr.Hierarchical(((16, 64), (64, None)), 16)],
    cases={
        "hierarchical": lambda case: sr.Hierarchical(((16, 32), (32, 64), (64, None)), 16),
    },
    sane=lambda: {"levels": ((8, 16), (16, None)), "block_size": 8},
    stands=PATHS,
    max_length="always",
    drawing="""
        # a hierarchy is the union of its levels
        ("Hierarchical", ((2, 4), (4, None)), 2), 8
        # near: one block around; far: even blocks see all
        1 1 1 1 1 1 1 1
        1 1 1 1 1 1 1 1
        1 1 1 1 1 1 . .
        1 1 1 1 1 1 . .
        1 1 1 1 1 1 1 1
        1 1 1 1 1 1 1 1
        . . . . 1 1 1 1
        . . . . 1 1 1 1
    """,
)


def documents(at: Place, p: int, k: int, lengths: tuple) -> int:
    lengths = documents_of(at, lengths)
    found = document_of(p, lengths)
    return found is not None and found == document_of(k, lengths)


def draw_documents(draw: Draw, scene: Scene) -> Spec:
    return ("Documents", document_lengths(draw, scene))


add_kind(
    name="Documents",
    rule=documents,
    draw=draw_documents,
    examples=lambda: [sr.Documents((3, 4)), sr.Documents(((3, 4), (7, 0)))],
    cases={"documents": lambda case: sr.Documents(_parts(case.kv_len))},
    sane=lambda: {"lengths": (15, 25)},
    stands=EQUAL_DOCUMENTS,
    batched=nested(2),
    has_lengths=True,
    drawing="""
        # documents are blocks on the diagonal, an empty one is nothing
        ("Documents", (2, 0, 1, 2)), 5
        1 1 . . .
        1 1 . . .
        . . 1 . .
        . . . 1 1
        . . . 1 1
    """,
)


def packed(at: Place, p: int, k: int, lengths: tuple, inner: Spec) -> int:
    lengths = documents_of(at, lengths)
    found = document_of(p, lengths)
    if found is None or found != document_of(k, lengths):
        return 0
    number, first = found
    inside = Place(at.row, at.batch, at.head, at.num_heads, at.num_kv_heads, lengths[number])
    return pair_count(inner, inside, p - first, k - first)


def draw_packed(draw: Draw, scene: Scene, inner: Any) -> Spec:
    """Draws `inner` for a scene as long as the longest document."""
    lengths = document_lengths(draw, scene)
    longest = max(max(entry) if isinstance(entry, tuple) else entry for entry in lengths)
    return (
        "Packed",
        lengths,
        draw(inner(replace(scene, q_len=longest, kv_len=longest, q_start=0))),
    )


add_kind(
    name="Packed",
    rule=packed,
    draw=draw_packed,
    examples=lambda: [
        sr.Packed((3, 4), sr.Dilated(4, 2)),
        sr.Packed(((3, 4), (7, 0)), sr.Causal()),
    ],
    cases={
        "packed": lambda case: sr.Packed(
            _parts(case.kv_len), sr.Dilated(8, 3) | sr.GlobalTokens(2)
        ),
        "packed longnet": lambda case: sr.Packed(_parts(case.kv_len), sr.LongNet((8, 16), (1, 2))),
    },
    sane=lambda: {"lengths": (15, 25), "pattern": narrow()},
    inner="last",
    batched=nested(2),
    has_lengths=True,
    drawing="""
        # batch entries packed on their own, positions from each document's start
        ("Packed", ((2, 2), (1, 3)), ("Dilated", 2, 2, 1)), 4
        . . . .
        . 1 . .
        . . . .
        . . . 1
        ---
        . . . .
        . . . .
        . . 1 .
        . . . .
    """,
)


def key_padding(at: Place, p: int, k: int, lengths: tuple[int, ...]) -> int:
    return k < lengths[at.batch]


def draw_key_padding(draw: Draw, scene: Scene) -> Spec:
    length = st.integers(0, scene.kv_len + 2)
    lengths = draw(st.lists(length, min_size=scene.batch, max_size=scene.batch))
    return ("KeyPadding", tuple(lengths))


add_kind(
    name="KeyPadding",
    rule=key_padding,
    draw=draw_key_padding,
    examples=lambda: [sr.KeyPadding((5, 7))],
    cases={"key padding": lambda case: sr.KeyPadding(_paddings(case))},
    sane=lambda: {"lengths": (30, 40)},
    stands=PATHS,
    batched=lambda *args: True,
    has_lengths=True,
    drawing="""
        # padding hides the keys past each length
        ("KeyPadding", (3, 0, 1)), 2, kv_len=3
        1 1 1
        1 1 1
        ---
        . . .
        . . .
        ---
        1 . .
        1 . .
    """,
)


def blocks(at: Place, p: int, k: int, active: Any, block_size: int) -> int:
    b = block_of(p, block_size)
    if b is None:
        return 0
    if table_depth(active) == 4:
        active = active[at.batch]
    if table_depth(active) == 3:
        active = active[head_of_table(at, len(active))]
    return active[b][k // block_size]


def draw_blocks(draw: Draw, scene: Scene) -> Spec:
    last_position = scene.first_position + scene.q_len - 1
    fitting = st.sampled_from((4, 16, 24, 32, 64) if scene.kv_len <= 70 else (24, 32, 64))
    block_size = draw(fitting)
    rows = max(0, last_position) // block_size + 1 + draw(st.integers(0, 1))
    columns = max(0, scene.kv_len - 1) // block_size + 1 + draw(st.integers(0, 1))
    num_tables = draw(st.sampled_from((1, scene.num_kv_heads, scene.num_heads)))
    shapes = ((), (num_tables,), (scene.batch, num_tables))
    outer = draw(st.sampled_from(shapes))
    return ("Blocks", table(draw, *outer, rows, columns), block_size)


def tensor_first(constructor: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Returns the constructor, with a table for its first argument."""
    return lambda first, *rest: constructor(torch.tensor(first, dtype=dtype), *rest)


add_kind(
    name="Blocks",
    rule=blocks,
    draw=draw_blocks,
    examples=lambda: [sr.Blocks(TABLE.clone(), 16)],
    cases={
        "blocks": _blocks,
        "blocks of each head": lambda case: _blocks(case, case.num_heads),
        "blocks of each kv head": lambda case: _blocks(case, case.num_kv_heads, block_size=16),
        "blocks of each batch entry": lambda case: _blocks(case, case.batch, case.num_heads),
    },
    sane=lambda: {"active": some(H, 5, 5), "block_size": 8},
    build=tensor_first(sr.Blocks, torch.bool),
    batched=nested(4),
    long=False,
    max_length="if blocks are selected",
    drawing="""
        # a table of blocks, the last one ragged
        ("Blocks", ((True, False), (False, True), (True, True)), 2), 5, kv_len=3, q_start=0
        1 1 .
        1 1 .
        . . 1
        . . 1
        1 1 1
    """,
)


def dense(at: Place, p: int, k: int, mask: Any) -> int:
    if table_depth(mask) == 3:
        mask = mask[head_of_table(at, len(mask))]
    return mask[at.row][k]


def draw_dense(draw: Draw, scene: Scene) -> Spec:
    outer = draw(st.sampled_from(((), (1,), (scene.num_heads,))))
    return ("Dense", table(draw, *outer, scene.q_len, scene.kv_len))


add_kind(
    name="Dense",
    rule=dense,
    draw=draw_dense,
    examples=lambda: [sr.Dense(TABLE.clone())],
    cases={
        "dense": _dense,
        "dense of each head": lambda case: _dense(case, case.num_heads),
    },
    sane=lambda: {"mask": some(H, N, N)},
    build=tensor_first(sr.Dense, torch.bool),
    stands=WHOLE,
    long=False,
    drawing="""
        # a dense mask is read by query index, so a negative position may have keys
        ("Dense", ((True, False), (False, True), (True, True))), 3, kv_len=2
        1 .
        . 1
        1 1
    """,
)


def intersection(at: Place, p: int, k: int, left: Spec, right: Spec) -> int:
    """Reads `&`: one side is a mask (0 or 1), so a mixture's pair keeps its count or vanishes."""
    return pair_count(left, at, p, k) * pair_count(right, at, p, k)


add_kind(
    name="&",
    rule=intersection,
    draw=draw_sides("&"),
    examples=lambda: [
        sr.Causal() & sr.SlidingWindow(9),
        (sr.Causal() + sr.SlidingWindow(9)) & sr.Documents((3, 4)),
    ],
    cases={
        "intersection": lambda case: (
            sr.Causal()
            & (sr.SlidingWindow(9) | sr.GlobalTokens(4))
            & sr.KeyPadding(_paddings(case))
        ),
    },
    build=operator.and_,
    inner="both",
    drawing="""
        # a causal LongNet keeps its counts
        ("&", ("LongNet", (2, 4), (1, 2)), ("Causal",)), 4
        2 . . .
        1 1 . .
        1 . 2 .
        . . 1 1
    """,
)


def union(at: Place, p: int, k: int, left: Spec, right: Spec) -> int:
    return max(pair_count(left, at, p, k), pair_count(right, at, p, k))


add_kind(
    name="|",
    rule=union,
    draw=draw_sides("|"),
    examples=lambda: [sr.Causal() | sr.GlobalTokens(2)],
    cases={"union of steps": lambda case: sr.SlidingWindow(6) | sr.SlidingWindow(40, 40, 4)},
    build=operator.or_,
    inner="both",
    drawing="""
        # a union counts a pair of both once
        ("|", ("SlidingWindow", 1), ("GlobalTokens", 1)), 4
        1 1 1 1
        1 1 . .
        1 1 1 .
        1 . 1 1
    """,
)


def total(at: Place, p: int, k: int, left: Spec, right: Spec) -> int:
    return pair_count(left, at, p, k) + pair_count(right, at, p, k)


add_kind(
    name="+",
    rule=total,
    draw=draw_sides("+"),
    examples=lambda: [sr.Causal() + sr.SlidingWindow(9)],
    cases={
        "mixture with overlap": lambda case: sr.Causal() + sr.SlidingWindow(6, 2) + sr.Full(),
        "branch twice": lambda case: sr.LongNet((16, 16, 32), (2, 2, 1)),
        "mixture under masks": lambda case: (
            sr.LongNet((8, 30), (1, 3)) & sr.Causal() & sr.KeyPadding(_paddings(case))
        ),
    },
    build=operator.add,
    inner="both",
    is_mixture=True,
    drawing="""
        ("+", ("Causal",), ("GlobalTokens", 1)), 3  # a sum counts a pair of both twice
        2 1 1
        2 1 .
        2 1 1
    """,
)


def per_head(at: Place, p: int, k: int, specs: tuple) -> int:
    return pair_count(specs[at.kv_head], at, p, k)


def draw_per_head(draw: Draw, scene: Scene, inner: Any) -> Spec:
    """Draws one to three distinct patterns, so that heads share some of them."""
    distinct = draw(st.lists(inner(scene), min_size=1, max_size=3))
    heads = scene.num_kv_heads
    return ("PerHead", tuple(draw(st.sampled_from(distinct)) for _ in range(heads)))


add_kind(
    name="PerHead",
    rule=per_head,
    draw=draw_per_head,
    examples=lambda: [sr.PerHead((sr.Causal() & sr.SlidingWindow(2), sr.Dilated(4, 2)))],
    cases={
        "a pattern of each head": lambda case: sr.PerHead(_of_heads(case, sr.SlidingWindow(5, 2))),
        "a mixture of each head": lambda case: sr.PerHead(
            _of_heads(case, sr.Causal(), sr.LongNet((8, 30), (1, 3)), sr.SlidingWindow(20, 20, 3))
        ),
    },
    sane=lambda: {"patterns": (narrow(), sr.Dilated(4, 2))},
    inner="each head",
    drawing="""
        # the query heads of a kv head have its pattern
        ("PerHead", (("Causal",), ("SlidingWindow", 0, 1))), 3, num_heads=4, num_kv_heads=2
        1 . . | 1 . . | 1 1 . | 1 1 .
        1 1 . | 1 1 . | . 1 1 | . 1 1
        1 1 1 | 1 1 1 | . . 1 | . . 1
    """,
)


def pooled_causal(at: Place, p: int, k: int, size: int, stride: int) -> int:
    return p >= k * stride + size - 1


def draw_pooled(draw: Draw, scene: Scene) -> Spec:
    return ("PooledCausal", max(1, distance(draw, scene)), draw(st.integers(1, 7)))


add_kind(
    name="PooledCausal",
    rule=pooled_causal,
    draw=draw_pooled,
    examples=lambda: [sr.PooledCausal(4, 2)],
    sane=lambda: {"size": 4, "stride": 2},
    stands=PATHS,
    elsewhere={"cases": "tests/selection"},
    drawing="""
        # a pooled key of 3 tokens, every 2 tokens, is seen once its last token is there
        ("PooledCausal", 3, 2), 7, kv_len=3, q_start=0
        . . .
        . . .
        1 . .
        1 . .
        1 1 .
        1 1 .
        1 1 1
    """,
)


def chunked_causal(at: Place, p: int, k: int, size: int) -> int:
    return p // size == k // size and k <= p


def draw_chunks(draw: Draw, scene: Scene) -> Spec:
    return ("ChunkedCausal", max(1, distance(draw, scene)))


add_kind(
    name="ChunkedCausal",
    rule=chunked_causal,
    draw=draw_chunks,
    examples=lambda: [sr.ChunkedCausal(6)],
    sane=lambda: {"size": 8},
    stands=PATHS,
    elsewhere={"cases": "its pattern is one of Causal and BlockWindow"},
    drawing="""
        ("ChunkedCausal", 3), 5  # causal inside chunks
        1 . . . .
        1 1 . . .
        1 1 1 . .
        . . . 1 .
        . . . 1 1
    """,
)


def path_of(node: int, parents: tuple[int, ...]) -> list[int]:
    """Nodes from the root to a node."""
    return [] if node < 0 else [*path_of(parents[node], parents), node]


def depth_in_tree(x: int, lengths: tuple[int, ...], parents: tuple[int, ...]) -> int:
    """Tokens before token `x` on its path; positions outside count on from the nearest node."""
    inside = min(max(x, 0), sum(lengths) - 1)
    node, first = document_of(inside, lengths)
    return sum(lengths[i] for i in path_of(node, parents)[:-1]) + x - first


def tree(at: Place, p: int, k: int, lengths: tuple, parents: tuple, *rest: Any) -> int:
    """Reads `("Tree", lengths, parents, inner)`, or with the length of `inner` before it."""
    *length, inner = rest
    lengths, parents = documents_of(at, lengths), documents_of(at, parents)
    found = document_of(p, lengths), document_of(k, lengths)
    if None in found or found[1][0] not in path_of(found[0][0], parents):
        return 0
    depths = (depth_in_tree(x, lengths, parents) for x in (p, k))
    return pair_count(inner, replace(at, kv_len=length[0]) if length else at, *depths)


def draw_tree(draw: Draw, scene: Scene, inner: Any) -> Spec:
    lengths = document_lengths(draw, scene)
    is_nested = bool(lengths) and isinstance(lengths[0], tuple)

    def parents(entry: tuple[int, ...]) -> tuple[int, ...]:
        near = [draw(st.sampled_from((i - 1, i - 1, -1, i // 2 - 1))) for i in range(len(entry))]
        return tuple(near)

    above = tuple(map(parents, lengths)) if is_nested else parents(lengths)
    return ("Tree", lengths, above, draw(inner(scene)))


def build_tree(lengths: Any, parents: Any, *rest: Any) -> Any:
    """Builds a `Tree`, whose pattern may have a length of its own before it."""
    *length, inner = rest
    return sr.Tree(lengths, parents, inner, **({"length": length[0]} if length else {}))


add_kind(
    name="Tree",
    rule=tree,
    draw=draw_tree,
    examples=lambda: [
        sr.Tree((3, 0, 4), (-1, 0, 0), sr.Dilated(4, 2)),
        sr.Tree(((3, 4), (7, 0)), ((-1, 0), (-1, 0)), sr.Causal()),
    ],
    sane=lambda: {"lengths": (15, 5, 20), "parents": (-1, 0, 0), "pattern": narrow()},
    build=build_tree,
    inner="last",
    batched=nested(2),
    has_lengths=True,
    elsewhere={"cases": "tests/patterns/test_tree.py"},
    drawing="""
        # two answers of a prompt see the prompt and themselves, never each other
        ("Tree", (2, 1, 2), (-1, 0, 0), ("Causal",)), 5
        1 . . . .
        1 1 . . .
        1 1 1 . .
        1 1 . 1 .
        1 1 . 1 1
    """,
)


def key_mask(at: Place, p: int, k: int, valid: Any) -> int:
    return (valid[at.batch] if table_depth(valid) == 2 else valid)[k]


def draw_key_mask(draw: Draw, scene: Scene) -> Spec:
    """Draws key masks, shared by all batch entries or different for each."""
    if draw(st.booleans()):
        return ("KeyMask", table(draw, 1, scene.kv_len)[0])
    return ("KeyMask", table(draw, scene.batch, scene.kv_len))


add_kind(
    name="KeyMask",
    rule=key_mask,
    draw=draw_key_mask,
    examples=lambda: [sr.KeyMask(KEYS.clone()), sr.KeyMask(KEYS.clone().expand(2, -1))],
    sane=lambda: {"valid": some(B, N)},
    build=tensor_first(sr.KeyMask, torch.bool),
    stands=EQUAL_DOCUMENTS,
    batched=nested(2),
    long=False,
    elsewhere={"cases": "tests/attention/test_key_masks.py"},
    drawing="""
        # a key mask holds where it is True, for every query
        ("KeyMask", (True, False, True)), 2, kv_len=3
        1 . 1
        1 . 1
    """,
)


def selected_blocks(
    at: Place, p: int, k: int, indices: Any, block_size: int, query_block: int, first_row: int
) -> int:
    if p < 0:
        return 0
    depth = table_depth(indices)
    if depth == 4:
        indices = indices[at.batch if len(indices) > 1 else 0]
    if depth >= 3:
        indices = indices[head_of_table(at, len(indices))]
    return k // block_size in indices[p // query_block - first_row]


def draw_selected_blocks(draw: Draw, scene: Scene) -> Spec:
    """Draws selected blocks; their rows cover the queries and may begin before the first."""
    query_block = draw(st.sampled_from((1, 2, 4, 16)))
    block_size = query_block * draw(st.sampled_from((1, 2, 8)))
    return _selection(draw, scene, block_size, query_block, st.integers(1, 4))


def draw_selected_keys(draw: Draw, scene: Scene) -> Spec:
    """Draws lists of single keys for each query, some of them longer than a step of a kernel."""
    return _selection(draw, scene, 1, 1, st.sampled_from((1, 2, 4, 9, 20, 70)))


def _selection(draw: Draw, scene: Scene, block_size: int, query_block: int, slots: Any) -> Spec:
    """Draws the table of a selection; it has repeats, -1, and numbers past the last block.

    Tables of single keys may have rows of different lengths, one of them a hub's.
    """
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

    def row(most: int = listed) -> tuple[int, ...]:
        return tuple(numbers.randint(-1, blocks) for _ in range(most))

    if block_size == 1 and rows > 1 and draw(st.sampled_from((False, False, True))):
        hub, most = numbers.randrange(rows), draw(st.sampled_from((20, 40, 70)))
        lengths = [most if r == hub else numbers.randint(0, 3) for r in range(rows)]
        return ("SelectedBlocks", tuple(map(row, lengths)), 1, 1, first_row)
    table = tuple(tuple(row() for _ in range(rows)) for _ in range(heads))
    if batch > 1 or draw(st.booleans()):
        rest = [tuple(tuple(row() for _ in range(rows)) for _ in range(heads))] * (batch - 1)
        return ("SelectedBlocks", (table, *rest), block_size, query_block, first_row)
    return ("SelectedBlocks", table, block_size, query_block, first_row)


def has_hubs(table: Any) -> bool:
    """Whether the rows of a selection's table have different lengths."""
    return table_depth(table) == 2 and len(set(map(len, table))) > 1


def slots_shape(table: Any) -> tuple[int, int]:
    """Shape of a slot bias: rows and slots of a table, or a slot for each key if it has hubs."""
    if has_hubs(table):
        return sum(map(len, table)), 1
    rows, slots = torch.tensor(table).shape[-2:]
    return rows, slots


def build_selected_blocks(table: Any, *rest: int) -> Any:
    if not has_hubs(table):
        return sr.SelectedBlocks(torch.tensor(table, dtype=torch.int64), *rest)
    keys = torch.tensor([key for row in table for key in row], dtype=torch.int64)
    starts = torch.tensor([0, *map(len, table)]).cumsum(0)
    return EdgeLists(keys[:, None], *rest, starts)


add_kind(
    name="SelectedBlocks",
    rule=selected_blocks,
    draw=draw_selected_blocks,
    examples=list,
    sane=lambda: {"indices": chosen(), "block_size": 16, "query_block": 16, "first_row": 0},
    build=build_selected_blocks,
    stands=WHOLE,
    batched=nested(4),
    joined=False,
    long=False,
    elsewhere={
        "examples": "tests/attention/test_selected_blocks.py",
        "cases": "tests/attention/test_selected_blocks.py",
        "drawing": "tests/attention/test_selected_blocks.py",
    },
)


MASK_MODS = {  # FlexAttention's mask functions take query indices; they also work on plain ints
    "near": "lambda b, h, q, k: abs(q - k) < 4",
    "of heads": "lambda b, h, q, k: (q + h) % 3 == k % 3",
    "of entries": "lambda b, h, q, k: (q + k + b) % 4 != 0",
}


def mask_mod(at: Place, p: int, k: int, name: str, batch: int | None) -> int:
    return eval(MASK_MODS[name])(at.batch, at.head, at.row, k)


def draw_mask_mod(draw: Draw, scene: Scene) -> Spec:
    name = draw(st.sampled_from(tuple(MASK_MODS)))
    return ("MaskMod", name, scene.batch if name == "of entries" else None)


@functools.cache
def build_mask_mod(name: str, batch: int | None) -> Any:
    return sr.from_mask_mod(eval(MASK_MODS[name]), batch_size=batch)


add_kind(
    name="MaskMod",
    rule=mask_mod,
    draw=draw_mask_mod,
    examples=list,
    constructor="from_mask_mod",
    build=build_mask_mod,
    stands=WHOLE,
    batched=lambda name, batch: batch is not None,
    joined=False,
    long=False,
    max_length="always",
    elsewhere={
        "examples": "a function has no equal: tests/patterns/test_custom.py",
        "cases": "tests/patterns/test_custom.py",
        "drawing": "tests/patterns/test_custom.py",
        "sane": "tests/fuzz/sane.py",
    },
)


OPERATORS = tuple(name for name, kind in KINDS.items() if kind.inner == "both")


def parts_of(spec: Spec) -> tuple[Spec, ...]:
    """Returns the specs inside a spec: an operator's sides, a container's patterns."""
    name, *args = spec
    inner = KINDS[name].inner
    if inner == "both":
        return tuple(args)
    return {"": (), "last": tuple(args[-1:]), "each head": args[0] if args else ()}[inner]


def with_parts(spec: Spec, parts: tuple[Any, ...]) -> Spec:
    """Returns the spec with other specs (or what is built from them) inside."""
    name, *args = spec
    inner = KINDS[name].inner
    if inner == "both":
        return (name, *parts)
    if inner == "last":
        return (name, *args[:-1], *parts)
    return (name, parts) if inner else spec
