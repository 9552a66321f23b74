"""RandomBlocks: the choice is the library's own, its properties are not."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsering as sr
from sparsering.ground.rows import mix


def chosen_blocks(pattern: Any, blocks: int, block_size: int = 2, **arguments: Any) -> Tensor:
    """Bool [H or 1, blocks, blocks] of a square scene of whole blocks."""
    dense = pattern.to_dense(blocks * block_size, **arguments)
    heads = dense.shape[0]
    tiles = dense.view(heads, blocks, block_size, blocks, block_size)
    chosen = tiles[:, :, 0, :, 0]
    whole_tiles = chosen[:, :, None, :, None].expand(heads, blocks, block_size, blocks, block_size)
    assert torch.equal(tiles, whole_tiles)
    return chosen


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0])
def test_random_rows_have_the_stated_count_and_the_diagonal(blocks: int, density: float) -> None:
    expected = max(1, int(density * blocks + 0.5))
    pattern = sr.RandomBlocks(density, 2, seed=1)
    chosen = chosen_blocks(pattern, blocks, num_heads=3).expand(3, -1, -1)
    assert chosen.sum(-1).tolist() == [[expected] * blocks] * 3
    assert chosen.diagonal(dim1=1, dim2=2).all()


def test_random_count_rounds_halves_up() -> None:
    for density, blocks, expected in ((0.5, 5, 3), (0.25, 6, 2), (0.25, 2, 1), (0.125, 12, 2)):
        chosen = chosen_blocks(sr.RandomBlocks(density, 2), blocks)
        assert set(chosen.sum(-1).flatten().tolist()) == {expected}


def test_random_count_includes_a_ragged_last_block() -> None:
    # 9 tokens in blocks of 2: 5 blocks, 0.6 of them are 3
    dense = sr.RandomBlocks(0.6, 2).to_dense(9)[0]
    assert dense[:, ::2].sum(-1).tolist() == [3] * 9
    assert dense[8, 8]


def test_random_choice_does_not_depend_on_which_queries_are_asked() -> None:
    pattern = sr.RandomBlocks(0.3, 4, seed=5)
    whole = pattern.to_dense(40, num_heads=2)
    assert torch.equal(pattern.to_dense(7, 40, num_heads=2), whole[:, 33:])
    assert torch.equal(pattern.to_dense(13, 40, num_heads=2, q_start=6), whole[:, 6:19])


def test_random_rows_past_the_last_key_keep_the_stated_count() -> None:
    dense = sr.RandomBlocks(0.5, 2).to_dense(4, 8, q_start=20)[0]
    assert dense[:, ::2].sum(-1).tolist() == [2] * 4


def test_random_rows_of_negative_positions_are_empty() -> None:
    dense = sr.RandomBlocks(0.5, 2).to_dense(8, 5)[0]  # positions -3 .. 4
    assert not dense[:3].any()
    assert dense[3:].any(dim=1).all()


def test_random_choice_goes_by_block_not_by_token() -> None:
    small = chosen_blocks(sr.RandomBlocks(0.3, 1, seed=2), 12, block_size=1, num_heads=2)
    large = chosen_blocks(sr.RandomBlocks(0.3, 5, seed=2), 12, block_size=5, num_heads=2)
    assert torch.equal(small, large)


def test_random_choice_is_per_kv_head() -> None:
    pattern = sr.RandomBlocks(0.3, 2, seed=1)
    two = chosen_blocks(pattern, 16, num_heads=2)
    grouped = chosen_blocks(pattern, 16, num_heads=6, num_kv_heads=2)
    assert not torch.equal(two[0], two[1])
    assert torch.equal(grouped, two.repeat_interleave(3, dim=0))
    assert torch.equal(chosen_blocks(pattern, 16)[0], two[0])


def test_random_choice_shared_by_heads() -> None:
    pattern = sr.RandomBlocks(0.3, 2, seed=1, per_head=False)
    chosen = chosen_blocks(pattern, 16, num_heads=3).expand(3, -1, -1)
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])
    assert torch.equal(chosen[0], chosen_blocks(pattern, 16)[0])


def test_random_choice_differs_between_seeds_and_between_rows() -> None:
    by_seed = [chosen_blocks(sr.RandomBlocks(0.3, 2, seed=seed), 16)[0] for seed in range(20)]
    assert len({tuple(chosen.flatten().tolist()) for chosen in by_seed}) == 20
    shifted = {
        tuple(by_seed[0][row].roll(-row).tolist()) for row in range(16)
    }  # relative to the diagonal
    assert len(shifted) > 12


def test_random_choice_is_independent_between_neighbours() -> None:
    # Seeds, heads and rows must not be mixed by a sum: (seed 1, head 0) is not (seed 0, head 1).
    first, second = (
        chosen_blocks(sr.RandomBlocks(0.3, 1, seed=seed), 24, block_size=1, num_heads=2)
        for seed in (0, 1)
    )
    assert not torch.equal(first[1], second[0])
    off_diagonal = ~torch.eye(24, dtype=torch.bool)
    for a, b in ((first[0], first[1]), (first[0], second[0]), (first[1], second[0])):
        shared = (a & b & off_diagonal).sum().item()
        # 24 rows of 6 out of 23: 24 * 6 * 6 / 23 = 38 shared by chance, standard deviation 5
        assert 15 <= shared <= 61


def furthest_in_deviations(hits: Tensor, trials: int, probability: float) -> float:
    """Largest distance of any of the counts from its mean, in standard deviations."""
    deviation = (trials * probability * (1 - probability)) ** 0.5
    return ((hits - trials * probability).abs().max() / deviation).item()


def test_random_choice_is_uniform_over_seeds_and_over_heads() -> None:
    blocks = 12  # 4 a row: the diagonal, and 3 of the 11 others, each with probability 3 / 11
    off_diagonal = ~torch.eye(blocks, dtype=torch.bool)
    by_seed = torch.cat(
        [
            chosen_blocks(sr.RandomBlocks(0.34, 1, seed=seed), blocks, block_size=1)
            for seed in range(400)
        ]
    )
    many_heads = sr.RandomBlocks(0.34, 1, seed=1)
    by_head = chosen_blocks(many_heads, blocks, block_size=1, num_heads=400)
    for chosen in (by_seed, by_head):
        hits = chosen.sum(0)
        assert hits.diagonal().tolist() == [400] * blocks
        assert furthest_in_deviations(hits[off_diagonal], 400, 3 / 11) < 5


def test_random_choice_favours_no_key_block() -> None:
    blocks, heads = 96, 8
    chosen = chosen_blocks(sr.RandomBlocks(0.1, 1), blocks, block_size=1, num_heads=heads)
    hits = chosen.sum((0, 1)) - heads  # of a key block, over heads and query blocks
    assert furthest_in_deviations(hits, heads * (blocks - 1), 9 / 95) < 5


def test_random_choice_does_not_depend_on_the_global_seed() -> None:
    torch.manual_seed(1)
    first = sr.RandomBlocks(0.3, 2, seed=4).to_dense(32, num_heads=2)
    torch.manual_seed(2)
    assert torch.equal(sr.RandomBlocks(0.3, 2, seed=4).to_dense(32, num_heads=2), first)


def test_hashes_of_ints_are_those_of_tensors():
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**62), 2**62, (200, 3), generator=generator)
    edges = torch.tensor([[2**63 - 1, -(2**63), 0], [-1, 1, 2**63 - 1], [-(2**63), -1, -1]])
    for parts in torch.cat((drawn, edges)):
        numbers = [int(part) for part in parts]
        assert int(mix(*numbers)) == int(mix(*parts)) == int(mix(parts[0], *numbers[1:]))
