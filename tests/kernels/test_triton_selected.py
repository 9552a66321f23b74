"""The kernels that rank blocks and write the tables of selections, in Triton's interpreter.

The oracles are torch's: `select_blocks` on a CPU, the layout of `layouts.selected_on_device`, and
the walks over it. All tables are equal bit for bit.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.thinned import thinned
from torch import Tensor

import sparsering as sr
from sparsering.kernels.triton import selected, walk
from sparsering.layouts.layout import BlockLayout, Pass
from sparsering.layouts.selected_on_device import selected_layout
from sparsering.patterns.algebra import Frame
from sparsering.selection import select_blocks

ranking = pytest.importorskip("sparsering.kernels.triton.ranking")
CPU = torch.device("cpu")


# ---- Ranks. ----------------------------------------------------------------


def ties(*shape: int) -> Tensor:
    """Scores with many ties, and all that is not finite."""
    values = torch.tensor([-2.0, -1e-40, -0.0, 0.0, 1e-40, 1.5, torch.inf, -torch.inf, torch.nan])
    return values[torch.randint(len(values), shape)]


def ranked(scores: Tensor, k: int, *, q_start: int, **options: object) -> Tensor:
    *outer, rows, blocks = scores.shape
    first_row = q_start // options["query_block"]
    flat = scores.reshape(-1, rows, blocks)
    return selected.best_blocks(flat, k, first_row=first_row, **options).view(*outer, rows, k)


def check_ranks(scores: Tensor, k: int, **given: object) -> None:
    options = {
        "block_size": 16, "query_block": 1, "sink": 1, "local": 1, "causal": True, "q_start": 0,
    } | given  # fmt: skip
    expected = select_blocks(scores, k, **options)
    found = ranked(scores, k, **options)
    assert found.dtype == torch.int64 and torch.equal(found, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scores", [ties, torch.randn], ids=["ties", "drawn"])
def test_ranks_are_those_of_torch(scores, causal):
    check_ranks(scores(2, 3, 40, 3), 2, causal=causal)
    check_ranks(scores(1, 2, 9, 40), 7, causal=causal, query_block=16, q_start=31 * 16)
    check_ranks(scores(33, 20), 5, causal=causal, sink=2, local=3, query_block=8)
    check_ranks(scores(7, 5), 9, causal=causal, sink=0, local=0, q_start=37)  # k above the blocks
    check_ranks(scores(3, 1, 4, 1), 1, causal=causal, q_start=100)  # queries behind the keys


def test_many_blocks_are_ranked_in_parts(monkeypatch):
    monkeypatch.setattr(selected, "_LANES", 16)  # 8 blocks at a time
    check_ranks(ties(2, 1, 5, 70), 6, query_block=16, q_start=66 * 16)
    check_ranks(torch.randn(2, 1, 5, 70), 16, sink=3, local=4, causal=False)


@pytest.fixture
def networks(monkeypatch) -> list[tuple[str, int]]:
    """Triton's own sorting networks, in whose place the tests put NumPy; notes what they sort."""
    from triton import language

    ran = []

    def noted(name: str, *given: object) -> object:
        ran.append((name, int(given[0].shape[-1])))
        return getattr(language.standard, name)(*given)

    for name in ("topk", "sort"):
        monkeypatch.setattr(language, name, functools.partial(noted, name))
    return ran


@pytest.mark.parametrize(
    ("k", "sizes"),
    [(1, {4, 8}), (7, {8, 16}), pytest.param(40, {128, 256}, marks=pytest.mark.slow)],
)
def test_the_network_of_triton_ranks_as_torch(k, sizes, networks, monkeypatch):
    monkeypatch.setattr(selected, "_LANES", 16)  # 8 blocks at a time
    local = int(k > 1)
    blocks, last = 3 * k + 17, 16 * (3 * k + 14)
    check_ranks(ties(2, 1, 3, blocks), k, sink=0, local=local, query_block=16, q_start=last)
    check_ranks(torch.randn(2, 2, blocks), k, sink=local, local=local, causal=False)
    assert {size for _, size in networks} == sizes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_scores_of_any_dtype_and_strides_are_ranked_in_float32(dtype):
    scores = torch.randn(3, 12, 30).to(dtype)
    check_ranks(scores.transpose(1, 2), 4)
    check_ranks(scores[:, ::2, ::3], 4, causal=False)
    close = 1 + torch.arange(12, dtype=torch.float64).flip(0).expand(1, 1, 12) * 1e-12
    check_ranks(close.to(dtype), 4, causal=False, sink=0, local=0)  # ties in float32


# ---- Tables. ---------------------------------------------------------------


def chosen(*shape: int, blocks: int = 9, seed: int = 0) -> Tensor:
    """Block numbers with repeats, and with numbers that are no block."""
    return torch.randint(-1, blocks + 2, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(found: Tensor, expected: Tensor, what: object) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    assert torch.equal(found, expected), (what, found, expected)


def layouts(
    indices: Tensor, sizes: tuple[int, int, int], lengths: tuple[int, int, int | None],
    causal: bool, first_row: int = 0,
) -> tuple[BlockLayout, BlockLayout]:  # fmt: skip
    """Layouts by the kernels and by torch; sizes are of a block, a row and a tile."""
    block, row, tile = sizes
    pattern = sr.SelectedBlocks(indices, block, row, first_row)
    pattern = pattern & sr.Causal() if causal else pattern
    q_len, kv_len, q_start = lengths
    frame = Frame.build(q_len, kv_len, 4, 2, q_start)
    found = selected.selected_layout(pattern, frame, tile, CPU)
    expected = selected_layout(pattern, frame, tile)
    assert found is not None and expected is not None
    return found, expected


def assert_same_passes(found: Pass, expected: Pass) -> None:
    for name, x in vars(expected).items():
        own = getattr(found, name)
        assert_same(own, x, name) if isinstance(x, Tensor) else None
        assert isinstance(x, Tensor) or own == x, name
    assert_same(found.transposed_bitmaps, expected.transposed_bitmaps, "transposed bitmaps")


def assert_same_walks(found: BlockLayout, expected: BlockLayout, limits: tuple[int, ...]) -> None:
    (p,), uncut = found.passes, found.passes[0].key_tile.shape[-1] + 1
    walks = [(False, uncut), (True, uncut)]
    for by_key, limit in [*walks, *((by_key, n) for by_key in (False, True) for n in limits)]:
        is_uncut = limit == uncut and not by_key
        made = walk._walks[p][False, uncut] if is_uncut else walk._builders[p][by_key](limit)
        for name, x in walk._walk(expected, 0, by_key, limit)._asdict().items():
            own, what = getattr(made, name), (by_key, limit, name)
            assert_same(own, x, what) if isinstance(x, Tensor) else None
            assert isinstance(x, Tensor) or own == x, what


def check_tables(*arguments: object, limits: tuple[int, ...] = (3,)) -> None:
    found, expected = layouts(*arguments)
    assert_same_passes(found.passes[0], expected.passes[0])
    assert_same_walks(found, expected, limits)


@pytest.fixture
def short_runs(monkeypatch) -> None:
    """Programs of 8 query tiles or fewer, so that small tables take several."""
    monkeypatch.setattr(selected, "_LANES", 128)
    monkeypatch.setattr(selected, "_BINS", 16)


CASES = {
    "tiles": (chosen(9, 4), (16, 16, 16), (144, 144, None)),
    "heads": (chosen(4, 9, 3), (16, 16, 16), (137, 137, None)),
    "batches": (chosen(2, 2, 9, 5), (16, 16, 16), (130, 130, None)),
    "one table for all": (chosen(1, 1, 9, 2), (16, 16, 16), (130, 130, None)),
    "rows of a token": (chosen(1, 2, 37, 3, blocks=3), (16, 1, 16), (37, 37, None)),
    "short rows": (chosen(2, 17, 3, blocks=3), (32, 4, 32), (67, 67, None)),
    "from within a row": (chosen(1, 2, 35, 3, blocks=3), (32, 4, 32), (40, 137, None)),
    "few, from within": (chosen(2, 9, 3, blocks=3), (32, 8, 32), (11, 40, None)),
    "smaller tiles": (chosen(2, 4, 4), (48, 48, 16), (140, 140, None)),
    "smaller tiles and rows": (chosen(1, 1, 9, 2, blocks=4), (64, 16, 32), (131, 135, 0)),
    "more slots than blocks": (chosen(9, 20, blocks=5), (16, 16, 16), (40, 75, 0)),
    "queries behind the keys": (chosen(9, 4, blocks=3), (16, 16, 16), (60, 40, 70)),
    "one query": (chosen(2, 1, 4), (16, 1, 16), (1, 130, None), 129),
    "nothing": (torch.full((9, 2), -1), (16, 16, 16), (144, 144, None)),
}


@pytest.mark.parametrize(("name", "causal"), thinned(2, CASES, [True, False]))
def test_tables_are_those_of_torch(name, causal, short_runs):
    indices, sizes, lengths, *first_row = CASES[name]
    check_tables(indices, sizes, lengths, causal, *first_row)


def test_a_tile_of_many_entries_is_cut_as_by_torch(short_runs):
    sink = torch.cat((torch.zeros(1, 2, 40, 1, dtype=torch.int64), chosen(1, 2, 40, 2)), -1)
    check_tables(sink, (16, 1, 16), (40, 150, 0), True, limits=(1, 2, 7, 16))


@pytest.mark.parametrize("lanes", [32, pytest.param(256, marks=pytest.mark.slow)])
def test_the_network_of_triton_sorts_entries_as_torch(lanes, networks, monkeypatch):
    monkeypatch.setattr(selected, "_LANES", lanes)
    monkeypatch.setattr(selected, "_BINS", 16)
    check_tables(chosen(5, 3), (16, 16, 16), (75, 75, None), True, limits=())
    assert ("sort", lanes) in networks


@pytest.mark.slow
def test_drawn_tables_are_those_of_torch():
    for seed in range(30):
        torch.manual_seed(seed)
        row, parts, per_row = (2 ** int(torch.randint(n, ())) for n in (5, 2, 4))
        tile = 16 * int(torch.randint(1, 4, ()))
        block, row = tile * parts, min(row, 16)
        q_len, kv_len = (int(torch.randint(1, 200, ())) for _ in range(2))
        q_start = int(torch.randint(0, 50, ()))
        rows = -(-(q_start + q_len) // row)
        indices = chosen(*(1, 2)[seed % 2 :], rows, per_row, blocks=-(-kv_len // block), seed=seed)
        check_tables(indices, (block, row, tile), (q_len, kv_len, q_start), seed % 3 > 0)


@pytest.mark.parametrize(
    ("pattern", "tile"),
    [
        (sr.SelectedBlocks(chosen(9, 129), 16), 16),
        (sr.SelectedBlocks(chosen(9, 4), 16) & sr.Causal() & sr.SlidingWindow(20), 16),
        (sr.SelectedBlocks(chosen(9, 4), 16) | sr.Causal(), 16),
        (sr.SelectedBlocks(chosen(9, 4), 16), 32),
        (sr.Causal(), 16),
    ],
)
def test_other_patterns_stay_with_torch(pattern, tile):
    frame = Frame.build(144, 144, 4, 2, None)
    assert selected.selected_layout(pattern, frame, tile, CPU) is None


# ---- Planted defects: each is seen. ----------------------------------------


def planted(monkeypatch, tmp_path: Path, right: str, wrong: str) -> None:
    """Puts kernels with a defect in the place of the real ones."""
    source = Path(ranking.__file__).read_text()
    assert source.count(right) == 1, right
    path = tmp_path / "planted_ranking.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("sparsering.kernels.triton.planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "sparsering.kernels.triton.ranking", module)


def ranks_of_ties() -> None:
    check_ranks(ties(2, 1, 20, 12), 7, causal=False)


def tables_of_rows() -> None:
    check_tables(*CASES["heads"], True, limits=(2,))


DEFECTS: list[tuple[str, str, Callable[[], None]]] = [
    ("(_LAST - block))", "block)", ranks_of_ties),
    ("tl.where(magnitude == 0, 0, bits)", "bits", ranks_of_ties),
    ("(magnitude > 0x7F800000) |", "", ranks_of_ties),
    ("again += (same & (lane > i))", "again += (same & (lane < i))", tables_of_rows),
    ("key > own, num_keys", "key >= own, num_keys", tables_of_rows),
    ("longer = tl.sum(total) - tl.cumsum(total)", "longer = total * 0", tables_of_rows),
    ("middle = tl.minimum(tl.maximum(masked, lower), upper)", "middle = masked", tables_of_rows),
    (
        "(its == length[:, None]) & (other < ",
        "(its == length[:, None]) & (other > ",
        tables_of_rows,
    ),
    ("num_real + (tile", "num_real - 1 + (tile", tables_of_rows),
]


@pytest.mark.parametrize(("right", "wrong", "check"), DEFECTS, ids=[x for x, *_ in DEFECTS])
def test_a_planted_defect_is_seen(monkeypatch, tmp_path, short_runs, right, wrong, check):
    planted(monkeypatch, tmp_path, right, wrong)
    with pytest.raises((AssertionError, IndexError)):
        check()
