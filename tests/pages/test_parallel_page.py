"""The script of docs/parallel.md over processes: losses of one process, and what the page shows."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.pages import ROOT, blocks
from helpers.ring_workers import Workers, workers_of
from torch.distributed.tensor import DTensor

from sparsering.integrations import transformers as hf

BLOCKS = blocks((ROOT / "docs" / "parallel.md").read_text(encoding="utf-8"))
SCRIPT = next(x.code for x in BLOCKS if x.language == "python")
V4 = next(x.code for x in BLOCKS if "DeepseekV4ForCausalLM" in x.code)
GROUPS = next(x.code for x in BLOCKS if "def two_ranks_for_each_row" in x.code)
EXPLAINED = next(x.code for x in BLOCKS if "ranks, zigzag" in x.code)

four = workers_of(4)


def losses_of(output: str) -> list[float]:
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]
    return [float(line.split()[-1]) for line in lines]


def run_script(
    rank: int, ranks: int, tokens: int, script: str = SCRIPT
) -> tuple[str, dict[str, Any]]:
    """Returns a script's output and variables; a worker has joined its group already."""
    os.environ |= {"WORLD_SIZE": str(ranks), "TOKENS": str(tokens)}
    join, dist.init_process_group = dist.init_process_group, lambda *_: None
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            exec(script, names)
    finally:
        dist.init_process_group = join
    return printed.getvalue(), names


def losses_of_script(rank: int, ranks: int, tokens: int) -> list[float]:
    printed, names = run_script(rank, ranks, tokens)
    assert len(hf.local_positions(names["model"])) == tokens // ranks
    return losses_of(printed)


def losses_of_pairs(rank: int, tokens: int) -> tuple[float, torch.Tensor]:
    """A step of the script's model where each pair of ranks has another row: loss, a gradient."""
    model = fresh_model()
    names = {"dist": dist, "hf": hf}
    exec(GROUPS, names)
    row = names["two_ranks_for_each_row"](model)
    assert row == rank // 2
    loss = model(input_ids=row_of(row, tokens), labels=row_of(row, tokens)).loss
    loss.backward()
    gradient = model.model.embed_tokens.weight.grad
    assert isinstance(gradient, DTensor)
    mean = loss.detach() / 4
    dist.all_reduce(mean)
    return mean.item(), gradient.full_tensor()


def fresh_model() -> Any:
    """The script's model, without what the script does with it."""
    lines = SCRIPT.splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(x for x in lines if x.startswith(("import", "from"))), names)
    begin, end = (
        next(i for i, x in enumerate(lines) if x.startswith(start))
        for start in ("torch.manual_seed", "hf.parallelize")
    )
    exec("\n".join(lines[begin:end]), names)
    return names["model"]


def row_of(number: int, tokens: int) -> torch.Tensor:
    return (torch.arange(tokens)[None] * (7 + number)) ** 2 // 5 % 256


def test_the_script_is_short():
    assert len([line for line in SCRIPT.splitlines() if line.strip()]) <= 27


def test_losses_of_ranks_are_those_of_one_process(four: Workers, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TOKENS", "1024")
    printed, names = run_script(0, 1, 1024)
    model = fresh_model()
    model.set_attn_implementation("eager")
    before = model(input_ids=names["tokens"], labels=names["tokens"]).loss.item()
    assert losses_of(printed)[0] == pytest.approx(before, rel=0, abs=3e-6)
    for losses in four.run(losses_of_script, 4, 1024):
        assert losses == pytest.approx(losses_of(printed), rel=0, abs=3e-6)


def losses_of_v4(rank: int, ranks: int, tokens: int) -> list[float]:
    printed, names = run_script(rank, ranks, tokens, V4)
    assert len(hf.local_positions(names["v4"])) == tokens // ranks
    return losses_of(printed)


def test_losses_of_deepseek_v4_are_those_of_one_process(four: Workers, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TOKENS", "512")
    printed, _ = run_script(0, 1, 512, V4)
    for losses in four.run(losses_of_v4, 4, 512):
        assert losses == pytest.approx(losses_of(printed), rel=0, abs=1e-5)


def test_groups_of_two_ranks_have_rows_of_their_own(four: Workers):
    model = fresh_model()
    model.set_attn_implementation("eager")
    rows = torch.cat([row_of(0, 640), row_of(1, 640)])
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    expected = model.model.embed_tokens.weight.grad
    for mean, gradient in four.run(losses_of_pairs, 640):
        assert mean == pytest.approx(loss.item(), rel=2e-6, abs=0)
        assert (gradient - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.slow
def test_script_at_its_length_by_torchrun(tmp_path: Path):
    """Its losses at 65,536 tokens over 4 processes, and what the page shows of `hf.explain`."""
    (tmp_path / "train_long.py").write_text(SCRIPT + "print(hf.explain(model))\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    outputs = []
    for start in ([], ["-m", "torch.distributed.run", "--nproc-per-node", "4"]):
        filters = ["--local-ranks-filter", "0"] if start else []
        command = [sys.executable, *start, *filters, str(tmp_path / "train_long.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
    one, ranks = map(losses_of, outputs)
    assert ranks == pytest.approx(one, rel=0, abs=5e-6)
    assert ranks[2] < ranks[1] < ranks[0]
    assert EXPLAINED in outputs[1]
