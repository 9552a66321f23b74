"""Blocks selected by content: scores, selection, pooled keys, masses, losses, and attention.

In the coverage table a row is a function. Methods take the place of classes of patterns for
functions without a pattern.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import inf, nan
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
from oracles import blocks_oracle
from oracles import strategies as drawn
from oracles.attention_oracle import arranged
from oracles.kinds import slots_shape
from oracles.patterns_oracle import build
from oracles.strategies import HEADS, Scene, scenes
from torch import Tensor

import sparsering as sr
import sparsering.selection

from . import calls, specs
from .attack import Cell, Refused

METHODS = ("mean", "sub", "gauss", "bounds", "antidiagonal", "exact")
JOINS = ("SelectedBlocks", *specs.OPERATORS)
LENGTHS = ("one token", "no token")
ROWS = ("q_start", "query_block", "not causal", "ragged last block", *LENGTHS)
OF_CALLS = ("scale", "strides", "groups", "large scores")
OPTIONS: dict[str, tuple[Sequence[str], Sequence[str]]] = {  # function: (options, classes)
    "block_scores": ((*ROWS, *OF_CALLS, "gradients", "bounds", "valid"), METHODS),
    "select_blocks": (
        (
            "none",
            *ROWS[:4],
            *("top_p", "sink", "local", "few visible", "no row", "no block"),
            *("NaN", "ties", "infinite", "bounds", "valid"),
        ),
        ("-",),
    ),
    "pool_blocks": (("overlap", "gaps", *ROWS[3:], "strides", "bounds", "valid"), ("-",)),
    "DocumentBlocks": (("none", "query_block", "not causal", "no token", "entries"), METHODS),
    "block_mass": (("lse", "weight", "q_start", *OF_CALLS), JOINS),
    "selection_loss": (
        ("none", "indices", "row_weight", "groups", "hidden", "no mass", "no row", "no block"),
        ("-",),
    ),
}
POOLED = ("ragged last block", "one token", "groups")
CHOSEN = (*POOLED, "q_start", "query_block", "top_p")
OPTIONS |= {f"attention {name}": (CHOSEN, (*JOINS, "PooledCausal")) for name in calls.BACKENDS}
CELLS = [
    Cell(option, form, function, dtype)
    for function, (options, forms) in OPTIONS.items()
    for option, form, dtype in product(options, forms, calls.DTYPES)
    if form != "PooledCausal" or option in POOLED
]


@dataclass(frozen=True)
class Function:
    """One call of a function of `sparsering.selection`, compared with its definition."""

    dtype: str
    seed: int
    function: ClassVar[str]

    @property
    def form(self) -> str:
        return "-"

    def cells(self) -> list[Cell]:
        return [Cell(o, self.form, self.function, self.dtype) for o in self.options()]

    def options(self) -> list[str]:
        used = self.used()
        return [name for name in OPTIONS[self.function][0] if used.get(name)] or ["none"]

    def used(self) -> dict[str, bool]:
        """Returns whether each option is in use."""
        raise NotImplementedError

    def inputs(self) -> dict[str, Any]:
        """Draws tensors, as leaves of the graph, by the names of their arguments."""
        raise NotImplementedError

    def given(self) -> dict[str, Any]:
        """Returns all other arguments."""
        raise NotImplementedError

    def largest(self, **exact: Any) -> float:
        """Largest number whose rounding error the results inherit, besides their own."""
        return max((x.detach().abs().max().item() for x in exact.values() if x.numel()), default=0)

    def check(self) -> None:
        """Compares the result and the gradients with those of the definition."""
        inputs = {name: x for name, x in self.inputs().items() if x is not None}
        exact = {
            name: x.detach().double().requires_grad_(x.requires_grad)
            if x.is_floating_point()
            else x
            for name, x in inputs.items()
        }
        found = getattr(sr.selection, self.function)(**inputs, **self.given())
        expected = getattr(blocks_oracle, self.function)(**exact, **self.given())
        sums = 2.0**-20 if self.dtype != "float64" else 2.0**-49
        largest = 1 + self.largest(**exact)
        assert_close("result", found, expected, sums, largest)
        leaves = [name for name, x in inputs.items() if x.requires_grad]
        if not leaves:
            assert not found.requires_grad
            return
        generator = torch.Generator().manual_seed(self.seed)
        grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        grad = grad.to(found.dtype).where(expected.isfinite(), 0.0)
        got, of_exact = (
            torch.autograd.grad(out, [x[n] for n in leaves], given, materialize_grads=True)
            for out, x, given in ((found, inputs, grad), (expected, exact, grad.double()))
        )
        for name, a, b in zip(leaves, got, of_exact, strict=True):
            most = sum(x.abs().max().item() for x in (b, grad) if x.numel())
            assert_close(f"gradient of {name}", a, b, sums * largest * largest, most)


def assert_close(
    name: str, found: Tensor, expected: Tensor, relative: float, beside: float
) -> None:
    """Asserts that numbers differ only by rounding, and are infinite beyond the dtype's range."""
    assert found.shape == expected.shape, f"{name}: shape {tuple(found.shape)}"
    number, exact = found.detach().double(), expected.detach().double()
    assert not number.isnan().any(), f"{name}: NaN"
    infinite = exact.isinf()
    assert torch.equal(number[infinite], exact[infinite]), f"{name}: other infinities"
    unit = torch.finfo(found.dtype)
    error = (number.clamp(unit.min, unit.max) - exact.clamp(unit.min, unit.max))[~infinite].abs()
    bound = (relative + unit.eps) * exact.abs() + relative * beside + unit.smallest_normal
    worst = (error / bound[~infinite]).max().item() if error.numel() else 0.0
    assert worst <= 1, f"{name}: {worst:.3g} times the bound; off by {error.max():.3g}"


@dataclass(frozen=True)
class Scores(Function):
    """A call of `block_scores` with a method; `call` has the query and key."""

    call: calls.Call
    method: str
    block_size: int
    query_block: int
    parts: int
    causal: bool
    learns: bool
    bounded: bool
    padded: bool
    function: ClassVar[str] = "block_scores"

    @property
    def form(self) -> str:
        return self.method

    def used(self) -> dict[str, bool]:
        scene = self.call.scene
        return dict.fromkeys(self.call.options(), True) | {
            "query_block": self.query_block > 1,
            "not causal": not self.causal,
            "ragged last block": scene.kv_len % self.block_size > 0,
            "one token": scene.q_len == 1,
            "no token": not scene.q_len * scene.kv_len,
            "gradients": self.learns,
            "bounds": self.bounded,
            "valid": self.padded,
        }

    def inputs(self) -> dict[str, Tensor]:
        found = self.call.tensors()
        return {name: found[name].requires_grad_(self.learns) for name in ("query", "key")}

    def given(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "query_block": self.query_block,
            "method": self.method,
            "parts": self.parts,
            "causal": self.causal,
            "scale": self.call.head_dim**-0.5 if self.call.scale is None else self.call.scale,
            "q_start": self.call.scene.q_start,
            **self.bounds(),
            **self.valid(),
        }

    def bounds(self) -> dict[str, Tensor]:
        """Draws the bounds of the keys that each query sees."""
        if not self.bounded:
            return {}
        scene = self.call.scene
        return drawn_bounds(scene.batch, scene.q_len, scene.kv_len, self.seed)

    def valid(self) -> dict[str, Tensor]:
        """Draws which tokens exist."""
        if not self.padded:
            return {}
        scene = self.call.scene
        return {"valid": drawn_valid(scene.batch, scene.kv_len, self.seed)}

    def largest(self, *, query: Tensor, key: Tensor) -> float:
        most = abs(self.given()["scale"])
        for x in (query, key):
            most *= x.detach().abs().sum(-1).max().item() if x.numel() else 0.0
        return most + most**2 * (self.method == "gauss")


@dataclass(frozen=True)
class Choice(Function):
    """A call of `select_blocks` on scores of some kind."""

    shape: tuple[int, ...]
    kind: str
    bounded: bool
    padded: bool
    k: int
    block_size: int
    query_block: int
    top_p: float | None
    sink: int
    local: int
    causal: bool
    q_start: int
    function: ClassVar[str] = "select_blocks"

    def used(self) -> dict[str, bool]:
        *_, rows, blocks = self.shape
        return {
            "q_start": self.q_start != 0,
            "query_block": self.query_block > 1,
            "not causal": not self.causal,
            "ragged last block": blocks > (self.q_start + rows) // self.block_size,
            "top_p": self.top_p is not None,
            "sink": self.sink > 1,
            "local": self.local > 1,
            "few visible": self.k > blocks,
            "no row": not rows,
            "no block": not blocks,
            "bounds": self.bounded,
            "valid": self.padded,
            self.kind: True,
        }

    def inputs(self) -> dict[str, Tensor]:
        return {"scores": drawn_scores(self.shape, self.kind, self.dtype, self.seed)}

    def given(self) -> dict[str, Any]:
        names = [field.name for field in fields(Choice)][6:]
        given = {name: getattr(self, name) for name in names}
        *outer, rows, blocks = self.shape
        if self.padded:
            keys = max(0, blocks * self.block_size - self.seed % self.block_size)
            given["valid"] = drawn_valid(outer[0] if outer else 1, keys, self.seed)
        if not self.bounded:
            return given
        queries = max(0, rows * self.query_block - self.q_start % self.query_block)
        keys = blocks * self.block_size
        return given | drawn_bounds(outer[0] if outer else 1, queries, keys, self.seed)

    def check(self) -> None:
        """Compares selections; if a share is within rounding of top_p, either one is right."""
        scores, given = self.inputs()["scores"], self.given()
        found = sr.selection.select_blocks(scores, **given)
        either = [given]
        if self.top_p is not None:
            either = [given | {"top_p": self.top_p * (1 + part)} for part in (-1e-5, 0, 1e-5)]
        expected = [blocks_oracle.select_blocks(scores.float(), **each) for each in either]
        right = torch.stack([(found == each).all(-1) for each in expected]).any(0)
        assert right.all(), f"{found[~right][:1]} in place of {expected[0][~right][:1]}"


@dataclass(frozen=True)
class Pool(Function):
    """A call of `pool_blocks` on random numbers."""

    shape: tuple[int, int, int, int]
    arrange: str
    size: int
    stride: int
    bounded: bool
    padded: bool
    function: ClassVar[str] = "pool_blocks"

    def used(self) -> dict[str, bool]:
        length = self.shape[2]
        return {
            "overlap": self.stride < self.size,
            "gaps": self.stride > self.size,
            "ragged last block": (length - self.size) % self.stride > 0,
            "one token": length == 1,
            "no token": not length,
            "strides": self.arrange != "contiguous",
            "bounds": self.bounded,
            "valid": self.padded,
        }

    def inputs(self) -> dict[str, Tensor]:
        torch.manual_seed(self.seed)
        return {"x": arranged(self.shape, self.arrange, calls.DTYPES[self.dtype]).requires_grad_()}

    def given(self) -> dict[str, Any]:
        given: dict[str, Any] = {"size": self.size, "stride": self.stride}
        batch, _, length, _ = self.shape
        if self.bounded:
            given |= drawn_bounds(batch, length, length, self.seed)
        if self.padded:
            given["valid"] = drawn_valid(batch, length, self.seed)
        return given


@dataclass(frozen=True)
class Packed(Function):
    """Scores, choices and means of packed documents, compared with those of each alone."""

    lengths: tuple[tuple[int, ...], ...]  # of one entry, or of each
    method: str
    block_size: int
    query_block: int
    causal: bool
    k: int
    function: ClassVar[str] = "DocumentBlocks"

    @property
    def form(self) -> str:
        return self.method

    def used(self) -> dict[str, bool]:
        return {
            "query_block": self.query_block > 1,
            "not causal": not self.causal,
            "no token": any(0 in row for row in self.lengths),
            "entries": len(self.lengths) > 1,
        }

    def check(self) -> None:
        """Compares what each document gets in its row with what it gets alone."""
        torch.manual_seed(self.seed)
        size, row, tokens = self.block_size, self.query_block, sum(self.lengths[0])
        dtype = calls.DTYPES[self.dtype]
        query, key = (torch.randn(2, h, tokens, 6).to(dtype) for h in (4, 2))
        given = self.lengths if len(self.lengths) > 1 else self.lengths[0]
        blocks = sr.selection.DocumentBlocks(given, size)
        own: dict[str, Any] = {"query_block": row, "causal": self.causal}
        of_scores = {**own, "method": self.method, "parts": min(row, 2)}
        q, k = blocks.arrange(query), blocks.arrange(key)
        known = {**blocks.bounds, "valid": blocks.valid}
        scores = sr.selection.block_scores(q, k, size, **of_scores, **known)
        chosen = sr.selection.select_blocks(scores, self.k, block_size=size, **own, **known)
        means = sr.selection.pool_blocks(k, size, row, **known)
        assert torch.equal(blocks.restore(k), key)
        unit = 2.0**-20 if self.dtype != "float64" else 2.0**-49
        for entry in range(2):
            first = place = 0
            for n in self.lengths[entry % len(self.lengths)]:
                num_blocks, num_rows = -(-n // size), -(-n // row)
                if n:
                    q, k = (x[entry, None, :, first : first + n].double() for x in (query, key))
                    options = {**of_scores, "scale": 6**-0.5, "q_start": 0}
                    alone = blocks_oracle.block_scores(q, k, size, **options)
                    here = scores[entry, None, :, place // row :][:, :, :num_rows]
                    of_document = here[..., place // size :][..., :num_blocks]
                    assert_close("scores", of_document, alone, unit, 40)
                    assert here.isfinite().sum() == of_document.isfinite().sum()
                    right = blocks_oracle.select_blocks(of_document, self.k, block_size=size, **own)
                    right = torch.where(right < 0, -1, right + place // size)
                    assert torch.equal(
                        chosen[entry, None, :, place // row :][:, :, :num_rows], right
                    )
                    pooled = blocks_oracle.pool_blocks(k, size, row)
                    of_document = means[entry, None, :, place // row :][:, :, : pooled.shape[2]]
                    assert_close("means", of_document, pooled, unit, 40)
                first, place = first + n, place + num_blocks * size


@dataclass(frozen=True)
class Loss(Function):
    """A call of `selection_loss` on all blocks, or on random slots."""

    shape: tuple[int, int, int, int]
    kind: str
    group: int
    indices: tuple[int, tuple[int, ...]] | None  # number of slots, dims before the rows
    row_weight: tuple[int, ...] | None
    function: ClassVar[str] = "selection_loss"

    def used(self) -> dict[str, bool]:
        return {
            "indices": self.indices is not None,
            "row_weight": self.row_weight is not None,
            "groups": self.group > 1,
            "no row": not self.shape[2],
            "no block": not self.shape[3],
            self.kind: True,
        }

    def inputs(self) -> dict[str, Tensor]:
        scores = drawn_scores(self.shape, self.kind, self.dtype, self.seed)
        batch, heads, rows, blocks = self.shape
        slots = blocks if self.indices is None else self.indices[0]
        mass = torch.rand(batch, heads * self.group, rows, slots)
        mass[:, :, torch.rand(rows) < 0.3 + 0.7 * (self.kind == "no mass")] = 0
        found = {"scores": scores.requires_grad_(), "mass": mass.to(scores.dtype)}
        if self.indices is not None:
            found["indices"] = torch.randint(-1, blocks + 1, (*self.indices[1], rows, slots))
        if self.row_weight is not None:
            found["row_weight"] = torch.rand(self.row_weight)
        return found

    def given(self) -> dict[str, Any]:
        return {}

    def largest(self, **exact: Any) -> float:
        scores = exact["scores"].detach()
        return scores[scores.isfinite()].abs().max().item() if scores.isfinite().any() else 0.0


def drawn_bounds(batch: int, queries: int, keys: int, seed: int) -> dict[str, Tensor]:
    """Draws the first key of each query and the end of its keys; one of them may be missing."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1 if seed % 2 else batch, queries)
    first = torch.randint(-2, keys + 1, shape, generator=generator)
    stop = first + torch.randint(-2, keys + 2, shape, generator=generator)
    return [{"first": first, "stop": stop}, {"first": first}, {"stop": stop}][seed % 3]


def drawn_valid(batch: int, keys: int, seed: int) -> Tensor:
    """Draws tokens that exist: left padding, right padding or holes, in all entries or each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (keys,) if seed % 2 else (batch, keys)
    if seed % 3 == 0:
        return torch.rand(shape, generator=generator) < 0.6
    edge = torch.randint(0, keys + 1, (*shape[:-1], 1), generator=generator)
    place = torch.arange(keys)
    return (place >= edge if seed % 3 == 1 else place < edge).view(shape)


def drawn_scores(shape: Sequence[int], kind: str, dtype: str, seed: int) -> Tensor:
    """Draws scores of a kind: with ties, infinities, NaN, or plain."""
    torch.manual_seed(seed)
    scores = 2 * torch.randn(tuple(shape))
    if kind == "ties":
        scores = scores.round()
    odd = {"NaN": (nan,), "infinite": (inf, -inf), "hidden": (-inf,)}.get(kind, ())
    for value in odd:
        scores = scores.masked_fill(torch.rand(scores.shape) < 0.2, value)
    return scores.to(calls.DTYPES[dtype])


@dataclass(frozen=True)
class Mass(calls.Call):
    """A call of `block_mass`, which equals the gradient of lse by a bias of each slot."""

    given_lse: bool = False
    weight: tuple[int, int] | None = None  # dims of `weight` before the queries

    def cells(self) -> list[Cell]:
        names = ["lse"] * self.given_lse + ["weight"] * (self.weight is not None)
        names += [name for name in self.options() if name in OPTIONS["block_mass"][0]]
        forms = [form for form in specs.classes_of(self.spec) if form in JOINS]
        return [Cell(o, f, "block_mass", self.dtype) for o in names or ["none"] for f in forms]

    def check(self) -> None:
        """Compares every slot's mass with the sum of its pairs' weights."""
        tensors = self.tensors()
        query, key = tensors["query"], tensors["key"]
        (selection,) = specs.selections(self.spec)
        slots = slots_shape(selection[1])
        shape = query.shape[:3]
        weight, further = torch.ones(shape), torch.zeros(shape)
        given: dict[str, Any] = {"scale": self.scale, "q_start": self.scene.q_start}
        if self.weight is not None:
            weight = given["weight"] = torch.rand(*self.weight, shape[2])
        nothing = torch.zeros(*shape, self.value_dim)
        if self.given_lse:
            lse = torch.from_numpy(self.expected(tensors, nothing, further).exact["lse"])
            further = torch.rand(shape)
            given["lse"] = (lse + further).to(torch.promote_types(query.dtype, torch.float32))
        try:
            mass = sr.selection.block_mass(query.detach(), key.detach(), build(self.spec), **given)
        except NotImplementedError as refusal:
            raise Refused(str(refusal)) from None
        tensors["slot_bias"] = torch.zeros(*shape[:2], *slots)
        biased = replace(self, slot_bias=(True, True))
        expected = biased.expected(tensors, nothing, weight * (-further.double()).exp())
        exact = torch.float64 if self.dtype == "float64" else torch.float32
        calls.compare({"slot_bias": mass}, expected, exact)


@dataclass(frozen=True)
class Chosen(calls.Call):
    """Attention to blocks as `select_blocks` selects them, with slot biases, or to pooled keys."""

    chosen_by: tuple[str, ...] = ()

    def cells(self) -> list[Cell]:
        function = f"attention {self.backend}"
        forms = [form for form in specs.classes_of(self.spec) if form in OPTIONS[function][1]]
        options = [name for name in (*self.chosen_by, *self.options()) if name in CHOSEN]
        return [Cell(o, f, function, self.dtype) for o in options or ["none"] for f in forms]


def plain_call(draw: st.DrawFn, cell: Cell, scene: Scene, backend: str = "default") -> calls.Call:
    """Draws a call of a cell's dtype, with options that all functions of queries and keys take."""

    def used(name: str) -> bool:
        return cell.option == name or draw(st.integers(0, 5)) == 5

    if cell.option == "groups":
        few = backend == "triton"
        heads = st.sampled_from(((2, 1), (4, 2), (6, 3), (4, 1))[: 1 if few else None])
        num_heads, num_kv_heads = draw(heads)
        scene = replace(scene, num_heads=num_heads, num_kv_heads=num_kv_heads)
    return calls.Call(
        ("Full",),
        scene,
        backend,
        cell.dtype,
        draw(st.integers(0, 99)),
        draw(st.sampled_from((16, 8, 5, 32, 1))),
        draw(st.sampled_from((16, 8, 5, 32, 1))),
        **calls.input_options(draw, used),
    )


def scene_of(draw: st.DrawFn, option: str, max_length: int = 70) -> Scene:
    """Draws a scene with the number of tokens or the first position that an option needs."""
    scene = draw(scenes(max_length=max_length, max_heads=4))
    if option == "one token":
        scene = replace(scene, q_len=1)
    if option == "no token":
        scene = replace(scene, **{draw(st.sampled_from(("q_len", "kv_len"))): 0})
    if option == "q_start" and scene.q_start is None:
        scene = replace(scene, q_start=draw(st.integers(-9, scene.kv_len + 5)))
    return scene


@st.composite
def scores(draw: st.DrawFn, cell: Cell) -> Scores:
    """Draws calls of `block_scores`."""
    scene = scene_of(draw, cell.option)
    method = cell.pattern
    row = draw(st.sampled_from((1, 2, 4, 8)[cell.option == "query_block" :]))
    size = row * draw(st.sampled_from((1, 2, 4)))
    divided = row if method == "antidiagonal" else size
    parts = draw(st.sampled_from([n for n in (1, 2, 4, 8) if divided % n == 0]))
    causal = cell.option != "not causal" and draw(st.integers(0, 3)) < 3
    if cell.option == "ragged last block":
        row, size, parts = max(2, row), max(2, size), 1
        if scene.kv_len % size == 0:
            scene = replace(scene, kv_len=scene.kv_len + 1)
    learns = cell.option == "gradients" or draw(st.booleans())
    call = plain_call(draw, cell, scene)
    bounded = cell.option == "bounds" or draw(st.integers(0, 3)) == 3
    padded = cell.option == "valid" or draw(st.integers(0, 3)) == 3
    own = cell.dtype, call.seed, call
    return Scores(*own, method, size, row, parts, causal, learns, bounded, padded)


@st.composite
def choices(draw: st.DrawFn, cell: Cell) -> Choice:
    """Draws calls of `select_blocks`."""
    option, ints = cell.option, st.integers
    rows = 0 if option == "no row" else draw(ints(0, 12))
    blocks = 0 if option == "no block" else draw(ints(0, 12))
    outer = draw(st.sampled_from(((), (2,), (2, 3), (1, 1), (0, 2))))
    kinds = ("NaN", "ties", "infinite")
    kind = option if option in kinds else draw(st.sampled_from(("none", *kinds)))
    sink = draw(ints(2, 4)) if option == "sink" else draw(ints(0, 3))
    local = draw(ints(2, 4)) if option == "local" else draw(ints(0, 3))
    k = min(sink + local, blocks) + draw(ints(0, 5))
    if option == "few visible":
        k = max(k, blocks + 1)
    row = draw(st.sampled_from((1, 2, 4, 8)[option == "query_block" :]))
    size = row * draw(st.sampled_from((1, 2, 4)))
    top_p = None
    if option == "top_p" or draw(st.booleans()):
        top_p = draw(st.sampled_from((0.5, 0.9, 1.0, 0.01, 0.999, 0.25, 1e-9)))
    causal = option != "not causal" and draw(st.booleans())
    start = draw(st.one_of(st.just(0), ints(-20, 60)))
    if option == "q_start":
        start = draw(ints(1, 60))
    if option == "ragged last block":  # adds blocks that no row reaches
        blocks = max(blocks, (start + rows) // size + 1)
        k = max(k, min(sink + local, blocks))
    shape = (*outer, rows, blocks)
    seed = draw(ints(0, 999))
    bounded = option == "bounds" or draw(st.integers(0, 3)) == 3
    padded = option == "valid" or draw(st.integers(0, 3)) == 3
    own = cell.dtype, seed, shape, kind, bounded, padded
    return Choice(*own, k, size, row, top_p, sink, local, causal, start)


@st.composite
def pools(draw: st.DrawFn, cell: Cell) -> Pool:
    """Draws calls of `pool_blocks`."""
    option, ints = cell.option, st.integers
    size, stride = draw(ints(1, 9)), draw(ints(1, 9))
    size, stride = {"overlap": (size + stride, stride), "gaps": (size, size + stride)}.get(
        option, (size, stride)
    )
    lengths = {"one token": st.just(1), "no token": st.just(0)}
    length = draw(lengths.get(option, ints(0, 40)))
    if option == "ragged last block":
        stride = max(2, stride)
        length += (length - size) % stride == 0
    arrange = draw(st.sampled_from(calls.ARRANGES[option == "strides" :]))
    batch, (heads, _), width = draw(ints(0, 2)), draw(st.sampled_from(HEADS)), draw(ints(1, 9))
    shape = (batch, heads, length, width)
    bounded = option == "bounds" or draw(ints(0, 3)) == 3
    padded = option == "valid" or draw(ints(0, 3)) == 3
    return Pool(cell.dtype, draw(ints(0, 99)), shape, arrange, size, stride, bounded, padded)


@st.composite
def packed(draw: st.DrawFn, cell: Cell) -> Packed:
    """Draws packed documents."""
    option, ints = cell.option, st.integers
    row = draw(st.sampled_from((1, 2, 4)[option == "query_block" :]))
    size = row * draw(st.sampled_from((1, 2, 4)[cell.pattern == "sub" :]))
    lengths = st.lists(ints(0, 20), min_size=1, max_size=4)
    first = tuple(draw(lengths)) + (0,) * (option == "no token")
    rows = [first]
    if option == "entries" or draw(st.booleans()):
        cut = draw(ints(0, sum(first)))
        rows.append((cut, sum(first) - cut))
    causal = option != "not causal" and draw(st.booleans())
    own = cell.dtype, draw(ints(0, 99)), tuple(rows), cell.pattern
    return Packed(*own, size, row, causal, draw(ints(2, 5)))


@st.composite
def losses(draw: st.DrawFn, cell: Cell) -> Loss:
    """Draws calls of `selection_loss`."""
    option, ints = cell.option, st.integers
    batch, heads = draw(ints(1, 2)), draw(ints(1, 3))
    rows = 0 if option == "no row" else draw(ints(0, 6))
    blocks = 0 if option == "no block" else draw(ints(0, 9))
    kinds = ("none", "ties", "hidden", "no mass")
    kind = option if option in kinds[1:] else draw(st.sampled_from(kinds))
    outer = ((), (1,), (heads,), (1, 1), (batch, 1), (1, heads), (batch, heads))
    indices = row_weight = None
    if option == "indices" or draw(st.booleans()):
        indices = (draw(ints(0, 6)), draw(st.sampled_from(outer)))
    if option == "row_weight" or draw(st.booleans()):
        row_weight = (*draw(st.sampled_from(outer)), rows)
    group = draw(ints(2, 3)) if option == "groups" else draw(ints(1, 2))
    shape = (batch, heads, rows, blocks)
    return Loss(cell.dtype, draw(ints(0, 99)), shape, kind, group, indices, row_weight)


@st.composite
def masses(draw: st.DrawFn, cell: Cell) -> Mass:
    """Draws calls of `block_mass`."""
    call = plain_call(draw, cell, scene_of(draw, cell.option, 40))
    given = with_selection(draw, cell, call)[0]
    batch, heads = call.scene.batch, call.scene.num_heads
    weight = None
    if cell.option == "weight" or draw(st.booleans()):
        weight = draw(st.sampled_from(((1, 1), (batch, 1), (1, heads), (batch, heads))))
    lse = cell.option == "lse" or draw(st.booleans())
    return Mass(**given, given_lse=lse, weight=weight)


@st.composite
def attended(draw: st.DrawFn, cell: Cell) -> Chosen:
    """Draws calls of `attention` with selected blocks, or pooled keys."""
    backend, ints = cell.backend.removeprefix("attention "), st.integers
    scene = scene_of(draw, cell.option, 24 if backend == "triton" else 50)
    call = plain_call(draw, cell, scene, backend)
    if cell.pattern != "PooledCausal":
        given, used = with_selection(draw, cell, call)
        bias = (draw(st.booleans()), draw(st.booleans())) if draw(st.booleans()) else None
        return Chosen(**given | {"slot_bias": bias}, chosen_by=used)
    size, stride, length = draw(ints(1, 9)), draw(ints(1, 9)), scene.q_len
    if cell.option == "ragged last block":
        stride = max(2, stride)
        length += (length - size) % stride == 0
    pooled = -(-max(0, length - size) // stride) + 1
    scene = replace(call.scene, q_len=length, kv_len=pooled, q_start=0)
    given = vars(call) | {"spec": ("PooledCausal", size, stride), "scene": scene}
    ragged = (length - size) % stride > 0
    used = ("ragged last block",) * ragged + ("one token",) * (length == 1)
    return Chosen(**given, chosen_by=used)


def with_selection(
    draw: st.DrawFn, cell: Cell, call: calls.Call
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Draws a call's fields with selected blocks, alone or joined; also the options in use."""
    scene, option = call.scene, cell.option
    if scene.first_position < 0:
        scene = replace(scene, q_start=0)
    row = draw(st.sampled_from((1, 2, 4, 16)[option == "query_block" :]))
    size = draw(st.sampled_from((16, 32, 16, row, 4 * row)))  # a slot bias needs multiples of 16
    if option == "ragged last block":
        size = max(size, 16)
        scene = replace(scene, kv_len=scene.kv_len + (scene.kv_len % size == 0))
    top_p = 0.6 if option == "top_p" or draw(st.booleans()) else None
    spec = draw(specs.chosen_blocks(scene, size, row, top_p))
    if cell.pattern != "SelectedBlocks":
        other = draw(drawn.masks(scene, 0))
        first = cell.pattern == "-" or draw(st.booleans())  # no selection is subtracted
        spec = (cell.pattern, *((spec, other) if first else (other, spec)))
    used = {
        "query_block": row > 1,
        "top_p": top_p is not None,
        "ragged last block": scene.kv_len % size > 0,
        "one token": scene.q_len == 1,
    }
    fitting = vars(call) | {"spec": spec, "scene": scene}
    return fitting, tuple(name for name, is_used in used.items() if is_used)


def cases(cell: Cell) -> st.SearchStrategy[Any]:
    """Strategy of cases of a cell's function."""
    kinds = {
        "block_scores": scores,
        "select_blocks": choices,
        "pool_blocks": pools,
        "DocumentBlocks": packed,
        "block_mass": masses,
        "selection_loss": losses,
    }
    return kinds.get(cell.backend, attended)(cell)
