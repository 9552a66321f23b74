"""Documents from ids, positions and cumulative lengths, against loops and plain lengths."""

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import sparsering as sr
from sparsering.patterns.expression import parse

INNER = sr.SlidingWindow(3)


def rows(seed: int, batch: int | None, n: int = 24, most: int = 6) -> list[list[int]]:
    """Lengths of documents of each row, none of them 0, at most `most`."""
    numbers = random.Random(seed)
    found = []
    for _ in range(1 if batch is None else batch):
        cuts = sorted(numbers.sample(range(1, n), numbers.randint(0, most - 1)))
        found.append([b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)])
    return found


def ids_of(lengths: list[int], seed: int = 0) -> list[int]:
    """Ids in which neighbours differ; one may come back."""
    names = random.Random(seed).choices([(-1, 7), (0, 1), (5, 4), (10**12, -(10**12))])[0]
    return [names[i % 2] for i, length in enumerate(lengths) for _ in range(length)]


def positions_of(lengths: list[int]) -> list[int]:
    return [i for length in lengths for i in range(length)]


def given(form: str, lengths: list[list[int]], batched: bool, dtype: torch.dtype) -> Tensor:
    if form == "cu_seqlens":
        return torch.tensor([0, *lengths[0]]).cumsum(0).to(dtype)
    made = [ids_of(x, 1) if form == "ids" else positions_of(x) for x in lengths]
    return torch.tensor(made if batched else made[0], dtype=torch.int64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch", [None, 1, 3])
@pytest.mark.parametrize("form", ["ids", "positions", "cu_seqlens"])
def test_equal_by_value_to_the_lengths(form, batch, dtype):
    if form == "cu_seqlens" and batch is not None:
        with pytest.raises(ValueError, match=r"int32 or int64 tensor \[n \+ 1\], got"):
            sr.Documents.from_cu_seqlens(torch.zeros(2, 3, dtype=dtype))
        return
    for seed in range(20):
        lengths = rows(seed, batch)
        numbers = given(form, lengths, batch is not None, dtype)
        for most in (None, 6) if form != "cu_seqlens" else (None,):
            wide = [(*x, *(0,) * ((most or 0) - len(x))) for x in lengths]
            plain: Any = wide[0] if batch is None else tuple(wide)
            options = {} if most is None else {"most": most}
            made = getattr(sr.Documents, f"from_{form}")(numbers, **options)
            packed = getattr(sr.Packed, f"from_{form}")(numbers, INNER, **options)
            for found, same in ((made, sr.Documents(plain)), (packed, sr.Packed(plain, INNER))):
                assert found == same and hash(found) == hash(same) and repr(found) == repr(same)
                assert parse(repr(found)) == same
                for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
                    assert other == same and other.num_batches() == batch
                found & sr.Causal(), found + sr.Causal()  # their texts can be joined
            mixture = getattr(sr.Packed, f"from_{form}")(
                numbers, sr.LongNet((4, 8), (1, 2)), **options
            )
            assert mixture == sr.Packed(plain, sr.LongNet((4, 8), (1, 2)))


def test_pairs_are_those_of_a_loop():
    ids = torch.tensor([[3, 3, -1, -1, -1, 3, 0], [5, 5, 5, 5, 5, 5, 5]])
    expected = torch.zeros(2, 7, 7, dtype=torch.bool)
    for b, p, k in ((b, p, k) for b in range(2) for p in range(7) for k in range(7)):
        low, high = min(p, k), max(p, k)
        expected[b, p, k] = all(ids[b, x] == ids[b, p] for x in range(low, high + 1))
    assert sr.Documents.from_ids(ids).to_dense(7)[:, 0].equal(expected)
    positions = torch.tensor([0, 1, 2, 2, 3, 0, 9])  # a document may begin at any position
    assert sr.Documents.from_positions(positions) == sr.Documents((3, 2, 1, 1))


def test_ids_are_copied_and_may_be_empty():
    ids = torch.tensor([1, 1, 2])
    pattern = sr.Documents.from_ids(ids)
    ids.fill_(0)
    assert pickle.loads(pickle.dumps(pattern)) == sr.Documents((2, 1))
    assert sr.Documents.from_ids(torch.zeros(0, dtype=torch.int64)) == sr.Documents(())
    assert sr.Documents.from_ids(torch.zeros(0, dtype=torch.int64), most=2) == sr.Documents((0, 0))
    assert sr.Documents.from_cu_seqlens(torch.tensor([0, 3, 3])) == sr.Documents((3, 0))


def calls(form: str, most: int | None) -> dict[str, Any]:
    options = {} if most is None else {"most": most}
    documents, packed = (getattr(x, f"from_{form}") for x in (sr.Documents, sr.Packed))
    return {
        "documents": lambda x: documents(x, **options),
        "causal": lambda x: documents(x, **options) & sr.Causal(),
        "packed": lambda x: packed(x, INNER, **options),
        "mixture": lambda x: packed(x, sr.LongNet((4, 8), (1, 2)) & sr.Causal(), **options),
    }


@pytest.mark.covering(
    1,
    keep=[
        {"form": "cu_seqlens", "most": None, "name": "packed"},
        {"form": "ids", "most": None, "name": "documents"},
    ],
)
@pytest.mark.parametrize("name", ["documents", "causal", "packed", "mixture"])
@pytest.mark.parametrize("most", [None, 6])
@pytest.mark.parametrize("form", ["ids", "positions", "cu_seqlens"])
def test_one_graph_serves_all_rows_of_a_shape(form, most, name):
    """Made inside a compiled function, and made outside and given to it."""
    if form == "cu_seqlens" and most is not None:
        return
    batch = None if form == "cu_seqlens" else 2
    pattern = calls(form, most)[name]
    query, key, value = torch.randn(3, 2, 2, 24, 8)
    for inside in (True, False):
        torch._dynamo.reset()
        counters.clear()
        call = (
            (lambda x: sr.attention(query, key, value, pattern(x)))
            if inside
            else (lambda mask: sr.attention(query, key, value, mask))
        )
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for seed in range(12):
            lengths = rows(seed, batch)
            if form == "cu_seqlens":  # a shape is a number of documents
                lengths = [[*lengths[0], *(0,) * (6 - len(lengths[0]))]]
            numbers = given(form, lengths, batch is not None, torch.int64)
            plain: Any = tuple(map(tuple, lengths)) if batch else tuple(lengths[0])
            same = {
                "documents": sr.Documents(plain),
                "causal": sr.Documents(plain) & sr.Causal(),
                "packed": sr.Packed(plain, INNER),
                "mixture": sr.Packed(plain, sr.LongNet((4, 8), (1, 2)) & sr.Causal()),
            }[name]
            out = compiled(numbers if inside else pattern(numbers))
            assert out.equal(sr.attention(query, key, value, same))
        assert counters["stats"]["unique_graphs"] == 1


def test_too_many_documents_are_errors_in_compiled_functions_too():
    query, key, value = torch.randn(3, 1, 1, 6, 8)
    ids = torch.tensor([[1, 1, 2, 2, 3, 3]])
    call = lambda x: sr.attention(query, key, value, sr.Documents.from_ids(x, most=2))  # noqa: E731
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        with pytest.raises(ValueError, match=r"at most 2 documents in a row, got 3 in row 0"):
            function(ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sr.Documents.from_ids([1, 1]), r"from_ids needs an int32 or int64 tensor"),  # type: ignore[arg-type]
        (lambda: sr.Documents.from_ids(torch.ones(3)), r"got torch\.float32 \(3,\)"),
        (lambda: sr.Documents.from_ids(torch.ones(1, 1, 3).long()), r"\[N\] or \[B, N\]"),
        (lambda: sr.Documents.from_ids(torch.ones(3).long(), most=-1), "most must be at least 0"),
        (lambda: sr.Documents.from_cu_seqlens(torch.tensor([2, 5])), r"got \[2, 5\]; lengths"),
        (lambda: sr.Documents.from_cu_seqlens(torch.tensor([0, 5, 4])), "ascending"),
        (lambda: sr.Documents.from_cu_seqlens(torch.zeros(0).long()), "ascending"),
        (lambda: sr.Packed.from_ids(torch.ones(3).long(), 3), "needs a pattern"),  # type: ignore[arg-type]
    ],
)
def test_other_arguments_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize(
    "numbers",
    [
        [0, 0, 1, 1, 1, 2],
        [0] * 4 + [1] * 4 + [2] * 4,  # its sum is the number of tokens
        [7, 7, 7, 7, 3, 3],
        [0, 1, 2, 3, 4, 0, 1, 2],
        [5, 5, -1, -1],
    ],
)
@pytest.mark.parametrize("make", [sr.Documents, lambda x: sr.Packed(x, INNER)])
@pytest.mark.parametrize("batched", [False, True])
def test_ids_as_lengths_are_told_what_to_write(numbers, make, batched):
    ids = torch.tensor([numbers] if batched else numbers)
    query, key, value = torch.randn(3, 1, 1, len(numbers), 8)
    for given_ids in (ids, ids.tolist()):
        with pytest.raises(ValueError, match=r"from_ids\(ids.*from_positions\(position_ids"):
            sr.attention(query, key, value, make(given_ids))


def test_lengths_of_as_many_documents_as_tokens_are_lengths():
    """Lengths that are padded by zeros to the number of tokens, as a tensor of data may be."""
    for lengths in ((1,) * 12, (12, *(0,) * 11), (3, 4, 5, *(0,) * 9), (0, 12, *(0,) * 10)):
        assert sr.Documents(lengths).to_dense(12).sum() == sum(x * x for x in lengths)
    cumulative = sr.Documents((0, 4, 12))
    with pytest.raises(ValueError, match="cumulative lengths: from_cu_seqlens takes them"):
        cumulative.to_dense(12)
