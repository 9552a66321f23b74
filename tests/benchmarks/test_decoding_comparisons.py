"""The comparison "decoding" tells what it measured, and refuses a cache that is wrong."""

import pytest
import torch

import sparsering as sr
from benchmarks.comparisons.decoding import PAGE, of_many_lengths, prompts_in_parts, tokens_after
from sparsering.decoding import KVCache

WINDOW = sr.Causal() & sr.SlidingWindow(63)
LONGNET = sr.LongNet((64, 256), (1, 4)) & sr.Causal()


def test_tokens_after_some_lengths_are_told_beside_dense():
    rows = tokens_after([256, 512], 2, torch.float32, {"window": WINDOW, "longnet": LONGNET}, 1)
    for length in (256, 512):
        of_length = {(r["backend"], r["pattern"]): r for r in rows if r["tokens"] == length}
        dense = of_length.pop(("dense", "Causal()"))
        assert dense["bytes"] == 2 * 2 * 8 * length * 64 * 4 and dense["pairs"] == length
        assert len(of_length) == 6
        window, longnet = (of_length["cache", name] for name in ("window", "longnet"))
        assert (window["pairs"], window["bound"]) == (64, 63)
        for row in (window, longnet):
            assert row["bound"] <= row["kept"] <= row["bound"] + PAGE
        everything = of_length["cache", "Causal()"]
        assert everything["bound"] is None and everything["kept"] == length
        for row in (dense, *of_length.values()):
            assert row["error"] < 2e-6
            assert 0 < row["ms"] <= row["slowest_ms"] and 0 < row["mean_ms"] <= row["slowest_ms"]
            assert row["tokens_per_second"] == pytest.approx(2e3 / row["mean_ms"])


@pytest.mark.parametrize("pattern", [WINDOW, LONGNET])
def test_a_cache_of_many_lengths_is_told_beside_a_cache_each(pattern):
    together, each = of_many_lengths((3, 200, 70), torch.bfloat16, "", pattern, 1)
    assert each["times_separate"] == 1 and together["times_separate"] > 0
    assert (together["batch"], together["shortest"], together["longest"]) == (3, 3, 200)
    assert 0 < together["error"] < 0.02 and 0 < each["error"] < 0.02


def test_prompts_in_parts_are_told_beside_whole_ones():
    rows = prompts_in_parts((50, 300), torch.float32, "", LONGNET, 2)
    assert [(r["part"], r["tokens"]) for r in rows] == [(50, 300), (300, 300)]
    assert rows[1]["times_whole"] == 1
    assert all(row["error"] < 2e-6 for row in rows)


@pytest.mark.parametrize("fault", ["zeros", "another head's keys", "no number"])
def test_a_cache_that_is_wrong_is_no_record(monkeypatch, fault):
    attend = KVCache.attend

    def faulty(self, query, key, value, **options):
        if fault == "another head's keys":
            return attend(self, query, key.roll(1, 1), value, **options)
        out = attend(self, query, key, value, **options)
        return out * (0 if fault == "zeros" else torch.nan)

    monkeypatch.setattr(KVCache, "attend", faulty)
    with pytest.raises(RuntimeError, match="the timed function"):
        prompts_in_parts((64,), torch.float32, "", WINDOW, 1)
    with pytest.raises(RuntimeError, match="the timed function"):
        tokens_after([256], 1, torch.float32, {"window": WINDOW}, 1)
