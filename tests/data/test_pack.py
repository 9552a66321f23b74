"""Packing: every token stands once, rows are filled by best fit and lose what documents lose."""

from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader, DistributedSampler

import sparsering as sr
from sparsering.data import pack
from sparsering.models import LongNetLM


def best_fit(sizes: list[int], length: int) -> list[list[int]]:
    """Puts each size into the fullest row with room for it, the first of equals, else a new row."""
    rows: list[list[int]] = []
    for size in sizes:
        fitting = [(length - sum(x), i) for i, x in enumerate(rows) if sum(x) + size <= length]
        if not fitting:
            rows.append([])
        rows[min(fitting)[1] if fitting else -1].append(size)
    return rows


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=30), max_size=12), st.integers(1, 20)
)
def test_every_token_stands_once_in_the_fullest_row_that_fits(texts, length):
    rows = pack(texts, length, pad_token=-7)
    pieces = [
        (i, x[at : at + length]) for i, x in enumerate(texts) for at in range(0, len(x), length)
    ]
    placed, sizes_of_rows = [], []
    for row, numbers in enumerate(rows.documents):
        sizes = rows.lengths[row].tolist()
        used = [n for n in sizes if n]
        assert sizes == used + [0] * (len(sizes) - len(used))
        assert sum(used) == length
        assert len(used) - len(numbers) in (0, 1)
        parts = [part.tolist() for part in rows.tokens[row].split(used)]
        placed += list(zip(numbers, parts, strict=False))
        sizes_of_rows.append(used[: len(numbers)])
        assert all(set(part) == {-7} for part in parts[len(numbers) :])
        assert rows.position_ids[row].tolist() == [i for n in used for i in range(n)]
        labels = [x for part in parts[: len(numbers)] for x in (-100, *part[1:])]
        assert rows.labels[row].tolist() == labels + [-100] * (length - len(labels))
    assert sorted(placed) == sorted(pieces)
    assert sizes_of_rows == best_fit([len(piece) for _, piece in pieces], length)
    assert rows.lengths.shape[1] == max((len(x) for x in rows.lengths.tolist()), default=0)
    assert rows.cut == sum(len(text) > length for text in texts)


def test_a_seed_decides_the_order():
    texts = [torch.arange(1, n + 2) for n in range(30)]
    first, again, other = (pack(texts, 40, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    assert sorted(x for row in other.documents for x in row) == list(range(30))


def test_ranks_read_disjoint_rows_by_torchs_own_loader():
    rows = pack([[i + 1] * 3 for i in range(16)], 6)
    seen = []
    for rank in range(2):
        loader = DataLoader(rows, 2, sampler=DistributedSampler(rows, 2, rank, seed=5))  # type: ignore[arg-type]
        for batch in loader:
            assert batch["lengths"].tolist() == [[3, 3]] * 2
            seen += batch["input_ids"].flatten().tolist()
    assert sorted(seen) == sorted([i + 1 for i in range(16)] * 3)


@pytest.mark.parametrize("inner", [sr.Causal(), sr.LongNet((8, 16), (1, 2)) & sr.Causal()])
def test_a_row_loses_what_its_documents_lose_alone(inner):
    torch.manual_seed(0)
    model = LongNetLM(inner, width=32, num_layers=2).double()
    for block in model.blocks:  # fresh blocks add nothing, so no loss would depend on attention
        torch.nn.init.normal_(block.out.weight, std=0.3)
        torch.nn.init.normal_(block.down.weight, std=0.1)
    texts = [torch.randint(1, 256, (n,)) for n in (40, 5, 1, 17, 30, 12)]
    rows = pack(texts, 48)

    def loss(tokens: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        hidden = model.hidden(tokens[None], **options)[0, :-1]
        logits = hidden @ model.embedding.weight.T
        return torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")

    def loss_of_row(row: dict[str, torch.Tensor], packed: bool = True) -> torch.Tensor:
        pattern = sr.Packed(row["lengths"], model.pattern) if packed else model.pattern
        attend, positions = partial(sr.attention, pattern=pattern), row["position_ids"]
        return loss(row["input_ids"], row["labels"], attend=attend, positions=positions)

    packed = torch.stack([loss_of_row(row) for row in rows]).sum()
    alone = torch.stack([loss(text, text) for text in texts if len(text) > 1]).sum()
    weights = list(model.parameters())
    grads, wanted = (torch.autograd.grad(x, weights) for x in (packed, alone))
    assert torch.allclose(packed, alone, rtol=1e-10, atol=0)
    mixed = torch.stack([loss_of_row(row, packed=False) for row in rows]).sum()
    assert not torch.allclose(mixed, alone, rtol=1e-6, atol=0)  # documents that see each other
    for grad, expected in zip(grads, wanted, strict=True):
        assert torch.allclose(grad, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("texts", "got"),
    [
        ([[1], [1.5]], r"torch.float32 \(1,\) for document 1"),
        ([[1], []], r"torch.float32 \(0,\) for document 1"),
        (["abc"], "'abc' for document 0"),
        ([[True]], r"torch.bool \(1,\)"),
        ([torch.ones(2, 2, dtype=torch.int64)], r"torch.int64 \(2, 2\)"),
        ([5], "got 5"),
    ],
)
def test_documents_that_are_none(texts, got):
    with pytest.raises(ValueError, match=f"lists of ints or 1-D integer tensors, .*{got}"):
        pack(texts, 4)


def test_no_documents_and_no_length():
    assert len(pack([], 4)) == 0
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        pack([[1]], 0)


@pytest.mark.parametrize("seed", [-1, 2.0, True, "1"])
def test_a_seed_that_is_none(seed):
    with pytest.raises((TypeError, ValueError), match="seed must be"):
        pack([[1]], 4, seed=seed)
