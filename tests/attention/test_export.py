"""torch.export: a model of a dynamic length, loaded in a fresh process, has the same numbers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
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


# A fresh process imports the library for its operators alone.
LOAD = """
import sys, torch, sparsering
for number in range(3):
    x, wanted = torch.load(f"{sys.argv[1]}/{number}.pt")
    out = torch.export.load(f"{sys.argv[1]}/model.pt2").module()(x)
    assert torch.equal(out, wanted), (out - wanted).abs().max()
"""


@pytest.mark.parametrize(
    "pattern", [sr.SlidingWindow(16, 0), sr.LongNet((32, 64), (1, 2)) & sr.Causal()], ids=str
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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
