"""Calls that run on the backend of a fixture: see `each_backend` in conftest.py."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracles.attention_oracle import Case, assert_same_attention, inputs
from torch import Tensor

import sparsering as sr

BACKEND_OF = {torch.float64: "gather"}  # of each dtype; those that are not here run on gather too


@contextmanager
def below_float64(backend: str) -> Iterator[None]:
    """Makes `attend` use a backend for the dtypes below float64 that the backend supports."""
    lower = [torch.float32, torch.bfloat16, torch.float16]
    if backend == "triton":  # its interpreter gets bfloat16 products wrong
        lower.remove(torch.bfloat16)
    BACKEND_OF.update(dict.fromkeys(lower, backend))
    yield
    for dtype in lower:
        del BACKEND_OF[dtype]


def each_call(
    dtypes: Sequence[torch.dtype], *values: Sequence[Any], fast: Callable[..., bool]
) -> list[Any]:
    """Lists (backend, dtype, *values) of the calls that differ; those not `fast` are slow tests.

    float64 runs on gather whatever the backend.
    """
    calls = []
    for backend, dtype, *rest in itertools.product(("gather", "cpu", "triton"), dtypes, *values):
        if dtype == torch.float64 and backend != "gather":
            continue
        if dtype == torch.bfloat16 and backend == "triton":
            continue
        marks = () if fast(backend, dtype, *rest) else pytest.mark.slow
        name = "-".join(map(str, (backend, dtype, *rest)))
        calls.append(pytest.param(backend, dtype, *rest, marks=marks, id=name))
    return calls


def attend(query: Tensor, key: Tensor, value: Tensor, pattern: sr.Pattern, **options):
    backend = BACKEND_OF.get(query.dtype, "gather")
    return sr.attention(
        query, key, value, pattern, **{"backend": backend, "return_lse": True, **options}
    )


def reference(query: Tensor, key: Tensor, value: Tensor, pattern: sr.Pattern, **options):
    return attend(query, key, value, pattern, **options, backend="reference")


def assert_is_the_reference(pattern: sr.Pattern, case: Case, **options) -> None:
    args = inputs(case)
    options = {"q_start": case.q_start, "block_size": case.block_size, **options}
    got = attend(*args, pattern, **options)
    assert_same_attention(got, reference(*args, pattern, **options), args)
