"""The ways to second derivatives that the error and docs/troubleshooting.md name, by float64."""

from functools import partial

import pytest
import torch

import sparsering as sr
from sparsering.models import LongNetEncoder, LongNetLM
from sparsering.nn import MultiheadAttention

NEAR = sr.SlidingWindow(3) & sr.Causal()


def second(call, x):
    """Returns the gradient of the squared gradient of a call's squared result."""
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def second_by_differences(call, x, step=1e-5):
    """The same, 2 H g, from gradients alone: by central differences, as the page says."""

    def gradient(at):
        at = at.detach().requires_grad_()
        return torch.autograd.grad(call(at).square().sum(), at)[0]

    slope = gradient(x)
    return (gradient(x + step * slope) - gradient(x - step * slope)) / step


def refused(call, x):
    message = "backend='reference'.*need_weights=True.*docs/troubleshooting.md"
    with pytest.raises(NotImplementedError, match=message):
        second(call, x)


def test_multihead_attention_with_its_weights():
    layer = MultiheadAttention(16, 2, batch_first=True, pattern=NEAR).double()
    x = 0.3 * torch.randn(2, 12, 16, dtype=torch.float64)
    refused(lambda x: layer(x, x, x, need_weights=False)[0], x)
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True).double()
    theirs.load_state_dict(layer.state_dict())
    hidden = NEAR.to_dense(12)[0] == 0
    expected = second(lambda x: theirs(x, x, x, attn_mask=hidden)[0], x)
    found = second(lambda x: layer(x, x, x, need_weights=True)[0], x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    about = second_by_differences(lambda x: layer(x, x, x, need_weights=False)[0], x)
    torch.testing.assert_close(about, expected, rtol=1e-5, atol=1e-6)


def test_an_encoder_that_attends_by_the_reference():
    model = LongNetEncoder(NEAR, width=16, num_layers=2, num_heads=2).double().eval()
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.2)
    x = torch.randn(1, 10, 16, dtype=torch.float64)
    refused(model, x)
    about = second_by_differences(model, x, step=1e-7)
    model.attend = partial(sr.attention, pattern=model.pattern, backend="reference")
    torch.testing.assert_close(second(model, x), about, rtol=1e-4, atol=1e-4 * about.abs().max())


def test_a_language_model_that_attends_by_the_reference():
    model = LongNetLM(NEAR, width=16, num_layers=1, num_heads=2, vocab_size=8).double()
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.2)
    ids = torch.arange(10)[None] % 8
    weights = [x for x in model.parameters() if x.dim() == 2]

    def penalty():
        loss = model(ids).logsumexp(-1).sum()
        first = torch.autograd.grad(loss, weights, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), weights[0])[0]

    with pytest.raises(NotImplementedError, match="second derivatives"):
        penalty()
    model.attend = partial(sr.attention, pattern=model.pattern, backend="reference")
    assert penalty().isfinite().all() and penalty().abs().max() > 0
