"""Trains a language model on long rows of a text; the processes of torchrun share each row.

    torchrun --nproc-per-node 2 examples/finetune_long_context.py
    torchrun --nproc-per-node 4 examples/finetune_long_context.py --text book.txt --length 32768
    torchrun --nproc-per-node 2 examples/finetune_long_context.py --model path/or/name --lr 1e-5

By default the text is the standard library's own sources, and the model is a small one with Gemma
3's windows and random weights, which reads bytes. So nothing is downloaded. All processes compute
a row together (`hf.parallelize`), and FSDP2 divides weights, gradients and optimizer state among
them. After a kill, start the same command again: it continues from the last checkpoint in --out,
also with another number of processes. The trained model is saved in OUT/model. A finished run is
not overwritten: more --steps go on with it.

The loop is a plain one, to be read and changed. transformers.Trainer gives each process rows of its
own, and processes that share a row must all have that row: docs/parallel.md shows how it does.
"""

import argparse
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sparsering.ground.commands import install
from sparsering.mistakes import OneLineParser, one_line_errors

with one_line_errors("finetune_long_context", install=install("cli,hf")):
    from tqdm import tqdm
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
    )

    from sparsering.integrations import transformers as hf


SAME_WHEN_RESUMED = ("text", "model", "length", "batch", "lr", "seed")  # else losses would change
WARMUP_STEPS = 10


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="a text file; default: Python's own sources")
    parser.add_argument("--model", help="a causal model to load with its tokenizer; default: none")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a row; default 8192")
    parser.add_argument("--batch", type=int, default=1, help="rows of a step; default 1")
    parser.add_argument("--steps", type=int, default=20, help="steps in all; default 20")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate; default 1e-3")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows; default 0")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/long-context"), help="default runs/long-context"
    )
    parser.add_argument("--save-every", type=int, default=5, help="steps; default 5")
    parser.add_argument("--recompute", action="store_true", help="less memory, a forward pass more")
    options = parser.parse_args(argv)
    for name in ("length", "batch", "steps", "save_every"):
        if (value := getattr(options, name)) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least 1, got {value}; leave it out")
    return options


def join_processes() -> torch.device:
    """Joins the processes of torchrun; without torchrun, this process is a group of one."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= local_ranks:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = {} if dist.is_torchelastic_launched() else {"rank": 0, "world_size": 1}
        store = dist.HashStore() if alone else None
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=store, **alone)
    return device


def text_bytes(path: Path | None) -> bytes:
    """Returns the file's bytes, or those of the standard library's modules."""
    if path is None:
        return b"".join(x.read_bytes() for x in sorted(Path(json.__file__).parents[1].glob("*.py")))
    if not path.is_file():
        raise ValueError(f"--text must be a file, got {path}; join several files into one")
    return path.read_bytes()


def load_model(options: argparse.Namespace, text: bytes) -> tuple[Any, Tensor]:
    """Returns a model and the text as its tokens, int64 [tokens]."""
    if options.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        ids = tokenizer(text.decode("utf-8", "replace"), verbose=False)["input_ids"]
        tokens = torch.tensor(ids)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                **sizes, **heads, vocab_size=256, sliding_window=512, pad_token_id=None
            )
        )
    if len(tokens) < options.length:
        raise ValueError(
            f"the text has {len(tokens)} tokens, fewer than --length {options.length}; pass "
            f"--length {len(tokens)} or less, or a longer --text"
        )
    return model, tokens


def rows_of(tokens: Tensor, step: int, options: argparse.Namespace) -> Tensor:
    """Draws a step's rows [batch, length]; they depend on the seed and the step alone."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    last = len(tokens) - options.length
    starts = torch.randint(last + 1, (options.batch, 1), generator=generator)
    return tokens[starts + torch.arange(options.length)]


def checkpoints(out: Path) -> list[Path]:
    """Returns the folders of whole checkpoints, oldest first."""
    return sorted(x for x in out.glob("step-*") if x.suffix != ".partial")


def previous_run(out: Path, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns the facts of the last checkpoint.

    ValueError if its run had other settings, or is finished: its model is saved.
    """
    found = checkpoints(out)
    run = {"settings": settings, "losses": []}
    if found:
        run = json.loads((found[-1] / "run.json").read_text())
    for name, value in settings.items():
        if (before := run["settings"][name]) != value:
            raise ValueError(
                f"{out} has a run with --{name} {before}, got {value}; pass the same options to "
                "continue it, or another --out"
            )
    if (out / "model").exists() and steps <= (done := len(run["losses"])):
        raise ValueError(
            f"{out} has a finished run of {done} steps and its model, which is not overwritten; "
            f"pass --steps above {done} to go on with it, or another --out"
        )
    return run


def save(out: Path, run: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Writes a checkpoint under another name, renames it, then removes the older ones."""
    final = out / f"step-{len(run['losses']):08d}"
    partial = final.with_suffix(".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir(parents=True)
        (partial / "run.json").write_text(json.dumps(run))
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "optimizer": state}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        older = checkpoints(out)
        partial.rename(final)
        for path in older:
            shutil.rmtree(path)
        shutil.rmtree(out / "model", ignore_errors=True)  # of fewer steps
    dist.barrier()


def load(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Loads a checkpoint."""
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"weights": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def main(argv: list[str] | None = None) -> list[float]:
    """Trains; returns the losses of all steps, also of those before a kill."""
    options = parse(argv)
    text = text_bytes(options.text)
    settings = {name: getattr(options, name) for name in SAME_WHEN_RESUMED}
    settings["text"] = f"sha256:{hashlib.sha256(text).hexdigest()[:16]}"
    run = previous_run(options.out, settings, options.steps)
    losses, done = run["losses"], len(run["losses"])
    options.out.mkdir(parents=True, exist_ok=True)  # if it cannot be made, say so before training
    torch.manual_seed(options.seed)  # the same weights on all ranks
    model, tokens = load_model(options, text)
    kind, config = type(model), model.config

    device = join_processes()
    first = dist.get_rank() == 0
    model.to(device).train()
    if options.recompute:
        model.gradient_checkpointing_enable()
    hf.parallelize(model)  # from here on the ranks compute each call together
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    if done:
        load(checkpoints(options.out)[-1], model, optimizer)
    bar = tqdm(range(done, options.steps), initial=done, total=options.steps, disable=not first)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / WARMUP_STEPS)
        torch.manual_seed(hash((options.seed, step, dist.get_rank())))  # of dropout
        rows = rows_of(tokens, step, options).to(device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(options.out, run, model, optimizer)

    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=full)  # on rank 0
    if first:
        print(hf.explain(model))
        whole = kind(config)
        whole.load_state_dict(weights)
        partial = options.out / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        whole.save_pretrained(partial)
        if options.model is not None:
            AutoTokenizer.from_pretrained(options.model).save_pretrained(partial)
        partial.rename(options.out / "model")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the model is in {options.out / 'model'}")
    dist.barrier()
    return losses


if __name__ == "__main__":
    with one_line_errors("finetune_long_context", shown=os.environ.get("RANK", "0") == "0"):
        main()
        dist.destroy_process_group()
