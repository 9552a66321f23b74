"""The warp-specialized forward for Hopper, its source run on CPU tensors by `gluon_emulator`.

`test_triton_compile` looks at what it compiles to. That it is fast, and right on a device, wants
one: `sparsering tune` compares it with the default there, and uses it only if it agrees.
"""

from typing import Any

import gluon_emulator
import pytest
import torch
from attention_oracle import PATTERNS, Case, dense_counts, eager_attention, errors, inputs
from gluon_emulator import DeadlockError
from torch import Tensor

import sparsering as sr
from sparsering.kernels.problem import Problem
from sparsering.kernels.triton import call as backend
from sparsering.kernels.triton import launch as triton_launch
from sparsering.kernels.triton import tuning
from sparsering.kernels.triton.tuning import Config


class Launches:
    """Kernels that were launched; those in Gluon go to the emulator."""

    def __init__(self):
        self.names: list[str] = []
        self.stages: int | None = None
        self.seed = 0

    def __call__(self, kernel, programs: int, config: Config | None, arguments: dict) -> None:
        self.names.append(kernel.__name__)
        if not getattr(kernel, "is_gluon", bool)():
            triton_launch.launch(kernel, programs, config, arguments)
        else:
            more = {} if self.stages is None else {"STAGES": self.stages}
            gluon_emulator.run(kernel, programs, {**arguments, **more}, self.seed)


@pytest.fixture
def launches(monkeypatch) -> Launches:
    caught = Launches()
    monkeypatch.setattr(backend, "launch", caught)
    monkeypatch.setattr(tuning, "generation", lambda device: 90)
    return caught


def attend(
    pattern: sr.Pattern, case: Case, args: tuple[Tensor, ...], **choices: Any
) -> tuple[Tensor, Tensor]:
    """Results of the kernel, with these fields of its config."""
    head_dim, tile = case.head_dim, case.block_size
    layout = pattern.layout(
        case.q_len, case.kv_len, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads,
        q_start=case.q_start, block_size=tile,
    )  # fmt: skip
    config = tuning.default("forward", args[0], head_dim, tile)
    config = config._replace(warp_specialize=True, **choices)
    key = tuning.config_key("forward", args[0].dtype, head_dim, tile)
    with tuning.trial({key: config}, args[0].device):
        return backend.forward(Problem(layout, *args, head_dim**-0.5))


def assert_as_good_as_eager(got: tuple[Tensor, Tensor], pattern, case, args) -> None:
    """Out and lse err at most twice as much as dense attention in the same type."""
    counts = dense_counts(pattern, case)
    exact = eager_attention(*(x.double() for x in args), counts)
    eager = eager_attention(*args, counts)
    for ours, theirs, true in zip(got, eager, exact, strict=True):
        mine, bound = errors(ours, true), errors(theirs, true)
        assert mine[0] <= 2 * bound[0] + 1e-6 and mine[1] <= 4 * bound[1] + 1e-6


WIDE = Case(1, 2, 2, 300, 300, 128, 128, 128)
NARROW = Case(1, 2, 2, 200, 200, 64, 64, 64)
GROUPED = Case(2, 4, 2, 40, 290, 64, 64, 128, 250)
LONG = Case(1, 1, 1, 120, 850, 128, 128, 128, 730)
SPLIT = Case(1, 1, 1, 530, 530, 64, 64, 256)
CUT = Case(1, 1, 1, 70, 1500, 64, 64, 64, 1430)
CAUSAL = sr.Causal()
SPARSE = sr.RandomBlocks(0.5, 64) & sr.Causal()


@pytest.mark.parametrize(
    ("pattern", "case", "dtype", "choices"),
    [
        (CAUSAL, WIDE, torch.bfloat16, {}),
        (CAUSAL, WIDE, torch.float16, {"in_turn": True, "streamed": 64, "stages": 3}),
        (sr.Full(), LONG, torch.bfloat16, {}),
        (SPARSE, NARROW, torch.bfloat16, {}),
        (sr.Full(), GROUPED, torch.float16, {"in_turn": True}),
        (sr.SlidingWindow(300, 0), SPLIT, torch.float16, {}),
        (sr.Full(), CUT, torch.float16, {}),
    ],
    ids=["causal", "in turn", "long", "sparse", "grouped", "blocks of 256", "cut"],
)
def test_it_errs_as_dense_attention_does(launches, pattern, case, dtype, choices):
    args = inputs(case, dtype, requires_grad=False)
    got = attend(pattern, case, args, **choices)
    assert launches.names[0] == "hopper_kernel"
    assert ("merge_kernel" in launches.names) == (case is CUT)
    assert_as_good_as_eager(got, pattern, case, args)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_errs_as_dense_attention_does(launches, name):
    for number, case in enumerate((Case(2, 4, 2, 150, 200, 64, 64, 64), WIDE, LONG)):
        pattern = PATTERNS[name](case)
        args = inputs(case, torch.float16, requires_grad=False)
        got = attend(pattern, case, args, in_turn=number > 0)
        assert_as_good_as_eager(got, pattern, case, args)


def test_it_merges_passes(launches):
    args = inputs(WIDE, torch.float16, requires_grad=False)
    pattern = sr.LongNet((128, 256), (1, 1)) & CAUSAL
    got = attend(pattern, WIDE, args)
    assert launches.names.count("hopper_kernel") == 2
    assert_as_good_as_eager(got, pattern, WIDE, args)


def test_what_lies_past_a_tile_is_not_seen(launches):
    """The tokens after a head's last one are those of the next head, which hold NaN."""
    args = inputs(WIDE, torch.bfloat16, requires_grad=False)
    bare = [x.clone() for x in args]
    for x in bare[1:]:
        x[:, 1] = torch.nan
    expected, got = (attend(CAUSAL, WIDE, x) for x in (args, bare))
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a[:, 0], b[:, 0]) and b[:, 1].isnan().all()


@pytest.mark.parametrize("in_turn", [False, True])
def test_results_do_not_depend_on_who_goes_first(launches, in_turn):
    args = inputs(LONG, torch.float16, requires_grad=False)
    expected = attend(sr.Full(), LONG, args)
    for launches.seed in range(1, 6):
        got = attend(sr.Full(), LONG, args, in_turn=in_turn)
        assert all(map(torch.equal, got, expected))


def test_one_buffer_would_not_do(launches):
    """Values of a step are let go after the keys of the next have come."""
    launches.stages = 1
    with pytest.raises(DeadlockError):
        attend(CAUSAL, WIDE, inputs(WIDE, torch.float16, requires_grad=False))


def test_everything_else_falls_back(launches):
    case = Case(1, 1, 1, 40, 40, 64, 64, 64)
    args = inputs(case, torch.float16, requires_grad=False)
    for pattern, choices in (
        (sr.Dilated(40, 2), {}),  # steps of two tokens are no rows of a descriptor
        (CAUSAL, {"tma": False}),
        (CAUSAL, {"streamed": 32}),
    ):
        attend(pattern, case, args, **choices)
    assert set(launches.names) == {"forward_kernel"}


def test_it_is_a_candidate_and_never_the_default(launches):
    like = torch.zeros(1, dtype=torch.bfloat16)
    for head_dim in (64, 128):
        assert not tuning.default("forward", like, head_dim, 128).warp_specialize
        for tile, in_turn in ((128, [False, True]), (64, [False])):
            found = tuning.candidates("forward", like, head_dim, tile)
            assert [c.in_turn for c in found if c.warp_specialize] == in_turn
    for kernel in ("query", "key"):
        assert not any(c.warp_specialize for c in tuning.candidates(kernel, like, 128, 128))
