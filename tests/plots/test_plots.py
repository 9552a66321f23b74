"""Pictures are PNG files of what they are given."""

import pytest
import torch

import sparsering as sr
from benchmarks.plots import kept_png, loss_png, patterns_png
from benchmarks.report.traffic import traffic_png
from sparsering.plots import pattern_png


def test_pictures_are_png():
    signature = b"\x89PNG\r\n\x1a\n"
    assert pattern_png(sr.Causal(), 64, num_heads=2, block_size=16).startswith(signature)
    records = [{"step": 0, "validation_loss": 5.0}, {"step": 1, "loss": 4.0}]
    assert loss_png(records, {"bigram": 2.0}).startswith(signature)
    pattern = sr.LongNet((16, 64), (1, 4)) & sr.Causal()
    assert kept_png(pattern, (40, 64, 70), num_heads=2).startswith(signature)


def test_a_drawing_needs_a_length():
    with pytest.raises(ValueError, match="at least 1 token"):
        pattern_png(sr.Causal(), 0)


def test_traffic_is_drawn():
    tokens = torch.tensor([[0, 5], [7, 0]])
    assert traffic_png([("two ranks", tokens, 512)]).startswith(b"\x89PNG")
    assert traffic_png([("nothing", torch.zeros(12, 12, dtype=torch.int64), 512)])


def test_patterns_are_drawn_side_by_side():
    assert patterns_png([("one", sr.Causal(), 64), ("two", sr.Full(), 64)], columns=2)
