"""A ring that cannot go on: every survivor gets a named error in time, never a hang or an abort."""

import os
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ring_workers import groups, workers_of

import sparsering as sr
from sparsering.distributed import RingError, RingMismatchError, ring_attention, unshard
from sparsering.distributed.exchange import Exchange

WORLD = 3
TIMEOUT = 3.0
SHORT = 1.5
"""Seconds, of calls that can only end when they have passed."""


mortal = workers_of(WORLD, "function")  # workers of this test alone


lasting = workers_of(WORLD)  # workers of tests after which they are as before


def shards(tokens: int = 40, head_dim: int = 8, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, tokens, head_dim, dtype=dtype, requires_grad=True) for _ in range(3)]


def call(rank: int, **options: Any) -> None:
    options = {"timeout": TIMEOUT, "pattern": sr.Causal(), "tensors": shards(), **options}
    pattern, tensors = options.pop("pattern"), options.pop("tensors")
    ring_attention(*tensors, pattern, **options).sum().backward()


def outcome(rank: int, function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """(type name, text, rank, peer, step, seconds) of the error that a call raised."""
    began = time.monotonic()
    try:
        function(rank, *args)
    except Exception as error:
        about = [getattr(error, name, None) for name in ("rank", "peer", "step")]
        seconds = time.monotonic() - began
        kinds = [k.__name__ for k in type(error).__mro__]
        return kinds, str(error), *about, seconds
    return (None, "", None, None, None, time.monotonic() - began)


def with_difference(rank: int, name: str) -> None:
    """Rank 1 calls with something else."""
    odd = rank == 1
    options: dict[str, Any] = {
        "pattern": {"pattern": sr.SlidingWindow(3) if odd else sr.Causal()},
        "shape of the table": {
            "pattern": sr.Blocks(torch.ones((4, 16) if odd else (8, 8), dtype=torch.bool), 16)
        },
        "batch size": {"tensors": [x.expand(1 + odd, -1, -1, -1) for x in shards()]},
        "table": {"pattern": sr.Blocks(torch.ones(8, 8, dtype=torch.bool).tril(-odd), 16)},
        "scale": {"scale": 0.5 if odd else None},
        "sharding": {"sharding": "zigzag" if odd else "contiguous"},
        "head dim": {"tensors": shards(head_dim=16 if odd else 8)},
        "dtype": {"tensors": shards(dtype=torch.float32 if odd else torch.float64)},
        "length": {"tensors": shards(tokens=39 if odd else 40)},
        "compression": {"compression": "int8" if odd else None},
        "gradients": {"tensors": [x.detach() if odd else x for x in shards()]},
        "whole length": {"pattern": sr.Documents((100, 21))},
    }[name]
    call(rank, **options)


DIFFERENCES = (
    "pattern", "table", "shape of the table", "batch size", "scale",
    "sharding", "head dim", "dtype", "length", "compression",
    "gradients",
)  # fmt: skip


def test_what_does_not_fit_together_is_the_same_error_on_all_before_any_payload(lasting):
    for name in DIFFERENCES:
        outcomes = lasting.run(outcome, with_difference, name)
        for kinds, text, rank, peer, step, _ in outcomes:
            assert (
                kinds[0] == "RingMismatchError" and "ValueError" in kinds and "RingError" in kinds
            )
            assert step == "agreement" and peer == 1, (name, text)
            assert text.split(": ", 1)[1] == outcomes[0][1].split(": ", 1)[1]
            assert text.startswith(f"rank {rank}")
        assert [x[2] for x in outcomes] == list(range(WORLD))
    outcomes = lasting.run(outcome, with_difference, "whole length")
    assert all(kinds[0] == "ValueError" and "121" in text for kinds, text, *_ in outcomes)
    outcomes = lasting.run(outcome, with_own_error)
    assert [x[0][0] for x in outcomes] == ["RingMismatchError", "RingMismatchError", "ValueError"]
    assert "rank 2 raised" in outcomes[0][1]
    assert max(x[-1] for x in outcomes) < TIMEOUT
    assert all(x[0] is None for x in lasting.run(outcome, call))  # the group still works


def with_own_error(rank: int) -> None:
    call(rank, tensors=[*shards()[:2], torch.zeros(2)] if rank == 2 else shards())


def with_bad_argument(rank: int, name: str) -> None:
    odd = rank == 2
    options = {
        "sharding": {"sharding": None if odd else "contiguous"},
        "scale": {"scale": "x" if odd else None},
        "timeout": {"timeout": float("inf") if odd else TIMEOUT},
        "compression": {"compression": "int4" if odd else None},
        "pattern": {"pattern": None if odd else sr.Causal()},
    }[name]
    call(rank, **options)


def test_what_one_rank_alone_gets_wrong_is_an_error_on_all_at_once(lasting):
    for name in ("sharding", "scale", "timeout", "compression", "pattern"):
        outcomes = lasting.run(outcome, with_bad_argument, name)
        assert [x[0][0] for x in outcomes[:2]] == ["RingMismatchError"] * 2, name
        assert outcomes[2][0][0] in ("ValueError", "TypeError")
        assert max(x[-1] for x in outcomes) < TIMEOUT


def run_out_of_memory(rank: int, where: str) -> None:
    """Rank 1 raises in the middle of a call, and both it and the others call again."""
    from sparsering.distributed.rank import Rank

    def fail(*args: Any) -> None:
        raise MemoryError("no room")

    saved = getattr(Rank, where)
    if rank == 1:
        setattr(Rank, where, fail)
    try:
        call(rank, timeout=SHORT)
    except (MemoryError, RingError):
        setattr(Rank, where, saved)
    call(rank, timeout=SHORT)


@pytest.mark.parametrize("where", ("forward", "round_gradients"))
def test_a_call_after_one_that_broke_off_is_an_error_and_no_abort(mortal, where):
    outcomes = mortal.run(outcome, run_out_of_memory, where)
    for rank, (kinds, text, *_, seconds) in enumerate(outcomes):
        assert kinds is not None and kinds[0] == "RingError", text
        assert "make a new group" in text and seconds < 2 * SHORT + 2, (rank, text)
    assert "MemoryError" in outcomes[1][1]
    for rank in range(WORLD):  # and a new group works
        mortal.pipes[rank].send((new_ring, ([0, 1, 2],)))
    assert all(torch.isfinite(x).all() for x in mortal.results(mortal.pipes))


def unshard_of_other_widths(rank: int) -> None:
    unshard(torch.zeros(1, 1, 4, 8 * (1 + (rank == 1))))


def test_parts_that_do_not_fit_together_are_refused(lasting):
    for kinds, text, *_ in lasting.run(outcome, unshard_of_other_widths):
        assert kinds[0] == "RingMismatchError" and "sizes of other dims" in text


def stay_away(rank: int, seconds: float) -> None:
    if rank == 1:
        time.sleep(seconds)
    else:
        call(rank, timeout=SHORT)


def new_ring(rank: int, members: list[int]) -> torch.Tensor:
    group = dist.new_group(members)
    return ring_attention(*(x.detach() for x in shards()), sr.Causal(), group=group, timeout=20)


def test_a_silent_peer_is_named_within_the_timeout_and_a_new_group_works(mortal):
    outcomes = mortal.run(outcome, stay_away, SHORT + 1)
    for rank in (0, 2):
        kinds, text, *about, seconds = outcomes[rank]
        assert kinds[0] == "RingError", text
        assert about == [rank, 1, "agreement"] and f"rank {rank}, peer 1" in text
        assert seconds < SHORT + 1
    results = mortal.run(new_ring, [0, 1, 2])
    assert all(torch.isfinite(x).all() for x in results)


def die(rank: int, step: str) -> None:
    """Rank 1 is killed when it comes to a step."""
    start = Exchange.start

    def start_or_die(self: Exchange, name: str, *args: Any) -> Any:
        if rank == 1 and name.startswith(step):
            os.kill(os.getpid(), signal.SIGKILL)
        return start(self, name, *args)

    Exchange.start = start_or_die  # type: ignore[method-assign]
    call(rank)


@pytest.mark.parametrize("step", ("agreement", "keys of round", "gradients of round"))
def test_a_killed_peer_is_an_error_on_every_survivor_and_they_can_go_on(mortal, step):
    for rank in range(WORLD):
        mortal.pipes[rank].send((outcome, (die, step)))
    mortal.processes[1].join(20)
    assert mortal.processes[1].exitcode == -signal.SIGKILL
    survivors = [mortal.pipes[0], mortal.pipes[2]]
    for (kinds, text, rank, peer, at, seconds), expected in zip(
        mortal.results(survivors), (0, 2), strict=True
    ):
        assert kinds is not None, "the call came back as if nothing had happened"
        assert kinds[0] == "RingError", text
        assert rank == expected and peer == 1 and at
        assert seconds < TIMEOUT + 2
    for pipe in survivors:
        pipe.send((new_ring, ([0, 2],)))
    results = mortal.results(survivors)
    assert all(torch.isfinite(x).all() for x in results)


def test_errors_say_who_and_when():
    error = pickle.loads(pickle.dumps(RingError("the peer does not answer", 3, 1, "agreement")))
    assert str(error) == "rank 3, peer 1, step 'agreement': the peer does not answer"
    assert isinstance(error, RuntimeError)
    assert issubclass(RingMismatchError, ValueError) and issubclass(RingMismatchError, RingError)
    assert groups == {}  # of workers alone


def test_processes_without_a_group_are_told_to_make_one(monkeypatch):
    args = torch.randn(3, 1, 1, 8, 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert torch.equal(ring_attention(*args, sr.Causal()), sr.attention(*args, sr.Causal()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started.*init_process_group"):
        ring_attention(*args, sr.Causal())
