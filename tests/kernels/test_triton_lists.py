"""Lists of single keys in the Triton kernels against the reference in float64, with gradients.

Triton's interpreter runs every program in Python, so shapes are the smallest that cross a boundary:
more heads than the rows of a program, more slots than a step has keys, widths that are padded.
"""

from typing import Any

import pytest
import torch
from helpers.device_runs import DEVICE, checked, placed
from oracles.attention_oracle import Case, assert_close, gradients, inputs
from oracles.listed import JOINS, WITHOUT_DISTANCES
from torch import Tensor

import sparsering as sr
from sparsering.kernels.triton import lists as list_launches
from sparsering.layouts.compile import build_layout
from sparsering.patterns.selected import has_lists


def listed(case: Case, slots: int, tables: int = 1, batches: int = 1) -> Tensor:
    """Draws lists with repeats, -1 and numbers past the last key, in any order; some are empty."""
    generator = torch.Generator().manual_seed(slots)
    shape = batches, tables, case.last_position + 1, slots
    drawn = torch.randint(-2, case.kv_len + 1, shape, generator=generator)
    drawn.masked_fill_(drawn == -2, 3)  # a key that many queries list
    first = case.last_position + 1 - case.q_len
    drawn[..., first + 1 :: 7, :] = -1
    drawn[..., first, : slots // 2] = 2
    return drawn


def assert_is_exact(
    pattern: sr.Pattern, case: Case, *, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """Compares out, lse and every gradient; options that are float tensors are learnt, too."""
    args = inputs(case, dtype)
    tables = {n: x for n, x in options.items() if isinstance(x, Tensor) and x.is_floating_point()}
    options |= {"q_start": case.q_start, "block_size": 16, "return_lse": True}

    def attend(args: list[Tensor], backend: str, dtype: torch.dtype) -> list[Tensor]:
        given = {name: x.to(dtype).requires_grad_() for name, x in tables.items()}
        there = [placed(x) if backend == "triton" else x for x in args]
        moved = {n: placed(x) if backend == "triton" else x for n, x in given.items()}
        out, lse = sr.attention(*there, pattern, backend=backend, **(options | moved))
        results = [out.cpu(), lse.cpu()]
        return [*results, *gradients(results, [*args, *given.values()])]

    exact = attend([x.detach().double().requires_grad_() for x in args], "reference", torch.float64)
    eps = torch.finfo(dtype).eps
    forward, backward = (3e-6, 2e-5) if dtype == torch.float32 else (2 * eps, 8 * eps)

    def check(found: list[Tensor]) -> None:
        names = ("out", "lse", "query", "key", "value", *tables)
        for number, (name, a, b) in enumerate(zip(names, found, exact, strict=True)):
            assert_close(a.detach().double(), b.detach(), forward if number < 2 else backward, name)

    checked(lambda: attend(list(args), "triton", torch.float32), check)


SHAPES = {
    "one head": Case(1, 1, 1, 9, 20, 16, 16),
    "a list of 2 kv heads": Case(2, 4, 2, 7, 12, 8, 24),
    "more heads than rows": Case(1, 35, 1, 5, 9, 16, 16),
    "odd widths": Case(1, 3, 1, 8, 8, 17, 5, arrange="tokens before heads"),
    "from the middle": Case(2, 4, 2, 6, 14, 16, 16, 16, 5, "every other of a larger tensor"),
    "one query": Case(2, 4, 2, 1, 33, 16, 16),
    "wider than 256": Case(1, 2, 1, 4, 6, 300, 264),
    "latents": Case(1, 4, 1, 4, 6, 576, 512),
}


@pytest.mark.covering(1, keep=[{"shape": "a list of 2 kv heads", "slots": 70}])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slots", [5, 70])
def test_every_shape(shape, slots):
    case = SHAPES[shape]
    for tables in {1, case.num_kv_heads, case.num_heads}:
        assert_is_exact(sr.SelectedBlocks(listed(case, slots, tables), 1), case)
        if case.num_heads > 8:
            break


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "distances": {"distance_bias": torch.linspace(-2, 2, 4 * 13).view(4, 13)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
    "negative scale": {"scale": -0.6},
    "scale of 0": {"scale": 0.0},
}
OPTIONS["all"] = {name: x for option in list(OPTIONS.values())[:-1] for name, x in option.items()}
BESIDE = {"alone": None, "a window": sr.SlidingWindow(2, 1), "a mixture": "a mixture"}


def joined(chosen: sr.Pattern, beside: object) -> sr.Pattern:
    if beside == "a mixture":
        return (chosen & sr.Causal()) + sr.SlidingWindow(2, 1)
    return (chosen if beside is None else chosen | beside) & sr.Causal()


@pytest.mark.covering(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("heads", [(4, 1, 1), (4, 2, 2), (4, 2, 1), (4, 2, 4)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_every_option(options, beside, heads, biased, size):
    num_heads, kv_heads, tables = heads
    case = Case(2, num_heads, kv_heads, 5, 9, 16, 24, q_start=3)
    slots = 18 if size == 1 else 4
    table = listed(case, slots, tables, batches=2)
    pattern = joined(sr.SelectedBlocks(table // size, size), BESIDE[beside])
    extras = dict(OPTIONS[options])
    if biased:
        shape = 2, num_heads, *table.shape[2:]
        extras["slot_bias"] = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    assert_is_exact(pattern, case, **extras)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "dropout_p": 0.3, "dropout_seed": 5}])
def test_lists_of_a_hub(beside, options):
    """Groups of queries with lists of like length, each with its numbers of the slot bias."""
    case = Case(num_heads=4, num_kv_heads=2, q_len=24, kv_len=24, q_start=0)
    others = torch.arange(24)
    hub = torch.full_like(others, 5)
    star = torch.stack((torch.cat((hub, others)), torch.cat((others, hub)))).unique(dim=1)
    graph = sr.SelectedBlocks.from_edges(star, 24, num_heads=4)
    assert graph.slot_shape == (1, 4, 47, 1)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(graph.slot_shape, generator=generator)
    table = torch.randn(4, 31, generator=generator)
    pattern = graph + sr.SlidingWindow(3, 0) if beside else graph
    assert_is_exact(pattern, case, slot_bias=bias, distance_bias=table, **options)


@pytest.mark.parametrize("width", [16, 40, 544])
@pytest.mark.parametrize("beside", ["alone", "a window"])
def test_half_precision(width, beside):
    case = Case(1, 2, 1, 8, 8, width, min(width, 64))
    if width > 512 and beside != "alone":
        case = Case(1, 2, 1, 8, 8, 128, 16)
    pattern = joined(sr.SelectedBlocks(listed(case, 20), 1), BESIDE[beside])
    assert_is_exact(pattern, case, dtype=torch.float16, softcap=3.0)


@pytest.mark.usefixtures("bfloat16_products")
def test_bfloat16():
    case = Case(1, 2, 1, 8, 8, 16, 16)
    assert_is_exact(sr.SelectedBlocks(listed(case, 20), 1), case, dtype=torch.bfloat16)


def assert_no_list_is_in_tiles(monkeypatch, pattern: sr.Pattern, case: Case, **options) -> None:
    built: list[sr.Pattern] = []

    def build(pattern: sr.Pattern, *rest: Any) -> Any:
        built.append(pattern)
        return build_layout(pattern, *rest)

    monkeypatch.setattr("sparsering.layouts.cache.build_layout", build)
    sr.layout_cache.clear()
    assert_is_exact(pattern, case, dropout_p=0.3, dropout_seed=4, **options)
    assert not any(map(has_lists, built))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINS)
def test_every_join_is_exact_and_lays_no_list_in_tiles(monkeypatch, name):
    case = Case(JOINS[name].num_batches() or 1, 4, 2, 90, 90, 16, 16)
    options = {}
    if name not in WITHOUT_DISTANCES:
        options["distance_bias"] = torch.randn(4, 21, generator=torch.Generator().manual_seed(5))
    assert_no_list_is_in_tiles(monkeypatch, JOINS[name], case, **options)


_INNER = sr.SelectedBlocks(
    torch.randint(-1, 10, (2, 12, 5), generator=torch.Generator().manual_seed(3)), 1
)
SMALL_JOINS = {
    "documents by batch entry": sr.Packed(((5, 7), (2, 10)), _INNER & sr.Causal()),
    "along a tree, beside a window": sr.Tree(
        (5, 4, 3), (-1, 0, 0), (_INNER | sr.SlidingWindow(1)) & sr.Causal(), length=12
    ),
}


@pytest.mark.parametrize("name", SMALL_JOINS)
def test_positions_in_documents_and_trees(monkeypatch, name):
    table = torch.randn(4, 7, generator=torch.Generator().manual_seed(5))
    case = Case(2, 4, 2, 12, 12, 16, 16)
    assert_no_list_is_in_tiles(monkeypatch, SMALL_JOINS[name], case, distance_bias=table)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_key_that_no_query_lists_may_hold_anything(number):
    case = Case(1, 2, 1, 8, 8, 16, 16)
    table = listed(case, 20)
    table[table == 5] = 4
    drawn, results = inputs(case, torch.float32), []
    for spoiled in (0.0, number):
        args = [x.detach().clone() for x in drawn]
        for x in args[1:]:
            x[:, :, 5] = spoiled
        leaves = [placed(x).requires_grad_() for x in args]
        out = sr.attention(*leaves, sr.SelectedBlocks(table, 1), q_start=0, backend="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_the_order_of_slots_changes_no_bit():
    case = Case(1, 2, 1, 8, 8, 16, 16)
    table, drawn, results = listed(case, 20), inputs(case, torch.float32), []
    for order in (torch.arange(20), torch.randperm(20, generator=torch.Generator().manual_seed(2))):
        leaves = [placed(x.detach()).requires_grad_() for x in drawn]
        pattern = sr.SelectedBlocks(table[..., order], 1)
        out = sr.attention(*leaves, pattern, q_start=0, backend="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [16, 528])
def test_values_inside_of_keys_are_read_once_with_the_same_bits(width, monkeypatch):
    """Values of latents are the first 512 channels of keys, in the same memory."""
    case, found = Case(1, 3, 1, 4, 6, width, min(width, 512)), []
    told = list_launches._values_are_keys
    monkeypatch.setattr(
        list_launches, "_values_are_keys", lambda x: found.append(told(x)) or found[-1]
    )
    pattern, (query, key, _) = sr.SelectedBlocks(listed(case, 5), 1), inputs(case, torch.float32)
    results = []
    for of_key in (lambda k: k[..., :512], lambda k: k[..., :512].clone()):
        leaves = [placed(x.detach()).requires_grad_() for x in (query, key)]
        out = sr.attention(*leaves, of_key(leaves[1]), pattern, q_start=0, backend="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert set(found) == {len(results) == 1}
        found.clear()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sizes", [(1, 5, 7, 0, 4), (1, 5, 7, 4, 0), (0, 5, 7, 4, 4)])
def test_sizes_of_zero(sizes):
    batch, tokens, keys, width, value_width = sizes
    shapes = ((tokens, width), (keys, width), (keys, value_width))
    leaves = [torch.randn(batch, 2, n, w).requires_grad_() for n, w in shapes]
    pattern = sr.SelectedBlocks(torch.randint(-1, keys, (tokens, 3)), 1)
    found = []
    for backend in ("triton", "reference"):
        there = [placed(x) for x in leaves] if backend == "triton" else leaves
        out = sr.attention(*there, pattern, q_start=0, backend=backend).cpu()
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_lists_without_slots_leave_the_sink():
    case = Case(1, 2, 1, 5, 8, 16, 16)
    empty = torch.empty(1, 1, case.last_position + 1, 0, dtype=torch.int64)
    sink = torch.tensor([0.5, -1.0])
    assert_is_exact(sr.SelectedBlocks(empty, 1), case, sink=sink)


def test_launches_of_a_call(launched):
    case = Case(1, 2, 1, 5, 8, 16, 16)
    args = [placed(x.detach()).requires_grad_() for x in inputs(case, torch.float32)]
    pattern = sr.SelectedBlocks(listed(case, 6), 1)
    out = sr.attention(*args, pattern, q_start=0, backend="triton")
    assert launched == ["list_rows_kernel", "list_forward_kernel"]
    launched.clear()
    torch.autograd.grad(out.sum(), args)
    assert launched == ["prepare_kernel", "list_query_kernel", "list_key_kernel"]


CUT = {
    "alone": (lambda chosen: chosen, {}),
    "with a sink": (lambda chosen: chosen & sr.Causal(), {"sink": torch.tensor([0.5, -1.0])}),
    "beside a window": (lambda chosen: (chosen | sr.SlidingWindow(10)) & sr.Causal(), {}),
    "twice": (lambda chosen: chosen + (chosen & sr.SlidingWindow(99)), {"softcap": 3.0}),
}


@pytest.mark.parametrize("name", CUT)
def test_few_queries_take_the_keys_of_long_lists_in_parts(monkeypatch, launched, name):
    """Four processors run two programs each; the parts of a short list are empty."""
    monkeypatch.setattr(list_launches, "_LEAST_KEYS", 16)
    join, options = CUT[name]
    case = Case(1, 2, 1, 2, 150, 16, 20, 148)
    drawn = listed(case, 140)
    drawn[..., -1, 20:] = -1
    pattern = join(sr.SelectedBlocks(drawn, 1))
    assert_is_exact(pattern, case, **options)
    assert launched.count("list_merge_kernel") == len(pattern.branches)


def test_in_order_no_list_is_cut(monkeypatch, launched):
    monkeypatch.setattr(list_launches, "_LEAST_KEYS", 16)
    case = Case(1, 2, 1, 1, 50, 16, 16, 49)
    args, pattern = inputs(case, torch.float32), sr.SelectedBlocks(listed(case, 40), 1)
    with sr.batch_invariant():
        sr.attention(*map(placed, args), pattern, q_start=49, backend="triton")
    assert launched == ["list_rows_kernel", "list_forward_kernel"]


def test_entries_are_sorted_by_key_in_the_order_of_queries():
    keys = torch.tensor([[3, -1, 1], [1, 3, 0]])[None, None].to(DEVICE)
    order, start = list_launches._sorted_by(keys, 4)
    assert order[0, 0].tolist() == [1, 5, 2, 3, 0, 4]
    assert start[0, 0].tolist() == [1, 2, 4, 4, 6]


def test_masses_of_blocks_come_from_the_gradient_of_a_bias(monkeypatch):
    """`block_mass` over lists, whose bias has a number for each slot."""
    case = Case(1, 4, 2, 8, 8, 16, 16)
    query, key, _ = (x.detach() for x in inputs(case, torch.float32))
    pattern = sr.SelectedBlocks(listed(case, 6, tables=2), 1) & sr.Causal()
    expected = sr.selection.block_mass(query.double(), key.double(), pattern)
    monkeypatch.setattr("sparsering.selection.mass.choose", lambda *rest: "triton")
    found = sr.selection.block_mass(placed(query), placed(key), pattern)
    assert_close(found.cpu().double(), expected, 5e-6)
