"""Modules beside their parts, or beside what they replace in other people's models."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsering.functional import attention
from sparsering.nn import MultiheadAttention, SelectedAttention
from sparsering.patterns.positions import Causal, SlidingWindow
from sparsering.patterns.selected import SelectedBlocks
from sparsering.selection import selection_report

from ..measure import Row, distance_of, interleaved, peak_extra_bytes

EMBED_DIM, HEADS = 512, 8


def modules(quick: bool) -> list[Row]:
    """Self-attention of one sequence over a window of 511 keys, forward, float32."""
    rows: list[Row] = []
    for tokens in (512, 1024) if quick else (1024, 4096, 16384):
        torch.manual_seed(0)
        pattern = SlidingWindow(255, 255)
        module = MultiheadAttention(EMBED_DIM, HEADS, batch_first=True, pattern=pattern)
        x = torch.randn(1, tokens, EMBED_DIM)

        def called(x: Tensor = x, module: MultiheadAttention = module) -> Tensor:
            out: Tensor = module(x, x, x, need_weights=False)[0]
            return out

        def bare(x: Tensor = x, module: MultiheadAttention = module) -> Tensor:
            projected = F.linear(x, module.in_proj_weight, module.in_proj_bias)
            parts = projected.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = parts.unbind()
            out = attention(query, key, value, module.pattern)
            joined: Tensor = module.out_proj(out.transpose(1, 2).flatten(2))
            return joined

        with torch.no_grad():
            ms = interleaved({"module": called, "bare": bare}, 3 if quick else 15)
            error = distance_of([called()], [bare()])
        if error > 1e-5:
            raise RuntimeError(f"the module is not what it is made of: {error}")
        rows += [
            {
                "case": "forward", "backend": name, "pattern": pattern.normal_text,
                "dtype": "float32",
                "tokens": tokens, "embed_dim": EMBED_DIM, "heads": HEADS, "ms": ms[name],
                "times_bare": ms[name] / ms["bare"], "error": error,
            }
            for name in ms
        ]  # fmt: skip
    return rows


def hierarchical(quick: bool) -> list[Row]:
    """`SelectedAttention.hierarchical` with queries as they are, and pooled in its coarse branch.

    `captured`: the share of full attention's mass in the blocks chosen, on inputs drawn at random;
    both choose the same blocks. `error`: of the outputs, against the same layer in float64.
    """
    rows: list[Row] = []
    for tokens in (1024, 2048) if quick else (4096, 16384):
        torch.manual_seed(0)
        x = torch.randn(1, tokens, EMBED_DIM)
        layers = {
            pools: SelectedAttention.hierarchical(
                EMBED_DIM, HEADS, query_block=16, pool_queries=pools
            )
            for pools in (False, True)
        }
        layers[True].load_state_dict(layers[False].state_dict())

        def with_backward(layer: SelectedAttention, x: Tensor = x) -> None:
            layer(x).sum().backward()

        calls = {pools: partial(layer, x) for pools, layer in layers.items()}
        with torch.no_grad():
            forward = interleaved({str(p): call for p, call in calls.items()}, 3 if quick else 7)
        both = {str(p): partial(with_backward, layer) for p, layer in layers.items()}
        ms = interleaved(both, 3 if quick else 5)
        for pools, layer in layers.items():
            with torch.no_grad():
                exact = copy.deepcopy(layer).double()(x.double()) if tokens <= 4096 else None
                query, key, value = (
                    p(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
                    for p in (layer.q_proj, layer.k_proj, layer.v_proj)
                )
                chosen = layer._select(layer.scores(query, key))
                pattern = SelectedBlocks(chosen, layer.block_size, layer.query_block) & Causal()
                report = selection_report(query, key, value, pattern, rows=64)
                error = None if exact is None else distance_of([layer(x)], [exact])
            rows.append({
                "case": "hierarchical", "pool_queries": pools, "tokens": tokens,
                "embed_dim": EMBED_DIM, "heads": HEADS, "dtype": "float32", "query_block": 16,
                "ms": forward[str(pools)], "with_backward_ms": ms[str(pools)],
                "captured": float(report.captured.mean.mean()),
                "density": float(report.density.mean()), "error": error,
            })  # fmt: skip
    return rows


GROUPS = "chronos-2, one group attention"
BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


def converted(quick: bool) -> list[Row]:
    """Models that `hf.convert` changes, and ModernBERT under `hf.register`, beside themselves.

    Widths of the base models, two layers (ModernBERT: three, one of them global), float32, random
    weights. Chronos-2: series of 256 values in groups of 1 to 12 series, which `tokens` counts.
    """
    rows: list[Row] = []
    cases = {("longformer", 512): 1, (GROUPS, 100): 1, ("modernbert", 512): 1}
    if not quick:
        cases = {("longformer", 4096): 3, (GROUPS, 1000): 3, (GROUPS, 4096): 1}
        cases |= {("chronos-2", 500): 1, ("modernbert", 8192): 1}
    for (kind, size), rounds in cases.items():
        many = kind == "chronos-2" or size * (kind == GROUPS) > 1000  # minutes a call
        for backward in (False,) if many else (False, True):
            rows += _converted_rows(kind, size, rounds, backward)
    return rows


def _converted_rows(kind: str, size: int, rounds: int, backward: bool) -> list[Row]:
    peers = ("sdpa",) if kind == "modernbert" else ("original",)
    models = {name: model_of(kind, name, size) for name in ("sparsering", *peers)}
    inputs = inputs_of_model(kind, size)
    outs: dict[str, Tensor] = {}

    def call(name: str) -> None:
        outs[name] = step(models[name], inputs, backward)

    ms = interleaved({name: partial(call, name) for name in models}, rounds)
    error = distance_of([outs["sparsering"]], [outs[peers[0]]])
    if error > 1e-4:
        raise RuntimeError(f"{kind} of {size} is not what it was: {error}")
    return [
        {
            "case": "converted", "model": kind, "attention": name, "tokens": size,
            "backward": backward, "ms": time, "times_ours": time / ms["sparsering"],
            "error": error if name == "sparsering" else None,
            "peak_bytes": peak_extra_bytes(once, kind, name, size, backward),
        }
        for name, time in ms.items()
    ]  # fmt: skip


def model_of(kind: str, name: str, size: int) -> Any:
    """Builds a model with the weights of its kind, converted or as it is."""
    import transformers

    from sparsering.integrations import transformers as hf

    hf.register()
    torch.manual_seed(0)
    model: Any
    sizes: dict[str, Any]
    if kind == "longformer":
        sizes = {**BASE, "attention_window": 512, "max_position_embeddings": size + 2}
        config = transformers.LongformerConfig(**sizes, num_hidden_layers=2, vocab_size=256)
        model = transformers.LongformerModel(config, add_pooling_layer=False)
    elif kind == "modernbert":
        types = ["full_attention", "sliding_attention", "sliding_attention"]
        sizes = {**BASE, "max_position_embeddings": size, "num_hidden_layers": 3}
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
        sizes |= dict.fromkeys(names, 0) | {"intermediate_size": 1152, "layer_types": types}
        model = transformers.ModernBertModel(transformers.ModernBertConfig(**sizes, vocab_size=256))
        model.set_attn_implementation(name)
    else:
        from chronos.chronos2 import Chronos2Model  # type: ignore[import-untyped]
        from chronos.chronos2.config import Chronos2CoreConfig  # type: ignore[import-untyped]

        sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": 2}
        core = Chronos2CoreConfig(**sizes)
        core.chronos_config = {
            **{"context_length": 256, "input_patch_size": 16, "input_patch_stride": 16},
            **{"output_patch_size": 16, "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True},
            **{"use_arcsinh": True, "max_output_patches": 4, "time_encoding_scale": 256},
        }
        model = Chronos2Model(core)
    if name == "sparsering" and kind != "modernbert":
        hf.convert(model)
    return (_GroupLayer(model.encoder) if kind == GROUPS else model).eval()


class _GroupLayer(torch.nn.Module):
    """The attention of one layer of Chronos-2 among the series of each group."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.mask, self.layer = (
            encoder._construct_and_invert_group_time_mask,
            encoder.block[0].layer[1],
        )

    def forward(self, states: Tensor, group_ids: Tensor) -> Tensor:
        mask = self.mask(group_ids, torch.ones(states.shape[:2]), states.dtype)
        out: Tensor = self.layer(states, attention_mask=mask)[0]
        return out


def inputs_of_model(kind: str, size: int) -> dict[str, Tensor]:
    """Draws tokens, of which the first is global, or series in ragged groups."""
    generator = torch.Generator().manual_seed(1)
    if kind in ("chronos-2", GROUPS):
        groups = torch.arange(size).repeat_interleave(
            torch.randint(1, 13, (size,), generator=generator)
        )[:size]
        if kind == GROUPS:
            states = torch.randn(size, 21, 768, generator=generator)
            return {"states": states, "group_ids": groups}
        return {"context": torch.randn(size, 256, generator=generator), "group_ids": groups}
    tokens = torch.randint(3, 256, (1, size), generator=generator)
    if kind == "modernbert":
        return {"input_ids": tokens}
    places = torch.zeros_like(tokens)
    places[:, 0] = 1
    return {"input_ids": tokens, "global_attention_mask": places}


def step(model: Any, inputs: dict[str, Tensor], backward: bool) -> Tensor:
    """Runs a model forward, and backward from the mean square; returns what it computed."""
    model.zero_grad()
    with torch.set_grad_enabled(backward):
        out = model(**inputs)
        if not isinstance(out, Tensor):
            out = out.quantile_preds if "context" in inputs else out.last_hidden_state
        if backward:
            out.square().mean().backward()
    return out.detach()


def once(kind: str, name: str, size: int, backward: bool) -> Iterator[None]:
    """Warms up, yields, and runs one step for `peak_extra_bytes`."""
    model = model_of(kind, name, size)
    step(model, inputs_of_model(kind, min(size, 64)), backward)
    yield
    step(model, inputs_of_model(kind, size), backward)
