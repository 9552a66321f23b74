"""`PatternRefiner`: its rules one by one, planted blocks found again, ranks with equal tables.

Beside it small replicas of refinements that do not work, which the same criteria reject.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from helpers.ring_workers import groups, workers_of
from torch import Tensor

from sparsering.selection import PatternRefiner, block_scores


def one_row(**options) -> PatternRefiner:
    """A table of one row, 3 of 8 blocks, that holds 0, 1, 2 and protects none."""
    options = {"sink": 0, "local": 0, "ema": 0.0, "margin": 0.0, "cooldown": 0, **options}
    refiner = PatternRefiner(1, 1, 8, 3, **options)
    refiner.table = torch.tensor([[[0, 1, 2]]])
    return refiner


def observe(refiner: PatternRefiner, **mass: float) -> None:
    """Observes blocks of the one row: b3=0.5 is a mass of one half on block 3."""
    blocks = [int(name[1:]) for name in mass]
    refiner.observe(
        torch.tensor([*mass.values()], dtype=torch.float64)[None, None, None],
        torch.tensor(blocks)[None, None],
    )


def row(refiner: PatternRefiner) -> list[int]:
    return refiner.table[0, 0].tolist()


def test_the_best_outside_takes_the_slot_of_the_worst_inside():
    refiner = one_row()
    observe(refiner, b0=0.3, b1=0.1, b2=0.2, b5=0.25, b6=0.15)
    before = refiner.table
    assert refiner.update() and row(refiner) == [0, 5, 2]
    assert before[0, 0].tolist() == [0, 1, 2]  # whoever holds the old one keeps it
    assert not refiner.update() and row(refiner) == [0, 5, 2]


def test_no_gain_leaves_the_table_the_same_object():
    refiner = one_row()
    observe(refiner, b0=0.3, b1=0.1, b2=0.2, b5=0.1, b6=0.05)
    before = refiner.table
    assert not refiner.update() and refiner.table is before


def test_swaps_bounds_what_one_update_changes():
    mass = {"b0": 0.1, "b1": 0.2, "b2": 0.3, "b4": 0.9, "b5": 0.8, "b6": 0.25}
    for swaps, expected in ((1, [4, 1, 2]), (2, [4, 5, 2]), (3, [4, 5, 2]), (9, [4, 5, 2])):
        refiner = one_row(swaps=swaps)
        observe(refiner, **mass)
        assert refiner.update() and row(refiner) == expected


def test_the_margin_is_a_share_of_what_leaves():
    for mass, changed in ((0.219, False), (0.221, True)):
        refiner = one_row(margin=0.1)
        observe(refiner, b0=0.5, b1=0.2, b2=0.5, b7=mass)
        assert refiner.update() is changed


def test_ties_go_to_the_lower_block():
    refiner = one_row()
    observe(refiner, b0=0.25, b1=0.125, b2=0.125, b7=0.5, b4=0.5)
    assert refiner.update() and row(refiner) == [0, 4, 2]


def test_a_block_never_observed_neither_comes_nor_goes():
    refiner = one_row(swaps=3)
    observe(refiner, b0=0.001, b5=0.5, b6=0.4)
    assert refiner.update() and row(refiner) == [5, 1, 2]  # 1 and 2 may be the best there are
    assert not refiner.update()


def test_what_is_not_looked_at_keeps_its_mass():
    refiner = one_row(ema=0.9)
    observe(refiner, b0=0.3, b1=0.3, b2=0.3, b5=0.2)
    refiner.update()
    for _ in range(100):  # 0.9 ** 100 of it would be left
        observe(refiner, b0=0.3, b1=0.3, b2=0.3)
        assert not refiner.update()
    for _ in range(30):
        observe(refiner, b1=0.1)
        refiner.update()
    assert row(refiner) == [0, 5, 2]


def test_the_mean_is_over_observations_and_runs_by_ema():
    refiner = one_row(ema=0.75)
    observe(refiner, b0=0.5, b3=0.25)
    observe(refiner, b0=0.25)
    refiner.update()
    observe(refiner, b0=0.875)
    refiner.update()
    mass = refiner.state_dict()["mass"][0, 0]
    assert mass[0] == 0.75 * 0.375 + 0.25 * 0.875 and mass[3] == 0.25


def test_cooldown_bars_what_was_swapped_out():
    refiner = one_row(cooldown=2)
    observe(refiner, b0=0.3, b1=0.1, b2=0.3, b5=0.2)
    assert refiner.update() and row(refiner) == [0, 5, 2]
    changed = []
    for _ in range(3):
        observe(refiner, b1=0.9, b5=0.01)
        changed.append(refiner.update())
    assert changed == [False, False, True] and row(refiner) == [0, 1, 2]


def test_forced_blocks_never_leave():
    rows, blocks = 6, 12
    refiner = PatternRefiner(2, rows, blocks, 4, sink=1, local=2, swaps=4, margin=0.0, ema=0.0)
    forced = [{0, r * blocks // rows, max(0, r * blocks // rows - 1)} for r in range(rows)]

    def holds() -> bool:
        return all(
            forced[r] <= set(refiner.table[h, r].tolist()) for h in range(2) for r in range(6)
        )

    assert holds()
    for _ in range(12):
        mass = torch.rand(1, 2, rows, blocks)
        for r in range(rows):
            mass[:, :, r, list(forced[r])] = 0
        refiner.observe(mass, torch.arange(blocks).expand(rows, -1))
        refiner.update()
        assert holds() and all(len(set(x.tolist())) == 4 for x in refiner.table.flatten(0, 1))


def test_slots_that_are_not_observed():
    """-1, numbers that are no block, and the later of repeated ones."""
    refiner = one_row()
    refiner.observe(
        torch.tensor([[[[0.5, float("nan"), 0.25, 0.125, 7.0]]]]), torch.tensor([[3, -1, 8, 4, 3]])
    )
    refiner.update()
    state = refiner.state_dict()
    assert state["observed"][0, 0].nonzero()[:, 0].tolist() == [3, 4]
    assert state["mass"][0, 0, 3:5].tolist() == [0.5, 0.125]


def test_heads_of_a_group_are_summed_and_batches_averaged():
    refiner = PatternRefiner(2, 1, 4, 2, sink=0, local=0)
    mass = torch.rand(3, 4, 1, 4, dtype=torch.float64)
    refiner.observe(mass, torch.arange(4)[None])
    refiner.update()
    expected = mass.view(3, 2, 2, 1, 4).sum(2).mean(0)
    assert (refiner.state_dict()["mass"] - expected).abs().max() < 2**-31


def test_the_first_table_is_a_function_of_the_seed():
    a, b, c = (PatternRefiner(2, 9, 16, 5, seed=seed).table for seed in (3, 3, 4))
    assert torch.equal(a, b) and not torch.equal(a, c) and a.dtype == torch.int64
    torch.rand(3)  # whatever else is drawn
    assert torch.equal(PatternRefiner(2, 9, 16, 5, seed=3).table, a)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 1}, r"sink \+ local = 2"),
        ({"k": 17}, "at most blocks = 16"),
        ({"ema": 1.0}, "ema must be"),
        ({"margin": -0.1}, "margin finite"),
        ({"swaps": 0}, "swaps must be at least 1"),
        ({"cooldown": -1}, "cooldown must be at least 0"),
    ],
)
def test_what_is_no_refiner_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        PatternRefiner(1, 4, 16, **{"k": 4, **options})


@pytest.mark.parametrize(
    ("mass", "indices", "said"),
    [
        (torch.rand(1, 3, 4, 2), torch.zeros(4, 2).long(), "multiple of 2 heads"),
        (torch.rand(1, 2, 5, 2), torch.zeros(5, 2).long(), "4 rows"),
        (torch.rand(1, 2, 4, 2), torch.zeros(4, 3).long(), "int64 that broadcast"),
        (torch.rand(1, 2, 4, 2), torch.zeros(4, 2), "int64 that broadcast"),
        (-torch.rand(1, 2, 4, 1), torch.zeros(4, 1).long(), "at least 0"),
        (torch.full((1, 2, 4, 1), torch.nan), torch.zeros(4, 1).long(), "at least 0"),
        (torch.full((1, 2, 4, 1), torch.inf), torch.zeros(4, 1).long(), "below 2\\^20"),
    ],
)
def test_observations_that_do_not_fit_change_nothing(mass, indices, said):
    refiner = PatternRefiner(2, 4, 16, 4)
    before = refiner.state_dict()
    with pytest.raises(ValueError, match=said):
        refiner.observe(mass, indices)
    assert all(torch.equal(x, before[name]) for name, x in refiner.state_dict().items())


# Planted blocks: what a pattern by position is to find.
HEADS, ROWS, BLOCKS, K, SIZE, D = 2, 8, 24, 4, 4, 16


class Plant:
    """Attention whose row r of head h looks at K blocks: the first, its own and others, planted.

    Queries carry their row's code, and so do the keys of its blocks; noise is drawn at each step.
    """

    def __init__(self, seed: int, noise_seed: int = 0) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.noise = torch.Generator().manual_seed(1000 + noise_seed)
        self.codes = torch.linalg.qr(torch.randn(D, D, generator=self.draw)).Q[:ROWS]
        self.move()

    def move(self) -> None:
        order = torch.rand(HEADS, ROWS, BLOCKS, generator=self.draw)
        row, block = torch.arange(ROWS)[:, None], torch.arange(BLOCKS)
        order = order - 2.0 * ((block == 0) | (block == row * BLOCKS // ROWS))
        self.blocks = order.argsort(2)[..., :K].sort(2).values
        self.planted = torch.zeros(HEADS, ROWS, BLOCKS).scatter_(2, self.blocks, 1.0)

    def step(self) -> tuple[Tensor, Tensor]:
        """Queries and keys [1, H, N, D]; scores are their products."""
        code = 4 * self.planted.mT @ self.codes  # [H, Nb, D]
        key = code[:, :, None] + torch.randn(HEADS, BLOCKS, SIZE, D, generator=self.noise)
        query = self.codes[:, None] + 0.1 * torch.randn(HEADS, ROWS, SIZE, D, generator=self.noise)
        return query.flatten(1, 2)[None], key.flatten(1, 2)[None]

    def shares(self) -> Tensor:
        """[1, H, R, Nb]: the softmax mass of each block, summed over a row's queries."""
        query, key = self.step()
        weights = (query @ key.mT).softmax(3).view(1, HEADS, ROWS, SIZE, BLOCKS, SIZE)
        return weights.sum((3, 5))

    def found(self, table: Tensor) -> float:
        """The share of the planted blocks that a table holds."""
        return self.planted.gather(2, table).mean().item()


def rows_at_random(generator: torch.Generator) -> Tensor:
    """Every block of a fifth of the rows, -1 in the others: [H, R, Nb]."""
    chosen = torch.rand(HEADS, ROWS, 1, generator=generator) < 0.2
    return torch.where(chosen, torch.arange(BLOCKS), -1)


def looks_at_rows(refiner: PatternRefiner, shares: Tensor, generator: torch.Generator) -> None:
    """Observes some whole rows now and then, as the docstring of the class says."""
    refiner.observe(shares, rows_at_random(generator))


def looks_at_visited(refiner: PatternRefiner, shares: Tensor, generator: torch.Generator) -> None:
    """The mass of what the pattern visits, and of nothing else."""
    visited = shares.gather(3, refiner.table[None])
    refiner.observe(visited, refiner.table)


class PriorRefinement:
    """The prior library's refinement: importance of visited blocks, 0 for all others.

    Its additions were those above a threshold among blocks outside the pattern, whose weights were
    zero because they were outside.
    """

    def __init__(self, table: Tensor) -> None:
        self.active = torch.zeros(HEADS, ROWS, BLOCKS, dtype=torch.bool).scatter_(2, table, True)
        self.importance = torch.zeros(HEADS, ROWS, BLOCKS)

    def observe(self, shares: Tensor, indices: Tensor) -> None:
        attended = torch.where(self.active, shares[0], 0.0)
        self.importance = 0.9 * self.importance + 0.1 * attended

    def update(self) -> bool:
        worst = torch.where(self.active, self.importance, torch.inf).argmin(2, keepdim=True)
        self.active.scatter_(2, worst, False)
        added = (self.importance > 0.02) & ~self.active
        self.active |= added
        return True

    @property
    def table(self) -> Tensor:
        return self.active.float().argsort(2, descending=True)[..., :K]


Look = Callable[[PatternRefiner, Tensor, torch.Generator], None]


def refine(refiner, plant: Plant, updates: int, look: Look = looks_at_rows) -> Iterator[float]:
    """Yields the share of planted blocks in the table after each update of 4 steps."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(updates):
        for _ in range(4):
            look(refiner, plant.shares(), generator)
        refiner.update()
        yield plant.found(refiner.table)


def finds_planted(refiner, look: Look = looks_at_rows, updates: int = 6 * K) -> bool:
    """The criterion: 95% of the planted blocks after a number of updates."""
    return [*refine(refiner, Plant(seed=7), updates, look)][-1] >= 0.95


def test_exact_scores_are_what_is_to_be_observed():
    a, b = Plant(seed=7), Plant(seed=7)
    query, key = a.step()
    mass = block_scores(
        query, key, SIZE, query_block=SIZE, method="exact", causal=False, scale=1.0, q_start=0
    ).exp()
    assert torch.allclose(mass, b.shares(), rtol=1e-4, atol=1e-6)


def test_planted_blocks_are_found_and_found_again_when_they_move():
    refiner, plant = PatternRefiner(HEADS, ROWS, BLOCKS, K), Plant(seed=7)
    start = plant.found(refiner.table)
    found = [*refine(refiner, plant, 6 * K)]
    assert start < 0.65 and found[-1] >= 0.95, (start, found)
    smooth = [sum(found[i : i + 4]) for i in range(len(found) - 3)]
    assert all(b >= a - 0.1 for a, b in pairwise(smooth))
    assert refiner.table.shape == (HEADS, ROWS, K)
    plant.move()
    moved = plant.found(refiner.table)
    found = [*refine(refiner, plant, 12 * K)]
    assert moved < 0.65 and found[-1] >= 0.95, (moved, found)


def test_a_refiner_that_looks_at_what_is_visited_alone_does_not_find_them():
    assert finds_planted(PatternRefiner(HEADS, ROWS, BLOCKS, K))
    assert not finds_planted(PatternRefiner(HEADS, ROWS, BLOCKS, K), looks_at_visited, 50 * K)


def rows_of(table: Tensor) -> list[Tensor]:
    return [*table.flatten(0, 1)]


def readmits_a_pruned_block(refiner) -> bool:
    """Whether a block that was swapped out comes back when attention turns to it again."""
    first = refiner.table.clone()
    for _ in refine(refiner, Plant(seed=7), 6 * K):
        pass
    pairs = zip(rows_of(first), rows_of(refiner.table), strict=True)
    left = [set(a.tolist()) - set(b.tolist()) for a, b in pairs]
    back = Plant(seed=7)
    back.planted.zero_().scatter_(2, first, 1.0)
    for _ in refine(refiner, back, 12 * K):
        pass
    again = [set(x.tolist()) for x in rows_of(refiner.table)]
    out = sum(map(len, left))
    assert out > ROWS  # some were
    return sum(len(a & b) for a, b in zip(left, again, strict=True)) >= 0.9 * out


def test_a_pruned_block_comes_back_which_the_prior_refinement_never_let():
    assert readmits_a_pruned_block(PatternRefiner(HEADS, ROWS, BLOCKS, K))
    first = PatternRefiner(HEADS, ROWS, BLOCKS, K).table
    assert not readmits_a_pruned_block(PriorRefinement(first))


def test_it_resumes_with_the_same_bits_between_two_updates(tmp_path):
    def steps(refiner, plant, generator, start, stop):
        tables = []
        for step in range(start, stop):
            refiner.observe(plant.shares(), rows_at_random(generator))
            if step % 4 == 3:
                refiner.update()
            tables.append(refiner.table)
        return tables

    whole, plant, generator = PatternRefiner(HEADS, ROWS, BLOCKS, K), Plant(7), torch.Generator()
    steps(whole, plant, generator, 0, 42)  # in the middle of an interval
    torch.save(whole.state_dict(), tmp_path / "refiner.pt")
    plant.move()
    kept = plant.noise.get_state(), generator.get_state()
    expected = steps(whole, plant, generator, 42, 80)
    assert not torch.equal(expected[0], expected[-1])
    resumed = PatternRefiner(HEADS, ROWS, BLOCKS, K, seed=99)
    resumed.load_state_dict(torch.load(tmp_path / "refiner.pt", weights_only=True))
    plant.noise.set_state(kept[0])
    generator.set_state(kept[1])
    got = steps(resumed, plant, generator, 42, 80)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    ends = resumed.state_dict(), whole.state_dict()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    with pytest.raises(ValueError, match="k=5"):
        PatternRefiner(HEADS, ROWS, BLOCKS, K + 1).load_state_dict(ends[0])
    with pytest.raises(ValueError, match="state_dict of a PatternRefiner"):
        resumed.load_state_dict({"table": whole.table})


def test_what_is_barred_stays_barred_after_resuming():
    refiner, resumed = one_row(cooldown=2), one_row(cooldown=2)
    observe(refiner, b0=0.3, b1=0.1, b2=0.3, b5=0.2)
    assert refiner.update() and row(refiner) == [0, 5, 2]
    resumed.load_state_dict(refiner.state_dict())
    changed = []
    for _ in range(3):
        observe(resumed, b1=0.9, b5=0.01)
        changed.append(resumed.update())
    assert changed == [False, False, True] and row(resumed) == [0, 1, 2]


workers = workers_of(3)


def refine_on_a_rank(rank: int, world: int) -> tuple[list[Tensor], dict[str, Tensor], float]:
    refiner, plant = PatternRefiner(HEADS, ROWS, BLOCKS, K), Plant(7, noise_seed=rank)
    generator, tables = torch.Generator().manual_seed(rank), []
    for _ in range(6 * K):
        for _ in range(2):
            looks_at_rows(refiner, plant.shares(), generator)
        refiner.update(groups[world])
        tables.append(refiner.table)
    return tables, refiner.state_dict(), plant.found(refiner.table)


def test_ranks_with_different_data_end_every_update_with_equal_tables(workers):
    results = workers.run(refine_on_a_rank, 3, world=3)
    for tables, state, found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tables, results[0][0], strict=True))
        assert all(torch.equal(x, results[0][1][name]) for name, x in state.items())
        assert found >= 0.95
    assert not torch.equal(results[0][0][0], results[0][0][-1])


def sum_over_ranks(rank: int, world: int, masses: Tensor) -> Tensor:
    refiner = PatternRefiner(1, 1, 8, 2, sink=0, local=0)
    for mass in masses[rank::world]:
        refiner.observe(mass, torch.arange(8)[None])
    refiner.update(groups[world])
    return refiner.state_dict()["mass"]


def test_however_the_data_is_dealt_out_means_have_the_same_bits(workers):
    masses = torch.rand(12, 1, 1, 1, 8) ** 20
    means = [workers.run(sum_over_ranks, world, masses, world=world)[0] for world in (1, 2, 3)]
    assert torch.equal(means[0], means[1]) and torch.equal(means[0], means[2])


def update_after_a_difference(rank: int, world: int, option: str) -> str:
    refiner = PatternRefiner(1, 4, 16, 4, **({option: 1 + rank} if option != "alone" else {}))
    if option == "alone" and rank == 1:
        refiner.observe(torch.rand(1, 1, 4, 16), torch.arange(16).expand(4, -1))
        refiner.update()
    try:
        refiner.update(groups[world])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("option", ["seed", "swaps", "alone"])
def test_ranks_that_differ_all_raise(workers, option):
    errors = workers.run(update_after_a_difference, 2, option, world=2)
    assert all("same arguments and state" in error for error in errors), errors


def gate_on_a_rank(rank: int, world: int) -> list[int]:
    from sparsering.selection import GatedSchedule, Schedule

    gated = GatedSchedule(Schedule(((0, 1.0), (4, 0.0))), bar=0.9)
    metrics = [(0.85, 0.99), (0.99, 0.7), (1.0, float("nan")), (0.9, 0.9)]
    clocks = []
    for metric in metrics:
        gated.step(metric[rank], groups[world])
        clocks.append(gated.clock)
    return clocks


def test_gates_of_ranks_go_by_their_mean(workers):
    assert workers.run(gate_on_a_rank, 2, world=2) == [[1, 1, 1, 2]] * 2


def test_a_shallow_copy_observes_alone():
    first = one_row()
    observe(first, b0=0.3, b1=0.1, b2=0.2)
    second = copy.copy(first)
    observe(second, b5=0.9)
    assert not first.update()
    assert second.update()
    assert (row(first), sorted(row(second))) == ([0, 1, 2], [0, 2, 5])
