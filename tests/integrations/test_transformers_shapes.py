"""Models that run for their shapes alone: on the meta device, and under torch's FakeTensorMode."""

import pytest
import torch
from indexed_caches import MINIMAX
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from transformers_families import tiny
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


def decoded(model, cache=None, padded: bool = False, steps: int = 20):
    """Runs a prompt and some steps; returns the shape of the last logits, and the cache."""
    shape = {"size": (2, 9), "dtype": torch.int64}
    mask = torch.ones(2, 9, dtype=torch.int64) if padded else None
    with torch.no_grad():
        out = model(torch.zeros(**shape), attention_mask=mask, past_key_values=cache)
        for _ in range(steps):
            if mask is not None:
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            last = torch.zeros(2, 1, dtype=torch.int64)
            out = model(last, attention_mask=mask, past_key_values=out.past_key_values)
    return out.logits.shape, out.past_key_values


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("family", "pattern"),
    [("llama", None), ("llama", sr.LongNet((4, 8), (1, 2))), ("mistral", sr.SlidingWindow(3))],
)
def test_steps_and_a_sparse_cache_keep_as_many_keys_as_with_numbers(family, pattern, scope, padded):
    model = made(family, "sparsering")
    if pattern is not None:
        hf.apply(model, pattern)
    shape, cache = decoded(model, hf.SparseCache(model), padded)
    wanted = shape, cache.kept
    with SCOPES[scope]():
        alone = type(model)._from_config(model.config)
        assert decoded(alone, None, padded)[0] == shape
        shape, cache = decoded(alone, hf.SparseCache(alone), padded)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices([0, 3])
    assert (shape, cache.kept) == wanted
    assert cache.layers[0].kv_cache.lengths == [29, 29]


@pytest.mark.parametrize("scope", SCOPES)
def test_keys_that_a_cache_dropped_are_told_by_shapes_too(scope):
    model = made("mistral", "sparsering")
    hf.apply(model, sr.SlidingWindow(9))
    with SCOPES[scope]():
        model = type(model)._from_config(model.config)
        with pytest.raises(ValueError, match="the cache has dropped the first"):
            decoded(model)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", ["deepseek_v32", MINIMAX])
def test_shapes_of_families_whose_indexers_choose_keys(family, scope, mask):
    model = tiny(family)
    layers = len(model.config.mlp_layer_types)
    model.config.mlp_layer_types = ["dense"] * layers  # experts cannot run without numbers
    model.set_attn_implementation("sparsering")
    with SCOPES[scope]():
        model = type(model)._from_config(model.config)
        model.config.pad_token_id = None
        ids = torch.zeros(2, 24, dtype=torch.int64)
        given = torch.ones(2, 24, dtype=torch.int64) if mask else None
        with torch.no_grad():
            out = model(ids, attention_mask=given)
            given = torch.ones(2, 25, dtype=torch.int64) if mask else None
            cache = out.past_key_values
            step = model(ids[:, :1], attention_mask=given, past_key_values=cache)
        assert out.logits.shape[:2] == (2, 24) and step.logits.shape[:2] == (2, 1)


def test_a_tracer_that_would_lose_padding_still_raises():
    """Its graph gets numbers later, so nothing may be decided while it is recorded."""
    model, ids = made("llama", "sparsering"), tokens()
    options = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    traced = make_fx(lambda mask: model(ids, attention_mask=mask).logits, **options)
    with pytest.raises(GuardOnDataDependentSymNode):
        traced(padded("left"))
