"""Pictures are PNG files of what they are given."""

import io

import pytest
import torch
from matplotlib.image import imread

import sparsering as sr
from benchmarks.plots import kept_png, loss_png, patterns_png
from benchmarks.report.traffic import traffic_png
from sparsering.layouts.drawing import picture


def test_pictures_are_png():
    signature = b"\x89PNG\r\n\x1a\n"
    records = [{"step": 0, "validation_loss": 5.0}, {"step": 1, "loss": 4.0}]
    assert loss_png(records, {"bigram": 2.0}).startswith(signature)
    pattern = sr.LongNet((16, 64), (1, 4)) & sr.Causal()
    assert kept_png(pattern, (40, 64, 70), num_heads=2).startswith(signature)


@pytest.mark.parametrize("pattern", [sr.Causal(), sr.Dilated(64, 4), sr.SlidingWindow(3, 60)])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_picture_shows_each_pair(pattern, heads):
    layout = pattern.layout(64, num_heads=2, block_size=16)
    image = torch.tensor(imread(io.BytesIO(picture(layout, heads))))
    assert image.shape == (64 * 8 + 2, heads * (64 * 8 + 2), 3)
    dense = pattern.to_dense(64, num_heads=2).expand(2, 64, 64)
    for head, panel in enumerate(image.chunk(heads, 1)):
        inside = panel[1:-1, 1:-1]
        assert (panel[0] < 1).all() and (panel[:, 0] < 1).all()  # a frame
        dark = (inside[..., 0] < 0.5).view(64, 8, 64, 8)
        assert torch.equal(dark, dense[head].bool()[:, None, :, None].expand(64, 8, 64, 8))


def test_a_large_picture_is_small_and_keeps_rare_pairs():
    layout = (sr.GlobalTokens(1) | sr.SlidingWindow(1)).layout(1 << 16)
    image = torch.tensor(imread(io.BytesIO(picture(layout))))
    assert image.shape[0] <= 514
    assert (image[1:-1, 1, 0] < 0.9).all() and (image[1, 1:-1, 0] < 0.9).all()
    assert (image[1:-1, 1:-1, 0] == 1).float().mean() > 0.9


def test_traffic_is_drawn():
    tokens = torch.tensor([[0, 5], [7, 0]])
    assert traffic_png([("two ranks", tokens, 512)]).startswith(b"\x89PNG")
    assert traffic_png([("nothing", torch.zeros(12, 12, dtype=torch.int64), 512)])


def test_patterns_are_drawn_side_by_side():
    assert patterns_png([("one", sr.Causal(), 64), ("two", sr.Full(), 64)], columns=2)
