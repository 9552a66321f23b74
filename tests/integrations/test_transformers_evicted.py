"""Caches whose layers keep unlike numbers of keys, as kvpress leaves them: as sdpa decodes them.

`beside_kvpress.py` runs kvpress itself.
"""

import sys
from types import ModuleType

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sparsering as sr
from sparsering.integrations import transformers as hf

hf.register()
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
PROMPT, NEW = torch.randint(3, 128, (2, 40)), torch.randint(3, 128, (2, 6))


def model_of(name, kind=LlamaForCausalLM, config=LlamaConfig, **rest):
    torch.manual_seed(0)
    return kind._from_config(config(**SIZE, **rest), attn_implementation=name).eval()


def evicted(model, kept, **rest):
    """Runs the prompt, then drops all but the last `kept[i]` keys of layer i."""
    cache = DynamicCache()
    model(PROMPT, past_key_values=cache, **rest)
    for layer, keep in zip(cache.layers, kept, strict=True):
        layer.keys, layer.values = layer.keys[:, :, -keep:], layer.values[:, :, -keep:]
    return cache


def decoded(model, cache, chunk):
    outs = []
    for i in range(0, 6, chunk):
        at = torch.arange(40 + i, 40 + i + chunk)[None]
        outs.append(model(NEW[:, i : i + chunk], past_key_values=cache, position_ids=at).logits)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("kept", [(20, 20, 20), (30, 20, 10), (10, 20, 30), (20, 10, 20)], ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 6])
@torch.no_grad()
def test_each_layer_sees_what_it_kept(kept, chunk):
    """Sdpa refuses chunks of such a cache, so they are compared with its single tokens."""
    wanted = decoded(own := model_of("sdpa"), evicted(own, kept), 1)
    actual = decoded(own := model_of("sparsering"), evicted(own, kept), chunk)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_goes_by_positions_is_refused_by_its_cause():
    windowed = model_of("sparsering", MistralForCausalLM, MistralConfig, sliding_window=8)
    cache = DynamicCache()
    windowed(PROMPT, past_key_values=cache)
    for layer, keep in zip(cache.layers, (30, 20, 10), strict=True):
        layer.keys, layer.values = layer.keys[:, :, -keep:], layer.values[:, :, -keep:]
    with pytest.raises(NotImplementedError, match="keys were dropped by layer; the model's mask"):
        windowed(NEW[:, :1], past_key_values=cache)
    plain = model_of("sparsering")
    valid = torch.ones(2, 40).long()
    valid[0, :5] = 0
    cache = evicted(plain, (30, 20, 10), attention_mask=valid)
    valid = torch.cat((valid, torch.ones(2, 1).long()), 1)
    with pytest.raises(NotImplementedError, match="layer 1 holds 20 keys and the mask is for 30"):
        plain(NEW[:, :1], past_key_values=cache, attention_mask=valid)


@torch.no_grad()
def test_a_layer_with_a_pattern_is_refused_by_its_cause():
    model = model_of("sparsering")
    cache = evicted(model, (30, 20, 10))
    hf.apply(model, {1: sr.SlidingWindow(7)})
    with pytest.raises(NotImplementedError, match=r"layer 1 holds 21 keys .*=SparseCache\(model\)"):
        model(NEW[:, :1], past_key_values=cache)


@torch.no_grad()
def test_keys_that_no_cache_announced_are_refused_as_before():
    """A layer with keys of its own beside those of its cache is no eviction."""
    model = model_of("sparsering")
    cache = evicted(model, (20, 20, 20))
    cache.layers[1].get_seq_length = lambda: 20  # it has 19
    cache.layers[1].keys = cache.layers[1].keys[:, :, 1:]
    cache.layers[1].values = cache.layers[1].values[:, :, 1:]
    with pytest.raises(
        ValueError, match="the model's mask is for 1 queries of 21 keys, got 1 of 20"
    ):
        model(NEW[:, :1], past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_heads_of_each_layer_have_patterns_of_their_own(cached):
    """DuoAttention by layer: each layer says which of its heads see everything."""
    near = sr.SlidingWindow(7) | sr.GlobalTokens(2, rows=False)
    maps = [sr.PerHead(x) for x in ((sr.Full(), near), (near, near), (near, sr.Full()))]
    own = model_of("sparsering")
    hf.apply(own, dict(enumerate(maps)))
    wanted = own(torch.cat((PROMPT, NEW), 1), use_cache=False).logits[:, 40:]
    cache = hf.SparseCache(own) if cached else DynamicCache()
    own(PROMPT, past_key_values=cache)
    out = [own(NEW[:, i : i + 1], past_key_values=cache).logits for i in range(6)]
    torch.testing.assert_close(torch.cat(out, 1), wanted, rtol=0, atol=1e-5)
    if cached:
        held = [[len(x.kv_cache.positions(head)) for head in range(2)] for x in cache.layers]
        near = 9 + 6  # after the prompt, and 6 tokens in the page
        assert held == [[46, near], [near, near], [near, 46]]


@torch.no_grad()
@pytest.mark.parametrize("store", ["int8", "fp8"])
def test_a_sparse_cache_stores_8_bits(store):
    own = model_of("sparsering")
    wanted = own(torch.cat((PROMPT, NEW), 1), use_cache=False).logits[:, 40:]
    exact, rounded = hf.SparseCache(own), hf.SparseCache(own, store=store)
    for cache in (exact, rounded):
        own(PROMPT, past_key_values=cache)
        out = [own(NEW[:, i : i + 1], past_key_values=cache).logits for i in range(6)]
        error = float((torch.cat(out, 1) - wanted).abs().max() / wanted.abs().max())
        assert error < (1e-5 if cache is exact else 0.05)
    assert error > 1e-5
    assert rounded.nbytes < 0.4 * exact.nbytes  # of 16 channels a scale is a fifth
    with pytest.raises(ValueError, match='store must be "int8", "fp8" or None'):
        hf.SparseCache(own, store="int4")


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False], ids=["register first", "kvpress first"])
def test_what_kvpress_wraps_is_wrapped_whichever_is_first(first, monkeypatch):
    """Keys that single heads dropped are hidden in a wrapper of each registered attention."""
    own, calls = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), []

    def attention_patch(function):
        def wrapper(*arguments, **keywords):
            calls.append(1)
            return function(*arguments, **keywords)

        return wrapper

    package = ModuleType("kvpress.attention_patch")
    package.attention_patch = attention_patch
    try:
        if first:  # as the import of kvpress does
            ALL_ATTENTION_FUNCTIONS["sparsering"] = attention_patch(
                ALL_ATTENTION_FUNCTIONS["sparsering"]
            )
        monkeypatch.setitem(sys.modules, "kvpress.attention_patch", package)
        hf.register()
        hf.register()
        model_of("sparsering")(PROMPT)
        assert len(calls) == 3  # once in each layer
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.update(own)
