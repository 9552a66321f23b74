"""Tangents, second and mixed derivatives over ranks equal those of dense attention."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.ring_workers import groups, workers_of
from oracles.derivatives_oracle import (
    INDICES,
    OPTIONS,
    WAYS,
    Call,
    N,
    assert_equal,
    call,
    drawn,
    loss,
    of_gradient,
    tangent,
    through_tangent,
)
from oracles.derivatives_oracle import PATTERNS as ORACLE_PATTERNS
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jacfwd, jacrev, jvp, vmap

import sparsering as sr
from sparsering.distributed import (
    RingMismatchError,
    RingPlan,
    last_traffic,
    ring_attention,
    shard,
    simulate_ring,
)
from sparsering.distributed.sharding import num_tokens

pytestmark = pytest.mark.filterwarnings("ignore:`?torch.jit.script`? is deprecated")

SHARDINGS = {2: "contiguous", 3: "zigzag", 5: "chunks:2,0,1,1,0,0,2,3,4"}
GLOBAL = sr.SlidingWindow(2, 2) | sr.GlobalTokens(1)  # its global row travels to the keys
PATTERNS = {**ORACLE_PATTERNS, "a row that travels": GLOBAL}

workers = workers_of(3)


def simulated(
    pattern: sr.Pattern, options: dict[str, Any], ring: dict[str, Any], *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    return of_ring(partial(simulate_ring, **ring), pattern, options, *tensors)


def of_ring(
    attend: Callable[..., Any], pattern: sr.Pattern, options: dict[str, Any], *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) like `call` of the oracle."""
    learned = iter(tensors[3:])
    given = {k: next(learned) if isinstance(x, tuple) else x for k, x in options.items()}
    out, lse = attend(*tensors[:3], pattern, return_lse=True, **given)
    return out, torch.where(lse == -torch.inf, 0.0, lse)


# each pattern in every way, with another option each time
KEPT = [
    {"name": name, "way": way, "world": (2, 3, 5)[i % 3], "options": [*OPTIONS][(4 * i + j) % 8]}
    for i, name in enumerate(PATTERNS)
    for j, way in enumerate(WAYS)
]


@pytest.mark.covering(1, keep=[*KEPT, {"name": "a row that travels", "options": "all"}])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("world", SHARDINGS)
@pytest.mark.parametrize("name", PATTERNS)
def test_simulated_ranks(name: str, world: int, options: str, way: str):
    pattern, given = PATTERNS[name], OPTIONS[options]
    if "distance_bias" in given and name == "per head":
        pytest.skip("a PerHead mixes no distances")
    x, u = drawn(1, given), drawn(2, given)
    ring = {"world_size": world, "sharding": SHARDINGS[world]}
    found = WAYS[way](partial(simulated, pattern, given, ring), x, u)
    assert_equal(found, WAYS[way](partial(call, pattern, given, "reference"), x, u))


@pytest.mark.parametrize("world", SHARDINGS)
def test_a_row_travels_as_the_name_says(world: int):
    sharding = SHARDINGS[world]
    plan = RingPlan.build(GLOBAL, N, world, num_heads=4, num_kv_heads=2, sharding=sharding)
    assert plan.travellers and all(map(plan.tokens_received, range(world)))


def second_of_shards(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a penalty on gradients; of tensors that ranks share, it takes no square."""
    x = [t.detach().clone().requires_grad_() for t in x]
    out, lse = f(*x)
    of_out, of_lse = (torch.ones_like(t).requires_grad_() for t in (out, lse))
    first = torch.autograd.grad((out, lse), x, (of_out, of_lse), create_graph=True)
    penalty = sum((g * v).sum() for g, v in zip(first, u, strict=True))
    penalty = penalty + sum(g.square().sum() for g in first[:3])
    return [*torch.autograd.grad(penalty, [*x, of_out, of_lse])]


def of_dual_gradient(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    """The tangent of a gradient, by dual numbers instead of torch.func."""
    with forward_ad.dual_level():
        x = [t.detach().clone().requires_grad_() for t in x]
        duals = [forward_ad.make_dual(a, b) for a, b in zip(x, u, strict=True)]
        first = torch.autograd.grad(loss(f, *duals), x)
        return [forward_ad.unpack_dual(t).tangent for t in first]


WAYS_OF_RANKS = {
    "tangent": tangent,
    "second": second_of_shards,
    "HVP": of_gradient,
    "dual HVP": of_dual_gradient,
    "through": through_tangent,
}


def run(
    rank: int, world: int, name: str, options: str, ways: Sequence[str], ring: dict[str, Any]
) -> dict[str, list[Tensor]]:
    """Takes the derivatives of a rank's shards in each way."""
    torch.manual_seed(rank)  # without a dropout seed, all use that of rank 0
    given = OPTIONS[options]
    cut = partial(shard, group=groups[world], sharding=ring.get("sharding", "contiguous"))
    x, u = ([cut(t) if is_sharded(t) else t for t in drawn(seed, given)] for seed in (1, 2))
    f = partial(
        of_ring, partial(ring_attention, group=groups[world], **ring), PATTERNS[name], given
    )
    return {way: [t.detach() for t in WAYS_OF_RANKS[way](f, x, u)] for way in ways}


def is_sharded(x: Tensor) -> bool:
    return x.dim() > 2 and x.shape[2] == N


def assert_whole(
    parts: Sequence[Sequence[Tensor]], exact: Sequence[Tensor], places: Sequence[Sequence[int]]
) -> None:
    """Compares ranks' results: rows of their tokens, and summands of what they share."""
    whole = []
    for number, x in enumerate(exact):
        own = [part[number] for part in parts]
        if not is_sharded(x):
            whole.append(sum(own))
            continue
        whole.append(torch.empty_like(x))
        for part, at in zip(own, places, strict=True):
            whole[-1][:, :, at] = part
    assert_equal(whole, exact)


def assert_ranks_compute(workers, world, name, options, ways, sharding) -> None:
    pattern, given = PATTERNS[name], OPTIONS[options]
    parts = workers.run(run, world, name, options, ways, {"sharding": sharding}, world=world)
    x, u = drawn(1, given), drawn(2, given)
    plan = RingPlan.build(pattern, N, world, num_heads=4, num_kv_heads=2, sharding=sharding)
    places = [[p for a, b in ranges for p in range(a, b)] for ranges in plan.ranges]
    for way in ways:
        exact = WAYS_OF_RANKS[way](partial(call, pattern, given, "reference"), x, u)
        assert_whole([part[way] for part in parts], exact, places)


@pytest.mark.parametrize("name", PATTERNS)
def test_ranks_compute_every_way(workers, name: str):
    assert_ranks_compute(workers, 2, name, "bare", [*WAYS_OF_RANKS], "contiguous")


@pytest.mark.parametrize("options", [x for x in OPTIONS if x != "bare"])
def test_ranks_compute_every_option(workers, options: str):
    for name in ("a row that travels", "lists beside tiles"):
        assert_ranks_compute(workers, 3, name, options, [*WAYS_OF_RANKS], "zigzag")


UNEVEN = "chunks:0,0,0,1,0,2"


def test_shards_of_unlike_lengths(workers):
    for name in ("LongNet", "strided window and global", "a row that travels"):
        assert_ranks_compute(workers, 3, name, "all", [*WAYS_OF_RANKS], UNEVEN)


def run_own_rows(rank: int) -> list[list[Tensor]]:
    """Passes the lists of the rank's own tokens."""
    group, (start, stop) = groups[2], ((0, 18), (18, N))[rank]
    own = sr.SelectedBlocks(INDICES[:, start:stop], 1, 1, first_row=start) & sr.Causal()
    x, u = ([shard(t, group=group) for t in drawn(seed, {})] for seed in (1, 2))
    f = partial(of_ring, partial(ring_attention, group=group), own, {})
    return [[t.detach() for t in way(f, x, u)] for way in WAYS_OF_RANKS.values()]


def test_each_rank_passes_the_lists_of_its_own_tokens(workers):
    parts = workers.run(run_own_rows, world=2)
    x, u = drawn(1, {}), drawn(2, {})
    for number, way in enumerate(WAYS_OF_RANKS.values()):
        exact = way(partial(call, PATTERNS["lists"], {}, "reference"), x, u)
        assert_whole([part[number] for part in parts], exact, [range(18), range(18, N)])


def traffic(rank: int, compression: str | None) -> list[tuple[int, int, int]]:
    """(forward, tangent, double backward) received bytes; of a pattern whose keys and rows move."""
    group, given = groups[2], {}
    x, u = ([shard(t, group=group) for t in drawn(seed, given)] for seed in (1, 2))
    f = partial(ring_attention, pattern=GLOBAL, group=group, compression=compression)
    f(*x)
    found = [last_traffic().received_bytes]
    jvp(f, tuple(x), tuple(u))
    found.append(last_traffic().received_bytes)
    second_of_shards(lambda *y: f(*y, return_lse=True), x, u)
    return [*found, last_traffic(backward=True).received_bytes]


@pytest.mark.parametrize("compression", [None, "int8"])
def test_tangents_move_as_many_bytes_as_what_they_are_of(workers, compression):
    plan = RingPlan.build(GLOBAL, N, 2, num_heads=4, num_kv_heads=2)
    assert plan.travellers and plan.tokens_received(0)
    d, dv, exact = 8, 6, 8
    key_bytes = d + dv + 8 if compression else (d + dv) * exact
    batch, heads = 2, 4
    for rank, (forward, tangents, second) in enumerate(workers.run(traffic, compression, world=2)):
        received, returned = (batch * int(plan.tokens.sum(dim)[rank]) for dim in (1, 0))
        rows = [(t, batch * heads * num_tokens(t.rows)) for t in plan.travellers]
        sent = sum(count for t, count in rows if rank in t.hosts)
        own = sum(count * len(t.hosts) for t, count in rows if rank == t.owner)
        assert forward == received * key_bytes + sent * d * exact + own * (dv + 1) * exact
        moved = 2 * received * key_bytes + (sent * (2 * d + 1) + own * (dv + 1)) * exact
        assert tangents == moved
        moved += 2 * received * key_bytes + returned * (d + dv) * exact
        moved += (sent * 2 * (d + dv + 2) + own * d) * exact
        assert second == moved


def compressed(rank: int) -> list[list[Tensor]]:
    """Tangents over ranks of all inputs, and of each alone, with messages in bfloat16."""
    group = groups[2]
    x, u = ([shard(t.bfloat16().double(), group=group) for t in drawn(seed, {})] for seed in (1, 2))
    f = partial(ring_attention, pattern=PATTERNS["window"], group=group, return_lse=True)
    return [tangent(partial(f, compression=name), x, u) for name in (None, "bf16")]


def test_tangents_that_a_format_holds_arrive_as_they_are(workers):
    for plain, short in workers.run(compressed, world=2):
        assert all(map(torch.equal, plain, short))


def in_half_precision(rank: int) -> list[list[Tensor]]:
    group = groups[2]
    x, u = (drawn(seed, {}, torch.bfloat16) for seed in (1, 2))
    x, u = ([shard(t, group=group) for t in y] for y in (x, u))
    f = partial(of_ring, partial(ring_attention, group=group), GLOBAL, {})
    return [[t.detach() for t in way(f, x, u)] for way in (tangent, of_gradient, through_tangent)]


def test_half_precision_is_as_exact_as_in_one_process(workers):
    parts = workers.run(in_half_precision, world=2)
    x, u = (drawn(seed, {}, torch.bfloat16) for seed in (1, 2))
    for number, way in enumerate((tangent, of_gradient, through_tangent)):
        exact = way(
            partial(call, GLOBAL, {}, "reference"), [t.double() for t in x], [t.double() for t in u]
        )
        alone = way(partial(call, GLOBAL, {}, None), x, u)
        for i, (one, true) in enumerate(zip(alone, exact, strict=True)):
            ring = torch.cat([part[number][i] for part in parts], 2)
            assert ring.dtype == one.dtype
            bound = 1.1 * (one.double() - true).abs().max() + 1e-5
            assert (ring.double() - true).abs().max() <= bound


def mismatched(rank: int) -> str:
    x = [shard(t, group=groups[2]) for t in drawn(1, {})]
    f = partial(ring_attention, pattern=PATTERNS["window"], group=groups[2])
    with forward_ad.dual_level():
        key = x[1] if rank else forward_ad.make_dual(x[1], x[1])
        try:
            f(x[0], key, x[2])
        except RingMismatchError as error:
            return str(error)
    return "nothing raised"


def test_ranks_of_which_one_has_tangents_are_told(workers):
    for told in workers.run(mismatched, world=2):
        assert "ranks must agree on the wish for derivatives" in told


def test_transforms_of_a_simulated_ring():
    x, u = drawn(1, {}), drawn(2, {})
    both = (
        partial(simulated, GLOBAL, {}, {"world_size": 3}),
        partial(call, GLOBAL, {}, "reference"),
    )
    short = [t[:1, :, :6] for t in x]
    for way in (jacfwd, jacrev):
        found, exact = (way(g, (0, 1, 2))(*short) for g in both)
        assert_equal([*found[0], *found[1]], [*exact[0], *exact[1]])
    many = [torch.stack([t, 2 * t, t.flip(2)]) for t in u]
    for way in (tangent, of_gradient):
        found, exact = (vmap(lambda *v, g=g, way=way: tuple(way(g, x, v)))(*many) for g in both)
        assert_equal(found, exact)


def test_offloaded_tensors_have_the_same_derivatives():
    x, u = drawn(1, OPTIONS["all"]), drawn(2, OPTIONS["all"])
    for way in WAYS.values():
        found, kept = (
            way(partial(simulated, GLOBAL, OPTIONS["all"], {"world_size": 2, "offload": on}), x, u)
            for on in (True, False)
        )
        assert_equal(found, kept)


def third(rank: int) -> str:
    x, u = ([shard(t, group=groups[2]) for t in drawn(seed, {})] for seed in (1, 2))
    f = partial(of_ring, partial(ring_attention, group=groups[2]), PATTERNS["window"], {})
    try:
        tangent(lambda *y: tuple(tangent(f, y, u)), x, u)
    except NotImplementedError as error:
        return str(error)
    return "nothing raised"


def test_third_derivatives_are_refused_on_every_rank(workers):
    for told in workers.run(third, world=2):
        assert "third derivatives" in told
