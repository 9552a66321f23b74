"""With SPARSERING_CHECK=1, lists with numbers that are no key are refused on every route."""

import pytest
import torch
from torch import Tensor

import sparsering as sr
from sparsering.distributed import simulate_ring
from sparsering.selection import block_mass

TOKENS = 96


def in_cache(x: Tensor, pattern: sr.Pattern) -> None:
    cache = sr.KVCache(pattern & sr.Causal(), 1, 2, 16, max_length=TOKENS)
    for part in x.split(32, 2):
        cache.attend(part, part, part)


def compiled(x: Tensor, pattern: sr.Pattern) -> None:
    torch.compile(lambda x: sr.attention(x, x, x, pattern), backend="eager")(x)


def with_gradients(x: Tensor, pattern: sr.Pattern) -> None:
    sr.attention(x.clone().requires_grad_(), x, x, pattern).sum().backward()


ROUTES = {
    "attention": lambda x, pattern: sr.attention(x, x, x, pattern),
    "gather": lambda x, pattern: sr.attention(x, x, x, pattern, backend="gather"),
    "reference": lambda x, pattern: sr.attention(x, x, x, pattern, backend="reference"),
    "beside a window": lambda x, pattern: sr.attention(x, x, x, pattern | sr.SlidingWindow(3)),
    "gradients": with_gradients,
    "a layout": lambda x, pattern: pattern.layout(TOKENS),
    "a ring": lambda x, pattern: simulate_ring(x, x, x, pattern, world_size=2),
    "the mass of blocks": lambda x, pattern: block_mass(x, x, pattern),
    "a cache": in_cache,
    "a graph": compiled,
}


def listed(size: int, wrong: int | None, row: int = 5) -> sr.SelectedBlocks:
    """Each query's own block and the first; -1 in a slot; `wrong` in slot 1 of a row."""
    rows = TOKENS // size
    indices = torch.stack((torch.arange(rows), torch.zeros(rows, dtype=torch.int64)), 1)
    indices[3, 1] = -1
    if wrong is not None:
        indices[row, 1] = wrong
    return sr.SelectedBlocks(indices, size)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", [1, 16])
def test_a_number_that_is_no_key_is_named(route, size, monkeypatch):
    x, blocks = torch.randn(1, 2, TOKENS, 16), TOKENS // size
    for wrong in (blocks, -2):
        ROUTES[route](x, listed(size, wrong))  # ignored
    monkeypatch.setenv("SPARSERING_CHECK", "1")
    ROUTES[route](x, listed(size, None))
    torch._dynamo.reset()
    for wrong in (blocks, -2):
        told = rf"from 0 to .* or -1 for none, got {wrong} in row 5, slot 1; without SPARSERING"
        with pytest.raises(ValueError, match=told):
            ROUTES[route](x, listed(size, wrong))


def test_rows_of_other_queries_may_list_what_comes_later(monkeypatch):
    monkeypatch.setenv("SPARSERING_CHECK", "1")
    x = torch.randn(1, 2, TOKENS, 16)
    pattern = listed(1, TOKENS + 7, row=60)
    sr.attention(x[:, :, :60], x, x, pattern, q_start=0)
    with pytest.raises(ValueError, match="got 103 in row 60, slot 1"):
        sr.attention(x[:, :, 60:], x, x, pattern, q_start=60)
