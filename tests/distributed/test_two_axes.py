"""Meshes of heads and tokens: the numbers of one process, moving what the plan says."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers.ring_workers import workers_of
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_same_attention,
    inputs,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sparsering as sr
import sparsering.nn
from sparsering.distributed import (
    RingMismatchError,
    RingPlan,
    ring_attention,
    shard,
    simulate_ring,
    unshard,
)
from sparsering.distributed.heads import mesh_sharding, ring_sharding
from sparsering.distributed.sharding import chunk_owners, owned_ranges, positions
from sparsering.patterns.head_shard import HeadShard

CASE = Case(batch=2, num_heads=8, num_kv_heads=2, q_len=75, kv_len=75, head_dim=8, value_dim=16)
SHAPES = ((2, 4), (4, 2), (8, 1), (1, 3))
FAST = [
    *("causal", "longnet", "window", "global rows", "documents", "packed", "random blocks"),
    *("key padding", "mixture with overlap", "blocks of each head", "a pattern of each head"),
    "nothing",
]
SIMULATED = [
    pytest.param(name, shape, marks=() if name in FAST and (i + j) % 4 == 0 else pytest.mark.slow)
    for i, name in enumerate(PATTERNS)
    for j, shape in enumerate(SHAPES)
]
RUN = [
    pytest.param(name, (2, 2), marks=() if name in FAST else pytest.mark.slow) for name in PATTERNS
] + [("longnet", (4, 1)), ("key padding", (4, 1)), ("longnet", (1, 4))]

workers = workers_of(4)
_meshes: dict[Any, DeviceMesh] = {}


def mesh_of(*shape: int, names: tuple[str, ...] = ("heads", "tokens")) -> DeviceMesh:
    """In a worker: the mesh of a shape, the same at each call."""
    key = shape, names
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[key]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_group_of_heads_has_the_pairs_of_its_heads(name):
    pattern, n = PATTERNS[name](CASE), CASE.kv_len
    whole = pattern.to_dense(n, num_heads=8, num_kv_heads=2)
    whole = whole.expand(*whole.shape[:-3], 8, n, n)
    for groups in (2, 4, 8):
        for group in range(groups):
            heads = HeadShard(8, 2, group, groups)
            own = heads.of(pattern, n)
            counts = {"num_heads": 8 // groups, "num_kv_heads": len(heads.kv_heads)}
            dense = own.to_dense(n, **counts)
            dense = dense.expand(*dense.shape[:-3], 8 // groups, n, n)
            assert torch.equal(dense, whole[..., heads.heads, :, :])
            assert own == sr.parse(*own.operands)


def test_heads_of_a_group_keep_their_kv_heads():
    heads = [HeadShard(12, 4, group, 6) for group in range(6)]
    assert [x.kv_heads for x in heads] == [[0, 0], [0, 1], [1, 1], [2, 2], [2, 3], [3, 3]]
    assert [range(12)[x.heads] for x in heads] == [range(i, i + 2) for i in range(0, 12, 2)]
    kv_head_of = [x.kv_heads[j] for x in heads for j in range(2)]  # a query head for each kv head
    assert kv_head_of == [head * 4 // 12 for head in range(12)]


@pytest.mark.parametrize("sharding", ("contiguous", "zigzag", "chunks:2,0,1,1,0,0,2"))
@pytest.mark.parametrize("shape", ((2, 3), (1, 3), (3, 1)))
def test_rings_have_the_tokens_of_their_column(shape, sharding):
    over_all = mesh_sharding(sharding if shape[1] == 3 else "contiguous", shape)
    of_ring = owned_ranges(ring_sharding(over_all, shape), 50, shape[1])
    for place in range(shape[1]):
        ranks = shape[0] * shape[1]
        of_all = owned_ranges(over_all, 50, ranks)
        column = [of_all[g * shape[1] + place] for g in range(shape[0])]
        tokens = torch.cat([positions(ranges) for ranges in column])
        assert torch.equal(tokens.sort().values, positions(of_ring[place]))
    if shape[1] == 3:
        cut = [owner for owner in chunk_owners(sharding, 3) for _ in range(shape[0])]
        assert [x % 3 for x in chunk_owners(over_all, shape[0] * 3)] == cut


def every_option(case: Case, seed: int = 7) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "softcap": 5.0,
        "distance_bias": torch.randn(case.num_heads, 9, dtype=torch.float64),
        "sink": torch.randn(case.batch, case.num_heads, case.q_len, dtype=torch.float64),
        "dropout_p": 0.3,
        "dropout_seed": 5,
    }


@pytest.mark.parametrize(("name", "shape"), SIMULATED)
def test_simulated_meshes_compute_what_one_process_does(name, shape):
    pattern, own = PATTERNS[name](CASE), inputs(CASE)
    options = {} if pattern.restarts or name.startswith("tree") else every_option(CASE)
    sharding = ("contiguous", "zigzag", "auto")[len(name) % 3]
    got = simulate_ring(
        *own, pattern, world_size=shape, sharding=sharding, return_lse=True, **options
    )
    expected = sr.attention(*own, pattern, backend="reference", return_lse=True, **options)
    assert_same_attention(got, expected, own, forward=1e-10, backward=1e-10)


def run_on_mesh(
    rank: int, shape: tuple[int, int], name: str, sharding: str, with_options: bool
) -> list[Tensor]:
    """A rank's (out, lse, dq, dk, dv, gradients of options); bytes are compared with the plan."""
    mesh, pattern = mesh_of(*shape), PATTERNS[name](CASE)
    torch.manual_seed(0)
    whole = inputs(CASE, requires_grad=False)
    sent = torch.randn(2, 8, CASE.q_len, 16).double(), torch.randn(2, 8, CASE.q_len).double()
    place: dict[str, Any] = {"mesh": mesh, "sharding": sharding}
    own = [shard(x, **place).requires_grad_() for x in whole]
    of_own = [shard(x, **place) for x in sent]
    options = every_option(CASE) if with_options else {}
    if options:
        options["sink"] = shard(options["sink"], **place)
        options |= {name: options[name].requires_grad_() for name in ("sink", "distance_bias")}
    leaves = [*own, *(x for x in options.values() if isinstance(x, Tensor))]
    results = ring_attention(*own, pattern, return_lse=True, **place, **options)
    found = torch.autograd.grad(results, leaves, of_own)
    if not options:
        plan = RingPlan.build(
            pattern, CASE.q_len, shape, num_heads=8, num_kv_heads=2, sharding=sharding
        )
        out = ring_attention(*own, pattern, **place)
        forward = ring_attention.last_traffic()
        torch.autograd.grad(out, own, of_own[0])
        backward = ring_attention.last_traffic(backward=True)
        for traffic, way in ((forward, False), (backward, True)):
            planned = plan.bytes_received(rank, head_dim=(8, 16), dtype=torch.float64, backward=way)
            assert traffic.received_bytes == planned * CASE.batch, (way, traffic)
    return [x.detach() for x in (*results, *found)]


@pytest.mark.parametrize(("name", "shape"), RUN)
def test_processes_compute_what_is_simulated_and_move_what_is_planned(workers, name, shape):
    with_options = name in ("longnet", "mixture with overlap") and shape != (4, 1)
    sharding = ("contiguous", "zigzag")[len(name) % 2]
    parts = workers.run(run_on_mesh, shape, name, sharding, with_options)
    torch.manual_seed(0)
    whole, pattern = inputs(CASE), PATTERNS[name](CASE)
    sent = torch.randn(2, 8, CASE.q_len, 16).double(), torch.randn(2, 8, CASE.q_len).double()
    options = every_option(CASE) if with_options else {}
    options |= {x: options[x].requires_grad_() for x in ("sink", "distance_bias") if x in options}
    leaves = [*whole, *(x for x in options.values() if isinstance(x, Tensor))]
    results = sr.attention(*whole, pattern, backend="reference", return_lse=True, **options)
    expected = [*results, *torch.autograd.grad(results, leaves, sent)]
    simulated = simulate_ring(
        *whole, pattern, world_size=shape, sharding=sharding, return_lse=True, **options
    )
    simulated = [*simulated, *torch.autograd.grad(simulated, leaves, sent)]
    for rank, ranges in enumerate(owned_ranges(sharding, CASE.q_len, 4)):
        places = positions(ranges)
        for number, (got, one, wanted) in enumerate(
            zip(parts[rank], simulated, expected, strict=True)
        ):
            if number == 5:  # the distance bias: a rank has its part of the gradient
                continue
            assert (got - wanted[:, :, places]).abs().nan_to_num().max() < 1e-10, number
            assert torch.equal(got, one[:, :, places]), number
    if with_options:
        whole_bias = sum(part[5] for part in parts)
        assert (whole_bias - expected[5]).abs().max() < 1e-10


def run_second_derivatives(rank: int) -> list[Tensor]:
    mesh, pattern = mesh_of(2, 2), sr.SlidingWindow(20) & sr.Causal()
    torch.manual_seed(0)
    whole = inputs(CASE, requires_grad=False)
    moves = [torch.randn_like(x) for x in whole]
    own = [shard(x, mesh=mesh).requires_grad_() for x in whole]
    directions = [shard(x, mesh=mesh) for x in moves]
    out = ring_attention(*own, pattern, mesh=mesh)
    grads = torch.autograd.grad(out.square().sum(), own, create_graph=True)
    penalty = sum(x.square().sum() for x in grads)
    found = torch.autograd.grad(penalty, own)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(*x) for x in zip(own, directions, strict=True)]
        out = ring_attention(*duals, pattern, mesh=mesh)
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
    return [x.detach() for x in (*found, tangent)]


def test_second_derivatives_and_tangents(workers):
    parts = workers.run(run_second_derivatives)
    torch.manual_seed(0)
    whole = inputs(CASE)
    moves = [torch.randn_like(x) for x in whole]

    def attend(*x: Tensor) -> Any:
        return sr.attention(*x, sr.SlidingWindow(20) & sr.Causal(), backend="reference")

    grads = torch.autograd.grad(attend(*whole).square().sum(), whole, create_graph=True)
    expected = [*torch.autograd.grad(sum(x.square().sum() for x in grads), whole)]
    expected.append(torch.func.jvp(attend, tuple(whole), tuple(moves))[1])
    for number, wanted in enumerate(expected):
        got = torch.cat([part[number] for part in parts], 2)
        assert (got - wanted).abs().max() < 1e-10 * wanted.abs().max(), number


def run_many_meshes(rank: int) -> dict[str, str]:
    """Returns what each wrong call raises on this rank; right calls between them work."""
    mesh, x = mesh_of(2, 2), torch.randn(1, 4, 5, 8, dtype=torch.float64)
    three = mesh_of(2, 1, 2, names=("data", "heads", "tokens"))
    part = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("heads", "tokens"))
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("heads", "tokens"))
    unlike = mesh if rank else mesh_of_column()
    lists = sr.SelectedBlocks(torch.zeros(1, 4, 5, 1).long(), 1, query_block=1)
    calls: dict[str, Any] = {
        "three axes": lambda: ring_attention(x, x, x, sr.Causal(), mesh=three),
        "heads": lambda: ring_attention(x[:, :3], x[:, :3], x[:, :3], sr.Causal(), mesh=mesh),
        "a part": lambda: ring_attention(x, x, x, sr.Causal(), mesh=part),
        "order": lambda: ring_attention(x, x, x, sr.Causal(), mesh=turned),
        "unlike": lambda: ring_attention(x, x, x, sr.Causal(), mesh=unlike),
        "patterns": lambda: ring_attention(x, x, x, sr.SlidingWindow(rank // 2 + 1), mesh=mesh),
        "own rows": lambda: ring_attention(x, x, x, lists, mesh=mesh),
        "one rank": lambda: ring_attention(x[:, : 4 - rank // 3], x, x, sr.Causal(), mesh=mesh),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            is_of_all = isinstance(error, RingMismatchError)
            found[name] = f"{'all' if is_of_all else 'own'}: {error}"
        out = ring_attention(x, x, x, sr.Causal(), group=mesh)
        assert out.shape == x.shape
    return found


def mesh_of_column() -> DeviceMesh:
    return _meshes[(4, 1), ("heads", "tokens")]


def make_column(rank: int) -> None:
    mesh_of(4, 1)


WORDS = {
    "three axes": "DeviceMesh of one axis, or of two",
    "heads": "multiple of the mesh's 2 ranks of heads, got 3",
    "a part": "must have all 4 ranks",
    "order": "ascending order",
    "unlike": "shape of the mesh",
    "patterns": "pattern",
    "own rows": "must be the whole table",
    "one rank": "",
}


def test_a_wrong_mesh_is_an_error_on_every_rank(workers):
    workers.run(make_column)
    for found in workers.run(run_many_meshes):
        assert found.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in found[name], name


def run_in_a_larger_mesh(rank: int) -> Tensor:
    mesh = mesh_of(2, 2, 1, names=("data", "heads", "tokens"))["heads", "tokens"]
    torch.manual_seed(rank // 2)  # each row of "data" has a sequence of its own
    whole = torch.randn(3, 1, 4, 20, 8, dtype=torch.float64)
    own = [shard(x, mesh=mesh) for x in whole]
    out = ring_attention(*own, sr.Causal(), mesh=mesh)
    assert isinstance(out, Tensor)
    expected = sr.attention(*whole, sr.Causal(), backend="reference")
    joined = unshard(out, mesh=mesh)
    return (joined - expected).abs().max()


def test_a_mesh_may_be_cut_from_a_larger_one(workers):
    assert max(workers.run(run_in_a_larger_mesh)) < 1e-12


def test_loads_of_a_mesh_are_those_of_all_pairs():
    pattern = sr.LongNet((16, 64), (1, 2)) & sr.Causal()
    counts = {"num_heads": 8, "num_kv_heads": 4}
    alone = RingPlan.build(pattern, 64, 1, **counts)
    for shape in ((1, 4), (2, 2), (4, 1), (8, 2)):
        plan = RingPlan.build(pattern, 64, shape, sharding="auto", **counts)
        assert plan.world_size == math.prod(shape)
        assert float(plan.loads.sum()) == alone.load(0)
        assert sum(plan.load(rank) for rank in range(plan.world_size)) == alone.load(0)


def test_the_best_mesh_is_that_of_least_cost():
    dense = RingPlan.best(sr.Causal(), 1 << 13, 8, num_heads=32, num_kv_heads=8)
    near = RingPlan.best(sr.SlidingWindow(64), 1 << 13, 8, num_heads=32, num_kv_heads=8)
    assert (dense.shape, near.shape) == ((8, 1), (1, 8))
    for best, pattern in ((dense, sr.Causal()), (near, sr.SlidingWindow(64))):
        costs = {}
        for shape in ((1, 8), (2, 4), (4, 2), (8, 1)):
            plan = RingPlan.build(
                pattern, 1 << 13, shape, num_heads=32, num_kv_heads=8, sharding="auto"
            )
            costs[shape] = plan.cost
            assert f"{shape} {plan.cost:.3g}" in best.reason
        assert costs[best.shape] == min(costs.values())


def test_heads_that_do_not_divide_are_left_out():
    plan = RingPlan.best(sr.Causal(), 4096, 6, num_heads=9)
    assert "(3, 2)" in plan.reason and "(2, 3)" not in plan.reason


@pytest.mark.parametrize("wrong", [(2, 2, 2), (0, 2), (2, 1.5), "22"])
def test_a_wrong_world_size_says_what_was_expected(wrong):
    with pytest.raises((ValueError, TypeError), match="world_size"):
        RingPlan.build(sr.Causal(), 64, wrong, num_heads=4)


def test_dropout_needs_groups_of_a_power_of_two():
    x = torch.randn(1, 6, 16, 8)
    with pytest.raises(ValueError, match=r"got 3 of 6; choose another number"):
        simulate_ring(x, x, x, sr.Causal(), world_size=(2, 2), dropout_p=0.5)


def run_module(rank: int, keys: int | None) -> list[Tensor]:
    mesh = mesh_of(2, 2)
    made, inputs = module_and_inputs(keys)
    made.group = mesh
    assert made.group is mesh
    own = [shard(x, dim=1, mesh=mesh).requires_grad_() for x in inputs]
    given = own * 3 if keys is None else [own[0], own[1], own[1]]
    out, _ = made(*given, need_weights=False)
    out.square().sum().backward()
    joined = [unshard(x, dim=1, mesh=mesh) for x in (out.detach(), *(x.grad for x in own))]
    return [*joined, *(x.grad for x in made.parameters())]


def module_and_inputs(keys: int | None) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(3)
    pattern = sr.SlidingWindow(9) | sr.GlobalTokens(2)
    made = sr.nn.MultiheadAttention(16, 4, pattern=pattern, batch_first=True).double()
    lengths = [27] if keys is None else [27, keys]
    return made, [torch.randn(2, n, 16, dtype=torch.float64) for n in lengths]


@pytest.mark.parametrize("keys", (None, 15, 33))
def test_modules_take_a_mesh(workers, keys):
    parts = workers.run(run_module, keys)
    made, inputs = module_and_inputs(keys)
    own = [x.requires_grad_() for x in inputs]
    given = own * 3 if keys is None else [own[0], own[1], own[1]]
    out, _ = made(*given, need_weights=False)
    out.square().sum().backward()
    expected = [out.detach(), *(x.grad for x in own)]
    for found in parts:
        for got, wanted in zip(found, expected, strict=False):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
    for number, parameter in enumerate(made.parameters(), start=len(expected)):
        got = sum(found[number] for found in parts)
        torch.testing.assert_close(got, parameter.grad, rtol=0, atol=1e-10)


def run_short(rank: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 4, length, 8).to(dtype)
    own = [shard(x, mesh=mesh, sharding="zigzag").requires_grad_() for x in whole]
    out, lse = ring_attention(*own, sr.Causal(), mesh=mesh, sharding="zigzag", return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), own)
    place = {"mesh": mesh, "sharding": "zigzag"}
    return [unshard(x.detach(), **place) for x in (out, lse, *grads)]


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_without_tokens_and_half_precision(workers, length, dtype):
    parts = workers.run(run_short, length, dtype)
    torch.manual_seed(0)
    inputs_of_one = torch.randn(3, 1, 4, length, 8).to(dtype)
    leaves = [x.requires_grad_() for x in inputs_of_one.unbind()]
    out, lse = sr.attention(*leaves, sr.Causal(), return_lse=True)
    grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)
    bound = 2e-6 if dtype == torch.float32 else 0.04
    for found in parts:
        for got, wanted in zip(found, (out, lse, *grads), strict=True):
            assert got.dtype == wanted.dtype
            assert (got.float() - wanted.float()).abs().max() <= bound


def run_compiled(rank: int) -> float:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    own = [shard(x, mesh=mesh) for x in torch.randn(3, 1, 4, 40, 8)]

    @torch.compile(backend="eager")
    def layer(*x: Tensor) -> Tensor:
        return ring_attention(*(y * 2 for y in x), sr.Causal(), mesh=mesh) + 1  # type: ignore[operator]

    expected = ring_attention(*(y * 2 for y in own), sr.Causal(), mesh=mesh) + 1  # type: ignore[operator]
    return float((layer(*own) - expected).abs().max())


def test_a_compiled_layer_breaks_its_graph_at_a_mesh(workers):
    assert workers.run(run_compiled) == [0.0] * 4


def test_rings_are_imported_without_the_compiler():
    code = "import sys, sparsering.distributed; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
