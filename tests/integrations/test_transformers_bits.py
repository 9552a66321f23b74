"""Greedy decoding's logits have the bits of one pass over the row, as far as torch's products do.

`torch.nn.functional.linear` may give a row other bits in another batch, so rows are multiplied here
one by one.
"""

from types import MethodType

import pytest
import torch
from torch import Tensor

import sparsering as sr
from sparsering.integrations import transformers as hf

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 32, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = [torch.mm(row[None], weight.T) for row in x.reshape(-1, x.shape[-1])]
    out = torch.cat(rows).view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def experts_row_by_row(self: torch.nn.Module, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Computes gpt-oss's experts for each token alone."""
    tokens = (x[i : i + 1] for i in range(len(x)))
    rest = zip(index.unbind(0), weight.unbind(0), strict=True)
    rows = [self.of_rows(row, i[None], w[None]) for row, (i, w) in zip(tokens, rest, strict=True)]
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_decoded_logits_are_those_of_one_pass(monkeypatch, kind: str, dtype: torch.dtype):
    hf.register()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | MODELS[kind]))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sparsering")
    model = model.to(dtype).eval()
    monkeypatch.setattr(torch.nn.functional, "linear", row_by_row)
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.of_rows = module.forward
            monkeypatch.setattr(module, "forward", MethodType(experts_row_by_row, module))
    ids, prompt = torch.randint(0, 97, (1, 70)), 60
    with torch.no_grad(), sr.batch_invariant():
        whole = model(ids).logits
        found = model(ids[:, :prompt], use_cache=True)
        logits, cache = [found.logits], found.past_key_values
        for i in range(prompt, ids.shape[1]):
            found = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            logits.append(found.logits)
    assert torch.equal(torch.cat(logits, 1), whole)
