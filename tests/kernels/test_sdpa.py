"""Torch's dense kernel against the reference: dense patterns, small ones by a mask, refusals."""

import math

import pytest
import torch
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    assert_same_attention,
    gradients,
    inputs,
)

import sparsering as sr
from sparsering import KVCache
from sparsering.cost import choice
from sparsering.dispatch import BACKENDS
from sparsering.distributed import simulate_ring
from sparsering.kernels import sdpa
from sparsering.patterns.algebra import Frame

DENSE = {
    "full": sr.Full(),
    "causal": sr.Causal(),
    "a window over all": sr.SlidingWindow(200, 200),
    "causal, and a window or sinks": sr.Causal() & (sr.SlidingWindow(100) | sr.GlobalTokens(4)),
}
SMALL = {
    "window": sr.SlidingWindow(5),
    "no keys for some": sr.Dilated(8, 2),
    "heads of their own": sr.Dilated(8, 2, (0, 1)),
    "padded entries": sr.Causal() & sr.KeyPadding((3, 40)),
    "empty entries": sr.KeyPadding((0, 40)),
}
CASES = (
    Case(2, 4, 2, 40, 40, 16, 16),
    Case(2, 4, 2, 20, 40, 16, 16, arrange="tokens before heads"),
    Case(2, 2, 2, 40, 20, 16, 16, q_start=0),
    Case(2, 4, 2, 20, 40, 8, 8, q_start=0, arrange="every other of a larger tensor"),
)


def attend(args, pattern: sr.Pattern, **options):
    return sr.attention(*args, pattern, return_lse=True, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*DENSE, *SMALL])
def test_is_the_reference_forward_and_backward_through_lse_too(name, case):
    pattern = (DENSE | SMALL)[name]
    if case.kv_len != 40 and "entries" in name:
        pytest.skip("its lengths are of 40 keys")
    args = inputs(case)
    options = {"q_start": case.q_start}
    got = attend(args, pattern, **options, backend="sdpa")
    exact = attend(args, pattern, **options, backend="reference")
    assert_same_attention(got, exact, args)
    assert got[0].is_contiguous() and got[1].is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("pattern", [sr.Causal(), sr.SlidingWindow(9)])
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


@pytest.mark.parametrize("pattern", [sr.Causal(), sr.SlidingWindow(9)])
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


def test_keys_that_no_query_sees_are_never_touched():
    args = inputs(Case(2, 2, 1, 40, 40, 8, 8), torch.float32)
    pattern = sr.Causal() & sr.KeyPadding((3, 40))
    with torch.no_grad():
        for x in args[1:]:
            x[0, :, 3:] = math.nan
    found = gradients(attend(args, pattern, backend="sdpa"), args)
    assert all(x.isfinite().all() for x in found)
    assert not any(x[0, :, 3:].any() for x in found[1:])


@pytest.mark.parametrize("pattern", [sr.Full(), sr.Causal(), sr.SlidingWindow(3)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_no_tokens(q_len, kv_len, pattern):
    args = inputs(Case(2, 2, 1, q_len, kv_len, 8, 8))
    out, lse = attend(args, pattern, backend="sdpa", q_start=0)
    assert not out.any() and (lse == -torch.inf).all()
    assert [x.shape for x in gradients((out, lse), args)] == [x.shape for x in args]


def test_a_form_is_told_by_distances():
    def form(pattern: sr.Pattern, q_len: int, kv_len: int, q_start: int | None = None):
        return sdpa.form(pattern, Frame.build(q_len, kv_len, 2, 2, q_start))

    long = 5000
    assert form(sr.Full(), 7, long) == form(sr.Causal(), 1, long) == "full"
    assert form(sr.Causal(), long, long) == form(sr.Causal(), long, 9000, 0) == "causal"
    assert form(sr.Causal(), long, 9000) is None  # from the middle on: no aligned ends
    window = sr.SlidingWindow(long - 1)
    assert form(window, long, long) == "causal"
    assert form(sr.Causal() & (window | sr.GlobalTokens(4)), long, long) == "causal"
    assert form(window | sr.GlobalTokens(4), long, long) is None
    assert form(sr.SlidingWindow(long - 2), long, long) is None
    assert form(sr.SlidingWindow(None, None, 2), long, long) is None
    assert form(sr.Causal() + sr.Causal(), 8, 8) is None
    assert form(sr.SlidingWindow(5), 1024, 1024) == "masked"


@pytest.mark.parametrize("name", PATTERNS)
def test_every_small_mask_runs_or_is_refused_as_a_mixture(name):
    case = Case(2, 4, 2, 33, 33, 8, 8)
    args, pattern = inputs(case), PATTERNS[name](case)
    if len(pattern.branches) > 1:
        with pytest.raises(NotImplementedError, match="sdpa: it counts each pair once"):
            attend(args, pattern, backend="sdpa")
        return
    exact = attend(args, pattern, backend="reference")
    assert_same_attention(attend(args, pattern, backend="sdpa"), exact, args)


def test_it_says_what_it_cannot():
    args = inputs(Case(1, 2, 2, 2000, 2000, 4, 4), torch.float32, False)
    told = "neither full nor causal from the first token on, and 2000 x 2000 pairs"
    with pytest.raises(NotImplementedError, match=told):
        attend(args, sr.SlidingWindow(5), backend="sdpa")
    assert told in sr.explain(*args, sr.SlidingWindow(5))
    assert "sdpa: usable" in sr.explain(*args, sr.Causal())
    with pytest.raises(NotImplementedError, match="sdpa: it has no softcap"):
        attend(args, sr.Causal(), backend="sdpa", softcap=2.0)
    narrow = args[0], args[1], args[2][..., :2]
    with pytest.raises(NotImplementedError, match="one head dim"):
        attend(narrow, sr.Causal(), backend="sdpa")
    assert not BACKENDS["sdpa"].runs_any_layout  # which rings ask
    cache = KVCache(sr.Causal(), 1, 2, 4)
    with pytest.raises(NotImplementedError, match="sdpa: it runs whole patterns"):
        for part in (slice(4), slice(4, 5), slice(5, 6)):
            cache.attend(*(x[:, :, part] for x in args), backend="sdpa")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_channels_every_score_is_0_and_another_backend_says_so(dtype):
    args = [torch.ones(1, 2, 5, 0, dtype=dtype)] * 3
    _, lse = attend(args, sr.Causal(), scale=1.0)
    assert_close(lse, torch.arange(1.0, 6.0, dtype=dtype).log().expand(1, 2, 5), 1e-6)
    with pytest.raises(NotImplementedError, match="head dim of at least 1"):
        attend(args, sr.Causal(), scale=1.0, backend="sdpa")


# The choice between it and tiles


@pytest.fixture
def no_compiled_kernel(monkeypatch):
    cannot = BACKENDS["cpu"]._replace(reasons=lambda *_: ["no compiler"])
    monkeypatch.setitem(BACKENDS, "cpu", cannot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("no_compiled_kernel")
def test_it_runs_unnamed_where_it_is_cheaper_and_changes_nothing_but_the_last_bits(dtype):
    bound = 1e-12 if dtype == torch.float64 else 3e-6
    patterns = (sr.Full(), sr.Causal(), sr.SlidingWindow(200), sr.SlidingWindow(5))
    for pattern, dense in zip(patterns, (True, True, True, False), strict=True):
        args = inputs(Case(1, 4, 2, 600, 600, 16, 16), dtype)
        runs = sr.explain(*args, pattern).split(",")[0]
        assert runs == ("runs: sdpa" if dense else "runs: gather")
        found, exact = attend(args, pattern), attend(args, pattern, backend="gather")
        named = attend(args, pattern, backend="sdpa" if dense else "gather")
        assert torch.equal(found[0], named[0]) and torch.equal(found[1], named[1])
        both = (gradients(x, args) for x in (found, exact))
        for a, b in zip((*found, *next(both)), (*exact, *next(both)), strict=True):
            assert_close(a, b, bound)
        with torch.no_grad():  # a call like one before
            again = [attend([x.detach() for x in args], pattern)[0] for _ in range(3)]
        assert all(torch.equal(x, found[0]) for x in again)


@pytest.mark.usefixtures("no_compiled_kernel")
def test_a_compiled_call_a_named_block_size_and_a_ring_choose_as_they_should():
    args = inputs(Case(1, 2, 2, 64, 64, 16, 16), torch.float32, False)
    named = {x: sr.attention(*args, sr.Causal(), backend=x) for x in ("sdpa", "gather")}
    assert not torch.equal(named["sdpa"], named["gather"])  # else nothing is shown
    compiled = torch.compile(sr.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*args, sr.Causal()), named["sdpa"])
    assert torch.equal(sr.attention(*args, sr.Causal(), block_size=64), named["gather"])
    assert "runs: gather, blocks of 64" in sr.explain(*args, sr.Causal(), block_size=64)
    assert_close(simulate_ring(*args, sr.Causal(), world_size=2), named["gather"], 3e-6)


def test_the_compiled_kernel_is_never_exchanged():
    frame = Frame.build(64, 64, 2, 2, None)
    cpu = torch.device("cpu")
    assert choice.prefers_dense("gather", sr.Causal(), frame, cpu)
    assert not choice.prefers_dense("cpu", sr.Causal(), frame, cpu)
    assert not choice.prefers_dense("triton", sr.Causal(), frame, torch.device("cuda"))
