"""`index_scores` over ranks: scores and gradients of one process."""

from typing import Any

import pytest
import torch
from helpers.ring_workers import groups, workers_of
from torch import Tensor

from sparsering.distributed import RingMismatchError
from sparsering.selection import index_scores, top_tokens

workers = workers_of(4, "module")
LENGTHS = {2: (20, 17), 3: (5, 0, 32), 4: (10, 10, 10, 7)}


def drawn() -> list[Tensor]:
    """Query [2, 3, 37, 8], key [2, 37, 8] and weight [2, 37, 3]."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 37, 8), (2, 37, 8), (2, 37, 3)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def results(
    query: Tensor, key: Tensor, weight: Tensor, listed: Any, **options: Any
) -> list[Tensor]:
    """Returns scores and the gradients of a function of them."""
    leaves = [x.clone().requires_grad_() for x in (query, key, weight)]
    scores = index_scores(*leaves, listed, scale=0.3, **options)
    scores.masked_fill(scores == -torch.inf, 0).sin().sum().backward()
    return [scores.detach(), *(x.grad for x in leaves if x.grad is not None)]


def lists() -> Tensor:
    return top_tokens(*drawn(), 6)


def of_rank(rank: int, world: int, is_listed: bool) -> list[Tensor]:
    start = sum(LENGTHS[world][:rank])
    part = slice(start, start + LENGTHS[world][rank])
    query, key, weight = drawn()
    listed = lists()[:, :, part] if is_listed else None
    return results(query[:, :, part], key[:, part], weight[:, part], listed, group=groups[world])


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_scores_and_gradients_are_those_of_one_process(workers, world, is_listed):
    found = workers.run(of_rank, world, is_listed, world=world)
    expected = results(*drawn(), lists() if is_listed else None)
    for parts, whole, dim in zip(zip(*found, strict=True), expected, (2, 2, 1, 1), strict=True):
        torch.testing.assert_close(torch.cat(parts, dim), whole, rtol=1e-12, atol=1e-13)


def wrong(rank: int, which: str) -> tuple[str, list[Tensor]]:
    start = sum(LENGTHS[2][:rank])
    part = slice(start, start + LENGTHS[2][rank])
    query, key, weight = drawn()
    own, listed = [query[:, :, part], key[:, part], weight[:, part]], lists()[:, :, part]
    options: dict[str, Any] = {}
    if rank == 1:
        match which:
            case "a key past the sequence":
                listed = listed.clone()
                listed[0, 0, 3, 2] = 37
            case "rows of another shard":
                listed = listed[:, :, :-1]
            case "scale":
                options["scale"] = 0.5
            case "no gradient":
                own[1] = own[1].detach()
    leaves = [x.clone().requires_grad_(not (which == "no gradient" and rank == 1)) for x in own]
    try:
        index_scores(*leaves, listed, group=groups[2], **options)
        told = ""
    except ValueError as error:
        told = f"{type(error).__name__}: {error}"
    return told, of_rank(rank, 2, True)


@pytest.mark.parametrize(
    "which", ["a key past the sequence", "rows of another shard", "scale", "no gradient"]
)
def test_ranks_that_differ_raise_on_all_and_the_group_goes_on(workers, which):
    found = workers.run(wrong, which, world=2)
    assert all(told for told, _ in found)
    if which != "a key past the sequence":
        assert RingMismatchError.__name__ in found[0][0]
    else:
        assert all("got 37 on rank 1" in told for told, _ in found)
    whole = results(*drawn(), lists())
    torch.testing.assert_close(torch.cat([x[0] for _, x in found], 2), whole[0])


def test_no_query_at_all():
    query, key, weight = drawn()
    scores, *grads = results(query[:, :, :0], key, weight[:, :0], None)
    assert scores.shape == (2, 1, 0, 37) and not any(x.any() for x in grads)
