"""Plans against the definition: needed tokens, bytes and loads counted from dense tables."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers.thinned import thinned
from helpers.torch_tables import only_torch
from hypothesis import strategies as st
from oracles import patterns_oracle
from oracles.attention_oracle import PATTERNS, Case
from oracles.ring_oracle import assert_plan_is_exact, owned
from oracles.strategies import examples, scenes, specs

import sparsering as sr
from sparsering.distributed import RingPlan, needs
from sparsering.kernels.cpu.build import library
from sparsering.layouts.cache import layout_cache
from sparsering.layouts.terms import distinct_heads, terms
from sparsering.patterns.algebra import Frame

SHARDINGS = ("contiguous", "zigzag", "chunks:1,0,2,2,1,0,0")


@pytest.mark.parametrize(("name", "sharding"), thinned(3, PATTERNS, SHARDINGS))
def test_needs_and_loads_are_those_of_the_definition(name, sharding):
    case = Case(batch=2, num_heads=4, num_kv_heads=2, q_len=75, kv_len=75)
    assert_plan_is_exact(PATTERNS[name](case), case, 3, sharding)


@pytest.mark.parametrize("world", (1, 2, 5, pytest.param(100, marks=pytest.mark.slow)))
@pytest.mark.parametrize("length", (0, 1, 7, 90))
def test_any_length_over_any_number_of_ranks(length, world):
    case = Case(batch=1, num_heads=2, num_kv_heads=1, q_len=length, kv_len=length)
    pattern = sr.LongNet((8, 40), (1, 3)) & sr.Causal()
    for sharding in ("contiguous", "zigzag", "auto"):
        assert_plan_is_exact(pattern, case, world, sharding)


@pytest.mark.parametrize("rank", [-1, 3, "a"])
def test_a_rank_that_is_not_there_is_told(rank):
    plan = RingPlan.build(sr.Causal(), 64, 3)
    for ask in (plan.load, plan.tokens_received):
        with pytest.raises((TypeError, ValueError), match="rank must be"):
            ask(rank)


@examples(10, 60, st.data())
def test_any_expression(data):
    scene = data.draw(scenes(max_length=60, min_length=1, max_heads=4))
    scene = replace(scene, q_len=scene.kv_len, q_start=0)
    case = Case.of(scene, 16, 16, 16)
    pattern = patterns_oracle.build(data.draw(specs(scene, with_random=True)))
    world = data.draw(st.integers(1, 6))
    assert_plan_is_exact(pattern, case, world, data.draw(st.sampled_from(("contiguous", "zigzag"))))


@pytest.mark.parametrize(
    "pattern",
    thinned(
        3,
        [
            sr.SlidingWindow(64, 64) | sr.GlobalTokens(300),
            sr.SlidingWindow(500, 300) & sr.Causal(),
            sr.LongNet((64, 4096), (1, 16)),
            sr.Documents((700, 1900, 5, 1491)) & sr.Causal(),
            sr.SlidingWindow(40, 40, 5) | sr.Dilated(1024, 7),
        ],
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


MILLION = 1 << 20


def received(pattern: sr.Pattern, world: int, sharding: str = "contiguous", **heads) -> list[float]:
    plan = RingPlan.build(pattern, MILLION, world, sharding=sharding, **heads)
    return [plan.tokens_received(rank) for rank in range(world)]


def test_segments_inside_shards_cost_nothing():
    longnet = sr.LongNet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    assert received(longnet & sr.Causal(), 8) == [0] * 8
    plan = RingPlan.build(longnet, MILLION, 8, num_heads=4)
    assert plan.rounds == ()
    assert plan.bytes_received(3, head_dim=64, dtype=torch.bfloat16, backward=True) == 0


@pytest.mark.parametrize("world", (8, 64))
@pytest.mark.parametrize("rate", (16, 12))
def test_a_segment_of_several_shards_costs_what_the_others_hold_of_its_grid(world, rate):
    """(g - 1) S / r tokens for a segment of g shards of S tokens, as the grid falls."""
    plan = RingPlan.build(sr.Dilated(MILLION, rate, 5), MILLION, world)
    shard = MILLION // world
    held = [len(range((5 - r * shard) % rate, shard, rate)) for r in range(world)]
    for rank in range(world):
        assert plan.tokens_received(rank) == sum(held) - held[rank]


def test_a_window_moves_its_halo_between_neighbours():
    plan = RingPlan.build(sr.SlidingWindow(4096) & sr.Causal(), MILLION, 64)
    rank = torch.arange(64)
    expected = torch.where(rank[:, None] - 1 == rank, 4096, 0)
    assert torch.equal(plan.tokens, expected)
    assert plan.rounds == ((1,),)
    both = RingPlan.build(sr.SlidingWindow(500, 300), MILLION, 64)
    assert both.tokens[5].nonzero()[:, 0].tolist() == [4, 6]
    assert both.tokens[5, [4, 6]].tolist() == [500, 300]


@pytest.mark.parametrize("sharding", ("contiguous", "zigzag"))
def test_dense_patterns_cost_no_more_than_a_ring_that_passes_everything_on(sharding):
    """(P - 1) N / P tokens; and what is under way stays within two shards, as double buffers do."""
    world, shard = 16, MILLION // 16
    for pattern in (sr.Full(), sr.Causal()):
        plan = RingPlan.build(pattern, MILLION, world, sharding=sharding)
        assert max(plan.tokens_received(r) for r in range(world)) == (world - 1) * shard
        assert len(plan.rounds) == world - 1 and all(len(r) == 1 for r in plan.rounds)


def test_rounds_hold_every_pair_once_and_no_more_than_a_shard():
    for pattern in (
        sr.LongNet((1024, 32768, MILLION), (1, 4, 16)),
        sr.RandomBlocks(0.001, 256),
        sr.SlidingWindow(40000),
    ):
        for sharding in ("contiguous", "zigzag"):
            plan = RingPlan.build(pattern, MILLION, 32, num_heads=2, sharding=sharding)
            offsets = [offset for round_ in plan.rounds for offset in round_]
            assert sorted(offsets) == offsets and len(set(offsets)) == len(offsets)
            rank = torch.arange(32)
            covered = torch.zeros(32, 32, dtype=torch.int64)
            for round_ in plan.rounds:
                moved = torch.zeros(32, 32, dtype=torch.int64)
                for offset in round_:
                    sender = (rank - offset) % 32
                    moved[rank, sender] = plan.tokens[rank, sender]
                assert moved.sum(1).max() <= MILLION // 32 * 2  # received, of two heads
                assert moved.sum(0).max() <= MILLION // 32 * 2  # sent
                covered += moved
            assert torch.equal(covered, plan.tokens)


def test_global_rows_go_to_the_keys():
    pattern = sr.SlidingWindow(512, 512) | sr.GlobalTokens(64)
    world = 64
    plan = RingPlan.build(pattern, MILLION, world)
    (traveller,) = plan.travellers
    assert traveller.owner == 0 and list(traveller.rows) == [(0, 64)]
    assert traveller.hosts == tuple(range(1, world))
    assert plan.tokens_received(0) == 512  # its neighbour's halo, not a million keys
    moved = [plan.bytes_received(r, head_dim=64, dtype=torch.float32) for r in range(world)]
    assert moved[0] == 512 * 512 + 63 * 64 * 65 * 4
    assert moved[5] == (1024 + 64) * 512 + 64 * 64 * 4
    loads = [plan.load(r) for r in range(world)]
    assert max(loads) < 1.01 * sum(loads) / world
    # where a fetch costs less, nothing travels: here each key is wanted by the window anyway
    plan = RingPlan.build(sr.SlidingWindow(MILLION, MILLION) | sr.GlobalTokens(64), MILLION, 8)
    assert plan.travellers == ()
    plan = RingPlan.build(sr.Causal() & (sr.SlidingWindow(9) | sr.GlobalTokens(4)), MILLION, 8)
    assert plan.travellers == ()


def test_global_rows_stay_where_sending_them_costs_about_as_much():
    for count in (1000, 4095):
        pattern = sr.SlidingWindow(16) | sr.GlobalTokens(count)
        assert RingPlan.build(pattern, 8 * 4096, 8, num_heads=8, num_kv_heads=1).travellers == ()
    assert RingPlan.build(sr.GlobalTokens(4095), 8 * 4096, 8).travellers == ()


def test_rows_travel_only_to_hosts_where_they_see_keys():
    """One of eight documents with global rows of their own lies across all shards."""
    pattern = sr.Packed((128,) * 7 + (8192 - 7 * 128,), sr.GlobalTokens(16) | sr.SlidingWindow(4))
    plan = RingPlan.build(pattern, 8192, 4)
    (traveller,) = plan.travellers
    assert list(traveller.rows) == [(7 * 128, 7 * 128 + 16)] and traveller.hosts == (1, 2, 3)


def test_what_answers_at_a_time_does_not_grow_with_the_number_of_ranks():
    for world in (4, 16, 64):
        pattern = sr.SlidingWindow(16) | sr.GlobalTokens(500)
        plan = RingPlan.build(pattern, 4096 * world, world)
        assert len(plan.travellers) == 1
        offsets = [offset for offsets in plan.answer_rounds for offset in offsets]
        assert sorted(offsets) == list(range(1, world))
        assert max(map(len, plan.answer_rounds)) * 500 <= 4096


@pytest.mark.parametrize("world", (2, pytest.param(8, marks=pytest.mark.slow)))
def test_auto_is_one_choice_whatever_the_number_of_query_heads(world):
    for tokens in (512, 4096):
        for pattern in (
            sr.LongNet((512, 4096), (1, 4)) & sr.Causal(),
            sr.SlidingWindow(200) | sr.GlobalTokens(30),
            sr.Full(),
        ):
            names = {
                RingPlan.build(
                    pattern, tokens, world, num_heads=heads, num_kv_heads=2, sharding="auto"
                ).sharding
                for heads in (2, 4, 16, 64)
            }
            assert len(names) == 1


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize(
    "pattern",
    [
        sr.Causal(),
        sr.SlidingWindow(64) & sr.Causal(),
        sr.LongNet((64, 512), (1, 4)) & sr.Causal(),
        sr.Documents((100, 500, 424)) & sr.Causal(),
    ],
    ids=str,
)
def test_auto_stops_at_a_plan_that_nothing_can_beat(pattern, world):
    plans = {
        name: RingPlan.build(pattern, 1024, world, num_heads=2, sharding=name)
        for name in ("auto", "contiguous", "zigzag", "balanced")
    }
    assert plans["auto"].cost == min(plan.cost for plan in plans.values())
    first = plans["contiguous"]
    evenly = len(set(first.loads.tolist())) == 1 and not first.tokens.any()
    assert first.is_even == evenly
    if first.is_even:
        assert plans["auto"].sharding == "contiguous"


def test_auto_takes_what_costs_the_busiest_rank_least():
    def chosen(pattern):
        return RingPlan.build(pattern, MILLION, 16, sharding="auto").sharding

    assert chosen(sr.Causal()) == "zigzag"
    assert chosen(sr.SlidingWindow(4096) & sr.Causal()) == "contiguous"
    assert chosen(sr.LongNet((2048, 16384), (1, 4)) & sr.Causal()) == "contiguous"


PATTERNS_OF_AUTO = [
    sr.Causal(),
    sr.LongNet((64, 512), (1, 4)) & sr.Causal(),
    (sr.SlidingWindow(40, 40, 5) | sr.Dilated(256, 7)) & sr.Causal(),
    (sr.SlidingWindow(50) | sr.GlobalTokens(12)) & sr.Causal(),
    (sr.RandomBlocks(0.2, 16) | sr.BlockWindow(1, 16)) & sr.Causal(),
    sr.Documents((100, 500, 401)) & sr.Causal(),
    sr.Dilated(256, 4) + sr.RandomBlocks(0.3, 32, per_head=False) + sr.Full(),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("pattern", PATTERNS_OF_AUTO, ids=str)
def test_auto_and_a_named_sharding_make_one_plan(pattern, world):
    """Ranks may ask for either, so that the order of sent tokens must be the same to the token."""
    options = {"num_heads": 2, "num_kv_heads": 2}
    sr.layout_cache.clear()
    auto = RingPlan.build(pattern, 1001, world, sharding="auto", **options)
    names = ["contiguous", "zigzag", auto.sharding]
    shared = [RingPlan.build(pattern, 1001, world, sharding=name, **options) for name in names]
    sr.layout_cache.clear()
    for name, one in zip(names, shared, strict=True):
        other = RingPlan.build(pattern, 1001, world, sharding=name, **options)
        assert one is not other
        assert torch.equal(one.loads, other.loads)
        assert (one.ranges, one.need_of, one.travellers, one.sharding) == (
            other.ranges,
            other.need_of,
            other.travellers,
            other.sharding,
        )
        for mine, others in zip(one.needs, other.needs, strict=True):
            assert mine.step == others.step
            assert torch.equal(mine.number, others.number)
            assert torch.equal(mine.start, others.start) and torch.equal(mine.last, others.last)


@pytest.mark.parametrize("pattern", PATTERNS_OF_AUTO, ids=str)
def test_auto_looks_at_each_tile_once(pattern, monkeypatch):
    looks = []
    original = needs._pairs
    monkeypatch.setattr(needs, "_pairs", lambda *a: looks.append(a) or original(*a))
    sr.layout_cache.clear()
    plan = RingPlan.build(pattern, 1001, 4, num_heads=2, sharding="auto")
    [plan.load(rank) + plan.tokens_received(rank) for rank in range(4)]
    frame = Frame.build(1001, 1001, 2, 2, 0)
    masks = {mask for masks in distinct_heads(pattern, frame) for mask in masks}
    assert len(looks) == sum(len(terms(mask, 128)) for mask in masks)


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("sharding", ["contiguous", "auto"])
def test_the_compiled_kernel_finds_what_torch_finds(per_head, sharding):
    """The status of the smallest tiles; the kernel lists them in place of torch's operators."""
    library()
    near = sr.BlockWindow(1, 64) | sr.SlidingWindow(200)
    pattern = (sr.RandomBlocks(0.1, 64, per_head=per_head) | near) & sr.Causal()
    found = []
    for tables in (nullcontext, only_torch):
        layout_cache.clear()
        with tables():
            plan = RingPlan.build(pattern, 5000, 4, num_heads=2, sharding=sharding)
            loads = plan.loads.tolist()
        needs_ = [(x.number.tolist(), x.start.tolist(), x.last.tolist()) for x in plan.needs]
        found.append((plan.sharding, plan.need_of, needs_, loads))
    assert found[0] == found[1]
    dense = pattern.to_dense(5000, num_heads=2)  # of one head if all are alike
    assert sum(found[0][3]) == dense.sum() * 2 // len(dense)


@pytest.mark.slow
def test_the_balancer_evens_out_what_contiguous_and_zigzag_shards_do_not():
    """Documents of very different lengths under a causal mask."""
    lengths = (300_000, 20_000, 150_000, 90_000, 256_000, 5_000, 200_000)
    pattern = sr.Documents((*lengths, MILLION - sum(lengths))) & sr.Causal()
    cost = {}
    for name in ("contiguous", "zigzag", "auto"):
        plan = RingPlan.build(pattern, MILLION, 8, sharding=name)
        loads = torch.tensor([plan.load(r) for r in range(8)], dtype=torch.float64)
        cost[name] = (loads.max() / loads.mean()).item()
        assert loads.sum() == pattern.layout(MILLION).num_pairs
    assert plan.sharding.startswith("chunks:")
    assert len(set(map(len, owned(plan.sharding, MILLION, 8)))) == 1  # as many tokens on each
    assert cost["auto"] < 1.05 < cost["zigzag"] < cost["contiguous"]


def test_plans_are_kept_by_value():
    sr.layout_cache.clear()
    build_one = lambda: RingPlan.build(  # noqa: E731
        sr.Blocks(torch.ones(8, 8, dtype=torch.bool), 16), 128, 4, num_heads=2
    )
    assert build_one() is build_one()
    assert sr.layout_cache.info().misses == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    (
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"sharding": "striped"}, "'contiguous', 'zigzag', 'balanced', 'auto' or 'chunks:'"),
        ({"sharding": "chunks:0,9"}, "below 4"),
        ({"sharding": "chunks:"}, "below 4"),
        ({"block_size": 24}, "multiple of 16"),
        ({"pattern": sr.Documents((3, 4))}, "64"),
    ),
)
def test_bad_arguments(arguments, text):
    given = {"pattern": sr.Causal(), "seq_len": 64, "world_size": 4, **arguments}
    with pytest.raises(ValueError, match=text):
        RingPlan.build(**given)


def test_bytes_of_other_heads_only_where_heads_are_alike():
    plan = RingPlan.build(sr.SlidingWindow(10), 64, 4)
    one = plan.bytes_received(1, num_kv_heads=1, head_dim=8, dtype=torch.float16)
    assert one == 10 * 2 * 8 * 2
    assert plan.bytes_received(1, num_kv_heads=6, head_dim=8, dtype=torch.float16) == 6 * one
    assert plan.bytes_received(1, num_kv_heads=1, head_dim=(8, 24), dtype=torch.float16) == 2 * one
    per_head = RingPlan.build(sr.Dilated(64, 4), 64, 4, num_heads=4)
    with pytest.raises(ValueError, match="num_kv_heads=8"):
        per_head.bytes_received(1, num_kv_heads=8, head_dim=8, dtype=torch.float16)
