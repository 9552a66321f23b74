"""The adapter of FlexAttention against the reference; it has no backward on the CPU."""

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    inputs,
)
from torch import Tensor

import sparsering as sr
from sparsering import dispatch
from sparsering.dispatch import BACKENDS, choose

CASES = [Case(2, 4, 2, 70, 75, 16, 12, 16), Case(2, 2, 1, 33, 50, 5, 20, 48, 7)]


def attend(*args, **options) -> tuple[Tensor, Tensor]:
    return sr.attention(*args, **{"return_lse": True, **options})


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "case"), thinned(9, PATTERNS, CASES))
def test_flex_is_the_reference_forward(name, case):
    args = inputs(case, requires_grad=False)
    options = {"block_size": case.block_size, "q_start": case.q_start}
    got = attend(*args, PATTERNS[name](case), **options, backend="flex")
    exact = attend(*args, PATTERNS[name](case), **options, backend="reference")
    for what, a, b in zip(("out", "lse"), got, exact, strict=True):
        assert_close(a, b, 1e-12, what)


def test_flex_says_what_it_cannot():
    args = inputs(CASES[0])
    with pytest.raises(NotImplementedError, match="flex: FlexAttention has no backward on the CPU"):
        attend(*args, sr.Causal(), backend="flex")
    with torch.no_grad():
        assert "flex: usable (only when named)" in sr.explain(*args, sr.Causal())
        layout = sr.Full().layout(**CASES[0].heads, block_size=16)
        bias = torch.zeros(1, 4, layout.num_blocks, dtype=torch.float64)
        with pytest.raises(NotImplementedError, match="flex: it has no block_bias"):
            attend(*args, sr.Full(), block_size=16, block_bias=bias, backend="flex")


def test_adapters_and_interpreters_are_never_the_default(monkeypatch):
    args = inputs(CASES[0], torch.float32, requires_grad=False)
    for name, following in (("cpu", "gather"), ("gather", "reference")):
        assert choose(None, args) == name
        cannot_run(monkeypatch, name, "not now")
        assert choose(None, args) == following
    cannot_run(monkeypatch, "reference", "not now")
    with pytest.raises(NotImplementedError):
        choose(None, args)
    assert choose("flex", args) == "flex" and choose("triton", args) == "triton"


def cannot_run(monkeypatch, name: str, reason: str) -> None:
    backend = BACKENDS[name]._replace(reasons=lambda *tensors: [reason])
    monkeypatch.setitem(BACKENDS, name, backend)


def test_a_missing_package_is_an_import_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    cannot_run(monkeypatch, "triton", "the package is missing")
    args = inputs(CASES[0], torch.float32, requires_grad=False)
    with pytest.raises(ImportError, match=r"pip install 'sparsering\[triton\]'"):
        attend(*args, sr.Causal(), backend="triton")
    assert choose(None, args) == "cpu"
