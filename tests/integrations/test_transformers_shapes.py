"""Models that run for their shapes alone: on the meta device, and under torch's FakeTensorMode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from transformers_models import EVERY, made, padded, tokens

import sparsering as sr
from sparsering.integrations import transformers as hf

SCOPES = {"fake": FakeTensorMode, "meta": lambda: torch.device("meta")}
# transformers itself cannot run these without numbers, of experts, initial weights and masks
NOT_BY_EAGER = {("modernbert", "fake"), ("vit", "fake"), ("gpt-oss", "fake"), ("gpt-oss", "meta")}
NOT_MASKED_BY_EAGER = {("bert", "meta"), ("modernbert", "meta"), ("t5", "meta")}
FAST = ("llama", "mistral", "t5", "bert")
CASES = [
    pytest.param(family, scope, mask, marks=[] if family in FAST else pytest.mark.slow)
    for family in EVERY
    for scope in SCOPES
    for mask in (False, True)
    if (family, scope) not in (NOT_BY_EAGER | NOT_MASKED_BY_EAGER if mask else NOT_BY_EAGER)
]
WINDOW = sr.SlidingWindow(4) | sr.GlobalTokens(2, rows=False)


def shapes_of(model, scope, mask: bool):
    """Returns the shapes of the result and of the gradients, of a model made anew in the scope."""
    with scope:
        model.config.pad_token_id = None  # else transformers looks for padding among the tokens
        model = type(model)._from_config(model.config)
        if model.config.model_type == "vit":
            inputs = {"pixel_values": torch.zeros(2, 3, 12, 12)}
        else:
            inputs = {"input_ids": torch.zeros(2, 13, dtype=torch.int64)}
            if model.config.is_encoder_decoder:
                inputs["decoder_input_ids"] = inputs["input_ids"]
            if mask:
                inputs["attention_mask"] = torch.ones(2, 13, dtype=torch.int64)
        out = model(**inputs)[0]
        out.sum().backward()
    grads = {name: x.grad.shape for name, x in model.named_parameters() if x.grad is not None}
    return out.shape, grads


@pytest.mark.parametrize(("family", "scope", "mask"), CASES)
def test_shapes_are_those_of_eager(family, scope, mask):
    model = made(family)
    wanted = shapes_of(model, SCOPES[scope](), mask)
    model.set_attn_implementation("sparsering")
    assert shapes_of(model, SCOPES[scope](), mask) == wanted
    assert wanted[0][:2] == ((2, 13) if family != "vit" else (2, 10)) and wanted[1]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", ["mistral", "llama4", "gpt2"])
def test_shapes_under_a_pattern_of_the_caller(family, scope):
    model = made(family)
    wanted = shapes_of(model, SCOPES[scope](), True)
    hf.apply(model, WINDOW)
    assert shapes_of(model, SCOPES[scope](), True) == wanted


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_shapes_under_a_mask_of_all_pairs(scope, dtype):
    model = made("llama", "sparsering")
    with SCOPES[scope]():
        model = type(model)._from_config(model.config)
        mask = torch.ones(1, 1, 12, 12, dtype=dtype)
        out = model(torch.zeros(1, 12, dtype=torch.int64), attention_mask=mask)
        assert out.logits.shape == (1, 12, 61)


def test_a_tracer_that_would_lose_padding_still_raises():
    """Its graph gets numbers later, so nothing may be decided while it is recorded."""
    model, ids = made("llama", "sparsering"), tokens()
    options = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    traced = make_fx(lambda mask: model(ids, attention_mask=mask).logits, **options)
    with pytest.raises(GuardOnDataDependentSymNode):
        traced(padded("left"))
