"""The dense attention that tests compare with, against two other ways to compute it."""

import pytest
import torch
from fuzz import oracle
from oracles.attention_oracle import (
    Case,
    assert_same_attention,
    attend_by_rows,
    dense_attention,
    dense_counts,
    dense_weights,
    inputs,
)
from oracles.extras_oracle import beside

import sparsering as sr

CASE = Case(2, 4, 2, 9, 13, 5, 3)
PATTERNS = [
    sr.Causal(),
    sr.LongNet((4, 8), (1, 2)) + sr.SlidingWindow(3),
    sr.GlobalTokens(6, columns=False),  # most rows are empty
    sr.GlobalTokens(0),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_all_pairs_at_once_are_row_by_row(pattern, scale):
    args, counts = inputs(CASE), dense_counts(pattern, CASE)
    bias = torch.randn(1, 4, 9, 13, dtype=torch.float64, requires_grad=True)
    got = dense_attention(*args, counts, scale=scale, bias=bias)
    assert_same_attention(got, attend_by_rows(*args, counts, scale, bias), (*args, bias))
    weights = dense_weights(*args[:2], counts, scale=scale, bias=bias)
    assert (weights.sum(-1) - (counts.sum(-1) > 0).double()).abs().max() < 1e-13
    torch.testing.assert_close(
        weights @ args[2].repeat_interleave(2, 1), got[0], rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("has_sink", [False, True])
def test_options_and_gradients_are_those_of_the_formulas_in_numpy(has_sink):
    query, key, value = inputs(CASE)
    pairs = torch.rand(2, 2, 4, 9, 13) < 0.5  # two branches
    pairs[..., 4, :] = False
    options = {
        "bias": torch.randn(pairs.shape, dtype=torch.float64, requires_grad=True),
        "keep": (torch.rand(pairs.shape) < 0.8).double() / 0.8,
        "sink": torch.randn(2, 4, 9, dtype=torch.float64, requires_grad=True),
    }
    if not has_sink:
        del options["sink"]
    out, lse = dense_attention(
        query,
        *(torch.cat([x, x], 2) for x in (key, value)),
        beside(pairs),
        scale=0.4,
        softcap=1.5,
        bias=beside(options["bias"]),
        factor=beside(options["keep"]),
        sink=options.get("sink"),
    )
    sent = torch.randn_like(out), torch.randn_like(lse)
    leaves = {"query": query, "key": key, "value": value, "bias": options["bias"]}
    leaves |= {"sink": options["sink"]} if has_sink else {}
    live = lse > -torch.inf  # the gradient by lse of an empty row is none
    sent = sent[0], torch.where(live, sent[1], 0.0)
    found = torch.autograd.grad((out, lse), list(leaves.values()), sent)
    arrays = [x.detach().numpy() for x in (query, key, value, pairs, *sent)]
    numbers = {name: x.detach().numpy() for name, x in options.items()}
    exact = oracle.attend(*arrays, scale=0.4, softcap=1.5, **numbers).exact
    for name, x in {"out": out, "lse": lse, **dict(zip(leaves, found, strict=True))}.items():
        wanted = torch.from_numpy(exact[name])
        torch.testing.assert_close(x.detach(), wanted, rtol=0, atol=1e-12, msg=name)
