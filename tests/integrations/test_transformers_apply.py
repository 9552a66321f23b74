"""`apply`: a declared pattern in place of a layer's own, against eager with a mask of all pairs."""

import copy
import warnings

import pytest
import torch
from helpers.thinned import thinned
from running_families import model_of
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    LongformerConfig,
    LongformerModel,
    StaticCache,
)
from transformers.masking_utils import bidirectional_mask_function
from transformers_models import DECODERS, assert_same, like, made, padded, result, tokens

import sparsering as sr
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import masks
from sparsering.integrations.transformers.call.attention import attention_function

WINDOW_AND_SINKS = sr.SlidingWindow(3) | sr.GlobalTokens(2, rows=False)
LONGNET = sr.LongNet((4, 8), (1, 2))
PATTERNS = {
    "window": sr.SlidingWindow(2),
    "sinks": WINDOW_AND_SINKS,
    "longnet": LONGNET,
    "blocks": sr.BlockWindow(1, 3),
}


def added(pattern, valid: Tensor, heads: int, kv_heads: int, causal: bool = True) -> Tensor:
    """[B, H, N, N] log counts of a pattern that begins at each row's first real token."""
    batch, length = valid.shape
    counts = torch.zeros(batch, heads, length, length, dtype=torch.float64)
    inner = pattern & sr.Causal() if causal else pattern
    for row, count in enumerate(counts):
        begin = int(valid[row].nonzero()[0])
        n = length - begin
        dense = inner.to_dense(n, num_heads=heads, num_kv_heads=kv_heads)
        count[:, begin:, begin:] = dense.expand(heads, n, n)
        count[:, :, ~valid[row].bool()] = 0
    return counts.log().clamp(min=torch.finfo(torch.float64).min)


def oracle(eager, pattern, ids: Tensor, valid: Tensor, causal: bool = True) -> Tensor:
    heads = eager.config.num_attention_heads
    kv_heads = getattr(eager.config, "num_key_value_heads", heads)
    mask = added(pattern, valid, heads, kv_heads, causal)
    with torch.no_grad():
        return result(eager, input_ids=ids, attention_mask=mask)


def applied(eager, pattern):
    model = copy.deepcopy(eager)
    hf.apply(model, pattern)
    return model


@pytest.mark.parametrize(
    ("family", "name"),
    thinned(2, ["llama", "mistral", "qwen2", "gemma2", "gpt2", "llama4"], PATTERNS),
)
def test_a_pattern_replaces_what_the_model_had(family, name):
    eager, pattern = made(family), PATTERNS[name]
    model, ids = applied(eager, pattern), tokens()
    for valid in (padded("left"), padded("right"), torch.ones(2, 13, dtype=torch.int64)):
        with torch.no_grad():
            got = result(model, input_ids=ids, attention_mask=valid)
            own = result(eager, input_ids=ids, attention_mask=valid)
        assert_same(got, oracle(eager, pattern, ids, valid), valid)
        assert (got - own)[valid.bool()].abs().max() > 1e-3, "the pattern changes nothing"


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_pattern_in_an_encoder_looks_both_ways(family):
    eager = made(family)
    for pattern in (sr.SlidingWindow(2, 2), sr.LongNet((4, 8), (1, 2)), sr.BlockWindow(1, 3)):
        model, ids = applied(eager, pattern), tokens()
        for valid in (padded("left"), padded("right")):
            with torch.no_grad():
                got = result(model, input_ids=ids, attention_mask=valid)
            assert_same(got, oracle(eager, pattern, ids, valid, causal=False), valid)


def test_a_row_means_the_same_alone_and_padded():
    model = applied(made("gpt2"), LONGNET)
    ids, mask = tokens(), padded("left", counts=(13, 7))
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        got = result(model, input_ids=ids, attention_mask=mask, position_ids=position_ids)
        alone = result(model, input_ids=ids[1:, 6:])
    assert_same(got[1:, 6:], alone)


def test_positions_restart_in_documents():
    model, ids = applied(made("llama"), LONGNET), tokens(1)
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        got = result(model, input_ids=ids, position_ids=position_ids, use_cache=False)
        parts = [result(model, input_ids=x) for x in (ids[:, :6], ids[:, 6:])]
    assert_same(got, torch.cat(parts, 1))
    window = applied(made("mistral"), sr.SlidingWindow(8))
    with torch.no_grad():
        got = result(window, input_ids=ids, position_ids=position_ids, use_cache=False)
        parts = [result(window, input_ids=x) for x in (ids[:, :6], ids[:, 6:])]
    assert_same(got, torch.cat(parts, 1))


@pytest.mark.parametrize(("family", "name"), thinned(2, ["llama", "gpt-oss"], PATTERNS))
def test_token_by_token_is_one_pass(family, name):
    model = applied(made(family), PATTERNS[name])
    ids, mask = tokens(), padded("left", counts=(13, 10))
    caches = [DynamicCache(), StaticCache(config=like(model).config, max_cache_len=16)]
    if family == "gpt-oss":
        caches = caches[:1]  # its static cache has dropped what the pattern needs
    with torch.no_grad():
        whole = result(model, input_ids=ids, attention_mask=mask, use_cache=False)
    for cache in caches:
        parts = []
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 11), (11, 12), (12, 13)):
            with torch.no_grad():
                some = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}
                parts.append(result(model, **some, past_key_values=cache, use_cache=True))
        assert_same(torch.cat(parts, 1), whole, mask)


def greedy(model, ids: Tensor, new: int) -> Tensor:
    """Without a cache, the whole sequence for every token."""
    start = ids.shape[1]
    for _ in range(new):
        with torch.no_grad():
            logits = result(model, input_ids=ids, use_cache=False)
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    return ids[:, start:]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_generates_as_the_whole_sequence_would(pattern):
    model = applied(made("llama"), pattern)
    ids = tokens(2, 9)
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    got = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert got[:, 9:].tolist() == greedy(model, ids, 14).tolist()


def test_an_index_beats_a_type_and_others_keep_their_own():
    eager = made(
        "qwen2", num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    )
    first, kind = sr.SlidingWindow(1), WINDOW_AND_SINKS
    model = copy.deepcopy(eager)
    hf.apply(model, {"sliding_attention": kind, 0: first})
    assert model.config.sparsering == {"sliding_attention": str(kind), "0": str(first)}
    valid, ids = torch.ones(2, 13, dtype=torch.int64), tokens()
    masks = [added(p, valid, 4, 2) for p in (first, kind, sr.Full())]
    layers = eager.model.layers
    handles = [
        layer.self_attn.register_forward_pre_hook(_with_mask(mask), with_kwargs=True)
        for layer, mask in zip(layers, masks, strict=True)
    ]
    with torch.no_grad():
        wanted, got = result(eager, input_ids=ids), result(model, input_ids=ids)
    for handle in handles:
        handle.remove()
    assert_same(got, wanted)


def _with_mask(mask: Tensor):
    return lambda module, args, kwargs: (args, {**kwargs, "attention_mask": mask})


def test_layers_that_are_not_named_keep_their_window():
    eager = made("mistral")
    model = applied(eager, {1: sr.Full()})
    ids, valid = tokens(), torch.ones(2, 13, dtype=torch.int64)
    layers = eager.model.layers
    masks = [added(sr.SlidingWindow(4), valid, 4, 2), added(sr.Full(), valid, 4, 2)]
    for layer, mask in zip(layers, masks, strict=True):
        layer.self_attn.register_forward_pre_hook(_with_mask(mask), with_kwargs=True)
    with torch.no_grad():
        assert_same(result(model, input_ids=ids), result(eager, input_ids=ids))


@pytest.mark.parametrize("key", [2, -1, "sliding", True, "0"])
def test_an_unknown_key_is_an_error(key):
    model = made("llama")
    with pytest.raises(
        ValueError, match=r"layer indices \(0 to 1\) or layer types \(full_attention\)"
    ):
        hf.apply(model, {key: sr.Causal()})
    assert not hasattr(model.config, "sparsering")


@pytest.mark.parametrize(
    "pattern",
    [
        sr.KeyMask(torch.ones(13, dtype=torch.bool)),
        sr.KeyPadding((13, 6)),
        sr.from_mask_mod(lambda b, h, q, k: q - k < 3),
        sr.Blocks(torch.ones(2, 2, dtype=torch.bool), 8),
    ],
    ids=["key-mask", "key-padding", "mask-mod", "blocks"],
)
def test_what_a_config_cannot_hold_is_refused(pattern):
    with pytest.raises(ValueError, match="config can hold as text"):
        hf.apply(made("llama"), pattern)
    with pytest.raises(TypeError, match="must be a sparsering pattern"):
        hf.apply(made("llama"), "Causal()")


@pytest.mark.parametrize("beside", [sr.Causal(), sr.SlidingWindow(4)])
def test_selected_blocks_are_refused_with_a_way_out(beside):
    chosen = sr.SelectedBlocks(torch.zeros(13, 1, dtype=torch.int64), 16, 1)
    with pytest.raises(ValueError, match="registered with transformers' AttentionInterface"):
        hf.apply(made("llama"), chosen & beside)
    with pytest.raises(ValueError, match="SelectedAttention"):
        hf.apply(made("llama"), {0: chosen | beside})


def test_a_pattern_survives_saving_and_copies(tmp_path):
    model, ids = applied(made("llama"), LONGNET), tokens()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = result(model, input_ids=ids)
    for load in (LlamaForCausalLM, AutoModelForCausalLM):
        again = load.from_pretrained(
            tmp_path, attn_implementation="sparsering", dtype="auto"
        ).eval()
        assert again.config.sparsering == str(LONGNET)
        with torch.no_grad():
            assert_same(result(again, input_ids=ids), wanted)
            assert_same(result(copy.deepcopy(again), input_ids=ids), wanted)
    with pytest.warns(UserWarning, match=r"holds the pattern LongNet\(\(4, .*does not follow"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="does not follow"):
        again.set_attn_implementation("eager")


def test_a_map_survives_saving(tmp_path):
    model = applied(made("qwen2"), {0: sr.SlidingWindow(2), "full_attention": WINDOW_AND_SINKS})
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="sparsering", dtype="auto"
    ).eval()
    with torch.no_grad():
        assert_same(result(again, input_ids=tokens()), result(model, input_ids=tokens()))


@pytest.mark.parametrize("pattern", [LONGNET, {0: sr.SlidingWindow(2)}, None])
def test_load_gives_a_saved_model_its_patterns(pattern, tmp_path):
    model, ids = made("qwen2"), tokens()
    if pattern is not None:
        hf.apply(model, pattern)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = result(model, input_ids=ids)
        for cls in (AutoModelForCausalLM, type(model)):
            again = hf.load(tmp_path, cls, dtype="auto").eval()
            assert again.config._attn_implementation == "sparsering"
            assert_same(result(again, input_ids=ids), wanted)


def test_load_says_why_a_pattern_does_not_hold(tmp_path):
    model = applied(made("qwen2"), {0: sr.SlidingWindow(2)})
    model.config.sparsering = {"7": "SlidingWindow(2)"}
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"load needs layer indices \(0 to 1\) .* got 7"):
        hf.load(tmp_path)
    with pytest.raises(ValueError, match=r'load runs attn_implementation="sparsering", got \'sdpa'):
        hf.load(tmp_path, attn_implementation="sdpa")
    model.config.sparsering = "SlidingWindow("
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="SlidingWindow"):
        hf.load(tmp_path)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "attention_window": 8}
    config = LongformerConfig(**sizes, num_attention_heads=4, intermediate_size=48)
    LongformerModel(config).save_pretrained(tmp_path / "other")
    with pytest.raises(
        NotImplementedError, match=r"hf\.convert\(model\) \(Longformer, LED, Chronos-2"
    ):
        hf.load(tmp_path / "other", LongformerModel)


def test_a_model_without_a_pattern_loads_without_a_word(tmp_path):
    made("llama").save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_t5_has_it_in_encoder_and_decoder_and_not_across(tmp_path):
    model = made("t5")
    eager = copy.deepcopy(model)
    hf.apply(model, sr.SlidingWindow(2, 2))
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=9, seed=1)}
    near = (torch.arange(13)[:, None] - torch.arange(13)).abs() <= 2
    least = torch.finfo(torch.float64).min
    zeros = torch.zeros(1, 1, 13, 13, dtype=torch.float64)
    both, back = zeros.masked_fill(~near, least), zeros.masked_fill(~near.tril(), least)
    back = back[..., :9, :9]
    for stack, mask in ((eager.encoder, both), (eager.decoder, back)):
        for block in stack.block:
            block.layer[0].SelfAttention.register_forward_pre_hook(
                lambda module, args, kwargs, mask=mask: (args, {**kwargs, "mask": mask}),
                with_kwargs=True,
            )
    with torch.no_grad():
        wanted, got = result(eager, **inputs), result(model, **inputs)
    assert_same(got, wanted)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="sparsering", dtype="auto")
    with torch.no_grad():
        assert_same(result(again.eval(), **inputs), wanted)


def test_images_have_a_pattern_too():
    eager = made("vit")
    model = applied(eager, sr.SlidingWindow(1, 1) | sr.GlobalTokens(1))
    near = (torch.arange(10)[:, None] - torch.arange(10)).abs() <= 1
    near[0] = near[:, 0] = True
    mask = torch.zeros(1, 1, 10, 10, dtype=torch.float64)
    mask = mask.masked_fill(~near, torch.finfo(torch.float64).min)
    for module in eager.modules():
        if type(module).__name__ == "ViTAttention":
            module.register_forward_pre_hook(lambda module, args: (args[0], mask))
    image = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        got, wanted = result(model, pixel_values=image), result(eager, pixel_values=image)
        assert_same(got, wanted)
        assert (got - result(made("vit"), pixel_values=image)).abs().max() > 1e-3


def test_keys_of_another_sequence_are_no_place_for_a_pattern():
    module = torch.nn.Module()
    module.is_causal, module.config = False, applied(made("bert"), sr.SlidingWindow(2, 2)).config
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    whole = masks.mask_interface(
        batch_size=1, q_length=5, kv_length=7, mask_function=bidirectional_mask_function
    )
    for mask in (None, whole):
        with pytest.raises(NotImplementedError, match="5 queries, 7 keys"):
            attention_function(module, query, key, key, mask)
    module.is_cross_attention = True
    for mask in (None, whole):
        out, _ = attention_function(module, query, key, key, mask)
        assert_same(out, sr.attention(query, key, key, sr.Full()).transpose(1, 2))


def test_a_cache_that_dropped_what_the_pattern_needs_is_an_error():
    model, ids = applied(made("mistral"), WINDOW_AND_SINKS), tokens()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"dropped the first 9 keys.*SparseCache"):
            model(input_ids=ids[:, :1], past_key_values=cache)
    narrow = applied(made("mistral"), sr.SlidingWindow(2))
    cache = DynamicCache(config=narrow.config)
    with torch.no_grad():
        parts = [
            narrow(input_ids=x, past_key_values=cache).logits for x in (ids[:, :9], ids[:, 9:])
        ]
        assert_same(torch.cat(parts, 1), result(narrow, input_ids=ids, use_cache=False))


def test_a_pattern_of_a_whole_length_does_not_decode():
    model = applied(made("llama"), sr.SlidingWindow(2) | sr.RandomBlocks(0.5, 4))
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=tokens(), past_key_values=cache)
        with pytest.raises(ValueError, match="drawn for a whole sequence"):
            model(input_ids=tokens(length=1), past_key_values=cache)


def test_a_mask_of_pairs_beside_a_pattern_is_refused():
    model = applied(made("llama"), sr.SlidingWindow(2))
    with pytest.raises(NotImplementedError, match="got a mask of all pairs"):
        model(input_ids=tokens(), attention_mask=torch.ones(2, 1, 13, 13, dtype=torch.bool))


def test_explain_tells_of_each_layer():
    eager = made("qwen2")
    assert hf.explain(eager) == "Qwen2ForCausalLM runs 'eager', not 'sparsering'"
    lines = hf.explain(like(eager)).splitlines()
    assert lines[0].startswith("0: SlidingWindow(4); ") and "cache: 4 keys" in lines[0]
    assert lines[1].startswith("1: Causal(); ") and "cache: grows without end" in lines[1]
    assert lines[0].split("; ")[1] in sr.backends()
    model = applied(eager, {1: WINDOW_AND_SINKS})
    lines = hf.explain(model).splitlines()
    assert f"{WINDOW_AND_SINKS & sr.Causal()}" in lines[1] and "cache: 5 keys" in lines[1]
    with pytest.warns(UserWarning):
        model.set_attn_implementation("eager")
    assert "is not in force" in hf.explain(model)


def test_explain_of_an_encoder_has_no_cache():
    model = applied(made("modernbert"), {"full_attention": sr.SlidingWindow(4, 4)})
    lines = hf.explain(model).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["0", "1"]
    assert "SlidingWindow(3, 3)" in lines[0] and "SlidingWindow(4, 4)" in lines[1]
    assert all(line.endswith("cache: none") for line in lines)


@pytest.mark.parametrize("family", DECODERS)
def test_explain_of_every_decoder(family):
    assert len(hf.explain(made(family, "sparsering")).splitlines()) == 2


@pytest.mark.parametrize("kind", ["nllb-moe", "pegasus_x"])
def test_a_decoder_that_makes_both_attentions_alike_follows_a_pattern(kind):
    """Its self-attention is told from cross attention by its causal mask, in steps too."""
    model = model_of(kind)
    ids, answer = tokens(2, 9), tokens(2, 11, seed=1)
    window = sr.SlidingWindow(2)
    with torch.no_grad():
        plain = result(model, input_ids=ids, decoder_input_ids=answer)
        with hf.using(model, window & sr.Causal()):
            whole = result(model, input_ids=ids, decoder_input_ids=answer, use_cache=False)
        assert (whole - plain).abs().max() > 1e-4
        hf.apply(model, {"full_attention": window})
        steps, cache = [], None
        for token in answer.split(1, 1):
            out = model(input_ids=ids, decoder_input_ids=token, past_key_values=cache)
            states = out.logits if hasattr(out, "logits") else out.last_hidden_state
            steps, cache = [*steps, states], out.past_key_values
        at_once = result(model, input_ids=ids, decoder_input_ids=answer)
    torch.testing.assert_close(torch.cat(steps, 1), at_once, rtol=0, atol=1e-10)
    assert (at_once - plain).abs().max() > 1e-4
