"""`SparseCache`: what a cache of everything gives, from live keys alone."""

import copy

import pytest
import torch
from helpers.thinned import thinned
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.llama import modeling_llama
from transformers_families import tiny
from transformers_models import assert_same, like, made, padded, result, tokens

import sparsering as sr
from sparsering.integrations import transformers as hf

SINKS = sr.SlidingWindow(3) | sr.GlobalTokens(2, rows=False)
PATTERNS = {
    "sinks": SINKS,
    "longnet": sr.LongNet((4, 8), (1, 2)),
    "mixed": {0: SINKS, 1: sr.SlidingWindow(4)},
}


def applied(family: str, pattern):
    model = copy.deepcopy(made(family))
    hf.apply(model, pattern)
    return model


def stepped(model, cache, ids: Tensor, mask: Tensor, stops=(6, 7, 8, 11, 12, 13)) -> Tensor:
    parts, start = [], 0
    for stop in stops:
        with torch.no_grad():
            some = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}
            parts.append(result(model, **some, past_key_values=cache, use_cache=True))
        start = stop
    return torch.cat(parts, 1)


@pytest.mark.parametrize(
    ("family", "name", "counts"),
    thinned(3, ["llama", "gpt2", "gpt-oss", "gemma2"], PATTERNS, [(13, 13), (13, 6), (4, 13)]),
)
def test_steps_of_any_size_are_one_pass(family, name, counts):
    model = applied(family, PATTERNS[name])
    ids, mask = tokens(), padded("left", counts=counts)
    with torch.no_grad():
        whole = result(model, input_ids=ids, attention_mask=mask, use_cache=False)
    assert_same(stepped(model, hf.SparseCache(model), ids, mask), whole, mask)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3", "llama4", "llama"])
def test_a_models_own_windows_and_chunks(family):
    eager = made(family)
    model = made(family, "sparsering")
    ids, mask = tokens(), padded("left")
    wanted = stepped(eager, DynamicCache(config=eager.config), ids, mask)
    assert_same(stepped(model, hf.SparseCache(model), ids, mask), wanted, mask)


@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_generates_what_a_cache_of_everything_does(beams):
    model = applied("llama", PATTERNS["longnet"])
    ids, mask = tokens(2, 9), padded("left", 9, (9, 5))
    options = {"max_new_tokens": 30, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    cache = hf.SparseCache(model)
    given = {"input_ids": ids, "attention_mask": mask}
    wanted = model.generate(**given, past_key_values=DynamicCache(), **options)
    got = model.generate(**given, past_key_values=cache, **options)
    assert got.tolist() == wanted.tolist()
    assert max(cache.kept) < 39


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_guesses_of_the_prompt_lookup_write_the_text_of_greedy_decoding(family):
    model = made(family, "sparsering")
    ids = tokens(1, 9).repeat(1, 3)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain, guessed = hf.SparseCache(model), hf.SparseCache(model, rollback=8)
    wanted = model.generate(**given, past_key_values=plain, **options)
    lookup = {"prompt_lookup_num_tokens": 5, "past_key_values": guessed}
    cropped = []
    for layer in guessed.layers:
        crop = layer.crop
        layer.crop = lambda n, crop=crop: cropped.append(n) or crop(n)
    assert model.generate(**given, **lookup, **options).tolist() == wanted.tolist()
    assert any(cropped)  # some guesses were wrong


def test_a_model_that_caches_latents_is_refused_by_name():
    model = made("deepseek-v3", "sparsering")
    with pytest.raises(NotImplementedError, match=r"it caches latents.*the default cache"):
        stepped(model, hf.SparseCache(model), tokens(), padded("left"))


@pytest.mark.parametrize("family", ["gemma4_text", "diffllama"])
def test_a_model_that_attends_twice_over_its_keys_is_refused_by_name(family):
    """Layers of Gemma 4 share keys, those of DiffLlama attend in halves."""
    hf.register()
    model = like(tiny(family))
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"attends once.*default cache"):
        model(input_ids=tokens(), past_key_values=hf.SparseCache(model))


def test_it_holds_live_keys_and_a_page_at_most():
    model = applied("llama", SINKS)
    cache = hf.SparseCache(model)
    ids = tokens(1, 200)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        assert cache.kept == [5, 5]  # two sinks, and three before the next
        assert cache.get_seq_length() == 200
        most = 0
        for _ in range(20):
            model(input_ids=ids[:, :1], past_key_values=cache)
            most = max(most, *cache.kept)
    assert most <= 5 + 128
    everything = 2 * 2 * 2 * 220 * 8 * 8  # layers, keys and values, heads, tokens, width, bytes
    assert cache.nbytes < 2 * everything
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.kept == [0, 0]


def test_crop_takes_back_what_was_declared():
    model = applied("llama", SINKS)
    ids, ones = tokens(1), torch.ones(1, 13, dtype=torch.int64)
    cache = hf.SparseCache(model, rollback=4)
    first = stepped(model, cache, ids, ones, (9, 13))
    cache.crop(-4)
    assert cache.get_seq_length() == 9
    with torch.no_grad():
        again = model(input_ids=ids[:, 9:], past_key_values=cache).logits
    assert_same(again, first[:, 9:])
    with pytest.raises(ValueError, match="rollback"):
        cache.crop(-5)
    with pytest.raises(ValueError, match="negative number, got 3"):
        cache.crop(3)


def test_rows_are_repeated_reordered_and_selected():
    model = applied("llama", SINKS)
    ids = tokens(2)
    cache = hf.SparseCache(model)
    with torch.no_grad():
        model(input_ids=ids[:, :9], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
        cache.batch_select_indices(torch.tensor([0, 3]))
        got = model(input_ids=ids.flip(0)[:, 9:], past_key_values=cache).logits
        wanted = result(model, input_ids=ids, use_cache=False).flip(0)[:, 9:]
    assert_same(got, wanted)


def test_a_cache_of_another_pattern_is_refused():
    model = applied("llama", SINKS)
    cache = hf.SparseCache(model)
    hf.apply(model, sr.SlidingWindow(4))
    with torch.no_grad(), pytest.raises(ValueError, match="make another cache after apply"):
        model(input_ids=tokens(), past_key_values=cache)
    own = hf.SparseCache(made("mistral", "sparsering"))
    other = made("mistral", "sparsering", sliding_window=7)
    with torch.no_grad(), pytest.raises(ValueError, match=r"SlidingWindow\(4.*SlidingWindow\(6"):
        other(input_ids=tokens(), past_key_values=own)


def test_a_mask_of_pairs_beside_it_is_refused():
    model = applied("llama", SINKS)
    mask = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
    cache = hf.SparseCache(model)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="got a mask of all pairs"):
        model(input_ids=tokens(), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("pattern", [SINKS, sr.BlockCausal(4)])
def test_a_mask_in_which_tokens_see_later_ones_is_refused(pattern, monkeypatch):
    """The layer is causal, but not the mask that its model made: no pair is left out in silence."""
    model = applied("llama", pattern)
    cache = hf.SparseCache(model)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_bidirectional_mask)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="in which tokens see later"):
        model(input_ids=tokens(), past_key_values=cache)


def test_what_it_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"needs a model that runs .sparsering., got 'eager'"):
        hf.SparseCache(made("llama"))
    with pytest.raises(NotImplementedError, match="has an encoder and a decoder"):
        hf.SparseCache(made("t5", "sparsering"))
    model = applied("llama", SINKS)
    mask = padded("right")
    with pytest.raises(ValueError, match="needs padding on the left alone"), torch.no_grad():
        model(input_ids=tokens(), attention_mask=mask, past_key_values=hf.SparseCache(model))
    with pytest.raises(ValueError, match="keeps no gradients"):
        model(input_ids=tokens(), past_key_values=hf.SparseCache(model))


def test_a_shallow_copy_of_a_sparse_cache_goes_on_alone():
    model, ids = applied("llama", SINKS), tokens()
    first = hf.SparseCache(model)
    with torch.no_grad():
        result(model, input_ids=ids[:, :6], past_key_values=first, use_cache=True)
        second = copy.copy(first)
        other = (ids[:, 6:9] + 1) % 50
        result(model, input_ids=other, past_key_values=second, use_cache=True)
        out = result(model, input_ids=ids[:, 6:], past_key_values=first, use_cache=True)
        whole = result(model, input_ids=ids, use_cache=False)
    assert (first.layers[0].columns, second.layers[0].columns) == (13, 9)
    torch.testing.assert_close(out, whole[:, 6:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [17, 128, 300, 1024])
def test_a_windowed_model_holds_what_transformers_holds_and_an_eighth(window):
    """Beside the window's keys is a page: an eighth of them, rounded to blocks of 16 tokens.

    Pages are tiles of the kernel, so one has 16 tokens at least. Each key has a position and a last
    query, 16 bytes for each head.
    """
    model = made("mistral", "sparsering", sliding_window=window)
    ids = tokens(1, window + 40)
    ours, theirs = hf.SparseCache(model), DynamicCache(config=model.config)
    most = 0
    with torch.no_grad():
        for cache in (ours, theirs):
            model(input_ids=ids, past_key_values=cache)
        for _ in range(40):
            for cache in (ours, theirs):
                model(input_ids=ids[:, :1], past_key_values=cache)
            most = max(most, ours.nbytes)
    layers, rows = theirs.layers, theirs.layers[0].keys
    token = 2 * len(layers) * rows[:, :, :1].nbytes
    whole = sum(x.keys.nbytes + x.values.nbytes for x in layers)
    assert whole == token * (window - 1)
    positions = 16 * len(layers) * rows.shape[1] * (window - 1)
    assert most <= whole + token * max(16, window / 8 + 8) + positions


def test_unlike_questions_behind_a_shared_text_are_rows_of_one_batch():
    model, text = made("mistral", "sparsering"), tokens(1, 11)
    questions = [tokens(1, n) + 1 for n in (3, 7)]
    whole = [torch.cat((text, question), 1) for question in questions]
    longest = max(x.shape[1] for x in whole)
    ids = torch.cat([torch.nn.functional.pad(x, (longest - x.shape[1], 0)) for x in whole])
    mask = torch.ones_like(ids)
    mask[0, : longest - whole[0].shape[1]] = 0
    shared = hf.SparseCache(model)
    with torch.no_grad():
        model(input_ids=text, past_key_values=shared)
        joined, other = copy.copy(shared), copy.copy(shared)
        for cache, question in zip((joined, other), questions, strict=True):
            model(input_ids=question[:, :-1], past_key_values=cache)
        joined.join(other)
        assert joined.get_seq_length() == longest - 1
        places = (mask.cumsum(1) - 1)[:, -1:]
        some = {"input_ids": ids[:, -1:], "attention_mask": mask, "position_ids": places}
        rows = result(model, **some, past_key_values=joined, use_cache=True)
        for row, own in zip(rows, whole, strict=True):
            assert_same(row[None], result(model, input_ids=own, use_cache=False)[:, -1:])
        assert (shared.get_seq_length(), other.get_seq_length()) == (11, 17)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    joined = copy.copy(shared)
    with torch.no_grad():
        model(input_ids=questions[0][:, :-1], past_key_values=joined)
    joined.join(other)
    written = model.generate(ids, attention_mask=mask, past_key_values=joined, **options)
    for row, own in zip(written, whole, strict=True):
        alone = model.generate(own, attention_mask=torch.ones_like(own), **options)
        assert row[longest:].tolist() == alone[0, own.shape[1] :].tolist()


def test_caches_that_cannot_be_joined_are_named_and_unchanged():
    model = applied("llama", {0: SINKS, 1: sr.SlidingWindow(4)})
    one, two = hf.SparseCache(model), hf.SparseCache(model)
    with pytest.raises(ValueError, match=r"that have seen tokens, got None"):
        one.join(two)
    with torch.no_grad():
        model(input_ids=tokens(), past_key_values=one)
    with pytest.raises(ValueError, match=r"that have seen tokens, got None"):
        one.join(two)
    with pytest.raises(ValueError, match="join needs a SparseCache of the same model, got Dynamic"):
        one.join(DynamicCache())
    hf.apply(model, {1: sr.SlidingWindow(5)})
    other = hf.SparseCache(model)
    with torch.no_grad():
        model(input_ids=tokens(), past_key_values=other)
    with pytest.raises(ValueError, match="join needs two caches of one model"):
        one.join(other)  # the first layers are alike
    assert [len(layer.kv_cache.lengths) for layer in one.layers] == [2, 2]


def test_a_mask_that_forgets_cached_padding_is_refused():
    model, ids, mask = applied("llama", SINKS), tokens(), padded("left", counts=(13, 6))
    cache = hf.SparseCache(model)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match=r"with padding on the left, got none .*\[13, 6\]"):
            model(input_ids=ids[:, :1], past_key_values=copy.copy(cache))
        wrong = torch.ones(2, 14, dtype=torch.int64)
        wrong[1, :3] = 0
        with pytest.raises(ValueError, match=r"got \[13, 10\] for lengths \[13, 6\]"):
            model(input_ids=ids[:, :1], attention_mask=wrong, past_key_values=copy.copy(cache))
        wrong[1, :7] = 0
        model(input_ids=ids[:, :1], attention_mask=wrong, past_key_values=cache)


def test_padding_behind_a_shared_text_says_how_to_join():
    model, ids = applied("llama", SINKS), tokens()
    mask = torch.ones_like(ids)
    mask[1, 6:9] = 0
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"unlike questions .* then join\(\) them"),
    ):
        model(input_ids=ids, attention_mask=mask, past_key_values=hf.SparseCache(model))
