"""Graphs: `SelectedBlocks.from_edges`, and a bias per edge, against attention row by row."""

import copy
import pickle

import pytest
import torch
from oracles.attention_oracle import assert_close, attend_by_rows

import sparsering as sr

INDEX = torch.tensor([[2, 0, 2, 0, 3], [1, 4, 0, 2, 3]])  # queries, then keys


def edges_of(queries, keys, edges, seed=0):
    """Draws distinct edges in any order, [2, edges] of (query, key)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(queries * keys, generator=generator)[:edges]
    return torch.stack((chosen // keys, chosen % keys))


def drawn(queries, keys, heads, kv_heads, batch=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, queries, 16), *[(batch, kv_heads, keys, 16)] * 2]
    options = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(s, **options).requires_grad_() for s in shapes]


def biased(graph, bias):
    """Scatters a bias per edge, [H, E], into the slots of a graph."""
    slots = bias.new_zeros(graph.slot_shape).flatten(-2)
    return slots.index_copy(-1, graph.slots, bias[None]).view(graph.slot_shape)


def test_lists_are_each_querys_keys_and_slots_are_the_edges_places():
    graph = sr.SelectedBlocks.from_edges(INDEX, 5)
    lists = torch.tensor([[2, 4], [-1, -1], [0, 1], [3, -1], [-1, -1]])
    assert graph == sr.SelectedBlocks(lists, 1, query_block=1)
    assert torch.equal(graph.slots, torch.tensor([5, 1, 4, 0, 6]))
    assert torch.equal(graph.indices.flatten()[graph.slots], INDEX[1])
    assert graph.slot_shape == (1, 1, 5, 2)
    assert sr.SelectedBlocks.from_edges(INDEX, 5, num_heads=4).slot_shape == (1, 4, 5, 2)


def test_the_order_of_edges_changes_slots_alone():
    index = edges_of(40, 30, 300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    graph, other = (sr.SelectedBlocks.from_edges(x, 40) for x in (index, index[:, order]))
    assert graph == other
    assert torch.equal(graph.slots[order], other.slots)
    assert len(graph.slots.unique()) == 300


def test_copies_keep_their_slots():
    graph = sr.SelectedBlocks.from_edges(INDEX, 5, num_heads=3)
    for again in (copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert again == graph and hash(again) == hash(graph)
        assert torch.equal(again.slots, graph.slots)
        assert again.slot_shape == (1, 3, 5, 2)
    with pytest.raises(AttributeError, match="has slots if from_edges made it"):
        _ = sr.SelectedBlocks(INDEX, 1).slots


@pytest.mark.parametrize("edges", [0, 1])
def test_small_graphs(edges):
    graph = sr.SelectedBlocks.from_edges(INDEX[:, :edges], 4)
    query, key, value = drawn(4, 5, 1, 1)
    bias = torch.full((1, edges), 3.0, dtype=torch.float64, requires_grad=True)
    options = {"q_start": 0, "slot_bias": biased(graph, bias), "return_lse": True}
    out, lse = sr.attention(query, key, value, graph, **options)
    expected = torch.zeros_like(out)
    expected[:, :, INDEX[0, :edges]] = value[:, :, INDEX[1, :edges]]
    assert_close(out, expected, 1e-12)
    assert (lse == -torch.inf).sum() == 4 - edges


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
@pytest.mark.parametrize(("heads", "kv_heads", "batch"), [(4, 4, 1), (4, 2, 2)])
def test_a_bias_per_edge_and_its_gradients_are_exact(backend, heads, kv_heads, batch):
    queries, keys = 37, 52
    index = edges_of(queries, keys, 330)
    graph = sr.SelectedBlocks.from_edges(index, queries, num_heads=heads)
    leaves = drawn(queries, keys, heads, kv_heads, batch)
    bias = torch.randn(heads, 330, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    leaves.append(bias.requires_grad_())
    counts = torch.zeros(queries, keys, dtype=torch.int64)
    counts[index[0], index[1]] = 1
    dense = bias.new_zeros(heads, queries, keys).index_put(
        (torch.arange(heads)[:, None], *index), bias
    )
    expected, _ = attend_by_rows(*leaves[:3], counts, bias=dense)
    sent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    wanted = [expected, *torch.autograd.grad(expected, leaves, sent.double())]
    dtype, bound = (torch.float32, 4e-6) if backend == "cpu" else (torch.float64, 1e-11)
    own = [x.detach().to(dtype).requires_grad_() for x in leaves]
    options = {"q_start": 0, "backend": backend, "slot_bias": biased(graph, own[3])}
    out = sr.attention(*own[:3], graph, **options)
    for got, exact in zip(
        [out, *torch.autograd.grad(out, own, sent.to(dtype))], wanted, strict=True
    ):
        assert_close(got.double(), exact, bound)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (INDEX.double(), r"int64 tensor \[2, E\] of \(query, key\), got torch.float64 \(2, 5\)"),
        (INDEX.int(), r"int64 tensor \[2, E\] of \(query, key\), got torch.int32"),
        (INDEX.tolist(), r"int64 tensor \[2, E\] of \(query, key\), got list"),
        (INDEX.T, r"got shape \(5, 2\); transpose it with .T"),
        (INDEX[0], r"got shape \(5,\); torch.stack"),
        (INDEX[:, [0, 1, 2, 1]], r"query 0 and key 4 in columns 1 and 3; index.unique\(dim=1\)"),
        (INDEX - 1, r"got query -1 and key 3 in column 1"),
        (INDEX - torch.tensor([[0], [1]]), r"got query 2 and key -1 in column 2"),
        (INDEX + 2, r"queries from 0 to 4 .* got query 5 and key 5 in column 4.*edge_index.flip"),
    ],
)
def test_an_index_that_is_no_edges_is_refused(index, message):
    with pytest.raises(ValueError, match=message):
        sr.SelectedBlocks.from_edges(index, 5)


@pytest.mark.parametrize("number", [1.0, True, "5"])
def test_numbers_of_another_kind_are_refused(number):
    with pytest.raises(TypeError, match="from_edges num_queries must be an int"):
        sr.SelectedBlocks.from_edges(INDEX, number)
    with pytest.raises(TypeError, match="from_edges num_heads must be an int"):
        sr.SelectedBlocks.from_edges(INDEX, 5, num_heads=number)
    with pytest.raises(ValueError, match="from_edges num_heads must be"):
        sr.SelectedBlocks.from_edges(INDEX, 5, num_heads=0)
