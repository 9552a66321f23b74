"""Drawings: each pair where it is, darker where more of an area is visited."""

import pytest
import torch

import sparsering as sr
from sparsering.layouts.drawing import drawing, pair_shares

LITERAL = {
    "causal": (
        sr.Causal(),
        8,
        """
        @.......
        @@......
        @@@.....
        @@@@....
        @@@@@...
        @@@@@@..
        @@@@@@@.
        @@@@@@@@
        """,
    ),
    "window and global tokens": (
        sr.Causal() & (sr.SlidingWindow(2) | sr.GlobalTokens(1)),
        8,
        """
        @.......
        @@......
        @@@.....
        @@@@....
        @.@@@...
        @..@@@..
        @...@@@.
        @....@@@
        """,
    ),
    "strided tiles": (
        sr.Dilated(8, 2, 1),
        10,
        """
        ..........
        .@.@.@.@..
        ..........
        .@.@.@.@..
        ..........
        .@.@.@.@..
        ..........
        .@.@.@.@..
        ..........
        .........@
        """,
    ),
    "pairs that count twice are darker": (
        sr.Full() + sr.SlidingWindow(0),
        4,
        """
        @+++
        +@++
        ++@+
        +++@
        """,
    ),
    "nothing": (sr.GlobalTokens(0), 2, "..\n.."),
}


@pytest.mark.parametrize("name", LITERAL)
@pytest.mark.parametrize("block_size", [16, 128])
def test_every_pair_of_a_short_sequence_is_drawn(name, block_size):
    pattern, length, expected = LITERAL[name]
    lines = drawing(pattern.layout(length, block_size=block_size))
    assert lines == [f"|{line.replace('.', ' ')}|" for line in expected.split()]


def test_a_layout_prints_its_figures_and_its_drawing():
    assert str(sr.Causal().layout(4)).split("\n") == [
        "BlockLayout 4 x 4 tokens, blocks of 32: 1 visited in 1 pass, density 64 of whole tiles "
        "(0.62 of the pairs), 10 pairs, 0.000184 MB",
        "|@   |",
        "|@@  |",
        "|@@@ |",
        "|@@@@|",
    ]


def test_a_density_of_at_most_1_needs_no_explanation():
    figures = str(sr.Causal().layout(1024)).split("\n")[0]
    assert "density 0.5625, 524800 pairs" in figures


def test_areas_of_many_tokens_are_as_dark_as_their_share():
    lines = drawing(sr.Causal().layout(1024), rows=4, columns=4)
    assert lines == ["|+   |", "|@+  |", "|@@+ |", "|@@@+|"]
    lines = drawing((sr.Causal() & sr.SlidingWindow(255)).layout(1024, block_size=64), 4, 4)
    assert lines == ["|@   |", "|@@  |", "| @@ |", "|  @@|"]


def test_rectangles_and_no_tokens():
    assert drawing(sr.Causal().layout(2, 6, block_size=16)) == ["|@@@@@ |", "|@@@@@@|"]
    assert drawing(sr.Causal().layout(0, 5)) == []
    assert str(sr.Causal().layout(0)).startswith("BlockLayout 0 x 0 tokens")


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
