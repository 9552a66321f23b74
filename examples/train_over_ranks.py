"""Trains a small Gemma 3 whose ranks share each row, in four engines: to one process's weights.

    torchrun --nproc-per-node 2 examples/train_over_ranks.py --engine trainer --steps 8
    torchrun --nproc-per-node 4 examples/train_over_ranks.py --engine fsdp2 --heads 2
    python examples/train_over_ranks.py --engine lightning

`trainer` is the Trainer of transformers, `accelerate` an Accelerator, `lightning` the Trainer of
Lightning, and `fsdp2` a loop of one's own as in torchtitan, whose weights are divided. In all of
them each rank gets the same rows, and `hf.parallelize` cuts them. --heads shares heads too, over a
mesh. Nothing is downloaded. The folder of --out gets `losses.json`, the loss of the whole batch in
each step, and `weights.safetensors`. Both are those of one process, to 1e-6.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from sparsering.cli.argument_types import positive
from sparsering.ground.commands import install
from sparsering.ground.files import replace_file
from sparsering.mistakes import OneLineParser, one_line_errors

NAME = "train_over_ranks"

with one_line_errors(NAME, install=install("cli,hf")):
    from safetensors.torch import save
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from sparsering.integrations import transformers as hf

ROWS, LEARNING_RATE = 2, 0.5
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}


def build(options: argparse.Namespace) -> Any:
    """Builds the model: the same weights on all ranks."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=128, layer_types=[
            "sliding_attention", "full_attention",
        ], pad_token_id=0,
    )  # fmt: skip
    model: Any = Gemma3ForCausalLM(config)
    if options.lora:
        with one_line_errors(NAME, install="pip install peft"):
            from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**LORA))
    if options.checkpointing:
        model.gradient_checkpointing_enable()
        if options.lora:
            model.enable_input_require_grads()
    return model.train()


def rows(options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Draws the rows of all steps, the same on all ranks: each counts on from a drawn number."""
    drawn = torch.Generator().manual_seed(1)
    first = torch.randint(253, (ROWS * options.steps, 1), generator=drawn)
    ids = (first + torch.arange(options.length)) % 253 + 3
    return [{"input_ids": row, "labels": row} for row in ids]


def share(model: Any, options: argparse.Namespace) -> None:
    """Lets the ranks share the model's calls: over tokens, or over heads and tokens."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return
    if ranks % options.heads:
        raise ValueError(
            f"--heads must divide the {ranks} ranks, got {options.heads}; leave it out to share "
            "tokens alone"
        )
    shape = options.heads, ranks // options.heads
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("heads", "tokens"))
    hf.parallelize(model, mesh if options.heads > 1 else None)


def mean_over_ranks(loss: Tensor) -> float:
    """Returns the loss of the whole batch from the ranks' parts."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def join_processes() -> None:
    """Joins the processes that torchrun started; engines of libraries do this themselves."""
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("gloo")


def with_trainer(options: argparse.Namespace) -> tuple[list[float], Any]:
    """The Trainer of transformers: a plain DataLoader has the same rows on all ranks."""
    from transformers import Trainer, TrainingArguments

    with one_line_errors(NAME, install="pip install accelerate"):
        import accelerate  # noqa: F401 - TrainingArguments need it

    class SharedRowsTrainer(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, ROWS, collate_fn=self.data_collator)

    arguments = TrainingArguments(
        str(options.out), use_cpu=True, max_steps=options.steps, per_device_train_batch_size=ROWS,
        ddp_backend="gloo" if dist.is_torchelastic_launched() else None, optim="sgd",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=1.0,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    model = build(options)
    share(model, options)  # after TrainingArguments, which joins the processes
    trainer = SharedRowsTrainer(model, arguments, train_dataset=rows(options))
    seen: list[float] = []
    own_loss = trainer.compute_loss

    def compute_loss(*given: Any, **named: Any) -> Any:
        loss = own_loss(*given, **named)
        seen.append(mean_over_ranks(loss))  # the log has four digits
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    return seen, model


def with_accelerate(options: argparse.Namespace) -> tuple[list[float], Any]:
    """Accelerate: the model and the optimizer are prepared, the loader is not."""
    with one_line_errors(NAME, install="pip install accelerate"):
        from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build(options)
    share(model, options)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    losses: list[float] = []
    for batch in DataLoader(rows(options), ROWS):  # type: ignore[arg-type]
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, model


def with_lightning(options: argparse.Namespace) -> tuple[list[float], Any]:
    """Lightning: without its sampler, which would give each rank rows of its own."""
    with one_line_errors(NAME, install="pip install lightning"):
        import lightning

    class Shared(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = build(options), []

        def configure_model(self) -> None:
            share(self.model, options)  # here the processes have joined

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.losses.append(mean_over_ranks(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), LEARNING_RATE)

    module = Shared()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    strategy: Any = "auto"
    if ranks > 1:
        strategy = lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, use_distributed_sampler=False,
        max_epochs=1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows(options), ROWS))  # type: ignore[arg-type]
    return module.losses, module.model


def with_fsdp2(options: argparse.Namespace) -> tuple[list[float], Any]:
    """A loop of one's own: FSDP2 divides the weights over all ranks."""
    from torch.distributed.fsdp import fully_shard

    join_processes()
    model = build(options)
    share(model, options)
    if dist.is_initialized():
        base = model.get_base_model() if options.lora else model
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in base.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses: list[float] = []
    for batch in DataLoader(rows(options), ROWS):  # type: ignore[arg-type]
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses, model


ENGINES = {
    "trainer": with_trainer, "accelerate": with_accelerate, "lightning": with_lightning,
    "fsdp2": with_fsdp2,
}  # fmt: skip


def trained(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the trained weights by name, whole ones also where they are divided."""
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            yield name, whole.detach().clone().contiguous()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains, writes the losses and the weights, and returns the losses."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="trainer", help="default trainer")
    parser.add_argument("--steps", type=positive, default=8, help="default 8")
    parser.add_argument("--length", type=positive, default=512, help="tokens of a row; default 512")
    parser.add_argument("--heads", type=positive, default=1, help="ranks of heads; default 1")
    parser.add_argument("--lora", action="store_true", help="train adapters of peft alone")
    parser.add_argument("--checkpointing", action="store_true", help="less memory, more time")
    parser.add_argument("--out", type=Path, default=Path("runs/over-ranks"), help="a folder")
    options = parser.parse_args(argv)
    if (options.out / "losses.json").exists():
        raise ValueError(
            f"{options.out} has a finished run, which is not overwritten; pass another --out"
        )
    options.out.mkdir(parents=True, exist_ok=True)  # if it cannot be made, say so before training
    losses, model = ENGINES[options.engine](options)
    weights = dict(trained(model))  # on all ranks, since FSDP2 gathers
    if not dist.is_initialized() or dist.get_rank() == 0:
        replace_file(options.out / "weights.safetensors", save(weights))
        replace_file(options.out / "losses.json", json.dumps(losses).encode())
        print(f"{options.engine}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, in {options.out}")
    if dist.is_initialized():
        dist.barrier()
    return {"losses": losses}


if __name__ == "__main__":
    with one_line_errors(NAME, shown=os.environ.get("RANK", "0") == "0"):
        main()
        if dist.is_initialized():
            dist.destroy_process_group()
