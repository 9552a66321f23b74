"""Trains a small language model on packed documents, in one compiled graph for all their lengths.

    python examples/train_packed.py
    python examples/train_packed.py --model qwen3 --length 4096
    python examples/train_packed.py --text folder/with/texts --steps 1000

By default the documents are the functions and classes of Python's standard library, read as bytes,
and the model is this package's LongNet; `--model qwen3` is a small Qwen 3 of transformers. So
nothing is downloaded. Each document sees only itself. After a kill, start the same command again:
it goes on from the last checkpoint in --out, with the same rows. A finished run is not overwritten:
more --steps go on with it.
"""

import argparse
import json
import os
import re
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import sparsering as sr
from sparsering.cli.argument_types import positive
from sparsering.data import PackedRows, pack
from sparsering.ground.commands import install
from sparsering.ground.files import replace_file
from sparsering.mistakes import OneLineParser, one_line_errors
from sparsering.models import LongNetLM

with one_line_errors("train_packed", install=install("cli")):
    from tqdm import tqdm

SAME_WHEN_RESUMED = ("text", "model", "length", "batch", "seed")  # else losses would change


class PackedLongNet(nn.Module):
    """A LongNet in each document: the lengths are data, so every batch runs the same graph."""

    def __init__(self, length: int) -> None:
        super().__init__()
        branches = sr.LongNet((length // 8, length // 2), (1, 4)) & sr.Causal()
        self.branches, self.model = branches, LongNetLM(branches, num_layers=2)

    def forward(self, input_ids: Tensor, lengths: Tensor, **_: Tensor) -> Tensor:
        """Returns logits [B, N, 256]."""
        pattern = sr.Packed(lengths, self.branches)
        logits: Tensor = self.model(input_ids, attend=partial(sr.attention, pattern=pattern))
        return logits


class PackedQwen3(nn.Module):
    """A model of transformers: documents are where `position_ids` restart."""

    def __init__(self, length: int) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from sparsering.integrations import transformers as hf

        super().__init__()
        hf.register()
        config = Qwen3Config(
            vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=64,
            max_position_embeddings=length, attn_implementation="sparsering",
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = Qwen3ForCausalLM(config)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Tensor) -> Tensor:
        """Returns logits [B, N, 256]."""
        out = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        logits: Tensor = out.logits
        return logits


MODELS: dict[str, type[nn.Module]] = {"longnet": PackedLongNet, "qwen3": PackedQwen3}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the summed loss in nats of all tokens that have one before them in their document."""
    logits = model(**{name: x for name, x in batch.items() if name != "labels"})
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def read_documents(text: Path | None) -> list[list[int]]:
    """Reads all files below a folder as bytes; default: functions and classes of Python's own."""
    if text is not None and not text.is_dir():
        raise ValueError(f"--text must be a folder of texts, got {text}; give their folder")
    folder = text or Path(sysconfig.get_paths()["stdlib"])
    names = sorted(folder.rglob("*") if text else folder.glob("*.py"))
    contents = [name.read_bytes() for name in names if name.is_file()]
    if not any(contents):
        raise ValueError(f"{folder} has no text; put files into it, or give another --text")
    if text is None:
        contents = [part for x in contents for part in re.split(rb"\n(?=class |def |@)", x)]
    return [list(content) for content in contents if content]


def differing(before: dict[str, str], now: dict[str, str]) -> str:
    """Returns the options of a run that are other ones now, as a text."""
    return ", ".join(f"--{x} {before[x]}, not {now[x]}" for x in now if before.get(x) != now[x])


def batches(rows: PackedRows, args: argparse.Namespace, first: int) -> Any:
    """Yields the batches of the steps from `first` on; seed and step alone decide each."""
    for step in range(first, args.steps):
        epoch, place = divmod(step * args.batch, len(rows) // args.batch * args.batch)
        shuffle = torch.Generator().manual_seed(args.seed + epoch)
        chosen = torch.randperm(len(rows), generator=shuffle)[place : place + args.batch]
        yield step, {name: torch.stack([rows[int(i)][name] for i in chosen]) for name in rows[0]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="a folder of texts; default: Python's own")
    parser.add_argument("--model", choices=MODELS, default="longnet", help="default longnet")
    parser.add_argument(
        "--length", type=positive, default=1024, help="tokens of a row; default 1024"
    )
    parser.add_argument("--batch", type=positive, default=2, help="rows of a step; default 2")
    parser.add_argument("--steps", type=positive, default=300, help="steps in all; default 300")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate; default 3e-3")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows; default 0")
    parser.add_argument("--save-every", type=positive, default=50, help="steps; default 50")
    parser.add_argument("--compiler", default="inductor", help="of torch.compile; default inductor")
    parser.add_argument("--out", type=Path, default=Path("runs/packed"), help="default runs/packed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains, and returns the losses by step, in nats a token, and the number of graphs."""
    args = parse(argv)
    finished = args.out / "losses.json"
    if finished.exists() and args.steps <= (done := len(json.loads(finished.read_text()))):
        raise ValueError(
            f"{args.out} has a finished run of {done} steps, which is not overwritten; pass "
            f"--steps above {done} to go on with it, or another --out"
        )
    torch.manual_seed(args.seed)
    documents = read_documents(args.text)
    rows = pack(documents, args.length, seed=args.seed)
    if len(rows) < args.batch:
        raise ValueError(
            f"{len(rows)} rows of {args.length} tokens are fewer than --batch {args.batch}; pass a "
            "smaller --batch or --length, or more text"
        )
    padding = 1 - sum(map(len, documents)) / rows.tokens.numel()
    print(
        f"{len(documents):,} documents in {len(rows):,} rows of {args.length:,} tokens, "
        f"{padding:.2%} padding, {rows.cut} documents longer than a row"
    )
    model = MODELS[args.model](args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    settings = {name: str(getattr(args, name)) for name in SAME_WHEN_RESUMED}
    file, losses = args.out / "checkpoint.pt", []
    args.out.mkdir(parents=True, exist_ok=True)
    if file.exists():
        saved = torch.load(file)
        if saved["settings"] != settings:
            raise ValueError(
                f"{args.out} has a run with {differing(saved['settings'], settings)}; pass the "
                "same options to go on with it, or another --out"
            )
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
        print(f"resumed after step {len(losses)} from {file}")
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend=args.compiler)
    bar = tqdm(batches(rows, args, len(losses)), total=args.steps, initial=len(losses), unit="step")
    for step, batch in bar:
        began = time.perf_counter()
        loss = loss_of(compiled, batch) / (batch["labels"][:, 1:] >= 0).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        speed = batch["input_ids"].numel() / (time.perf_counter() - began)
        bar.set_postfix_str(f"loss {losses[-1]:.3f} nats a byte, {speed:,.0f} tokens/s")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "losses": losses, "settings": settings}, file.with_suffix(".tmp"))
            os.replace(file.with_suffix(".tmp"), file)
            finished.unlink(missing_ok=True)  # of fewer steps
    graphs = counters["stats"]["unique_graphs"]
    replace_file(finished, json.dumps(losses).encode())
    print(f"{len(losses)} steps, graphs compiled: {graphs}; losses in {finished}")
    return {"losses": losses, "graphs": graphs, "padding": padding}


if __name__ == "__main__":
    with one_line_errors("train_packed", install=install("cli,hf")):
        main()
