"""The pooled branch with pooled queries, against its definition, one token at a time."""

import pytest
import torch
from oracles.attention_oracle import assert_close, dense_attention
from torch import Tensor

from sparsering.nn import SelectedAttention

E, H = 24, 4


def by_definition(layer: SelectedAttention, x: Tensor) -> Tensor:
    """The layer's output: full attention, since k covers all blocks, and the pooled branch."""
    size, stride = layer.pooled
    query, key, value = (
        p(x).unflatten(2, (-1, E // H)).transpose(1, 2)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    key, value = (y.repeat_interleave(H // layer.num_kv_heads, 1) for y in (key, value))
    length, scale = x.shape[1], (E // H) ** -0.5
    pairs = torch.ones(length, length, dtype=torch.bool)
    near, _ = dense_attention(query, key, value, pairs.tril() if layer.causal else pairs)
    starts = [s for s in range(0, length, stride) if s == 0 or s + size - stride < length]
    q, k, v = (
        torch.stack([y[:, :, s : s + size].mean(2) for s in starts], 2) for y in (query, key, value)
    )
    far = []
    for p in range(length):
        if layer.causal:
            latest = max((c for c, s in enumerate(starts) if s + size - 1 <= p), default=None)
        else:
            latest = min(p // stride, len(starts) - 1)
        if latest is None:
            far.append(torch.zeros_like(near[:, :, 0]))
            continue
        last = latest + 1 if layer.causal else len(starts)
        weight = (scale * q[:, :, latest, None] @ k[:, :, :last].mT).softmax(-1)
        far.append((weight @ v[:, :, :last])[:, :, 0])
    gates = layer.gate_proj(x).unflatten(2, (H, -1)).transpose(1, 2).sigmoid().unbind(-1)
    out = gates[0][..., None] * near + gates[1][..., None] * torch.stack(far, 2)
    return layer.out_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pooled", [(8, 8), (8, 3), (1, 1), (50, 20)], ids=str)
@pytest.mark.parametrize("length", [1, 7, 8, 40])
def test_outputs_and_gradients_are_those_of_the_definition(length, pooled, causal):
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "block_size": 16, "k": 4, "causal": causal}
    layer = SelectedAttention(E, H, pooled=pooled, pool_queries=True, **options).double()
    torch.nn.init.normal_(layer.gate_proj.weight)
    x = torch.randn(2, length, E, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for name, p in layer.named_parameters() if name != "pool_gate")]
    upstream = torch.randn(2, length, E, dtype=torch.float64)
    found, expected = layer(x), by_definition(layer, x)
    assert_close(found, expected, 1e-12)
    ours, theirs = (torch.autograd.grad((y * upstream).sum(), inputs) for y in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-10 * (1 + b.abs().max())


def test_a_token_does_not_see_later_ones():
    layer = SelectedAttention.hierarchical(E, H, pooled=(8, 4), pool_queries=True, k=2).double()
    x = torch.randn(1, 64, E, dtype=torch.float64, requires_grad=True)
    for token in (0, 6, 7, 8, 40):
        (grad,) = torch.autograd.grad(layer(x)[:, token].sum(), x)
        assert not grad[:, token + 1 :].any() and grad[:, token].any()


def test_it_needs_a_pooled_branch():
    with pytest.raises(ValueError, match="pool_queries=True needs windows"):
        SelectedAttention(E, H, pool_queries=True)
