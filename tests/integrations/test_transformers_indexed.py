"""Models whose indexers choose keys for each query: exact under "sparsering", as under eager."""

import pytest
import torch
from sharing_families import InFloat64
from torch import Tensor
from transformers_families import tiny

import sparsering as sr
from sparsering.integrations import transformers as hf

BY_TOKEN = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
FAMILIES = (*BY_TOKEN, "minimax_m3_vl_text")
TOKENS = 24
PADDED = {
    "no padding": slice(0, 0),
    "left padding": slice(0, 7),
    "right padding": slice(TOKENS - 5, TOKENS),
}


def batch(padding: str = "no padding") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 61, (2, TOKENS), generator=generator)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, PADDED[padding]] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def run(model, implementation: str, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns the logits of real tokens, and the gradients of their sum of squares."""
    hf.register()
    model.set_attn_implementation(implementation)
    logits = model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()]
    used = [x for x in model.parameters() if x.requires_grad]
    grads = torch.autograd.grad(logits.square().sum(), used, allow_unused=True)
    return logits.detach(), [torch.zeros(()) if x is None else x for x in grads]


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_eager(family, padding, monkeypatch):
    chosen = []
    listed = sr.integrations.transformers.attention.SelectedBlocks
    monkeypatch.setattr(
        "sparsering.integrations.transformers.attention.SelectedBlocks",
        lambda *arguments: chosen.append(arguments) or listed(*arguments),
    )
    with InFloat64():
        model = tiny(family).train(False)
        inputs = batch(padding)
        wanted, by_eager = run(model, "eager", inputs)
        got, grads = run(model, "sparsering", inputs)
        assert chosen and all(x[0].shape[-1] * x[1] < TOKENS for x in chosen)  # the indexer chose
        assert wanted.std() > 1e-3
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
        for a, b in zip(grads, by_eager, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_the_family_s_own_cache(family):
    # MiniMax-M3 compares positions, which skip padding, with places of keys: a query behind padding
    # may choose padding alone, and eager then averages all keys
    padding = "left padding" if family in BY_TOKEN else "no padding"
    with InFloat64(), torch.no_grad():
        model = tiny(family).eval()
        tokens = {}
        for implementation in ("eager", "sparsering"):
            hf.register()
            model.set_attn_implementation(implementation)
            inputs = batch(padding)
            tokens[implementation] = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert torch.equal(*tokens.values())


def test_what_a_choice_of_keys_does_not_go_with_is_refused():
    with InFloat64(), torch.no_grad():
        model = tiny("deepseek_v32").eval()
        hf.register()
        model.set_attn_implementation("sparsering")
        with (
            hf.using(model, sr.Causal()),
            pytest.raises(NotImplementedError, match="indexer chooses keys needs the model's own"),
        ):
            model(**batch(), use_cache=False)
