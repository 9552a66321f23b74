"""Attention over nodes as anemoi's classes ask for it; `beside_anemoi.py` runs it inside them."""

import sys

import pytest
import torch
from torch import Tensor

from sparsering.integrations import anemoi
from sparsering.integrations.anemoi import NodeAttention

SIZES = {"equal": (40, 40), "more queries": (40, 25), "more keys": (25, 40)}
WINDOWS = {
    "none": (None, None, None),
    "no bound": (-1, None, None),
    "one number": (6, 6, 6),
    "two numbers": ((3, 9), 3, 9),
    "one side": ((-1, 4), None, 4),
}


def dense(
    query: Tensor, key: Tensor, value: Tensor, sides: tuple, offset: int, cap: float, slopes: Tensor
) -> Tensor:
    """Softmax over all pairs: capped scores, ALiBi by distance, then the window."""
    distance = torch.arange(query.shape[2])[:, None] + offset - torch.arange(key.shape[2])
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    scores = scores - slopes[:, None, None] * distance.abs()
    left, right = sides
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance <= left
    if right is not None:
        seen &= -distance <= right
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.nan_to_num(0.0) @ value  # 0 without any key


@pytest.mark.parametrize("options", ["plain", "cap and slopes"])
@pytest.mark.parametrize("aligned_ends", [False, True], ids=["as sdpa", "as flash"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_and_options_are_those_of_dense_softmax(window, sizes, aligned_ends, options):
    num_queries, num_keys = SIZES[sizes]
    asked, *sides = WINDOWS[window]
    query, key, value = (
        torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True)
        for n in (num_queries, num_keys, num_keys)
    )
    cap, slopes = (0.0, None) if options == "plain" else (2.0, torch.tensor([0.5, 0.1, 0.02]))
    module = NodeAttention((torch.nn.Identity(), False), aligned_ends)
    ours = module(query, key, value, 2, window_size=asked, softcap=cap, alibi_slopes=slopes)
    offset = num_keys - num_queries if aligned_ends else 0
    drop = torch.zeros(3) if slopes is None else slopes
    right = dense(query, key, value, tuple(sides), offset, cap, drop)
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)
    direction = torch.randn_like(right)
    found, expected = (
        torch.autograd.grad(x, (query, key, value), direction) for x in (ours, right)
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


def test_dropout_drops_its_share():
    value = torch.eye(64).expand(1, 1, -1, -1)
    query = torch.zeros(1, 1, 64, 8)
    out = NodeAttention((torch.nn.Identity(), False), False)(query, query, value, 1, dropout_p=0.25)
    kept = out != 0  # weights are 1 / 64, those that are kept a third more
    assert kept.float().mean() == pytest.approx(0.75, abs=0.03)
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 48))


def test_without_the_package_an_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "anemoi", None)
    with pytest.raises(ImportError, match=r"needs anemoi-models 0\.19; see docs/adapters\.md"):
        anemoi.use(torch.nn.Linear(2, 2))
