"""Plans against the definition: needed tokens, bytes and loads counted from dense tables."""

from dataclasses import replace

import patterns_oracle
import pytest
from attention_oracle import PATTERNS, Case, dense_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_oracle import owned, travelling, visited
from strategies import scenes, specs

import sparsering as sr
from sparsering.distributed import RingPlan

SHARDINGS = ("contiguous", "zigzag", "chunks:1,0,2,2,1,0,0")


def build(pattern: sr.Pattern, case: Case, world: int, sharding: str) -> RingPlan:
    return RingPlan.build(
        pattern,
        case.kv_len,
        world,
        num_heads=case.num_kv_heads,
        query_heads=case.num_heads,
        sharding=sharding,
    )


def assert_plan_is_exact(pattern: sr.Pattern, case: Case, world: int, sharding: str) -> None:
    plan = build(pattern, case, world, sharding)
    shards = owned(plan.sharding, case.kv_len, world)
    away = travelling(plan)
    assert [[p for a, b in r for p in range(a, b)] for r in plan.ranges] == shards
    needs = visited(pattern, case, away)
    counts = dense_counts(pattern, case).double().mean(0)
    for receiver in range(world):
        total = 0
        for sender in range(world):
            if sender == receiver:
                continue
            seen = needs[:, :, shards[receiver]].any(2)
            for b in range(case.batch):
                for h in range(case.num_kv_heads):
                    runs, group = plan.runs(receiver, sender, b, h)
                    tokens = [k for k in shards[sender] if seen[b, h, k]]
                    assert sorted(runs.of(group).tolist()) == tokens, (receiver, sender, b, h)
                    total += len(tokens)
        assert plan.tokens_received(receiver) == total / case.batch
        staying = [p for p in shards[receiver] if p not in away]
        load = counts[:, staying].sum() + counts[:, away][:, :, shards[receiver]].sum()
        assert plan.load(receiver) == pytest.approx(load.item(), rel=1e-12)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", PATTERNS)
def test_needs_and_loads_are_those_of_the_definition(name, sharding):
    case = Case(batch=2, num_heads=4, num_kv_heads=2, q_len=75, kv_len=75)
    assert_plan_is_exact(PATTERNS[name](case), case, 3, sharding)


@pytest.mark.parametrize("world", (1, 2, 5, 8, 100))
@pytest.mark.parametrize("length", (0, 1, 7, 64, 90))
def test_any_length_over_any_number_of_ranks(length, world):
    case = Case(batch=1, num_heads=2, num_kv_heads=1, q_len=length, kv_len=length)
    pattern = sr.LongNet((8, 40), (1, 3)) & sr.Causal()
    for sharding in ("contiguous", "zigzag", "auto"):
        assert_plan_is_exact(pattern, case, world, sharding)


@settings(max_examples=60)
@given(st.data())
def test_any_expression(data):
    scene = data.draw(scenes(max_length=60, min_length=1, max_heads=4))
    scene = replace(scene, q_len=scene.kv_len, q_start=0)
    case = Case.of(scene, 16, 16, 16)
    pattern = patterns_oracle.build(data.draw(specs(scene, with_random=True)))
    world = data.draw(st.integers(1, 6))
    assert_plan_is_exact(pattern, case, world, data.draw(st.sampled_from(("contiguous", "zigzag"))))


@pytest.mark.parametrize(
    "pattern",
    (
        sr.LongNet((64, 4096), (1, 16)),
        sr.SlidingWindow(500, 300) & sr.Causal(),
        sr.Documents((700, 1900, 5, 1491)) & sr.Causal(),
        sr.SlidingWindow(40, 40, 5) | sr.Dilated(1024, 7),
        sr.SlidingWindow(64, 64) | sr.GlobalTokens(300),
    ),
    ids=str,
)
def test_coarse_tiles_find_what_small_ones_find(pattern, monkeypatch):
    """Few coarse tiles to begin with, so that refinement runs several levels deep."""
    monkeypatch.setattr("sparsering.distributed.needs._COARSE_TILES", 2)
    case = Case(batch=1, num_heads=1, num_kv_heads=1, q_len=4096, kv_len=4096)
    sr.layout_cache.clear()
    assert_plan_is_exact(pattern, case, 3, "zigzag")
    sr.layout_cache.clear()
