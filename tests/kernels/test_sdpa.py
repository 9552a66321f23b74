"""Torch's dense kernel against the reference: all pairs, a triangle, and what it refuses."""

import math
import re

import pytest
import torch
from oracles.attention_oracle import Case, assert_close, assert_same_attention, gradients, inputs

import sparsering as sr
from sparsering import KVCache
from sparsering.dispatch import BACKENDS

PATTERNS = (sr.Full(), sr.Causal())
CASES = (
    Case(2, 4, 2, 40, 40, 16, 16),
    Case(2, 4, 2, 20, 40, 16, 16, q_start=0, arrange="tokens before heads"),
    Case(2, 2, 2, 40, 20, 16, 16, q_start=0),
    Case(2, 4, 2, 20, 40, 8, 8, q_start=0, arrange="every other of a larger tensor"),
    Case(2, 4, 2, 1, 40, 8, 8, q_start=0),
    Case(2, 4, 2, 1, 1, 8, 8),
)


def attend(args, pattern: sr.Pattern, **options):
    return sr.attention(*args, pattern, return_lse=True, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_is_the_reference_forward_and_backward_through_lse_too(pattern, case):
    args = inputs(case)
    options = {"q_start": case.q_start}
    got = attend(args, pattern, **options, backend="sdpa")
    exact = attend(args, pattern, **options, backend="reference")
    assert_same_attention(got, exact, args)
    assert got[0].is_contiguous() and got[1].is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_lower_precision_stays_within_its_error_through_lse_too(pattern, dtype, bound):
    args = inputs(Case(1, 4, 2, 70, 70, 32, 32), dtype)
    exact = [x.detach().double().requires_grad_() for x in args]
    weights = torch.randn(1, 4, 70, 32).double(), torch.randn(1, 4, 70).double()
    found = []
    for given, backend in ((args, "sdpa"), (exact, "reference")):
        out, lse = attend(given, pattern, backend=backend)
        loss = (out.double() * weights[0]).sum() + (lse.double() * weights[1]).sum()
        found.append((out, lse, *torch.autograd.grad(loss, given)))
    for got, want in zip(*found, strict=True):
        error = (got.double() - want).detach().norm()
        assert float(error) <= bound * float(want.detach().norm())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_only_rows_that_see_a_key_see_that_it_is_no_number(pattern, fill):
    query, key, value = inputs(Case(1, 2, 2, 40, 40, 8, 8), requires_grad=False)
    clean = attend((query, key, value), pattern, backend="reference")[0]
    seen = pattern.to_dense(40)[0, :, 20]
    for spoilt in (key, value):
        before = spoilt[:, :, 20].clone()
        spoilt[:, :, 20] = fill
        out, _ = attend((query, key, value), pattern, backend="sdpa")
        exact = attend((query, key, value), pattern, backend="reference")
        spoilt[:, :, 20] = before
        assert torch.equal(out.isfinite(), exact[0].isfinite())
        assert_close(out[:, :, ~seen], clean[:, :, ~seen], 1e-12)


def test_keys_after_the_last_query_of_a_triangle_are_never_touched():
    args = inputs(Case(2, 2, 1, 20, 40, 8, 8), torch.float32)
    with torch.no_grad():
        for x in args[1:]:
            x[:, :, 20:] = math.nan
    found = gradients(attend(args, sr.Causal(), backend="sdpa", q_start=0), args)
    assert all(x.isfinite().all() for x in found)
    assert not any(x[:, :, 20:].any() for x in found[1:])


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_no_tokens(q_len, kv_len, pattern):
    args = inputs(Case(2, 2, 1, q_len, kv_len, 8, 8))
    out, lse = attend(args, pattern, backend="sdpa", q_start=0)
    assert not out.any() and (lse == -torch.inf).all()
    assert [x.shape for x in gradients((out, lse), args)] == [x.shape for x in args]


def test_it_says_what_it_cannot():
    args = inputs(Case(1, 2, 2, 20, 20, 4, 4), torch.float32, False)
    told = r"sdpa: it runs Full\(\), and Causal\(\) with q_start=0, and no other pattern"
    others = sr.SlidingWindow(5), sr.Causal() & sr.SlidingWindow(100), sr.Causal() + sr.Causal()
    for pattern in others:
        with pytest.raises(NotImplementedError, match=told):
            attend(args, pattern, backend="sdpa")
        assert re.search(told, sr.explain(*args, pattern))
    with pytest.raises(NotImplementedError, match=told):
        attend(args, sr.Causal(), backend="sdpa", q_start=1)
    assert re.search(told, sr.explain(*args, sr.Causal(), q_start=1))
    for pattern in PATTERNS:
        assert "sdpa: usable (only when named)" in sr.explain(*args, pattern)
    assert "sdpa: usable (only when named)" in sr.explain(*args, sr.Full(), q_start=7)
    with pytest.raises(NotImplementedError, match="sdpa: it has no softcap"):
        attend(args, sr.Causal(), backend="sdpa", softcap=2.0)
    narrow = args[0], args[1], args[2][..., :2]
    with pytest.raises(NotImplementedError, match="one head dim"):
        attend(narrow, sr.Causal(), backend="sdpa")
    assert not BACKENDS["sdpa"].runs_any_layout  # as rings need


@pytest.mark.parametrize("max_length", [None, 20])
def test_a_cache_runs_whole_prompts_and_says_that_it_cannot_run_steps(max_length):
    args = inputs(Case(1, 2, 2, 20, 20, 4, 4), torch.float32, False)
    cache = KVCache(sr.Causal(), 1, 2, 4, max_length=max_length)
    expected = attend([x[:, :, :5] for x in args], sr.Causal(), backend="sdpa")[0]
    if max_length is None:
        found = cache.attend(*(x[:, :, :5] for x in args), backend="sdpa")
        assert torch.equal(found, expected)
    with pytest.raises(NotImplementedError, match="sdpa: it runs"):
        for part in (slice(4, 6), slice(6, 7)):
            cache.attend(*(x[:, :, part] for x in args), backend="sdpa")


def test_a_compiled_call_is_the_eager_one():
    args = inputs(Case(1, 2, 2, 64, 64, 16, 16), torch.float32, False)
    compiled = torch.compile(sr.attention, backend="aot_eager", fullgraph=True)
    for pattern in PATTERNS:
        found = compiled(*args, pattern, backend="sdpa")
        assert torch.equal(found, sr.attention(*args, pattern, backend="sdpa"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_channels_every_score_is_0_and_another_backend_says_so(dtype):
    args = [torch.ones(1, 2, 5, 0, dtype=dtype)] * 3
    _, lse = attend(args, sr.Causal(), scale=1.0)
    assert_close(lse, torch.arange(1.0, 6.0, dtype=dtype).log().expand(1, 2, 5), 1e-6)
    with pytest.raises(NotImplementedError, match="head dim of at least 1"):
        attend(args, sr.Causal(), scale=1.0, backend="sdpa")
