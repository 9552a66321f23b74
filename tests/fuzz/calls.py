"""Random calls of `attention`: patterns, options, shapes, dtypes, backends, with all gradients."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import torch
from oracles import flash_packages
from oracles.attention_oracle import arranged
from oracles.kinds import slots_shape
from oracles.patterns_oracle import Spec, build, counts, leaves
from oracles.strategies import LAYOUT_BLOCK_SIZES, Scene, scenes
from torch import Tensor

import sparsering as sr
import sparsering.distributed

from . import oracle, specs
from .attack import Cell, Refused

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LIBRARIES = {  # backends that hand a whole call to a library, and the classes that they run alone
    "sdpa": ("Full", "Causal"),
    "flash": ("Full", "Causal", "SlidingWindow", "Documents"),
    "cudnn": (),  # it runs on GPUs alone; stand-ins of its package have tests of their own
}
BACKENDS = ("default", *(name for name in sr.backends() if name not in LIBRARIES))
OF_LIBRARIES = ("none", "scale", "q_start", "strides", "groups", "large scores", "autocast")
WITHOUT_LSE = ("sdpa",)  # backends that return out alone
OPTIONS = (
    *("none", "scale", "q_start", "block_size", "strides", "groups", "large scores", "autocast"),
    *("softcap", "distance_bias", "block_bias", "slot_bias", "sink", "dropout", "half tables"),
)
ARRANGES = (
    *("contiguous", "tokens before heads", "one head expanded", "every other of a larger tensor"),
    "width before tokens",
)
HALF_ALONE = ("autocast", "half tables")  # options that float64 does not have
CELLS = [
    Cell(option, *rest)
    for option, *rest in product(OPTIONS, specs.CLASSES, (*BACKENDS, *LIBRARIES), DTYPES)
    if (rest[2] != "float64" or option not in HALF_ALONE)
    and (rest[1] not in LIBRARIES or (option in OF_LIBRARIES and rest[0] in LIBRARIES[rest[1]]))
]
CELLS += [
    Cell(option, specs.LISTED, *rest)
    for option, *rest in product(OPTIONS, BACKENDS, DTYPES)
    if rest[1] != "float64" or option not in HALF_ALONE
]
CELLS += [
    Cell("coordinate_bias", *rest)
    for rest in product((*specs.CLASSES, specs.LISTED), BACKENDS, DTYPES)
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of calls and of caches; one that is not in use is None."""

    block_size: int | None = None
    scale: float | None = None
    arrange: str = "contiguous"
    magnitude: float = 1.0
    autocast: bool = False
    softcap: float | None = None
    distance_bias: tuple[int, bool] | None = None  # radius, whether each head has its own
    sink: str | None = None
    dropout: tuple[float, int] | None = None
    half_tables: bool = False

    def used(self) -> dict[str, bool]:
        """Returns whether each option is in use."""
        extras = ("scale", "block_size", "softcap", "distance_bias", "sink", "dropout")
        return {name: getattr(self, name) is not None for name in extras} | {
            "strides": self.arrange != "contiguous",
            "large scores": self.magnitude > 1,
            "autocast": self.autocast,
            "half tables": self.half_tables,
        }

    def precision(self) -> torch.dtype:
        is_low = self.autocast and self.dtype != "float64"
        return torch.bfloat16 if is_low else DTYPES[self.dtype]

    @property
    def table_dtype(self) -> torch.dtype:
        single = torch.bfloat16 if self.half_tables else torch.float32
        return torch.float64 if self.dtype == "float64" else single

    def tables(self, batch: int, heads: int, tokens: int | None) -> dict[str, Tensor]:
        """Draws a distance bias and a sink; without a number of tokens, none of each token."""
        found = {}
        if self.distance_bias is not None:
            radius, each = self.distance_bias
            found["distance_bias"] = torch.randn(heads if each else 1, 2 * radius + 1)
        if self.sink is not None and (self.sink != "[B, H, N]" or tokens is not None):
            shapes = {"[1, H, 1]": (1, heads, 1), "[B, H, N]": (batch, heads, tokens)}
            sink = torch.randn(shapes.get(self.sink, (heads,)))
            found["sink"] = torch.full_like(sink, -torch.inf) if self.sink == "none" else sink
        return {name: x.to(self.table_dtype) for name, x in found.items()}


@dataclass(frozen=True)
class Call(Options):
    """One call; tensors are drawn from `seed`."""

    spec: Spec
    scene: Scene
    backend: str
    dtype: str
    seed: int = 0
    head_dim: int = 16
    value_dim: int = 16
    block_bias: tuple[bool, bool, bool] | None = None  # per batch entry, per head, with -inf
    slot_bias: tuple[bool, bool] | None = None  # per batch entry, per head
    # dims, whether each batch entry and the queries have their own coordinates, and their dtype
    coordinates: tuple[int, bool, bool, str] | None = None
    function: ClassVar[str] = "sr.attention"

    def options(self) -> list[str]:
        """Returns the names of the options in use."""
        used = self.used() | {
            "q_start": self.scene.q_start is not None,
            "groups": self.scene.num_heads != self.scene.num_kv_heads,
            "block_bias": self.block_bias is not None,
            "slot_bias": self.slot_bias is not None,
            "coordinate_bias": self.coordinates is not None,
        }
        return [name for name, is_used in used.items() if is_used] or ["none"]

    def cells(self) -> list[Cell]:
        classes = specs.classes_of(self.spec)
        return [Cell(o, c, self.backend, self.dtype) for o in self.options() for c in classes]

    def tensors(self) -> dict[str, Tensor]:
        """Draws query, key, value and the tables of extras, as leaves of the graph."""
        torch.manual_seed(self.seed)
        scene, dtype = self.scene, DTYPES[self.dtype]
        batch, heads, kv_heads = scene.batch, scene.num_heads, scene.num_kv_heads
        arrange = "contiguous" if self.arrange == "one head expanded" else self.arrange
        query = arranged((batch, heads, scene.q_len, self.head_dim), arrange, dtype)
        key = arranged((batch, kv_heads, scene.kv_len, self.head_dim), self.arrange, dtype)
        value = arranged((batch, kv_heads, scene.kv_len, self.value_dim), self.arrange, dtype)
        with torch.no_grad():
            query.mul_(self.magnitude)
        found = {"query": query, "key": key, "value": value}
        found |= self.tables(batch, heads, scene.q_len)
        if self.block_bias is not None:
            each_entry, each_head, cut = self.block_bias
            number = self.layout().num_blocks
            bias = torch.randn(batch if each_entry else 1, heads if each_head else 1, number)
            found["block_bias"] = bias.masked_fill(torch.rand(bias.shape) < 0.2 * cut, -torch.inf)
        if self.slot_bias is not None:
            each_entry, each_head = self.slot_bias
            (indices,) = (leaf[1] for leaf in leaves(self.spec) if leaf[0] == "SelectedBlocks")
            shape = slots_shape(indices)
            outer = (batch if each_entry else 1, heads if each_head else 1)
            found["slot_bias"] = torch.randn(*outer, *shape)
        for name in found.keys() & {"block_bias", "slot_bias"}:
            found[name] = found[name].to(self.table_dtype)
        if self.coordinates is not None:
            dims, each_entry, own, of_places = self.coordinates
            lengths = {"coords": scene.kv_len} | ({"query_coords": scene.q_len} if own else {})
            for name, tokens in lengths.items():
                places = torch.randn(batch if each_entry else 1, tokens, dims, dtype=torch.float64)
                places[:, ::2] = places[:, ::2].round()  # some tokens are where others are
                found[name] = places.to(DTYPES[of_places])
            found["slopes"] = torch.rand(heads).to(self.table_dtype)
        return {name: x.requires_grad_() for name, x in found.items()}

    def layout(self) -> Any:
        return build(self.spec).layout(**self.scene.arguments, block_size=self.block_size)

    def keywords(self) -> dict[str, Any]:
        """Returns the arguments of `attention` that are not tensors."""
        found: dict[str, Any] = {"return_lse": self.backend not in WITHOUT_LSE}
        given = {
            "scale": self.scale,
            "q_start": self.scene.q_start,
            "block_size": self.block_size,
            "softcap": self.softcap,
            "backend": None if self.backend == "default" else self.backend,
        }
        found |= {name: x for name, x in given.items() if x is not None}
        if self.dropout is not None:
            found["dropout_p"], found["dropout_seed"] = self.dropout
        return found

    def check(self) -> None:
        """Compares every number of out, lse and the gradients with the oracle's."""
        tensors = self.tensors()
        generator = torch.Generator().manual_seed(self.seed)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast), self.packages():
                results = self.attend(tensors)
            grads = [
                torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
                for x in results
            ]
            found = torch.autograd.grad(
                results, list(tensors.values()), grads, materialize_grads=True
            )
        except NotImplementedError as refusal:
            unnamed = self.backend == "default" and self.slot_bias is None
            assert not unnamed and self.backend != "reference", refusal
            raise Refused(str(refusal)) from None
        except ImportError as missing:
            raise Refused(str(missing)) from None
        got = dict(zip(("out", "lse"), results, strict=False))
        got |= dict(zip(tensors, found, strict=False))
        expected = self.expected(tensors, *grads)
        compare(got, expected, self.precision())

    def packages(self) -> AbstractContextManager[None]:
        """Installs the stand-in of FlashAttention-4 for a call of `flash`."""
        return flash_packages.installed(4) if self.backend == "flash" else nullcontext()

    def attend(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern | None = None
    ) -> tuple[Tensor, ...]:
        """Returns (out, lse), or (out,) of a backend that has no lse."""
        query, key, value, *_ = tensors.values()
        tables: dict[str, Any] = {
            name: x for name, x in tensors.items() if name not in ("query", "key", "value")
        }
        if self.coordinates is not None:
            coords, slopes, own = (
                tables.pop(n, None) for n in ("coords", "slopes", "query_coords")
            )
            tables["score_mod"] = sr.coordinate_bias(coords, slopes, query_coords=own)
        attention = attrgetter(self.function.removeprefix("sr."))(sr)
        found: Tensor | tuple[Tensor, Tensor] = attention(
            query,
            key,
            value,
            build(self.spec) if pattern is None else pattern,
            **tables,
            **self.keywords(),
        )
        return (found,) if isinstance(found, Tensor) else found

    def expected(
        self, tensors: dict[str, Tensor], grad_out: Tensor, grad_lse: Tensor | None = None
    ) -> oracle.Results:
        """Runs the oracle on the inputs, rounded to the dtype in which the call reads them."""
        scene = self.scene
        grad_lse = torch.zeros(grad_out.shape[:3]) if grad_lse is None else grad_lse
        rounded = {name: x.detach() for name, x in tensors.items()}
        for name in ("query", "key", "value"):
            rounded[name] = rounded[name].to(self.precision())
        exact = {name: x.double().numpy() for name, x in rounded.items()}
        present = present_pairs(self.spec, scene)
        first, q_len, kv_len = scene.first_position, scene.q_len, scene.kv_len
        positions, keys = np.arange(first, first + q_len), np.arange(kv_len)
        bias: Any = np.zeros((1, 1, 1, 1, 1))
        places: dict[str, Any] = {}  # index of each pair's bias in its table
        if self.distance_bias is not None:
            radius, each = self.distance_bias
            of_query, of_key = (specs.distance_places(self.spec, x) for x in (positions, keys))
            distance = of_key[:, None, None] - of_query[:, None, :, None]  # [B or 1, 1, Nq, Nk]
            distance = distance.clip(-radius, radius) + radius
            heads = np.arange(scene.num_heads) if each else np.zeros(scene.num_heads, np.int64)
            places["distance_bias"] = (heads[:, None, None], distance)
        if self.block_bias is not None:
            present, number = by_entry(self, present)
            places["block_bias"] = places_of_heads(rounded["block_bias"].shape, scene, number)
        if self.slot_bias is not None:
            listed = specs.slots(self.spec, scene)  # [1, B, H, Nq, Nk]
            places["slot_bias"] = places_of_slots(rounded["slot_bias"].shape, scene, listed)
        for name, place in places.items():
            table = (
                exact[name]
                if name != "slot_bias"
                else exact[name].reshape(*exact[name].shape[:2], -1)
            )
            table = np.concatenate([table, np.zeros((*table.shape[:-1], 1))], -1)
            bias = bias + table[place]
        added: Any = 0.0
        if self.coordinates is not None:
            apart, far = distances_of(exact)
            added = -exact["slopes"][:, None, None] * far[:, None]
            added = np.broadcast_to(added, (scene.batch, *added.shape[1:]))
        sink = None
        if self.sink is not None:
            sink = exact["sink"]
            sink = sink[None, :, None] if sink.ndim == 1 else sink
            sink = np.broadcast_to(sink, (scene.batch, scene.num_heads, q_len))
        keep: Any = 1.0
        if self.dropout is not None:
            p, seed = self.dropout
            branches = branch_numbers(self, present)
            keep = oracle.kept(
                seed, p, scene.batch, scene.num_heads, max(branches) + 1, positions, keys
            )[branches] / (1 - p)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        results = oracle.attend(
            exact["query"],
            exact["key"],
            exact["value"],
            present,
            grad_out.double().numpy(),
            grad_lse.double().numpy(),
            scale=scale,
            softcap=self.softcap,
            added=added,
            bias=bias,
            sink=sink,
            keep=keep,
        )
        for each_result in (results.exact, results.magnitude):
            of_pairs = each_result.pop("bias")
            for name, place in places.items():
                shape = rounded[name].shape
                flat = shape if name != "slot_bias" else (*shape[:2], shape[2] * shape[3])
                table = np.zeros((*flat[:-1], flat[-1] + 1))
                np.add.at(table, tuple(np.broadcast_to(x, of_pairs.shape) for x in place), of_pairs)
                each_result[name] = table[..., :-1].reshape(shape)
            of_added, is_exact = each_result.pop("added"), each_result is results.exact
            if self.coordinates is not None:
                each_result |= of_places(exact, of_added, apart, far, 1 if is_exact else -1)
            of_sink = each_result.pop("sink")
            if self.sink is not None:
                each_result["sink"] = summed_to(of_sink, rounded["sink"].shape)
        return results


def distances_of(exact: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns how far queries and keys are apart, [B or 1, Nq, Nk, dims], and their distances."""
    queries, keys = exact.get("query_coords", exact["coords"]), exact["coords"]
    apart = queries[:, :, None] - keys[:, None]
    return apart, np.sqrt((apart**2).sum(-1))


def of_places(
    exact: dict[str, np.ndarray], grad: np.ndarray, apart: np.ndarray, far: np.ndarray, sign: int
) -> dict[str, np.ndarray]:
    """Returns the gradients of slopes and coordinates from those of what is added to scores.

    With `sign` -1, it returns their magnitudes.
    """
    unit = apart / np.where(far == 0, 1, far)[..., None]
    by_slope = (grad * far[:, None]).sum((0, 2, 3)) * -sign
    each = np.einsum("bhqk,h->bqk", grad, exact["slopes"])[..., None] * -sign
    each = each * (unit if sign > 0 else np.abs(unit))
    of_queries, of_keys = each.sum(2), -sign * each.sum(1)
    if len(exact["coords"]) == 1:
        of_queries, of_keys = (x.sum(0, keepdims=True) for x in (of_queries, of_keys))
    if "query_coords" in exact:
        return {"slopes": by_slope, "query_coords": of_queries, "coords": of_keys}
    return {"slopes": by_slope, "coords": of_queries + of_keys}


@functools.lru_cache(maxsize=8)
def present_pairs(spec: Spec, scene: Scene) -> np.ndarray:
    """[J, B, Hq, Nq, Nk] whether each branch has a pair.

    Small cases evaluate the oracle's rules pair by pair; larger ones use `to_dense`.
    """
    shape = (scene.batch, scene.num_heads, scene.q_len, scene.kv_len)
    branches = specs.branches(spec)
    if len(leaves(spec)) * np.prod(shape) < 6000 and "RandomBlocks" not in str(spec):
        heads = scene.arguments | {"batch": scene.batch}
        found = [counts(branch, **heads) for branch in branches]
    else:
        found = [build(branch).to_dense(**scene.arguments).expand(shape) for branch in branches]
    return torch.stack([x.bool() for x in found]).numpy()


def by_entry(call: Call, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs of each pass of the layout, and the number of each pair's entry."""
    number = call.layout().entry_of_pairs(call.scene.batch).numpy()
    assert np.array_equal((number >= 0).sum(0), present.sum(0)), "the layout has other pairs"
    return number >= 0, number


def branch_numbers(call: Call, present: np.ndarray) -> list[int]:
    """Returns the branch of each table in `present`."""
    if call.block_bias is None:
        return list(range(len(present)))
    return [p.branch for p in call.layout().passes]


def places_of_heads(shape: Sequence[int], scene: Scene, number: np.ndarray) -> tuple:
    entry = np.arange(scene.batch).reshape(-1, 1, 1, 1) % shape[0]
    head = np.arange(scene.num_heads).reshape(-1, 1, 1) % shape[1]
    return entry, head, number


def places_of_slots(shape: Sequence[int], scene: Scene, number: np.ndarray) -> tuple:
    """Like `places_of_heads`, but query heads share the bias of their kv head."""
    entry = np.arange(scene.batch).reshape(-1, 1, 1, 1) % shape[0]
    heads = np.arange(scene.num_heads).reshape(-1, 1, 1)
    return entry, heads * shape[1] // max(1, scene.num_heads), number


def summed_to(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Sums a gradient over the dims in which `shape` was broadcast."""
    wide = (1, shape[0], 1) if len(shape) == 1 else tuple(shape)
    dims = tuple(i for i, size in enumerate(wide) if size == 1)
    return x.sum(dims, keepdims=True).reshape(shape)


def compare(got: dict[str, Tensor], expected: oracle.Results, dtype: torch.dtype) -> None:
    """Asserts that every number differs by rounding alone.

    The bound grows with the magnitude of the sums, the precision of inputs and results, and the
    largest score, whose rounding error multiplies a weight.
    """
    largest = expected.largest_score
    for name, tensor in got.items():
        exact, magnitude = expected.exact[name], expected.magnitude[name]
        assert tuple(tensor.shape) == exact.shape, f"{name}: shape {tuple(tensor.shape)}"
        number = tensor.detach().double().numpy()
        assert not np.isnan(number).any(), f"{name}: NaN"
        unit = torch.finfo(dtype).eps
        if name == "lse":
            unit = 2.0**-52 if dtype == torch.float64 else 2.0**-23
        elif tensor.dtype != dtype and name not in ("out", "query", "key", "value"):
            unit = max(unit, torch.finfo(tensor.dtype).eps)
        sums = 2.0**-50 if dtype == torch.float64 else 2.0**-20  # for sums of few exponentials
        relative = 4 * unit + 8 * sums + 8 * sums / 4 * largest
        is_small = torch.float16 in (dtype, tensor.dtype)  # smallest number: 2 ** -24
        least = 2.0**-18 if is_small else 1e-30
        infinite = np.isinf(exact)
        assert np.array_equal(number[infinite], exact[infinite]), f"{name}: other infinities"
        exact, number = (np.where(infinite, 0.0, x) for x in (exact, number))
        error = np.abs(number - exact)
        excess = error / (relative * np.maximum(magnitude, np.abs(exact)) + least)
        if excess.max(initial=0.0) > 1:
            at = np.unravel_index(excess.argmax(), excess.shape)
            place = ", ".join(map(str, at))
            raise AssertionError(
                f"{name}[{place}] is {number[at]:.6g}, not {exact[at]:.6g}: "
                f"{excess[at]:.3g} times the bound"
            )


Used = Callable[[str], bool]


def input_options(draw: st.DrawFn, used: Used) -> dict[str, Any]:
    """Draws the scale of the scores, and how query, key and value lie in memory."""
    given: dict[str, Any] = {}
    if used("scale"):
        given["scale"] = draw(st.sampled_from((0.3, 1.0, -0.5, 0.0)))
    if used("strides"):
        given["arrange"] = draw(st.sampled_from(ARRANGES[1:]))
    if used("large scores"):
        given["magnitude"] = draw(st.sampled_from((10.0, 60.0)))
    return given


def shared_options(draw: st.DrawFn, cell: Cell, used: Used, spec: Spec) -> dict[str, Any]:
    """Draws the options that calls and caches have, apart from tables of blocks."""
    given = input_options(draw, used)
    if cell.dtype != "float64" and used("autocast"):
        given["autocast"] = True
    if used("softcap"):
        given["softcap"] = draw(st.sampled_from((2.0, 0.5, 50.0)))
    if used("distance_bias") and specs.has_distances(spec):
        given["distance_bias"] = draw(st.tuples(st.sampled_from((0, 1, 7, 100)), st.booleans()))
    if used("sink"):
        given["sink"] = draw(st.sampled_from(("[H]", "[1, H, 1]", "[B, H, N]", "none")))
    if used("dropout"):
        given["dropout"] = draw(st.sampled_from(((0.5, 3), (0.1, 2**61 + 5), (0.9, 0))))
    return given


def with_half_tables(cell: Cell, used: Used, given: dict[str, Any]) -> None:
    """Decides whether the tables of a call are in half precision; draws a sink if none is there."""
    has_tables = {"distance_bias", "block_bias", "slot_bias", "sink"} & given.keys()
    if cell.option == "half tables" and not has_tables:
        given["sink"], has_tables = "[H]", {"sink"}
    if cell.dtype != "float64" and has_tables and used("half tables"):
        given["half_tables"] = True


@st.composite
def cases(draw: st.DrawFn, cell: Cell, scene: Scene | None = None) -> Call:
    """Draws calls with a cell's option, class of patterns, backend and dtype, and other options."""
    slow = cell.backend == "triton"
    if scene is None:
        scene = draw(scenes(max_length=24 if slow else 50, max_heads=2 if slow else 6))
    option = cell.option
    if option == "groups":
        heads = ((2, 1), (4, 2), (6, 3), (4, 1)) if not slow else ((2, 1),)
        heads = (*heads, (4, 2)) if cell.pattern == specs.LISTED else heads
        num_heads, num_kv_heads = draw(st.sampled_from(heads))
        scene = replace(scene, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if option == "q_start" and scene.q_start is None:
        scene = replace(scene, q_start=draw(st.integers(0, scene.kv_len + 5)))
    if cell.backend in LIBRARIES:
        spec = draw(specs.LEAVES[cell.pattern](scene))
        if cell.backend == "flash" and draw(st.booleans()):
            spec = ("&", spec, ("Causal",))
    else:
        spec, scene = draw(specs.specs_with(cell.pattern, scene, selected=option == "slot_bias"))
    selections = [leaf for leaf in leaves(spec) if leaf[0] == "SelectedBlocks"]

    def used(name: str) -> bool:
        if cell.backend in LIBRARIES and name not in OF_LIBRARIES:
            return False
        return option == name or draw(st.integers(0, 5)) == 5

    widths = st.sampled_from((16, 16, 8, 32, 24, 5, 64, 1, 40))
    given: dict[str, Any] = {"block_size": None}
    if used("block_size") or option == "block_bias":
        given["block_size"] = draw(st.sampled_from(LAYOUT_BLOCK_SIZES))
    given |= shared_options(draw, cell, used, spec)
    if len(selections) == 1 and used("slot_bias"):
        given["slot_bias"] = draw(st.tuples(st.booleans(), st.booleans()))
    elif given["block_size"] is not None and used("block_bias"):
        given["block_bias"] = draw(st.tuples(*[st.booleans()] * 3))
    if option == "coordinate_bias":
        own = scene.q_len != scene.kv_len or draw(st.booleans())
        dtypes = st.sampled_from(("float32", "float64"))
        dims = draw(st.sampled_from((2, 1, 3, 5)))
        given["coordinates"] = dims, draw(st.booleans()), own, draw(dtypes)
    with_half_tables(cell, used, given)
    return Call(
        spec,
        scene,
        cell.backend,
        cell.dtype,
        draw(st.integers(0, 99)),
        draw(widths),
        draw(widths),
        **given,
    )
