"""The repeated runs of `device_runs` notice planted defects; a variable sends them to a GPU."""

import pytest
import torch
from helpers.device_runs import checked
from helpers.forked import run
from oracles.attention_oracle import Case, inputs

import sparsering as sr
from sparsering.kernels.triton import call as backend


def test_with_the_variable_set_kernels_run_on_the_gpu():
    code = (
        "import os, runpy; runpy.run_path('tests/conftest.py');"
        "import torch; from helpers import device_runs;"
        "assert 'TRITON_INTERPRET' not in os.environ;"
        "assert device_runs.ON_GPU and device_runs.DEVICE == torch.device('cuda')"
    )
    done = run(code, SPARSERING_TEST_DEVICE="cuda")
    assert done.returncode == 0, done.stderr
    assert "cuda or stub, got tpu" in run(code, SPARSERING_TEST_DEVICE="tpu").stderr


@pytest.mark.parametrize("defect", ["", "other bits in a second run", "wrong with one stage"])
def test_runs_that_differ_are_noticed(defect, monkeypatch):
    """In the interpreter, whose results have the same bits in every run."""
    stages, forward = [], backend._forward_pass

    def planted(part, number, out, lse) -> None:
        stages.append(backend._config_for("forward", part.problem).stages)
        forward(part, number, out, lse)
        if defect.startswith("other") and len(stages) == 2:
            out += out.abs().max() * torch.finfo(out.dtype).eps  # within any tolerance
        if defect.startswith("wrong") and stages[-1] == 1:
            out += 1.0

    def check(found) -> None:
        assert (found[0] - expected).abs().max() < 1e-5, "wrong with one stage"

    args = inputs(Case(1, 1, 1, 20, 20), torch.float32, requires_grad=False)
    expected = sr.attention(*args, sr.Causal(), backend="reference")
    monkeypatch.setattr(backend, "_forward_pass", planted)
    call = [lambda: [sr.attention(*args, sr.Causal(), backend="triton")], check]
    checked(*call)
    assert len(stages) == 1
    stages.clear()
    if not defect:
        checked(*call, repeated=True)
        assert stages[0] == stages[1] > 1 == stages[2]
        return
    with pytest.raises(AssertionError, match=defect):
        checked(*call, repeated=True)
