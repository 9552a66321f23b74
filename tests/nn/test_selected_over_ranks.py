"""`SelectedAttention` over ranks: outputs and gradients of one process, and refusals."""

import copy
from typing import Any

import pytest
import torch
from helpers.ring_workers import MAX_WORLD, groups, workers_of
from helpers.thinned import thinned
from torch import Tensor

from sparsering.distributed import RingMismatchError, shard, unshard
from sparsering.nn import SelectedAttention
from sparsering.nn.transformer import rotary_table

workers = workers_of(MAX_WORLD)

E, H, B, N = 16, 4, 2, 70
SMALL: dict[str, Any] = {"num_kv_heads": 2, "block_size": 8, "k": 3}
CASES: dict[str, dict[str, Any]] = {
    "sub": {},
    "mean, not causal": {"scorer": "mean", "causal": False},
    "exact, no local block": {"scorer": "exact", "sink": 0, "local": 0},
    "window": {"window": 7},
    "window, not causal": {"window": 7, "causal": False, "gate": "zero"},
    "pooled": {"pooled": (8, 4), "scorer": "pooled", "window": 5},
    "pooled, not causal": {"pooled": (4, 4), "scorer": "pooled", "causal": False},
    "learned": {"scorer": "learned"},
    "dense": {"dense_below": 100, "window": 7},
}
PLACES = [(n, x) for n in (2, 3, 1, 4, 8) for x in ("contiguous", "zigzag")]


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def made(**options: Any) -> SelectedAttention:
    torch.manual_seed(0)
    layer = SelectedAttention(E, H, **{**SMALL, **options}).double()
    with torch.no_grad():
        for x in layer.parameters():  # gates begin at 0
            x.add_(0.1 * torch.randn_like(x))
    return layer


def results(layer: SelectedAttention, x: Tensor, weight: Tensor, rope: Any) -> tuple[list, list]:
    x = x.clone().requires_grad_()
    out = layer(x, rope=rope)
    (out * weight).sum().backward()
    return [out.detach(), x.grad], [p.grad for p in layer.parameters()]


def whole(length: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    cos, sin = (t.double() for t in rotary_table(length, E // H, 100.0, torch.device("cpu")))
    return drawn(1, B, length, E), drawn(2, B, length, E), (cos, sin)


def of_ranks(rank: int, world: int, sharding: str, length: int, options: Any) -> tuple[list, list]:
    place: Any = {"group": groups[world], "sharding": sharding}
    layer = made(**options, **place)
    x, weight, rope = whole(length)
    x, weight = (shard(t, dim=1, **place) for t in (x, weight))
    own, of_parameters = results(layer, x, weight, tuple(shard(t, dim=0, **place) for t in rope))
    assert own[0].shape == x.shape
    return [unshard(t, dim=1, **place) for t in own], of_parameters


def compare(workers: Any, world: int, sharding: str, length: int, options: Any) -> None:
    expected = results(made(**options), *whole(length))
    found = workers.run(of_ranks, world, sharding, length, options, world=world)
    for own, _ in found:
        for got, wanted, bound in zip(own, expected[0], (1e-12, 1e-10), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=bound)
    for number, wanted in enumerate(expected[1]):
        got = [of_parameters[number] for _, of_parameters in found]
        if wanted is None:  # of a learned scorer, which only its loss trains
            assert got == [None] * world
        else:
            torch.testing.assert_close(sum(got), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "place"), thinned(3, CASES, PLACES))
def test_ranks_compute_what_one_process_does(workers, name, place):
    compare(workers, *place, N, CASES[name])


@pytest.mark.parametrize("length", (0, 3, 27))
def test_ranks_without_tokens(workers, length):
    compare(workers, 5, "contiguous", length, {**CASES["pooled"], "k": 2})


@pytest.mark.parametrize("sharding", ("contiguous", "zigzag"))
def test_rows_of_several_queries(workers, sharding):
    """Shards must begin at multiples of 4: those of 20 tokens do, zigzag pieces of 10 do not."""
    options = {"query_block": 4, **CASES["pooled"]}
    if sharding == "contiguous":
        compare(workers, 4, sharding, 80, options)
    else:
        with pytest.raises(AssertionError, match=r"multiples of query_block, 4, got 70"):
            compare(workers, 4, sharding, 80, options)


def faults(rank: int) -> None:
    place: Any = {"group": groups[2]}
    x = drawn(1, B, 6, E)
    if rank == 0:  # no message to the other rank
        with pytest.raises(NotImplementedError, match="does not take return_loss"):
            made(scorer="learned", **place)(x, return_loss=True)
        with pytest.raises(NotImplementedError, match="does not take documents, valid"):
            made(**place)(x, documents=(2, 4), valid=torch.ones(B, 6, dtype=torch.bool))
    layer = made(**place)
    with pytest.raises(RuntimeError, match=r"set module\.group"):
        copy.deepcopy(layer)(x)
    layer.k = 3 + rank
    with pytest.raises(RingMismatchError, match="options"):
        layer(x)
    layer.k = 3
    with pytest.raises(ValueError, match="refused its batch" if rank == 0 else "floating point"):
        layer(x if rank == 0 else x[..., :-1])
    with pytest.raises(RingMismatchError, match="cut the sequence"):
        layer(x[:, : 4 + rank])
    assert layer(x).shape == x.shape
    assert list(layer.state_dict()) == list(made().state_dict())


def test_what_ranks_refuse(workers):
    workers.run(faults, world=2)
