"""Laws of sets and multisets; patterns as values."""

import dataclasses
import operator
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.every_pattern import INDICES, NAMES, expanded, one_of_each
from oracles.kinds import TABLE
from oracles.patterns_oracle import build
from oracles.strategies import Scene, masks, mixtures, scenes
from torch import Tensor

import sparsering as sr


def full_size(pattern: Any, scene: Scene) -> Tensor:
    """Counts at [B, H, Nq, Nk], so that those of two patterns can be compared."""
    dense = pattern.to_dense(**scene.arguments)
    return expanded(dense, scene.batch, scene.num_heads, scene.q_len, scene.kv_len).to(torch.int64)


def joined(data: Any, *strategies: Any) -> tuple[Scene, list[Any]]:
    scene = data.draw(scenes(max_length=40, max_heads=4))
    return scene, [build(data.draw(strategy(scene, 0, True))) for strategy in strategies]


def laws(test: Any) -> Any:
    """Draw the scene and the patterns inside the test: all its patterns share one scene."""
    return settings(max_examples=16, suppress_health_check=list(HealthCheck))(
        given(st.data())(test)
    )


@laws
def test_and_or_are_idempotent_and_plus_is_not(data: Any) -> None:
    scene, (a,) = joined(data, masks)
    once = full_size(a, scene)
    assert torch.equal(full_size(a & a, scene), once)
    assert torch.equal(full_size(a | a, scene), once)
    assert torch.equal(full_size(a + a, scene), 2 * once)


@laws
def test_operators_commute(data: Any) -> None:
    scene, (a, b) = joined(data, masks, masks)
    for op in (operator.and_, operator.or_, operator.add):
        assert torch.equal(full_size(op(a, b), scene), full_size(op(b, a), scene))


@laws
def test_operators_are_those_of_sets_and_multisets(data: Any) -> None:
    scene, (a, b) = joined(data, masks, masks)
    in_a, in_b = full_size(a, scene), full_size(b, scene)
    assert torch.equal(full_size(a & b, scene), in_a * in_b)
    assert torch.equal(full_size(a | b, scene), (in_a + in_b).clamp(max=1))
    assert torch.equal(full_size(a + b, scene), in_a + in_b)


@laws
def test_and_distributes_over_or_and_absorbs(data: Any) -> None:
    scene, (a, b, c) = joined(data, masks, masks, masks)
    assert torch.equal(full_size(a & (b | c), scene), full_size((a & b) | (a & c), scene))
    assert torch.equal(full_size(a | (b & c), scene), full_size((a | b) & (a | c), scene))
    assert torch.equal(full_size(a | (a & b), scene), full_size(a, scene))


@laws
def test_operators_associate(data: Any) -> None:
    scene, (a, b, c) = joined(data, masks, masks, masks)
    for op in (operator.and_, operator.or_, operator.add):
        left, right = op(op(a, b), c), op(a, op(b, c))
        assert torch.equal(full_size(left, scene), full_size(right, scene))


@laws
def test_mask_distributes_over_a_mixture_from_either_side(data: Any) -> None:
    scene, (a, b, m) = joined(data, masks, masks, masks)
    expected = full_size((a & m) + (b & m), scene)
    assert torch.equal(full_size((a + b) & m, scene), expected)
    assert torch.equal(full_size(m & (a + b), scene), expected)


@laws
def test_mixture_sums_and_masks_multiply(data: Any) -> None:
    scene, (x, y, m) = joined(data, mixtures, mixtures, masks)
    total = full_size(x, scene) + full_size(y, scene)
    assert torch.equal(full_size(x + y, scene), total)
    assert torch.equal(full_size(x + m, scene), full_size(x, scene) + full_size(m, scene))
    assert torch.equal(full_size((x + y) & m, scene), total * full_size(m, scene))


@laws
def test_full_is_neutral_for_and_and_absorbing_for_or(data: Any) -> None:
    scene, (a,) = joined(data, masks)
    everything = torch.ones(scene.batch, scene.num_heads, scene.q_len, scene.kv_len).long()
    assert torch.equal(full_size(a & sr.Full(), scene), full_size(a, scene))
    assert torch.equal(full_size(a | sr.Full(), scene), everything)


# Values: equal, hashable, frozen, readable.


@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_patterns_built_alike_are_equal_and_hash_alike(index: int) -> None:
    first, second = one_of_each()[index], one_of_each()[index]
    assert first == second
    assert (first != second) is False
    assert hash(first) == hash(second)
    assert {first: "found"}[second] == "found"


def test_different_patterns_are_unequal() -> None:
    patterns = one_of_each()
    assert len(set(patterns)) == len(patterns)
    for i, a in enumerate(patterns):
        assert [a == b for b in patterns] == [i == j for j in range(len(patterns))]
        assert a != 3
        assert a != "Causal()"


def test_every_argument_is_part_of_the_value() -> None:
    flipped = TABLE.logical_not()
    different = [
        (sr.SlidingWindow(4), sr.SlidingWindow(5)),
        (sr.SlidingWindow(4), sr.SlidingWindow(4, 1)),
        (sr.SlidingWindow(4), sr.SlidingWindow(4, 0, 2)),
        (sr.SlidingWindow(0), sr.SlidingWindow(None)),
        (sr.GlobalTokens(1), sr.GlobalTokens(1, rows=False)),
        (sr.GlobalTokens(1), sr.GlobalTokens(1, columns=False)),
        (sr.Dilated(8, 2), sr.Dilated(8, 2, "block")),
        (sr.Dilated(8, 2), sr.Dilated(8, 2, 0)),
        (sr.Dilated(8, 2), sr.Dilated(8, 4)),
        (sr.LongNet((4, 8), (1, 2)), sr.LongNet((4, 8), (1, 4))),
        (sr.BlockDilated((1,), 16), sr.BlockDilated((1,), 32)),
        (sr.BlockDilated((1,), 16), sr.BlockDilated((2,), 16)),
        (sr.BlockWindow(1, 16), sr.BlockWindow(1, 32)),
        (sr.RandomBlocks(0.5, 16), sr.RandomBlocks(0.5, 16, seed=1)),
        (sr.RandomBlocks(0.5, 16), sr.RandomBlocks(0.5, 16, per_head=False)),
        (sr.RandomBlocks(0.5, 16), sr.RandomBlocks(0.25, 16)),
        (sr.Hierarchical(((16, 64),), 16), sr.Hierarchical(((16, None),), 16)),
        (sr.Documents((3, 4)), sr.Documents((4, 3))),
        (sr.Documents((3, 4)), sr.KeyPadding((3, 4))),
        (sr.Packed((3, 4), sr.Causal()), sr.Packed((3, 4), sr.Full())),
        (sr.Documents((3, 4)), sr.Documents(((3, 4),))),
        (sr.Documents(((3, 4), (7, 0))), sr.Documents(((3, 4), (3, 4)))),
        (sr.Packed(((3, 4),), sr.Causal()), sr.Packed((3, 4), sr.Causal())),
        (sr.KeyPadding((3,)), sr.KeyPadding((3, 3))),
        (sr.KeyMask(TABLE), sr.KeyMask(flipped)),
        (sr.KeyMask(TABLE[0]), sr.KeyMask(TABLE[:1])),
        (sr.Blocks(TABLE, 16), sr.Blocks(flipped, 16)),
        (sr.Blocks(TABLE, 16), sr.Blocks(TABLE, 32)),
        (sr.Dense(TABLE), sr.Dense(flipped)),
        (sr.Blocks(torch.ones(2, 8, dtype=bool), 16), sr.Blocks(torch.ones(4, 4, dtype=bool), 16)),
        (sr.Causal() & sr.Full(), sr.Causal() | sr.Full()),
        (sr.Causal() + sr.Full(), sr.Causal() + sr.Causal()),
    ]
    for a, b in different:
        assert a != b, f"{a!r} == {b!r}"


def test_longnet_is_the_sum_of_its_branches_by_value() -> None:
    for offset in ("head", "block", 1, (0, 1)):
        d1, d2, d3 = (sr.Dilated(w, r, offset) for w, r in ((4, 1), (8, 2), (16, 4)))
        for longnet, total in (
            (sr.LongNet((4, 8), (1, 2), offset), d1 + d2),
            (sr.LongNet((4, 8, 16), (1, 2, 4), offset), d1 + d2 + d3),
        ):
            assert longnet == total
            assert total == longnet
            assert hash(longnet) == hash(total)


def test_longnet_of_one_branch_has_that_branch_s_counts() -> None:
    one = sr.LongNet((4,), (2,)).to_dense(6, num_heads=2)
    assert torch.equal(one.int(), sr.Dilated(4, 2).to_dense(6, num_heads=2).int())


def test_lists_and_tuples_give_the_same_pattern() -> None:
    assert sr.LongNet([4, 8], [1, 2]) == sr.LongNet((4, 8), (1, 2))
    assert sr.Dilated(8, 2, [0, 1]) == sr.Dilated(8, 2, (0, 1))
    assert sr.BlockDilated([1, 2], 16) == sr.BlockDilated((1, 2), 16)
    assert sr.Hierarchical([[16, 32], [64, None]], 16) == sr.Hierarchical(
        ((16, 32), (64, None)), 16
    )
    for constructor in (sr.Documents, sr.KeyPadding):
        assert constructor([3, 4]) == constructor((3, 4))
        assert hash(constructor([3, 4])) == hash(constructor((3, 4)))
    assert sr.Packed([3, 4], sr.Causal()) == sr.Packed((3, 4), sr.Causal())
    each, rows = torch.tensor([[3, 4], [7, 0]]), [torch.tensor([3, 4]), torch.tensor([7, 0])]
    for lengths in ([[3, 4], [7, 0]], each, each.numpy(), rows, ((3, 4), [7, 0])):
        assert sr.Documents(lengths) == sr.Documents(((3, 4), (7, 0)))
        assert sr.Packed(lengths, sr.Causal()) == sr.Packed(((3, 4), (7, 0)), sr.Causal())


def test_a_list_changed_afterwards_does_not_change_the_pattern() -> None:
    lengths = [3, 4]
    documents, padding = sr.Documents(lengths), sr.KeyPadding(lengths)
    lengths[0] = 1
    assert documents == sr.Documents((3, 4))
    assert padding == sr.KeyPadding((3, 4))


@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_assignment_to_a_pattern_raises(index: int) -> None:
    pattern = one_of_each()[index]
    names = [field.name for field in dataclasses.fields(pattern)]
    for name in [*names, "something_new"]:
        with pytest.raises((AttributeError, TypeError)):
            setattr(pattern, name, 1)
    assert pattern == one_of_each()[index]


def test_a_key_mask_is_copied() -> None:
    valid = torch.tensor([True, False, True])
    pattern, as_built = sr.KeyMask(valid), sr.KeyMask(valid.clone())
    before = hash(pattern)
    valid.logical_not_()
    assert pattern.to_dense(1, 3).tolist() == [[[True, False, True]]]
    assert pattern == as_built and hash(pattern) == before and pattern != sr.KeyMask(valid)


@pytest.mark.parametrize("constructor", [lambda t: sr.Blocks(t, 1), sr.Dense])
def test_tables_are_copied(constructor: Any) -> None:
    table = torch.tensor([[True, False], [False, True]])
    pattern, as_built = constructor(table), constructor(table.clone())
    before = hash(pattern)
    table.logical_not_()
    assert pattern.to_dense(2)[0].tolist() == [[True, False], [False, True]]
    assert pattern == as_built
    assert hash(pattern) == before
    assert pattern != constructor(table)


def test_a_dense_matrix_changed_by_its_receiver_does_not_change_the_pattern() -> None:
    for pattern in (sr.Dense(TABLE), sr.Blocks(TABLE, 1), sr.Causal()):
        before = pattern.to_dense(2).clone()
        pattern.to_dense(2).logical_not_()
        assert torch.equal(pattern.to_dense(2), before)


def test_tables_of_any_strides_compare_by_value() -> None:
    table = torch.tensor([[True, True, True], [False, False, True], [False, True, False]])
    transposed = table.t().contiguous().t()
    every_other = torch.zeros(6, 6, dtype=torch.bool)
    every_other[::2, ::2] = table
    for constructor in (sr.Dense, lambda t: sr.Blocks(t, 16)):
        for same in (transposed, every_other[::2, ::2]):
            assert constructor(same) == constructor(table)
            assert hash(constructor(same)) == hash(constructor(table))
        assert constructor(table.t()) != constructor(table)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (sr.Causal(), ["Causal"]),
        (sr.SlidingWindow(17, 3, 2), ["SlidingWindow", "17", "3", "2"]),
        (sr.Dilated(8, 2, "block"), ["Dilated", "8", "2", "block"]),
        (sr.LongNet((4, 8), (1, 2)), ["4", "8", "1", "2"]),
        (sr.RandomBlocks(0.25, 16, seed=9), ["RandomBlocks", "0.25", "16", "9"]),
        (sr.Documents((31, 47)), ["Documents", "31", "47"]),
        (sr.Packed((31, 47), sr.SlidingWindow(5)), ["Packed", "31", "47", "SlidingWindow", "5"]),
        (sr.Blocks(TABLE, 16), ["Blocks", "16"]),
        (sr.Causal() & sr.SlidingWindow(9), ["Causal", "SlidingWindow", "9"]),
        (sr.Causal() + sr.GlobalTokens(9), ["Causal", "GlobalTokens", "9"]),
    ],
)
def test_repr_tells_the_pattern(pattern: Any, words: list[str]) -> None:
    for word in words:
        assert word in repr(pattern)


def test_repr_tells_the_operator_and_stays_short_for_large_tables() -> None:
    a, b = sr.Causal(), sr.SlidingWindow(9)
    assert len({repr(a & b), repr(a | b), repr(a + b)}) == 3
    assert repr((a & b) | b) != repr(a & (b | b))
    assert len(repr(sr.Blocks(torch.ones(512, 512, dtype=torch.bool), 16))) < 2000


@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_patterns_survive_pickling(index: int) -> None:
    pattern = one_of_each()[index]
    again = pickle.loads(pickle.dumps(pattern))
    assert again == pattern
    assert hash(again) == hash(pattern)
