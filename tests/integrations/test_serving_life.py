"""Continuous batching when requests end early, fail or never end: pages, attention and memory."""

import gc
import itertools
import time

import pytest
import torch
from served_models import GREEDY, PAGES, alone, batched, made, prompts_of
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from sparsering.integrations import transformers as hf

WAIT = 60.0  # seconds until a test gives up
LONG = 150  # new tokens of requests that are to end early


@pytest.fixture
def caches(monkeypatch):
    """The paged caches that transformers makes, in their order."""
    made_caches = []
    build = paged_cache.PagedAttentionCache.__init__

    def noted(self, *arguments, **options):
        build(self, *arguments, **options)
        made_caches.append(self)

    monkeypatch.setattr(paged_cache.PagedAttentionCache, "__init__", noted)
    return made_caches


def serving(model):
    """A manager of transformers with its thread, in a `with` block."""
    return model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=PAGES
    )


def check_free(cache):
    assert not any(x.block_table for x in cache.cache_allocators.values())
    cache.evict_cached_blocks()  # kept for prompts that begin alike
    assert cache.compute_free_capacity() == 1.0


def results_of(manager, ids):
    """Results of these requests as they come, until all have ended."""
    waiting, end = set(ids), time.monotonic() + WAIT
    while waiting:
        assert time.monotonic() < end, f"no result of {waiting}"
        if (result := manager.get_result(timeout=0.1)) is not None:
            waiting -= {result.request_id} if result.is_finished() else set()
            yield result


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cancelled_requests_leave_their_pages_and_the_tokens_of_others(name, caches):
    model, prompts = made(name), prompts_of((21, 9, 33, 5))
    expected = [alone(model, prompt) for prompt in prompts]
    with hf.continuous_batching(model), serving(model) as manager:
        cancelled = manager.add_requests(prompts_of((17, 30)), max_new_tokens=LONG, streaming=True)
        stayed = manager.add_requests(prompts, max_new_tokens=len(expected[0]))
        found, seen = {}, set()
        for result in results_of(manager, stayed):
            found[result.request_id] = result.generated_tokens
            if result.request_id in cancelled and result.request_id not in seen:
                seen.add(result.request_id)
                assert 0 < len(result.generated_tokens) < LONG  # while it runs
                manager.cancel_request(result.request_id)
        assert seen == set(cancelled)
        assert [found[each] for each in stayed] == expected
    check_free(caches[0])
    with hf.continuous_batching(model):
        assert batched(model, prompts) == expected


def test_a_request_cancelled_while_it_waits_takes_no_page(caches):
    model = made("llama")
    with hf.continuous_batching(model), serving(model) as manager:
        with manager.pause():
            (first,) = manager.add_requests(prompts_of((40,)), max_new_tokens=3)
            (second,) = manager.add_requests(prompts_of((24,)), max_new_tokens=LONG)
            manager.cancel_request(second)
        assert [x.request_id for x in results_of(manager, [first])] == [first]
    check_free(caches[0])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_failing_layer_fails_its_requests_and_no_later_ones(name, caches):
    model, prompts = made(name), prompts_of((21, 9, 33, 5))
    expected = [alone(model, prompt) for prompt in prompts]
    calls = itertools.count()

    def failing(module, arguments):
        if next(calls) == 4:  # after prompts and some tokens, in the middle of a step
            raise FloatingPointError("a layer fails")

    with hf.continuous_batching(model):
        handle = model.model.layers[2].self_attn.register_forward_pre_hook(failing)
        outputs = model.generate_batch(
            prompts, generation_config=GREEDY, continuous_batching_config=PAGES
        )
        handle.remove()
        assert {x.error for x in outputs.values()} == {"a layer fails"}
        assert len(outputs) == len(prompts)
        check_free(caches[0])
        assert batched(model, prompts) == expected
    assert model.config._attn_implementation == "eager"
    assert [alone(model, prompt) for prompt in prompts] == expected


@pytest.mark.parametrize("hard", [True, False], ids=["hard", "flush"])
def test_a_manager_that_stops_leaves_pages_free(hard, caches):
    model, prompts = made("gemma3"), prompts_of((21, 9, 33))
    expected = [alone(model, prompt) for prompt in prompts]
    new = LONG if hard else len(expected[0])
    with hf.continuous_batching(model):
        with serving(model) as manager:
            ids = manager.add_requests(prompts, max_new_tokens=new, streaming=True)
            first = next(results_of(manager, ids))
            manager.stop(hard_stop=hard)
            assert not manager.is_running()
        results = [first]
        while (result := manager.get_result(timeout=0.1)) is not None:
            results.append(result)
        last = {x.request_id: x for x in results}
        if hard:
            assert all("before this request completed" in x.error for x in last.values())
            assert all(len(x.generated_tokens) < LONG for x in last.values())
        else:
            assert [last[each].generated_tokens for each in ids] == expected
        check_free(caches[0])
        assert batched(model, prompts) == expected


def test_a_block_that_ends_stops_the_managers_that_run_in_it(caches):
    model, prompts = made("gemma3", "sdpa"), prompts_of((21, 9))
    expected = [alone(model, prompt) for prompt in prompts]
    with hf.continuous_batching(model):
        manager = model.init_continuous_batching(GREEDY, PAGES)
        manager.start()
        ids = manager.add_requests(prompts, max_new_tokens=LONG, streaming=True)
        first = next(results_of(manager, ids))
    assert not manager.is_running()  # its steps would have no masks with another attention
    last = {first.request_id: first}
    while (result := manager.get_result(timeout=0.1)) is not None:
        last[result.request_id] = result
    assert all("before this request completed" in x.error for x in last.values())
    check_free(caches[0])
    assert model.config._attn_implementation == "sdpa"
    assert batched(model, prompts) == expected


def test_a_manager_kept_for_later_is_not_used_with_another_attention():
    model, prompts = made("gemma3", "sdpa"), prompts_of((21, 9, 33))
    expected = [alone(model, prompt) for prompt in prompts]

    def kept():
        return batched(model, prompts, persistent_manager=True)

    assert kept() == expected
    before = model._cached_continuous_batching_manager  # its steps have masks
    with hf.continuous_batching(model):
        assert kept() == expected
        assert kept() == expected
        assert model._cached_continuous_batching_manager is not before
    assert model._cached_continuous_batching_manager is before
    assert kept() == expected
    model.destroy_cached_continuous_batching_manager()
    with hf.continuous_batching(model):
        assert kept() == expected
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert batched(model, prompts) == expected


def test_a_manager_from_before_the_block_is_refused_with_its_masks():
    model, prompts = made("gemma3", "sdpa"), prompts_of((21, 9))
    with serving(model) as manager, hf.continuous_batching(model):
        ids = manager.add_requests(prompts, max_new_tokens=3)
        errors = [x.error for x in results_of(manager, ids)]
    assert len(errors) == 2 and all("does not take masks, which a manager has" in x for x in errors)


def test_prompts_that_begin_alike_share_pages(monkeypatch):
    model, begin = made("llama"), prompts_of((40,))[0]
    prompts = [begin + rest for rest in prompts_of((9, 5, 14))]
    expected = [alone(model, prompt) for prompt in prompts]
    matched, search = [], paged_cache.PagedAttentionCache.search_prefix_match

    def noted(self, *arguments):
        matched.append(search(self, *arguments))
        return matched[-1]

    monkeypatch.setattr(paged_cache.PagedAttentionCache, "search_prefix_match", noted)
    with hf.continuous_batching(model):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert batched(model, [prompt], persistent_manager=True) == [tokens]
        assert matched == [0, 40, 40]
        model.destroy_cached_continuous_batching_manager()
        assert batched(model, prompts) == expected


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_requests_that_lose_their_pages_for_a_time_get_their_tokens(name, monkeypatch):
    model, prompts = made(name), prompts_of((17, 21, 30, 12))
    few = ContinuousBatchingConfig(num_blocks=8, page_size=8, max_batch_tokens=24)
    evicted, offload = [], OffloadingManager.offload_requests

    def noted(self, *arguments):
        evicted.append(offload(self, *arguments))
        return evicted[-1]

    monkeypatch.setattr(OffloadingManager, "offload_requests", noted)
    expected = [alone(model, prompt) for prompt in prompts]
    with hf.continuous_batching(model):
        assert batched(model, prompts, few) == expected
    assert any(evicted)


def live_tensors():
    """Number and bytes of the tensors that are alive."""
    gc.collect()
    sizes = {}
    for x in gc.get_objects():
        if isinstance(x, torch.Tensor):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return len(sizes), sum(sizes.values())


@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_stays_flat_over_many_steps(steps):
    model, sampled = made("gemma3"), []
    calls = itertools.count(1)

    def sample(module, arguments, output):
        step = next(calls)
        if step > steps // 4 and step % (steps // 8) == 0:  # after caches have filled
            sampled.append(live_tensors())

    model.register_forward_hook(sample)
    lengths = torch.randint(1, 40, (steps,), generator=torch.Generator().manual_seed(2)).tolist()
    with hf.continuous_batching(model), serving(model) as manager:
        waiting, prompts = set(), iter(prompts_of(lengths))
        end = time.monotonic() + 20 * WAIT
        while len(sampled) < 6:
            assert time.monotonic() < end
            while len(waiting) < 4:
                (each,) = manager.add_requests([next(prompts)], max_new_tokens=8)
                waiting.add(each)
            if (result := manager.get_result(timeout=0.1)) is not None:
                waiting.discard(result.request_id)
    numbers, sizes = zip(*sampled, strict=True)
    assert max(numbers[3:]) <= max(numbers[:3]) + 16
    assert max(sizes[3:]) <= max(sizes[:3]) + (64 << 10)
