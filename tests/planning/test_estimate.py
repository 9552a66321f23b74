"""Compares estimated costs: memory with allocated tensors, ranks with their plan."""

import pytest
import torch

import sparsering as sr
from sparsering.distributed import RingPlan
from sparsering.planning import seconds as predicted

LONGNET = sr.LongNet((64, 256), (1, 4)) & sr.Causal()


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", [sr.Causal(), LONGNET], ids=str)
def test_inputs_results_and_what_is_saved_are_the_tensors_of_a_call(pattern, dtype):
    q, k, v = (
        torch.randn(2, heads, 300, 32, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    shape = {"tokens": 300, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "batch_size": 2}
    told = sr.estimate(pattern, dtype=dtype, backend="gather", **shape).memory
    out, lse = sr.attention(q, k, v, pattern, return_lse=True, backend="gather")
    assert told.inputs == nbytes(q, k, v)
    assert (told.results, told.saved) == (nbytes(out), nbytes(lse))
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    told = sr.estimate(pattern, dtype=dtype, backward=True, backend="gather", **shape).memory
    assert told.inputs == nbytes(q, k, v, grad)
    assert (told.results, told.saved) == (nbytes(out, *grads), nbytes(lse))
    assert told.peak == sum(told)


def test_layout_bytes_are_those_of_its_tables():
    told = sr.estimate(LONGNET, tokens=4096, num_heads=4, backend="gather")
    layout = LONGNET.layout(4096, num_heads=4, block_size=told.block_size)
    assert layout.nbytes <= told.memory.layout <= 10 * layout.nbytes
    assert told.pairs == layout.num_pairs * 4


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_ranks_are_told_what_their_plan_says(sharding):
    shape = {"num_heads": 4, "num_kv_heads": 2}
    told = sr.estimate(
        sr.Causal(), tokens=512, ranks=4, sharding=sharding, backend="gather",
        batch_size=3, head_dim=16, dtype=torch.bfloat16, backward=True, **shape,
    )  # fmt: skip
    plan = RingPlan.build(sr.Causal(), 512, 4, sharding=sharding, **shape)
    for rank in range(4):
        both = sum(
            plan.bytes_received(rank, head_dim=16, dtype=torch.bfloat16, backward=way)
            for way in (False, True)
        )
        assert told.received_bytes[rank] == 3 * both
    loads = [plan.load(rank) for rank in range(4)]
    assert told.balance.value == pytest.approx(max(loads) * 4 / sum(loads))
    assert told.sharding == sharding and told.link_seconds is None


def test_a_named_machine_bounds_seconds_by_its_peaks():
    told = sr.estimate(sr.Causal(), tokens=1 << 16, machine="H100", dtype=torch.bfloat16, ranks=2)
    assert told.machine is not None and told.backend == "triton"
    assert told.seconds.known.startswith("published") and "at least" in str(told)
    peak = told.machine.peak("bfloat16")
    assert told.seconds.value == pytest.approx(told.flops.value / peak / 2 * told.balance.value)
    assert told.link_seconds is not None and told.link_seconds.known == "published"
    assert told.link_seconds.value == pytest.approx(
        max(told.received_bytes) / told.machine.link_bandwidth
    )


def test_more_tokens_heads_and_entries_cost_more(monkeypatch):
    def rates(backend, dtype, head_dim, backward, threads):
        return predicted._Rates(call=1e-5, pair=3e-11 if backward else 1e-11, row=1e-9)

    monkeypatch.setattr(predicted, "_rates", rates)

    def peak_and_seconds(**changes):
        shape = {"tokens": 1024, "num_heads": 4, "num_kv_heads": 2, "backend": "gather"}
        told = sr.estimate(sr.Causal(), **(shape | changes))
        return told.peak_bytes.value, told.seconds.value

    peak, seconds = peak_and_seconds()
    for change in (
        {"tokens": 2048}, {"num_heads": 8}, {"batch_size": 2}, {"head_dim": 128}, {"backward": True}
    ):  # fmt: skip
        more = peak_and_seconds(**change)
        assert more[0] > peak and more[1] > seconds, change


def test_a_million_tokens_over_ranks_are_told():
    pattern = sr.LongNet((2048, 32768), (1, 12)) & sr.Causal()
    told = sr.estimate(pattern, tokens=1 << 20, num_heads=2, ranks=8, backend="gather")
    assert told.balance.value == pytest.approx(1, abs=0.01)
    assert len(told.received_bytes) == 8
    assert str(told).count("\n") >= 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tokens": 0}, "tokens"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 4, "num_kv_heads": 3}, "multiple"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"dtype": torch.float64}, "dtype"),
        ({"ranks": 0}, "ranks"),
        ({"machine": "abacus"}, "abacus"),
        ({"machine": 5}, "machine must be one of .*got 5"),
        ({"sharding": "spiral"}, "sharding must be one of .*'spiral'"),
        ({"backend": "reference"}, "costs are known"),
        ({"backend": "magic"}, "backend"),
        ({"block_size": 100}, "block_size"),
        ({"ranks": 2, "sharding": "spiral"}, "sharding"),
    ],
)
def test_what_cannot_be_told_says_why(arguments, said):
    with pytest.raises(ValueError, match=said):
        sr.estimate(sr.Causal(), **({"tokens": 64} | arguments))


def test_seconds_of_this_machine_come_from_calls_of_their_kind():
    predicted._rates.cache_clear()
    told = sr.estimate(sr.Causal(), tokens=2048, num_heads=4, backend="gather")
    assert told.seconds.known == "measured here" and 0 < told.seconds.value < 30
    assert predicted._rates.cache_info().misses == 1
    sr.estimate(sr.SlidingWindow(64), tokens=4096, num_heads=2, backend="gather")
    assert predicted._rates.cache_info().misses == 1
    sr.estimate(sr.SlidingWindow(64), tokens=4096, num_heads=2, backend="gather", backward=True)
    assert predicted._rates.cache_info().misses == 2


def test_an_estimate_draws_no_random_numbers_and_may_be_asked_for_anywhere():
    predicted._rates.cache_clear()
    state = torch.get_rng_state()
    with torch.inference_mode():
        told = sr.estimate(sr.Causal(), tokens=256, backend="gather", backward=True)
    assert told.seconds.value > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_rates_give_back_the_calls_that_they_come_from(monkeypatch):
    predicted._rates.cache_clear()
    times = iter(x for x in (1e-4, 2e-2, 1e-2) for _ in range(predicted._ROUNDS))
    monkeypatch.setattr(predicted, "timed", lambda call, device: next(times))
    shape = {"num_heads": 4, "head_dim": 64, "backend": "gather"}
    assert sr.estimate(sr.Causal(), tokens=2048, **shape).seconds.value == pytest.approx(2e-2)
    window = sr.estimate(sr.SlidingWindow(64), tokens=8192, **shape)
    assert window.seconds.value == pytest.approx(1e-2)
    predicted._rates.cache_clear()


@pytest.mark.parametrize("backend", [torch.ones(2), 3, "torch_sparse"])
def test_a_backend_whose_costs_are_not_known_is_named(backend):
    for ask in (
        lambda: sr.estimate(sr.Causal(), tokens=64, backend=backend),
        lambda: sr.longest_sequence(sr.Causal(), backend=backend),
    ):
        with pytest.raises(ValueError, match="backend must be one"):
            ask()
