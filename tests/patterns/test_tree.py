"""Trees against the plain rules of the contract: pairs, layouts, distances, dropout, lifetimes."""

import pickle
import random
import re
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from oracles import strategies as drawn
from oracles.attention_oracle import dense_attention
from oracles.kinds import depth_in_tree
from oracles.patterns_oracle import build, counts

import sparsering as sr
from sparsering.distributed import simulate_ring

PROMPT = sr.Tree((40, 24, 30, 9), (-1, 0, 0, 2), sr.SlidingWindow(20, 0))
DEPTHS = [depth_in_tree(x, PROMPT.lengths, PROMPT.parents) for x in range(103)]


def qkv(tokens: int, heads: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    return [torch.randn(1, heads, tokens, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


@settings(max_examples=60)
@given(st.data())
def test_pairs_and_layouts_are_those_of_the_definition(data):
    scene = data.draw(drawn.scenes(max_length=40, max_heads=3))
    spec = data.draw(drawn.trees(scene))
    block_size = data.draw(st.sampled_from((16, 32)))
    pattern = build(spec)
    wanted = counts(spec, **scene.arguments, batch=scene.batch)
    dense = pattern.to_dense(**scene.arguments)
    assert torch.equal(dense.long().expand(wanted.shape), wanted)
    layout = pattern.layout(**scene.arguments, block_size=block_size)
    visited = (layout.entry_of_pairs(scene.batch) >= 0).sum(0)
    assert torch.equal(visited.expand(wanted.shape), wanted)


@pytest.mark.parametrize("parents", [(-1, -1, -1), (-1, 0, 1), (-1, 0, 0)])
def test_lengths_of_many_tiles(parents):
    for pattern in (sr.Causal(), sr.LongNet((64, 256), (1, 4)) & sr.Causal(), sr.Full()):
        tree = sr.Tree((300, 210, 130), parents, pattern)
        layout = tree.layout(640, block_size=64)
        found = (layout.entry_of_pairs(1) >= 0).sum(0)[0, 0]
        assert torch.equal(found, tree.to_dense(640)[0].long())


def test_roots_alone_are_packed_documents():
    lengths, inner = (30, 0, 41, 1), sr.LongNet((8, 32), (1, 2)) & sr.Causal()
    tree, packed = sr.Tree(lengths, (-1,) * 4, inner), sr.Packed(lengths, inner)
    assert torch.equal(tree.to_dense(72), packed.to_dense(72))


def test_a_chain_is_one_sequence_if_its_pattern_is_causal():
    chain = sr.Tree((30, 0, 41, 1), (-1, 0, 1, 2), PROMPT.pattern)
    assert torch.equal(chain.to_dense(72), PROMPT.pattern.to_dense(72))
    blocks = [x.layout(72, block_size=16).num_blocks for x in (chain, PROMPT.pattern)]
    assert blocks[0] == blocks[1]
    both_ways = sr.Tree((30, 42), (-1, 0), sr.Full()).to_dense(72)[0]
    assert not both_ways[:30, 30:].any() and both_ways[30:].all()


def test_each_path_is_attended_as_a_sequence_of_its_own():
    """A prompt, its answers, and an answer's answer: values and gradients of unpacked rows."""
    tree = PROMPT
    paths = [[*range(40), *range(40, 64)], [*range(40), *range(64, 103)]]
    query, key, value = qkv(103)
    bias = torch.randn(2, 41, dtype=torch.float64, requires_grad=True)
    out = sr.attention(query, key, value, tree, distance_bias=bias, block_size=16)
    rows = torch.zeros_like(out)
    for path in paths:
        alone = [x[:, :, path] for x in (query, key, value)]
        given = {"distance_bias": bias, "backend": "reference"}
        rows[:, :, path] = sr.attention(*alone, tree.pattern, **given)
    torch.testing.assert_close(out, rows, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    inputs = [query, key, value, bias]
    for got, wanted in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(rows, inputs, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["gather", "cpu", "triton"])
@pytest.mark.parametrize(
    "inner", [sr.Causal(), sr.LongNet((16, 32), (1, 2)) & sr.Causal()], ids=["causal", "longnet"]
)
def test_distances_are_of_depths_and_dropout_counts_tokens(backend, inner):
    tree = sr.Tree(PROMPT.lengths, PROMPT.parents, inner)
    drops = {"dropout_p": 0.3, "dropout_seed": 5}
    dtype = torch.float64 if backend == "gather" else torch.float32
    query, key, value = (x.detach().to(dtype) for x in qkv(103))
    bias = torch.randn(2, 41, dtype=dtype)
    got = sr.attention(
        query, key, value, tree, distance_bias=bias, block_size=16, backend=backend, **drops
    )
    depth = torch.tensor(DEPTHS)
    far = (depth - depth[:, None]).clamp(-20, 20) + 20
    counts = tree.to_dense(103, num_heads=2)
    token = torch.arange(103)
    at = torch.arange(2)[:, None, None], token[:, None], token
    share = torch.zeros(1, 2, 103, 103, dtype=torch.float64)
    for number, branch in enumerate(tree.branches):
        kept = sr.dropout_kept(5, 0.3, 0, *at, number).double() / 0.7
        share += branch.to_dense(103, num_heads=2) * kept
    wanted, _ = dense_attention(
        *(x.double() for x in (query, key, value)),
        counts,
        bias=bias.double()[:, far],
        factor=share / counts.clamp(min=1),
    )
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "pattern",
    [
        PROMPT + sr.Causal(),
        sr.Packed((103,), PROMPT),
        PROMPT | sr.Tree((103,), (-1,)),
        sr.Tree((PROMPT.lengths,), (PROMPT.parents,))
        | sr.Tree((PROMPT.lengths,), ((-1, -1, -1, -1),)),
    ],
    ids=["a branch without a tree", "in a document", "two trees", "two trees for each entry"],
)
def test_distances_need_one_tree(pattern):
    query, key, value = qkv(103)
    with pytest.raises(ValueError, match="the same one Tree in every branch"):
        sr.attention(query, key, value, pattern, distance_bias=torch.randn(2, 3, dtype=query.dtype))


def test_a_tree_may_be_joined_to_other_masks_beside_distances():
    query, key, value = qkv(103)
    bias = torch.randn(2, 41, dtype=torch.float64)
    pattern = (PROMPT | sr.GlobalTokens(2, rows=False)) & sr.KeyMask(torch.arange(103) % 7 != 3)
    got, wanted = (
        sr.attention(query, key, value, pattern, distance_bias=bias, backend=backend)
        for backend in ("gather", "reference")
    )
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_ring_computes_a_tree(ranks):
    query, key, value = qkv(103)
    bias = torch.randn(2, 41, dtype=torch.float64)
    given = {"distance_bias": bias, "dropout_p": 0.2, "dropout_seed": 1}
    tree = sr.Tree(PROMPT.lengths, PROMPT.parents, sr.LongNet((16, 64), (1, 2)) & sr.Causal())
    wanted = sr.attention(query, key, value, tree, backend="reference", **given)
    got = simulate_ring(query, key, value, tree, world_size=ranks, **given)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_a_cache_keeps_what_later_tokens_see():
    rng = random.Random(3)
    for _ in range(12):
        lengths = [rng.choice((0, 1, rng.randint(1, 30))) for _ in range(rng.randint(1, 7))]
        parents = [rng.randint(-1, i - 1) for i in range(len(lengths))]
        tree, total = sr.Tree(lengths, parents, sr.SlidingWindow(9, 0)), sum(lengths)
        dense = tree.to_dense(total)[0]
        for length in range(0, total + 1, 5):
            seen = dense[length:, :length].any(0).nonzero()[:, 0]
            assert torch.equal(tree.live_keys(length)[0], seen)
    cache = sr.KVCache(PROMPT, 1, 2, 16, dtype=torch.float64)
    query, key, value = (x.detach() for x in qkv(103))
    wanted = sr.attention(query, key, value, PROMPT, backend="reference")
    parts = [x.split([50, 1, 30, 22], 2) for x in (query, key, value)]
    found = torch.cat([cache.attend(*step) for step in zip(*parts, strict=True)], 2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_lengths_of_each_batch_entry():
    lengths, parents = ((40, 24), (10, 54)), ((-1, 0), (-1, -1))
    tree = sr.Tree(lengths, parents, sr.LongNet((16, 32), (1, 2)))
    query, key, value = (torch.cat([x, x]) for x in qkv(64))
    out = sr.attention(query, key, value, tree, block_size=16)
    for entry in range(2):
        own = sr.Tree(lengths[entry], parents[entry], sr.LongNet((16, 32), (1, 2)))
        one = (x[entry : entry + 1] for x in (query, key, value))
        wanted = sr.attention(*one, own, backend="reference")
        torch.testing.assert_close(out[entry : entry + 1], wanted, rtol=0, atol=1e-12)


def test_values_text_and_copies():
    tree = sr.Tree(torch.tensor([3, 4]), [-1, 0], sr.Causal() & sr.SlidingWindow(2))
    assert str(tree) == "Tree((3, 4), (-1, 0), Causal() & SlidingWindow(2))"
    assert sr.parse(str(tree)) == tree == pickle.loads(pickle.dumps(tree))
    assert sr.Tree((3, 4), (-1, 0)) == sr.Tree((3, 4), (-1, 0), sr.Causal())
    assert sr.Tree((3, 4), (-1, -1)) != sr.Tree((3, 4), (-1, 0))
    mixture = sr.Tree((8, 8), (-1, 0), sr.LongNet((4, 8), (1, 2)))
    assert isinstance(mixture, sr.Mixture) and len(mixture.branches) == 2
    assert sr.parse(str(mixture)) == mixture
    assert not sr.Tree((), ()).to_dense(0).numel()


LENGTHS: list[tuple[Any, str]] = [
    (((3, 4), (-1, 1)), "got parent 1 of node 1"),
    (((3, 4), (-1, 2)), "got parent 2 of node 1"),
    (((3, 4), (-1, -2)), "got parent -2 of node 1"),
    (((3, 4), (-1,)), "got 2 lengths and 1 parents"),
    (((3, -4), (-1, 0)), "Tree lengths must be"),
    ((((3, 4), (7, 0)), (-1, 0)), "nest the parents too"),
    ((((3, 4), (7, 0)), ((-1, 0),)), "got 1 and 2"),
    ((((3, 4), (7, 0)), ((-1, 0), (-1, 1))), "got parent 1 of node 1 of batch entry 1"),
    (((3, 4), ((-1, 0), (-1, 0))), "must be an int"),
]


@pytest.mark.parametrize(("arguments", "message"), LENGTHS, ids=[x[1] for x in LENGTHS])
def test_what_is_no_tree(arguments, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        sr.Tree(*arguments)


@pytest.mark.parametrize("lengths", [(3, 4), ((3, 4), (6, 1))])
def test_a_length_below_the_longest_path_is_told(lengths):
    parents = (-1, 0) if lengths == (3, 4) else ((-1, 0), (-1, 0))
    tree = sr.Tree(lengths, parents, sr.RandomBlocks(0.5, 16), 6)
    for call in (tree.layout, tree.to_dense):
        with pytest.raises(ValueError, match="length of at least 7, for its longest path, got 6"):
            call(7)
    assert sr.Tree(lengths, parents, sr.RandomBlocks(0.5, 16), 7).to_dense(7).any()


@pytest.mark.parametrize(
    "inner",
    [
        sr.RandomBlocks(0.5, 16),
        sr.Documents((3, 4)),
        sr.KeyMask(torch.ones(7, dtype=torch.bool)),
        sr.Dense(torch.ones(7, 7, dtype=torch.bool)),
        sr.Causal() & sr.Packed((3, 4), sr.Full()),
        sr.Tree((3, 4), (-1, 0)),
        sr.SelectedBlocks(torch.zeros(1, 1, 1, 1, dtype=torch.int64), 16),
    ],
    ids=lambda x: type(x).__name__,
)
def test_patterns_that_are_bound_to_a_length(inner):
    with pytest.raises(ValueError, match="must hold along paths of any length"):
        sr.Tree((3, 4), (-1, 0), inner)


def test_a_length_that_does_not_fit():
    with pytest.raises(ValueError, match=r"Tree lengths must sum to the key length 8, got 7"):
        sr.Tree((3, 4), (-1, 0)).to_dense(8)
