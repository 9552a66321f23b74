"""Layers and models have the second derivatives of dense attention, in float64."""

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


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention(weights):
    layer = MultiheadAttention(16, 2, batch_first=True, pattern=NEAR).double()
    x = 0.3 * torch.randn(2, 12, 16, dtype=torch.float64)
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True).double()
    theirs.load_state_dict(layer.state_dict())
    hidden = NEAR.to_dense(12)[0] == 0
    expected = second(lambda x: theirs(x, x, x, attn_mask=hidden)[0], x)
    found = second(lambda x: layer(x, x, x, need_weights=weights)[0], x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`?torch.jit.script`? is deprecated")
@pytest.mark.parametrize("kind", ["encoder", "language model"])
def test_models(kind):
    if kind == "encoder":
        model = LongNetEncoder(NEAR, width=16, num_layers=2, num_heads=2).double().eval()
        data = torch.randn(1, 10, 16, dtype=torch.float64)
    else:
        model = LongNetLM(NEAR, width=16, num_layers=1, num_heads=2, vocab_size=8).double()
        data = torch.arange(10)[None] % 8
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.2)
    weights = [x for x in model.parameters() if x.dim() == 2]

    def penalty():
        first = torch.autograd.grad(model(data).logsumexp(-1).sum(), weights, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), weights)

    found = penalty()
    model.attend = lambda *x, **more: sr.attention(*x, model.pattern, **more, backend="reference")
    for a, b in zip(found, penalty(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())
