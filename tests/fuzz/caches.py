"""Decoding caches: random steps of `KVCache` and `SelectedCache` against one pass by the oracle."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import hypothesis.strategies as st
from oracles.kinds import KINDS
from oracles.patterns_oracle import Spec, build, is_batched, leaves
from oracles.strategies import LAYOUT_BLOCK_SIZES, Scene

import sparsering as sr

from . import specs
from .attack import Cell
from .cache_steps import Run
from .calls import BACKENDS, DTYPES, HALF_ALONE, Call, Options, shared_options, with_half_tables

STEPS = (
    *("chunks", "single tokens", "no tokens", "unlike lengths", "fewer than given", "return_lse"),
    *("stored=False", "crop", "reorder", "repeat", "select", "join", "load", "copy"),
    "refused step",
    "draft",
    "keep=False",
)
OF_CACHE = ("page_size", "max_length", "rollback", "groups", "strides", "large scores", "autocast")
STORES = ("int8", "fp8")  # of float32 alone: half precision would round the drawn rows once more
AHEAD = "looks ahead"  # the pattern as it is drawn, not & Causal()
EXTRAS = ("scale", "block_size", "softcap", "distance_bias", "sink", "dropout", "half tables")
SELECTED = "SelectedCache"  # takes the place of a class of patterns in a cell
CELLS = [
    Cell(option, *rest)
    for option, *rest in product(
        (*STEPS, *OF_CACHE, *STORES, AHEAD, *EXTRAS), (*specs.CLASSES, SELECTED), BACKENDS, DTYPES
    )
    if (rest[2] != "float64" or option not in HALF_ALONE)
    and (rest[2] == "float32" or option not in STORES)
    and (rest[0] != SELECTED or option not in (AHEAD, *STORES))
]
TAKES = ("reorder", "repeat", "select", "join")
WRONG = (
    *("lengths too large", "lengths of too few entries", "crop forwards", "crop too far"),
    *("keys of another dtype", "keys of another width", "more keys than queries"),
    *("unknown backend", "negative softcap", "q_start", "sink of another shape"),
    *("index out of range", "past max_length", "load after tokens"),
)

Step = tuple[Any, ...]
"""(kind, numbers): `Run` fits the numbers to the current lengths, so any steps are legal."""


@dataclass(frozen=True)
class Selection:
    """Options of a `SelectedCache`, in place of a pattern."""

    k: int
    block_size: int
    method: str
    top_p: float | None
    sink: int
    local: int


@dataclass(frozen=True)
class Decoding(Options):
    """Steps of one cache; tensors are drawn from `seed`."""

    spec: Spec
    steps: tuple[Step, ...]
    backend: str
    dtype: str
    seed: int = 0
    total: int = 40
    batch: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 8
    value_dim: int = 8
    page_size: int = 16
    rollback: int = 0
    store: str | None = None
    has_max_length: bool = False
    looks_ahead: bool = False
    selection: Selection | None = None
    done: set[str] = field(default_factory=set, compare=False, repr=False)  # steps that ran

    @property
    def scene(self) -> Scene:
        return Scene(self.total, self.total, self.num_heads, self.num_kv_heads, 0, self.batch)

    @property
    def whole(self) -> Spec:
        """The pattern of the cache."""
        return self.spec if self.looks_ahead else ("&", self.spec, ("Causal",))

    def cells(self) -> list[Cell]:
        used = self.used() | {
            "page_size": self.page_size != 128,
            "max_length": self.has_max_length,
            "rollback": self.rollback > 0,
            "groups": self.num_heads != self.num_kv_heads,
            **{store: self.store == store for store in STORES},
            AHEAD: self.looks_ahead,
        }
        options = [*sorted(self.done), *(name for name, is_used in used.items() if is_used)]
        classes = [SELECTED] if self.selection else specs.classes_of(self.spec)
        return [Cell(o, c, self.backend, self.dtype) for o in options for c in classes]

    def cache(self) -> Any:
        keywords = self.keywords()
        if self.selection is None:
            heads = self.batch, self.num_kv_heads, self.head_dim
            return sr.KVCache(build(self.whole), *heads, **keywords, store=self.store)
        return sr.SelectedCache(
            self.batch, self.num_kv_heads, self.head_dim, **vars(self.selection), **keywords
        )

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of the cache."""
        return {
            "num_heads": self.num_heads,
            "value_dim": self.value_dim,
            "page_size": self.page_size,
            "rollback": self.rollback,
            "max_length": self.total if self.has_max_length else None,
        }

    def call(self, with_options: bool, spec: Spec, batch: int) -> Call:
        """Returns the call that computes the whole sequence in one pass."""
        names = ("scale", "softcap", "distance_bias", "sink", "dropout", "half_tables")
        given = {name: getattr(self, name) for name in names if with_options}
        dims = self.seed, self.head_dim, self.value_dim
        scene = replace(self.scene, batch=batch)
        return Call(spec, scene, "", self.dtype, *dims, autocast=self.autocast, **given)

    def check(self) -> None:
        """Compares every row of every step with the oracle, and the cached keys with live keys."""
        self.done.clear()
        Run(self).run()


SLOW = ("triton",)  # interpreted
CUTS = st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple)
NUMBERS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
EVER, STORED, NOT_CUT = st.booleans(), st.just(True), st.none()


def attends(
    n: st.SearchStrategy[int],
    cut: st.SearchStrategy[Any] = NOT_CUT,
    stored: st.SearchStrategy[bool] = STORED,
    with_lse: st.SearchStrategy[bool] = EVER,
) -> st.SearchStrategy[Step]:
    plain = st.integers(0, 3).map(lambda x: x == 3)
    return st.tuples(st.just("attend"), n, cut, stored, plain, with_lse)


@st.composite
def fewer(draw: st.DrawFn) -> Step:
    """Draws a step in which every entry takes the same number of the given tokens, not all."""
    n = draw(st.integers(2, 12))
    return draw(attends(st.just(n), st.integers(0, n - 1).map(lambda m: (m,))))


SINGLE = st.tuples(st.just("tokens"), st.integers(1, 20), EVER, EVER)
BY_NAME: dict[str, st.SearchStrategy[Step]] = {
    "chunks": attends(st.integers(2, 20)),
    "single tokens": SINGLE,
    "no tokens": attends(st.just(0)),
    "unlike lengths": attends(st.integers(1, 20), CUTS),
    "fewer than given": fewer(),
    "return_lse": attends(st.integers(1, 20), with_lse=st.just(True)),
    "stored=False": attends(st.integers(1, 9), stored=st.just(False)),
    "keep=False": attends(st.integers(1, 20), st.none() | CUTS, EVER).map(
        lambda step: ("trial", *step[1:])
    ),
    "draft": st.tuples(
        st.just("draft"), st.integers(1, 12), NUMBERS, st.integers(0, 12), EVER, EVER
    ),
    "crop": st.tuples(st.just("crop"), st.integers(1, 20)),
    **{name: st.tuples(st.just("take"), st.just(name), NUMBERS) for name in TAKES},
    "load": st.tuples(st.just("load"), st.integers(0, 30), NUMBERS | st.just(()), EVER.map(int)),
    "copy": st.tuples(st.just("copy"), EVER),
    "refused step": st.tuples(st.just("wrong"), st.sampled_from(WRONG)),
}


def stores(cell: Cell) -> st.SearchStrategy[str | None]:
    """Draws how the cache of a cell stores rows: mostly as they are."""
    if cell.option in STORES:
        return st.just(cell.option)
    few = cell.pattern != SELECTED and cell.dtype == "float32"
    return st.sampled_from((None, None, None, *STORES)) if few else st.none()


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Decoding:
    """Draws steps with a cell's option, class of patterns, backend and dtype, and other options."""
    slow = cell.backend in SLOW
    option = cell.option
    # Steps are drawn first, so that shrinking first tries fewer steps.
    likely = ["chunks", "chunks", "single tokens", "single tokens", "return_lse", "copy"]
    likely += ["keep=False"]
    unlikely = ["no tokens", "unlike lengths", "fewer than given", "refused step", "crop"]
    unlikely += ["stored=False", "draft", "draft"] * (cell.pattern != SELECTED)
    names = st.sampled_from(likely + unlikely)
    before = draw(st.lists(names, max_size=1 if slow else 4))
    after = draw(st.lists(names, max_size=0 if slow else 4))
    if option == "load" or draw(st.integers(0, 9)) == 9:
        before = ["load", *before]
    elif option in STEPS and option != "chunks":
        before = ["chunks", *before, option]
    steps = [draw(BY_NAME[name]) for name in [*before, *after, "single tokens"]]
    if slow:
        steps = [(kind, min(rest[0], 2), *rest[1:]) if kind == "tokens" else (kind, *rest)
                 for kind, *rest in steps]  # fmt: skip
    batch = draw(st.integers(1, 2 if slow else 3))
    if option == "unlike lengths":
        batch = max(2, batch)
    total = draw(st.integers(8, 24) if slow else st.integers(12, 70))
    pairs = ((1, 1), (2, 1)) if slow else ((1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (6, 3))
    pairs = tuple(h for h in pairs if option != "groups" or h[0] != h[1])
    num_heads, num_kv_heads = draw(st.sampled_from(pairs))
    scene = Scene(total, total, num_heads, num_kv_heads, None, batch)
    given: dict[str, Any] = {}
    spec: Spec = ("Full",)
    if cell.pattern == SELECTED:
        sink, local = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        given["selection"] = Selection(
            draw(st.integers(max(1, sink + local), 5)),
            draw(st.sampled_from((4, 8, 16))),
            draw(st.sampled_from(("sub", "mean", "gauss", "bounds", "exact"))),
            draw(st.sampled_from((None, None, 0.5, 0.9))) if sink + local else None,
            sink,
            local,
        )
    else:
        spec, _ = draw(specs.specs_with(cell.pattern, scene))
    if not is_batched(spec) and option not in TAKES:
        for name in draw(st.lists(st.sampled_from(TAKES), max_size=1)):
            steps.insert(draw(st.integers(1, len(steps))), draw(BY_NAME[name]))

    def used(name: str) -> bool:
        return option == name or draw(st.integers(0, 7)) == 7

    given["page_size"] = draw(st.sampled_from((16, 16, 16, 32, 128)))
    if option == "page_size":
        given["page_size"] = draw(st.sampled_from((16, 32, 48)))
    names_used = {leaf[0] for leaf in leaves(spec)}
    lengths = {KINDS[name].max_length for name in names_used}
    needs = "always" in lengths
    needs |= "SelectedBlocks" in names_used and "if blocks are selected" in lengths
    if cell.pattern != SELECTED:
        given["looks_ahead"] = used(AHEAD)
    needs |= given.get("looks_ahead", False)  # so that the oracle knows all keys that may come
    given["has_max_length"] = needs or option == "max_length" or draw(st.booleans())
    if option in ("crop", "rollback") or draw(st.booleans()):
        given["rollback"] = draw(st.sampled_from((1, 4, 20)))
    if used("block_size"):
        given["block_size"] = draw(st.sampled_from(LAYOUT_BLOCK_SIZES))
    given |= shared_options(draw, cell, used, spec)
    with_half_tables(cell, used, given)
    given["store"] = None if given.get("autocast") else draw(stores(cell))
    widths = st.sampled_from((8, 8, 16, 5, 32, 1))
    return Decoding(
        spec,
        tuple(steps),
        cell.backend,
        cell.dtype,
        draw(st.integers(0, 99)),
        total,
        batch,
        num_heads,
        num_kv_heads,
        draw(widths),
        draw(widths),
        **given,
    )
