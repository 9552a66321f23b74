"""Trains a small ModernBERT-shaped encoder with a LongNet pattern, on masked bytes of real text.

    python examples/finetune_modernbert_longnet.py

The text is the standard library's own sources. Layers that have a window keep it; the others, which
are dense in ModernBERT, visit a LongNet. Prints the loss, and that of a guess by frequency.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

import sparsering as sr
from sparsering.cli.argument_types import positive
from sparsering.ground.commands import install
from sparsering.mistakes import OneLineParser, one_line_errors

with one_line_errors("finetune_modernbert_longnet", install=install("hf")):
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    from sparsering.integrations import transformers as hf

MASK = 256


def sources() -> Tensor:
    """The bytes of the standard library's modules, end to end."""
    files = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch_of(text: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """(inputs, labels): one byte in six is masked, labels are -100 elsewhere."""
    begins = torch.randint(len(text) - length, (batch, 1))
    labels = text[begins + torch.arange(length)].long()
    masked = torch.rand(labels.shape) < 1 / 6
    return labels.masked_fill(masked, MASK), labels.masked_fill(~masked, -100)


def main(steps: int = 200, length: int = 1024, batch: int = 2) -> dict[str, float]:
    """Trains; returns the figures that it prints."""
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=257,
        hidden_size=96,
        intermediate_size=144,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=length,
        local_attention=64,
        layer_types=["full_attention", "sliding_attention"] * 2,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **dict.fromkeys(("cls_token_id", "sep_token_id"), 0),
    )
    model = ModernBertForMaskedLM(config)
    hf.apply(model, {"full_attention": sr.LongNet((128, 512, 2048), (1, 4, 16))})
    print(hf.explain(model))

    text = sources()
    counts = torch.bincount(text.int(), minlength=256).float()
    share = counts / counts.sum()
    guess = float(-(share * share.clamp(min=1e-9).log()).sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        inputs, labels = batch_of(text, batch, length)
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: {loss.item():.3f}")
    last = sum(losses[-30:]) / len(losses[-30:])
    print(f"loss {losses[0]:.3f} -> {last:.3f}; by frequency of bytes alone {guess:.3f}")
    return {"first": losses[0], "last": last, "guess": guess}


if __name__ == "__main__":
    with one_line_errors("finetune_modernbert_longnet"):
        parser = OneLineParser(description=__doc__.splitlines()[0])
        parser.add_argument("--steps", type=positive, default=200)
        parser.add_argument("--length", type=positive, default=1024)
        main(**vars(parser.parse_args()))
