import itertools

import pytest
import torch
from helpers.covering import covering
from hypothesis import given
from hypothesis import strategies as st

ALLOCATIONS = {
    "empty": lambda dtype: torch.empty(2, 3, dtype=dtype),
    "empty, size as a tuple": lambda dtype: torch.empty((2, 3), dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(2, 3, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((2, 3), (3, 1), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1).new_empty(2, 3, dtype=dtype),
    "new_empty_strided": lambda dtype: torch.ones(1).new_empty_strided((2, 3), (3, 1), dtype=dtype),
}


@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS.keys())
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_floating_allocations_hold_nan(allocate, dtype):
    out = allocate(dtype)
    assert out.shape == (2, 3) and out.dtype == dtype
    assert out.isnan().all()


@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS.keys())
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integer_allocations_hold_the_largest_value(allocate, dtype):
    assert (allocate(dtype) == torch.iinfo(dtype).max).all()


def test_poison_keeps_what_the_caller_asked_for():
    leaf = torch.empty(4, requires_grad=True)
    assert leaf.is_leaf and leaf.requires_grad and leaf.isnan().all()
    assert torch.empty(0, 3).shape == (0, 3)
    assert torch.empty(3, device="meta").is_meta
    channels_last = torch.empty(1, 2, 3, 4, memory_format=torch.channels_last)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("sparsering_tests::forgetful", mutates_args=())
def forgetful(x: torch.Tensor) -> torch.Tensor:
    """An operator with the defect that the poison is for: it leaves its last row unwritten."""
    out = torch.empty_like(x)
    out[:-1] = x[:-1]
    return out


@forgetful.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_poison_shows_inside_an_operator():
    out = forgetful(torch.zeros(3, 2))
    assert out[-1].isnan().all() and not out[:-1].isnan().any()


def test_poison_passes_through_fullgraph_compile():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def allocate(x):
        return forgetful(x) + 1, torch.empty_like(x), x.new_empty(2)

    out, like, new = allocate(torch.zeros(3, 2))
    assert out[-1].isnan().all() and like.isnan().all() and new.isnan().all()


def test_algorithms_are_those_that_users_get():
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("time", ["first", "second"])
def test_each_test_starts_from_the_same_seed(time):
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


DRAWN = []


@given(st.integers())
def test_each_example_starts_from_the_same_seed(_):
    DRAWN.append(torch.rand(1).item())
    assert DRAWN[0] == DRAWN[-1]


def test_each_two_values_of_two_axes_meet_in_a_covering():
    for sizes in ((2, 2, 2), (4, 3, 5), (2, 6, 3, 2)):
        rows = covering(sizes, 2)
        for one, other in itertools.combinations(range(len(sizes)), 2):
            met = {(row[one], row[other]) for row in rows}
            assert len(met) == sizes[one] * sizes[other]
        assert len(rows) <= 1.5 * max(a * b for a, b in itertools.combinations(sizes, 2))
    assert len(covering((7, 3), 1)) == 7
    assert len(covering((7, 3), 2)) == len(covering((7, 3), 3)) == 21


COVERED = {(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)} | {(0, 1, 0)}


@pytest.mark.covering(2, keep=[{"a": 0, "b": 1}])
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("c", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_cases_outside_a_covering_are_slow(request, a, b, c):
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow == ((a, b, c) not in COVERED)
