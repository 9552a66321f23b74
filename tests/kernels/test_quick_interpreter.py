"""The interpreter that `helpers/quick_interpreter.py` makes quicker computes what Triton's does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.device_runs import ON_GPU

import sparsering as sr

FOLDER = Path(__file__).parent


def results() -> list[torch.Tensor]:
    """Computes in Triton: lists, tiles, extras and half precision, forward and backward."""
    generator = torch.Generator().manual_seed(1)
    found: list[torch.Tensor] = []
    chosen = sr.SelectedBlocks(torch.randint(-1, 9, (24, 4), generator=generator), 1)
    extras = {
        "softcap": 2.0,
        "dropout_p": 0.3,
        "dropout_seed": 5,
        "distance_bias": torch.randn(4, 11, generator=generator),
    }
    for pattern in (sr.Causal() & chosen, sr.LongNet((8, 16), (1, 2)) & sr.Causal()):
        for dtype, options in ((torch.float32, extras), (torch.float16, {})):
            shapes = ((1, 4, 24, 16), (1, 2, 24, 16), (1, 2, 24, 16))
            args = [torch.randn(*x, generator=generator).to(dtype) for x in shapes]
            leaves = [x.requires_grad_() for x in args]
            out = sr.attention(*leaves, pattern, backend="triton", block_size=16, **options)
            found += [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    return found


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="compares interpreters")
def test_results_have_the_bits_of_the_interpreter_as_it_is(tmp_path):
    path = tmp_path / "results.pt"
    program = f"import torch, test_quick_interpreter as t; torch.save(t.results(), {str(path)!r})"
    folders = [str(FOLDER.parents[1]), str(FOLDER.parent), str(FOLDER)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    expected, found = torch.load(path), results()
    assert len(found) == len(expected) == 16
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
