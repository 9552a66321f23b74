"""Serves requests of unlike lengths at once: continuous batching without masks.

    python examples/serve.py
    python examples/serve.py --model Qwen/Qwen3-0.6B --prompts prompts.txt --new-tokens 64

By default a tiny model of random weights answers prompts of random tokens, and nothing is
downloaded. A file of prompts has one in each line. Prints the new tokens of each request, then
tokens a second.
"""

import time
from pathlib import Path
from typing import Any

import torch

from sparsering.cli.argument_types import positive
from sparsering.ground.commands import install
from sparsering.mistakes import OneLineParser, one_line_errors

with one_line_errors("serve", install=install("hf")):
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        ContinuousBatchingConfig,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GenerationConfig,
    )

    from sparsering.integrations import transformers as hf


def tiny() -> Any:
    """Returns a model of random weights whose layers have windows or full attention."""
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        head_dim=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config)


def main(
    model: str | None = None,
    prompts: Path | None = None,
    new_tokens: int = 16,
    page: int = 64,
    batch_tokens: int = 256,
) -> dict[str, float]:
    """Generates for all prompts.

    Returns: "requests"; "tokens", new ones; "rate", of them a second.
    """
    texts = None if prompts is None else prompts.read_text(encoding="utf-8").splitlines()
    tokenizer = None if model is None else AutoTokenizer.from_pretrained(model)
    loaded: Any = tiny() if model is None else AutoModelForCausalLM.from_pretrained(model)
    if texts is None or tokenizer is None:
        lengths = (300, 40, 5, 120, 200, 17)
        ids = [torch.randint(3, 256, (n,)).tolist() for n in lengths]
    else:
        ids = [tokenizer(text)["input_ids"] for text in texts if text]
    blocks = sum(-(-(len(prompt) + new_tokens) // page) + 1 for prompt in ids)
    pages = ContinuousBatchingConfig(
        num_blocks=4 * blocks, page_size=page, max_batch_tokens=batch_tokens
    )
    greedy = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    begin = time.perf_counter()
    with hf.continuous_batching(loaded.eval()):
        outputs = loaded.generate_batch(
            ids, generation_config=greedy, continuous_batching_config=pages, progress_bar=False
        )
    seconds = time.perf_counter() - begin
    total = 0
    for output in outputs.values():
        tokens = output.generated_tokens
        total += len(tokens)
        text = tokenizer.decode(tokens) if tokenizer else tokens
        print(f"{len(output.prompt_ids)} tokens: {text}")
    print(f"{total} new tokens of {len(ids)} requests in {seconds:.2f} s: {total / seconds:.1f}/s")
    return {"requests": len(ids), "tokens": total, "rate": total / seconds}


if __name__ == "__main__":
    with one_line_errors("serve"):
        parser = OneLineParser()
        parser.add_argument("--model", help="name or folder; default: a tiny random one")
        parser.add_argument("--prompts", type=Path, help="file with a prompt in each line")
        parser.add_argument("--new-tokens", type=positive, default=16, help="for each request")
        parser.add_argument("--page", type=positive, default=64, help="tokens in a page")
        parser.add_argument("--batch-tokens", type=positive, default=256, help="most in a step")
        main(**vars(parser.parse_args()))
