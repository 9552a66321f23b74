"""A packed document, arranged by `DocumentBlocks`, chooses and attends as it does alone."""

import pytest
import torch

import sparsering as sr
from sparsering.selection import (
    BlockScorer,
    DocumentBlocks,
    block_scores,
    pool_blocks,
    select_blocks,
)

METHODS = ("mean", "sub", "gauss", "bounds", "antidiagonal", "exact")
ROWS = [(13, 40, 0, 29, 1), (37, 46)]
LENGTHS = [
    (13, 40, 30),
    tuple(ROWS),
    torch.tensor([13, 0, 40, 30]),
    torch.tensor([[13, 40, 30], [0, 5, 78]]),
]


def attended(inputs, query_block, method, causal, blocks=None):
    known = {} if blocks is None else blocks.bounds
    valid = None if blocks is None else blocks.valid
    own = {"query_block": query_block, "causal": causal}
    scores = block_scores(*inputs[:2], 16, method=method, valid=valid, **own, **known)
    chosen = select_blocks(scores, 3, block_size=16, **own, **known)
    pattern = sr.SelectedBlocks(chosen, 16, query_block)
    pattern = pattern & sr.Causal() if causal else pattern
    pattern = pattern if blocks is None else pattern & sr.KeyMask(valid)
    return sr.attention(*inputs, pattern)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("method", "query_block"), [(m, 4) for m in METHODS] + [("sub", 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=["ints", "nested", "tensor", "tensor of rows"])
def test_a_packed_document_gives_what_it_gives_alone(lengths, method, query_block, causal):
    inputs = [torch.randn(2, h, 83, 8).double().requires_grad_() for h in (4, 2, 2)]
    blocks = DocumentBlocks(lengths, 16)
    arranged = [blocks.arrange(x) for x in inputs]
    out = blocks.restore(attended(arranged, query_block, method, causal, blocks))
    expected = []
    for entry in range(2):
        rows = lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths
        rows = rows[entry] if not isinstance(rows[0], int) else rows
        pieces = zip(*(x[entry : entry + 1].split(list(rows), 2) for x in inputs), strict=True)
        parts = [attended(x, query_block, method, causal) for x in pieces if x[0].shape[2]]
        expected.append(torch.cat(parts, 2))
    expected = torch.cat(expected)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    grad = torch.randn_like(out)
    found, right = (torch.autograd.grad(x, inputs, grad) for x in (out, expected))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("causal", "query_block"), [(True, 1), (True, 4), (False, 4)])
def test_a_learned_scorer_scores_a_packed_document_as_alone(causal, query_block):
    query, key = (torch.randn(2, h, 83, 8).double().requires_grad_() for h in (4, 2))
    options = {"query_block": query_block, "causal": causal, "detach": False}
    scorer = BlockScorer(8, 2, 16, index_dim=5, **options).double()
    torch.nn.init.normal_(scorer.pool)
    blocks = DocumentBlocks((13, 40, 30), 16)
    q, k = blocks.arrange(query), blocks.arrange(key)
    found = scorer(q, k, valid=blocks.valid, **blocks.bounds)
    block = 0
    for x, y in zip(*(x.split((13, 40, 30), 2) for x in (query, key)), strict=True):
        alone = scorer(x, y)
        rows, columns = alone.shape[2:]
        first = block * 16 // query_block
        here = found[:, :, first : first + rows]
        own = here[..., block : block + columns]
        assert torch.equal(own.isneginf(), alone.isneginf())
        torch.testing.assert_close(own, alone, rtol=0, atol=1e-12)
        assert here.isfinite().sum() == own.isfinite().sum()
        weight = torch.randn_like(alone)
        pair = ((s.where(alone.isfinite(), 0.0) * weight).sum() for s in (own, alone))
        leaves = [query, key, *scorer.parameters()]
        grads = [torch.autograd.grad(s, leaves, retain_graph=True) for s in pair]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        block += columns


@pytest.mark.parametrize(("size", "stride"), [(16, 16), (8, 4), (4, 4), (12, 4)])
def test_means_of_a_packed_document_are_those_of_it_alone(size, stride):
    x = torch.randn(2, 3, 83, 5).double().requires_grad_()
    blocks = DocumentBlocks(tuple(ROWS), 16)
    arranged = blocks.arrange(x).masked_fill(~blocks.valid[:, None, :, None], torch.nan)
    found = pool_blocks(arranged, size, stride, valid=blocks.valid, **blocks.bounds)
    for entry, lengths in enumerate(ROWS):
        place = 0
        for part in x[entry, None].split(list(lengths), 2):
            if part.shape[2]:
                alone = pool_blocks(part, size, stride)
                own = found[entry, None, :, place // stride :][:, :, : alone.shape[2]]
                torch.testing.assert_close(own, alone, rtol=0, atol=1e-14)
                right, got = (
                    torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (alone, own)
                )
                torch.testing.assert_close(got, right, rtol=0, atol=1e-14)
            place += -(-part.shape[2] // 16) * 16


def test_lengths_that_sum_to_unlike_numbers():
    with pytest.raises(ValueError, match="sum to one number of tokens"):
        DocumentBlocks(((3, 4), (3, 5)), 16)
    with pytest.raises(ValueError, match="8 tokens at 32 places"):
        DocumentBlocks((3, 5), 16).arrange(torch.randn(1, 1, 9, 4))
