"""A call runs on the first default backend that can run it, or on the one that is named."""

import pytest
import torch
from oracles.attention_oracle import Case, inputs

import sparsering as sr
from sparsering.kernels import backends as dispatch
from sparsering.kernels.backends import BACKENDS, choose

CASE = Case(2, 4, 2, 70, 75, 16, 16, 16)


def test_an_interpreter_is_never_the_default(monkeypatch):
    args = inputs(CASE, torch.float32, requires_grad=False)
    for name, following in (("cpu", "gather"), ("gather", "reference")):
        assert choose(None, args) == name
        cannot_run(monkeypatch, name, "not now")
        assert choose(None, args) == following
    cannot_run(monkeypatch, "reference", "not now")
    with pytest.raises(NotImplementedError):
        choose(None, args)
    assert choose("triton", args) == "triton"


def cannot_run(monkeypatch, name: str, reason: str) -> None:
    backend = BACKENDS[name]._replace(reasons=lambda *tensors: [reason])
    monkeypatch.setitem(BACKENDS, name, backend)


def test_a_missing_package_is_an_import_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    cannot_run(monkeypatch, "triton", "the package is missing")
    args = inputs(CASE, torch.float32, requires_grad=False)
    with pytest.raises(ImportError, match=r"pip install 'sparsering\[triton\]'"):
        sr.attention(*args, sr.Causal(), backend="triton")
    assert choose(None, args) == "cpu"
