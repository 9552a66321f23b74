"""Hugging Face models with "sparsering" attention, against "sdpa" and "eager".

Weights are random. `error` compares with "sdpa" ("eager" where an indexer chooses keys) on the
model's own mask, relative to the largest logit. `from_dense` is the distance of a sparse pattern's
logits from the dense model's. It is not an error: a model that was not trained with the pattern
changes that much.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparsering.patterns.algebra import Pattern
from sparsering.patterns.positions import GlobalTokens, SlidingWindow

from ..measure import Row, distance_of, interleaved, peak_extra_bytes

OURS, OVERRIDE = "sparsering", "sparsering, window + global"
PEERS = ("sdpa", "eager")
WINDOW, GLOBAL = 512, 16
INDEXED = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")
MOST = {"eager": 4096, "sdpa, llama": 65536, "sdpa, modernbert": 16384}
"""Longest sequences whose dense masks fit a small machine; "sdpa" needs none if causal."""


def transformers(quick: bool) -> list[Row]:
    """Measures prompts and training of a small Llama and ModernBERT, and Llama's generation."""
    rounds_of = {1024: 1} if quick else {4096: 5, 16384: 3, 65536: 1}
    rows: list[Row] = []
    for kind in ("llama", "modernbert"):
        for length, rounds in rounds_of.items():
            rows += prefill(kind, length, rounds)
    for kind in ("llama", "modernbert"):
        rows += training(kind, 1024 if quick else 8192, 1 if quick else 3)
    return rows + generation(1024 if quick else 16384, 8 if quick else 64)


def indexed(quick: bool) -> list[Row]:
    """Measures small models whose indexers choose 512 tokens or entries, beside eager attention."""
    rows: list[Row] = []
    for kind in INDEXED:
        for length, rounds in ({256: 1} if quick else {2048: 3, 8192: 1}).items():
            rows += prefill(kind, length, rounds)
        rows += training(kind, 256 if quick else 2048, 1 if quick else 3)
    return rows


def prefill(kind: str, length: int, rounds: int) -> list[Row]:
    """Measures one pass over a sequence without gradients; peak memory in fresh processes."""
    names = _names(kind, length)
    models = {name: model_of(kind, name, length) for name in names}
    tokens = _tokens(length)
    outs: dict[str, Tensor] = {}

    def call(name: str) -> Callable[[], object]:
        def run() -> None:
            outs[name] = forward(models[name], kind, tokens)

        return run

    times = interleaved({name: call(name) for name in names}, rounds)
    return [
        {
            "case": "prefill", "model": kind, "attention": name, "tokens": length,
            "ms": times[name], "peak_bytes": peak_extra_bytes(prefill_once, kind, name, length),
            **_distances(name, outs),
        }
        for name in names
    ]  # fmt: skip


def training(kind: str, length: int, rounds: int) -> list[Row]:
    """Measures forward and backward of one sequence."""
    names = _names(kind, length)
    models = {name: model_of(kind, name, length).train() for name in names}
    tokens = _tokens(length)
    norms: dict[str, float] = {}

    def call(name: str) -> Callable[[], object]:
        def run() -> None:
            norms[name] = train_step(models[name], kind, tokens)

        return run

    times = interleaved({name: call(name) for name in names}, rounds)
    return [
        {
            "case": "training step", "model": kind, "attention": name, "tokens": length,
            "ms": times[name], "peak_bytes": peak_extra_bytes(train_once, kind, name, length),
            "gradient_norm": norms[name],
        }
        for name in names
    ]  # fmt: skip


def generation(length: int, new: int) -> list[Row]:
    """Measures greedy decoding after a prompt, with caches of all keys and of live keys only."""
    from transformers import DynamicCache

    from sparsering.integrations import transformers as hf

    tokens, rows, texts = _tokens(length), list[Row](), {}
    for name in ("sdpa", OURS, OVERRIDE, f"{OVERRIDE}, SparseCache"):
        model = model_of("llama", name.removesuffix(", SparseCache"), length + new)
        cache: Any = hf.SparseCache(model) if name.endswith("SparseCache") else DynamicCache()
        stamps: list[float] = []
        texts[name] = _greedy(model, tokens, cache, new, stamps)
        taken = [(b - a) * 1e3 for a, b in pairwise(stamps)]
        cache_bytes = cache.nbytes if name.endswith("SparseCache") else _nbytes(cache)
        rows.append({
            "case": "generate", "model": "llama", "attention": name, "tokens": length, "new": new,
            "ms_a_token": statistics.median(taken), "cache_bytes": cache_bytes,
        })  # fmt: skip
    for ours, theirs in ((OURS, "sdpa"), (f"{OVERRIDE}, SparseCache", OVERRIDE)):
        if texts[ours] != texts[theirs]:
            raise RuntimeError(f"{ours} and {theirs} wrote different tokens")
    return rows


def model_of(kind: str, name: str, length: int) -> Any:
    """Builds a small model of about 3M parameters, with equal weights for every `name`."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        ModernBertConfig,
        ModernBertModel,
    )

    from sparsering.integrations import transformers as hf

    hf.register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"vocab_size": 256, "max_position_embeddings": length}
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=512, num_key_value_heads=2))
    elif kind in INDEXED:
        sizes |= _sizes_of_indexed(kind)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    else:
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
        tokens = dict.fromkeys(names, 0)
        types = ["full_attention", "sliding_attention"] * 2
        more = {"intermediate_size": 384, "local_attention": 128, "layer_types": types}
        model = ModernBertModel(ModernBertConfig(**sizes, **more, **tokens))
    if name == OVERRIDE:
        hf.apply(model, _override(kind))
    else:
        model.set_attn_implementation(name)
    return model.eval()


def forward(model: Any, kind: str, tokens: Tensor) -> Tensor:
    """Returns logits of the last 64 tokens, or the states of an encoder."""
    with torch.no_grad():
        if kind != "modernbert":
            out: Tensor = model(tokens, use_cache=False, logits_to_keep=64).logits
        else:
            out = model(tokens).last_hidden_state
    return out


def train_step(model: Any, kind: str, tokens: Tensor) -> float:
    """Runs forward and backward; returns the norm of all gradients."""
    model.zero_grad()
    if kind != "modernbert":
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    else:
        model(tokens).last_hidden_state.square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]  # none of an indexer
    return float(torch.nn.utils.get_total_norm(grads))


def prefill_once(kind: str, name: str, length: int) -> Iterator[None]:
    """Warms up, yields, and runs one forward pass for `peak_extra_bytes`."""
    model, tokens = model_of(kind, name, length), _tokens(length)
    forward(model, kind, tokens[:, :512])
    yield
    forward(model, kind, tokens)


def train_once(kind: str, name: str, length: int) -> Iterator[None]:
    """Warms up, yields, and runs one training step for `peak_extra_bytes`."""
    model, tokens = model_of(kind, name, length).train(), _tokens(length)
    train_step(model, kind, tokens[:, :512])
    yield
    train_step(model, kind, tokens)


def _sizes_of_indexed(kind: str) -> dict[str, Any]:
    """Sizes of a model whose index is as wide as its heads; two layers, or one of each kind."""
    sizes = {"intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 128}
    sizes |= {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 512, "pad_token_id": 0}
    if kind != "deepseek_v4":
        sizes |= {"kv_lora_rank": 128, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32}
        return sizes | {"v_head_dim": 128, "num_key_value_heads": 8, "num_hidden_layers": 2}
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    return sizes | {
        "head_dim": 128,
        "o_lora_rank": 64,
        "num_hidden_layers": 3,
        "layer_types": kinds,
    }


def _override(kind: str) -> Pattern:
    if kind == "llama":
        return SlidingWindow(WINDOW - 1) | GlobalTokens(GLOBAL, rows=False)
    return SlidingWindow(WINDOW // 2, WINDOW // 2) | GlobalTokens(GLOBAL)


def _names(kind: str, length: int) -> list[str]:
    """Names of the attentions whose masks fit in memory at a length."""
    if kind in INDEXED:
        return [OURS, "eager"]
    limits = {"sdpa": MOST[f"sdpa, {kind}"], "eager": MOST["eager"]}
    return [OURS, OVERRIDE, *(name for name in PEERS if length <= limits[name])]


def _tokens(length: int) -> Tensor:
    return torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(1))


def _distances(name: str, outs: dict[str, Tensor]) -> Row:
    """Distance of an attention's results from the dense model's, relative to the largest."""
    dense = outs.get("sdpa", outs.get("eager", outs[OURS]))
    distance = distance_of([outs[name]], [dense])
    if name == OVERRIDE:
        return {"from_dense": distance}
    if distance > 1e-3:
        raise RuntimeError(f"{name} is wrong: error {distance:.3g}")
    return {"error": distance}


@torch.no_grad()
def _greedy(model: Any, tokens: Tensor, cache: Any, new: int, stamps: list[float]) -> list[int]:
    """Decodes `new` tokens greedily; appends the time of each to `stamps`."""
    decoded, ids = [], tokens
    for _ in range(new):
        ids = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        decoded.append(int(ids))
        stamps.append(time.perf_counter())
    return decoded


def _nbytes(cache: Any) -> int:
    return sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
