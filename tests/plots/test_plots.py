"""Pictures are image files of what they are given."""

import io

import pytest
import torch
from matplotlib.image import imread

import sparsering as sr
from sparsering.plots.attended import (
    draw_layouts,
    kept_image,
    pattern_image,
    patterns_image,
    shades,
)
from sparsering.plots.figure import new_figure
from sparsering.plots.losses import loss_image, speed_image
from sparsering.plots.traffic import traffic_image

SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml"}
MIXTURE = sr.LongNet((16, 64), (1, 4)) & sr.Causal()


@pytest.mark.parametrize("kind", SIGNATURES)
def test_pictures_are_files_of_their_kind(kind):
    records = [{"step": 0, "validation_loss": 5.0}, {"step": 1, "loss": 4.0}]
    tokens = torch.tensor([[0, 5], [7, 0]])
    panels = [("one", sr.Causal(), 64), ("two", MIXTURE, 64)]
    images = [
        loss_image(records, {"bigram": 2.0}, kind=kind),
        speed_image({"sparse": (1.0, 2.0), "dense": (3.0, 4.0)}, title="a step", kind=kind),
        kept_image(MIXTURE, (40, 64, 70), num_heads=2, kind=kind),
        traffic_image([("two ranks", tokens, 512)], kind=kind),
        traffic_image([("nothing", torch.zeros(12, 12, dtype=torch.int64), 512)], kind=kind),
        patterns_image(panels, columns=2, kind=kind),
        pattern_image(MIXTURE, 64, kind=kind),
    ]
    assert all(image.startswith(SIGNATURES[kind]) for image in images)
    assert images[-1] == pattern_image(MIXTURE, 64, kind=kind)


@pytest.mark.parametrize("pattern", [sr.Causal(), sr.Dilated(64, 4), sr.SlidingWindow(3, 60)])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_picture_shows_each_pair(pattern, heads):
    layout = pattern.layout(64, num_heads=heads, block_size=16)
    dense = pattern.to_dense(64, num_heads=heads).expand(heads, 64, 64)
    for head in range(heads):
        pixels = shades([layout], 512, head=head)
        assert pixels.shape == (64, 64, 3)
        assert torch.equal((pixels < 0.5).all(-1), dense[head].bool())
        assert torch.equal((pixels == 1).all(-1), ~dense[head].bool())


def test_branches_have_colors_and_pairs_of_two_are_darker():
    narrow, wide = sr.SlidingWindow(3, 3), sr.SlidingWindow(9, 9)
    pixels = shades([x.layout(64, block_size=16) for x in (narrow, wide)], 64)
    inside, beside = (x.to_dense(64)[0].bool() for x in (narrow, wide))
    both, one = pixels[inside], pixels[beside & ~inside]
    assert (both == both[0]).all() and (one == one[0]).all()
    assert (both[0] < one[0]).all() and (pixels[~beside] == 1).all()


def test_a_legend_of_many_branches_is_cut():
    mixture = sr.SlidingWindow(1) + sr.SlidingWindow(2)
    for radius in range(3, 11):
        mixture = mixture + sr.SlidingWindow(radius)
    text = pattern_image(mixture, 64, kind="svg").decode()
    assert "SlidingWindow(8): " in text and "SlidingWindow(9): " not in text
    assert "and 2 more branches" in text


@pytest.mark.parametrize(
    ("queries", "keys", "box", "ticks"), [(2048, 127, 1, 5), (2, 4096, 1, 3), (60, 120, None, 5)]
)
def test_rectangles_are_no_thin_strips(queries, keys, box, ticks):
    axes = new_figure(4, 4).add_subplot()
    draw_layouts(axes, [sr.Full().layout(queries, keys)])
    assert axes.get_box_aspect() == box
    assert (axes.get_aspect() == "auto") == (box == 1)
    assert len(axes.get_yticks()) == ticks
    assert axes.get_ylim() == (keys, keys - queries) and axes.get_xlim() == (0, keys)


def test_a_large_picture_is_small_and_keeps_rare_pairs():
    layout = (sr.GlobalTokens(1) | sr.SlidingWindow(1)).layout(1 << 16)
    pixels = shades([layout], 512)
    assert pixels.shape[0] <= 512
    assert (pixels[:, 0, 0] < 0.9).all() and (pixels[0, :, 0] < 0.9).all()
    assert (pixels[..., 0] == 1).float().mean() > 0.9


def test_a_picture_of_a_pattern_has_its_ink():
    image = torch.tensor(imread(io.BytesIO(pattern_image(sr.Full(), 64))))[..., :3]
    dark = (image - torch.tensor([8, 48, 107]) / 255).abs().amax(-1) < 0.01
    assert 0.4 < dark.float().mean() < 0.9  # the square of all pairs, within axes and a title
