"""A Llama with a window and sinks writes past its window, from a cache that stays small.

    python examples/generate_past_the_window.py

The weights are random: shown is that a cache of live keys gives, token for token, what a cache of
everything gives, and what both hold.
"""

import time

import torch

import sparsering as sr
from sparsering.cli.argument_types import positive
from sparsering.ground.commands import install
from sparsering.mistakes import OneLineParser, one_line_errors

with one_line_errors("generate_past_the_window", install=install("hf")):
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from sparsering.integrations import transformers as hf


def main(prompt: int = 1500, new: int = 300, window: int = 256, sinks: int = 4) -> dict[str, float]:
    """Generates twice; returns the figures that it prints."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=prompt + new,
    )
    model = LlamaForCausalLM(config).double().eval()
    hf.apply(model, sr.SlidingWindow(window - 1) | sr.GlobalTokens(sinks, rows=False))
    print(hf.explain(model))

    ids = torch.randint(3, 256, (1, prompt))
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    found, seconds = [], []
    caches = [hf.SparseCache(model), DynamicCache()]
    for cache in caches:
        begin = time.perf_counter()
        given = {"attention_mask": torch.ones_like(ids), "past_key_values": cache}
        found.append(model.generate(ids, **given, **options)[0, prompt:])
        seconds.append(time.perf_counter() - begin)
    same = int((found[0] == found[1]).sum())
    held = caches[0].nbytes
    everything = sum(x.keys.nbytes + x.values.nbytes for x in caches[1].layers)
    print(f"{same} of {new} tokens are the same; keys kept {max(caches[0].kept)} of {prompt + new}")
    print(f"{held / 1e6:.1f} MB in {seconds[0]:.1f} s")
    print(f"everything: {everything / 1e6:.1f} MB in {seconds[1]:.1f} s")
    return {"same": same, "new": new, "held": held, "everything": everything}


if __name__ == "__main__":
    with one_line_errors("generate_past_the_window"):
        parser = OneLineParser(description=__doc__.splitlines()[0])
        parser.add_argument("--prompt", type=positive, default=1500)
        parser.add_argument("--new", type=positive, default=300)
        parser.add_argument("--window", type=positive, default=256)
        main(**vars(parser.parse_args()))
