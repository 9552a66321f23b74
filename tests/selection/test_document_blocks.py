"""A packed document, arranged by `DocumentBlocks`, chooses and attends as it does alone."""

import pytest
import torch

import sparsering as sr
from sparsering.selection import DocumentBlocks, block_scores, select_blocks

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


def test_lengths_that_sum_to_unlike_numbers():
    with pytest.raises(ValueError, match="sum to one number of tokens"):
        DocumentBlocks(((3, 4), (3, 5)), 16)
    with pytest.raises(ValueError, match="8 tokens at 32 places"):
        DocumentBlocks((3, 5), 16).arrange(torch.randn(1, 1, 9, 4))
