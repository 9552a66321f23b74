"""The comparison "gigapath" tells what it measured, and refuses attention that is wrong."""

from importlib import import_module

import pytest
import torch

bench = import_module("benchmarks.comparisons.gigapath")  # whose name in the package is a function


def test_a_pass_of_few_tiles_has_an_error_beside_float64():
    steps = bench.encoded(40, 1, torch.get_num_threads(), True, 3)
    assert next(steps) is None and next(steps) is None
    ms, error = next(steps)
    assert ms > 0 and error is None
    *_, (ms, error) = bench.encoded(40, 1, torch.get_num_threads(), False, 3)
    assert ms > 0 and 0 < error < 1e-5


def test_attention_that_is_wrong_is_no_record(monkeypatch):
    attention = bench.attention
    monkeypatch.setattr(
        "sparsering.models.encoder.attention",
        lambda q, k, v, **options: attention(q, k.flip(2), v, **options),
    )
    with pytest.raises(RuntimeError, match="wrong"):
        list(bench.encoded(40, 1, torch.get_num_threads(), False, 3))


@pytest.mark.slow
def test_rows_have_times_and_peaks():
    row = bench._row(200, 1)
    assert row["tiles"] == 200 and row["error"] < 1e-5
    for name in ("forward_ms", "training_ms", "forward_peak_mb", "training_peak_mb"):
        assert row[name] > 0
    assert row["training_peak_mb"] > row["forward_peak_mb"]


def test_training_that_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(bench, "available_bytes", lambda: 10**9)
    asked = []

    def measured(work, tiles, layers, threads, trains, rows):
        asked.append(trains)
        return 2**20, (1.0, 1e-7)

    monkeypatch.setattr(bench, "peak_and_figures", measured)
    assert bench._row(10_000, 12)["training_ms"] is None and asked == [False]
    assert bench._row(10, 1)["training_ms"] == 1.0 and asked == [False, False, True]
    assert bench._row(10_001, 1)["training_ms"] is None and asked[3:] == [False]
