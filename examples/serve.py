"""Serves requests of unlike lengths at once: continuous batching without masks.

    python examples/serve.py
    python examples/serve.py --model Qwen/Qwen3-0.6B --prompts prompts.txt --new-tokens 64

Without `--model`, a tiny model of random weights and prompts of random bytes. A file of prompts has
one in each line. Prints the new tokens of each request, then tokens a second.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from sparsering.integrations import transformers as hf


def tiny() -> Any:
    """Returns a model of random weights whose layers have windows and full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

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


def main() -> None:
    """Generates for all prompts, and prints what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="name or folder of a model; default: a tiny random one")
    parser.add_argument("--prompts", type=Path, help="file with a prompt in each line")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens for each request")
    parser.add_argument("--page", type=int, default=64, help="tokens in a page")
    parser.add_argument("--batch-tokens", type=int, default=256, help="most tokens in a step")
    arguments = parser.parse_args()

    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    if arguments.model and arguments.prompts:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model: Any = AutoModelForCausalLM.from_pretrained(arguments.model)
        texts = arguments.prompts.read_text(encoding="utf-8").splitlines()
        prompts = [tokenizer(text)["input_ids"] for text in texts if text]
    elif arguments.model or arguments.prompts:
        parser.error("give --model and --prompts, or neither")
    else:
        tokenizer, model = None, tiny()
        lengths = (300, 40, 5, 120, 200, 17)
        prompts = [torch.randint(3, 256, (n,)).tolist() for n in lengths]
    new = arguments.new_tokens
    blocks = sum(-(-(len(prompt) + new) // arguments.page) + 1 for prompt in prompts)
    pages = ContinuousBatchingConfig(
        num_blocks=4 * blocks, page_size=arguments.page, max_batch_tokens=arguments.batch_tokens
    )
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    begin = time.perf_counter()
    with hf.continuous_batching(model.eval()):
        outputs = model.generate_batch(
            prompts, generation_config=greedy, continuous_batching_config=pages, progress_bar=False
        )
    seconds = time.perf_counter() - begin
    for output in outputs.values():
        tokens = output.generated_tokens
        print(
            f"{len(output.prompt_ids)} tokens:", tokenizer.decode(tokens) if tokenizer else tokens
        )
    total = sum(len(output.generated_tokens) for output in outputs.values())
    print(
        f"{total} new tokens of {len(prompts)} requests in {seconds:.2f} s: {total / seconds:.1f}/s"
    )


if __name__ == "__main__":
    main()
