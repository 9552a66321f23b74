"""The backend torch_sparse against the reference in float64: results, each gradient, refusals."""

from typing import Any

import pytest
import torch
from oracles.attention_oracle import assert_close
from torch import Tensor

import sparsering as sr

LENGTH = 50
PATTERNS = {
    "causal": sr.Causal(),
    "full": sr.Full(),
    "longnet": sr.LongNet((16, 64), (1, 4)),
    "causal longnet": sr.LongNet((16, 64), (1, 4)) & sr.Causal(),
    "union": sr.SlidingWindow(5, 2) | sr.GlobalTokens(2),
    "head offsets": sr.Dilated(16, 3),
    "key mask of each entry": sr.KeyMask(torch.arange(2 * LENGTH).view(2, -1) % 3 > 0)
    & sr.Causal(),
    "an entry without keys": sr.KeyPadding((0, LENGTH)),
    "documents": sr.Documents((10, 0, 40)),
    "random blocks": sr.RandomBlocks(0.3, 8),
    "counted twice": sr.SlidingWindow(4, 0) + sr.Causal(),
    "selected blocks": sr.SelectedBlocks(torch.tensor([[0, 1], [1, 0], [2, 0], [3, 1]]), 16),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "distance_bias": {"distance_bias": torch.linspace(-1, 1, 84).view(4, 21)},
    "sink": {"sink": torch.tensor([0.5, -1.0, -torch.inf, 2.0])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "all": {
        "softcap": 1.5, "distance_bias": torch.linspace(1, -1, 9)[None], "dropout_p": 0.2,
        "sink": torch.linspace(-2, 2, 400).view(2, 4, LENGTH), "dropout_seed": 3, "scale": -0.4,
    },
}  # fmt: skip


def results(
    pattern: sr.Pattern, backend: str, dtype: torch.dtype, options: dict[str, Any]
) -> list[Tensor]:
    """Out, lse, and the gradients of all tensors; lse of rows without keys counts as 0."""
    draw = torch.Generator().manual_seed(1)
    sizes = ((4, 8), (2, 8), (2, 6))
    x = [torch.randn(2, h, LENGTH, d, generator=draw, dtype=torch.float64) for h, d in sizes]
    grads = [
        torch.randn(2, 4, LENGTH, 6, generator=draw),
        torch.randn(2, 4, LENGTH, generator=draw),
    ]
    leaves = [y.to(dtype).requires_grad_() for y in x]
    given = dict(options)
    for name in ("distance_bias", "sink"):
        if name in given:
            given[name] = given[name].to(dtype, copy=True).requires_grad_()
            leaves.append(given[name])
    out, lse = sr.attention(*leaves[:3], pattern, backend=backend, return_lse=True, **given)
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    found = torch.autograd.grad(
        (out, lse), leaves, [g.to(y.dtype) for g, y in zip(grads, (out, lse), strict=True)]
    )
    return [y.detach().double() for y in (out, lse, *found)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PATTERNS)
def test_it_computes_what_the_reference_computes(name, options):
    pattern, given = PATTERNS[name], OPTIONS[options]
    expected = results(pattern, "reference", torch.float64, given)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        found = results(pattern, "torch_sparse", dtype, given)
        for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_close(got, wanted, tolerance, str(number))


def test_block_bias_and_slot_bias():
    x = [torch.randn(1, 2, 64, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    pattern = sr.SlidingWindow(20) & sr.Causal()
    blocks = pattern.layout(64, num_heads=2, block_size=16).num_blocks
    bias = torch.randn(1, 2, blocks, dtype=torch.float64, requires_grad=True)
    chosen = sr.SelectedBlocks(torch.tensor([[0, 1], [1, 0], [2, 0], [3, 1]]), 16)
    slots = torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True)
    for mask, given, leaf in (
        (pattern, {"block_bias": bias, "block_size": 16}, bias),
        (chosen, {"slot_bias": slots}, slots),
    ):
        both = [
            torch.autograd.grad(sr.attention(*x, mask, backend=name, **given).sum(), [*x, leaf])
            for name in ("torch_sparse", "reference")
        ]
        for got, wanted in zip(*both, strict=True):
            assert_close(got, wanted, 1e-12)


def test_a_batch_of_gradients_is_each_of_them():
    x = [torch.randn(1, 2, 20, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = sr.attention(*x, sr.Causal(), backend="torch_sparse")
    grads = torch.randn(3, *out.shape, dtype=torch.float64)
    many = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
    for number, grad in enumerate(grads):
        for got, wanted in zip(
            many, torch.autograd.grad(out, x, grad, retain_graph=True), strict=True
        ):
            assert_close(got[number], wanted, 1e-12)


def test_it_runs_only_when_it_is_named():
    x = [torch.randn(1, 2, 20, 8) for _ in range(3)]
    told = sr.explain(*x, sr.Causal())
    assert told.startswith("runs: cpu") and "torch_sparse: usable (only when named)" in told
    assert sr.backends()["torch_sparse"] == []
    with pytest.raises(
        NotImplementedError, match=r"torch_sparse: torch\.sparse has sampled products"
    ):
        sr.attention(*(y.to("meta") for y in x), sr.Causal(), backend="torch_sparse")
