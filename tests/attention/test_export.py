"""Exported models of a dynamic length, loaded in a fresh process, have the same numbers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.forked import run
from torch import Tensor

import sparsering as sr


class Attends(torch.nn.Module):
    """A projection, and attention in two heads of 16."""

    def __init__(self, pattern: sr.Pattern) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 96)
        self.pattern = pattern

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        out = sr.attention(q, k, v, self.pattern, block_size=16)
        return out.transpose(1, 2).flatten(2)


class AttendsByAll(torch.nn.Module):
    """Three calls: a pattern without tensors, one that reads lengths, and the reference."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        out = sr.attention(q, k, v, sr.SlidingWindow(16, 0), block_size=16)
        out = sr.attention(out, k, v, sr.Causal() & sr.KeyPadding(lengths), block_size=16)
        bias = torch.zeros(2, 9)
        return sr.attention(
            out, k, v, sr.SlidingWindow(8, 0), distance_bias=bias, backend="reference"
        )


# A fresh process imports the library for its operators alone.
LOAD = """
import sys, torch, sparsering
for number in range(3):
    x, wanted = torch.load(f"{sys.argv[1]}/{number}.pt")
    out = torch.export.load(f"{sys.argv[1]}/model.pt2").module()(x)
    assert torch.equal(out, wanted), (out - wanted).abs().max()
"""
LOAD_PACKAGE = """
import sys, torch, sparsering
model = torch._inductor.aoti_load_package(f"{sys.argv[1]}/model.pt2")
for number in range(3):
    *inputs, wanted = torch.load(f"{sys.argv[1]}/{number}.pt")
    torch.testing.assert_close(model(*inputs), wanted, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(sr.SlidingWindow(16, 0), marks=pytest.mark.slow),
        sr.LongNet((32, 64), (1, 2)) & sr.Causal(),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")  # torch's own, about its tree specifications
def test_an_exported_model_takes_other_lengths_in_a_fresh_process(tmp_path: Path, pattern):
    model = Attends(pattern).eval()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        model, (torch.randn(2, 100, 32),), dynamic_shapes={"x": {1: tokens}}
    )
    torch.export.save(program, tmp_path / "model.pt2")
    for number, length in enumerate((2, 100, 333)):
        x = torch.randn(2, length, 32)
        torch.save((x, model(x).detach()), tmp_path / f"{number}.pt")
    done = run(f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{LOAD}")  # it has exported nothing
    assert done.returncode == 0, done.stderr


# AOTInductor hands an operator None where it has an empty list of tensors.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_package_of_aotinductor_takes_other_lengths_in_a_fresh_process(tmp_path: Path):
    model = AttendsByAll().eval()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = {**{name: {2: tokens} for name in "qkv"}, "lengths": None}

    def inputs(length: int) -> tuple[Tensor, ...]:
        lengths = torch.tensor([length, length // 2 + 1])
        return *(torch.randn(2, 2, length, 16) for _ in "qkv"), lengths

    program = torch.export.export(model, inputs(100), dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    for number, length in enumerate((2, 100, 333)):
        call = inputs(length)
        torch.save((*call, model(*call)), tmp_path / f"{number}.pt")
    run_fresh(LOAD_PACKAGE, tmp_path)


def run_fresh(program: str, folder: Path) -> None:
    """Runs a program in a new process, which must end well."""
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
