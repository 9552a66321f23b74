"""Trains a Longformer classifier at the cost of its windows and global tokens.

    python examples/train_longformer.py
    python examples/train_longformer.py --model allenai/longformer-base-4096

`hf.convert` changes the classes of the attention modules, nothing else: the parameters, the
checkpoint and `global_attention_mask` stay. The first token is global; the task is to tell whether
it stands again anywhere in the text. Prints seconds of a training step before and after the
conversion, the distance of the outputs, and the loss. Without --model it has small random weights.
"""

import time

import torch
from torch import Tensor

from sparsering.cli.argument_types import positive
from sparsering.ground.commands import install
from sparsering.mistakes import OneLineParser, one_line_errors

with one_line_errors("train_longformer", install=install("hf")):
    from transformers import LongformerConfig, LongformerForSequenceClassification

    from sparsering.integrations import transformers as hf


def made(path: str | None, length: int) -> LongformerForSequenceClassification:
    """Loads the model, or makes a small one for texts of `length` tokens."""
    cls = LongformerForSequenceClassification
    if path is not None:
        return cls.from_pretrained(path, num_labels=2)
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 512, "max_position_embeddings": length + 2}
    config = LongformerConfig(**sizes, attention_window=[128, 128], vocab_size=1000)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return cls(config)


def texts(count: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    """Draws texts of [count, length] tokens; in half of them the first token comes again."""
    tokens = torch.randint(100, vocabulary, (count, length))
    tokens[:, 0] = torch.randint(4, 100, (count,))
    labels = torch.arange(count) % 2
    place = torch.randint(length // 2, length, (count,))
    tokens[torch.arange(count), place] = torch.where(labels == 1, tokens[:, 0], tokens[:, 1])
    is_global = torch.zeros_like(tokens)
    is_global[:, 0] = 1
    return {"input_ids": tokens, "global_attention_mask": is_global, "labels": labels}


def main(model: str | None = None, length: int = 4096, steps: int = 10) -> dict[str, float]:
    """Trains for some steps; returns the figures that it prints."""
    torch.manual_seed(0)
    net = made(model, length)
    batch = texts(2, length, net.config.vocab_size)
    seconds, logits = [], []
    for converts in (False, True):
        if converts:
            hf.convert(net)
        for _ in range(2):  # the first step of each is a warm-up
            begin = time.perf_counter()
            out = net(**batch)
            out.loss.backward()
            taken = time.perf_counter() - begin
            net.zero_grad()
        seconds.append(taken)
        logits.append(out.logits.detach())
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    for _ in range(steps):
        loss = net(**texts(2, length, net.config.vocab_size)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    distance = float((logits[1] - logits[0]).abs().max())
    print(f"{length:,} tokens: {seconds[0]:.2f} s a step before hf.convert, {seconds[1]:.2f} after")
    print(f"outputs differ by {distance:.1e}; loss after {steps} steps {loss.item():.3f}")
    return {"before": seconds[0], "after": seconds[1], "distance": distance, "loss": loss.item()}


if __name__ == "__main__":
    with one_line_errors("train_longformer"):
        parser = OneLineParser()
        parser.add_argument("--model")
        parser.add_argument("--length", type=positive, default=4096)
        parser.add_argument("--steps", type=positive, default=10)
        main(**vars(parser.parse_args()))
