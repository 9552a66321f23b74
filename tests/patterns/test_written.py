"""Patterns show the text that their user wrote; equality, files and caches have the normal text."""

import copy
import pickle

import pytest
import torch

import sparsering as sr

CAUSAL = sr.Causal()
LONGNET = sr.LongNet((64, 512), (1, 4))
NEAR = sr.SlidingWindow(50) | sr.GlobalTokens(4, rows=False)

SHOWN = [
    (LONGNET & CAUSAL, "LongNet((64, 512), (1, 4)) & Causal()"),
    (CAUSAL & LONGNET, "Causal() & LongNet((64, 512), (1, 4))"),
    (sr.LongNet((64,), (2,), 1), "LongNet((64,), (2,), 1)"),
    (NEAR, "SlidingWindow(50) | GlobalTokens(4, False)"),
    (NEAR & CAUSAL, "(SlidingWindow(50) | GlobalTokens(4, False)) & Causal()"),
    (CAUSAL & (CAUSAL & sr.SlidingWindow(3, 2)), "Causal() & (Causal() & SlidingWindow(3, 2))"),
    (
        CAUSAL - sr.SlidingWindow(2) - sr.Dilated(8, 2),
        "Causal() - SlidingWindow(2) - Dilated(8, 2)",
    ),
    (CAUSAL - (sr.Full() - CAUSAL), "Causal() - (Full() - Causal())"),
    (sr.Packed((3, 4), CAUSAL & NEAR), f"Packed((3, 4), Causal() & ({NEAR}))"),
    (sr.RandomBlocks(0.1, 128, per_head=False), "RandomBlocks(0.1, 128, per_head=False)"),
    (sr.parse(" (Full() |Causal( ))  & Causal()"), "(Full() |Causal( )) & Causal()"),
    (sr.parse("Full()|Causal()") & CAUSAL, "(Full()|Causal()) & Causal()"),
    (sr.parse("Full() & Causal()") & CAUSAL, "Full() & Causal() & Causal()"),
]


@pytest.mark.parametrize(("pattern", "text"), SHOWN, ids=[text for _, text in SHOWN])
def test_a_pattern_shows_what_was_written(pattern, text):
    assert str(pattern) == repr(pattern) == text
    for other in (sr.parse(text), pickle.loads(pickle.dumps(pattern)), copy.deepcopy(pattern)):
        assert str(other) == text and other == pattern and hash(other) == hash(pattern)
        assert other.normal_text == pattern.normal_text
    assert sr.parse(pattern.normal_text) == pattern


def test_spellings_share_layouts():
    sr.layout_cache.clear()
    written = sr.parse("Causal() & SlidingWindow(left=3, dilation=1)")
    layout = written.layout(64, block_size=16)
    assert (CAUSAL & sr.SlidingWindow(3)).layout(64, block_size=16) is layout
    assert str(written) == "Causal() & SlidingWindow(left=3, dilation=1)"


def test_tensors_keep_the_numbers_of_their_names():
    valid = torch.ones(8, dtype=torch.bool)
    pattern = sr.KeyMask(valid) & sr.SlidingWindow(3)
    assert str(pattern) == "(KeyMask(t0) & SlidingWindow(3, 0, 1))"
    swapped = sr.parse("KeyMask(t1) & KeyMask(t0)", (valid, ~valid))
    assert str(swapped) == "(KeyMask(t0) & KeyMask(t1))" and swapped.tensors[0].sum() == 0
