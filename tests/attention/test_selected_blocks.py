"""Blocks chosen by content: rows of any size, unions, a bias and the mass of each slot."""

import functools

import numpy as np
import pytest
import torch
from helpers.thinned import thinned
from oracles import blocks_oracle
from oracles.extras_oracle import attend_with_extras, branches_of
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsering as sr
from sparsering.kernels.backends import BACKENDS
from sparsering.layouts.compile import build_layout
from sparsering.patterns.algebra import Frame
from sparsering.selection import block_mass

WINDOW = sr.SlidingWindow(9)
DILATED = sr.Dilated(8, 2, 0)
PACKED = sr.Packed((23, 27), sr.Causal())
JOINED = {
    "alone": lambda chosen: chosen,
    "causal": lambda chosen: chosen & sr.Causal(),
    "beside a window": lambda chosen: (chosen | WINDOW) & sr.Causal(),
    "in documents": lambda chosen: chosen & sr.Causal() & sr.Documents((23, 27)),
    "padded": lambda chosen: chosen & sr.KeyPadding((31, 50)),
    "in a mixture": lambda chosen: chosen + WINDOW,
    "after a dilated mask": lambda chosen: DILATED | chosen,
    "after others of steps": lambda chosen: (
        sr.SlidingWindow(7, 7, 3) | (chosen & sr.Causal()) | sr.Dilated(6, 3) | sr.Dilated(24, 1)
    ),
    "on a dilated mask beside a window": lambda chosen: (chosen & DILATED) | WINDOW,
    "after packed documents": lambda chosen: PACKED | (chosen & sr.Causal()),
    "in packed documents": lambda chosen: (DILATED | chosen) & PACKED,
    "after a dilated mask in a mixture": lambda chosen: (DILATED | chosen) + DILATED,
}
# row size, first row, block size of the selection, queries; always 50 keys
ROWS = [(1, 0, 16, 50), (1, 30, 16, 20), (4, 7, 32, 21), (16, 0, 16, 50), (64, 0, 64, 9)]
ROWS += [(1, 0, 1, 50), (1, 30, 1, 20), (3, 0, 3, 50), (4, 7, 8, 21)]  # lists: no layouts
KEYS, SLOTS = 50, 4


def drawn(row_size, first_row, block_size, q_len, heads=2, batch=2, seed=0):
    """A selection with repeats and numbers that list nothing, and inputs of 4 and 2 heads."""
    generator = torch.Generator().manual_seed(seed)
    rows, blocks = -(-KEYS // row_size) - first_row, -(-KEYS // block_size)
    indices = torch.randint(-1, blocks + 1, (batch, heads, rows, SLOTS), generator=generator)
    shapes = [(2, 4, q_len, 8), (2, 2, KEYS, 8), (2, 2, KEYS, 8), (2, heads, rows, SLOTS)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return sr.SelectedBlocks(indices, block_size, row_size, first_row), inputs


@functools.cache
def slot_of_pairs(chosen, q_len):
    """[B, 4, Nq, Nk] the first slot that lists each pair's block, -1 for none; pair by pair."""
    shape, first = (2, 4, q_len, KEYS), KEYS - q_len
    rest = chosen.block_size, chosen.query_block, chosen.first_row
    found = blocks_oracle.slots_of_pairs(chosen.indices.tolist(), shape, first, *rest)
    return torch.from_numpy(np.where(found < chosen.indices.shape[2] * SLOTS, found, -1))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_pair_is_in_where_its_row_lists_its_block(rows, heads):
    chosen, _ = drawn(*rows, heads=heads)
    shape = {"num_heads": 4, "num_kv_heads": 2}
    expected = slot_of_pairs(chosen, rows[3]) >= 0
    dense = chosen.to_dense(rows[3], KEYS, **shape)
    assert torch.equal(dense.expand(expected.shape), expected)
    for block_size in (16, max(32, chosen.block_size)):
        layout = chosen.layout(rows[3], KEYS, block_size=block_size, **shape)
        assert torch.equal(layout.to_dense().expand(expected.shape), expected.long())
        assert layout.num_pairs == expected.sum((-1, -2)).double().mean()


def oracle(pattern, chosen, inputs, bias, **extras):
    """(out, lse) in float64 by formula, every pair of a listed block with its slot's bias."""
    query, key, value = inputs
    q_len = query.shape[2]
    shape = {"q_len": q_len, "kv_len": KEYS, "num_heads": 4, "num_kv_heads": 2}
    branches = branches_of(pattern, 2, **shape)
    slots = slot_of_pairs(chosen, q_len)
    each = bias.repeat_interleave(4 // bias.shape[1], 1).flatten(2).expand(2, -1, -1)
    of_pairs = torch.where(
        slots >= 0, each.gather(-1, slots.clamp(min=0).flatten(2)).view_as(slots), 0
    )
    biases = [of_pairs, torch.zeros_like(of_pairs)][: len(branches)]  # a window has none of its own
    return attend_with_extras(
        query, key, value, branches, q_start=KEYS - q_len, bias=torch.stack(biases), **extras
    )


def gradients(out, lse, leaves):
    generator = torch.Generator().manual_seed(1)
    lse = torch.where(lse > -torch.inf, lse, 0.0).double()
    sent = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse)]
    total = (out.double() * sent[0]).sum() + (lse * sent[1]).sum()
    return torch.autograd.grad(total, leaves, materialize_grads=True)


EXTRAS = {"softcap": 3.0, "dropout_p": 0.3, "dropout_seed": 5}


@pytest.mark.parametrize(
    ("rows", "joined", "backend"), thinned(8, ROWS, JOINED, ("reference", "gather", "cpu"))
)
def test_slot_bias_forward_and_backward(rows, joined, backend):
    chosen, inputs = drawn(*rows, heads=(1, 2, 4)[rows[0] % 3])
    pattern = JOINED[joined](chosen)
    exact = backend != "cpu"
    for extras in ({}, EXTRAS):
        leaves = [x.clone().requires_grad_() for x in inputs]
        expected = oracle(pattern, chosen, leaves[:3], leaves[3], **extras)
        of_expected = gradients(*expected, leaves)
        if not exact:
            leaves = [x.detach().float().requires_grad_() for x in leaves]
        got = sr.attention(
            *leaves[:3], pattern, slot_bias=leaves[3], backend=backend, return_lse=True, **extras
        )
        for a, b in zip((*got, *gradients(*got, leaves)), (*expected, *of_expected), strict=True):
            torch.testing.assert_close(
                a.double(), b, rtol=0, atol=1e-11 if exact else 3e-5, equal_nan=True
            )


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_a_pair_of_a_list_and_of_a_dilated_mask_has_its_bias(backend):
    query, key, value = torch.randn(3, 1, 1, 1, 16).unbind()
    chosen = sr.SelectedBlocks(torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2, 1, 0)
    bias = torch.ones(1, 1, 1, 1)
    for pattern in (chosen, DILATED | chosen):
        options = {"slot_bias": bias, "return_lse": True, "backend": backend, "block_size": 32}
        _, lse = sr.attention(query, key, value, pattern, **options)
        torch.testing.assert_close(lse, 1 + (query * key).sum(-1) / 4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", [None, "cpu", "gather", "triton", "reference"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_slot_bias_of_no_slots_changes_nothing(block_size, backend):
    args = [torch.randn(1, heads, 3 * block_size, 16) for heads in (4, 2, 2)]
    chosen = sr.SelectedBlocks(torch.zeros(1, 2, 3, 0, dtype=torch.int64), block_size)
    bias = torch.zeros(1, 4, 3, 0, requires_grad=True)
    for pattern in (chosen, chosen | sr.SlidingWindow(3), chosen & sr.Causal()):
        out = sr.attention(*args, pattern, slot_bias=bias, backend=backend)
        assert torch.allclose(out, sr.attention(*args, pattern, backend="reference"), atol=1e-5)
        (grad,) = torch.autograd.grad(out.sum(), bias)
        assert grad.shape == bias.shape


def test_slot_bias_in_kernels_of_triton():
    chosen, inputs = drawn(4, 10, 32, 9)
    leaves = [x.requires_grad_() for x in inputs]
    expected = oracle(chosen & sr.Causal(), chosen, leaves[:3], leaves[3])
    of_expected = gradients(*expected, leaves)
    leaves = [x.detach().float().requires_grad_() for x in leaves]
    pattern = chosen & sr.Causal()
    got = sr.attention(*leaves[:3], pattern, slot_bias=leaves[3], backend="triton", return_lse=True)
    for a, b in zip((*got, *gradients(*got, leaves)), (*expected, *of_expected), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-5)


def test_of_slots_that_repeat_the_first_counts_and_what_lists_nothing_learns_nothing():
    indices = torch.tensor([[[[1, 0, 1, -1, 9, 2]]]]).expand(1, 1, 3, 6)
    pattern = sr.SelectedBlocks(indices, 16) & sr.Causal()
    query, key, value = torch.randn(3, 1, 1, 48, 8, dtype=torch.float64).unbind()
    bias = torch.randn(1, 1, 3, 6, dtype=torch.float64, requires_grad=True)
    out = sr.attention(query, key, value, pattern, slot_bias=bias)
    (grad,) = torch.autograd.grad(out.square().sum(), bias)
    listed = torch.tensor([[0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 1]])
    assert torch.equal(grad[0, 0, 1:] != 0, listed[1:].bool())
    assert grad[0, 0, 0].abs().max() < 1e-15  # one block alone: a softmax does not see its bias
    assert grad.sum(-1).abs().max() < 1e-12


def test_a_block_of_several_tiles_has_one_bias():
    """MoBA's blocks of 512 are cut into tiles of 128; here 64 into 16."""
    chosen, inputs = drawn(4, 0, 64, 50)
    leaves = [x.requires_grad_() for x in inputs]
    found = [
        sr.attention(*leaves[:3], chosen, slot_bias=leaves[3], block_size=size, return_lse=True)
        for size in (16, 32, 64)
    ]
    grads = [gradients(*x, leaves) for x in found]
    for other in (1, 2):
        for a, b in zip((*found[0], *grads[0]), (*found[other], *grads[other]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "joined", "backend"),
    thinned(
        3,
        ROWS,
        ["causal", "beside a window", "in a mixture", "in packed documents"],
        ["gather", "cpu", "backward"],
    ),
)
def test_the_mass_of_each_slot(rows, joined, backend, monkeypatch):
    """Sums dense weights times a weight of each query, for one or a joint softmax."""
    if backend == "backward":
        backend = "gather"
        monkeypatch.setitem(BACKENDS, "gather", BACKENDS["gather"]._replace(entry_mass=None))
    exact = backend == "gather"
    chosen, (query, key, value, bias) = drawn(*rows)
    pattern = JOINED[joined](chosen)
    weight = torch.rand(2, 1, rows[3], dtype=torch.float64)
    zeros = torch.zeros_like(bias[:, :1].expand(-1, 4, -1, -1)).requires_grad_()
    _, own = oracle(pattern, chosen, (query, key, value), zeros)
    joint = torch.logaddexp(own.detach(), torch.randn(own.shape, dtype=torch.float64))
    for lse in (None, joint):
        share = weight if lse is None else weight * (own.detach() - lse).exp()
        sent = torch.where(own > -torch.inf, own, 0.0) * share
        (expected,) = torch.autograd.grad(sent.sum(), zeros, retain_graph=True)
        given = [x.to(torch.float64 if exact else torch.float32) for x in (query, key)]
        lse = lse if lse is None or exact else lse.float()
        got = block_mass(*given, pattern, lse, weight=weight)
        assert got.dtype == given[0].dtype
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-12 if exact else 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_that_no_row_lists_have_no_mass(dtype):
    query, key = (torch.randn(1, 2, 32, 8, dtype=dtype) for _ in range(2))
    pattern = sr.SelectedBlocks(torch.full((1, 1, 2, 3), -1), 16, 16) & sr.Causal()
    got = block_mass(query, key, pattern)
    assert got.shape == (1, 2, 2, 3)
    assert not got.any()


# batch entries, heads, queries, keys, slots of a row, channels of keys and of values
SIZES = {
    "slots": (1, 2, 32, 32, 0, 8, 8),
    "rows": (1, 2, 0, 32, 2, 8, 8),
    "keys": (1, 2, 32, 0, 2, 8, 8),
    "entries": (0, 2, 32, 32, 2, 8, 8),
    "heads": (1, 0, 32, 32, 2, 8, 8),
    "channels": (1, 2, 32, 32, 2, 0, 8),
    "values": (1, 2, 32, 32, 2, 8, 0),
}


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
@pytest.mark.parametrize("joined", ["alone", "beside a window", "after a dilated mask"])
@pytest.mark.parametrize("missing", SIZES)
def test_where_there_is_nothing_of_something(missing, joined, backend):
    batch, heads, queries, keys, slots, width, value_width = SIZES[missing]
    indices = torch.zeros(batch, heads, queries, slots, dtype=torch.int64)
    first = max(0, keys - queries)
    pattern = JOINED[joined](sr.SelectedBlocks(indices, 16, 1, first))
    shapes = [(queries, width), (keys, width), (keys, value_width), (queries, slots)]
    leaves = [torch.randn(batch, heads, *s, requires_grad=True) for s in shapes]
    call = {"pattern": pattern, "q_start": first, "return_lse": True}
    got = sr.attention(*leaves[:3], slot_bias=leaves[3], backend=backend, **call)
    plain = [x.detach().double().requires_grad_() for x in leaves]
    expected = sr.attention(*plain[:3], slot_bias=plain[3], backend="reference", **call)
    found, wanted = (*got, *gradients(*got, leaves)), (*expected, *gradients(*expected, plain))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5)
    mass = block_mass(leaves[0], leaves[1], pattern, q_start=first)
    assert mass.shape == indices.shape
    layout = pattern.layout(queries, keys, num_heads=heads, q_start=first, block_size=16)
    counts = pattern.to_dense(queries, keys, num_heads=heads, q_start=first)
    pairs = counts.expand(batch, heads, queries, keys).sum((-1, -2)).double()
    assert layout.num_pairs == (float(pairs.mean()) if pairs.numel() else 0)


def test_nothing_is_read_from_the_device():
    with FakeTensorMode():
        indices = torch.randint(0, 9, (2, 4, 144, 3))
        pattern = sr.SelectedBlocks(indices, 16, 1) & sr.Causal()
        frame = Frame.build(144, 144, 4, 4, None)
        layout = build_layout(pattern, frame, 16, torch.device("cpu"))
        assert layout.entry_slots.shape == (2, 4, 432)


def test_compiled_once_for_changing_contents():
    calls = []

    def count(graph, inputs):
        calls.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=count)
    def run(query, indices, bias):
        pattern = sr.SelectedBlocks(indices, 16, 1) & sr.Causal()
        return sr.attention(query, query, query, pattern, slot_bias=bias)

    for seed in range(3):
        torch.manual_seed(seed)
        query, bias = torch.randn(1, 2, 48, 8), torch.randn(1, 2, 48, 2)
        indices = torch.randint(0, 3, (1, 2, 48, 2))
        pattern = sr.SelectedBlocks(indices, 16, 1) & sr.Causal()
        expected = sr.attention(query, query, query, pattern, slot_bias=bias)
        assert torch.equal(run(query, indices, bias), expected)
    assert len(calls) == 1


CHOSEN, (QUERY, KEY, VALUE, BIAS) = drawn(4, 0, 16, 50)


def attend(pattern=CHOSEN, **options):
    return sr.attention(QUERY, KEY, VALUE, pattern, **options)


def chosen_from(first: int, first_row: int) -> sr.SelectedBlocks:
    return sr.SelectedBlocks(CHOSEN.indices[:, :, first:], 16, 4, first_row=first_row)


UNFIT = {
    "a bias of slots without a selection": (
        lambda: attend(sr.Causal(), slot_bias=BIAS),
        r"slot_bias needs a pattern with one SelectedBlocks, got 0",
    ),
    "a bias of slots of two": (
        lambda: attend(CHOSEN | CHOSEN, slot_bias=BIAS),
        r"one SelectedBlocks, got 2",
    ),
    "a slot too few": (
        lambda: attend(slot_bias=BIAS[..., :3]),
        r"slot_bias must be \[2 or 1, 4 or 2 or 1, 13, 4\].*got \(2, 2, 13, 3\)",
    ),
    "both biases": (
        lambda: attend(slot_bias=BIAS, block_bias=torch.zeros(1, 1, 3), block_size=16),
        r"block_bias or slot_bias, got both",
    ),
    "tiles of two blocks": (
        lambda: attend(slot_bias=BIAS, block_size=32),
        r"tiles of one row and one block",
    ),
    "a query block that does not divide": (
        lambda: sr.SelectedBlocks(CHOSEN.indices, 16, 3),
        r"query_block must divide block_size 16, got 3",
    ),
    "rows that begin late": (
        lambda: attend(chosen_from(5, first_row=5)),
        r"for the first query, at position 0, got first_row=5, which begins at 20",
    ),
    "rows after all queries": (
        lambda: attend(chosen_from(0, first_row=100)),
        r"got first_row=100, which begins at 400",
    ),
    "rows that end early": (lambda: attend(chosen_from(1, 0)), r"cover 13 query blocks of 4"),
    "a mass without a selection": (
        lambda: block_mass(QUERY, KEY, sr.Causal()),
        r"block_mass needs a pattern with one SelectedBlocks, got 0",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_does_not_fit_is_told(what):
    call, message = UNFIT[what]
    error = NotImplementedError if what == "tiles of two blocks" else ValueError
    with pytest.raises(error, match=message):
        call()


def test_how_many_more_blocks_a_tile_lists_than_its_rows():
    alike = sr.SelectedBlocks(torch.tensor([[0, 1]]).expand(32, 2), 16, 1)
    assert alike.inflation(16, 64).tolist() == [1.0]
    apart = torch.stack((torch.arange(32) % 4, -torch.ones(32, dtype=torch.int64)), -1)
    apart = sr.SelectedBlocks(torch.stack((apart, apart * 0)), 16, 1)
    assert apart.inflation(16, 64).tolist() == [4.0, 1.0]
    query = torch.zeros(1, 2, 32, 8)
    told = sr.explain(query, query, query, apart & sr.Causal(), block_size=16)
    assert "each row of 1 queries lists 2 blocks of 16; a tile of 16 queries 1.5 times" in told


@pytest.mark.parametrize("backend", [None, "cpu", "gather", "reference"])
@pytest.mark.parametrize(
    ("size", "row", "rows", "queries", "q_start"),
    [(1, 1, 2, 0, 2), (15, 3, 2, 0, 5), (16, 16, 2, 0, 24), (1, 1, 0, 3, -3), (16, 1, 0, 3, -3)],
)
def test_a_bias_of_slots_that_no_query_reads(size, row, rows, queries, q_start, backend):
    q, k = torch.randn(1, 2, queries, 8, requires_grad=True), torch.randn(1, 1, 24, 8)
    chosen = sr.SelectedBlocks(torch.zeros(1, rows, 3, dtype=torch.int64), size, row)
    bias = torch.ones(1, 1, rows, 3, requires_grad=True)
    out = sr.attention(q, k, k, chosen, slot_bias=bias, q_start=q_start, backend=backend)
    out.sum().backward()
    assert out.shape == (1, 2, queries, 8)
    assert not out.any()
    assert torch.equal(bias.grad, torch.zeros_like(bias))
    assert torch.equal(q.grad, torch.zeros_like(q))
