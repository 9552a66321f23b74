"""The comparison "rows": what is timed attends to the same pairs, and what neighbours share."""

import pytest
import torch

import sparsering as sr
from benchmarks.comparisons.rows import BLOCK, drawn, in_tiles


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_tiles_of_a_union_hold_the_same_pairs(share):
    pattern = drawn(512, 1, share) & sr.Causal()
    layout = pattern.layout(512, num_heads=8, num_kv_heads=2, block_size=BLOCK)
    united = in_tiles(layout)
    assert united.passes[0].query_start.shape == (1, 8)
    assert united.num_blocks < layout.num_blocks / 10
    assert torch.equal(united.to_dense(), layout.to_dense())


def test_neighbours_share_what_they_are_to():
    for share, least, most in ((0.0, 0.03, 0.15), (0.9, 0.89, 0.94)):
        blocks = drawn(16384, 1, share).indices[:, 8192:, 2:]
        kept = (blocks[:, 1:, :, None] == blocks[:, :-1, None]).any(-1).float().mean()
        assert least < kept < most
