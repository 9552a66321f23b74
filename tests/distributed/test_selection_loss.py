"""An indexer trained over ranks by exact mass: mass, loss and gradients of one process."""

from typing import Any

import pytest
import torch
from helpers.ring_workers import groups, workers_of
from torch import Tensor

import sparsering as sr
from sparsering.distributed import RingMismatchError, ring_attention
from sparsering.distributed.sharding import owned_ranges
from sparsering.selection import block_mass, index_scores, selection_loss, top_tokens

workers = workers_of(3, "module")
TOKENS = 37


def drawn() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Returns query, key and value of a layer, its index tensors, and weights of rows."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layer = [normal(2, heads, TOKENS, 8) for heads in (4, 2, 2)]
    index = [normal(2, 3, TOKENS, 8), normal(2, TOKENS, 8), normal(2, TOKENS, 3)]
    return layer, index, torch.rand(2, 1, TOKENS, generator=generator, dtype=torch.float64)


def step(part: slice, attend: Any, group: Any, has_lse: bool) -> list[Tensor]:
    """Returns mass, this process's part of the loss, and the gradients of index tensors."""
    layer, index, row_weight = drawn()
    layer = [x[:, :, part] for x in layer]
    query, key, weight = index[0][:, :, part], index[1][:, part], index[2][:, part]
    leaves = [x.clone().requires_grad_() for x in (query, key, weight)]
    listed = top_tokens(query, key, weight, 6, group=group)
    chosen = sr.SelectedBlocks(listed, 1, query_block=1, first_row=part.start) & sr.Causal()
    _, lse = attend(*layer, chosen, return_lse=True)
    mass = block_mass(*layer[:2], chosen, lse if has_lse else None, group=group)
    scores = index_scores(*leaves, listed, group=group)
    loss = selection_loss(scores, mass, row_weight=row_weight[:, :, part], group=group)
    return [mass, loss.detach(), *torch.autograd.grad(loss, leaves)]


def of_rank(rank: int, world: int, has_lse: bool) -> list[Tensor]:
    ((start, stop),) = owned_ranges("contiguous", TOKENS, world)[rank]
    part, group = slice(start, stop), groups[world]

    def attend(*arguments: Any, **options: Any) -> Any:
        return ring_attention(*arguments, group=group, **options)

    return step(part, attend, group, has_lse)


@pytest.mark.parametrize("has_lse", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_loss_and_gradients_are_those_of_one_process(workers, world, has_lse):
    found = list(zip(*workers.run(of_rank, world, has_lse, world=world), strict=True))
    mass, loss, *grads = step(slice(0, TOKENS), sr.attention, None, has_lse)
    assert loss > 1e-2 and all(x.abs().max() > 1e-4 for x in grads)
    torch.testing.assert_close(torch.cat(found[0], 2), mass, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(found[1]), loss, rtol=0, atol=1e-12)
    for parts, whole, dim in zip(found[2:], grads, (2, 1, 1), strict=True):
        torch.testing.assert_close(torch.cat(parts, dim), whole, rtol=0, atol=1e-10)


def wrong(rank: int, which: str) -> tuple[str, list[Tensor]]:
    (query, key, _), _, _ = drawn()
    part = slice(0, 20) if rank == 0 else slice(20, TOKENS)
    query, key = query[:, :, part], key[:, :, part]
    listed = torch.arange(part.start, part.stop)[:, None]
    chosen = sr.SelectedBlocks(listed, 1, query_block=1, first_row=part.start) & sr.Causal()
    scores, mass = (torch.ones(2, 1, query.shape[2], 3, dtype=torch.float64) for _ in range(2))
    options: dict[str, Any] = {}
    if rank == 1:
        match which:
            case "scale":
                options["scale"] = 0.5
            case "q_start":
                options["q_start"] = 20
            case "keys":
                key = key[:, :, :-1]
            case "mass":
                mass = mass[:, :, :-1]
            case "dtype":
                scores = scores.float()
    try:
        if which in ("mass", "dtype"):
            selection_loss(scores, mass, group=groups[2])
        else:
            block_mass(query, key, chosen, group=groups[2], **options)
        told = ""
    except ValueError as error:
        told = f"{type(error).__name__}: {error}"
    return told, of_rank(rank, 2, True)


@pytest.mark.parametrize("which", ["scale", "q_start", "keys", "mass", "dtype"])
def test_ranks_that_differ_raise_on_all_and_the_group_goes_on(workers, which):
    found = workers.run(wrong, which, world=2)
    assert all(told for told, _ in found)
    assert RingMismatchError.__name__ in found[0][0]
