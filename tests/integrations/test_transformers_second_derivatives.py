"""Second derivatives of a model of transformers, as docs/troubleshooting.md says: by "eager"."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsering as sr
from sparsering.integrations import transformers as hf

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}


@pytest.mark.parametrize("pattern", [None, sr.SlidingWindow(3)], ids=["own mask", "pattern"])
def test_eager_attention_has_them(pattern):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)).double().eval()
    hf.apply(model, {} if pattern is None else pattern)
    x = torch.randn(1, 12, 16, dtype=torch.float64).requires_grad_()
    pairs = (sr.Causal() & (sr.Full() if pattern is None else pattern)).to_dense(12)[0] > 0
    mask = torch.zeros(1, 1, 12, 12, dtype=x.dtype).masked_fill(~pairs, -torch.inf)

    def first(**options):
        out = model(inputs_embeds=x, use_cache=False, **options).logits
        return torch.autograd.grad(out.square().mean(), x, create_graph=True)[0]

    own = first()
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(own.square().sum(), x)
    hf.apply(model, {})
    model.set_attn_implementation("eager")
    eager = first(attention_mask=mask)
    torch.testing.assert_close(eager, own, rtol=1e-5, atol=1e-6 * own.abs().max().item())
    (second,) = torch.autograd.grad(eager.square().sum(), x)
    assert second.isfinite().all() and second.abs().max() > 0
