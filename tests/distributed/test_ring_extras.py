"""Extras of a call over ranks: the same attention as in one process, gradients in parts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.ring_workers import MAX_WORLD, groups, workers_of
from helpers.thinned import thinned
from oracles.attention_oracle import PATTERNS, Case, assert_close, assert_same_attention, inputs
from oracles.extras_oracle import attend_with_extras, branches_of
from torch import Tensor

import sparsering as sr
from sparsering.distributed import RingMismatchError, ring_attention, shard, simulate_ring
from sparsering.distributed.sharding import owned_ranges

CASE = Case(batch=2, num_heads=4, num_kv_heads=2, q_len=75, kv_len=75, head_dim=8, value_dim=16)
NAMES = ("causal", "longnet", "global tokens", "key padding", "packed longnet", "dilated window")


workers = workers_of(min(4, MAX_WORLD))


def extras(sink_of_rows: bool, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    shape = (CASE.batch, CASE.num_heads, CASE.q_len) if sink_of_rows else (CASE.num_heads,)
    table = torch.randn(CASE.num_heads, 2 * 21 + 1, generator=generator, dtype=dtype)
    sink = torch.randn(shape, generator=generator, dtype=dtype)
    return {
        "softcap": 0.9,
        "distance_bias": table.requires_grad_(),
        "sink": sink.requires_grad_(),
        "dropout_p": 0.3,
        "dropout_seed": 17,
    }


@pytest.mark.parametrize(
    ("name", "sink_of_rows", "sharding"), thinned(3, NAMES, [False, True], ["contiguous", "zigzag"])
)
def test_simulated_ranks_equal_the_formulas(name: str, sink_of_rows: bool, sharding: str):
    whole, options = inputs(CASE), extras(sink_of_rows)
    pattern = PATTERNS[name](CASE)
    branches = branches_of(pattern, CASE.batch, **{**CASE.heads, "q_start": 0})
    expected = attend_with_extras(*whole, branches, q_start=0, **options)
    got = simulate_ring(
        *whole, pattern, world_size=3, sharding=sharding, return_lse=True, **options
    )
    leaves = [*whole, options["distance_bias"], options["sink"]]
    assert_same_attention(got, expected, leaves)


def run_ring(rank: int, world: int, name: str, sink_of_rows: bool, seed: int | None):
    """A rank's (out, lse) and its gradients of query, key, value, table and sink."""
    torch.manual_seed(0)
    whole, options = inputs(CASE, requires_grad=False), extras(sink_of_rows)
    torch.manual_seed(100 + rank)
    options["dropout_seed"] = seed
    own = [shard(x, group=groups[world]).requires_grad_() for x in whole]
    if sink_of_rows:
        options["sink"] = shard(options["sink"].detach(), group=groups[world]).requires_grad_()
    leaves = [*own, options["distance_bias"], options["sink"]]
    out, lse = ring_attention(
        *own, PATTERNS[name](CASE), group=groups[world], return_lse=True, **options
    )
    found = torch.autograd.grad((out.sin().sum(), lse.cos().sum()), leaves)
    return [x.detach() for x in (out, lse, *found)]


@pytest.mark.parametrize("seed", [17, None])
@pytest.mark.parametrize(("name", "world"), [("global tokens", 4), ("longnet", 3), ("causal", 2)])
def test_processes_compute_what_is_simulated(workers, name: str, world: int, seed: int | None):
    """Without a seed all take the one that rank 0 draws, forward and backward."""
    for sink_of_rows in (False, True):
        parts = workers.run(run_ring, world, name, sink_of_rows, seed, world=world)
        torch.manual_seed(0)
        whole, options = inputs(CASE), extras(sink_of_rows)
        torch.manual_seed(100)
        options["dropout_seed"] = seed
        leaves = [*whole, options["distance_bias"], options["sink"]]
        out, lse = simulate_ring(
            *whole, PATTERNS[name](CASE), world_size=world, return_lse=True, **options
        )
        found = torch.autograd.grad((out.sin().sum(), lse.cos().sum()), leaves)
        ranges = owned_ranges("contiguous", CASE.q_len, world)
        for rank, part in enumerate(parts):
            (start, stop) = ranges[rank][0]
            of_rows = [out, lse, *found[:3], *([found[4]] if sink_of_rows else [])]
            mine = [*part[:5], *([part[6]] if sink_of_rows else [])]
            for got, expected in zip(mine, of_rows, strict=True):
                assert torch.equal(got, expected[:, :, start:stop]), rank
        assert_close(sum(part[5] for part in parts), found[3], 1e-12)
        if not sink_of_rows:
            assert_close(sum(part[6] for part in parts), found[4], 1e-12)


DIFFERENT = {
    "softcap": lambda rank: 1.0 + rank,
    "dropout_p": lambda rank: 0.1 * (rank + 1),
    "dropout_seed": lambda rank: rank,
    "distance_bias": lambda rank: torch.full((1, 3), float(rank)),
    "sink": lambda rank: None if rank else torch.zeros(4),
}


def run_with_differing(rank: int, name: str) -> str:
    own = inputs(replace(CASE, q_len=9, kv_len=9), torch.float32, requires_grad=False)
    options: dict[str, Any] = {"dropout_p": 0.1} if name == "dropout_seed" else {}
    options[name] = DIFFERENT[name](rank)
    try:
        ring_attention(*own, sr.Causal(), group=groups[2], **options)
    except RingMismatchError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_pass_other_extras_are_told_on_all_of_them(workers, name: str):
    for told in workers.run(run_with_differing, name, world=2):
        assert "ranks must agree on the softcap, distance_bias, sink, dropout_p" in told


def test_a_ring_in_half_precision_is_as_exact_as_one_process():
    case = replace(CASE, q_len=120, kv_len=120)
    low = [x.detach().bfloat16() for x in inputs(case, torch.float32)]
    options = {k: v.detach() if isinstance(v, Tensor) else v
               for k, v in extras(False, torch.float32).items()}  # fmt: skip
    pattern = sr.SlidingWindow(30, 10) | sr.GlobalTokens(3)
    exact = sr.attention(*(x.double() for x in low), pattern, backend="reference", **options)
    alone, ring = (
        sr.attention(*low, pattern, **options),
        simulate_ring(*low, pattern, world_size=4, **options),
    )
    bound = 1.1 * (alone.double() - exact).abs().max()
    assert (ring.double() - exact).abs().max() <= bound
