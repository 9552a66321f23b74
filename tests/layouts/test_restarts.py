"""Layouts of documents whose queries and keys differ in number: pairs, positions, streams.

What each holds is one pattern per document, written out by the oracle and put on the diagonal.
"""

from itertools import pairwise
from time import thread_time
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from oracles.patterns_oracle import Spec, build, counts, is_batched
from oracles.strategies import HEADS, Scene, drawn, examples, leaf_masks, masks, mixtures
from torch import Tensor

import sparsering as sr
from sparsering.layouts import compile as compiler
from sparsering.layouts.layout import BlockLayout
from sparsering.patterns.algebra import Frame
from sparsering.patterns.varlen_mask import Varlen

Lengths = tuple[int, ...]


def on_the_diagonal(spec: Spec, q_lengths: Lengths, kv_lengths: Lengths, **heads: int) -> Tensor:
    """[H, Nq, Nk] counts of the spec in every document, alone."""
    shape = heads["num_heads"], sum(q_lengths), sum(kv_lengths)
    dense = torch.zeros(shape, dtype=torch.int64)
    row = column = 0
    for q_len, kv_len in zip(q_lengths, kv_lengths, strict=True):
        inside = counts(spec, q_len, kv_len, **heads)[0]
        dense[:, row : row + q_len, column : column + kv_len] = inside
        row, column = row + q_len, column + kv_len
    return dense


def laid(spec: Spec, q_lengths: Lengths, kv_lengths: Lengths) -> Any:
    return Varlen(q_lengths, kv_lengths, build(spec))


def assert_layout_is_the_documents(
    spec: Spec, q_lengths: Lengths, kv_lengths: Lengths, block_size: int, **heads: int
) -> BlockLayout:
    pattern = laid(spec, q_lengths, kv_lengths)
    lengths = {"q_len": sum(q_lengths), "kv_len": sum(kv_lengths), "q_start": 0}
    expected = on_the_diagonal(spec, q_lengths, kv_lengths, **heads)
    assert torch.equal(pattern.to_dense(**lengths, **heads).expand_as(expected).long(), expected)
    layout = pattern.layout(**lengths, **heads, block_size=block_size)
    assert torch.equal(layout.to_dense()[0].expand_as(expected), expected)
    assert layout.num_pairs == pytest.approx(expected.sum().item() / heads["num_heads"])
    assert_tiles_tell_positions_and_streams(layout, q_lengths, kv_lengths)
    return layout


def assert_tiles_tell_positions_and_streams(
    layout: BlockLayout, q_lengths: Lengths, kv_lengths: Lengths
) -> None:
    """Every token of every tile has the position and document that a list of all tokens has."""
    queries = [
        (document, kv_len - q_len + row)
        for document, (q_len, kv_len) in enumerate(zip(q_lengths, kv_lengths, strict=True))
        for row in range(q_len)
    ]
    keys = [(document, i) for document, n in enumerate(kv_lengths) for i in range(n)]
    for p in layout.passes:
        assert p.query_origin is not None and p.key_origin is not None and p.stream is not None
        assert p.query_origin.shape == p.stream.shape == p.query_start.shape
        assert p.key_origin.shape == p.key_start.shape
        assert {x.dtype for x in (p.query_origin, p.key_origin, p.stream)} == {torch.int64}
        for axis in range(len(p.query_start)):
            of_query = [
                told_of_tile(queries, p.step, layout.block_size, *tile)
                for tile in zip(
                    *(x[axis].tolist() for x in (p.query_start, p.query_stop, p.query_origin)),
                    strict=True,
                )
            ]
            streams = p.stream[axis].tolist()
            assert all(d in (None, s) for d, s in zip(of_query, streams, strict=True))
            of_key = [
                told_of_tile(keys, p.step, layout.block_size, *tile)
                for tile in zip(
                    *(x[axis].tolist() for x in (p.key_start, p.key_stop, p.key_origin)),
                    strict=True,
                )
            ]
            for head in range(layout.frame.num_heads):
                row, key, _, of_head = layout.table(p, 0, head)
                if of_head == axis or len(p.query_start) == 1:
                    pairs = zip(row.tolist(), key.tolist(), strict=True)
                    assert all(of_query[q] == of_key[k] is not None for q, k in pairs)


def told_of_tile(
    tokens: list[tuple[int, int]], step: int, block_size: int, start: int, stop: int, origin: int
) -> int | None:
    """The document of a tile, its positions checked; None for a tile without tokens."""
    held = [tokens[place] for place in range(start, stop, step)]
    assert len(held) <= block_size
    assert [position for _, position in held] == [origin + step * i for i in range(len(held))]
    assert len({document for document, _ in held}) <= 1, "a tile across documents"
    return held[0][0] if held else None


@st.composite
def documents(draw: st.DrawFn) -> tuple[Spec, Lengths, Lengths, dict[str, int]]:
    """A spec that fits any document, query and key lengths of some documents, heads."""
    longest = draw(st.sampled_from((6, 20, 40)))
    lengths = st.integers(0, longest)
    number = draw(st.integers(0, 4))
    each = st.lists(lengths, min_size=number, max_size=number).map(tuple)
    kv_lengths = draw(each)
    q_lengths = kv_lengths if draw(st.booleans()) else draw(each)
    num_heads, num_kv_heads = draw(st.sampled_from(HEADS[:5]))
    scene = Scene(longest, longest, num_heads, num_kv_heads, 0, 1)
    kinds = [masks(scene, 1, nested=True), mixtures(scene, 0, nested=True)]
    kinds += [drawn("LongNet", scene)]
    spec = draw(st.one_of(leaf_masks(scene, False), *kinds).filter(lambda x: not is_batched(x)))
    spec = ("&", spec, ("Causal",)) if draw(st.booleans()) else spec
    return spec, q_lengths, kv_lengths, {"num_heads": num_heads, "num_kv_heads": num_kv_heads}


@examples(25, 80, documents(), st.sampled_from((16, 16, 32)))
def test_layout_holds_the_pairs_of_each_document_alone(case: Any, block_size: int) -> None:
    spec, q_lengths, kv_lengths, heads = case
    assert_layout_is_the_documents(spec, q_lengths, kv_lengths, block_size, **heads)


Q_LENGTHS, KV_LENGTHS = (5, 0, 65, 1, 40, 7, 33), (9, 11, 0, 40, 100, 2, 33)


@pytest.mark.parametrize(
    "spec",
    [
        ("Full",),
        ("Causal",),
        ("SlidingWindow", 9, 3),
        ("SlidingWindow", 20, None, 5),
        ("|", ("GlobalTokens", 3), ("SlidingWindow", 4)),
        ("&", ("LongNet", (16, 50), (1, 3)), ("Causal",)),
        ("LongNet", (16, 50), (1, 7), "block"),
        ("|", ("Dilated", 12, 3), ("SlidingWindow", 30, 0, 2)),
        ("BlockWindow", 1, 24),
        ("&", ("SlidingWindow", 3, None, 2), ("BlockDilated", (1, 3), 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_ragged_documents_of_any_kind(spec: Spec, block_size: int) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2}
    assert_layout_is_the_documents(spec, Q_LENGTHS, KV_LENGTHS, block_size, **heads)


@pytest.mark.parametrize(
    "inner",
    [
        sr.RandomBlocks(0.5, 16),
        sr.RandomBlocks(0.4, 8) & sr.Causal(),
        sr.from_mask_mod(lambda b, h, q, k: (q + k + h) % 3 == 0),
    ],
    ids=str,
)
def test_what_asks_for_lengths_is_asked_for_those_of_the_document(inner: Any) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2}
    pattern = Varlen(Q_LENGTHS, KV_LENGTHS, inner)
    lengths = sum(Q_LENGTHS), sum(KV_LENGTHS)
    expected = torch.zeros(4, *lengths, dtype=torch.bool)
    row = column = 0
    for q_len, kv_len in zip(Q_LENGTHS, KV_LENGTHS, strict=True):
        inside = inner.to_dense(q_len, kv_len, **heads)
        expected[:, row : row + q_len, column : column + kv_len] = inside
        row, column = row + q_len, column + kv_len
    assert torch.equal(pattern.to_dense(*lengths, q_start=0, **heads), expected)
    for block_size in (16, 128):
        layout = pattern.layout(*lengths, q_start=0, block_size=block_size, **heads)
        assert torch.equal(layout.to_dense()[0].bool(), expected)
        assert_tiles_tell_positions_and_streams(layout, Q_LENGTHS, KV_LENGTHS)


def test_documents_in_documents() -> None:
    for inner in (("Documents", (3, 9)), ("Packed", (3, 9), ("Dilated", 4, 2))):
        heads = {"num_heads": 2, "num_kv_heads": 2}
        assert_layout_is_the_documents(inner, (12, 4, 0), (12, 12, 12), 16, **heads)


def test_tiles_of_equal_documents_are_those_of_one() -> None:
    one = sr.Causal().layout(40, 70, block_size=32)
    both = Varlen((40, 40), (70, 70), sr.Causal()).layout(80, 140, q_start=0, block_size=32)
    first, second = both.entries().tensor_split(2)
    assert torch.equal(second, first + torch.tensor([40, 70, 0, 0]))
    assert torch.equal(first, one.entries() - torch.tensor([30, 0, 0, 0]))
    assert torch.equal(both.passes[0].bitmaps, one.passes[0].bitmaps)
    assert both.passes[0].query_origin.tolist() == [[30, 32, 64, 30, 32, 64]]
    assert both.passes[0].key_origin.tolist() == [[0, 32, 64, 0, 32, 64]]
    assert both.passes[0].stream.tolist() == [[0, 0, 0, 1, 1, 1]]


def test_coordinates_are_those_of_each_document() -> None:
    mask = Varlen((2, 0, 3), (4, 1, 2), sr.Causal())
    queries, keys, stream = mask.coordinates(None)
    assert queries.tolist() == [2, 3, -1, 0, 1]
    assert keys.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert stream.tolist() == [0, 0, 2, 2, 2]
    assert mask.num_streams == 3
    mixture = Varlen((2, 0, 3), (4, 1, 2), sr.LongNet((2, 4), (1, 2)))
    both = mask & Varlen((2, 0, 3), (4, 1, 2), sr.Full())
    for agreeing in (mixture, both, mask | both):
        assert agreeing.num_streams == 3
        assert all(map(torch.equal, agreeing.coordinates(None), (queries, keys, stream)))


def test_other_patterns_have_the_positions_of_the_call() -> None:
    mask = Varlen((2, 3), (2, 3), sr.Causal())
    other = Varlen((3, 2), (3, 2), sr.Causal())
    mixed = (mask & sr.Causal(), mask + other, mask | sr.Full(), sr.Packed((2, 3), sr.Causal()))
    for pattern in (sr.Causal(), sr.LongNet((2, 4), (1, 2)), *mixed):
        queries, keys, stream = pattern.coordinates(Frame(3, 5, 1, 1, 2))
        assert queries.tolist() == [2, 3, 4]
        assert keys.tolist() == [0, 1, 2, 3, 4]
        assert stream.tolist() == [0, 0, 0]
        assert pattern.num_streams == 1
        layout = pattern.layout(5, block_size=16)
        assert all(p.query_origin is p.key_origin is p.stream is None for p in layout.passes)
        dense = pattern.to_dense(5).long()
        assert torch.equal(layout.to_dense()[0], dense)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Varlen((2,), (2, 3), sr.Full()), ["as many query lengths", "1 and 2"]),
        (lambda: Varlen((2, -1), (2, 3), sr.Full()), ["q_lengths", "-1"]),
        (lambda: Varlen((2,), (2,), sr.KeyPadding((2,))), ["same for all", "KeyPadding"]),
        (lambda: Varlen((2,), (2,), sr.Packed((2,), sr.KeyMask(torch.ones(2) > 0))), ["KeyMask"]),
        (lambda: Varlen((2,), (3,), sr.Full()).layout(3, 3, q_start=0), ["2 queries", "got 3"]),
        (
            lambda: Varlen((2,), (3,), sr.Full()).layout(2, 2, q_start=0),
            ["3 keys", "2 queries, 2 keys"],
        ),
        (lambda: Varlen((2,), (3,), sr.Full()).to_dense(2, 3), ["q_start=0", "q_start=1"]),
        (
            lambda: Varlen((2, 2), (3, 4), sr.Documents((3,))).layout(4, 7, q_start=0),
            ["sum to the key length 4, got 3"],
        ),
    ],
)
def test_what_does_not_fit_raises(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def test_it_is_read_back_from_its_text() -> None:
    for inner in (sr.Causal(), sr.LongNet((4, 8), (1, 2)) & sr.Causal()):
        pattern = Varlen((2, 0), [3, 1], inner)
        assert sr.parse(pattern.expression) == pattern
    assert "Varlen" not in dir(sr)


@pytest.mark.parametrize(("inner", "milliseconds"), [(sr.Full(), 30), (sr.Causal(), 50)], ids=str)
def test_many_ragged_documents_compile_fast(inner: Any, milliseconds: int) -> None:
    cuts = torch.randint(0, 65537, (255,)).sort().values.tolist()
    edges = [0, *cuts, 65536]
    lengths = tuple(b - a for a, b in pairwise(edges))
    pattern, spent = Varlen(lengths, lengths, inner), []
    for _ in range(5):
        sr.layout_cache.clear()
        start = thread_time()
        layout = pattern.layout(65536, 65536, q_start=0)
        spent.append((thread_time() - start) * 1e3)
    assert min(spent) < milliseconds
    pairs = (n * n if isinstance(inner, sr.Full) else n * (n + 1) // 2 for n in lengths)
    assert layout.num_pairs == sum(pairs)
    assert len(layout.passes[0].bitmaps) <= 1


def test_documents_of_each_batch_entry_compile_fast() -> None:
    entries = []
    for _ in range(8):
        cuts = torch.randint(0, 16385, (63,)).sort().values.tolist()
        edges = [0, *cuts, 16384]
        entries.append(tuple(b - a for a, b in pairwise(edges)))
    start = thread_time()
    layout = sr.Packed(tuple(entries), sr.Causal()).layout(16384, block_size=128)
    assert thread_time() - start < 2
    assert layout.num_pairs == sum(n * (n + 1) // 2 for entry in entries for n in entry) / 8


def test_equal_documents_of_batch_entries_share_one_table() -> None:
    lengths = (100, 30, 70)
    each = sr.Packed((lengths, lengths), sr.LongNet((32, 64), (1, 2))).layout(200, block_size=32)
    one = sr.Packed(lengths, sr.LongNet((32, 64), (1, 2))).layout(200, block_size=32)
    assert each.table_shape == (1, 1)
    for p, q in zip(each.passes, one.passes, strict=True):
        for name in ("query_start", "key_start", "row_ptr", "key_tile", "bitmap", "bitmaps"):
            assert torch.equal(getattr(p, name), getattr(q, name))


def test_pairs_of_tiles_that_differ_in_counts_alone_share_the_cells_of_the_largest() -> None:
    signature = [torch.tensor([7, 7, 9, 9, 7])]
    q_count, k_count = torch.tensor([3, 2, 3, 2, 3]), torch.tensor([1, 4, 1, 4, 4])
    kind, largest = compiler._largest_of_kind(signature, q_count, k_count)
    assert kind[0] == kind[1] == kind[4] and largest[kind[0]] == 4
    assert len(kind.unique()) == len(largest) == 3, "of 9, none holds the cells of the other"
    assert [largest[kind[i]].item() for i in (2, 3)] == [2, 3]
