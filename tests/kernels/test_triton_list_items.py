"""Gradients of listed keys that are summed over heads first, item by item, on tensor cores.

`test_triton_lists.py` has its cases from four heads of a list on. Here are the widest heads, lists
of several heads at one kv head, and the bits of parts of a call.
"""

from typing import Any

import pytest
import torch
from helpers.device_runs import placed
from oracles.attention_oracle import Case, inputs
from test_triton_lists import OPTIONS, assert_is_exact, joined, listed
from torch import Tensor

import sparsering as sr
from sparsering.kernels.triton import lists as list_launches
from sparsering.kernels.triton.lists import queries_at_a_time, sums_heads_first
from sparsering.patterns.algebra import Frame
from sparsering.planning import memory
from sparsering.planning.memory import CallSizes


@pytest.fixture(autouse=True)
def _every_group_is_summed_first(monkeypatch, launched):
    monkeypatch.setattr(list_launches, "sums_heads_first", lambda *_: True)
    yield
    assert "list_key_kernel" not in launched


SHAPES = {
    "one head": Case(1, 1, 1, 6, 20, 16, 16),
    "lists of 2 kv heads": Case(2, 4, 2, 5, 12, 8, 24),
    "more heads than rows": Case(1, 35, 1, 4, 9, 16, 16),
    "odd widths": Case(1, 3, 1, 6, 8, 17, 5, arrange="tokens before heads"),
    "from the middle": Case(2, 4, 2, 5, 14, 16, 16, 16, 5, "every other of a larger tensor"),
    "wider than 256": Case(1, 2, 1, 3, 6, 300, 264),
    "wider than 512": Case(1, 4, 1, 3, 6, 540, 20),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slots", [5, 70])
def test_every_shape(shape, slots):
    case = SHAPES[shape]
    for tables in {1, case.num_kv_heads, case.num_heads if slots == 5 else 1}:
        assert_is_exact(sr.SelectedBlocks(listed(case, slots, tables), 1), case)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_with_lists_for_each_head(options):
    case = Case(2, 4, 2, 5, 9, 16, 24, q_start=3)
    table = listed(case, 18, 4, batches=2)
    bias = torch.randn(2, *table.shape[1:], generator=torch.Generator().manual_seed(5))
    extras = OPTIONS[options] | {"slot_bias": bias}
    assert_is_exact(joined(sr.SelectedBlocks(table, 1), None), case, **extras)


def test_half_precision_of_latents_with_128_heads():
    case = Case(1, 128, 1, 2, 4, 576, 512)
    extras = {"distance_bias": torch.linspace(-2, 2, 128 * 5).view(128, 5)}
    assert_is_exact(
        sr.SelectedBlocks(listed(case, 6), 1), case, dtype=torch.float16, softcap=3.0, **extras
    )


@pytest.mark.usefixtures("bfloat16_products")
def test_bfloat16():
    case = Case(1, 9, 1, 4, 8, 16, 16)
    assert_is_exact(sr.SelectedBlocks(listed(case, 20), 1), case, dtype=torch.bfloat16)


def gradients(args: list[Tensor], pattern: sr.Pattern, **options: Any) -> tuple[Tensor, ...]:
    leaves = [placed(x.detach()).requires_grad_() for x in args]
    out, lse = sr.attention(
        *leaves, pattern, q_start=0, block_size=16, backend="triton", return_lse=True, **options
    )
    seen = lse.where(lse > -torch.inf, 0.0)
    return torch.autograd.grad(out.float().square().sum() + seen.sin().sum(), leaves)


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


BESIDE = {"alone": None, "a window": sr.SlidingWindow(2, 1), "a mixture": "a mixture"}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((4, 1, 1), torch.float16), ((4, 2, 4), torch.float32), ((4, 2, 2), torch.float16)],
)
def test_the_queries_at_a_time_change_no_bit(beside, heads, dtype, monkeypatch):
    """The lists begin with a key that all queries list, and have repeats, -1 and empty ones."""
    num_heads, kv_heads, tables = heads
    case = Case(2, num_heads, kv_heads, 7, 7, 16, 24)
    table = listed(case, 9, tables, batches=2)
    table[..., 0] = 0
    table[:, :, 4] = -1
    pattern, args = joined(sr.SelectedBlocks(table, 1), BESIDE[beside]), inputs(case, dtype)
    results = []
    for most in (7, 3, 1):
        monkeypatch.setattr(list_launches, "queries_at_a_time", lambda *_, most=most: most)
        results.append(gradients(args, pattern))
        assert results[-1][1].dtype == dtype and results[-1][1].abs().sum() > 0
    for other in results[1:]:
        assert_equal(other, results[0])


def test_a_padded_table_of_indices_changes_no_bit():
    case = Case(1, 4, 1, 8, 8, 16, 16)
    table, args = listed(case, 20), inputs(case, torch.float32)
    padding = table.new_full((*table.shape[:3], 60), -1)
    with sr.batch_invariant():
        found = [
            gradients(args, sr.SelectedBlocks(x, 1))
            for x in (table, torch.cat((padding, table), 3), torch.cat((table, table[..., :9]), 3))
        ]
    for other in found[1:]:
        assert_equal(other, found[0])


def test_an_entry_of_a_batch_has_the_bits_of_itself_alone():
    case = Case(3, 4, 1, 8, 8, 16, 16)
    args, table = inputs(case, torch.float32), listed(case, 20, batches=3)
    whole = gradients(args, sr.SelectedBlocks(table, 1))
    alone = gradients([x[1:2] for x in args], sr.SelectedBlocks(table[1:2], 1))
    assert_equal(alone, tuple(x[1:2] for x in whole))


def test_earlier_calls_change_no_bit(monkeypatch):
    """Memory of items may hold what an earlier call left there, as NaN."""
    case = Case(1, 4, 1, 8, 8, 16, 16)
    args, pattern = inputs(case, torch.float32), sr.SelectedBlocks(listed(case, 20), 1)
    first = gradients(args, pattern)

    def poisoned(x: Tensor, *shape: Any, **options: Any) -> Tensor:
        new = empty(x, *shape, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    assert_equal(gradients(args, pattern), first)


def test_a_key_that_no_query_lists_has_gradients_of_zero():
    case = Case(1, 4, 1, 6, 8, 16, 16)
    table = listed(case, 20)
    table[table == 5] = 4
    _, key, value = gradients(inputs(case, torch.float16), sr.SelectedBlocks(table, 1))
    assert not key[:, :, 5].any() and not value[:, :, 5].any() and key.any()


@pytest.mark.parametrize("tables", [1, 4])
def test_plans_announce_the_memory_of_items(tables, monkeypatch):
    case = Case(2, 4, 2, 9, 9, 16, 16)
    pattern = sr.SelectedBlocks(listed(case, 12, tables), 1)
    monkeypatch.setattr(list_launches, "_BYTES_OF_ITEMS", 0)
    monkeypatch.setattr(memory, "sums_heads_first", lambda *_: True)
    found, empty = [], Tensor.new_empty

    def noted(x: Tensor, *shape: Any, **options: Any) -> Tensor:
        new = empty(x, *shape, **options)
        found.extend([new] if new.numel() else [])  # the interpreter makes empty ones for itself
        return new

    monkeypatch.setattr(Tensor, "new_empty", noted)
    gradients(inputs(case, torch.float16), pattern)
    of_items = [x for x in found if x.dim() == 6]
    sums = [x for x in found if x.shape == (2, 2, 9, 16) and x.dtype == torch.float32]
    (of_item,) = of_items
    assert of_item.shape[2] < 9 and len(sums) == 2
    told = memory.items_memory(
        Frame.build(9, 9, 4, 2, 0), CallSizes(2, 16, torch.float16), (1, tables, 9, 12)
    )
    order = 12 * tables * of_item.shape[2] * 12
    assert told == of_item.nbytes + sums[0].nbytes + sums[1].nbytes + order


def test_which_groups_are_summed_first():
    half, single = torch.bfloat16, torch.float32
    assert sums_heads_first(8, 64, half) and not sums_heads_first(7, 64, half)
    assert sums_heads_first(4, 256, single) and not sums_heads_first(3, 64, single)
    assert sums_heads_first(128, 576, half) and not sums_heads_first(128, 576, single)


def test_queries_at_a_time_share_memory_evenly():
    apiece = 4 * 2048 * (576 + 512)  # bytes of dK and dV of the keys that a query lists
    query = 2 * 128 * 576 * 16384
    assert queries_at_a_time(16384, query, apiece) == 269
    assert queries_at_a_time(16384, 0, apiece) == 30
    assert queries_at_a_time(5, 0, 1 << 40) == 1
    assert queries_at_a_time(5, 0, 0) == 5
    assert queries_at_a_time(0, 0, 8) == 1
