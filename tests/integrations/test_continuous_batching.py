"""Continuous batching of transformers inside `hf.continuous_batching`: the tokens of `generate`."""

from contextlib import ExitStack

import pytest
import torch
from served_models import MODELS, alone, batched, made, prompts_of
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api, initialization

import sparsering as sr
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import paged


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate_one_by_one(name, monkeypatch):
    model, prompts = made(name), prompts_of((5, 33, 17, 3, 41))
    expected = [alone(model, prompt) for prompt in prompts]
    shapes = []
    attend = paged.attention_varlen

    def watched(query, key, *rest, **options):
        shapes.append((query.shape[0], key.shape[0]))
        return attend(query, key, *rest, **options)

    monkeypatch.setattr(paged, "attention_varlen", watched)
    with hf.continuous_batching(model):
        assert batched(model, prompts) == expected
    assert model.config._attn_implementation == "eager"
    assert max(queries for queries, _ in shapes) > 5  # prompts and single tokens in one call
    if name == "gemma3":  # a layer with a window reads 7 older keys of a request at most
        assert min(keys for _, keys in shapes[-4:]) <= 5 * 8 < max(keys for _, keys in shapes)


def test_a_request_has_the_bits_it_has_alone(monkeypatch):
    model, prompts = made("gemma3"), prompts_of((29, 12, 37))
    rows = {}
    attend = paged.attention_varlen

    def kept(query, key, value, of_queries, of_keys, pattern, **options):
        out = attend(query, key, value, of_queries, of_keys, pattern, **options)
        for first, end, begin, last in zip(
            of_queries, of_queries[1:], of_keys, of_keys[1:], strict=False
        ):
            part = (query[first:end], key[begin:last], value[begin:last])
            one = attend(*part, [0, end - first], [0, last - begin], pattern, **options)
            rows[len(rows)] = torch.equal(one, out[first:end])
        return out

    monkeypatch.setattr(paged, "attention_varlen", kept)
    with hf.continuous_batching(model):
        batched(model, prompts)
    assert len(rows) > 50 and all(rows.values())


def test_no_mask_is_made_and_pages_are_free_afterwards(monkeypatch):
    model = made("llama")
    caches = []
    built = paged_cache.PagedAttentionCache.__init__

    def noted(self, *arguments, **options):
        built(self, *arguments, **options)
        caches.append(self)

    monkeypatch.setattr(paged_cache.PagedAttentionCache, "__init__", noted)
    masks = []
    monkeypatch.setattr(
        "transformers.generation.continuous_batching.input_outputs.build_attention_mask",
        lambda **given: masks.append(given),
    )
    with hf.continuous_batching(model):
        batched(model, prompts_of((20, 20, 6)))
    assert len(caches) == 1 and not masks
    caches[0].evict_cached_blocks()  # kept for prompts that begin alike
    assert caches[0].compute_free_capacity() == 1.0


def test_what_is_replaced_in_transformers_is_put_back():
    parts = (continuous_api, initialization, paged_cache)
    names = ("is_flash_attention_requested", "group_layers_by_attn_type")
    before = [getattr(part, name, None) for part in parts for name in names]
    model, other = made("llama", "sdpa"), made("qwen3")
    with ExitStack() as stack, pytest.raises(RuntimeError, match="an error"):
        stack.enter_context(hf.continuous_batching(model))
        stack.enter_context(hf.continuous_batching(other))
        assert continuous_api.is_flash_attention_requested is not before[0]
        raise RuntimeError("an error")
    assert [getattr(part, name, None) for part in parts for name in names] == before
    assert model.config._attn_implementation == "sdpa"


def test_a_model_beside_keeps_its_own_attention():
    model, other = made("llama"), made("qwen3", "sdpa")
    prompt = prompts_of((14,))[0]
    with hf.continuous_batching(model):
        assert batched(other, [prompt]) == [alone(other, prompt)]


def test_a_call_without_pages_is_refused():
    model = made("llama")
    with (
        hf.continuous_batching(model),
        pytest.raises(NotImplementedError, match=r"a call without a paged cache.*generate_batch"),
    ):
        model(torch.tensor([[1, 2, 3]]))


def test_a_pattern_of_apply_is_followed():
    model, prompts = made("llama", "sdpa"), prompts_of((37, 8, 21))
    hf.apply(model, sr.SlidingWindow(5) | sr.GlobalTokens(2, rows=False))
    expected = [alone(model, prompt) for prompt in prompts]
    with hf.continuous_batching(model):
        assert batched(model, prompts) == expected
    assert model.config._attn_implementation == "sparsering"
    plain = made("llama")
    assert [alone(plain, prompt) for prompt in prompts] != expected  # the pattern tells


def test_patterns_and_layers_that_cannot_be_served_are_refused_before_anything_changes():
    model = made("gemma3", "sdpa")
    hf.apply(model, {"sliding_attention": sr.SlidingWindow(20)})
    with (
        pytest.raises(NotImplementedError, match=r"got SlidingWindow\(20.*in layer 0, of sliding"),
        hf.continuous_batching(model),
    ):
        pass
    used = made("llama", "sdpa")
    with (
        hf.using(used, sr.Causal()),
        pytest.raises(NotImplementedError, match=r"no block of hf\.using"),
        hf.continuous_batching(used),
    ):
        pass
    linear = made("qwen3", "sdpa")
    linear.config.layer_types = ["linear_attention", *["full_attention"] * 3]
    with (
        pytest.raises(NotImplementedError, match="'linear_attention' in layer 0"),
        hf.continuous_batching(linear),
    ):
        pass
    assert linear.config._attn_implementation == "sdpa"
