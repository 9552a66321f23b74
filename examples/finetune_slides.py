"""Fine-tunes Prov-GigaPath's slide encoder on labelled slides, in one process or several.

    python examples/make_slides.py
    python examples/finetune_slides.py
    torchrun --nproc-per-node 2 examples/finetune_slides.py --train last --out runs/last
    python examples/finetune_slides.py --model slide_encoder.pth --slides folder --lr 1e-4

The encoder is frozen but for adapters of low rank (LoRA, in the query and value projections of each
block), or for its last blocks; a linear head tells slides with a label from those without.
By default the encoder is a small one with random weights, so nothing is downloaded. Weights and
gradients are float32; products are bfloat16 (--precision). Slides are computed one at a time,
and each block is computed again in backward, so memory is that of one slide. Processes take slides
of each step in turns and add their gradients up, so losses are those of one process.

OUT/slide_encoder.pth is the tuned encoder, in the form that `gigapath.load` and Prov-GigaPath read;
OUT/head.pt is the head. A finished run is not overwritten.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparsering.cli.argument_types import positive
from sparsering.data.slides import Slide, read_slide
from sparsering.mistakes import OneLineParser, one_line_errors
from sparsering.models import gigapath

SMALL = {"width": 64, "num_layers": 3, "num_heads": 4}
LENGTHS = {"segment_lengths": (64, 256, 1024), "dilation_rates": (1, 2, 4)}  # of the small one
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": None}
HELD_OUT = 4  # one of so many slides is for validation


class LoRA(nn.Module):
    """A frozen linear layer, and a trained product of two thin matrices that begins as zero."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False, device=linear.weight.device)
        self.up = nn.Linear(rank, linear.out_features, bias=False, device=linear.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output and the adapter's."""
        out: Tensor = self.linear(x) + self.up(self.down(x))
        return out

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Adds the adapter to the layer, and returns the layer."""
        self.linear.weight += self.up.weight @ self.down.weight
        return self.linear


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slides", type=Path, default=Path("runs/slides"), help="and labels.json")
    parser.add_argument("--model", type=Path, help="pretrained weights; default: a small encoder")
    parser.add_argument("--train", choices=("lora", "last"), default="lora")
    parser.add_argument("--rank", type=positive, default=8, help="of the adapters; default 8")
    parser.add_argument(
        "--last", type=positive, default=1, help="blocks of --train last; default 1"
    )
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bfloat16")
    parser.add_argument("--steps", type=positive, default=160, help="default 160")
    parser.add_argument("--batch", type=positive, default=8, help="slides of a step; default 8")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate; default 3e-3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/tuned-slides"))
    return parser.parse_args(arguments)


def join_processes() -> torch.device:
    """Joins the processes of torchrun, if it started this one; returns where this one computes."""
    device = torch.device("cpu")
    if torch.cuda.device_count() > (own := int(os.environ.get("LOCAL_RANK", 0))):
        device = torch.device("cuda", own)
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    return device


def slides_of(folder: Path) -> tuple[list[Slide], list[int]]:
    """Reads the slides that labels.json names, and their labels, 0 or 1."""
    file = folder / "labels.json"
    if not file.is_file():
        raise ValueError(f"--slides must have labels.json, got {folder}; examples/make_slides.py")
    labels = json.loads(file.read_text(encoding="utf-8"))
    if len(labels) < HELD_OUT:
        raise ValueError(f"{file} must name {HELD_OUT} slides or more, got {len(labels)}; add some")
    return [read_slide(folder / name) for name in labels], list(labels.values())


def encoder_of(options: argparse.Namespace, width: int) -> gigapath.SlideEncoder:
    """Loads the encoder, or draws a small one, and freezes all but what --train names."""
    how: dict[str, Any] = {"global_pool": True, "checkpoint_layers": True}
    if options.model is not None:
        model = gigapath.load(options.model, **how)
    else:
        model = gigapath.SlideEncoder(in_width=width, **SMALL, **LENGTHS, **how)
    model.requires_grad_(False)
    if options.train == "last":
        for part in (*model.layers[-options.last :], model.encoder["layer_norm"], model.norm):
            part.requires_grad_(True)
        return model
    for layer in model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name), options.rank))
    return model


def batch_of(count: int, step: int, options: argparse.Namespace) -> list[int]:
    """Draws the slides of a step, which depend on the seed and the step alone."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    trained = [i for i in range(count) if (i // 2) % HELD_OUT]  # slides come in pairs of labels
    order = torch.randperm(len(trained), generator=generator)[: options.batch]
    return [trained[i] for i in order.tolist()]


def add_up(tensors: list[Tensor]) -> None:
    """Sums tensors over the processes, in one message."""
    if dist.is_initialized():
        flat = torch.cat([x.flatten() for x in tensors])
        dist.all_reduce(flat)
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view_as(x))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Trains and saves; returns the losses, and the accuracy on slides that were held out."""
    options = parse(arguments)
    file = options.out / "slide_encoder.pth"
    if file.exists():
        raise ValueError(f"{options.out} has a run, which is not overwritten; pass another --out")
    if options.model is not None and not options.model.exists():
        raise ValueError(f"--model must be a file or folder, got {options.model}; leave it out")
    options.out.mkdir(parents=True, exist_ok=True)  # one that cannot be written fails at once
    device = join_processes()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    slides, labels = slides_of(options.slides)
    torch.manual_seed(options.seed)
    model = encoder_of(options, slides[0].features.shape[1]).to(device)
    head = nn.Linear(model.cls_token.shape[-1], 1, device=device)
    weights = [x for x in (*model.parameters(), *head.parameters()) if x.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.lr)
    precision = PRECISIONS[options.precision]

    def score(number: int) -> Tensor:
        slide = slides[number]
        with torch.autocast(device.type, precision, enabled=precision is not None):
            found = model(slide.features.to(device), slide.coords, tile_size=slide.tile_size)
            logit: Tensor = head(found.slide)[0, 0]
        return logit.float()

    losses = []
    for step in range(options.steps):
        batch = batch_of(len(slides), step, options)
        total = torch.zeros((), device=device)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)  # a process may have no slide of a step
        for number in batch[rank::world]:
            label = torch.tensor(float(labels[number]), device=device)
            loss = F.binary_cross_entropy_with_logits(score(number), label) / len(batch)
            loss.backward()
            total += loss.detach()
        add_up([total, *(x.grad for x in weights if x.grad is not None)])
        optimizer.step()
        losses.append(total.item())
        if rank == 0 and ((step + 1) % 10 == 0 or step + 1 == options.steps):
            print(f"step {step + 1}: loss {sum(losses[-10:]) / len(losses[-10:]):.3f}")

    held_out = [i for i in range(len(slides)) if (i // 2) % HELD_OUT == 0]
    right = torch.zeros((), device=device)
    with torch.no_grad():
        for number in held_out[rank::world]:
            right += (score(number) > 0) == bool(labels[number])
    add_up([right])
    accuracy = right.item() / len(held_out)
    if rank == 0:
        save(model, head, options.out)
        trained = sum(x.numel() for x in weights)
        print(f"{trained} weights trained; {accuracy:.0%} of {len(held_out)} slides are told right")
    return {"losses": losses, "accuracy": accuracy, "trained": sum(x.numel() for x in weights)}


def save(model: gigapath.SlideEncoder, head: nn.Linear, out: Path) -> None:
    """Writes the head, then the encoder with its adapters added in."""
    for layer in model.layers:
        for name in ("q_proj", "v_proj"):
            if isinstance(adapted := getattr(layer.self_attn, name), LoRA):
                setattr(layer.self_attn, name, adapted.merged())
    torch.save(head.state_dict(), out / "head.pt")
    part = out / "slide_encoder.pth.part"
    torch.save({"model": model.state_dict()}, part)
    os.replace(part, out / "slide_encoder.pth")


if __name__ == "__main__":
    with one_line_errors("finetune_slides", shown=os.environ.get("RANK", "0") == "0"):
        main()
