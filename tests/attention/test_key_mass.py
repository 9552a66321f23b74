"""Compares key masses with column sums of dense weights, for every pattern, head and extra."""

import pytest
import torch
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    dense_counts,
    dense_scores,
    dense_weights,
    inputs,
)
from oracles.extras_oracle import attend_with_extras, branches_of

import sparsering as sr
from sparsering import weights

BACKENDS = ["cpu", "gather"]


def column_sums(query, key, counts, *, lse=None, weight=1.0, scale=None):
    """[B, Hq, Nk] in float64, row by row of a dense softmax over multisets."""
    query, key = query.double(), key.double()
    if lse is None:
        shares = dense_weights(query, key, counts, scale=scale)
    else:
        shares = (dense_scores(query, key, counts, scale=scale) - lse.double()[..., None]).exp()
    return (shares * torch.as_tensor(weight, dtype=torch.float64)[..., None]).sum(2)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    choose = weights.choose
    monkeypatch.setattr(weights, "choose", lambda _, *rest: choose(request.param, *rest))
    return request.param


def drawn(case, backend):
    dtype = torch.float32 if backend == "cpu" else torch.float64
    return inputs(case, dtype, requires_grad=False)[:2], 2e-5 if backend == "cpu" else 1e-12


CASES = {
    "square": Case(batch=2, num_heads=2, num_kv_heads=2, q_len=75, kv_len=75),
    "grouped": Case(batch=2, num_heads=6, num_kv_heads=2, q_len=75, kv_len=75, block_size=None),
    "last queries": Case(batch=1, num_heads=2, num_kv_heads=1, q_len=30, kv_len=75),
}


@pytest.mark.parametrize(
    ("name", "case", "backend"),
    [
        pytest.param(name, case, backend, marks=() if fast else pytest.mark.slow)
        for i, name in enumerate(PATTERNS)
        for j, case in enumerate(CASES)
        for k, backend in enumerate(BACKENDS)
        for fast in [(i + j) % 3 == k]
    ],
    indirect=["backend"],
)
def test_column_sums_of_every_pattern(name, case, backend):
    case = CASES[case]
    pattern = PATTERNS[name](case)
    (query, key), tolerance = drawn(case, backend)
    expected = column_sums(query, key, dense_counts(pattern, case))
    got = sr.key_mass(query, key, pattern, block_size=case.block_size)
    assert_close(got.double(), expected, tolerance)
    assert got.dtype == query.dtype and not got.requires_grad
    rows = (dense_counts(pattern, case).sum(-1) > 0).sum(-1)
    assert_close(got.double().sum(-1), rows.double(), tolerance * 10, "rows with keys")


def test_kernels_of_triton_take_so_few_channels(monkeypatch):
    choose = weights.choose
    monkeypatch.setattr(weights, "choose", lambda _, *rest: choose("triton", *rest))
    case = Case(1, 4, 2, 40, 40)
    query, key, _ = inputs(case, torch.float32, requires_grad=False)
    pattern = sr.LongNet((16, 40), (1, 2))
    expected = column_sums(query, key, dense_counts(pattern, case))
    assert_close(sr.key_mass(query, key, pattern).double(), expected, 2e-5)


def test_a_given_lse_saves_the_forward_and_may_be_wider(backend, monkeypatch):
    case = CASES["grouped"]
    (query, key), tolerance = drawn(case, backend)
    wide, narrow = sr.Causal(), sr.SlidingWindow(9)
    _, lse = sr.attention(query, key, key, wide, return_lse=True)
    monkeypatch.setattr(weights, "attend", None)
    counts = dense_counts(narrow, case)
    expected = column_sums(query, key, counts, lse=lse)
    assert_close(sr.key_mass(query, key, narrow, lse).double(), expected, tolerance)
    whole = sr.key_mass(query, key, wide, lse)
    rest = sr.key_mass(query, key, sr.Causal() & sr.SlidingWindow(None), lse)
    assert_close(whole, rest, tolerance)
    assert (whole - sr.key_mass(query, key, narrow, lse)).min() > -tolerance


def test_weights_of_queries_and_single_ones(backend):
    case = CASES["grouped"]
    (query, key), tolerance = drawn(case, backend)
    pattern = sr.LongNet((16, 75), (1, 3))
    counts = dense_counts(pattern, case)
    for shape in ((2, 6, 75), (1, 6, 75), (2, 1, 75), (1, 1, 75)):
        weight = torch.rand(shape, dtype=torch.float64)
        expected = column_sums(query, key, counts, weight=weight.expand(2, 6, 75))
        got = sr.key_mass(query, key, pattern, weight=weight.float())
        assert_close(got.double(), expected, max(tolerance, 1e-6))
    first = column_sums(query[:, :, :1], key, counts[:, :, :1])
    got = sr.key_mass(query[:, :, :1], key, pattern, q_start=0)
    assert_close(got.double(), first, tolerance)


@pytest.mark.parametrize("extra", ["softcap", "distance_bias", "sink", "sink of rows", "scale"])
def test_extras_and_scale(extra, backend):
    case = CASES["grouped"]
    (query, key), tolerance = drawn(case, backend)
    pattern = sr.LongNet((16, 16, 75), (1, 1, 4)) & sr.Causal()
    options = {
        "softcap": {"softcap": 0.7},
        "distance_bias": {"distance_bias": torch.randn(6, 21, dtype=query.dtype)},
        "sink": {"sink": torch.randn(6, dtype=query.dtype)},
        "sink of rows": {"sink": torch.randn(1, 6, 75, dtype=query.dtype)},
        "scale": {"scale": -1.3},
    }[extra]
    branches = branches_of(pattern, 2, **case.heads)
    ones = torch.ones(2, 2, 75, 1, dtype=torch.float64)
    value = torch.eye(75, dtype=torch.float64).expand(2, 2, 75, 75)  # out is the weights
    dense, _ = attend_with_extras(query, key, value, branches, q_start=0, **options)
    got = sr.key_mass(query, key, pattern, **options)
    assert_close(got.double(), dense.sum(2), tolerance)
    total, lse = sr.attention(query, key, ones.to(query), pattern, **options, return_lse=True)
    assert_close(got.sum(-1), total.sum((2, 3)), 20 * tolerance)
    if "sink" not in extra:
        again = sr.key_mass(query, key, pattern, lse, **options)
    else:
        again = sr.key_mass(query, key, pattern, lse)  # which has it
    assert_close(again, got, tolerance)


def test_block_bias(backend):
    case = CASES["square"]
    (query, key), tolerance = drawn(case, backend)
    pattern = sr.LongNet((16, 75), (1, 2))
    blocks = pattern.layout(75, num_heads=2, block_size=16).num_blocks
    bias = torch.randn(1, 2, blocks, dtype=query.dtype)
    options = {"block_size": 16, "block_bias": bias}
    dense = sr.attention_weights(query, key, pattern, **options).to_dense()
    assert_close(sr.key_mass(query, key, pattern, **options), dense.sum(2), tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    query, key = torch.randn(2, 1, 2, 1500, 16).to(dtype)
    pattern = sr.LongNet((64, 2000), (1, 2))
    case = Case(1, 2, 2, 1500, 1500)
    expected = column_sums(query, key, dense_counts(pattern, case))
    for lse in (None, sr.attention(query, key, key, pattern, return_lse=True)[1]):
        got = sr.key_mass(query, key, pattern, lse)
        assert got.dtype == torch.float32
        assert_close(got.double(), expected, 2e-5)
    with torch.autocast("cpu", dtype):
        got = sr.key_mass(query.float(), key.float(), pattern)
    assert got.dtype == torch.float32
    assert_close(got.double(), expected, 2e-5)


def test_nothing_is_recorded_and_inputs_that_learn_are_taken():
    query, key, _ = inputs(CASES["square"])
    lse = sr.attention(query, key, key, sr.Causal(), return_lse=True)[1]
    for given in (None, lse):
        assert not sr.key_mass(query, key, sr.Causal(), given).requires_grad


@pytest.mark.parametrize(
    ("shape", "kv_shape"),
    [
        ((0, 2, 5, 8), (0, 1, 5, 8)),
        ((1, 2, 0, 8), (1, 2, 7, 8)),
        ((1, 2, 5, 8), (1, 2, 0, 8)),
        ((1, 0, 5, 8), (1, 0, 5, 8)),
        ((1, 2, 1, 8), (1, 1, 1, 8)),
    ],
)
def test_nothing_and_one(shape, kv_shape):
    query, key = torch.randn(shape), torch.randn(kv_shape)
    mass = sr.key_mass(query, key, sr.Full())
    assert mass.shape == (*shape[:2], kv_shape[2])
    expected = torch.ones_like(mass) if shape[2] == 1 else torch.zeros_like(mass)
    torch.testing.assert_close(mass, expected, rtol=2e-7, atol=0)


def test_columns_of_nan_keys_that_nobody_sees_are_zero():
    query, key = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    key[:, :, 33:] = torch.nan
    mass = sr.key_mass(query, key, sr.Full() & sr.KeyPadding((33,)))
    assert not mass[..., 33:].any()
    expected = sr.key_mass(query, key[:, :, :33], sr.Full(), q_start=0)
    assert_close(mass[..., :33], expected, 1e-5)


LSE = torch.zeros(2, 2, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lse": LSE, "sink": torch.zeros(2)}, "sink or lse"),
        ({"lse": LSE[:1]}, "lse must be"),
        ({"lse": LSE[..., :8]}, "lse must be"),
        ({"lse": LSE[0]}, "lse must be"),
        ({"lse": LSE.long()}, "lse must be"),
        ({"lse": "lse"}, "lse must be"),
        ({"lse": LSE.to("meta")}, "lse must be"),
        ({"weight": torch.ones(3, 1, 9)}, "weight must be"),
        ({"weight": torch.ones(9)}, "weight must be"),
        ({"weight": torch.ones(1, 1, 1)}, "weight must be"),
        ({"key": torch.zeros(2, 2, 9, 7)}, "must agree"),
        ({"dropout_p": 0.1}, "takes no dropout_p"),
    ],
    ids=[
        *("lse and sink", "lse of a batch entry", "lse of 8 rows", "lse without a batch"),
        *("lse of integers", "a text", "lse without numbers"),
        *("weights of 3 entries", "weights without heads", "weights of a row"),
        *("narrow keys", "dropout"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    query, key = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    with pytest.raises(ValueError, match=message):
        sr.key_mass(**{"query": query, "key": key, "pattern": sr.Full(), **options})


def test_what_is_no_pattern_is_refused():
    query, key = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    with pytest.raises(TypeError, match="pattern"):
        sr.key_mass(query, key, "Full()")
