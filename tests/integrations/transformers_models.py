"""Tiny models of transformers with random weights, float64, and what compares two of them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from sparsering.integrations import transformers as hf

hf.register()

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
TYPES = ["sliding_attention", "full_attention"]


def _llama(**more: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**GROUPED, **more}))


def _mistral(**more: Any) -> Any:
    return MistralForCausalLM(MistralConfig(**{**GROUPED, "sliding_window": 5, **more}))


def _qwen2(**more: Any) -> Any:
    options = {"sliding_window": 5, "use_sliding_window": True, "layer_types": TYPES, **more}
    return Qwen2ForCausalLM(Qwen2Config(**{**GROUPED, **options}))


def _gemma2(**more: Any) -> Any:
    options = {"head_dim": 8, "sliding_window": 5, "layer_types": TYPES, "query_pre_attn_scalar": 5}
    options |= {"attn_logit_softcapping": 0.5, **more}
    return Gemma2ForCausalLM(Gemma2Config(**{**GROUPED, **options}))


def _gemma3(**more: Any) -> Any:
    options = {"head_dim": 8, "sliding_window": 5, "layer_types": TYPES, **more}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**GROUPED, **options}))


def _gpt_oss(**more: Any) -> Any:
    options = {"head_dim": 8, "sliding_window": 5, "layer_types": TYPES, "num_local_experts": 2}
    options |= {"num_experts_per_tok": 1, "experts_implementation": "eager"}
    options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **more}
    model = GptOssForCausalLM(GptOssConfig(**{**GROUPED, **options}))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


def _llama4(**more: Any) -> Any:
    options = {"head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2}
    options |= {"layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 48}
    options |= {"moe_layers": [], "no_rope_layers": [1, 0], **more}
    return Llama4ForCausalLM(Llama4TextConfig(**{**GROUPED, **options}))


def _deepseek(**more: Any) -> Any:
    widths = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4}
    options = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, **widths}
    options |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    options |= {"moe_intermediate_size": 16, "experts_implementation": "eager", **more}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**GROUPED, **options}))


def _gpt2(**more: Any) -> Any:
    names = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**names, **tokens, **none, **more))


def _bert(**more: Any) -> Any:
    none = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return BertModel(BertConfig(**{**SIZES, "is_decoder": False}, **{**none, **more}))


def _modernbert(**more: Any) -> Any:
    options = {"local_attention": 6, "layer_types": TYPES, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertModel(ModernBertConfig(**{**SIZES, **options, **more}))


def _t5(**more: Any) -> Any:
    sizes = {
        "vocab_size": 61,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
    }
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": None}
    options = {**sizes, **buckets, **tokens, "dropout_rate": 0.0, **more}
    model = T5ForConditionalGeneration(T5Config(**options))
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_()
    return model


def _vit(**more: Any) -> Any:
    sizes = {key: SIZES[key] for key in list(SIZES)[1:5]}
    none = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return ViTModel(ViTConfig(**sizes, image_size=12, patch_size=4, **none, **more))


DECODERS: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "deepseek-v3": _deepseek,
    "gpt2": _gpt2,
}
ENCODERS: dict[str, Callable[..., Any]] = {"bert": _bert, "modernbert": _modernbert}
OTHERS: dict[str, Callable[..., Any]] = {"t5": _t5, "vit": _vit}
EVERY = {**DECODERS, **ENCODERS, **OTHERS}


def made(family: str, implementation: str = "eager", **more: Any) -> Any:
    """A model of a family, float64, in eval mode; the same weights for the same arguments."""
    torch.manual_seed(7)
    model = EVERY[family](**more).double().eval()
    with torch.no_grad():  # of the first initialisation, scores are all but equal
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "relative" not in name:
                parameter.mul_(4)
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation, "an older transformers refuses"
    return model


def like(model: Any, implementation: str = "sparsering") -> Any:
    """Returns a copy of the model on another attention implementation."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(implementation)
    assert other.config._attn_implementation == implementation
    return other


def pair(family: str, **more: Any) -> tuple[Any, Any]:
    """A model on eager, and the same on ours."""
    model = made(family, **more)
    return model, like(model)


def tokens(batch: int = 2, length: int = 13, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 61, (batch, length), generator=generator)


def padded(side: str, length: int = 13, counts: tuple[int, ...] = (13, 6)) -> Tensor:
    """[B, length] 1 where a token is real."""
    mask = torch.zeros(len(counts), length, dtype=torch.int64)
    for row, count in zip(mask, counts, strict=True):
        row[length - count :] = 1
    return mask.flip(1) if side == "right" else mask


def result(model: Any, **inputs: Any) -> Tensor:
    out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def assert_same(
    got: Tensor, wanted: Tensor, where: Tensor | None = None, atol: float = 5e-6
) -> None:
    """Equal in value, of rows [B, N] where one is real; and neither zeros nor something else."""
    if where is not None:
        got, wanted = got[where.bool()], wanted[where.bool()]
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)
