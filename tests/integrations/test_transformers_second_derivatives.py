"""Second derivatives of a model of transformers are those of its eager attention."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsering as sr
from sparsering.integrations import transformers as hf

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}


@pytest.mark.parametrize("pattern", [None, sr.SlidingWindow(3)], ids=["own mask", "pattern"])
def test_those_of_eager_attention(pattern):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)).double().eval()
    hf.apply(model, {} if pattern is None else pattern)
    x = torch.randn(1, 12, 16, dtype=torch.float64).requires_grad_()
    pairs = (sr.Causal() & (sr.Full() if pattern is None else pattern)).to_dense(12)[0] > 0
    mask = torch.zeros(1, 1, 12, 12, dtype=x.dtype).masked_fill(~pairs, -torch.inf)

    def second(**options):
        out = model(inputs_embeds=x, use_cache=False, **options).logits
        (first,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    own = second()
    hf.apply(model, {})
    model.set_attn_implementation("eager")
    eager = second(attention_mask=mask)
    # eager softmax runs in float32
    torch.testing.assert_close(eager, own, rtol=1e-4, atol=1e-5 * own.abs().max().item())
