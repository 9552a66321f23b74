"""Drawings count pairs: exactly where they can, close by sampling."""

import pytest
import torch

import sparsering as sr
from sparsering.layouts.drawing import pair_shares
from sparsering.plots import loss_png, pattern_png


@pytest.mark.parametrize(
    "pattern",
    [
        sr.LongNet((32, 96), (1, 3)) & sr.Causal(),
        sr.Causal() & (sr.SlidingWindow(20) | sr.GlobalTokens(5)),
        sr.SlidingWindow(60, 20, dilation=3),
    ],
)
@pytest.mark.parametrize("length", [96, 150])
def test_shares_of_single_positions_are_the_pattern(pattern, length):
    layout = pattern.layout(length, num_heads=3, block_size=32)
    dense = pattern.to_dense(length, num_heads=3)
    for head in range(3):
        expected = dense[head if len(dense) > 1 else 0].double()
        assert torch.equal(pair_shares(layout, length, head=head), expected)


def test_shares_of_areas_are_means_of_the_pattern():
    pattern = sr.LongNet((64, 256), (1, 4)) & sr.Causal()
    layout = pattern.layout(512, block_size=64)
    means = pattern.to_dense(512)[0].double().view(32, 16, 32, 16).mean((1, 3))
    torch.testing.assert_close(pair_shares(layout, 32), means)
    sampled = pair_shares(layout, 32, most_samples=layout.num_blocks * 256)
    assert (sampled - means).abs().max() < 0.15
    assert abs(sampled.sum() / means.sum() - 1) < 0.1


def test_a_million_tokens_are_drawn_from_the_layout():
    pattern = sr.Causal() & sr.SlidingWindow(4096)
    shares = pair_shares(pattern.layout(1 << 20), 64)
    assert (shares.diagonal() > 0).all()
    assert shares.count_nonzero() == 64 + 63


def test_pictures_are_png():
    signature = b"\x89PNG\r\n\x1a\n"
    assert pattern_png(sr.Causal(), 64, num_heads=2, block_size=16).startswith(signature)
    records = [{"step": 0, "validation_loss": 5.0}, {"step": 1, "loss": 4.0}]
    assert loss_png(records, {"bigram": 2.0}).startswith(signature)


def test_a_drawing_needs_a_length():
    with pytest.raises(ValueError, match="at least 1 token"):
        pattern_png(sr.Causal(), 0)
