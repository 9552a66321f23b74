"""Key masks as data of a call: masked keys reach nothing, and need no other layout."""

import pytest
import torch
from oracles.attention_oracle import Case, assert_close, inputs
from oracles.extras_oracle import extras_of
from torch import Tensor

import sparsering as sr

CASE = Case(num_heads=4, num_kv_heads=2, q_len=75, kv_len=91, head_dim=12, value_dim=20)


def masked_pattern(valid: Tensor) -> sr.Pattern:
    return sr.LongNet((16, 91), (1, 3)) & sr.KeyMask(valid)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_masked_keys_reach_nothing_whatever_they_hold(backend: str):
    """NaN and infinities; entries whose keys are all masked give 0, and 0 to all gradients."""
    case = CASE
    valid = torch.rand(case.batch, case.kv_len) < 0.6
    valid[1] = False
    x = [t.detach() for t in inputs(case, torch.float32)]
    sink = extras_of(case, "sink", torch.float32)["sink"].detach()
    for options in ({}, {"sink": sink, "softcap": 2.0, "dropout_p": 0.2, "dropout_seed": 3}):
        clean = [t.clone().requires_grad_() for t in x]
        dirty = [t.clone() for t in x]
        for t, bad in zip(dirty[1:], (torch.nan, torch.inf), strict=True):
            t.masked_fill_(~valid[:, None, :, None], bad)
        dirty = [t.requires_grad_() for t in dirty]
        pattern = masked_pattern(valid)
        got, expected = (
            sr.attention(*t, pattern, backend=backend, return_lse=True, **options)
            for t in (dirty, clean)
        )
        assert_close(got[0], expected[0], 1e-6)
        assert_close(got[1], expected[1], 1e-6)
        assert not got[0][1].any()
        lse_of_none = sink[:, None] if options else torch.tensor(-torch.inf)
        assert torch.equal(got[1][1], lse_of_none.expand_as(got[1][1]))
        weights = torch.randn_like(got[0])
        for a, b in zip(
            torch.autograd.grad((got[0] * weights).sum(), dirty),
            torch.autograd.grad((expected[0] * weights).sum(), clean),
            strict=True,
        ):
            assert_close(a, b, 1e-5)
            assert not a[1].any()


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_another_key_mask_needs_no_other_layout(backend: str):
    case = CASE
    x = inputs(case, torch.float32, requires_grad=False)
    sr.layout_cache.clear()
    made = []
    for number in range(3):
        valid = torch.rand(case.kv_len) < 0.5
        padding = sr.KeyPadding((40 + number, 60))
        for keys in (sr.KeyMask(valid), padding, padding & sr.KeyMask(valid)):
            pattern = sr.Causal() & keys
            got = sr.attention(*x, pattern, backend=backend)
            assert_close(got, sr.attention(*x, pattern, backend="reference"), 1e-6)
        made.append(sr.layout_cache.info().misses)
    assert made == [1, 1, 1]  # that of Causal() alone


def test_a_key_mask_has_the_results_of_its_pattern_laid_out_whole():
    """The mask is part of the layout if blocks have a bias, else data; results agree."""
    case = CASE
    x = inputs(case, torch.float32, requires_grad=False)
    pattern = masked_pattern(torch.rand(case.batch, case.kv_len) < 0.6)
    blocks = pattern.layout(**case.heads, block_size=32).num_blocks
    call = {"block_size": 32, "backend": "cpu", "return_lse": True}
    whole = sr.attention(*x, pattern, block_bias=torch.zeros(1, 1, blocks), **call)
    for a, b in zip(sr.attention(*x, pattern, **call), whole, strict=True):
        assert_close(a, b, 1e-6)


@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
def test_a_key_mask_of_other_sizes_is_told(backend: str):
    x = inputs(CASE, torch.float32, requires_grad=False)
    with pytest.raises(ValueError, match="91"):
        sr.attention(*x, sr.Causal() & sr.KeyMask(torch.ones(90).bool()), backend=backend)
    with pytest.raises(ValueError, match="3 batch entries, got a query of 2"):
        sr.attention(*x, sr.Causal() & sr.KeyMask(torch.ones(3, 91).bool()), backend=backend)


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_masked_keys_reach_nothing_beside_a_block_bias(backend: str):
    query, key, value = inputs(CASE, torch.float32, requires_grad=False)
    valid = torch.arange(91) % 3 > 0
    pattern = sr.Causal() & sr.KeyMask(valid)
    blocks = pattern.layout(**CASE.heads, block_size=16).num_blocks
    call = {"block_bias": torch.randn(1, 4, blocks), "block_size": 16, "backend": backend}
    hidden = [x.masked_fill(~valid[:, None], torch.nan) for x in (key, value)]
    got = sr.attention(query, *hidden, pattern, **call)
    assert_close(got, sr.attention(query, key, value, pattern, **call), 1e-6)


def test_masked_keys_reach_nothing_in_a_ring():
    from sparsering.distributed import simulate_ring

    whole = [x.detach() for x in inputs(Case(1, 4, 2, 75, 75, 8, 8), torch.float32)]
    valid = torch.arange(75) % 3 > 0
    pattern = (sr.Causal() | sr.GlobalTokens(5)) & sr.KeyMask(valid)
    dirty = [whole[0], *(x.masked_fill(~valid[:, None], torch.nan) for x in whole[1:])]
    for world in (1, 2, 3, 5):
        dirty = [x.detach().requires_grad_() for x in dirty]
        clean = [x.detach().requires_grad_() for x in whole]
        got, expected = (simulate_ring(*x, pattern, world_size=world) for x in (dirty, clean))
        assert_close(got, expected, 1e-6)
        found = torch.autograd.grad(got.sin().sum(), dirty)
        for a, b in zip(found, torch.autograd.grad(expected.sin().sum(), clean), strict=True):
            assert_close(a, b, 1e-5)
