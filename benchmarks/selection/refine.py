"""A refiner finds blocks that were planted in a pattern, and does not without looking elsewhere."""

import time

import torch
from torch import Tensor

import sparsering as sr
from sparsering.selection import PatternRefiner, block_mass, block_scores

from ..measure import Row
from .tasks import generator

HEADS, ROWS, BLOCKS, K, SIZE, WIDTH = 2, 64, 64, 6, 16, 64
UPDATES, STEPS, PROBED = 3 * K, 4, 1 / 4  # updates; examples of each; rows looked at whole


def planted(random: torch.Generator) -> Tensor:
    """For each head and row, 6 blocks that it needs: int64 [H, R, 6]."""
    return torch.rand(HEADS, ROWS, BLOCKS, generator=random).argsort(-1)[..., :K]


def example(plant: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Query and key [1, H, 1024, 64]: a needed block's keys hold the row's code, in fresh noise.

    The score of a needed key is 4 on average, that of another 0; noise has a deviation of about 1.
    """
    codes = torch.linalg.qr(torch.randn(HEADS, ROWS, WIDTH, generator=generator(0)))[0]
    means = torch.zeros(HEADS, BLOCKS, WIDTH)
    for slot in range(K):
        means.scatter_add_(1, plant[..., slot, None].expand(-1, -1, WIDTH), codes)
    shape = (HEADS, BLOCKS, SIZE, WIDTH)
    key = means[:, :, None] + 0.25 * torch.randn(shape, generator=random)
    query = 4.0 * codes[:, :, None] + 0.25 * torch.randn(shape, generator=random)
    return tuple(x.flatten(1, 2)[None] * WIDTH**0.25 for x in (query, key))


def observe(refiner: PatternRefiner, query: Tensor, key: Tensor, probe: Tensor | None) -> float:
    """Has a refiner see the mass of what its pattern visits, and of probed rows all of it.

    Shares are of the full softmax, so that visited and unvisited blocks compare.

    Returns: the share that the pattern captures.
    """
    _, lse = sr.attention(query, key, key, sr.Full(), q_start=0, return_lse=True)
    pattern = sr.SelectedBlocks(refiner.table, SIZE)
    mass = block_mass(query, key, pattern, lse, q_start=0)
    if probe is None:
        refiner.observe(mass, refiner.table)
    else:
        every = block_scores(query, key, SIZE, query_block=SIZE, method="exact", causal=False).exp()
        probed = torch.where(probe[:, None], torch.arange(BLOCKS), -1)
        refiner.observe(every, probed)
        refiner.observe(mass, torch.where(probe[:, None], -1, refiner.table))
    return mass.sum().item() / (HEADS * ROWS * SIZE)


def recovered(table: Tensor, plant: Tensor) -> float:
    """Returns the share of planted blocks that the table lists."""
    return (plant[..., None] == table[..., None, :]).any(-1).float().mean().item()


def followed(seed: int, *, probes: bool, moves: bool) -> Row:
    """Updates of a refiner, after which the plant moves and as many follow."""
    start, random = time.perf_counter(), generator(1000 + seed)
    refiner = PatternRefiner(HEADS, ROWS, BLOCKS, K, ema=0.5, sink=0, local=0, seed=seed)
    hits, mass, sizes = [], [], set()
    for _ in range(1 + moves):
        plant = planted(random)
        for _ in range(UPDATES):
            for _ in range(STEPS):
                probe = torch.rand(ROWS, generator=random) < PROBED
                query, key = example(plant, random)
                mass.append(observe(refiner, query, key, probe if probes else None))
            refiner.update()
            sizes.add(tuple(refiner.table.shape))
            hits.append(recovered(refiner.table, plant))
    return {
        "experiment": "refined", "seed": seed, "probes": probes, "updates": UPDATES,
        "found": hits[UPDATES - 1], "found_after_move": hits[-1] if moves else None,
        "found_at_updates": hits, "captured_first": mass[0], "captured": mass[UPDATES * STEPS - 1],
        "captured_at_updates": mass[::STEPS], "one_size": len(sizes) == 1,
        "density": sr.SelectedBlocks(refiner.table, SIZE).layout(ROWS * SIZE, num_heads=HEADS,
            q_start=0, block_size=SIZE).num_pairs / (ROWS * SIZE) ** 2,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def refined(seed: int) -> list[Row]:
    """With probes, and blind to what is not visited."""
    return [followed(seed, probes=True, moves=True), followed(seed, probes=False, moves=False)]
