"""Continuous batching of transformers inside `hf.continuous_batching`: the tokens of `generate`."""

from contextlib import ExitStack, nullcontext

import pytest
import torch
from served_models import MODELS, NEW, alone, batched, made, prompts_of
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api

import sparsering as sr
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import paged

IN_ORDER = {
    "argvalues": [(torch.float32, nullcontext), (torch.bfloat16, sr.batch_invariant)],
    "ids": ["float32", "bfloat16"],
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate_one_by_one(name, monkeypatch):
    model, prompts = made(name), prompts_of((5, 33, 17, 3, 41))
    expected = [alone(model, prompt) for prompt in prompts]
    calls = []
    made_work = paged.work_of_pages

    def watched(query, key, q_lengths, kv_lengths, *rest):
        calls.append((q_lengths, kv_lengths, key.shape[2]))
        return made_work(query, key, q_lengths, kv_lengths, *rest)

    monkeypatch.setattr(paged, "work_of_pages", watched)
    with hf.continuous_batching(model):
        assert batched(model, prompts) == expected
    assert model.config._attn_implementation == "eager"
    assert any(1 in new and max(new) > 1 for new, *_ in calls)  # prompts and tokens in one call
    pages = max(rows for *_, rows in calls)
    in_place = [(new, kept) for new, kept, rows in calls if rows > pages // 2]
    assert any(max(new) > 1 for new, _ in in_place) and any(max(new) == 1 for new, _ in in_place)
    if name == "gemma3":  # a layer with a window reads the 8 keys of its window
        assert any(set(kept) == {8} for _, kept in in_place)
        assert max(sum(kept) for _, kept in in_place) > 100


@pytest.mark.parametrize(("dtype", "mode"), **IN_ORDER)
def test_a_request_has_the_bits_it_has_alone(dtype, mode, monkeypatch):
    model, prompts = made("gemma3").to(dtype), prompts_of((29, 12, 37))
    requests, same = {}, []
    made_work, attend = paged.work_of_pages, paged.attend_pages

    def noted(query, key, *of_requests):
        work = made_work(query, key, *of_requests)
        requests[id(work)] = work, of_requests
        return work

    def compared(query, key, value, work, **options):
        out = attend(query, key, value, work, **options)
        q_lengths, kv_lengths, rows, ends, reach = requests[id(work)][1]
        of_each = query.split(q_lengths, 2), rows.split(kv_lengths), ends.split(1)
        expected = out.split(q_lengths, 2)
        for part, own_rows, end, beside in zip(*of_each, expected, strict=True):
            own = [part.shape[2]], [len(own_rows)], own_rows, end, reach
            alone_in_call = attend(part, key, value, made_work(part, key, *own), **options)
            same.append(torch.equal(alone_in_call, beside) and paged.mode.is_batch_invariant)
        return out

    monkeypatch.setattr(paged, "work_of_pages", noted)
    monkeypatch.setattr(paged, "attend_pages", compared)
    with mode(), hf.continuous_batching(model):
        batched(model, prompts)
    assert len(same) > 50 and all(same)


def one_by_one(x, weight, bias=None):
    """Multiplies rows one by one, since torch may give a row other bits in another batch."""
    rows = torch.cat([torch.mm(row[None], weight.T) for row in x.reshape(-1, x.shape[-1])])
    out = rows.view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


@pytest.mark.parametrize("name", ["gemma3", "gemma2"])
@pytest.mark.parametrize(("dtype", "mode"), **IN_ORDER)
def test_logits_are_those_of_a_request_alone_bit_for_bit(name, dtype, mode, monkeypatch):
    sizes = {"head_dim": 64, "max_position_embeddings": 512}  # torch would multiply such tiles
    model, prompts = made(name, **sizes).to(dtype), prompts_of((190, 70, 230))
    pages = ContinuousBatchingConfig(num_blocks=80, page_size=8, max_batch_tokens=100)
    monkeypatch.setattr(torch.nn.functional, "linear", one_by_one)
    rows = []
    model.register_forward_hook(
        lambda module, given, out: rows.extend(tuple(x.tolist()) for x in out.logits[0])
    )
    with mode(), hf.continuous_batching(model):
        expected = []
        for prompt in prompts:
            batched(model, [prompt], pages)
            expected += rows[-NEW:]  # one of each new token
            rows.clear()
        batched(model, prompts, pages)
    # prompts share steps of 100 tokens, so they are cut elsewhere than alone
    assert len(set(expected)) == NEW * len(prompts) and set(expected) <= set(rows)


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
    replaced = [(part, name) for part, name, _ in paged._REPLACED]
    assert (continuous_api, "is_flash_attention_requested") in replaced
    before = [getattr(part, name, None) for part, name in replaced]
    model, other = made("llama", "sdpa"), made("qwen3")
    with ExitStack() as stack, pytest.raises(RuntimeError, match="an error"):
        stack.enter_context(hf.continuous_batching(model))
        stack.enter_context(hf.continuous_batching(other))
        during = [getattr(part, name) for part, name in replaced]
        assert all(x is not y for x, y in zip(during, before, strict=True))
        raise RuntimeError("an error")
    assert [getattr(part, name, None) for part, name in replaced] == before
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


@pytest.mark.parametrize(
    ("pattern", "copies"),
    [
        (sr.SlidingWindow(5) | sr.GlobalTokens(2, rows=False), False),
        (sr.SlidingWindow(9, 0, 3), True),
    ],
    ids=["in place", "of a copy"],
)
def test_a_pattern_of_apply_is_followed(pattern, copies, monkeypatch):
    model, prompts = made("llama", "sdpa"), prompts_of((37, 8, 21))
    hf.apply(model, pattern)
    expected = [alone(model, prompt) for prompt in prompts]
    called = set()
    for name in ("attend_pages", "attention_varlen"):
        attend = getattr(paged, name)

        def noted(*arguments, name=name, attend=attend, **options):
            called.add(name)
            return attend(*arguments, **options)

        monkeypatch.setattr(paged, name, noted)
    with hf.continuous_batching(model):
        assert batched(model, prompts) == expected
    assert called == {"attention_varlen" if copies else "attend_pages"}
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
