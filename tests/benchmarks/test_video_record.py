"""The ways of the benchmark of a video decoder compute the same, on a small grid."""

import pytest
import torch

pytest.importorskip("diffusers")

from benchmarks import video


@pytest.mark.parametrize("way", video.WAYS)
def test_each_way_is_exact(way, monkeypatch):
    monkeypatch.setattr(video, "BOX", (5, 4, 6))
    tokens = video.tokens_of((11, 12, 13))
    assert video.error_of(video.step(video.attention_of(way), tokens, False), tokens) < 1e-5


def test_errors_are_found():
    tokens = video.tokens_of((11, 12, 13))
    out = video.step(video.attention_of("sparsering"), tokens, False)
    out[0, 0, 0, 0, 0] += 1e-3 * out.abs().max()
    assert video.error_of(out, tokens) > 5e-4


def test_gradients_of_both_ways_are_equal():
    grads = []
    for way in ("sparsering", "sdpa in boxes"):
        module, tokens = video.attention_of(way), video.tokens_of((11, 11, 12))
        video.step(module, tokens, True)
        grads.append([tokens.grad, module.to_k.weight.grad])
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()
        assert torch.count_nonzero(b)
