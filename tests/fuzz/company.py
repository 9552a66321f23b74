"""Rows in other company: the bits of a row do not depend on what else a call computes.

The same rows are computed in one call, and in calls of another batch, block size, number of
threads, cut, packing, padding or cache; results must be equal to the bit in the mode of
`batch_invariant`, and those of another batch or number of threads outside of it, too.
"""

from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import Any

import hypothesis.strategies as st
import torch
from oracles.patterns_oracle import build
from torch import Tensor

import sparsering as sr
from sparsering.layouts.compile import default_block_size
from sparsering.patterns.algebra import Frame, check_fits
from sparsering.patterns.shifts import is_shift_invariant

from . import long, specs
from .attack import Cell, Refused
from .ways import same_bits

WAYS = ("batch", "block size", "threads", "chunks", "documents", "varlen", "padding", "cache")
ALWAYS = ("batch", "threads")  # ways that change no bit outside of the mode either
CELLS = [Cell(*cell) for cell in product(WAYS, long.CLASSES, ("cpu",), ("float32", "bfloat16"))]
BLOCK_SIZES = (16, 32, 64, 128, 256)  # segments of 512 tokens have whole tiles of these
GRADIENTS = ("batch", "threads", "documents")  # ways that promise dK and dV, too


@dataclass(frozen=True)
class Company(long.Long):
    """One call, and the same rows in a way of `WAYS`."""

    way: str = WAYS[0]
    cuts: tuple[int, ...] = (1,)  # sizes of chunks of queries, of steps of a cache
    other: int = 128  # another block size, or tokens of the document or the padding before
    in_mode: bool = True  # whether the calls are made in the mode of `batch_invariant`

    def cells(self) -> list[Cell]:
        return [Cell(self.way, c, self.backend, self.dtype) for c in specs.classes_of(self.spec)]

    def check(self) -> None:
        before, tensors, pattern = torch.get_num_threads(), self.tensors(), build(self.spec)
        torch.set_num_threads(2)
        try:
            with sr.batch_invariant(self.in_mode):
                self.compare(tensors, pattern)
        except NotImplementedError as refusal:
            raise Refused(str(refusal)) from None
        finally:
            torch.set_num_threads(before)

    def compare(self, tensors: dict[str, Tensor], pattern: sr.Pattern) -> None:
        results, grads = self.run(tensors, pattern)
        same = getattr(self, "in_" + self.way.replace(" ", "_"))
        with torch.no_grad():
            rows = same(tensors, pattern, results)
        for name, (one, two) in rows.items():
            assert same_bits(one, two), f"{name}: other bits"
        if self.way in GRADIENTS:
            for name, (one, two) in self.gradients(tensors, pattern, grads).items():
                assert same_bits(one, two), f"gradient of {name}: other bits"

    def run(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, **changes: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns out and lse, and their gradients to the tensors."""
        call = replace(self, **changes)
        results = dict(zip(("out", "lse"), call.attend(tensors, pattern), strict=True))
        generator = torch.Generator().manual_seed(self.seed)
        shape = (4 * self.scene.batch, *results["out"].shape[1:])
        of_out = torch.randn(shape, generator=generator).to(results["out"].dtype)
        leaves = {n: x for n, x in tensors.items() if n in ("query", "key", "value")}
        if not results["out"].requires_grad:
            return results, {}
        found = torch.autograd.grad(
            results["out"], list(leaves.values()), of_out[: len(results["out"])]
        )
        return results, dict(zip(leaves, found, strict=True))

    def in_batch(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, results: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        if pattern.num_batches() is not None:
            raise Refused("the pattern has a batch")
        found, _ = self.run(self.first_entry(tensors), pattern)
        return {n: (x, results[n][:1]) for n, x in found.items()}

    def in_block_size(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, results: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        self.same_passes(pattern, self.other)
        found, _ = self.run(tensors, pattern, block_size=self.other)
        return {n: (x, results[n]) for n, x in found.items()}

    def in_threads(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, results: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        torch.set_num_threads(self.threads)
        found, _ = self.run(tensors, pattern)
        torch.set_num_threads(2)
        return {n: (x, results[n]) for n, x in found.items()}

    def in_chunks(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, results: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        if pattern.restarts is not None or any(x.asks_frame for x in pattern.branches):
            raise Refused("the pattern depends on the number of queries")
        first, parts = self.scene.first_position, []
        for start, stop in self.pieces(self.scene.q_len):
            scene = replace(self.scene, q_len=stop - start, q_start=first + start)
            parts.append(self.run(self.queries(tensors, start, stop), pattern, scene=scene)[0])
        return {n: (torch.cat([x[n] for x in parts], 2), results[n]) for n in results}

    def in_documents(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, results: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        alone, packed, after = self.packed(tensors, pattern)
        one, two = (self.run(x, p, dropout=None)[0] for x, p in (alone, packed))
        return {n: (one[n], two[n][:, :, after:]) for n in one}

    def in_varlen(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, results: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        (alone, _), (packed, _), after = self.packed(tensors, pattern)
        one, _ = self.run(alone, pattern, dropout=None)
        n = packed["query"].shape[2]
        lengths = torch.tensor([0, after, n])
        keywords = {k: x for k, x in self.keywords().items() if not k.startswith("dropout")}
        tables = {k: x for k, x in packed.items() if k not in ("query", "key", "value")}
        flat = (packed[x][0].transpose(0, 1) for x in ("query", "key", "value"))
        out, lse = sr.attention_varlen(*flat, lengths, lengths, pattern, **tables, **keywords)
        return {
            "out": (one["out"][0], out.transpose(0, 1)[:, after:]),
            "lse": (one["lse"][0], lse[:, after:]),
        }

    def in_padding(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, results: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Compares the rows behind keys that no query sees."""
        if not is_shift_invariant(pattern):
            raise Refused("the pattern depends on the place of its first key")
        (alone, own), (both, _), after = self.packed(tensors, pattern)
        valid = torch.arange(both["key"].shape[2]) >= after
        one, two = (
            self.run(x, p, dropout=None)[0]
            for x, p in ((alone, own), (both, own & sr.KeyMask(valid)))
        )
        return {n: (one[n], two[n][:, :, after:]) for n in one}

    def in_cache(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, results: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        self.square()
        if set(tensors) - {"query", "key", "value", "distance_bias", "sink"}:
            raise Refused("a cache takes no such option")
        self.same_passes(pattern, default_block_size(pattern, self.scene.kv_len))
        scene, parts = self.scene, []
        names = {"scale": self.scale, "softcap": self.softcap, "backend": "cpu"}
        tables = {n: x for n, x in tensors.items() if n not in ("query", "key", "value")}
        if "sink" in tables and self.sink == "[B, H, N]":
            raise Refused("the sink is of each query")
        if self.dropout is not None:
            names["dropout_p"], names["dropout_seed"] = self.dropout
        given = {n: x for n, x in (names | tables).items() if x is not None}
        try:
            cache = sr.KVCache(
                pattern,
                scene.batch,
                scene.num_kv_heads,
                self.head_dim,
                num_heads=scene.num_heads,
                value_dim=self.value_dim,
                max_length=scene.kv_len,
            )
            for start, stop in self.pieces(scene.q_len):
                new = [tensors[x][:, :, start:stop] for x in ("query", "key", "value")]
                parts.append(cache.attend(*new, return_lse=True, **given))
        except ValueError as error:  # a token sees later keys
            raise Refused(str(error)) from None
        out, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        return {"out": (out, results["out"]), "lse": (lse, results["lse"])}

    def gradients(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern, grads: dict[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns pairs of gradients that must be equal."""
        if self.way == "batch":
            found = self.run(self.first_entry(tensors), pattern)[1]
            return {n: (x, grads[n][:1]) for n, x in found.items()}
        if self.way == "threads":
            torch.set_num_threads(self.threads)
            found = self.run(tensors, pattern)[1]
            return {n: (x, grads[n]) for n, x in found.items()}
        (alone, own), (packed, pattern), after = self.packed(tensors, pattern)
        generator = torch.Generator().manual_seed(self.seed)
        pairs = []
        for given, mask, rows in ((alone, own, 0), (packed, pattern, after)):
            leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
            out = replace(self, dropout=None).attend(leaves, mask)[0]
            if not rows:
                grad = torch.randn(out.shape, generator=generator).to(out.dtype)
            wrt = [leaves[n] for n in ("query", "key", "value")]
            whole = torch.zeros_like(out)
            whole[:, :, rows:] = grad
            pairs.append([x[:, :, rows:] for x in torch.autograd.grad(out, wrt, whole)])
        return dict(zip(("query", "key", "value"), zip(*pairs, strict=True), strict=True))

    def packed(
        self, tensors: dict[str, Tensor], pattern: sr.Pattern
    ) -> tuple[tuple[dict[str, Tensor], sr.Pattern], tuple[dict[str, Tensor], sr.Pattern], int]:
        """Returns (tensors, pattern) of the call, and behind another document of `other` tokens."""
        self.square()
        if pattern.restarts is not None or pattern.num_batches() is not None:
            raise Refused("the pattern has documents, or a batch")
        if "Packed" in str(self.spec) or "Tree" in str(self.spec):
            raise Refused("the pattern restarts positions")
        n, after = self.scene.kv_len, self.other
        alone = self.first_entry(tensors) if self.way == "varlen" else tensors
        more = {
            name: torch.cat((x.new_ones(*x.shape[:2], after, x.shape[3]), x), 2)
            for name, x in alone.items()
            if name in ("query", "key", "value")
        }
        if "sink" in alone and self.sink == "[B, H, N]":
            raise Refused("the sink is of each query")
        heads = self.scene.num_heads, self.scene.num_kv_heads
        try:
            both = sr.Packed((after, n), pattern)
            check_fits(pattern, Frame.build(after, None, *heads, 0))
        except (ValueError, TypeError) as error:
            raise Refused(str(error)) from None
        return (alone, pattern), ({**alone, **more}, both), after

    def same_passes(self, pattern: sr.Pattern, block_size: int) -> None:
        """Refuses a union whose parts fit one grid of tiles of only one of two sizes."""
        sizes = self.block_size, block_size
        one, two = (
            [p.step for p in pattern.layout(**self.scene.arguments, block_size=x).passes]
            for x in sizes
        )
        if one != two:
            raise Refused("the parts of a union are cut in other ways")

    def square(self) -> None:
        if self.scene.q_len != self.scene.kv_len or self.scene.q_start not in (None, 0):
            raise Refused("queries are not all tokens")

    def pieces(self, tokens: int) -> list[tuple[int, int]]:
        """Cuts tokens into chunks: one of most of them first, then the sizes of `cuts` in turn."""
        edges = [0, max(0, tokens - 40 * max(self.cuts) - 5)] if self.way == "cache" else [0]
        while edges[-1] < tokens:
            edges.append(min(tokens, edges[-1] + self.cuts[len(edges) % len(self.cuts)]))
        return [(a, b) for a, b in pairwise(edges) if b > a]

    def queries(self, tensors: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        of_rows = ["query"] + ["sink"] * (self.sink == "[B, H, N]")
        return {n: x[:, :, start:stop] if n in of_rows else x for n, x in tensors.items()}

    def first_entry(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        of_entries = ["query", "key", "value"] + ["sink"] * (self.sink == "[B, H, N]")
        return {n: x[:1] if n in of_entries else x for n, x in tensors.items()}


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Company:
    """Draws long calls with any options, and a way of another company."""
    option = draw(st.sampled_from(long.OPTIONS))
    call = draw(long.cases(cell._replace(option=option)))
    given: dict[str, Any] = {field.name: getattr(call, field.name) for field in fields(call)}
    square = cell.option in ("documents", "varlen", "padding", "cache")
    if square:
        tokens = given["scene"].kv_len
        given["scene"] = replace(given["scene"], q_len=tokens, q_start=None)
    if cell.option == "batch" and build(given["spec"]).num_batches() is None:
        given["scene"] = replace(given["scene"], batch=draw(st.integers(2, 3)))
    if cell.option == "cache":
        given["spec"] = ("&", given["spec"], ("Causal",))
    given["threads"] = draw(st.sampled_from((1, 3, 5)))
    sizes = BLOCK_SIZES if cell.option == "block size" else range(1, 700)
    cut = st.integers(1, 999) if cell.option == "chunks" else st.sampled_from((1, 1, 1, 3, 17))
    return Company(
        **given,
        way=cell.option,
        cuts=tuple(draw(st.lists(cut, min_size=1, max_size=3))),
        other=draw(st.sampled_from(sizes)),
        in_mode=cell.option not in ALWAYS or draw(st.booleans()),
    )
