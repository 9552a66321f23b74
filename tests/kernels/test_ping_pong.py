"""The forward kernel of two warp groups for Hopper, whose source runs on the CPU.

`gluon_on_cpu` runs it with threads for warp groups and with copies that arrive at random times, so
that wrong synchronization shows. What Triton makes of it is in `test_triton_compile` and
`on_gpu_stub`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import gluon_on_cpu
from helpers.device_runs import ON_GPU
from helpers.gluon_on_cpu import Program, SynchronizationError
from oracles.attention_oracle import dense_attention, errors
from torch import Tensor

import sparsering as sr
from sparsering.kernels.problem import Problem
from sparsering.kernels.triton import call as backend
from sparsering.kernels.triton import configs
from sparsering.kernels.triton import launch as triton_launch
from sparsering.kernels.triton.configs import Config

pytestmark = pytest.mark.skipif(ON_GPU, reason="test_ping_pong_on_gpu.py runs the kernel there")

CONFIG = Config(128, 128, 8, 2, tma=True, masked=32, ping_pong=True)
HALF_TILES = CONFIG._replace(streamed=64, stages=3, masked=64)


@dataclass(frozen=True)
class Call:
    """A call: tokens of the query and the key, and how they are attended."""

    pattern: sr.Pattern
    queries: int
    keys: int
    head_dim: int = 64
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    dtype: torch.dtype = torch.float16
    tokens_first: bool = False  # heads lie side by side in memory
    sink: bool = False

    def tensors(self) -> list[Tensor]:
        """Query, key and value; NaN follows the last token of each head."""
        sizes = ((self.heads, self.queries), *[(self.kv_heads, self.keys)] * 2)
        made = []
        for heads, tokens in sizes:
            x = torch.randn(self.batch, heads, tokens + 130, self.head_dim).to(self.dtype)
            x[:, :, tokens:] = torch.nan
            x = x.transpose(1, 2).contiguous().transpose(1, 2) if self.tokens_first else x
            made.append(x[:, :, :tokens])
        return made

    def problem(self) -> Problem:
        layout = self.pattern.layout(
            self.queries, self.keys, num_heads=self.heads, num_kv_heads=self.kv_heads,
            block_size=128,
        )  # fmt: skip
        sink = torch.randn(1, self.heads, 1).expand(self.batch, -1, self.queries)
        own = {"sink": sink} if self.sink else {}
        return Problem(layout, *self.tensors(), self.head_dim**-0.5, **own)


BLOCKS = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]], dtype=torch.bool)
CALLS = {
    "blocks alone": Call(sr.Blocks(BLOCKS, 128), 384, 384),
    "causal, 128 channels": Call(sr.Causal(), 300, 300, head_dim=128, heads=2),
    "causal, in bfloat16": Call(sr.Causal(), 300, 300, dtype=torch.bfloat16),
    "a window of queries at the end": Call(sr.SlidingWindow(300), 200, 700, heads=4, kv_heads=2),
    "rows without a key": Call(sr.Causal(), 400, 150, batch=2),
    "no tile without a mask": Call(sr.SlidingWindow(60) & sr.Causal(), 200, 200, head_dim=128),
    "a cut tile": Call(sr.Full(), 100, 1500, heads=2),
    "a cut tile under a sink": Call(sr.Full(), 100, 1500, sink=True),
    "a sink": Call(sr.Causal(), 260, 260, sink=True, heads=2),
    "two branches": Call((sr.Causal() & sr.SlidingWindow(40)) + sr.Full(), 260, 260, heads=2),
    "heads side by side": Call(
        sr.Causal(), 300, 300, batch=2, heads=4, kv_heads=2, tokens_first=True
    ),
}


@contextmanager
def simulated(
    monkeypatch: pytest.MonkeyPatch, config: Config, run: Callable[[Any, dict[str, Any]], None]
) -> Iterator[list[str]]:
    """Calls on the CPU launch what Hopper would launch; `run` gets the launches of the kernel.

    Yields the names of all kernels that were launched.
    """
    launched, usual = [], triton_launch.Launch.run

    def launch(self: Any, of_call: Any) -> None:
        launched.append(self.kernel.fn.__name__)
        if launched[-1] != "ping_pong_kernel":
            usual(self, of_call)
            return
        run(self, dict(zip(self.kernel.arg_names, self.arguments(of_call), strict=True)))

    triton_launch._launches.clear()
    with monkeypatch.context() as patch:
        patch.setattr(configs, "generation", lambda device: 90)
        patch.setattr(backend, "config_for", lambda *rest: config)
        patch.setattr(triton_launch.Launch, "run", launch)
        yield launched
    triton_launch._launches.clear()


def attend(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, config: Config = CONFIG, seed: int = 0
) -> tuple[list[Tensor], list[str]]:
    """Returns out and lse of the simulated kernel, and the names of all launched kernels."""

    def run(launch: Any, arguments: dict[str, Any]) -> None:
        programs = launch.grid[0]
        gluon_on_cpu.run("ping_pong_kernel", "ping_pong.py", programs, arguments, seed)

    with simulated(monkeypatch, config, run) as launched:
        return list(backend.forward(problem)), launched


def expected(pattern: sr.Pattern, problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Dense attention in a dtype: of each branch, merged."""
    counts = pattern.to_dense(problem.query.shape[2], problem.key.shape[2])
    tensors = (x.to(dtype) for x in problem[1:4])
    return dense_attention(*tensors, counts, scale=problem.scale, sink=problem.sink)


def assert_errs_at_most_twice_as_much(
    found: list[Tensor], exact: tuple[Tensor, Tensor], half: tuple[Tensor, Tensor]
) -> None:
    for name, a, b, c in zip(("out", "lse"), found, exact, half, strict=True):
        assert not a.isnan().any(), name
        mean, most = errors(a, b)
        dense_mean, dense_most = errors(c, b)
        assert mean <= 2 * dense_mean + 1e-5, (name, mean, dense_mean)
        assert most <= 2 * dense_most + 1e-4, (name, most, dense_most)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, "of tiles") for name in CALLS),
        *(
            pytest.param(name, "of half tiles", marks=[pytest.mark.slow] * ("branches" not in name))
            for name in CALLS
        ),
    ],
)
def test_results_are_those_of_dense_attention(name, steps, monkeypatch):
    call, config = CALLS[name], CONFIG if steps == "of tiles" else HALF_TILES
    problem = call.problem()
    exact = expected(call.pattern, problem, torch.float64)
    half = expected(call.pattern, problem, call.dtype)
    found, launched = attend(monkeypatch, problem, config)
    assert "ping_pong_kernel" in launched and "forward_kernel" not in launched
    assert ("merge_kernel" in launched) == ("cut" in name)
    assert_errs_at_most_twice_as_much(found, exact, half)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("name", ["causal, 128 channels", "a cut tile", "two branches", "a sink"])
def test_the_order_of_events_changes_no_bit(name, seed, monkeypatch):
    problem = CALLS[name].problem()
    for config in (CONFIG, HALF_TILES, HALF_TILES._replace(stages=4)):
        first, _ = attend(monkeypatch, problem, config)
        other, _ = attend(monkeypatch, problem, config, seed)
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_keys_that_a_call_lacks_are_not_read(monkeypatch):
    """Decoded tokens share the tables of longer calls."""
    problem = Call(sr.Causal(), 300, 300).problem()
    (p,) = problem.layout.passes
    few = [x[:, :, :290] for x in (problem.key, problem.value)]
    for x in few:  # what follows in memory
        x.as_strided((10, 64), (64, 1), 290 * 64).fill_(torch.nan)
    layout = replace(problem.layout, passes=(p.cut(p.query_stop, p.key_stop.clamp(max=290), p),))
    short = problem._replace(layout=layout, key=few[0], value=few[1])
    found, launched = attend(monkeypatch, short)
    assert launched == ["ping_pong_kernel"]
    pairs = torch.ones(300, 300, dtype=torch.bool).tril()[None, :, :290]
    tensors = [x.double() for x in short[1:4]]
    exact = dense_attention(*tensors, pairs, scale=short.scale)
    half = dense_attention(*short[1:4], pairs, scale=short.scale)
    assert_errs_at_most_twice_as_much(found, exact, half)


# A program with four steps without a mask, and four with one.
ONE_TILE = Call(sr.Causal(), 128, 128 * 5, head_dim=64)


@pytest.fixture
def one_program(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Tensor], Program]]:
    """Runs the program of one tile of queries, with a planted defect if one is given."""
    caught: list[dict[str, Any]] = []
    with simulated(monkeypatch, CONFIG, lambda launch, arguments: caught.append(arguments)):
        backend.forward(ONE_TILE.problem())
    (arguments,) = caught

    def run(seed: int, *planted: tuple[str, str]) -> tuple[list[Tensor], Program]:
        found = [torch.full_like(arguments[name], torch.nan) for name in ("out", "lse")]
        given = arguments | dict(zip(("out", "lse"), found, strict=True))
        (program,) = gluon_on_cpu.run("ping_pong_kernel", "ping_pong.py", 1, given, seed, planted)
        return found, program

    return run


def in_turn(issued: list[int]) -> bool:
    """Whether group 0 issued at most two products more than group 1, and never fewer, in the loop.

    The first product of each group comes before the loop. Of four steps, three are in it.
    """
    so_far = [0, 0]
    for group in issued:
        so_far[group] += 1
        ahead, behind = (min(max(n - 1, 0), 2 * 3) for n in so_far)
        if not behind <= ahead <= behind + 2:
            return False
    return True


def test_warp_groups_take_turns(one_program):
    wait = "            mbarrier.wait(turn.index(GROUP), ((i - 1) & 1) ^ (1 - GROUP))\n"
    for seed in range(6):
        found, program = one_program(seed)
        assert not any(x.isnan().any() for x in found)
        assert [program.issued.count(group) for group in (0, 1)] == [2 * 4 + 2 * 4] * 2
        assert in_turn(program.issued)
    assert not all(in_turn(one_program(seed, (wait, ""))[1].issued) for seed in range(6))


WAIT_FOR_KEYS = (
    "            mbarrier.wait(k_ready.index(following), "
    "(i + 1) // STAGES & 1, pred=i + 1 < steps)\n"
)
DEFECTS = {
    "the first keys are not awaited": ("        mbarrier.wait(k_ready.index(0), 0)\n", ""),
    "the next keys are not awaited": (WAIT_FOR_KEYS, ""),
    "the next keys are awaited in a wrong phase": (
        WAIT_FOR_KEYS,
        WAIT_FOR_KEYS.replace("// STAGES & 1", "// STAGES & 1 ^ 1"),
    ),
    "values are not awaited": (
        "            mbarrier.wait(v_ready.index(before), (i - 1) // STAGES & 1)\n",
        "",
    ),
    "the last values are not awaited": (
        "        mbarrier.wait(v_ready.index(stage), (steps - 1) // STAGES & 1)\n",
        "",
    ),
    "queries are not awaited": ("    mbarrier.wait(q_ready, 0)\n", ""),
    "keys are overwritten early": ("        mbarrier.wait(k_free.index(stage), earlier)\n", ""),
    "values are overwritten early": ("        mbarrier.wait(v_free.index(stage), earlier)\n", ""),
    "the producer waits for a wrong phase": (
        "earlier = (i // STAGES & 1) ^ 1",
        "earlier = i // STAGES & 1",
    ),
    "one warp group frees keys for both": (
        "mbarrier.init(k_free.index(stage), count=2)",
        "mbarrier.init(k_free.index(stage), count=1)",
    ),
    "values are never freed": ("            _release(v_free.index(before))\n", ""),
    "values are freed before they are read": (
        "            acc, weight, next_weight = "
        "warpgroup_mma_wait(0, deps=(sums, weight, next_weight))\n"
        "            _release(v_free.index(before))\n",
        "            _release(v_free.index(before))\n"
        "            acc, weight, next_weight = "
        "warpgroup_mma_wait(0, deps=(sums, weight, next_weight))\n",
    ),
    "one warp speaks for others that still read": (
        "    gl.thread_barrier()\n    mbarrier.arrive(free, count=1)",
        "    mbarrier.arrive(free, count=1)",
    ),
    "the sums are used before they are complete": (
        "warpgroup_mma_wait(0, deps=(sums, weight, next_weight))",
        "warpgroup_mma_wait(1, deps=(sums, weight, next_weight))",
    ),
    "a turn is not handed over": (
        "            mbarrier.arrive(turn.index(1 - GROUP), count=1)\n",
        "",
    ),
    "turns are handed to oneself": ("arrive(turn.index(1 - GROUP)", "arrive(turn.index(GROUP)"),
    "both wait for the first turn": ("((i - 1) & 1) ^ (1 - GROUP)", "(i - 1) & 1"),
    "fewer bytes are expected": (
        "mbarrier.expect(v_ready.index(stage), value_tiles.block_type.nbytes)",
        "mbarrier.expect(v_ready.index(stage), value_tiles.block_type.nbytes // 2)",
    ),
    "copies by pointers are not awaited": ("async_copy.wait_group(1)", "async_copy.wait_group(2)"),
    "copies by pointers have no fence": (
        "        fence_async_shared()\n        gl.",
        "        gl.",
    ),
    "copies by pointers have no barrier": (
        "        fence_async_shared()\n        gl.thread_barrier()\n",
        "        fence_async_shared()\n",
    ),
    "copies by pointers overwrite what is read": (
        "        gl.thread_barrier()  # all warps have read this stage",
        "        # all warps have read this stage",
    ),
    "both warp groups copy to one place": ("own = GROUP * _OWN", "own = 0"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_simulation_sees_planted_defects(defect, one_program):
    expected, _ = one_program(0)
    assert not any(x.isnan().any() for x in expected)
    for seed in range(24):
        try:
            found, _ = one_program(seed, DEFECTS[defect])
        except SynchronizationError:
            return
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            return
    pytest.fail("the results are right, and no order of events was wrong")
