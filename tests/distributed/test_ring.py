"""Ring attention: exact, bit for bit as simulated, moving what the plan says, no more."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.ring_workers import MAX_WORLD, groups, workers_of
from helpers.thinned import slow_except, thinned
from hypothesis import strategies as st
from oracles import patterns_oracle
from oracles.attention_oracle import PATTERNS, Case, assert_same_attention, gradients, inputs
from oracles.ring_oracle import plan_of
from oracles.strategies import examples, scenes, specs
from torch import Tensor

import sparsering as sr
from sparsering.distributed import Traffic, ring_attention, shard, simulate_ring
from sparsering.distributed.sharding import owned_ranges

CASE = Case(batch=2, num_heads=4, num_kv_heads=2, q_len=75, kv_len=75, head_dim=8, value_dim=16)


workers = workers_of(MAX_WORLD, "session")


SHARDINGS = ("contiguous", "zigzag", "chunks:2,0,1,1,0,0,2")


KEPT = [
    {"name": "packed", "sharding": "zigzag"},
    {"name": "global rows", "sharding": SHARDINGS[2]},
]


@pytest.mark.covering(1, keep=KEPT)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", PATTERNS)
def test_simulated_ranks_compute_what_one_process_does(name, sharding):
    pattern = PATTERNS[name](CASE)
    own = inputs(CASE)
    got = simulate_ring(*own, pattern, world_size=3, sharding=sharding, return_lse=True)
    expected = sr.attention(*own, pattern, backend="reference", return_lse=True)
    assert_same_attention(got, expected, own, forward=1e-12, backward=1e-12)


@examples(8, 40, st.data())
def test_simulated_ranks_with_any_expression(data):
    scene = data.draw(scenes(max_length=50, max_heads=4))
    scene = replace(scene, q_len=scene.kv_len, q_start=0)
    case = Case.of(scene, 4, 8, None)
    pattern = patterns_oracle.build(data.draw(specs(scene, with_random=True)))
    world = data.draw(st.integers(1, 9))
    owners = st.lists(st.integers(0, world - 1), min_size=1, max_size=12)
    chunks = "chunks:" + ",".join(map(str, data.draw(owners)))
    sharding = data.draw(st.sampled_from(("contiguous", "zigzag", "auto", chunks)))
    own = inputs(case)
    got = simulate_ring(*own, pattern, world_size=world, sharding=sharding, return_lse=True)
    expected = sr.attention(*own, pattern, backend="reference", return_lse=True)
    assert_same_attention(got, expected, own, forward=1e-12, backward=1e-12)


@pytest.mark.parametrize("length", slow_except([0, 1, 9], [0, 1, 3, 8, 9]))
def test_fewer_tokens_than_ranks(workers, length):
    case = replace(CASE, q_len=length, kv_len=length)
    for name, world, sharding in (
        ("causal", 8, "contiguous"),
        ("longnet", 5, "zigzag"),
        ("global tokens", 8, "zigzag"),
        ("nothing", 5, "contiguous"),
    ):
        assert_processes_are_as_simulated(workers, name, case, world, sharding)


def run_twice(rank: int, case: Case) -> bool:
    first, second = (run_ring(rank, 5, "intersection", case, {})[0] for _ in range(2))
    return all(map(torch.equal, first, second))


def test_the_same_bits_from_run_to_run(workers):
    case = replace(CASE, q_len=200, kv_len=200)
    assert all(workers.run(run_twice, case, world=5))


def run_ring(
    rank: int, world: int, name: str, case: Case, options: dict[str, Any]
) -> tuple[list[Tensor], Traffic, Traffic]:
    """A rank's (out, lse, dq, dk, dv), and what moved, forward and backward."""
    torch.manual_seed(0)
    pattern = PATTERNS[name](case)
    whole = inputs(case, requires_grad=False)
    grads = [torch.randn(*x, dtype=torch.float64) for x in _result_shapes(case)]
    sharding = options.get("sharding", "contiguous")
    own, of_own = (
        [shard(x, group=groups[world], sharding=sharding) for x in some] for some in (whole, grads)
    )
    own = [x.requires_grad_() for x in own]
    out, lse = ring_attention(*own, pattern, group=groups[world], return_lse=True, **options)
    forward = ring_attention.last_traffic()
    found = torch.autograd.grad([out, lse], own, of_own)
    backward = ring_attention.last_traffic(backward=True)
    return [x.detach() for x in (out, lse, *found)], forward, backward


def _result_shapes(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = (case.batch, case.num_heads, case.q_len)
    return (*shape, case.value_dim), shape


WORLDS = {
    "longnet": (1, 2, 5, 8),
    "causal": (2,),
    "global tokens": (8,),
    "documents": (5,),
    "random blocks": (4,),
    "key padding": (6,),
}
WORLDS_OF_PATTERNS = [
    pytest.param(
        name, world, marks=() if fast or world in WORLDS.get(name, ()) else pytest.mark.slow
    )
    for i, name in enumerate(PATTERNS)
    for world in range(1, MAX_WORLD + 1)
    for fast in [world == 3 and i % 4 == 1]
]


@pytest.mark.parametrize(("name", "world"), WORLDS_OF_PATTERNS)
def test_processes_compute_bit_for_bit_what_is_simulated(workers, name, world):
    sharding = ("contiguous", "zigzag")[world % 2]
    assert_processes_are_as_simulated(workers, name, CASE, world, sharding)


def assert_processes_are_as_simulated(workers, name, case, world, sharding) -> None:
    results = workers.run(run_ring, world, name, case, {"sharding": sharding}, world=world)
    torch.manual_seed(0)
    pattern = PATTERNS[name](case)
    whole = inputs(case)
    grads = [torch.randn(*x, dtype=torch.float64) for x in _result_shapes(case)]
    if world > 1:
        simulated = simulate_ring(
            *whole, pattern, world_size=world, sharding=sharding, return_lse=True
        )
    else:
        simulated = sr.attention(*whole, pattern, return_lse=True)
    expected = [*simulated, *torch.autograd.grad(simulated, whole, grads)]
    plan = plan_of(pattern, case, world, sharding)
    ranges = owned_ranges(sharding, case.q_len, world)
    for rank, (tensors, forward, backward) in enumerate(results):
        places = [p for a, b in ranges[rank] for p in range(a, b)]
        for got, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(got, wanted[:, :, places]), rank
        for traffic, way in ((forward, False), (backward, True)):
            planned = plan.bytes_received(
                rank, head_dim=(case.head_dim, case.value_dim), dtype=torch.float64, backward=way
            )
            assert traffic.received_bytes == planned * case.batch
    for way in (1, 2):
        moved = [result[way] for result in results]
        assert sum(t.sent_bytes for t in moved) == sum(t.received_bytes for t in moved)


@pytest.mark.parametrize(
    "backend", ("gather", "cpu", pytest.param("triton", marks=pytest.mark.slow))
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_ranks_are_as_exact_as_one_process(workers, dtype, backend):
    """Partial results are merged, and gradients summed and sent, in float32."""
    if sr.backends()[backend] or (backend, dtype) == ("triton", torch.bfloat16):
        pytest.skip("the backend cannot run here")
    case = Case(batch=1, num_heads=4, num_kv_heads=2, q_len=120, kv_len=120, head_dim=32)
    if backend == "triton":  # interpreted
        case = replace(case, num_heads=2, num_kv_heads=1)
    pattern = sr.SlidingWindow(30, 10) | sr.GlobalTokens(3)
    own = [x.to(dtype) for x in inputs(case, requires_grad=False)]
    grads = [torch.randn(1, case.num_heads, 120, 16).to(dtype), torch.randn(1, case.num_heads, 120)]
    leaves = [x.double().requires_grad_() for x in own]
    exact = sr.attention(*leaves, pattern, backend="reference", return_lse=True)
    exact = [*exact, *torch.autograd.grad(exact, leaves, [g.double() for g in grads])]
    leaves = [x.clone().requires_grad_() for x in own]
    alone = sr.attention(*leaves, pattern, backend=backend, return_lse=True)
    alone = [*alone, *torch.autograd.grad(alone, leaves, grads)]
    parts = workers.run(run_shards, own, grads, pattern, {"backend": backend}, world=4)
    for number, (expected, one) in enumerate(zip(exact, alone, strict=True)):
        ring = torch.cat([part[number] for part in parts], 2)
        assert ring.dtype == one.dtype
        bound = 1.1 * (one.double() - expected).abs().max() + 4 * torch.finfo(torch.float32).eps
        assert (ring.double() - expected).abs().max() <= bound


def run_shards(
    rank: int, whole: list[Tensor], grads: list[Tensor], pattern: sr.Pattern, options: Any
) -> list[Tensor]:
    group = groups[4]
    own = [shard(x, group=group).requires_grad_() for x in whole]
    results = ring_attention(*own, pattern, group=group, return_lse=True, **options)
    return [
        *(x.detach() for x in results),
        *torch.autograd.grad(results, own, [shard(g, group=group) for g in grads]),
    ]


@pytest.mark.parametrize(
    "name", thinned(2, ["blocks of each batch entry", "causal", "global tokens", "longnet"])
)
def test_offloaded_keys_give_the_same_bits(name):
    own = inputs(CASE)
    pattern = PATTERNS[name](CASE)
    options = {"world_size": 4, "sharding": "zigzag", "return_lse": True}
    results = [simulate_ring(*own, pattern, **options, offload=x) for x in (False, True)]
    grads = [gradients(result, own) for result in results]
    for a, b in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
        assert torch.equal(a, b)


def run_traced(rank: int) -> list[str]:
    """Lists the posts, waits and kernels of a rank in their order."""
    from sparsering.distributed import exchange
    from sparsering.distributed.rank import Rank

    events: list[str] = []

    def noted(name, function):
        def call(*args, **kwargs):
            step = args[1] if name == "post" else getattr(args[0], "step", "")
            events.append(f"{name} {step}".strip())
            return function(*args, **kwargs)

        return call

    saved = exchange.Exchange.start, exchange.Pending.wait, Rank._attend, Rank._differentiate
    exchange.Exchange.start = noted("post", saved[0])
    exchange.Pending.wait = noted("wait", saved[1])
    Rank._attend = noted("attend", saved[2])
    Rank._differentiate = noted("differentiate", saved[3])
    try:
        own = [torch.randn(1, 1, 8, 4, requires_grad=True) for _ in range(3)]
        ring_attention(*own, sr.Full(), group=groups[3]).sum().backward()
    finally:
        exchange.Exchange.start, exchange.Pending.wait, Rank._attend, Rank._differentiate = saved
    return [event for event in events if "query rows" not in event and "answers" not in event]


def test_messages_are_posted_before_the_work_that_hides_them_and_awaited_after(workers):
    keys = [f"keys of round {n} of 2" for n in (1, 2)]
    grads = [f"gradients of round {n}" for n in (1, 2)]
    expected = [
        "post agreement", "wait agreement",
        f"post {keys[0]}", "attend",
        f"post {keys[1]}", f"wait {keys[0]}", "attend",
        f"wait {keys[1]}", "attend",
        "post agreement", "wait agreement",
        f"post {keys[0]}", "differentiate",
        f"post {keys[1]}", f"wait {keys[0]}", "differentiate", f"post {grads[0]}",
        f"wait {keys[1]}", "differentiate", f"post {grads[1]}", f"wait {grads[0]}",
        f"wait {grads[1]}",
    ]  # fmt: skip
    for events in workers.run(run_traced, world=3):
        assert events == expected
