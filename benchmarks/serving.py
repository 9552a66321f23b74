"""Measures continuous batching of transformers with and without our attention.

    python -m benchmarks.serving --out benchmarks/records

`serving.json`: 8 requests with prompts of 100 to 1,000 tokens and 32 new tokens each, greedy, for
two models of random weights, float32: a Qwen 3 (8 layers, 8 heads on 2 of 64 channels) and a
Gemma 3 of the same sizes whose layers have windows of 512 in 3 of 4. Three ways: our attention in
`hf.continuous_batching`, transformers' own `sdpa` there, and `generate` one request at a time.
Every way runs in a process of its own, once untimed with short prompts. `tokens_a_second` counts
new tokens; `peak_mb` is beyond the model, pages included. Tokens of all ways are compared.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from .measure import Row, give_back_freed, peak_and_figures, write_record

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": None,
}
REQUESTS, SHORTEST, LONGEST, NEW = 8, 100, 1000, 32
WAYS = ("sparsering", "sdpa", "one by one")
MODELS = ("qwen3", "gemma3")


def made(name: str) -> Any:
    """Returns a model of random weights."""
    import transformers

    torch.manual_seed(0)
    if name == "qwen3":
        model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    else:
        kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 2
        config = transformers.Gemma3TextConfig(**SIZES, sliding_window=512, layer_types=kinds)
        model = transformers.Gemma3ForCausalLM(config)
    model.eval().set_attn_implementation("sdpa")
    return model


def prompts_of(requests: int, longest: int) -> list[list[int]]:
    """Draws prompts of unlike lengths, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(SHORTEST, longest, requests).long()[
        torch.randperm(requests, generator=generator)
    ]
    return [torch.randint(3, 1024, (int(n),), generator=generator).tolist() for n in lengths]


def generated(model: Any, way: str, prompts: list[list[int]]) -> list[list[int]]:
    """New tokens of each prompt."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from sparsering.integrations import transformers as hf

    if way == "one by one":
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
            )
            found.append(out[0, len(prompt) :].tolist())
        return found
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(num_blocks=128, page_size=256, max_batch_tokens=512)
    with hf.continuous_batching(model) if way == "sparsering" else nullcontext():
        outputs = model.generate_batch(
            prompts, generation_config=greedy, continuous_batching_config=pages, progress_bar=False
        )
    by_prompt = {tuple(x.prompt_ids): x.generated_tokens for x in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def _in_a_process(name: str, way: str, requests: int, longest: int) -> Iterator[Any]:
    """Yields before and after the run; then its seconds and its tokens."""
    model = made(name)
    with torch.no_grad():
        generated(model, way, prompts_of(2, 120))
        give_back_freed()
        yield
        begin = time.perf_counter()
        tokens = generated(model, way, prompts_of(requests, longest))
        seconds = time.perf_counter() - begin
    yield
    yield seconds, tokens


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a prompt")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in MODELS:
        first: list[list[int]] = []
        for way in WAYS:
            sizes = arguments.requests, arguments.longest
            peak, (seconds, tokens) = peak_and_figures(_in_a_process, name, way, *sizes)
            first = first or tokens
            new = sum(map(len, tokens))
            flat, ours = ([t for x in found for t in x] for found in (tokens, first))
            same = sum(a == b for a, b in zip(flat, ours, strict=True))
            row: Row = {"model": name, "way": way, "requests": arguments.requests}
            row |= {"prompt_tokens": sum(map(len, prompts_of(*sizes))), "new_tokens": new}
            row |= {"seconds": seconds, "tokens_a_second": new / seconds}
            rows.append(row | {"equal_to_ours": same / new, "peak_mb": peak / 1e6})
    write_record(arguments.out, "serving", rows)


if __name__ == "__main__":
    main()
