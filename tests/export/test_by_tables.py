"""Attention by tables is the reference, for every pattern and option."""

import pytest
import torch
from by_tables import attend_by_tables
from helpers.thinned import thinned
from hypothesis import assume
from hypothesis import strategies as st
from oracles.attention_oracle import PATTERNS, Case, assert_close, inputs
from oracles.extras_oracle import extras_of
from oracles.patterns_oracle import Spec, build
from oracles.strategies import Scene, cases, examples

import sparsering as sr
from sparsering.layouts.gathered_tiles import gathered_tiles
from sparsering.patterns.algebra import Frame
from sparsering.patterns.selected import selections_of

SHAPES = {
    "square": Case(),
    "grouped heads": Case(1, 4, 2, 75, 75, 17, 5, 32),
    "one kv head": Case(2, 3, 1, 50, 70, 1, 3, 16),
    "more queries than keys": Case(1, 2, 1, 60, 33, 8, 12, 48),
    "keys from 0": Case(2, 2, 2, 40, 90, 4, 4, 128, 0),
    "queries after the keys": Case(1, 6, 3, 20, 40, 3, 2, None, 31),
    "one query": Case(2, 4, 2, 1, 77, 8, 8, None),
}


def assert_is_the_reference(pattern: sr.Pattern, case: Case, **options) -> None:
    args = inputs(case, requires_grad=False)
    options = {"q_start": case.q_start, "block_size": case.block_size, **options}
    options = {k: x.detach() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    expected = sr.attention(*args, pattern, **options, backend="reference", return_lse=True)
    for name, a, b in zip(
        ("out", "lse"), attend_by_tables(*args, pattern, **options), expected, strict=True
    ):
        assert_close(a, b, 1e-12, name)


@pytest.mark.parametrize(("name", "shape"), thinned(8, PATTERNS, SHAPES))
def test_is_the_reference(name: str, shape: str):
    case = SHAPES[shape]
    assert_is_the_reference(PATTERNS[name](case), case)


@examples(
    20, 300, cases(with_random=True), st.sampled_from((1, 3, 16)), st.sampled_from((16, 32, None))
)
def test_is_the_reference_for_any_expression(
    case: tuple[Spec, Scene], width: int, block_size: int | None
):
    spec, scene = case
    assume(scene.kv_len)
    assert_is_the_reference(build(spec), Case.of(scene, width, width + 1, block_size))


OPTIONS = (
    "softcap",
    "distance_bias",
    "far_distance_bias",
    "sink",
    "sink_of_rows",
    "sink_of_entries",
    "softcap distance_bias sink",
)
PLACES = {
    "window": lambda case: sr.SlidingWindow(20, 3),
    "documents": lambda case: sr.Packed((30, 0, case.kv_len - 30), sr.Causal()),
    "heads": lambda case: sr.PerHead((sr.Causal(), sr.SlidingWindow(9))),
    "tree": lambda case: sr.Tree((20, 30, 10, case.kv_len - 60), (-1, 0, 0, 1)),
    "mixture": lambda case: sr.Causal() + sr.SlidingWindow(9, 9),
    "padding": lambda case: sr.Causal() & sr.KeyPadding((case.kv_len, case.kv_len // 2)),
    "hidden keys": lambda case: sr.SlidingWindow(9) & sr.KeyMask(torch.arange(case.kv_len) % 7 > 2),
}


@pytest.mark.parametrize(("place", "names"), thinned(3, PLACES, OPTIONS))
def test_options(place: str, names: str):
    case = Case(num_heads=4, num_kv_heads=2)
    pattern = PLACES[place](case)
    assert_is_the_reference(pattern, case, **extras_of(case, names))


def selected(*shape: int, blocks: int, size: int, row: int, **more) -> sr.SelectedBlocks:
    """Draws a selection with repeats, empty slots and blocks that do not exist."""
    return sr.SelectedBlocks(torch.randint(-1, blocks + 2, shape), size, row, **more)


LISTS = {
    "keys": lambda: selected(75, 9, blocks=75, size=1, row=1),
    "keys of heads": lambda: selected(2, 75, 9, blocks=75, size=1, row=1) & sr.Causal(),
    "keys of entries": lambda: selected(2, 4, 75, 9, blocks=75, size=1, row=1) & sr.Causal(),
    "keys of entries alone": lambda: selected(2, 1, 75, 9, blocks=75, size=1, row=1),
    "blocks": lambda: selected(2, 19, 3, blocks=10, size=8, row=4) & sr.Causal(),
    "beside a window": lambda: (
        (selected(75, 9, blocks=75, size=1, row=1) | sr.SlidingWindow(8)) & sr.Causal()
    ),
    "beside a window, hidden keys": lambda: (
        (selected(2, 75, 9, blocks=75, size=1, row=1) | sr.SlidingWindow(8))
        & sr.KeyMask(torch.rand(2, 75) > 0.2)
    ),
    "mixture": lambda: (
        selected(75, 9, blocks=75, size=1, row=1) + selected(38, 4, blocks=37, size=2, row=2)
    ),
}


@pytest.mark.parametrize("names", ["", "softcap distance_bias sink"])
@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str, names: str):
    case = Case(num_heads=4, num_kv_heads=2)
    assert_is_the_reference(LISTS[name](), case, **extras_of(case, names))


@pytest.mark.parametrize("name", ["keys", "keys of entries", "blocks"])
def test_biases_of_slots(name: str):
    case, pattern = Case(num_heads=4, num_kv_heads=2), LISTS[name]()
    (selection,) = selections_of(pattern)
    bias = torch.randn(2, 4, *selection.indices.shape[-2:], dtype=torch.float64)
    assert_is_the_reference(pattern, case, slot_bias=bias)


def test_lists_of_a_step_begin_at_its_row():
    case = Case(2, 4, 2, 6, 75, q_start=69)
    pattern = selected(2, 2, 4, blocks=18, size=4, row=4, first_row=17) & sr.Causal()
    assert_is_the_reference(pattern, case)


@pytest.mark.parametrize("place", PLACES)
def test_block_biases(place: str):
    case = Case(num_heads=4, num_kv_heads=2)
    pattern = PLACES[place](case)
    blocks = pattern.layout(case.kv_len, num_heads=4, num_kv_heads=2, block_size=16).num_blocks
    bias = torch.randn(1, 4, blocks, dtype=torch.float64)
    bias[0, 1, ::3] = -torch.inf
    assert_is_the_reference(pattern, case, block_bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 16).to(dtype) for _ in "qkv")
    out, lse = attend_by_tables(q, k, v, sr.Causal())
    exact, exact_lse = sr.attention(
        *(x.double() for x in (q, k, v)), sr.Causal(), return_lse=True, backend="reference"
    )
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-6, atol=1e-5)
    # the only rounding to the dtype is that of the result
    rounded = exact.to(dtype).float()
    step = torch.finfo(dtype).eps * rounded.abs() + 1e-5
    assert ((out.float() - rounded).abs() <= step).all()


def test_rows_without_keys_are_0_and_hidden_keys_may_be_nan():
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in "qkv")
    valid = torch.arange(40) >= 20
    k[:, :, :20], v[:, :, :20] = torch.nan, torch.nan
    pattern = sr.SlidingWindow(7) & sr.KeyMask(valid)
    out, lse = attend_by_tables(q, k, v, pattern)
    assert not out[:, :, :20].any() and (lse[:, :, :20] == -torch.inf).all()
    expected = sr.attention(q, k[:, :, 20:], v[:, :, 20:], sr.SlidingWindow(7), q_start=-20)
    torch.testing.assert_close(out[:, :, 20:], expected[:, :, 20:])


def test_a_window_has_one_group_of_units_and_causal_has_two():
    groups = {}
    for tokens in (1024, 2048, 4096):
        frame = Frame(tokens, tokens, 4, 2, 0)
        for pattern in (sr.SlidingWindow(256), sr.Causal(), sr.LongNet((256, 512), (1, 2))):
            tables = gathered_tiles(pattern, frame, None, 64)
            groups.setdefault(str(pattern), set()).add(len(tables.units))
    assert groups == {
        "SlidingWindow(256)": {1}, "Causal()": {2}, "LongNet((256, 512), (1, 2))": {1}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (sr.SlidingWindow(512), 1.6),
        (sr.Causal(), 1.6),
        (sr.LongNet((256, 512, 1024), (1, 2, 4)), 1.1),
        ((sr.SlidingWindow(256) | sr.GlobalTokens(1)) & sr.Causal(), 2.1),
        (sr.SlidingWindow(100, 100) | sr.GlobalTokens(2), 3.1),
        (sr.Packed((100, 3000, 996), sr.Causal()), 1.7),
    ],
    ids=str,
)
def test_scores_in_memory_are_about_the_pairs(pattern: sr.Pattern, most: float):
    frame = Frame(4096, 4096, 1, 1, 0)
    tables = gathered_tiles(pattern, frame, None, 64)
    scores = sum(u * m * n for u, m, n in (x.num_slots for x in tables.units))
    assert scores <= most * pattern.layout(4096).num_pairs
