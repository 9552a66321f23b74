"""Graphs: `SelectedBlocks.from_edges`, and a bias per edge, against attention row by row."""

import copy
import pickle

import pytest
import torch
from oracles.attention_oracle import assert_close, attend_by_rows

import sparsering as sr
from sparsering.layouts.lists import lists_of, split
from sparsering.patterns.frame import Frame
from sparsering.planning.counts import counts_of

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
    check_exact(backend, (heads, kv_heads, batch), edges_of(37, 52, 330), 37, 52)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
@pytest.mark.parametrize("name", ["a hub", "a power law"])
def test_hubs_and_their_gradients_are_exact(backend, name):
    check_exact(backend, (4, 2, 2), *UNEVEN[name])


def check_exact(backend, shape, index, queries, keys):
    """Compares results and all gradients with a bias of each edge with attention row by row."""
    heads, kv_heads, batch = shape
    graph = sr.SelectedBlocks.from_edges(index, queries, num_heads=heads)
    leaves = drawn(queries, keys, heads, kv_heads, batch)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(heads, index.shape[1], dtype=torch.float64, generator=generator)
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


def hub_edges(nodes, more=0, seed=0):
    """Draws a star in both directions and further edges, in any order: node 2 has most of them."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, nodes, (2, more), generator=generator)
    hub, others = torch.full((nodes,), 2), torch.arange(nodes)
    star = torch.stack((torch.cat((hub, others)), torch.cat((others, hub))))
    edges = torch.cat((star, pairs), 1).unique(dim=1)
    return edges[:, torch.randperm(edges.shape[1], generator=generator)]


def power_law_edges(queries, keys, seed=0):
    """Draws edges of which query i has about keys / (i + 1); queries from 3/4 on have none."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randperm(keys, generator=generator)[
            : -(-keys // (i + 1)) if i < 3 * queries // 4 else 0
        ]
        for i in range(queries)
    ]
    order = torch.randperm(queries, generator=generator)
    return torch.cat([torch.stack((order[i].expand(len(x)), x)) for i, x in enumerate(rows)], 1)


UNEVEN = {"a hub": (hub_edges(60, 40), 60, 60), "a power law": (power_law_edges(70, 90), 70, 90)}


@pytest.mark.parametrize("name", UNEVEN)
def test_lists_of_very_different_lengths_take_a_slot_for_each_edge(name):
    index, queries, keys = UNEVEN[name]
    graph = sr.SelectedBlocks.from_edges(index, queries, num_heads=3)
    assert graph.indices.shape == (index.shape[1], 1)
    assert graph.slot_shape == (1, 3, index.shape[1], 1)
    assert torch.equal(graph.indices.flatten()[graph.slots], index[1])
    assert torch.equal(graph.slots.sort().values, torch.arange(index.shape[1]))
    expected = torch.zeros(queries, keys, dtype=torch.int64)
    expected[index[0], index[1]] = 1
    assert torch.equal(graph.to_dense(queries, keys, q_start=0)[0], expected)
    for start in (0, 10):
        frame = graph.layout(20, keys, q_start=start, block_size=16).frame
        pairs = torch.arange(start, start + 20)[:, None], torch.arange(keys)
        slot = graph.slot_of_pairs(*pairs, 0, 0, frame)
        assert torch.equal(slot >= 0, expected[start : start + 20].bool())
        assert torch.equal(graph.indices[slot[slot >= 0], 0], (slot >= 0).nonzero()[:, 1])


def test_from_four_slots_for_each_edge_on_lists_are_no_table():
    star = torch.stack((torch.zeros(12, dtype=torch.int64), torch.arange(12)))
    assert sr.SelectedBlocks.from_edges(star, 4).indices.shape == (4, 12)
    assert sr.SelectedBlocks.from_edges(star, 5).indices.shape == (12, 1)


def test_memory_grows_with_the_edges():
    nodes = 50_000  # a table would take 20 GB
    spokes = torch.arange(1, nodes)
    hub = torch.zeros_like(spokes)
    edges = torch.stack((torch.cat((hub, spokes)), torch.cat((spokes, hub))))
    graph = sr.SelectedBlocks.from_edges(edges, nodes)
    assert graph.indices.numel() == edges.shape[1]
    query, key, value = torch.randn(3, 1, 1, nodes, 8, generator=torch.Generator().manual_seed(0))
    found = lists_of(*split(graph), Frame.build(nodes, None, 1, 1, None), has_slot_bias=True)[1]
    assert sum(x.keys.numel() for x in found) <= 2 * edges.shape[1]
    out = sr.attention(query, key, value, graph)
    scores = (key[0, 0, 1:] @ query[0, 0, 0]) / 8**0.5
    assert_close(
        out[0, 0, 0].double(), (scores.double().softmax(0) @ value[0, 0, 1:].double()), 1e-6
    )
    assert_close(out[0, 0, 1:], value[0, 0, :1].expand(nodes - 1, -1), 1e-6)


JOINED = {
    "alone": lambda graph: graph,
    "causal": lambda graph: graph & sr.Causal(),
    "beside a window": lambda graph: (graph | sr.SlidingWindow(4, 4)) & sr.Causal(),
    "in documents": lambda graph: graph & sr.Documents((30, 30)),
    "padded": lambda graph: graph & sr.KeyPadding((31, 60)),
    "in a mixture": lambda graph: graph + sr.SlidingWindow(4, 4),
    "on a dilated mask": lambda graph: graph & sr.Dilated(8, 2, 0),
}
OPTIONS = {
    "distances and dropout": {"dropout_p": 0.3, "dropout_seed": 7, "distance_bias": ...},
    "softcap and sink": {"softcap": 2.0, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def outcome(backend, dtype, graph, pattern, inputs, **options):
    """Returns out, lse and all gradients in float64; `inputs` end with a bias of edges."""
    own = [x.detach().to(dtype).requires_grad_() for x in inputs]
    if options.get("distance_bias") is ...:
        table = torch.linspace(-1, 1, 4 * 41).view(4, 41).to(dtype)
        own.append(table.requires_grad_())
        options["distance_bias"] = own[-1]
    options |= {"slot_bias": biased(graph, own[3]), "return_lse": True, "backend": backend}
    out, lse = sr.attention(*own[:3], pattern, **options)
    generator = torch.Generator().manual_seed(4)
    sent = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, lse)]
    sent[1] = sent[1].masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out, lse), own, sent)
    return [x.double() for x in (out, lse, *grads)]


@pytest.mark.parametrize("backend", ["gather", "cpu"])
@pytest.mark.parametrize(
    ("join", "options"), [*((x, {}) for x in JOINED), *(("alone", x) for x in OPTIONS.values())]
)
def test_hubs_are_exact_in_each_join_and_with_each_option(backend, join, options):
    graph = sr.SelectedBlocks.from_edges(hub_edges(60, 40), 60, num_heads=4)
    bias = torch.randn(4, len(graph.slots), generator=torch.Generator().manual_seed(3))
    inputs = [*drawn(60, 60, 4, 2, batch=2), bias]
    pattern = JOINED[join](graph)
    expected = outcome("reference", torch.float64, graph, pattern, inputs, **options)
    dtype, bound = (torch.float32, 2e-5) if backend == "cpu" else (torch.float64, 1e-11)
    found = outcome(backend, dtype, graph, pattern, inputs, **options)
    for got, exact in zip(found, expected, strict=True):
        assert_close(got, exact, bound)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
@pytest.mark.parametrize("join", ["|", "&", "inside documents"])
def test_hubs_beside_other_lists_and_in_documents(backend, join):
    graph = sr.SelectedBlocks.from_edges(hub_edges(30, 20), 30)
    near = torch.arange(60)[:, None] + torch.arange(-2, 3)
    near = sr.SelectedBlocks(near.where((near >= 0) & (near < 60), -1), 1)
    whole = sr.SelectedBlocks.from_edges(hub_edges(60, 40), 60)
    pattern = {
        "|": lambda: whole | near,
        "&": lambda: whole & near,
        "inside documents": lambda: sr.Packed((30, 30), graph) | near,
    }[join]()
    counts = {
        "|": lambda: (whole.to_dense(60) + near.to_dense(60)).clamp(max=1),
        "&": lambda: whole.to_dense(60) * near.to_dense(60),
        "inside documents": lambda: (
            torch.block_diag(*[graph.to_dense(30)[0]] * 2) + near.to_dense(60)
        ).clamp(max=1),
    }[join]()
    inputs = drawn(60, 60, 2, 2)
    expected, _ = attend_by_rows(*inputs, counts)
    wanted = [expected, *torch.autograd.grad(expected.sum(), inputs)]
    dtype, bound = (torch.float32, 4e-6) if backend == "cpu" else (torch.float64, 1e-11)
    own = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = sr.attention(*own, pattern, backend=backend)
    for got, exact in zip([out, *torch.autograd.grad(out.sum(), own)], wanted, strict=True):
        assert_close(got.double(), exact, bound)


def test_a_graph_with_hubs_is_a_pattern_like_others():
    index, queries, _ = UNEVEN["a hub"]
    graph = sr.SelectedBlocks.from_edges(index, queries, num_heads=3)
    order = torch.randperm(index.shape[1], generator=torch.Generator().manual_seed(2))
    other = sr.SelectedBlocks.from_edges(index[:, order], queries, num_heads=3)
    again = pickle.loads(pickle.dumps(graph))
    for same in (other, again, copy.deepcopy(graph), sr.parse(repr(graph), graph.tensors)):
        assert same == graph and hash(same) == hash(graph)
    assert graph != sr.SelectedBlocks.from_edges(hub_edges(60, 41), 60)
    assert torch.equal(again.slots, graph.slots) and again.slot_shape == graph.slot_shape
    padded = sr.SelectedBlocks(graph.of_rows(torch.arange(60)), 1)
    for size in (1, 16, 128):
        assert torch.equal(graph.inflation(size, 60), padded.inflation(size, 60))
    assert counts_of(graph, Frame.build(60, None, 1, 1, None), 16, lists=True).pairs == len(
        graph.slots
    )
    assert graph.layout(60, 60).num_pairs == len(graph.slots)
    inputs = [x.detach() for x in drawn(60, 60, 2, 2)]
    assert (
        f"each row of 1 queries lists {round(len(graph.slots) / 60, 2)} blocks of 1"
        in sr.explain(*inputs, graph)
    )
    with pytest.raises(ValueError, match=r"must cover 61 query blocks of 1, .* got 60 rows"):
        sr.attention(*[x.detach() for x in drawn(61, 60, 2, 2)], graph, q_start=0)


def test_the_mass_of_each_edge():
    graph = sr.SelectedBlocks.from_edges(hub_edges(60, 40), 60)
    query, key, _ = (x.detach() for x in drawn(60, 60, 2, 2))
    mass = sr.selection.block_mass(query, key, graph)
    assert mass.shape == (1, 2, len(graph.slots), 1)
    share = (query @ key.mT / 4).masked_fill(graph.to_dense(60) == 0, -torch.inf).softmax(-1)
    row, column = hub_edges(60, 40)
    assert_close(mass.flatten(2)[..., graph.slots], share[:, :, row, column], 1e-12)


def test_a_key_that_does_not_exist_is_named(monkeypatch):
    index = hub_edges(60, 40)
    graph = sr.SelectedBlocks.from_edges(
        torch.cat((index, torch.tensor([[7, 7], [80, 99]])), 1), 60
    )
    inputs = [x.detach() for x in drawn(60, 60, 2, 2)]
    place = (index[0] == 7).sum()
    assert f"got 80 in row 7, slot {place}, and 1 more slots" in sr.explain(*inputs, graph)
    exact = sr.attention(*inputs, sr.SelectedBlocks.from_edges(index, 60))
    assert torch.equal(sr.attention(*inputs, graph), exact)
    monkeypatch.setenv("SPARSERING_CHECK", "1")
    with pytest.raises(ValueError, match=f"got 80 in row 7, slot {place}, and 1 more slots"):
        sr.attention(*inputs, graph)


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
