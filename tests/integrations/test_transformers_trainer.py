"""The trainer of docs/parallel.md: two ranks that share rows have the losses of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.pages import ROOT, blocks

pytest.importorskip("accelerate")  # which Trainer needs

BLOCKS = blocks((ROOT / "docs" / "parallel.md").read_text(encoding="utf-8"))
TRAINER = next(x.code for x in BLOCKS if "class SharedRowsTrainer" in x.code)
SCRIPT = """
import json, os, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from sparsering.integrations import transformers as hf
{trainer}
ranks, (out, *resumed) = int(os.environ.get("WORLD_SIZE", 1)), sys.argv[1:]
arguments = TrainingArguments(
    out, use_cpu=True, ddp_backend="gloo" if ranks > 1 else None, per_device_train_batch_size=2,
    per_device_eval_batch_size=2, gradient_accumulation_steps=2, activation_checkpointing=True,
    max_steps=4, logging_steps=1, learning_rate=1e-2, save_steps=2, eval_strategy="steps",
    eval_steps=2, prediction_loss_only=True, disable_tqdm=True, report_to=[],
)
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128))
hf.parallelize(model)
ids = torch.randint(3, 128, (16, 90))
labels = [row.masked_fill(torch.arange(90) < 5 * i, -100) for i, row in enumerate(ids)]
rows = [{{"input_ids": row, "labels": label}} for row, label in zip(ids, labels)]
trainer = SharedRowsTrainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
trainer.train(resume_from_checkpoint=resumed[0] if resumed else None)
if trainer.is_world_process_zero():
    print("history", json.dumps(trainer.state.log_history))
"""


def run(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(trainer=TRAINER))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(start if ranks > 1 else []), str(script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def history(folder: Path, ranks: int, *arguments: str) -> list[tuple[int, str, float]]:
    """Returns (step, what, value) of losses, norms of gradients and losses of evaluations."""
    found = run(folder, ranks, *arguments)
    assert found.returncode == 0, found.stderr
    line = next(x for x in found.stdout.splitlines() if x.startswith("history "))
    rows = json.loads(line.removeprefix("history "))
    kinds = ("loss", "grad_norm", "eval_loss")
    return [(row["step"], kind, row[kind]) for row in rows for kind in kinds if kind in row]


@pytest.mark.slow
def test_losses_of_ranks_are_those_of_one_process(tmp_path):
    expected = history(tmp_path, 1, str(tmp_path / "one"))
    assert [step for step, kind, _ in expected if kind == "loss"] == [1, 2, 3, 4]
    assert len(expected) == 4 + 4 + 2
    found = history(tmp_path, 2, str(tmp_path / "two"))
    resumed = history(tmp_path, 2, str(tmp_path / "on"), str(tmp_path / "two" / "checkpoint-2"))
    for values in (found, resumed):
        assert [x[:2] for x in values] == [x[:2] for x in expected]
        for (*_, value), (*_, own) in zip(values, expected, strict=True):
            assert value == pytest.approx(own, rel=3e-6)
