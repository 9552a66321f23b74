"""Plans and layouts of a ring built ahead: its call builds nothing, and gives the same bits."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.ring_workers import groups, workers_of
from helpers.thinned import slow_except

import sparsering as sr
from sparsering.distributed import RingMismatchError, RingPlan, prefetch, ring_attention, shard

WORLD, TOKENS, SECONDS = 3, 150, 60.0


workers = workers_of(WORLD)


def called(rank, pattern, sharding, ahead, batch=2, heads=4, kv_heads=2):
    """(misses of a call, its results and gradients); with `ahead`, after a prefetch of it."""
    torch.manual_seed(0)
    shapes = [(batch, n, TOKENS, 8) for n in (heads, kv_heads, kv_heads)]
    whole = [torch.randn(shape) for shape in shapes]
    sr.layout_cache.clear()
    if ahead:
        future = prefetch(
            pattern, TOKENS, num_heads=heads, num_kv_heads=kv_heads, batch_size=batch,
            sharding=sharding,
        )  # fmt: skip
        assert isinstance(future.result(SECONDS), RingPlan)
    else:
        sharding = RingPlan.build(
            pattern, TOKENS, WORLD, num_heads=heads, num_kv_heads=kv_heads, sharding=sharding
        ).sharding
        sr.layout_cache.clear()
    chosen = future.result().sharding if ahead else sharding
    leaves = [shard(x, sharding=chosen).requires_grad_() for x in whole]
    before = sr.layout_cache.info().misses
    out = ring_attention(*leaves, pattern, sharding=sharding)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    return sr.layout_cache.info().misses - before, [out.detach(), *grads]


CASES = {
    "causal": (sr.Causal(), "zigzag"),
    "window, chosen sharding": (sr.SlidingWindow(40) & sr.Causal(), "auto"),
    "longnet": (sr.LongNet((32, 64), (1, 2)) & sr.Causal(), "contiguous"),
    "rows that travel": (sr.SlidingWindow(9, 9) | sr.GlobalTokens(3), "contiguous"),
    "random blocks": (sr.RandomBlocks(0.4, 16, seed=4), "contiguous"),
    "padding": (sr.KeyPadding((150, 71)) & sr.Causal(), "contiguous"),
}


@pytest.mark.parametrize("name", slow_except(["causal", "padding"], CASES))
def test_a_ring_builds_nothing_that_was_built_ahead(workers, name):
    pattern, sharding = CASES[name]
    for found, expected in zip(
        workers.run(called, pattern, sharding, True),
        workers.run(called, pattern, sharding, False),
        strict=True,
    ):
        assert found[0] == 0
        assert expected[0] > 0  # or the test above says nothing
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


def different(rank):
    """Calls one pattern after each rank prefetched another; the ring must notice."""
    own = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    patterns = [sr.SlidingWindow(rank + 1), sr.Causal()]
    plans = [prefetch(p, 4 * WORLD, num_heads=2).result(SECONDS) for p in patterns]
    out = ring_attention(*own, sr.Causal())
    with pytest.raises(RingMismatchError, match="pattern"):
        ring_attention(*own, patterns[0])
    return [plan.world_size for plan in plans], bool(out.isfinite().all())


def test_ranks_that_prefetch_different_patterns_are_told_by_the_call(workers):
    assert workers.run(different) == WORLD * [([WORLD, WORLD], True)]


def of_part(rank):
    """The world size of a plan over the first two ranks, on these."""
    if rank > 1:
        return 2
    return prefetch(sr.Causal(), 64, num_heads=2, group=groups[2]).result(SECONDS).world_size


def test_the_plan_is_that_of_the_group(workers):
    assert workers.run(of_part) == WORLD * [2]


def test_a_rank_alone_has_the_layout_of_attention_built():
    sr.layout_cache.clear()
    layout = prefetch(sr.Causal(), 90, num_heads=2).result(SECONDS)
    leaves = [torch.randn(1, 2, 90, 8, requires_grad=True) for _ in range(3)]
    ring_attention(*leaves, sr.Causal()).sum().backward()
    assert sr.layout_cache.info().misses == 1
    assert layout is sr.Causal().layout(90, num_heads=2)


@pytest.mark.parametrize(
    ("pattern", "options", "told"),
    [
        (sr.Causal(), {"sharding": "spiral"}, "sharding"),
        (sr.Documents((3, 4)), {}, "Documents"),
        (sr.KeyPadding((3, 4)), {"batch_size": 3}, "batch_size=3"),
        (sr.Causal(), {"num_heads": 3, "num_kv_heads": 2}, "multiple"),
    ],
)
@pytest.mark.parametrize("world", (1, 2))
def test_what_does_not_fit_is_said_at_once(monkeypatch, pattern, options, told, world):
    group = SimpleNamespace(size=lambda: world, rank=lambda: 0)
    monkeypatch.setattr(sr.distributed.plan_prefetch, "resolve_group", lambda *_: group)
    with pytest.raises(ValueError, match=told):
        prefetch(pattern, 9, **{"num_heads": 2, **options})


def test_group_and_mesh_are_one_of_the_two():
    with pytest.raises(ValueError, match="got both"):
        prefetch(sr.Causal(), 9, num_heads=2, group=dist.group.WORLD or object(), mesh=object())
