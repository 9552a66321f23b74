"""Lists with numbers that are no key: refused, counted by `explain`, or ignored."""

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
    ROUTES[route](x, listed(size, blocks))  # ignored
    monkeypatch.setenv("SPARSERING_CHECK", "1")
    ROUTES[route](x, listed(size, None))
    torch._dynamo.reset()
    of = "96 keys" if size == 1 else "the 6 blocks of 16 in 96 keys"
    told = (
        f"from 0 to {blocks - 1}, of {of}, or -1 for none, got {blocks} in row 5, slot 1; without"
    )
    with pytest.raises(ValueError, match=told):
        ROUTES[route](x, listed(size, blocks))


def test_rows_of_other_queries_may_list_what_comes_later(monkeypatch):
    monkeypatch.setenv("SPARSERING_CHECK", "1")
    x = torch.randn(1, 2, TOKENS, 16)
    pattern = listed(1, TOKENS + 7, row=60)
    sr.attention(x[:, :, :60], x, x, pattern, q_start=0)
    with pytest.raises(ValueError, match="got 103 in row 60, slot 1"):
        sr.attention(x[:, :, 60:], x, x, pattern, q_start=60)


def test_the_batch_entry_and_the_head_are_named(monkeypatch):
    """The kernel reads the lists of a head and a batch entry from their own rows."""
    indices = torch.zeros(2, 2, TOKENS, 3, dtype=torch.int64)
    indices[1, 0, 7, 2], indices[1, 1, 90] = 300, 96
    x = torch.randn(2, 2, TOKENS, 16)
    monkeypatch.setenv("SPARSERING_CHECK", "1")
    told = "got 300 in batch entry 1, head 0, row 7, slot 2, and 3 more slots; without"
    with pytest.raises(ValueError, match=told):
        sr.attention(x, x, x, sr.SelectedBlocks(indices, 1))


def test_a_negative_number_other_than_minus_one_is_refused_when_lists_are_made():
    indices = torch.zeros(2, TOKENS, 3, dtype=torch.int64)
    indices[1, 7] = torch.tensor([-1, -2, -7])
    told = r"from 0 on, or -1 for none, got -2 in head 1, row 7, slot 1, and 1 more slots; .*clamp"
    with pytest.raises(ValueError, match=told):
        sr.SelectedBlocks(indices, 1)
    assert int(sr.SelectedBlocks(indices.clamp(min=-1), 1).indices.min()) == -1
    sr.SelectedBlocks(indices[:, :0], 1)


def explained(x: Tensor, pattern: sr.Pattern) -> list[str]:
    lines = sr.explain(x, x, x, pattern).splitlines()
    return [line for line in lines if "that adds nothing" in line]


@pytest.mark.parametrize("size", [1, 16])
def test_explain_counts_slots_of_keys_that_do_not_exist(size):
    x, blocks = torch.randn(1, 2, TOKENS, 16), TOKENS // size
    for pattern in (listed(size, None), listed(size, None) & sr.Causal(), sr.Causal()):
        assert explained(x, pattern) == []
    indices = listed(size, 3 * blocks).indices
    indices[3:5, 1] = blocks
    pattern = sr.SelectedBlocks(indices, size)
    for joined in (pattern, pattern & sr.Causal(), sr.SlidingWindow(3) | pattern):
        (line,) = explained(x, joined)
        assert f"got {blocks} in row 3, slot 1, and 2 more slots" in line


def test_lists_in_documents_are_held_to_the_keys_of_each_document(monkeypatch):
    """A list of places in a document of 40 tokens names key 50, which one of 56 has."""
    indices = torch.zeros(TOKENS, 2, dtype=torch.int64)
    indices[39, 1], indices[55, 0] = 50, 56
    pattern, x = sr.Packed((40, 56), sr.SelectedBlocks(indices, 1)), torch.randn(1, 2, TOKENS, 16)
    found = sorted(explained(x, pattern))
    assert [line.split(": ")[2].split(";")[0] for line in found] == [
        "got 50 in row 39, slot 1",
        "got 56 in row 55, slot 0",
    ]
    assert "0 to 39, of 40 keys" in found[0] and "0 to 55, of 56 keys" in found[1]
    monkeypatch.setenv("SPARSERING_CHECK", "1")
    with pytest.raises(ValueError, match="without SPARSERING_CHECK=1"):
        sr.attention(x, x, x, pattern)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_lists_made_in_a_graph_are_refused_as_outside(fullgraph):
    """While a graph is traced nobody knows the numbers; its operator looks at them."""

    def attend(x: Tensor, indices: Tensor) -> Tensor:
        return sr.attention(x, x, x, sr.SelectedBlocks(indices, 1))

    x, indices = torch.randn(1, 2, TOKENS, 16), listed(1, None).indices
    compiled = torch.compile(attend, backend="eager", fullgraph=fullgraph)
    torch.testing.assert_close(compiled(x, indices), attend(x, indices))
    indices[5, 1] = -2
    with pytest.raises(ValueError, match="got -2 in row 5, slot 1"):
        compiled(x, indices)
