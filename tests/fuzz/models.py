"""Tiny models of transformers: `register`, `apply`, `using`, and their caches, against eager.

Rows are padded on either side, or hold documents whose position_ids restart. Each document is
compared with its tokens alone, on eager with a mask of all pairs; gradients of weights too.
"""

import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from oracles import strategies as drawn
from oracles.patterns_oracle import Spec, build, counts
from oracles.strategies import Scene
from torch import Tensor
from transformers import StaticCache

from .attack import Cell, Refused

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
from parallel_cases import full_precision, pairs
from transformers_models import ENCODERS, like, made, result, tokens
from using_oracle import objective

from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.model.config import attention_modules

SIZES: dict[str, dict[str, tuple]] = {  # configs to draw from
    "llama": {"num_key_value_heads": (1, 2, 4)},
    "mistral": {"num_key_value_heads": (1, 2), "sliding_window": (2, 5, 9)},
    "qwen2": {"num_key_value_heads": (2, 4), "sliding_window": (3, 6)},
    "gemma2": {"num_key_value_heads": (1, 2), "sliding_window": (2, 5)},
    "gemma3": {"num_key_value_heads": (2, 4), "sliding_window": (3, 6)},
    "gpt-oss": {"num_key_value_heads": (1, 2), "sliding_window": (3, 6)},
    "llama4": {"num_key_value_heads": (2, 4), "attention_chunk_size": (3, 4, 7)},
    "deepseek-v3": {},
    "gpt2": {},
    "bert": {},
    "modernbert": {"local_attention": (4, 6, 10)},
}
WAYS = ("register", "apply", "using", "SparseCache", "StaticCache")
CACHES = ("SparseCache", "StaticCache")
ROWS = ("whole", "left", "right", "both sides", "packed")
FIT = {"using": ROWS[:1], "SparseCache": ROWS[:2], "StaticCache": ROWS[:2]}
CELLS = [
    Cell(way, rows, family, "float64")
    for way, rows, family in product(WAYS, ROWS, SIZES)
    if rows in FIT.get(way, ROWS) and (way not in CACHES or family not in ENCODERS)
]


@dataclass(frozen=True)
class Calls:
    """One call of a model, or the steps of a cache."""

    family: str
    config: tuple[tuple[str, Any], ...]
    way: str
    kind: str
    specs: tuple[Spec | None, ...]  # of each layer, None for the model's own mask
    rows: tuple[tuple[int, tuple[int, ...]], ...]  # padding on the left, lengths of documents
    stops: tuple[int, ...] = ()  # of the cache's steps
    cropped: int = 0  # tokens that are added and taken back after each step
    seed: int = 0

    def cells(self) -> list[Cell]:
        return [Cell(self.way, self.kind, self.family, "float64")]

    def documents(self) -> Iterator[tuple[int, slice]]:
        for row, (first, lengths) in enumerate(self.rows):
            for length in lengths:
                yield row, slice(first, first := first + length)

    def inputs(self) -> dict[str, Any]:
        length = max(left + sum(lengths) for left, lengths in self.rows)
        length += self.kind in ("right", "both sides")
        real = torch.zeros(len(self.rows), length, dtype=torch.int64)
        places = torch.zeros_like(real)
        for row, part in self.documents():
            real[row, part] = 1
            places[row, part] = torch.arange(part.stop - part.start)
        ids = tokens(len(self.rows), length, self.seed)
        found = {"input_ids": ids, "position_ids": places}
        if self.kind != "packed":
            found["attention_mask"] = real
            found["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
        return found

    def check(self) -> None:
        """Compares the result of each real token, and the gradient of each weight."""
        eager = model_of(self.family, self.config)
        model = like(eager, "eager" if self.way == "using" else "sparsering")
        patterns = {i: build(spec) for i, spec in enumerate(self.specs) if spec is not None}
        if patterns and self.way != "using":
            hf.apply(model, patterns)
        inputs = self.inputs()
        cached = self.way in CACHES
        off = {} if self.family in ENCODERS else {"use_cache": False}
        block = hf.using(model, patterns) if self.way == "using" else nullcontext()
        with warnings.catch_warnings(), full_precision(), torch.set_grad_enabled(not cached):
            warnings.simplefilter("error")
            with block:
                try:
                    out = self.steps(model, inputs) if cached else result(model, **inputs, **off)
                except NotImplementedError as refusal:
                    raise Refused(str(refusal)) from None
                except ValueError as refusal:  # a window's own cache, and a pattern beyond it
                    if "the cache has dropped the first" not in str(refusal):
                        raise
                    raise Refused(str(refusal)) from None
            total: Any = 0
            eager.zero_grad()
            for row, part in self.documents():
                got = out[row, part]
                with self.masks(eager, part.stop - part.start):
                    ids = inputs["input_ids"][row, part]
                    wanted = result(eager, input_ids=ids[None], **off)[0]
                near(got, wanted, f"row {row}, tokens {part.start} to {part.stop}")
                if not cached:
                    total = total + objective(got)
                    objective(wanted).backward()
            if cached:
                return
            total.backward()
        named = dict(eager.named_parameters())
        largest = max(x.grad.abs().max().item() for x in named.values() if x.grad is not None)
        for name, x in model.named_parameters():
            if named[name].grad is not None:
                near(x.grad, named[name].grad, f"gradient of {name}", 1e-3 * largest)

    def steps(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        parts, start = [], 0
        cache: Any = hf.SparseCache(model, rollback=self.cropped)
        if self.way == "StaticCache":
            room = inputs["input_ids"].shape[1] + self.seed % 3
            cache = StaticCache(config=model.config, max_cache_len=room)

        def step(ids: Tensor, places: Tensor, real: Tensor) -> Tensor:
            some = {"input_ids": ids, "position_ids": places, "attention_mask": real}
            return result(model, **some, past_key_values=cache, use_cache=True)

        ids, places, real = (inputs[x] for x in ("input_ids", "position_ids", "attention_mask"))
        for stop in sorted({*self.stops, ids.shape[1]}):
            if not start < stop <= ids.shape[1]:
                continue
            parts.append(step(ids[:, start:stop], places[:, start:stop], real[:, :stop]))
            if self.cropped:
                extra = ids[:, : self.cropped]
                more = torch.cat([real[:, :stop], torch.ones_like(extra)], 1)
                after = places[:, stop - 1 : stop] + 1 + torch.arange(extra.shape[1])
                step(extra, after, more)
                cache.crop(-extra.shape[1])
            start = stop
        return torch.cat(parts, 1)

    def masks(self, eager: Any, length: int) -> Any:
        """Gives each layer that has a pattern the mask of its pairs, in a block."""
        heads = eager.config.num_attention_heads
        kv_heads = getattr(eager.config, "num_key_value_heads", None) or heads
        handles = ExitStack()
        for module, spec in zip(attention_modules(eager), self.specs, strict=True):
            if spec is None:
                continue
            if self.way != "using" and self.family not in ENCODERS:
                spec = ("&", spec, ("Causal",))
            mask = mask_of(spec, length, heads, kv_heads)

            def give(module: Any, args: Any, kwargs: Any, mask: Tensor = mask) -> Any:
                return args, {**kwargs, "attention_mask": mask}

            handle = module.register_forward_pre_hook(give, with_kwargs=True)
            handles.callback(handle.remove)
        return handles


@functools.lru_cache(maxsize=64)
def model_of(family: str, config: tuple[tuple[str, Any], ...]) -> Any:
    return made(family, **dict(config))


@functools.lru_cache(maxsize=64)
def mask_of(spec: Spec, length: int, heads: int, kv_heads: int) -> Tensor:
    return pairs(counts(spec, length, num_heads=heads, num_kv_heads=kv_heads))


def near(got: Tensor, wanted: Tensor, what: str, least: float = 1e-6) -> None:
    largest = max(wanted.abs().max().item(), least)
    error = (got - wanted).abs().max().item()
    assert error <= 1e-9 * largest, f"{what}: an error of {error:.3g}, of {largest:.3g}"


@st.composite
def layer_specs(draw: st.DrawFn) -> Spec:
    """Draws a pattern of windows, sinks, dilation or LongNet in which each query sees itself."""
    scene = Scene(16, 16, 4, 4, 0, 1)
    kinds = ("SlidingWindow", "GlobalTokens", "PooledCausal", "BlockWindow", "BlockDilated")
    mask = st.one_of(*(drawn.drawn(kind, scene) for kind in kinds))
    spec = draw(st.one_of(mask, st.tuples(st.sampled_from("&|"), mask, mask)))
    own = ("|", spec, ("SlidingWindow", draw(st.integers(0, 3)), 0, 1))
    longnet = ("LongNet", (3, 8), (1, draw(st.integers(1, 3))))
    return draw(st.sampled_from((own, own, ("+", own, own), longnet)))


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Calls:
    """Draws models of a cell's family, with its way and rows."""
    way, kind, family, _ = cell
    config = tuple((name, draw(st.sampled_from(x))) for name, x in SIZES[family].items())
    specs: tuple[Spec | None, ...] = (None, None)
    if way in ("apply", "using") or (way in CACHES and draw(st.booleans())):
        spec = draw(layer_specs())
        specs = draw(st.sampled_from(((spec, spec), (spec, None), (None, spec))))
    size = st.integers(1, 8)
    if kind == "packed":
        length = draw(st.integers(4, 16))
        some = [draw(drawn.partitions(length)) for _ in range(draw(st.integers(1, 2)))]
        rows = tuple((0, tuple(filter(None, lengths))) for lengths in some)
    else:
        has_left, has_right = kind in ("left", "both sides"), kind in ("right", "both sides")
        length = draw(st.integers(4, 14))
        rows = ((draw(size) if has_left else 0, (length,)),)
        for _ in range(draw(st.integers(0, 1))):
            total = rows[0][0] + length
            short = draw(st.integers(1, total)) if has_left or has_right else total
            left = total - short if has_left else 0
            rows += ((left, (draw(st.integers(1, short)) if has_right else short,)),)
    given: dict[str, Any] = {}
    if way in CACHES:
        given["stops"] = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=5)))
        crops = kind == "whole" and way == "SparseCache"
        given["cropped"] = draw(st.sampled_from((0, 0, 1, 2))) if crops else 0
    return Calls(family, config, way, kind, specs, rows, **given, seed=draw(st.integers(0, 9)))
