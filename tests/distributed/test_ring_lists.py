"""Lists of single keys over ranks: as in one process, and no more keys move than ranks list."""

import pytest
import torch
from helpers.ring_workers import groups, workers_of
from oracles.attention_oracle import Case, assert_close, assert_same_attention, inputs
from oracles.listed import JOINS, TOKENS, WITHOUT_DISTANCES
from oracles.ring_oracle import assert_plan_is_exact, plan_of
from torch import Tensor

import sparsering as sr
from sparsering.call import NO_OPTIONS
from sparsering.distributed import RingPlan, rank_layouts, ring_attention, shard, simulate_ring
from sparsering.distributed.rank import choose_kernels
from sparsering.distributed.sharding import owned_ranges
from sparsering.layouts.compile import compile_passes
from sparsering.patterns.selected import has_lists

SHARDINGS = ("contiguous", "zigzag", "chunks:2,0,1,1,0,0,2", "balanced")
CASES = [(name, SHARDINGS[number % 4]) for number, name in enumerate(JOINS)]

workers = workers_of(3, "module")


def case_of(pattern: sr.Pattern) -> Case:
    batch = pattern.num_batches() or 1
    return Case(batch=batch, num_heads=4, num_kv_heads=2, q_len=TOKENS, kv_len=TOKENS, value_dim=8)


@pytest.mark.parametrize(("name", "sharding"), CASES)
def test_a_plan_with_lists_is_exact(name, sharding):
    pattern = JOINS[name]
    assert_plan_is_exact(pattern, case_of(pattern), 3, sharding)


@pytest.mark.parametrize(("name", "sharding"), CASES)
def test_ranks_compute_lists_as_one_process_does(monkeypatch, name, sharding):
    pattern, compiled = JOINS[name], []

    def compile_tiles(tiles, *rest):
        compiled.append(tiles)
        return compile_passes(tiles, *rest)

    monkeypatch.setattr(rank_layouts, "compile_passes", compile_tiles)
    sr.layout_cache.clear()
    own = [*inputs(case_of(pattern))]
    table = torch.randn(4, 21, dtype=torch.float64, requires_grad=True)
    options = {"dropout_p": 0.3, "dropout_seed": 4, "sink": torch.randn(4, dtype=torch.float64)}
    if name not in WITHOUT_DISTANCES:
        options["distance_bias"] = table
        own.append(table)
    for leaves, used in ((own[:3], {}), (own, options)):
        ring = {"world_size": 3, "sharding": sharding, "return_lse": True}
        got = simulate_ring(*own[:3], pattern, **ring, **used)
        expected = sr.attention(*own[:3], pattern, backend="reference", return_lse=True, **used)
        assert_same_attention(got, expected, leaves, forward=1e-12, backward=1e-11)
    assert compiled and not any(map(has_lists, compiled))


def run_ring(rank: int, name: str, sharding: str, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    pattern, group = JOINS[name], groups[3]
    torch.manual_seed(0)
    whole = [x.to(dtype) for x in inputs(case_of(pattern), requires_grad=False)]
    own = [shard(x, group=group, sharding=sharding).requires_grad_() for x in whole]
    out, lse = ring_attention(*own, pattern, group=group, sharding=sharding, return_lse=True)
    received = ring_attention.last_traffic().received_bytes
    sums = out.sum() + lse[lse > -1e9].sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(sums, own))], received


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        ("beside a window", "zigzag"),
        ("lists by batch entry", "contiguous"),
        ("beside global tokens", "contiguous"),
        ("along a tree", "zigzag"),
    ],
)
def test_processes_compute_lists_bit_for_bit_as_simulated(workers, name, sharding, dtype):
    pattern = JOINS[name]
    case = case_of(pattern)
    torch.manual_seed(0)
    whole = [x.detach().to(dtype).requires_grad_() for x in inputs(case)]
    plan = plan_of(pattern, case, 3, sharding)
    results = workers.run(run_ring, name, sharding, dtype, world=3)
    ring = {"world_size": 3, "sharding": sharding, "return_lse": True}
    out, lse = simulate_ring(*whole, pattern, **ring)
    grads = torch.autograd.grad(out.sum() + lse[lse > -1e9].sum(), whole)
    for rank, (got, received) in enumerate(results):
        places = [p for a, b in owned_ranges(sharding, TOKENS, 3)[rank] for p in range(a, b)]
        for a, b in zip(got, (out, lse, *grads), strict=True):
            assert torch.equal(a, b[:, :, places]), rank
        widths = case.head_dim, case.value_dim
        assert received == plan.bytes_received(rank, head_dim=widths, dtype=dtype) * case.batch


def test_the_load_of_lists_is_a_mean_in_double_precision():
    indices = torch.tensor([[[[-1], [-1]]], [[[-1], [1]]], [[[-1], [1]]]])  # [3 entries, 1, 2, 1]
    plan = RingPlan.build(sr.SelectedBlocks(indices, 1, query_block=1), 2, 1)
    assert plan.load(0) == 2 / 3


def test_a_ring_names_the_backends_that_run_lists():
    query = torch.zeros(1, 2, TOKENS, 16)
    with pytest.raises(NotImplementedError, match="lists of keys, such as cpu, triton, gather"):
        choose_kernels("torch_sparse", [query] * 3, NO_OPTIONS, JOINS["causal"])


def test_a_listed_key_that_is_not_finite_reaches_its_own_rows_alone():
    pattern = JOINS["causal"]
    x = [y.detach().float() for y in inputs(case_of(pattern))]
    x[2][:, :, 30] = torch.inf
    out = simulate_ring(*x, pattern, world_size=3)
    expected = sr.attention(*x, pattern, backend="reference")
    assert torch.equal(out.isfinite(), expected.isfinite()) and not out.isfinite().all()
    finite = expected.isfinite()
    assert_close(out[finite].double(), expected[finite].double(), 5e-6)
