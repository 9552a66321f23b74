"""Tiny models of every causal family of transformers: a family's default config, made small.

`families()` lists them. `tiny(family)` builds one with random weights, float64: each attribute of
its config that is a size gets a small value by its name, and each of its layer types gets a layer.
"""

import re
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as WITH_IMAGES,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING as MASKED

HEADS, HEAD_DIM = 4, 8
# Eager's blocks are places in a row here, so with left padding it differs from the row alone.
BY_PLACE = ("minimax_m3_vl", "minimax_m3_vl_text")
MASKED_LM = ("bert (masked LM)", "modernbert (masked LM)")

# The first expression that matches a whole name gives its value, if the default is a number.
_LAYERS = r"(num_)?(hidden_|encoder_|decoder_)?layers|n_layers?|num_blocks|depth"
_SIZES: list[tuple[str, Any]] = [
    (r"pad_token_id|padding_idx", 0),
    (r"bos_token_id", 1),
    (r".*eos_token_id", 2),
    (r".*token_(id|index)", 3),
    (r".*vocab_size.*|.*_vocab", 61),
    (r"num_kv_shared_layers", 0),
    (_LAYERS, 2),
    (r"(num_|n_)?(encoder_|decoder_|swa_)?(attention_)?heads?|n_heads?", HEADS),
    (r"(swa_num_(attention|key_value)|mamba_(n|num)|linear_num(_value)?)_heads", HEADS),
    (r"((num_(global_)?key_value|num_kv|kv_n|linear_num_key)_heads|num_query_groups)", 2),
    (r"mamba_(d_head|head_dim|headdim)", 16),
    (r"(swa_|global_|attention_|linear_|linear_key_|linear_value_)?head_dim", HEAD_DIM),
    (r"kv_channels|d_head|dim_head|attention_head_size|(swa_)?v_head_dim|qk_nope_head_dim", 8),
    (r"(qk_rope_head|rotary)_dim", 4),
    (r"qk_head_dim", 12),
    (r"(kv|q|o)_lora_rank|.*_rank", 8),
    (r"index_(head_dim|n_heads|topk|block_size|topk_blocks)", 4),
    (r"hidden_size_per_layer_input|altup_.*|d_rel|hc_lowrank", 4),
    (r".*(intermediate|ffn|feed_forward|mlp).*(size|dim)|(d_)?ffn?|dim_ff|dff|d_inner|n_inner", 24),
    (r"(n_routed|num|num_local|moe_num|num_routed)_experts", 4),
    (r"(n|num)(_expert)?_group|topk_group|(mamba_)?n_groups", 1),
    (r"(num_)?(experts_per_tok|topk|top_k).*|moe_(topk|k|top_k)|top_k_experts", 2),
    (r"zero_expert_num", 2),
    (r"(sliding|attention|keep|local_attention)_window(_size|_len)?|sliding_window_size", 5),
    (r"window_size", 5),
    (r"local_attention", 6),
    (r"attention_chunk_size", 4),
    (r"floor_scale|log_scaling_n_floor", 3),
    (r"rel_extent", 5),
    (r"query_pre_attn_scalar", 5),
    (r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|.*max_.*_positions", 64),
    (r"model_max_length|context_length", 64),
    (r"(encoder_|decoder_|linear_|mamba_|lru_|n_)?(hidden|embd|embedding|model)(_size|_dim)?", 32),
    (r"d_model|n_embd|emb_dim|embed_dim|lru_width|.*_embed(ding)?_(size|dim)|.*_proj_dim", 32),
    (r"projection_(size|dim)", 32),
    (r"attention_hidden_size|backbone_hidden_size|qkv_hidden_size", 32),
    (r".*(state_size|d_state|chunk_size|block_size)", 4),
]
_RATES = re.compile(r".*(dropout|drop|pdrop|dropout_prob|layerdrop)")
_SECTIONS_BY_CODE = re.compile(
    r"(glm4|glm_(image|ocr)|paddleocr|qwen2.*(vl|omni)|glm46v|hunyuan_vl).*"
)
_BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers")
_KEPT = {"transformers_version", "model_type", "architectures", "id2label", "label2id"}
_WINDOWED = ["sliding_attention", "full_attention"]

# What a family needs beside this.
_GEMMA4 = {
    "layer_types": _WINDOWED * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "per_layer_config": {"01": {"head_dim": 16}, "03": {"head_dim": 16}},
}
_GEMMA3N = {
    "layer_types": _WINDOWED * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "intermediate_size": [24] * 4,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
}
_SWIN = {"embed_dim": 24, "window_size": 4, "depths": [1], "num_heads": [3]}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {x: {"rope_theta": 1e4} for x in _WINDOWED}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
        "hc_sinkhorn_iters": 2,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"head_dim": 12, "per_layer_config": {"01": {"q_lora_rank": 4}}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"per_layer_config": {"01": {"head_dim": 16}}},
    "embedding_gemma2_text": {"per_layer_config": {"01": {"head_dim": 16}}},
    "esm": {"vocab_size": 61, "pad_token_id": 0, "mask_token_id": 3},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm5_next_text": {"index_kpool": 2, "index_topk": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "led": {"attention_window": 4},
    "lilt": {"hidden_size": 48},
    "longformer": {"attention_window": 4},
    "laguna": {"num_attention_heads_per_layer": [HEADS] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0], "moe_layers": [1]},
    "mistral_large4_text": {"kv_source_layers": [0, 1]},
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {
        **{"layer_types": ["minimax_m3_sparse", "full_attention"], "index_topk_blocks": 2},
        # An indexer narrower than its rotary positions would cut them, which are then not relative.
        **{"index_n_heads": 2, "index_head_dim": HEAD_DIM},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 4, "indexer_compress_ratio": 2},
    },
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    **dict.fromkeys(("swin", "donut-swin", "maskformer-swin"), _SWIN),
    "smollm3": {"no_rope_layers": [1, 0]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
        **{"attention_hidden_size": 64, "attention_head_dim": 16},
    },
    "zamba2": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
        **{"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 8},
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}


NOT_BUILT = {
    "gemma3n": "its vision tower needs timm; gemma3n_text is its text model",
    "gemma4_assistant": "it attends to keys of the model that it drafts for",
    "gemma4_unified_assistant": "it attends to keys of the model that it drafts for",
}


def families() -> list[str]:
    """Lists the model types that `AutoModelForCausalLM` knows, and `MASKED_LM`."""
    return [*sorted(CAUSAL._model_mapping), *MASKED_LM]


def layer_types(family: str) -> tuple[str, ...]:
    """Returns the types of a family's layers, sorted."""
    config = default_config(family).get_text_config(decoder=True)
    return tuple(sorted({*(getattr(config, "layer_types", None) or ())}))


def default_config(family: str) -> Any:
    """Returns the default config of a family, or of its text decoder if its class takes that."""
    config = _class_of(family, "_config_mapping")()
    if family.startswith("musicgen"):
        return config.decoder
    cls = _class_of(family, "_model_mapping")
    return config if isinstance(config, cls.config_class) else config.get_text_config()


def _class_of(family: str, kind: str) -> Any:
    mapping: Any = MASKED if family.endswith("(masked LM)") else CAUSAL
    if family == "glm5_next":
        mapping = WITH_IMAGES
    name = family.split()[0]
    return mapping._load_attr_from_module(name, getattr(mapping, kind)[name])


def shrunk(config: Any) -> dict[str, Any]:
    """Returns the attributes of a config, with small sizes, for a new config of its class."""
    values: dict[str, Any] = {}
    defaults = config.to_dict()
    for name, value in defaults.items():
        if name in type(config).sub_configs and isinstance(value, dict):
            part = getattr(config, name)
            values[name] = shrunk(part)
            if type(config).sub_configs[name] is not type(part):  # any model type may be there
                values[name]["model_type"] = part.model_type
        elif name not in _KEPT:
            values[name] = _small(name, value)
    all_full = {*(values.get("layer_types") or ())} == {"full_attention"}
    if all_full and values.get("sliding_window"):
        values["layer_types"] = _WINDOWED
    given = [name for name in _BY_LAYER if values.get(name)]
    kinds = {name: _each_once(values[name]) for name in given}
    layers = max(map(len, kinds.values()), default=2)
    values |= {name: (kinds[name] * layers)[:layers] for name in given}
    values |= {x: layers for x in values if re.fullmatch(_LAYERS, x) and type(values[x]) is int}
    heads = defaults.get("num_attention_heads")
    if "num_key_value_heads" in values and defaults["num_key_value_heads"] in (None, heads):
        values["num_key_value_heads"] = HEADS
    if defaults.get("head_dim") == defaults.get("qk_rope_head_dim", -1):
        values["head_dim"] = values["qk_rope_head_dim"]
    if values.get("head_dim", 0) is None:
        values["head_dim"] = HEAD_DIM
    if "is_decoder" in values and not config.is_encoder_decoder:
        values["is_decoder"] = True
    values |= {x: None for x in ("out_features", "out_indices") if values.get(x)}
    _fit_sections(config.model_type, values)
    values |= _SPECIAL.get(config.model_type, {})
    if defaults.get("num_kv_shared_layers", 0) == defaults.get("num_hidden_layers"):
        values["num_kv_shared_layers"] = 0  # all of them
    return values


def _fit_sections(kind: str, values: dict[str, Any]) -> None:
    """Makes the sections of rotary positions fit in the smaller head dim, in place."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    by_code = _SECTIONS_BY_CODE.fullmatch(kind) is not None
    for part in [rope, *(x for x in rope.values() if isinstance(x, dict))]:
        if "mrope_section" in part or (by_code and part is rope):
            share = part.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1
            half = int((values.get("head_dim") or HEAD_DIM) * share) // 2
            part["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _small(name: str, value: Any) -> Any:
    if name == "eos_token_id" and isinstance(value, list):
        return 2
    if isinstance(value, float) and _RATES.fullmatch(name):
        return 0.0
    if type(value) is int and value:
        for expression, size in _SIZES:
            if re.fullmatch(expression, name):
                return size
    return value


def _each_once(kinds: list[Any]) -> list[Any]:
    """Returns at least two items, each value of a list once, in order of appearance."""
    found = list(dict.fromkeys(kinds))
    return found if len(found) > 1 else found * 2


def tiny(family: str, **more: Any) -> Any:
    """Builds a tiny model of a family, float64, in eval mode; the same weights in each process.

    `more` are attributes of the config of its text decoder.
    """
    torch.manual_seed(7)
    config = default_config(family)
    values = shrunk(config)
    if family.endswith("(masked LM)"):
        values["is_decoder"] = False
    values.get("text_config", values).update(more)
    config = type(config)(**values, experts_implementation="eager")
    cls = _class_of(family, "_model_mapping")
    model = cls._from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():  # Scores are all but equal at first, sinks and norms have no effect.
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif "embed" not in name:
                parameter.mul_(4)
    return model


def shared_name(kind: str) -> str:
    """Returns the family whose model a type of docs/families.md shares over ranks, or ""."""
    try:
        if getattr(CONFIG_MAPPING[kind](), "is_encoder_decoder", False):
            return ""
    except ValueError:  # no config without arguments
        pass
    if kind in MASKED._model_mapping:
        return f"{kind} (masked LM)"
    return kind if kind in CAUSAL._model_mapping else ""
