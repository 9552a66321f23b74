"""A valid call of every public name: a function and its keyword arguments."""

import math
import operator
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from oracles.kinds import HQ, KINDS, B, H, Kind, N, chosen
from torch import Tensor

import sparsering as sr
from sparsering import distributed, models, nn, planning, selection

D = 8
Given = dict[str, Any]
FIRST = sr.Causal() & sr.SlidingWindow(9)


def used(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a constructor or operator: builds a pattern, and compares its layout with dense."""

    def call(**given: Any) -> Any:
        pattern = make(**given)
        counts = pattern.to_dense(N, num_heads=HQ, num_kv_heads=H)
        layout = pattern.layout(N, num_heads=HQ, num_kv_heads=H, block_size=16)
        pairs = float(counts.double().sum((-1, -2)).mean()) if counts.numel() else 0.0
        assert math.isclose(layout.num_pairs, pairs, abs_tol=1e-9)
        x = qkv(0)
        out, expected = (
            sr.attention(**x, pattern=pattern, backend=name) for name in (None, "reference")
        )
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert sr.parse(repr(pattern), pattern.tensors) == pattern
        return counts, layout, expected

    return call


def _pattern(kind: Kind) -> Callable[[], tuple[Callable[..., Any], Given]]:
    return lambda: (used(getattr(sr, kind.public)), kind.sane())


def combined(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Wraps `&`, `|` or `+`: uses the pattern that it makes of two values, one of them a pattern.

    Python alone combines two values that are no patterns, as in `True | True`.
    """
    checked = used(lambda left, right: combine(left, right))

    def call(left: Any, right: Any) -> Any:
        if not (isinstance(left, sr.Pattern) or isinstance(right, sr.Pattern)):
            return None
        return checked(left=left, right=right)

    return call


def qkv(seed: int = 0, *, batch: int = B, tokens: int = N) -> Given:
    torch.manual_seed(seed)
    shapes = {"query": HQ, "key": H, "value": H}
    return {name: torch.randn(batch, heads, tokens, D) for name, heads in shapes.items()}


def qk() -> Given:
    return {name: x for name, x in qkv().items() if name != "value"}


def indexer() -> Given:
    torch.manual_seed(0)
    shapes = {"query": (B, HQ, N, D), "key": (B, N, D), "weight": (B, N, HQ)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


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


def filled(kind: type = sr.KVCache) -> Any:
    made: Any = (
        sr.SelectedCache(B, H, D, 2, block_size=16, num_heads=HQ, rollback=4)
        if kind is sr.SelectedCache
        else sr.KVCache(FIRST, B, H, D, num_heads=HQ, rollback=4, page_size=16)
    )
    made.attend(**qkv(1))
    return made


def of_cache(name: str, kind: type, **given: Any) -> tuple[Callable[..., Any], Given]:
    """Builds a call of a method of a filled cache; it also returns the cache's new state."""
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
    """Wraps a constructor: builds a module with seeded weights and runs it."""

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
    """Wraps a setter: sets a limit, and restores the old one."""

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
        given |= {
            "head_dim": D,
            "dtype": torch.float32,
            "num_kv_heads": H,
            "compression": "int8",
            "backward": True,
        }
    return getattr(plan, name), given


def planned() -> Given:
    return {
        "pattern": FIRST,
        "num_heads": HQ,
        "num_kv_heads": H,
        "head_dim": D,
        "dtype": torch.float32,
        "backward": True,
        "machine": None,
        "ranks": 2,
        "sharding": "contiguous",
        "backend": "gather",
        "block_size": 16,
    }


def frame() -> Given:
    return {"num_heads": HQ, "num_kv_heads": H}


def table(*size: int) -> Tensor:
    return torch.rand(size) < 0.7


X = torch.randn(B, N, 16, generator=torch.Generator().manual_seed(0))
TEXT = "SelectedBlocks(t0, 16, 16) & Causal()"
# fmt: off
SANE: dict[str, Callable[[], tuple[Callable[..., Any], Given]]] = {
    # patterns
    **{name: _pattern(kind) for name, kind in KINDS.items() if kind.sane},
    "and": lambda: (combined(operator.and_), {"left": FIRST + FIRST, "right": sr.Causal()}),
    "or": lambda: (combined(operator.or_), {"left": FIRST, "right": sr.Causal()}),
    "plus": lambda: (combined(operator.add), {"left": FIRST, "right": FIRST}),
    "minus": lambda: (combined(operator.sub), {"left": FIRST, "right": sr.SlidingWindow(2)}),
    "from_mask_mod": lambda: (used(sr.from_mask_mod), {
        "mask_mod": lambda b, h, p, k: (p - k) % 3 == b, "batch_size": B}),
    "register_pattern": lambda: (
        sr.register_pattern, {"cls": type("Diagonal", (sr.Mask,), {"holds": lambda *_: None})}),
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
    "coordinate_bias": lambda: (sr.coordinate_bias, {
        "coords": torch.rand(B, N, 2), "slopes": torch.rand(HQ),
        "query_coords": torch.rand(N, 2)}),
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
        "store": "int8", "dtype": torch.float32, "device": "cpu"}),
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
    if _kind is sr.KVCache:
        _steps["join"] = lambda: {"other": filled(sr.KVCache)}
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
    "index_scores": lambda: (selection.index_scores, {
        **indexer(), "indices": torch.randint(-1, N, (B, 1, N, 3)), "scale": 0.5, "q_start": 0}),
    "top_tokens": lambda: (selection.top_tokens, {
        **indexer(), "k": 3, "causal": True, "scale": 0.5, "q_start": 0,
        "lengths": torch.tensor([N, 7])}),
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
         "pooled": (4, 4), "pool_queries": True, "gate": "sigmoid", "dense_below": 0,
         "causal": True}),
    "SelectedAttention.forward": lambda: (
        lambda **given: module(nn.SelectedAttention, lambda made: made(**given))(
            embed_dim=16, num_heads=2, block_size=16, k=2, scorer="learned"),
        {"x": X, "rope": (torch.ones(N, 4), torch.zeros(N, 4)), "return_loss": True,
         "documents": (N - 5, 5), "valid": table(B, N)}),
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
    # planning
    "estimate": lambda: (sr.estimate, {**planned(), "tokens": 64, "batch_size": B}),
    "compare": lambda: (
        lambda **given: sr.compare(**given).error, {**qkv(), "pattern": FIRST, "seconds": 0.1}),
    "choose_batch_size": lambda: (
        sr.choose_batch_size, {**planned(), "tokens": 64, "memory": "100MB", "share": 0.8}),
    "propose": lambda: (
        planning.propose,
        {"seq_len": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "batch_size": B,
         "dtype": torch.float32, "machine": "H200", "ranks": 1, "seconds": 1.0, "memory": "1GB",
         "causal": True, "backward": False}),
    "longest_sequence": lambda: (
        sr.longest_sequence,
        {**planned(), "memory": "100MB", "share": 0.8, "batch_size": B,
         "multiple_of": 64}),
}
# fmt: on
if find_spec("transformers"):
    SANE |= {
        "hf.apply": lambda: hugging_face("apply", pattern=FIRST),
        "hf.explain": lambda: hugging_face("explain"),
        "hf.SparseCache": lambda: hugging_face("SparseCache", rollback=2, store="fp8"),
    }
