"""Tiny models of several families, and their greedy tokens alone and in continuous batching."""

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.models.llama4 import Llama4ForCausalLM, Llama4TextConfig

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
KINDS = ["sliding_attention", "full_attention"] * 2
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {}),
    "gemma2": (  # softcap
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config,
        {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig,
        {"sliding_window": 8, "layer_types": KINDS},
    ),
    "gpt_oss": (  # sinks
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig,
        {
            "sliding_window": 8,
            "layer_types": KINDS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": (  # chunks
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
            "floor_scale": 8,  # of a temperature by the number of tokens, in the last layer
            "attn_scale": 0.5,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
    ),
}
NEW = 9
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
PAGES = ContinuousBatchingConfig(num_blocks=48, page_size=8, max_batch_tokens=24)


def made(name, implementation="eager", **sizes):
    """A tiny model; sinks are spread, so that they count."""
    kind, config, more = MODELS[name]
    torch.manual_seed(0)
    model = kind(config(**SIZES | more | sizes)).eval()
    for key, parameter in model.named_parameters():
        if "sinks" in key:
            torch.nn.init.uniform_(parameter, -1, 1)
    model.set_attn_implementation(implementation)
    return model


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]


def alone(model, prompt):
    """The tokens of `generate` for one request."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def batched(model, prompts, pages=PAGES, **options):
    """The tokens of continuous batching, in the order of the prompts."""
    outputs = model.generate_batch(
        prompts, generation_config=GREEDY, continuous_batching_config=pages, **options
    )
    by_prompt = {tuple(x.prompt_ids): x.generated_tokens for x in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]
