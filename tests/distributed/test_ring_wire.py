"""Formats on the wire: what they cost, what they lose, and that nothing else changes."""

import pytest
import torch
from helpers.ring_workers import groups, workers_of
from torch import Tensor

import sparsering as sr
from sparsering.distributed import RingPlan, Traffic, ring_attention, shard
from sparsering.distributed.wire import FORMATS, wire_format

TOKENS, HEADS, WIDTH, VALUE_WIDTH, WORLD = 64, 2, 16, 24, 2
ERRORS = {"bf16": (5e-4, 3e-3), "fp8": (1e-2, 4e-2), "int8": (3e-3, 1e-2)}  # of normal numbers


def whole() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, TOKENS, w, generator=generator) for w in (16, 16, 24)]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_survive_up_to_rounding(name):
    rows = torch.randn(50, WIDTH + VALUE_WIDTH) * torch.logspace(-6, 6, 50)[:, None]
    rows[7], rows[8] = 0, 1e-40
    form = wire_format(name, torch.float32)
    sent = form.encode(rows, WIDTH)
    assert sent.nbytes == 50 * form.row_bytes(WIDTH, VALUE_WIDTH)
    came = form.decode(sent, WIDTH, VALUE_WIDTH)
    assert came.dtype == rows.dtype and torch.equal(came[7], rows[7])
    for part in (slice(WIDTH), slice(WIDTH, None)):  # each with a scale of its own
        largest = rows[:, part].abs().amax(1, keepdim=True)
        error = ((came - rows)[:, part].abs() / largest.clamp(min=1e-30)).max()
        assert came.isfinite().all()
        assert error <= {"bf16": 2**-8, "fp8": 2**-4, "int8": 0.51 / 127}[name]


@pytest.mark.parametrize("name", FORMATS)
def test_a_number_that_is_not_finite_spoils_its_own_row_alone(name):
    rows = torch.randn(4, WIDTH + VALUE_WIDTH)
    rows[1, 3], rows[2, WIDTH + 1] = torch.inf, torch.nan
    form = wire_format(name, torch.float32)
    came = form.decode(form.encode(rows, WIDTH), WIDTH, VALUE_WIDTH)
    assert came[[0, 3]].isfinite().all()
    assert not came[1, :WIDTH].isfinite().all() and came[1, WIDTH:].isfinite().all()
    assert not came[2, WIDTH:].isfinite().all() and came[2, :WIDTH].isfinite().all()


def run(rank: int, compression: str | None, scale: float) -> tuple[list[Tensor], Traffic, Traffic]:
    own = [shard(x * scale, group=groups[WORLD]).requires_grad_() for x in whole()]
    out = ring_attention(*own, sr.Full(), group=groups[WORLD], compression=compression)
    traffic = ring_attention.last_traffic()
    out.sum().backward()
    results = [out.detach(), *(x.grad for x in own)]
    return results, traffic, ring_attention.last_traffic(backward=True)


two = workers_of(WORLD)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_planned_and_the_error_is_reported(two, name):
    plan = RingPlan.build(sr.Full(), TOKENS, WORLD, num_heads=HEADS)
    exact = two.run(run, None, 1.0)
    for rank, (results, *traffics) in enumerate(two.run(run, name, 1.0)):
        for traffic, backward in zip(traffics, (False, True), strict=True):
            assert traffic.compression == name
            low, high = ERRORS[name]
            assert traffic.error == 0 if backward else low < traffic.error < high
            planned = plan.bytes_received(
                rank,
                head_dim=(WIDTH, VALUE_WIDTH),
                dtype=torch.float32,
                compression=name,
                backward=backward,
            )
            assert traffic.received_bytes == planned
        assert traffics[0].received_bytes < 0.55 * exact[rank][1].received_bytes
        for got, wanted in zip(results, exact[rank][0], strict=True):
            error = (got - wanted).norm() / wanted.norm()
            assert 0 < error < 3 * high


@pytest.mark.parametrize(
    ("budget", "expected"),
    (("auto", "int8"), ("auto:0.05", "int8"), ("auto:0.003", "bf16"), ("auto:1e-9", None)),
)
def test_auto_takes_the_smallest_format_within_the_budget(two, budget, expected):
    for _, traffic, backward in two.run(run, budget, 1.0):
        assert traffic.compression == backward.compression == expected
        assert traffic.error <= 0.01 and (traffic.error > 0) == (expected is not None)


def run_with_nan(rank: int) -> str | None:
    own = [shard(x, group=groups[WORLD]) for x in whole()]
    own[1][0, 0, 3, 1] = torch.nan
    ring_attention(*own, sr.Full(), group=groups[WORLD], compression="auto")
    return ring_attention.last_traffic().compression


def test_auto_sends_as_they_are_what_it_cannot_judge(two):
    assert two.run(run_with_nan) == [None] * WORLD


def run_with_ones(rank: int, of_ones: int) -> str | None:
    own = [shard(x, group=groups[WORLD]) for x in whole()]
    if rank == of_ones:  # numbers that every format sends without an error
        own = [torch.ones_like(x) for x in own]
    ring_attention(*own, sr.Full(), group=groups[WORLD], compression="auto:0.003")
    return ring_attention.last_traffic().compression


@pytest.mark.parametrize("of_ones", range(WORLD))
def test_auto_judges_by_the_rank_with_the_largest_error(two, of_ones):
    assert two.run(run_with_ones, of_ones) == ["bf16"] * WORLD


@pytest.mark.parametrize("name", ("int4", "auto:", "auto:-1", "auto:x", "automatic", 8))
def test_no_such_format(name):
    with pytest.raises(ValueError, match="compression must be"):
        ring_attention(*whole(), sr.Full(), compression=name)


def test_a_half_precision_row_is_never_sent_in_more_bytes_than_its_own():
    for name in ("bf16", None):
        assert wire_format(name, torch.float16).row_bytes(64, 64) == 256
