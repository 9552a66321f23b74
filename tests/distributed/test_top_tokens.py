"""`top_tokens` over ranks: the lists of one process, ties too."""

from typing import Any

import pytest
import torch
from helpers.ring_workers import groups, workers_of
from torch import Tensor

import sparsering as sr
from sparsering.distributed import RingMismatchError, ring_attention, simulate_ring
from sparsering.selection import top_tokens

workers = workers_of(4, "module")
LENGTHS = {2: (20, 17), 3: (5, 0, 32), 4: (10, 10, 10, 7)}
DOCUMENT = torch.tensor([0] * 13 + [13] * 24)  # first token of each token's document


def drawn(whole_numbers: bool) -> list[Tensor]:
    """Query [2, 3, 37, 8], key [2, 37, 8] and weight [2, 37, 3]; whole numbers have many ties."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 37, 8), (2, 37, 8), (2, 37, 3)
    if whole_numbers:
        return [torch.randint(-1, 2, s, generator=generator).float() for s in shapes]
    return [torch.randn(s, generator=generator) for s in shapes]


def options_of(which: str) -> dict[str, Any]:
    position = torch.arange(37)
    return {
        "causal": {},
        "all keys": {"causal": False},
        "lengths": {"causal": False, "lengths": torch.tensor([30, 6])},
        "documents": {"first": DOCUMENT[None], "stop": position[None] + 1},
    }[which]


def own_part(rank: int, world: int, which: str, whole_numbers: bool) -> tuple[list, dict]:
    start = sum(LENGTHS[world][:rank])
    part = slice(start, start + LENGTHS[world][rank])
    query, key, weight = drawn(whole_numbers)
    options = options_of(which)
    options |= {n: options[n][:, part] for n in ("first", "stop") if n in options}
    return [query[:, :, part], key[:, part], weight[:, part]], options


def choose(rank: int, world: int, which: str, whole_numbers: bool, k: int) -> Tensor:
    own, options = own_part(rank, world, which, whole_numbers)
    return top_tokens(*own, k, group=groups[world], **options)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("which", ["causal", "all keys", "lengths", "documents"])
def test_the_lists_are_those_of_one_process(workers, world, which):
    for whole_numbers, k in ((True, 5), (True, 60), (False, 5)):
        found = torch.cat(workers.run(choose, world, which, whole_numbers, k, world=world), 2)
        expected = top_tokens(*drawn(whole_numbers), k, **options_of(which))
        assert torch.equal(found, expected)


def attend_to_chosen(rank: int, world: int) -> Tensor:
    """A layer that chooses its keys, over ranks: its rows of the result."""
    own, options = own_part(rank, world, "causal", False)
    listed = top_tokens(*own, 6, group=groups[world], **options)
    start, count = sum(LENGTHS[world][:rank]), LENGTHS[world][rank]
    chosen = sr.SelectedBlocks(listed, 1, query_block=1, first_row=start) & sr.Causal()
    query, key, value = attended()
    part = slice(start, start + count)
    shards = [x[:, :, part] for x in (query, key, value)]
    return ring_attention(*shards, chosen, group=groups[world])


def attended() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, 37, 16), (2, 2, 37, 16), (2, 2, 37, 16)
    return [torch.randn(s, generator=generator) for s in shapes]


def test_what_is_chosen_over_ranks_is_attended_over_ranks(workers):
    found = torch.cat(workers.run(attend_to_chosen, 4, world=4), 2)
    listed = top_tokens(*drawn(False), 6)
    pattern = sr.SelectedBlocks(listed, 1) & sr.Causal()
    assert torch.equal(found, simulate_ring(*attended(), pattern, world_size=4))


def wrong(rank: int, which: str) -> tuple[str, Tensor]:
    own, options = own_part(rank, 2, "causal", False)
    options = dict(options)
    k = 5
    if rank == 1:
        match which:
            case "k":
                k = 4
            case "causal":
                options["causal"] = False
            case "q_start":
                options["q_start"] = 3
            case "keys":
                own[1] = own[1][:, :-1]
    try:
        top_tokens(*own, k, group=groups[2], **options)
        told = ""
    except ValueError as error:
        told = f"{type(error).__name__}: {error}"
    own, options = own_part(rank, 2, "causal", False)
    return told, top_tokens(*own, 5, group=groups[2], **options)


@pytest.mark.parametrize("which", ["k", "causal", "q_start", "keys"])
def test_ranks_that_differ_raise_on_all_and_the_group_goes_on(workers, which):
    results = workers.run(wrong, which, world=2)
    assert all(told for told, _ in results)
    assert RingMismatchError.__name__ in results[0][0]
    found = torch.cat([x for _, x in results], 2)
    assert torch.equal(found, top_tokens(*drawn(False), 5))
