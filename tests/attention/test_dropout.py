"""Tests which weights dropout keeps: the formula, its statistics, and that nothing else decides."""

import math

import pytest
import torch
from oracles.attention_oracle import assert_close
from oracles.extras_oracle import kept_by_formula

import sparsering as sr


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.999, 1 - 2**-40])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_it_is_the_formula_in_integers(seed: int, p: float):
    places = [(0, 0, 0, 0, 0), (3, 7, 12345, 678, 2), (1, 0, 2**31, 2**32 + 5, 0), (0, 5, -3, 9, 1)]
    got = [sr.dropout_kept(seed, p, *place).item() for place in places]
    assert got == [kept_by_formula(seed, p, *place) for place in places]
    assert got == [sr.dropout_kept(torch.tensor(seed), p, *place).item() for place in places]


def test_it_broadcasts_ints_and_tensors():
    query, key = torch.arange(9)[:, None], torch.arange(11)
    branch = torch.arange(3)[:, None, None]
    kept = sr.dropout_kept(4, 0.4, 1, 2, query, key, branch)
    assert kept.shape == (3, 9, 11) and kept.dtype == torch.bool
    for b, q, k in ((0, 0, 0), (2, 8, 10), (1, 4, 7)):
        assert kept[b, q, k].item() == kept_by_formula(4, 0.4, 1, 2, q, k, b)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rows_columns_and_diagonals_drop_their_share(p: float):
    """Chi-square of each, normal for so many: within 5 standard deviations of what it should be."""
    n = 2048
    dropped = ~sr.dropout_kept(5, p, 0, 0, torch.arange(n)[:, None], torch.arange(n))
    turned = torch.stack([row.roll(-i) for i, row in enumerate(dropped)])
    for counts in (dropped.sum(1), dropped.sum(0), turned.sum(0)):
        chi_square = ((counts - n * p) ** 2 / (n * p * (1 - p))).sum().item()
        assert abs(chi_square - n) / math.sqrt(2 * n) < 5


LAGS = [(0, 1), (0, 2), (0, 3), (0, 16), (0, 64), (0, 128), (0, 1024), (0, 1536), (1, 0), (2, 0),
        (64, 0), (1, 1), (1, -1), (16, 16)]  # fmt: skip


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p: float):
    """Covariance of pairs at a distance: none, also where each row's own is squared."""
    n = 2048
    x = (~sr.dropout_kept(6, p, 1, 3, torch.arange(n)[:, None], torch.arange(n))).double() - p
    for rows, keys in LAGS:
        left, right = x[: n - rows], x[rows:]
        left, right = (left[:, : n - keys], right[:, keys:]) if keys >= 0 else (
            left[:, -keys:], right[:, :keys])  # fmt: skip
        products = (left * right).sum(1) / (p * (1 - p))
        size = left.shape[1]
        assert abs(products.sum().item()) / math.sqrt(left.numel()) < 5, (rows, keys)
        squares = (products**2 / size).sum().item()  # chi-square of the rows' own covariances
        assert abs(squares - len(products)) / math.sqrt(2 * len(products)) < 6, (rows, keys)


def test_seeds_entries_heads_and_branches_are_independent():
    n, p = 512, 0.3
    places = {"seed": (8, 0, 0, 0), "entry": (7, 1, 0, 0), "head": (7, 0, 1, 0),
              "branch": (7, 0, 0, 1)}  # fmt: skip
    query, key = torch.arange(n)[:, None], torch.arange(n)
    x = sr.dropout_kept(7, p, 0, 0, query, key).double() - (1 - p)
    for what, (seed, entry, head, branch) in places.items():
        y = sr.dropout_kept(seed, p, entry, head, query, key, branch).double() - (1 - p)
        assert abs((x * y).sum().item()) / (n * p * (1 - p)) < 5, what


def weights_of(**options) -> torch.Tensor:
    """[B, H, N, N] what each key adds to each query, of one-hot values."""
    n = 64
    query, key = torch.zeros(2, 3, n, 16), torch.zeros(2, 3, n, 16)
    value = torch.eye(n).expand(2, 3, n, n)
    pattern = options.pop("pattern", sr.Full())
    return sr.attention(query, key, value, pattern, **options)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_what_is_kept_depends_on_no_backend_or_block(backend: str, block_size: int):
    weights = weights_of(dropout_p=0.4, dropout_seed=9, backend=backend, block_size=block_size)
    places = torch.arange(64)
    for b in range(2):
        for h in range(3):
            kept = sr.dropout_kept(9, 0.4, b, h, places[:, None], places)
            assert_close(weights[b, h], kept / 64 / 0.6, 1e-6)


def test_the_default_seed_is_drawn_once_per_call_from_torch():
    torch.manual_seed(3)
    first, second = (weights_of(dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(weights_of(dropout_p=0.5), first)
    assert not torch.equal(first, second)
    before = torch.get_rng_state()
    weights_of()
    weights_of(dropout_p=0.5, dropout_seed=1)
    assert torch.equal(torch.get_rng_state(), before)  # nothing drawn where none is wanted


def test_nothing_dropped_is_the_call_without():
    assert torch.equal(weights_of(dropout_p=0.0, dropout_seed=5), weights_of())


@pytest.mark.parametrize("p", [1.0, -0.1, math.nan, True, "0.1", torch.tensor(0.1), 10**400])
def test_a_share_out_of_range_is_told(p):
    with pytest.raises(ValueError, match="0 <= p < 1"):
        sr.dropout_kept(0, p, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="0 <= p < 1"):
        weights_of(dropout_p=p)


@pytest.mark.parametrize("seed", [1.5, True, 2**63, torch.tensor(1.0), torch.tensor([1, 2]), "x"])
def test_a_seed_that_is_none_is_told(seed):
    with pytest.raises(ValueError, match="dropout_seed must be"):
        weights_of(dropout_p=0.1, dropout_seed=seed)


def test_places_that_are_no_ints_are_told():
    with pytest.raises(ValueError, match="query_positions must be an int"):
        sr.dropout_kept(0, 0.1, 0, 0, torch.zeros(3), 0)
