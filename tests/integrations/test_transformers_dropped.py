"""Keys dropped by hand from all layers alike, beside a pattern of `apply`: refused, never guessed.

All that transformers itself does to a cache goes on as before.
"""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import EncoderDecoderCache, QuantizedLayer

import sparsering as sr
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import override

hf.register()
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma": (Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 24}),
}
PATTERN = sr.SlidingWindow(7) | (sr.GlobalTokens(2) & sr.Causal())
PROMPT, NEW = 40, 6
REFUSED = r"the cache holds 20 keys of 40 tokens, so keys were dropped, and .*=SparseCache\(model\)"


def model_of(family="llama", pattern=PATTERN):
    torch.manual_seed(0)
    cls, config, rest = FAMILIES[family]
    model = cls(config(**SIZES, **rest, pad_token_id=0, eos_token_id=None)).eval()
    for x in model.parameters():
        x.data *= 3 if x.dim() > 1 else 1
    model.set_attn_implementation("sparsering")
    if pattern is not None:
        kinds = {"full_attention": pattern} if family == "gemma" else pattern
        hf.apply(model, kinds)
    return model


def tokens(batch=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 128, (batch, PROMPT + NEW), generator=generator)


@torch.no_grad()
def prompted(model, cache=None, **rest):
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(tokens()[:, :PROMPT], past_key_values=cache, **rest)
    return cache


def drop(cache, kept=None):
    kept = torch.arange(0, PROMPT, 2) if kept is None else kept
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]


@torch.no_grad()
def decoded(model, cache, chunk=1, begin=PROMPT, explicit=True, **rest):
    """Logits of the tokens from `begin` on, [2, n, vocabulary]."""
    outs = []
    for i in range(begin, PROMPT + NEW, chunk):
        stop = min(i + chunk, PROMPT + NEW)
        ids = {"position_ids": torch.arange(i, stop).expand(2, -1)} if explicit else {}
        outs.append(model(tokens()[:, i:stop], past_key_values=cache, **ids, **rest).logits)
    return torch.cat(outs, 1)


@torch.no_grad()
def wanted(model, begin=PROMPT, **rest):
    return model(tokens(), use_cache=False, **rest).logits[:, begin:]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen"])
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(
    "kept", [range(0, 40, 2), range(20, 40), [*range(4), *range(24, 40)]], ids=str
)
def test_keys_that_all_layers_dropped_are_refused(family, explicit, chunk, kept):
    model = model_of(family)
    drop(cache := prompted(model), torch.tensor(list(kept)))
    with pytest.raises(NotImplementedError, match=REFUSED):
        decoded(model, cache, chunk, explicit=explicit)


@torch.no_grad()
def test_a_window_that_a_loop_keeps_by_hand_is_refused():
    """The cache has as many keys before each call, though each call adds one."""
    model, cache = model_of(), DynamicCache()
    with pytest.raises(NotImplementedError, match="the cache holds 8 keys of 9 tokens"):
        for i in range(PROMPT):
            model(tokens()[:, i : i + 1], past_key_values=cache)
            drop(cache, slice(-8, None))


@pytest.mark.parametrize("explicit", [True, False])
def test_keys_dropped_from_a_hybrid_model_are_refused(explicit):
    """Its windowed layers count the tokens themselves, and announce keys that are not there."""
    model = model_of("gemma")
    drop(cache := prompted(model), slice(-20, None))
    error = "the cache holds 20 keys of 40 tokens|the model's mask is for 1 queries of 24 keys"
    with pytest.raises((NotImplementedError, ValueError), match=error):
        decoded(model, cache, explicit=explicit)


@torch.no_grad()
def test_a_decoders_own_keys_are_refused_and_its_crops_taken():
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=128, **sizes)).eval()
    model.set_attn_implementation("sparsering")
    hf.apply(model, PATTERN)
    source = {"encoder_outputs": model.encoder(tokens()), "use_cache": True}
    expected = model(decoder_input_ids=tokens(), **{**source, "use_cache": False}).logits
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    model(decoder_input_ids=tokens()[:, :PROMPT], past_key_values=cache, **source)
    cache.crop(-5)
    for i in range(PROMPT - 5, PROMPT):
        row = tokens()[:, i : i + 1]
        out = model(decoder_input_ids=row, past_key_values=cache, **source).logits
        close(out, expected[:, i : i + 1])
    drop(cache.self_attention_cache)
    with pytest.raises(NotImplementedError, match=REFUSED):
        model(decoder_input_ids=tokens()[:, -1:], past_key_values=cache, **source)


class Quantized(QuantizedLayer):
    """Rounds nothing, since what a quantized layer counts does not depend on its rounding."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def cache_of(name, model):
    if name == "static":
        return StaticCache(model.config, max_cache_len=64)
    if name == "sparse":
        return hf.SparseCache(model)
    cache = DynamicCache(config=model.config)
    if name == "quantized":
        cache.layers = [Quantized(residual_length=8) for _ in cache.layers]
    return cache


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["dynamic", "static", "sparse", "quantized"])
@pytest.mark.parametrize("explicit", [True, False])
@torch.no_grad()
def test_every_kind_of_cache_goes_on(family, name, explicit):
    """With the prompt in chunks, then several tokens at once, then single ones."""
    if (family, name) == ("gemma", "quantized"):
        family = "llama"  # transformers gives windowed layers no such cache
    model = model_of(family)
    cache, outs, begin = cache_of(name, model), [], 0
    for stop in (17, 30, PROMPT, PROMPT + 3, *range(PROMPT + 4, PROMPT + NEW + 1)):
        ids = {"position_ids": torch.arange(begin, stop).expand(2, -1)} if explicit else {}
        outs.append(model(tokens()[:, begin:stop], past_key_values=cache, **ids).logits)
        begin = stop
    close(torch.cat(outs, 1), wanted(model, 0))


@pytest.mark.parametrize("explicit", [True, False, "columns"])
@pytest.mark.parametrize("known", [True, False], ids=["seen", "not seen"])
@torch.no_grad()
def test_left_padding_goes_on_and_its_drops_are_refused(explicit, known):
    """Position ids count from the first token, or columns; `known` caches saw the pattern."""
    model = model_of()
    valid = torch.ones(2, PROMPT + NEW).long()
    valid[0, :9] = 0
    ids = (valid.cumsum(1) - 1).clamp(min=0)
    if explicit == "columns":
        ids = torch.arange(PROMPT + NEW).expand(2, -1)
    given = {"position_ids": ids} if explicit else {}
    expected = model(tokens(), attention_mask=valid, use_cache=False, **given).logits[:, PROMPT:]
    cache = DynamicCache()
    part = {name: x[:, :PROMPT] for name, x in {**given, "attention_mask": valid}.items()}
    model(tokens()[:, :PROMPT], past_key_values=cache, **part)
    if not known:
        del cache._sparsering_seen
    dropped = copy.deepcopy(cache)
    outs = []
    for i in range(PROMPT, PROMPT + NEW):
        at = {name: x[:, i : i + 1] for name, x in given.items()}
        row, seen = tokens()[:, i : i + 1], valid[:, : i + 1]
        outs.append(model(row, past_key_values=cache, attention_mask=seen, **at).logits)
    close(torch.cat(outs, 1), expected)
    if known or explicit:
        drop(dropped)
        at = {name: x[:, PROMPT : PROMPT + 1] for name, x in given.items()}
        with pytest.raises(NotImplementedError, match=REFUSED):
            seen = valid[:, : PROMPT + 1]
            model(
                tokens()[:, PROMPT : PROMPT + 1], past_key_values=dropped, attention_mask=seen, **at
            )


@pytest.mark.parametrize("explicit", [True, False])
@torch.no_grad()
def test_crops_go_on(explicit):
    model = model_of()
    cache = prompted(model)
    for _ in range(3):
        cache.crop(-4)
        close(decoded(model, cache, 5, PROMPT - 4, explicit), wanted(model, PROMPT - 4))
        cache.crop(-NEW)
    drop(cache)
    cache.crop(-2)  # hides nothing
    with pytest.raises(NotImplementedError, match="the cache holds 18 keys of 38 tokens"):
        decoded(model, cache, begin=PROMPT - 2, explicit=explicit)


def test_last_tokens_removed_by_hand_need_positions():
    model = model_of()
    drop(cache := prompted(model), slice(0, PROMPT - 4))
    with pytest.raises(NotImplementedError, match=r"cache\.crop, or pass position_ids"):
        decoded(model, copy.deepcopy(cache), begin=PROMPT - 4, explicit=False)
    close(decoded(model, cache, begin=PROMPT - 4), wanted(model, PROMPT - 4))


@torch.no_grad()
def test_a_cache_filled_without_the_pattern():
    """Such as under `using`: nothing is known of it, so position ids decide in the first call."""
    whole = model_of()
    expected = wanted(whole)
    model = model_of()
    with hf.using(model, PATTERN):
        cache = prompted(model)
    assert not hasattr(cache, "_sparsering_seen")
    close(decoded(model, copy.deepcopy(cache)), expected)
    close(decoded(model, copy.deepcopy(cache), explicit=False), expected)
    drop(cache)
    with pytest.raises(NotImplementedError, match=REFUSED):
        decoded(model, cache)


@pytest.mark.parametrize("pattern", [None, sr.Full(), sr.Causal()], ids=str)
def test_what_needs_no_positions_sees_what_was_kept(pattern):
    model, dense = model_of(pattern=pattern), model_of(pattern=None)
    dense.set_attn_implementation("sdpa")
    drop(cache := prompted(model))
    drop(other := prompted(dense))
    close(decoded(model, cache), decoded(dense, other))


def test_a_step_reads_no_positions(monkeypatch):
    """They may be on a GPU, where reading them waits for it; a crop is known without them."""
    model = model_of()
    expected = wanted(model, PROMPT - 2)
    monkeypatch.setattr(override, "_tokens_by_positions", None)  # a call would raise
    cache = prompted(model)
    cache.crop(-2)
    close(decoded(model, cache, begin=PROMPT - 2), expected)


@torch.no_grad()
def test_positions_below_the_number_of_keys_go_on():
    """Behind packed documents; `hides_documents` warns of these."""
    model = model_of()
    ids = torch.cat((torch.arange(25), torch.arange(15)))[None]
    with pytest.warns(UserWarning, match="a cache hides them"):
        cache = prompted(model, position_ids=ids)
    del cache._sparsering_seen
    at = torch.tensor([[15]])
    out = model(tokens()[:, PROMPT : PROMPT + 1], past_key_values=cache, position_ids=at)
    assert out.logits.isfinite().all()
    assert cache._sparsering_seen == PROMPT + 1


@pytest.mark.parametrize("family", ["llama", "gemma"])
@torch.no_grad()
def test_generation_moves_caches_as_before(family):
    """Beams reorder and repeat a cache, drafts crop it, a prefix is copied: as without a cache."""
    model = model_of(family)
    prompt = {"input_ids": tokens(1)[:, :PROMPT], "attention_mask": torch.ones(1, PROMPT).long()}
    options = {"max_new_tokens": 8, "do_sample": False}
    greedy = model.generate(**prompt, **options, use_cache=False)
    assert torch.equal(model.generate(**prompt, **options), greedy)
    beams = model.generate(**prompt, **options, num_beams=3, use_cache=False)
    assert torch.equal(model.generate(**prompt, **options, num_beams=3), beams)
    for draft in ({"assistant_model": model_of(family)}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(**prompt, **options, **draft), greedy)
    prefix = DynamicCache(config=model.config)
    model(prompt["input_ids"][:, :20], past_key_values=prefix)
    for _ in range(2):
        cache = copy.deepcopy(prefix)
        assert torch.equal(model.generate(**prompt, **options, past_key_values=cache), greedy)


@torch.no_grad()
def test_a_compiled_step_goes_on():
    """It remembers nothing; the next call outside of it looks at its position ids."""
    model = model_of()
    expected = wanted(model)
    cache = prompted(model)
    step = torch.compile(model, backend="eager", dynamic=True)
    first = step(tokens()[:, PROMPT : PROMPT + 1], past_key_values=cache).logits
    close(first, expected[:, :1])
    assert cache._sparsering_seen == PROMPT
    close(decoded(model, cache, begin=PROMPT + 1), expected[:, 1:])
