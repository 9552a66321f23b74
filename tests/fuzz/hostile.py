"""Hostile values: every public name, called with one or two arguments that it does not expect.

A call is right, or refused by an error that names the argument; then all it was given still works.
"""

import faulthandler
import math
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor

import sparsering as sr
from sparsering import distributed, models, nn, selection

from .attack import Cell, Refused

B, HQ, H, N, D = 2, 4, 2, 40, 8
SECONDS, MEMORY = 5.0, 2 << 30
Given = dict[str, Any]
FIRST = sr.Causal() & sr.SlidingWindow(9)


class Subclass(Tensor):
    """A tensor of another class."""


def used(make: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a pattern, or joins two, and attends it by layout and densely."""

    def call(**given: Any) -> Any:
        pattern = make(**given)
        counts = pattern.to_dense(N, num_heads=HQ, num_kv_heads=H)
        layout = pattern.layout(N, num_heads=HQ, num_kv_heads=H, block_size=16)
        pairs = float(counts.double().sum((-1, -2)).mean())
        assert math.isclose(layout.num_pairs, pairs, abs_tol=1e-9)
        x = qkv(0)
        out, expected = (
            sr.attention(**x, pattern=pattern, backend=name) for name in (None, "reference")
        )
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert sr.parse(repr(pattern), pattern.tensors) == pattern
        return counts, layout, expected

    return call


def qkv(seed: int = 0, *, batch: int = B, tokens: int = N) -> Given:
    torch.manual_seed(seed)
    shapes = {"query": HQ, "key": H, "value": H}
    return {name: torch.randn(batch, heads, tokens, D) for name, heads in shapes.items()}


def qk() -> Given:
    return {name: x for name, x in qkv().items() if name != "value"}


def extras() -> Given:
    return {
        "scale": 0.5,
        "softcap": 5.0,
        "distance_bias": torch.randn(HQ, 7),
        "sink": torch.randn(HQ),
        "dropout_p": 0.25,
        "dropout_seed": 3,
        "return_lse": True,
    }


def chosen() -> Tensor:
    return torch.tensor([[0, 1], [1, 0], [0, 2]]).expand(B, H, 3, 2).contiguous()


def filled(kind: type = sr.KVCache) -> Any:
    made: Any = (sr.SelectedCache(B, H, D, 2, block_size=16, num_heads=HQ, rollback=4)
        if kind is sr.SelectedCache
        else sr.KVCache(FIRST, B, H, D, num_heads=HQ, rollback=4, page_size=16))
    made.attend(**qkv(1))
    return made


def of_cache(name: str, kind: type, **given: Any) -> tuple[Callable[..., Any], Given]:
    """A method of a filled cache, and what the cache then is."""
    held = filled(kind)

    def call(**given: Any) -> Any:
        made = getattr(held, name)(**given)
        return made, held.length, held.kept, held.lengths and held.positions(0)

    return call, given


def refiner(name: str, **given: Any) -> tuple[Callable[..., Any], Given]:
    made = selection.PatternRefiner(H, 3, 3, 2, swaps=1, margin=0.0)
    made.observe(torch.rand(B, H, 3, 2), chosen())
    made.update()
    if name == "load_state_dict":
        given = {"state": made.state_dict()}

    def call(**given: Any) -> Any:
        return getattr(made, name)(**given), made.table, made.state_dict()

    return call, given


def gated(name: str, **given: Any) -> tuple[Callable[..., Any], Given]:
    made = selection.GatedSchedule(selection.Schedule(((0, 1.0), (9, 0.0))), 0.5)
    made.step(0.7)
    return lambda **given: (getattr(made, name)(**given), made.state_dict()), given


def summaries(name: str, **given: Any) -> tuple[Callable[..., Any], Given]:
    made = selection.BlockSummaries(16)
    x = qk()
    made.scores(**x)
    if name == "scores":
        given = {**qk(), "scale": 0.5}
    return lambda **given: (getattr(made, name)(**given), made.nbytes), given


def module(make: Callable[..., Any], forward: Callable[[Any], Any]) -> Callable[..., Any]:
    """Makes a module of seeded weights and runs it."""

    def call(**given: Any) -> Any:
        torch.manual_seed(0)
        return forward(make(**given))

    return call


@cache
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from sparsering.integrations import transformers as hf

    hf.register()
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def hugging_face(name: str, **given: Any) -> tuple[Callable[..., Any], Given]:
    from sparsering.integrations import transformers as hf

    def call(**given: Any) -> Any:
        made = getattr(hf, name)(**given)
        hf.apply(llama(), FIRST)
        return made if isinstance(made, str) else hf.explain(llama())

    hf.apply(llama(), FIRST)
    return call, {"model": llama(), **given}


def reset(setter: Callable[..., Any], limit: int) -> Callable[..., Any]:
    """Sets a limit, and then the one that was."""

    def call(**given: Any) -> Any:
        try:
            setter(**given)
        finally:
            setter(limit)

    return call


def plan_of(name: str) -> tuple[Callable[..., Any], Given]:
    plan = distributed.RingPlan.build(FIRST, N, 2, num_heads=H, block_size=16)
    given: Given = {"rank": 1}
    if name == "bytes_received":
        given |= {"head_dim": D, "dtype": torch.float32, "num_kv_heads": H, "compression": "int8",
                  "backward": True}
    return getattr(plan, name), given


def planned() -> Given:
    return {"pattern": FIRST, "num_heads": HQ, "num_kv_heads": H, "head_dim": D,
            "dtype": torch.float32, "backward": True, "machine": None, "ranks": 2,
            "sharding": "contiguous", "backend": "gather", "block_size": 16}


def frame() -> Given:
    return {"num_heads": HQ, "num_kv_heads": H}


def table(*size: int) -> Tensor:
    return torch.rand(size) < 0.7


X = torch.randn(B, N, 16, generator=torch.Generator().manual_seed(0))
TEXT = "SelectedBlocks(t0, 16, 16) & Causal()"
SANE: dict[str, Callable[[], tuple[Callable[..., Any], Given]]] = {
    # patterns
    "SlidingWindow": lambda: (used(sr.SlidingWindow), {"left": 5, "right": 2, "dilation": 2}),
    "GlobalTokens": lambda: (
        used(sr.GlobalTokens), {"count": 3, "rows": True, "columns": False}),
    "Dilated": lambda: (
        used(sr.Dilated), {"segment_length": 16, "dilation_rate": 4, "offset": (0, 1)}),
    "LongNet": lambda: (used(sr.LongNet), {
        "segment_lengths": (8, 16), "dilation_rates": (1, 2), "offset": "head"}),
    "BlockDilated": lambda: (used(sr.BlockDilated), {"rates": (1, 2), "block_size": 8}),
    "BlockWindow": lambda: (used(sr.BlockWindow), {"radius": 1, "block_size": 8}),
    "RandomBlocks": lambda: (used(sr.RandomBlocks), {
        "density": 0.5, "block_size": 8, "seed": 3, "per_head": True}),
    "Hierarchical": lambda: (
        used(sr.Hierarchical), {"levels": ((8, 16), (16, None)), "block_size": 8}),
    "Documents": lambda: (used(sr.Documents), {"lengths": (15, 25)}),
    "Packed": lambda: (used(sr.Packed), {"lengths": (15, 25), "pattern": FIRST}),
    "KeyPadding": lambda: (used(sr.KeyPadding), {"lengths": (30, 40)}),
    "KeyMask": lambda: (used(sr.KeyMask), {"valid": table(B, N)}),
    "Blocks": lambda: (used(sr.Blocks), {"active": table(H, 5, 5), "block_size": 8}),
    "Dense": lambda: (used(sr.Dense), {"mask": table(H, N, N)}),
    "SelectedBlocks": lambda: (used(sr.SelectedBlocks), {
        "indices": chosen(), "block_size": 16, "query_block": 16, "first_row": 0}),
    "PooledCausal": lambda: (used(sr.PooledCausal), {"size": 4, "stride": 2}),
    "Full": lambda: (used(sr.Full), {}),
    "Causal": lambda: (used(sr.Causal), {}),
    "and": lambda: (used(lambda left, right: left & right), {
        "left": FIRST + FIRST, "right": sr.Causal()}),
    "or": lambda: (used(lambda left, right: left | right), {"left": FIRST, "right": sr.Causal()}),
    "plus": lambda: (used(lambda left, right: left + right), {"left": FIRST, "right": FIRST}),
    "from_mask_mod": lambda: (used(sr.from_mask_mod), {
        "mask_mod": lambda b, h, p, k: (p - k) % 3 == b, "batch_size": B}),
    "register_pattern": lambda: (sr.register_pattern, {"cls": type("Diagonal", (sr.Mask,), {"holds": lambda self, p, k, frame: p == k})}),
    "parse": lambda: (used(sr.parse), {"text": TEXT, "tensors": (chosen(),)}),
    "to_dense": lambda: (FIRST.to_dense, {"q_len": 9, "kv_len": N, "q_start": 20, **frame()}),
    "layout": lambda: (FIRST.layout, {
        "q_len": 9, "kv_len": N, "q_start": 20, "block_size": 16, "device": "cpu", **frame()}),
    "entries": lambda: (FIRST.layout(N, block_size=16).entries, {"batch": 0, "head": 0}),
    "live_keys": lambda: (FIRST.live_keys, {"length": 30, "max_length": 35, **frame()}),
    "cache_bound": lambda: (FIRST.cache_bound, {"max_length": N, **frame()}),
    # functions
    "attention": lambda: (sr.attention, {
        **qkv(), "pattern": FIRST, **extras(), "q_start": 0, "block_size": 16,
        "block_bias": torch.randn(1, HQ, FIRST.layout(N, block_size=16).num_blocks),
        "backend": None}),
    "attention slots": lambda: (sr.attention, {
        **qkv(), "pattern": sr.parse(TEXT, (chosen(),)), "slot_bias": torch.randn(B, HQ, 3, 2),
        "backend": None}),
    "attention plain": lambda: (sr.attention, {**qkv(), "pattern": FIRST, "backend": None}),
    "attention_varlen": lambda: (sr.attention_varlen, {
        **{name: x[0].mT.reshape(N, -1, D) for name, x in qkv().items()},
        "cu_q": torch.tensor([0, 15, N]), "cu_k": (0, 15, N), "pattern": FIRST, "scale": 0.5,
        "backend": None}),
    "attention_weights": lambda: (sr.attention_weights, {
        **qk(), "pattern": FIRST, "scale": 0.5, "q_start": 0, "block_size": 16,
        "softcap": 5.0, "sink": torch.randn(HQ), "distance_bias": torch.randn(HQ, 7),
        "block_bias": torch.randn(1, HQ, FIRST.layout(N, block_size=16).num_blocks)}),
    "key_mass": lambda: (sr.key_mass, {
        **qk(), "pattern": FIRST, "lse": torch.randn(B, HQ, N), "weight": torch.rand(B, HQ, N),
        "scale": 0.5, "q_start": 0, "block_size": 16, "softcap": 5.0,
        "distance_bias": torch.randn(HQ, 7)}),
    "explain": lambda: (sr.explain, {**qkv(), "pattern": FIRST, "scale": 0.5, "q_start": 0}),
    "merge_attention": lambda: (sr.merge_attention, {
        "outs": [qkv()["key"], qkv()["value"]],
        "lses": [torch.randn(B, H, N), torch.randn(B, H, N)]}),
    "alibi": lambda: (sr.alibi, {"slopes": torch.rand(HQ), "radius": 5}),
    "dropout_kept": lambda: (sr.dropout_kept, {
        "seed": 3, "p": 0.5, "batch": 1, "head": torch.arange(2)[:, None],
        "query_positions": torch.arange(5), "key_positions": 2, "branch": 0}),
    "backends": lambda: (sr.backends, {}),
    "set_workspace": lambda: (reset(sr.set_workspace, sr.set_workspace(1 << 26)), {"limit": 1000}),
    "layout_cache.set_limit": lambda: (
        reset(sr.layout_cache.set_limit, sr.layout_cache.info().limit), {"limit": 1000}),
    # caches
    "KVCache": lambda: (lambda **given: sr.KVCache(**given).attend(**qkv()), {
        "pattern": FIRST, "batch_size": B, "num_kv_heads": H, "head_dim": D, "num_heads": HQ,
        "value_dim": D, "max_length": 60, "rollback": 2, "page_size": 16,
        "dtype": torch.float32, "device": "cpu"}),
    "SelectedCache": lambda: (lambda **given: sr.SelectedCache(**given).attend(**qkv()), {
        "batch_size": B, "num_kv_heads": H, "head_dim": D, "k": 2, "block_size": 16,
        "num_heads": HQ, "method": "sub", "parts": 4, "top_p": 0.9, "sink": 1, "local": 1}),
}
for _name, _kind in (("KVCache", sr.KVCache), ("SelectedCache", sr.SelectedCache)):
    _steps: dict[str, Callable[[], Given]] = {
        "attend": lambda: {**qkv(2, tokens=3), "lengths": [3, 2], "stored": True, "scale": 0.5,
                           "softcap": 5.0, "sink": torch.randn(HQ), "return_lse": True,
                           "backend": None},
        "crop": lambda: {"length": N - 2},
        "reorder": lambda: {"index": torch.tensor([1, 1])},
        "repeat": lambda: {"n": 2},
        "select": lambda: {"index": [1]},
    }
    if _kind is sr.SelectedCache:
        _steps["attend"] = lambda: {
            **qkv(2, tokens=3), "lengths": None, "distance_bias": torch.randn(HQ, 7),
            "dropout_p": 0.25, "dropout_seed": 3, "backend": None}
    _steps["positions"] = lambda: {"head": 0, "entry": 1}
    for _step, _make in _steps.items():
        SANE[f"{_name}.{_step}"] = lambda step=_step, make=_make, kind=_kind: of_cache(
            step, kind, **make())
SANE |= {
    "KVCache.load": lambda: (
        lambda **given: (lambda held: (held.load(**given), held.length, held.positions(0)))(
            sr.KVCache(FIRST, B, H, D, num_heads=HQ)),
        {**{k: x for k, x in qkv().items() if k != "query"}, "positions": torch.arange(N),
         "length": N}),
    # selection
    "block_scores": lambda: (selection.block_scores, {
        **qk(), "block_size": 16, "query_block": 8, "method": "sub", "parts": 4, "causal": True,
        "scale": 0.5, "q_start": 0}),
    "select_blocks": lambda: (selection.select_blocks, {
        "scores": torch.randn(B, H, 5, 3), "k": 2, "block_size": 16, "query_block": 8,
        "top_p": 0.9, "sink": 1, "local": 1, "causal": True, "q_start": 0}),
    "pool_blocks": lambda: (selection.pool_blocks, {"x": qkv()["key"], "size": 4, "stride": 2}),
    "block_mass": lambda: (selection.block_mass, {
        **qk(), "pattern": sr.parse(TEXT, (chosen(),)), "lse": torch.randn(B, HQ, N),
        "weight": torch.rand(B, HQ, N), "scale": 0.5, "q_start": 0}),
    "selection_loss": lambda: (selection.selection_loss, {
        "scores": torch.randn(B, H, 3, 3), "mass": torch.rand(B, HQ, 3, 2), "indices": chosen(),
        "row_weight": torch.rand(B, H, 3)}),
    "selection_report": lambda: (selection.selection_report, {
        **qkv(tokens=32), "pattern": sr.SelectedBlocks(chosen()[:, :, :2], 16, 16) & sr.Causal(),
        "rows": None, "seed": 3}),
    "remainder_attention": lambda: (selection.remainder_attention, {
        **qkv(), "indices": chosen(), "block_size": 16, "query_block": 16, "causal": True,
        "scale": 0.5, "q_start": 0}),
    "BlockScorer": lambda: (
        module(selection.BlockScorer, lambda made: made(**qk())),
        {"head_dim": D, "num_kv_heads": H, "block_size": 16, "index_dim": 4, "query_block": 8,
         "causal": True, "detach": False}),
    "BlockScorer.forward": lambda: (
        lambda **given: module(selection.BlockScorer, lambda made: made(**given))(
            head_dim=D, num_kv_heads=H, block_size=16), {**qk(), "q_start": 0}),
    "BlockSummaries": lambda: (
        lambda **given: selection.BlockSummaries(**given).scores(**qk()),
        {"block_size": 16, "method": "sub", "parts": 4}),
    "BlockSummaries.scores": lambda: summaries("scores"),
    "BlockSummaries.crop": lambda: summaries("crop", length=N),
    "BlockSummaries.select": lambda: summaries("select", index=[1]),
    "PatternRefiner": lambda: (
        lambda **given: selection.PatternRefiner(**given).table,
        {"num_kv_heads": H, "rows": 5, "blocks": 5, "k": 3, "ema": 0.9, "swaps": 1, "margin": 0.1,
         "sink": 1, "local": 1, "cooldown": 2, "seed": 3}),
    "PatternRefiner.observe": lambda: refiner(
        "observe", mass=torch.rand(B, H, 3, 2), indices=chosen()),
    "PatternRefiner.update": lambda: refiner("update", group=None),
    "PatternRefiner.load_state_dict": lambda: refiner("load_state_dict"),
    "Schedule": lambda: (
        lambda **given: selection.Schedule(**given)(3), {
            "points": ((0, 1.0), (9, 0.0)), "kind": "linear"}),
    "Schedule()": lambda: (selection.Schedule(((0, 1.0), (9, 0.0))), {"step": 4}),
    "GatedSchedule": lambda: (
        lambda **given: selection.GatedSchedule(**given).step(0.7),
        {"schedule": selection.Schedule(((0, 1.0), (9, 0.0))), "bar": 0.5}),
    "GatedSchedule.step": lambda: gated("step", metric=0.7),
    "GatedSchedule.load_state_dict": lambda: gated("load_state_dict", state={"clock": 3}),
    # rings
    "simulate_ring": lambda: (distributed.simulate_ring, {
        **qkv(), "pattern": FIRST, "world_size": 3, "sharding": "zigzag", "offload": False,
        **extras()}),
    "ring_attention": lambda: (distributed.ring_attention, {
        **qkv(), "pattern": FIRST, "group": None, "mesh": None, "sharding": "contiguous",
        "compression": None, "timeout": 5.0, **extras(), "backend": None}),
    "last_traffic": lambda: (distributed.last_traffic, {"backward": False}),
    "prefetch": lambda: (lambda **given: distributed.prefetch(**given).result() and None, {
        "pattern": FIRST, "seq_len": N, "num_heads": HQ, "num_kv_heads": H, "batch_size": B,
        "group": None, "mesh": None, "sharding": "contiguous", "device": "cpu",
        "backward": True}),
    "shard": lambda: (distributed.shard, {
        "tensor": qkv()["key"], "dim": 2, "group": None, "mesh": None, "sharding": "zigzag"}),
    "unshard": lambda: (distributed.unshard, {
        "tensor": qkv()["key"], "dim": 2, "group": None, "mesh": None, "sharding": "zigzag",
        "length": N}),
    "RingPlan.build": lambda: (
        lambda **given: distributed.RingPlan.build(**given).load(0),
        {"pattern": FIRST, "seq_len": N, "world_size": 2, "num_heads": HQ, "num_kv_heads": H,
         "block_size": 16, "sharding": "auto"}),
    **{f"RingPlan.{name}": lambda name=name: plan_of(name)
       for name in ("tokens_received", "bytes_received", "load")},
    # modules and models
    "MultiheadAttention": lambda: (
        module(nn.MultiheadAttention, lambda made: made.eval()(X, X, X)[0]),
        {"embed_dim": 16, "num_heads": 2, "dropout": 0.1, "bias": True, "add_bias_kv": True,
         "add_zero_attn": True, "kdim": 16, "vdim": 16, "batch_first": True, "device": None,
         "dtype": None, "pattern": sr.SlidingWindow(9, 9), "scale": 0.5}),
    "MultiheadAttention.forward": lambda: (
        lambda **given: module(nn.MultiheadAttention, lambda made: made(**given))(
            embed_dim=16, num_heads=2, batch_first=True, pattern=sr.SlidingWindow(9, 9)),
        {"query": X, "key": X.clone(), "value": X.clone(), "key_padding_mask": ~table(B, N),
         "need_weights": True, "attn_mask": ~table(N, N), "average_attn_weights": True,
         "is_causal": False}),
    "SelectedAttention": lambda: (
        module(nn.SelectedAttention, lambda made: made(X)),
        {"embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, "block_size": 16, "k": 2,
         "query_block": 8, "scorer": "sub", "window": 16, "sink": 1, "local": 1,
         "pooled": (4, 4), "gate": "sigmoid", "dense_below": 0, "causal": True}),
    "SelectedAttention.forward": lambda: (
        lambda **given: module(nn.SelectedAttention, lambda made: made(**given))(
            embed_dim=16, num_heads=2, block_size=16, k=2, scorer="learned"),
        {"x": X, "rope": (torch.ones(N, 4), torch.zeros(N, 4)), "return_loss": True}),
    "nn.convert": lambda: (
        lambda **given: nn.convert(**given),
        {"module": torch.nn.Sequential(torch.nn.MultiheadAttention(16, 2)), "pattern": FIRST}),
    "LongNetLM": lambda: (
        module(models.LongNetLM, lambda made: made(torch.zeros(1, 10, dtype=torch.int64))),
        {"pattern": FIRST, "width": 16, "num_layers": 1, "num_heads": 2, "mlp_ratio": 2,
         "vocab_size": 11, "rope_base": 100.0, "checkpoint_layers": False}),
    "LongNetLM.generate": lambda: (
        lambda **given: module(models.LongNetLM, lambda made: list(made.generate(**given)))(
            pattern=FIRST, width=16, num_layers=1, num_heads=2, vocab_size=11),
        {"tokens": torch.arange(10)[None], "num_tokens": 2, "temperature": 0.7, "top_k": 3,
         "top_p": 0.9, "stop": (3,), "generator": None, "caches": None}),
    "LongNetEncoder": lambda: (
        module(models.LongNetEncoder, lambda made: made(X)),
        {"pattern": sr.SlidingWindow(9, 9), "in_width": 16, "width": 16, "num_layers": 1,
         "num_heads": 2, "mlp_ratio": 2, "class_token": True, "axes": 1, "drop_path": 0.0,
         "rope_base": 100.0, "checkpoint_layers": False}),
    # planner
    "estimate": lambda: (sr.estimate, {**planned(), "tokens": 64, "batch_size": B}),
    "choose_batch_size": lambda: (
        sr.choose_batch_size, {**planned(), "tokens": 64, "memory": "100MB"}),
    "longest_sequence": lambda: (
        sr.longest_sequence,
        {**planned(), "memory": "100MB", "batch_size": B, "multiple_of": 64}),
}
if find_spec("transformers"):
    SANE |= {
        "hf.apply": lambda: hugging_face("apply", pattern=FIRST),
        "hf.explain": lambda: hugging_face("explain"),
        "hf.SparseCache": lambda: hugging_face("SparseCache", rollback=2),
    }

LONG = "'x' * 100000"
VALUES = {  # sources of values; x is the one that fits, `others` are those of the other arguments
    "none": "None",
    "bool": "True; False; np.True_; torch.tensor(True)",
    "text": f"''; 'x'; b'x'; {LONG}; '1'; '\\0'; 'cpu'; 'meta'; str(x)[:99]",
    "container": "[]; {}; (); [x]; (x, x); {'a': x}; range(3); iter(()); [None]; [[1], [2, 3]]; "
    "[1.5]; [-1]; [2**63]; ['a']; (1, True); [10**400, 1]; (nan, 1.0); [[]]; set(); [[1, 2]] * 2",
    "object": "object(); int; len; ...; NotImplemented; ValueError('x'); sr.Full; torch.float16; "
    "torch.device('meta'); FIRST; FIRST + FIRST; torch.Size([2])",
    "numpy": "np.zeros(3); np.array('x'); np.array([]); np.float64(0.5); np.int64(2); np.array(1); "
    "np.array([None, 1]); np.float32('nan'); np.int8(-1); np.uint64(2**64 - 1); np.datetime64(1, 's')",
    "complex": "1j; complex('nan'); torch.tensor(1j); np.complex64(1)",
    "float": "1.5; nan; inf; -inf; -0.0; 1e308; 5e-324; Fraction(1, 3); Decimal('0.5'); 1e-46; 2.0",
    "integer": "-1; 0; 1; 3; 2**31; 2**53; 2**63 - 1; 2**63; -2**63; 10**400; 2**64",
    "0-d": "torch.tensor(1.5); torch.tensor(1); torch.tensor(nan); torch.tensor(2**62); "
    "torch.tensor(3, device='meta'); torch.tensor(-1)",
    "tensor": "torch.randn(3); torch.zeros(0); torch.ones(2, 3, dtype=torch.bool); "
    "torch.tensor([-1]); torch.tensor([2**63 - 1, 0]); torch.empty(2, device='meta'); "
    "torch.ones(2, 2).to_sparse(); torch.tensor([1, 1], dtype=torch.uint8); torch.zeros(2, 0); "
    "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]); torch.ones(2, requires_grad=True)",
    "same": "np.int64(x); float(x); torch.tensor(x); np.array(x); Fraction(x); np.float64(x); "
    "list(x); torch.tensor(list(x)); np.array(list(x)); Text(x)",
    "another": "others[0]; others[1]; others[2]; others[-1]; others[-2]",
    "missing": "MISSING",
    # of tensors
    "dims": "x[None]; x[0]; x.flatten(); x[..., None]; x.sum(); x[None, None]; x.movedim(0, -1)",
    "shape": "torch.cat([x, x]); torch.cat([x, x], -1); x.mT.contiguous(); x[..., :-1]; x[:1]; "
    "x[..., :1]; torch.cat([x, x], 1); x[:, :1]; x[:, :-1]; torch.cat([x, x], -2)",
    "size 0": "x[:0]; x[:, :0]; x[..., :0]; x[..., :0, :]; x.new_zeros(0); x[:0, :0]",
    "dtype": "x.double(); x.half(); x.bfloat16(); x.long(); x.bool(); x.cfloat(); x.int(); "
    "x.to(torch.float8_e4m3fn); x.to(torch.uint8); x.short(); x.float(); x.to(torch.uint64)",
    "layout": "x.to_sparse(); x.to('meta'); torch.nested.nested_tensor(list(x)); x.to_mkldnn(); "
    "torch.quantize_per_tensor(x, 0.1, 0, torch.qint8); x.flatten(1).to_sparse_csr()",
    "numbers": "torch.full_like(x, nan); torch.full_like(x, inf); torch.full_like(x, -inf); "
    "torch.full_like(x, -1); torch.zeros_like(x); x * 3e38; x + 2**62; x - 2**62 - 2**62; x + 3; "
    "x + 2**31; -x; x.flip(0)",
    "same tensor": "x.as_subclass(Subclass); torch.nn.Parameter(x.clone()); "
    "x.clone().requires_grad_(); torch._neg_view(-x); x.mT.contiguous().mT; x.tolist(); "
    "x.numpy(); inference(x); x.repeat_interleave(2, -1)[..., ::2]; torch.nn.Buffer(x); "
    "x.clone().requires_grad_() * 1",
}
OF_TENSORS = ("dims", "shape", "size 0", "dtype", "layout", "numbers", "same tensor")
CODE = {kind: [part.strip() for part in text.split("; ")] for kind, text in VALUES.items()}
MISSING = object()


class Text(str):
    """A str of another class."""


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


@cache
def _compiled(source: str) -> Any:
    return compile(source, source, "eval")


def value_of(source: str, given: Given, name: str) -> Any:
    """What a source says, of an argument."""
    others = [other for key, other in given.items() if key != name]
    return eval(_compiled(source), globals() | {"x": given.get(name), "others": others,
                                                "nan": math.nan, "inf": math.inf})


def _legal(name: str) -> Iterator[tuple[str, str, int]]:
    """All (argument, kind, number) of which there is a value."""
    torch.manual_seed(0)
    _, given = SANE[name]()
    for argument, x in given.items():
        for kind, sources in CODE.items():
            if kind in OF_TENSORS and not isinstance(x, Tensor):
                continue
            for number, source in enumerate(sources):
                try:
                    value = value_of(source, given, argument)
                    assert kind != "same" or isinstance(x, str | tuple | list) or value == x
                except Exception:  # noqa: S112, there is none such
                    continue
                yield argument, kind, number
    yield "unknown", "none", 0


LEGAL = {name: list(_legal(name)) for name in SANE}
CELLS = sorted({Cell(k, a, name, "-") for name, legal in LEGAL.items() for a, k, _ in legal})

ALLOWED = (ValueError, TypeError, NotImplementedError, ImportError, distributed.RingError)


@dataclass(frozen=True)
class Hostile:
    """One call with some arguments replaced: (argument, kind of value, number of the value)."""

    name: str
    replaced: tuple[tuple[str, str, int], ...]
    backend: str | None = None

    def cells(self) -> list[Cell]:
        return [Cell(kind, argument, self.name, "-") for argument, kind, _ in self.replaced]

    def check(self) -> None:
        call, given = self.sane()
        bad = dict(given)
        for argument, kind, number in self.replaced:
            value = value_of(CODE[kind][number], given, argument)
            if value is MISSING:
                bad.pop(argument)
            else:
                bad[argument] = value
        refusal = None
        try:
            with guarded():
                result = call(**bad)
        except ALLOWED as error:
            refusal = error
            self.judge(error)
        except (MemoryError, RuntimeError) as error:
            if not (isinstance(error, MemoryError) or re.search(TOO_MUCH, str(error))):
                raise
            raise Refused("more memory than there is") from error
        else:
            self.judge_result(result, given, bad)
        if refusal is None and self.name.split(".")[0] in STATEFUL:
            return
        torch.manual_seed(0)
        different = differs(call(**given), self.expected())
        assert not different, f"after that call the right one gives {different}"

    def sane(self) -> tuple[Callable[..., Any], Given]:
        torch.manual_seed(0)
        call, given = SANE[self.name]()
        if "backend" in given and self.backend:
            given["backend"] = self.backend
        return call, given

    def expected(self) -> Any:
        return _expected(self.name, self.backend)

    def judge(self, error: Exception) -> None:
        """An error is told in the caller's words."""
        text = str(error)
        assert text and text.isascii() and len(text) < 2000, f"such a message: {text[:500]!r}"
        if len(self.replaced) > 1 or self.replaced[0][1] in ("missing", "unknown"):
            return
        argument = self.replaced[0][0]
        names = [*self.sane()[1], *re.split("[ .]", self.name), argument.split("_")[-1]]
        names += ["pattern", "SelectedBlocks", "cache"]
        told = any(re.search(rf"(?i)(\b|_){word.rstrip('s')}", text) for word in names)
        assert told and re.search("got|need|must|takes|no ", text), (
            f"the argument {argument} is not named: {text!r}"
        )
        origin = traceback.extract_tb(error.__traceback__)[-1].filename
        assert argument in text or "sparsering" in origin, f"raised by {origin}: {text!r}"

    def judge_result(self, result: Any, given: Given, bad: Given) -> None:
        kinds = {kind for _, kind, _ in self.replaced}
        if all(is_finite(x) for x in bad.values()):
            assert all(is_finite(x) or not nan_in(x) for x in flat(result)), "NaN of finite values"
        if kinds <= {"same", "same tensor"}:
            different = differs(result, self.expected())
            assert not different, f"equal values give {different}"

    def script(self) -> str:
        lines = [
            "from fuzz.hostile import *  # with tests on the path",
            f"call, given = Hostile({self.name!r}, (), {self.backend!r}).sane()",
            "bad = dict(given)",
        ]
        for argument, kind, number in self.replaced:
            source = CODE[kind][number]
            lines.append(
                f"bad.pop({argument!r})"
                if source == "MISSING"
                else f"bad[{argument!r}] = value_of({source!r}, given, {argument!r})"
            )
        return "\n".join([*lines, "call(**bad)"])


TOO_MUCH = r"can't allocate memory|not enough memory|Storage size calculation overflowed"
STATEFUL = ("nn", "KVCache", "SelectedCache", "BlockSummaries", "PatternRefiner", "GatedSchedule")


@contextmanager
def guarded() -> Iterator[None]:
    """Ends what takes too long or too much memory."""

    def late(*_: Any) -> None:
        raise AssertionError(f"still at it after {SECONDS:g} seconds")

    known = signal.signal(signal.SIGALRM, late)
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, known)


def flat(x: Any) -> list[Any]:
    """Tensors, numbers and texts of a result."""
    if isinstance(x, type):
        return []
    if isinstance(x, tuple | list):
        return [found for part in x for found in flat(part)]
    if isinstance(x, dict):
        return flat(list(x.values()))
    if isinstance(x, sr.BlockLayout):
        return [str(x), x.num_pairs]
    if isinstance(x, sr.BlockWeights):
        return [x.values]
    if hasattr(x, "__dataclass_fields__") and not isinstance(x, sr.Pattern):
        return flat(list(vars(x).values()))
    return [x]


def is_finite(x: Any) -> bool:
    """Whether numbers of sums stay finite with it."""
    if isinstance(x, tuple | list):
        return all(map(is_finite, x))
    if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta and not x.is_nested:
        if x.is_quantized:
            return False
        return not x.is_floating_point() or bool((x.detach().double().abs() < 1e9).all())
    if isinstance(x, float | np.floating):
        return abs(x) < 1e9
    return not isinstance(x, Tensor | np.ndarray)


def nan_in(x: Any) -> bool:
    return bool(x.isnan().any()) if isinstance(x, Tensor) and not x.is_meta else x != x


def differs(a: Any, b: Any) -> str:
    """How two results differ, "" where they do not."""
    a, b = flat(a), flat(b)
    if len(a) != len(b):
        return f"{len(a)} results instead of {len(b)}"
    for x, y in zip(a, b, strict=True):
        if isinstance(y, Tensor):
            if not isinstance(x, Tensor) or x.shape != y.shape:
                return f"{x} instead of {y}"
            if not torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
                return f"{x} instead of {y}"
        elif isinstance(y, float | int):
            if not isinstance(x, Real) or not math.isclose(x, y, rel_tol=1e-6):
                return f"{x} instead of {y}"
        elif isinstance(y, str | sr.Pattern) and x != y:
            return f"{x} instead of {y}"
    return ""


@cache
def _expected(name: str, backend: str | None) -> Any:
    call, given = Hostile(name, (), backend).sane()
    torch.manual_seed(0)
    return call(**given)


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Hostile:
    """Calls with a value of the cell's kind for its argument, maybe another beside."""
    name, legal = cell.backend, LEGAL[cell.backend]
    numbers = [entry for entry in legal if entry[:2] == (cell.pattern, cell.option)]
    replaced = (draw(st.sampled_from(numbers)),)
    if draw(st.integers(0, 3)) == 3:
        second = draw(st.sampled_from(legal))
        if second[0] != cell.pattern:
            replaced = (*replaced, second)
    backend = draw(st.sampled_from((None, "reference", "gather", "cpu")))
    return Hostile(name, replaced, backend if name in BACKENDS_OF else None)


BACKENDS_OF = ("attention", "attention slots", "attention plain", "attention_varlen",
               "KVCache.attend")
