"""The layout of a sequence's last query, taken from that of a page of them."""

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import PATTERNS, Case, assert_close

import sparsering as sr
from sparsering.kernels.triton import walk as triton_walk
from sparsering.layouts.cache import layout_cache
from sparsering.layouts.last_query import PAGE, last_query_layout
from sparsering.patterns.algebra import Frame

CASE = Case(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8)
CPU = torch.device("cpu")
BY_POSITION = [
    "causal", "two-sided window", "dilated window", "global tokens", "global rows", "dilated",
    "dilated, rate not dividing", "dilated, offset of each head", "longnet",
    "longnet, every rate above 1", "longnet, offset of each head", "block window", "hierarchical",
    "union of steps", "mixture with overlap", "branch twice", "nothing",
]  # fmt: skip


@pytest.mark.parametrize("name", BY_POSITION)
def test_it_holds_the_pairs_of_the_pattern(name):
    pattern = PATTERNS[name](CASE)
    for length in (1, 2, 17, 75, 200, PAGE, PAGE + 1, PAGE + 130):
        frame = Frame(1, length, 4, 2, length - 1)
        layout, slots = last_query_layout(pattern, frame, 16, CPU)
        passes = tuple(p.from_slot(s, 16) for p, s in zip(layout.passes, slots, strict=True))
        counts = sum(
            (sr.BlockLayout(frame, 16, (p,), 0.0).to_dense() for p in passes),
            start=torch.zeros(1, 1, 1, length, dtype=torch.int64),
        )
        dense = pattern.to_dense(1, length, num_heads=4, num_kv_heads=2).long()
        assert torch.equal(counts.expand(1, 4, -1, -1)[0], dense.expand(4, -1, -1))


@pytest.mark.parametrize(("name", "backend"), thinned(2, BY_POSITION, ["cpu", "gather"]))
def test_attention_of_it_is_that_of_the_reference(name, backend):
    torch.manual_seed(0)
    pattern = PATTERNS[name](CASE)
    dtype = torch.float32 if backend == "cpu" else torch.float64
    query = torch.randn(2, 4, 1, 8, dtype=dtype)
    key, value = torch.randn(2, 2, 2, PAGE + 60, 8, dtype=dtype)
    for length in (1, 60, PAGE + 60):
        x = query, key[:, :, :length], value[:, :, :length]
        got = sr.attention(*x, pattern, backend=backend, return_lse=True)
        exact = [y.double() for y in x]
        expected = sr.attention(*exact, pattern, backend="reference", return_lse=True)
        for a, b in zip(got, expected, strict=True):
            assert_close(a.double(), b, 2e-6 if backend == "cpu" else 1e-12)


@pytest.mark.parametrize(
    "name", ["two-sided window", "longnet, offset of each head", "global rows"]
)
def test_a_walk_serves_all_queries_of_a_row(name, monkeypatch):
    """Keys behind the last one are NaN: a walk of more keys must not read them."""
    made = []
    build = triton_walk._walk
    monkeypatch.setattr(triton_walk, "_walk", lambda *x: made.append(length) or build(*x))
    pattern = PATTERNS[name](CASE)
    torch.manual_seed(0)
    query = torch.randn(1, 4, 1, 8)
    key, value = torch.randn(2, 1, 2, PAGE + 60, 8)
    for length in (PAGE + 5, PAGE + 40, PAGE + 17, PAGE + 40, PAGE + 5):
        x = [torch.full_like(y, torch.nan) for y in (key, value)]
        for to, source in zip(x, (key, value), strict=True):
            to[:, :, :length] = source[:, :, :length]
        args = query, *(y[:, :, :length] for y in x)
        got = sr.attention(*args, pattern, backend="triton", block_size=64, return_lse=True)
        exact = [y.double() for y in args]
        expected = sr.attention(*exact, pattern, backend="reference", return_lse=True)
        for a, b in zip(got, expected, strict=True):
            assert_close(a.double(), b, 2e-6)
    assert len(made) == (
        6 if "longnet" in name else 1
    )  # its segments of 32 are three rows, two passes


def test_a_page_is_laid_out_once():
    pattern = sr.LongNet((32, 64), (1, 4)) & sr.Causal()
    frames = [Frame(1, n, 4, 4, n - 1) for n in range(PAGE + 1, 2 * PAGE + 1, 50)]
    last_query_layout(pattern, frames[0], 128, CPU)
    misses = layout_cache.info().misses
    for frame in frames:
        assert last_query_layout(pattern, frame, 128, CPU) is not None
    assert layout_cache.info().misses == misses


def test_gradients_pass_through_it():
    torch.manual_seed(0)
    pattern = sr.LongNet((32, 64), (1, 4)) & sr.Causal()
    x = [torch.randn(1, 4, n, 8, requires_grad=True) for n in (1, 77, 77)]
    exact = [y.detach().double().requires_grad_() for y in x]
    sr.attention(*x, pattern, backend="cpu").sum().backward()
    sr.attention(*exact, pattern, backend="reference").sum().backward()
    for a, b in zip(x, exact, strict=True):
        assert_close(a.grad.double(), b.grad, 2e-6)


def test_what_depends_on_lengths_is_laid_out_as_it_is():
    frame = Frame(1, 64, 1, 1, 63)
    masks = (sr.RandomBlocks(0.5, 16), sr.Documents((30, 34)), sr.KeyMask(torch.ones(64) > 0))
    for pattern in (*masks, sr.Causal() & masks[0], sr.Causal() + masks[1]):
        assert last_query_layout(pattern, frame, 16, CPU) is None
    assert last_query_layout(sr.Causal(), frame._replace(q_start=62), 16, CPU) is None
    assert last_query_layout(sr.Causal(), frame._replace(q_len=2, q_start=62), 16, CPU) is None
