"""Questions about lengths that no machine lays out are refused, or answered, within a second."""

import time

import pytest

import sparsering as sr
from sparsering.cli import main
from sparsering.distributed import RingPlan
from sparsering.layouts import compile as compiler
from sparsering.layouts.tiles import MOST_TILES, Grid
from sparsering.planning.fit import choose_batch_size, longest_sequence
from sparsering.planning.proposals import propose
from sparsering.plots.attended import pattern_image

LENGTHS = (10**11, 10**15, (1 << 53) - 1)
CAUSAL, WINDOW = sr.Causal(), sr.SlidingWindow(1023) & sr.Causal()
DILATED = sr.LongNet((2048, 32768), (1, 8)) & sr.Causal()
RANDOM = sr.RandomBlocks(0.1, 128)
REFUSED = {
    "layout, causal": lambda n: CAUSAL.layout(n),
    "layout, window": lambda n: WINDOW.layout(n),
    "layout, LongNet": lambda n: DILATED.layout(n),
    "layout, random": lambda n: RANDOM.layout(n),
    "layout, documents": lambda n: sr.Packed((n - 9, 9), CAUSAL).layout(n, block_size=64),
    "layout, one document": lambda n: sr.Documents((n,)).layout(n),
    "estimate": lambda n: sr.estimate(WINDOW, tokens=n),
    "estimate of a GPU": lambda n: sr.estimate(CAUSAL, tokens=n, machine="H200"),
    "estimate over ranks": lambda n: sr.estimate(CAUSAL, tokens=n, machine="H200", ranks=8),
    "choose_batch_size": lambda n: choose_batch_size(WINDOW, tokens=n, memory="4000TB"),
    "longest_sequence": lambda n: longest_sequence(WINDOW, multiple_of=n, memory="4000TB"),
    "propose": lambda n: propose(n),
    "RingPlan": lambda n: RingPlan.build(RANDOM, n, 8),
    "live_keys": lambda n: CAUSAL.live_keys(n),
    "live_keys of blocks": lambda n: RANDOM.live_keys(n // 2, max_length=n),
    "cache_bound": lambda n: WINDOW.cache_bound(max_length=n),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_length_beyond_is_refused_at_once(name, length):
    start = time.thread_time()
    with pytest.raises(
        ValueError, match=r"at most [\d,]+(,| )(tiles|pairs of tiles|keys|since)|2\^60"
    ):
        REFUSED[name](length)
    assert time.thread_time() - start < 1  # of this thread, whatever else runs


@pytest.mark.parametrize("length", LENGTHS)
def test_what_needs_no_list_of_tiles_is_answered(length):
    start = time.thread_time()
    assert WINDOW.cache_bound() == 1023
    assert len(WINDOW.live_keys(length)[0]) == 1023
    plan = RingPlan.build(WINDOW, length, 8)
    assert plan.tokens_received(1) == 1023
    assert time.thread_time() - start < 1  # of this thread, whatever else runs


@pytest.mark.parametrize("length", [10**9, 1 << 32])
@pytest.mark.parametrize(
    "pattern",
    [CAUSAL, sr.Full(), CAUSAL | sr.SlidingWindow(4, 4), sr.Dilated(1 << 30, 1), CAUSAL + WINDOW],
    ids=str,
)
def test_a_dense_layout_is_refused_before_its_tiles_are_listed(pattern, length):
    for block_size in (None, 128):
        start = time.thread_time()
        with pytest.raises(ValueError, match=r"34,359,738,368 pairs of tiles, got about [\d,]+ of"):
            pattern.layout(length, block_size=block_size)
        assert time.thread_time() - start < 1  # of this thread, whatever else runs


COMMANDS = (
    ["plan", "--tokens", "1e15"],
    ["plan", "SlidingWindow(1024) & Causal()", "--tokens", "1e15"],
    ["plan", "--tokens", "1e15", "--gpu", "H200", "--ranks", "8"],
    ["plan", "Causal()", "--tokens", "1e11", "--gpu", "H200", "--backward"],
    ["plot", "Causal()", "--length", str(10**9), "--out", "x.png"],
    ["plot", "SlidingWindow(9)", "--length", str(10**15), "--out", "x.png"],
    ["plot", "Causal()", "--length", str(10**8), "--out", "x.png"],
    ["plot", "LongNet((2048, 32768), (1, 8)) & Causal()", "--length", "60000000", "--out", "x.png"],
    ["plot", "SlidingWindow(9)", "--length", "60000000", "--out", "x.png"],
    ["plot", "RandomBlocks(0.1, 128)", "--length", "2000000", "--out", "x.png"],
    ["plan", "--tokens", "1e8"],
    ["plan", "--tokens", "1e9", "--gpu", "H200"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_refuse_in_one_line(command, capsys):
    start = time.thread_time()
    assert main(command) == 2
    assert time.thread_time() - start < 1  # of this thread, whatever else runs
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "pass fewer tokens" in printed


def test_a_long_sparse_drawing_is_drawn():
    pytest.importorskip("matplotlib")
    assert pattern_image(sr.SlidingWindow(9), 3 << 20).startswith(b"\x89PNG")


def test_try_refuses_more_tokens_than_memory_holds(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    assert main(["try", "--model", str(tmp_path), "--length", "1e15"]) == 2
    assert "--length must fit in memory" in capsys.readouterr().err


def test_limits_are_of_tiles_not_of_tokens(monkeypatch):
    """The last length that is laid out, and the first that is not."""
    monkeypatch.setattr("sparsering.layouts.tiles.MOST_TILES", 8)
    assert WINDOW.layout(8 * 64 + 63, block_size=64).num_blocks > 0
    with pytest.raises(ValueError, match=r"at most 8 tiles of .* got about 576 tokens"):
        WINDOW.layout(9 * 64, block_size=64)
    grid = Grid(4, 256)  # tiles of one residue class
    assert len(grid.axis([(0, 8 * 256)], 64, 0)) == 8
    monkeypatch.undo()
    assert MOST_TILES == 1 << 25


@pytest.mark.parametrize("pattern", [CAUSAL, WINDOW, DILATED, RANDOM, sr.Full()], ids=str)
def test_no_layout_within_the_limit_is_refused(pattern, monkeypatch):
    """A limit of exactly the pairs of tiles of a layout lets it pass."""
    blocks = pattern.layout(2048, block_size=16).num_blocks
    sr.layout_cache.clear()
    monkeypatch.setattr(compiler, "_PARTS", 32)
    monkeypatch.setattr(compiler, "_MOST_PAIRS_OF_TILES", 2 * blocks)
    assert pattern.layout(2048, block_size=16).num_blocks == blocks
    sr.layout_cache.clear()
    monkeypatch.setattr(compiler, "_MOST_PAIRS_OF_TILES", blocks // 4)
    with pytest.raises(ValueError, match="pairs of tiles"):
        pattern.layout(2048, block_size=16)
