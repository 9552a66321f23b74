"""The kernel that lists the keys of a selection, against the lists that torch's operators make."""

import pytest
import torch
from helpers.device_runs import placed

import sparsering as sr
from sparsering.ground.rows import distinct_in_rows
from sparsering.kernels.triton.key_lists import list_keys
from sparsering.kernels.triton.lists import ready_lists
from sparsering.layouts.lists import Lists, lists_of, split
from sparsering.patterns.algebra import Frame

LIMITS = {
    "none": lambda chosen: chosen,
    "causal": lambda chosen: chosen & sr.Causal(),
    "a window": lambda chosen: chosen & sr.SlidingWindow(9, 4),
    "no past": lambda chosen: chosen & sr.SlidingWindow(None, 2) & sr.SlidingWindow(0, None),
    "beside a window": lambda chosen: (chosen | sr.SlidingWindow(3, 0)) & sr.Causal(),
    "without a window": lambda chosen: chosen - sr.SlidingWindow(2, 2),
}


def both(pattern: sr.Pattern, frame: Frame, valid: torch.Tensor | None) -> list[Lists]:
    """Lists by the kernel, and by torch's operators in the same order."""
    made = []

    def by_kernel(*arguments):
        made.append(list_keys(*arguments))
        return made[-1]

    tiles, sources = split(pattern)
    lists_of(tiles, sources, frame, valid=valid, list_keys=by_kernel)
    _, (plain,) = lists_of(tiles, sources, frame, valid=valid)
    assert len(made) == 1 and made[0] is not None and plain.counts is None
    return [made[0], ready_lists(plain, frame.kv_len, plain.keys.device)]


def assert_equal(ours: Lists, expected: Lists) -> None:
    assert ours.keys.dtype == expected.keys.dtype == torch.int32
    assert torch.equal(*torch.broadcast_tensors(ours.keys, expected.keys))
    assert torch.equal(*torch.broadcast_tensors(ours.counts, expected.counts))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("hidden", [False, True])
def test_keys_ascend_without_repeats(limit, hidden):
    generator = torch.Generator().manual_seed(len(limit))
    indices = torch.randint(-1, 45, (2, 1, 12, 7), generator=generator)  # 40 keys
    indices[..., 2] = indices[..., 5]
    valid = torch.rand(2, 40, generator=generator) > 0.3 if hidden else None
    frame = Frame.build(9, 40, 4, 2, 3)
    chosen = LIMITS[limit](sr.SelectedBlocks(placed(indices), 1))
    ours, expected = both(chosen, frame, None if valid is None else placed(valid))
    assert_equal(ours, expected)
    assert ours.counts.max() > ours.counts.min() and (ours.counts < 7).any()


@pytest.mark.parametrize(("size", "row_size"), [(3, 3), (6, 2), (15, 1)])
@pytest.mark.parametrize("first_row", [0, 2])
def test_blocks_become_their_keys(size, row_size, first_row):
    indices = torch.randint(-1, 9, (1, 3, 7, 4), generator=torch.Generator().manual_seed(size))
    frame = Frame.build(5, 31, 6, 3, first_row * row_size)
    chosen = sr.SelectedBlocks(placed(indices), size, row_size, first_row) & sr.Causal()
    assert_equal(*both(chosen, frame, None))


def test_other_limits_are_left_to_torch():
    indices = placed(torch.zeros(8, 4, dtype=torch.int64))
    chosen, frame = sr.SelectedBlocks(indices, 1), Frame.build(8, 8, 1, 1, None)
    for pattern in (
        chosen & sr.SlidingWindow(4, 0, 2),
        chosen & sr.Dense(torch.ones(8, 8, dtype=torch.bool)),
        chosen - sr.SlidingWindow(1) - sr.GlobalTokens(2),
        chosen - sr.SlidingWindow(1) - sr.SlidingWindow(0, 3),
        sr.Packed((5, 3), chosen),
        sr.SelectedBlocks(indices.repeat(1, 2000), 1),
    ):
        _, ((source,),) = split(pattern)
        assert list_keys(source, frame, None, 0) is None, pattern


def test_distinct_numbers_of_rows_in_any_order():
    rows = torch.tensor([[5, -1, 3, 5, 9, 3], [-1, -1, 8, 7, -3, 8], [0, 0, 0, 0, 0, 0]])
    numbers, counts, index = distinct_in_rows(rows.int(), 8)
    assert numbers.tolist() == [[3, 5, -1, -1, -1, -1], [7] + [-1] * 5, [0] + [-1] * 5]
    assert counts.tolist() == [2, 1, 1]
    assert index.tolist() == [[2, 0, 0, 0, 0, 0], [3] + [0] * 5, [0] * 6]
