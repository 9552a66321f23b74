"""Shards, needed keys and loads of ranks by definition, from the dense counts of a pattern."""

import pytest
import torch
from torch import Tensor

import sparsering as sr
from oracles.attention_oracle import Case, dense_counts
from sparsering.distributed import RingPlan


def owned(sharding: str, length: int, world: int) -> list[list[int]]:
    """Positions of each rank in local order, by the definition of the shardings."""
    if sharding == "contiguous":
        c = -(-length // world)
        return [list(range(length))[r * c : (r + 1) * c] for r in range(world)]
    if sharding == "zigzag":
        c = -(-length // (2 * world))
        chunks = [list(range(length))[i * c : (i + 1) * c] for i in range(2 * world)]
        return [chunks[r] + chunks[2 * world - 1 - r] for r in range(world)]
    owners = [int(x) for x in sharding.removeprefix("chunks:").split(",")]
    c = -(-length // len(owners))
    return [
        [p for i, o in enumerate(owners) if o == r for p in range(length)[i * c : (i + 1) * c]]
        for r in range(world)
    ]


def plan_of(pattern: sr.Pattern, case: Case, world: int, sharding: str) -> RingPlan:
    """Builds the plan for a case."""
    return RingPlan.build(
        pattern,
        case.kv_len,
        world,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        sharding=sharding,
    )


def visited(pattern: sr.Pattern, case: Case, away: list[int]) -> Tensor:
    """[B, Hkv, Nq, Nk] bool: whether a query of the kv head's group visits a key.

    Rows in `away` are False: these queries travel to the ranks of their keys.
    """
    counts = dense_counts(pattern, case) > 0
    counts = counts.unflatten(1, (case.num_kv_heads, -1)).any(2)
    counts[:, :, away] = False
    return counts


def travelling(plan) -> list[int]:
    return [p for t in plan.travellers for a, b in t.rows for p in range(a, b)]


def assert_plan_is_exact(
    pattern: sr.Pattern, case: Case, world: int, sharding: str, dtype: torch.dtype = torch.float32
) -> None:
    """Asserts that a plan's shards, needed tokens, bytes and loads agree with the dense counts."""
    plan = plan_of(pattern, case, world, sharding)
    shards = owned(plan.sharding, case.kv_len, world)
    away = travelling(plan)
    assert [[p for a, b in r for p in range(a, b)] for r in plan.ranges] == shards
    needs = visited(pattern, case, away)
    counts = dense_counts(pattern, case).double().mean(0)
    row_bytes = (case.head_dim + case.value_dim) * dtype.itemsize
    for receiver in range(world):
        seen = needs[:, :, shards[receiver]].any(2)
        seen[:, :, shards[receiver]] = False
        found = torch.zeros_like(seen)
        for sender in range(world):
            if not plan.tokens[receiver, sender]:
                continue
            for b in range(case.batch):
                for h in range(case.num_kv_heads):
                    needed = plan.tokens_of(receiver, sender, b, h)
                    assert set(needed.tolist()) <= set(shards[sender]), (receiver, sender, b, h)
                    found[b, h, needed] = True
        assert torch.equal(found, seen), receiver
        received = plan.tokens_received(receiver)
        assert received == seen.sum().item() / case.batch
        if not away:
            widths = case.head_dim, case.value_dim
            assert plan.bytes_received(receiver, head_dim=widths, dtype=dtype) == pytest.approx(
                received * row_bytes, rel=1e-12
            )
        staying = [p for p in shards[receiver] if p not in away]
        load = counts[:, staying].sum() + counts[:, away][:, :, shards[receiver]].sum()
        assert plan.load(receiver) == pytest.approx(load.item(), rel=1e-12)
