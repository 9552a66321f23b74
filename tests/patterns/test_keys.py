"""Masks of keys taken off patterns, and made one tensor: what enters kernels as data."""

import copy
import pickle
from functools import reduce
from operator import and_
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.patterns_oracle import build, counts
from oracles.strategies import Scene, drawn, masks, mixtures, scenes

import sparsering as sr
from sparsering.patterns.keys import key_mask, without_key_masks

CPU = torch.device("cpu")
VALID = torch.tensor([[True, False, True, True], [False, False, True, True]])
MASK, PADDING = sr.KeyMask(VALID), sr.KeyPadding((3, 4))
CAUSAL, WINDOW = sr.Causal(), sr.SlidingWindow(2)


@pytest.mark.parametrize(
    ("pattern", "rest", "taken"),
    [
        (CAUSAL & MASK, CAUSAL, [MASK]),
        (MASK & CAUSAL & PADDING & WINDOW, CAUSAL & WINDOW, [MASK, PADDING]),
        (MASK, sr.Full(), [MASK]),
        (PADDING, sr.Full(), [PADDING]),
        (MASK & PADDING, sr.Full(), [MASK, PADDING]),
        ((WINDOW + CAUSAL) & PADDING, WINDOW + CAUSAL, [PADDING]),
        ((MASK & WINDOW) + MASK, WINDOW + sr.Full(), [MASK]),
        ((MASK & WINDOW & PADDING) + (PADDING & MASK), WINDOW + sr.Full(), [PADDING, MASK]),
        ((CAUSAL & sr.KeyMask(VALID.clone())) + (WINDOW & MASK), CAUSAL + WINDOW, [MASK]),
        (sr.Packed((2, 2), CAUSAL) & MASK, sr.Packed((2, 2), CAUSAL), [MASK]),
    ],
    ids=str,
)
def test_masks_of_keys_at_the_top_of_every_branch_are_taken_off(
    pattern: Any, rest: Any, taken: list[Any]
) -> None:
    for _ in range(2):  # the second answer is the first one, kept
        got_rest, got = without_key_masks(pattern)
        assert got_rest == rest
        assert list(got) == taken
    assert got_rest.branches == rest.branches


@pytest.mark.parametrize(
    "pattern",
    [
        CAUSAL,
        CAUSAL | MASK,
        (CAUSAL & MASK) | WINDOW,
        (CAUSAL & MASK) + WINDOW,
        WINDOW + MASK,
        (CAUSAL & MASK) + (WINDOW & sr.KeyMask(~VALID)),
        (CAUSAL & MASK) + (WINDOW & MASK & PADDING),
        (CAUSAL & MASK & PADDING) + (WINDOW & MASK),
        (CAUSAL & sr.KeyMask(VALID[0])) + (WINDOW & sr.KeyMask(VALID[:1])),
        (CAUSAL & PADDING) + (WINDOW & sr.KeyPadding((4, 3))),
        sr.Packed((2, 2), sr.KeyMask(VALID[0, :2])),
    ],
    ids=str,
)
def test_a_pattern_whose_branches_do_not_share_them_stays_as_it_is(pattern: Any) -> None:
    rest, taken = without_key_masks(pattern)
    assert rest is pattern
    assert taken == ()


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_is_left_and_what_is_taken_are_the_pattern(data: Any) -> None:
    scene: Scene = data.draw(scenes(max_length=30, max_heads=2))
    of_keys = st.one_of(drawn("KeyMask", scene), drawn("KeyPadding", scene))
    spec = data.draw(st.one_of(masks(scene, 1), mixtures(scene, 0)))
    can_stay = "Key" in str(spec)
    for mask in data.draw(st.lists(of_keys, min_size=1, max_size=2)):
        spec = data.draw(st.sampled_from([("&", spec, mask), ("&", mask, spec)]))
    pattern = build(spec)
    rest, taken = without_key_masks(pattern)
    assert taken or can_stay
    assert len(rest.branches) == len(pattern.branches)
    dense = rest.to_dense(**scene.arguments).long()
    if taken:
        valid = key_mask(taken, scene.kv_len, CPU)
        assert valid.dtype is torch.bool
        assert valid.shape in [(1, scene.kv_len), (scene.batch, scene.kv_len)]
        dense = dense * valid[:, None, None]
    expected = counts(spec, batch=scene.batch, **scene.arguments)
    assert torch.equal(dense.expand_as(expected), expected)


def test_one_tensor_is_the_conjunction_of_the_masks() -> None:
    given = (MASK, PADDING, sr.KeyMask(torch.tensor([True, True, True, False])))
    assert key_mask(given, 4, CPU).tolist() == [
        [True, False, True, False],
        [False, False, True, False],
    ]
    assert key_mask((sr.KeyMask(VALID[0]),), 4, CPU).tolist() == [VALID[0].tolist()]
    assert key_mask((sr.KeyPadding((7, 0)),), 2, CPU).tolist() == [[True, True], [False, False]]
    assert key_mask((sr.KeyPadding(()),), 3, CPU).shape == (0, 3)
    on_meta = key_mask((MASK, PADDING), 4, torch.device("meta"))
    assert on_meta.is_meta and on_meta.shape == (2, 4)


@pytest.mark.parametrize(
    ("given", "batch", "kv_len", "words"),
    [
        ((MASK,), 3, 4, ["for 2 batch entries", "query of 3", "KeyMask(t0)"]),
        ((PADDING,), 1, 4, ["for 2 batch entries", "query of 1", "KeyPadding((3, 4))"]),
        ((sr.KeyMask(VALID[0]), MASK), 2, 5, ["each of 5 keys", "(4,)"]),
        ((PADDING, MASK), 2, 3, ["each of 3 keys", "(2, 4)"]),
    ],
)
def test_masks_that_do_not_fit_raise(given: Any, batch: int, kv_len: int, words: list[str]) -> None:
    x = torch.zeros(batch, 1, kv_len, 4)
    with pytest.raises(ValueError) as caught:
        sr.attention(x, x, x, reduce(and_, given))
    assert all(word in str(caught.value) for word in words), caught.value
    fitting = torch.zeros(2, 1, 4, 4)
    sr.attention(fitting, fitting, fitting, reduce(and_, given))


def test_a_key_mask_is_a_value() -> None:
    again = sr.KeyMask(VALID.clone())
    assert again == MASK and hash(MASK) == hash(again) and {MASK: 1}[again] == 1
    for copied in (copy.copy(MASK), copy.deepcopy(MASK), pickle.loads(pickle.dumps(MASK))):
        assert copied == MASK and hash(copied) == hash(MASK)
        assert without_key_masks(CAUSAL & copied)[1] == (MASK,)
    assert sr.parse("KeyMask(t0)", [VALID]) == MASK
    both = (CAUSAL + WINDOW) & MASK
    assert sr.parse(both.expression, both.tensors) == both
    assert MASK.num_batches() == 2 and sr.KeyMask(VALID[0]).num_batches() is None
    split = without_key_masks(pickle.loads(pickle.dumps(both)))
    assert split == (CAUSAL + WINDOW, (MASK,))


def test_one_tensor_named_twice_is_one_mask_once_read() -> None:
    """So that masks on a device, whose content is not asked for, are known to be equal."""
    both = (CAUSAL + WINDOW) & MASK
    assert both.tensors[0] is both.tensors[1]
    first, second = sr.parse(both.expression, both.tensors).branches
    assert first.masks[1] is second.masks[1]
    apart = [x.clone() for x in both.tensors]
    first, second = sr.parse(both.expression, apart).branches
    assert first.masks[1] is not second.masks[1]


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_numbers_of_masked_keys_reach_no_row(backend: str) -> None:
    query, key, value = torch.randn(3, 2, 2, 4, 8)
    expected = sr.attention(query, key, value, CAUSAL & MASK, backend="reference")
    hidden = ~VALID[:, None].expand(2, 2, 4)
    key[hidden], value[hidden] = torch.nan, torch.inf
    out = sr.attention(query, key, value, CAUSAL & MASK, backend=backend)
    assert (out - expected).abs().max() < 1e-5
