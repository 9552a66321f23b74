"""Each rank passes the rows of lists of its own tokens: bit for bit as with the whole table."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.ring_workers import groups, workers_of
from oracles.attention_oracle import Case, inputs
from oracles.listed import LISTED, TOKENS, WINDOW
from oracles.ring_oracle import plan_of
from torch import Tensor

import sparsering as sr
from sparsering.distributed import RingMismatchError, ring_attention, shard, simulate_ring
from sparsering.distributed.sharding import owned_ranges

CASE = Case(batch=2, num_heads=4, num_kv_heads=2, q_len=TOKENS, kv_len=TOKENS, value_dim=8)
_SHARED = LISTED[:1]  # one table for all heads
_BY_ENTRY = torch.stack((LISTED, LISTED.flip(1)))
DOCUMENTS = sr.Documents((40, 50))
PATTERNS = {
    "of each kv head": lambda table: table(LISTED) & sr.Causal(),
    "of all heads": lambda table: table(_SHARED) | WINDOW,
    "beside a window": lambda table: (table(LISTED) | WINDOW) & sr.Causal(),
    "in documents": lambda table: table(LISTED) & DOCUMENTS,
    "by batch entry": lambda table: table(_BY_ENTRY) + WINDOW,
    "beside global tokens": lambda table: table(LISTED) | sr.GlobalTokens(3),
    "blocks of two": lambda table: table(LISTED // 2, 2) & sr.Causal(),
    "valid keys": lambda table: table(LISTED) & sr.KeyMask(torch.arange(TOKENS) % 7 > 0),
}

workers = workers_of(4, "module")


def whole(indices: Tensor, size: int = 1) -> sr.SelectedBlocks:
    return sr.SelectedBlocks(indices, size, 1)


def rows_of(rank: int, world: int, length: int) -> Any:
    """Returns a function like `whole`, for the rows of a rank's tokens."""
    start, stop = next(iter(owned_ranges("contiguous", length, world)[rank]), (0, 0))

    def own(indices: Tensor, size: int = 1) -> sr.SelectedBlocks:
        inside = torch.where(indices < -(-length // size), indices, -1)
        return sr.SelectedBlocks(inside[..., start:stop, :], size, 1, first_row=start)

    return own


def run(
    rank: int, world: int, name: str, length: int, options: dict[str, Any]
) -> tuple[list[Tensor], int, int]:
    group = groups[world]
    torch.manual_seed(0)
    case = replace(CASE, q_len=length, kv_len=length)
    own = [shard(x, group=group).requires_grad_() for x in inputs(case, requires_grad=False)]
    table = rows_of(rank, world, length)
    pattern = PATTERNS[name](table)
    before = pattern  # the numbers of other ranks differ from call to call, those of rank 0 do not
    if rank:
        before = PATTERNS[name](lambda x, *size: table(x.roll(7, -2), *size))
    for each in (before, pattern):
        out, lse = ring_attention(*own, each, group=group, return_lse=True, **options)
    received = ring_attention.last_traffic().received_bytes
    grads = torch.autograd.grad(out.sum() + lse[lse > -1e9].sum(), own)
    back = ring_attention.last_traffic(backward=True).received_bytes
    return [x.detach() for x in (out, lse, *grads)], received, back


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every option": {
        "dropout_p": 0.3,
        "dropout_seed": 4,
        "softcap": 3.0,
        "distance_bias": torch.linspace(-1, 1, 4 * 21, dtype=torch.float64).view(4, 21),
        "sink": torch.linspace(-1, 1, 4, dtype=torch.float64),
    },
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "world"), [(name, 2 + i % 3) for i, name in enumerate(PATTERNS)])
@pytest.mark.parametrize("options", OPTIONS)
def test_own_rows_are_the_whole_table(workers, name, world, options):
    torch.manual_seed(0)
    query, key, value = (x.detach().requires_grad_() for x in inputs(CASE))
    pattern = PATTERNS[name](whole)
    plan = plan_of(pattern, CASE, world, "contiguous")
    results = workers.run(run, world, name, TOKENS, OPTIONS[options], world=world)
    ring = {"world_size": world, "return_lse": True, **OPTIONS[options]}
    out, lse = simulate_ring(query, key, value, pattern, **ring)
    grads = torch.autograd.grad(out.sum() + lse[lse > -1e9].sum(), (query, key, value))
    exact = "global" not in name  # such rows travel by what tiles need, their lists stay
    for rank, (got, received, back) in enumerate(results):
        places = [p for a, b in plan.ranges[rank] for p in range(a, b)]
        for a, b in zip(got, (out, lse, *grads), strict=True):
            torch.testing.assert_close(
                a, b[:, :, places], rtol=0, atol=0 if exact else 1e-12, msg=f"rank {rank}"
            )
        for found, way in ((received, False), (back, True)):
            sizes = {"head_dim": (CASE.head_dim, CASE.value_dim), "dtype": torch.float64}
            if exact:
                planned = plan.bytes_received(rank, backward=way, **sizes)
                assert found == planned * CASE.batch


def listed_by(rank: int, everything: bool) -> sr.SelectedBlocks:
    """Rank 0 lists a few keys of the others; they list all keys but their own, or none."""
    foreign = torch.tensor([k for k in range(TOKENS) if k // 30 != rank])
    indices = foreign.expand(1, 30, 60).clone()
    if rank == 0:
        indices[..., 3:] = -1
        indices[..., 2] = 70
    elif not everything:
        indices[:] = -1
    return sr.SelectedBlocks(indices, 1, 1, first_row=30 * rank)


def run_with_rounds(rank: int) -> Tensor:
    group = groups[3]
    torch.manual_seed(0)
    own = [shard(x, group=group) for x in inputs(CASE, requires_grad=False)]
    for everything in (True, False):  # in two rounds of messages, then in one
        out = ring_attention(*own, listed_by(rank, everything), group=group)
    return out


def test_rounds_follow_what_other_ranks_list_in_this_call(workers):
    found = torch.cat(workers.run(run_with_rounds, world=3), 2)
    torch.manual_seed(0)
    x = [y.detach() for y in inputs(CASE)]
    tables = [listed_by(rank, False).indices for rank in range(3)]
    expected = sr.attention(*x, whole(torch.cat(tables, 1)), backend="reference")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [0, 1, 3, 5])
def test_fewer_tokens_than_ranks(workers, length):
    results = workers.run(run, 4, "of each kv head", length, {}, world=4)
    if not length:
        assert all(not x.numel() for got, *_ in results for x in got)
        return
    case = replace(CASE, q_len=length, kv_len=length)
    torch.manual_seed(0)
    x = [y.detach() for y in inputs(case)]
    pattern = sr.SelectedBlocks(LISTED[:, :length], 1) & sr.Causal()
    expected = simulate_ring(*x, pattern, world_size=4)
    assert torch.equal(torch.cat([got[0] for got, *_ in results], 2), expected)


def changes(rank: int, which: str) -> tuple[str, bool]:
    """A wrong call of rank 1; then a right one on the same group."""
    group, table = groups[3], rows_of(rank, 3, TOKENS)
    torch.manual_seed(0)
    own = [shard(x, group=group) for x in inputs(CASE, requires_grad=False)]
    right = table(LISTED) & sr.Causal()
    wrong, options = right, {}
    if rank == 1:
        match which:
            case "other k":
                wrong = table(LISTED[..., :5]) & sr.Causal()
            case "past the end":
                past = LISTED[:, 30:60].index_fill(1, torch.tensor([5]), TOKENS)
                wrong = sr.SelectedBlocks(past, 1, 1, first_row=30) & sr.Causal()
            case "other rows":
                wrong = sr.SelectedBlocks(LISTED[:, 30:59], 1, 1, first_row=30) & sr.Causal()
            case "first row":
                wrong = sr.SelectedBlocks(LISTED[:, 30:60], 1, 1, first_row=29) & sr.Causal()
            case "not causal":
                wrong = table(LISTED) | sr.SlidingWindow(2)
            case "whole":
                wrong = whole(LISTED) & sr.Causal()
    if which == "zigzag":
        options = {"sharding": "zigzag"}
    try:
        ring_attention(*own, wrong, group=group, **options)
        told = ""
    except RingMismatchError as error:
        told = str(error)
    out = ring_attention(*own, right, group=group)
    return told, bool(out.isfinite().all())


@pytest.mark.parametrize(
    ("which", "told"),
    [
        ("other k", "ranks must agree on the pattern"),
        ("past the end", "must list numbers below 90"),
        ("other rows", "or each the rows of its own tokens"),
        ("first row", "must have first_row=30"),
        ("not causal", "ranks must agree on the pattern"),
        ("whole", "or each the rows of its own tokens"),
        ("zigzag", "need sharding='contiguous'"),
    ],
)
def test_wrong_rows_raise_on_all_ranks_and_leave_the_group_usable(workers, which, told):
    results = workers.run(changes, which, world=3)
    assert all(text for text, _ in results) and all(fine for _, fine in results)
    assert told in results[1][0]
