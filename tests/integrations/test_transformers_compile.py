"""Under torch.compile a model computes what it computes without, in one graph."""

import copy

import pytest
import torch
from helpers.thinned import slow_except
from transformers import DynamicCache, StaticCache
from transformers_models import assert_same, made, padded, pair, result, tokens

import sparsering as sr
from sparsering.integrations import transformers as hf


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    ("family", "side"),
    slow_except(
        [("llama", "left")],
        ["llama", "mistral", "llama4", "bert", "modernbert"],
        [None, "left", "right"],
    ),
)
def test_one_graph_without_a_cache(family, side):
    eager, ours = pair(family)
    inputs, mask = {"input_ids": tokens()}, side and padded(side)
    if family not in ("bert", "modernbert"):
        inputs["use_cache"] = False
    if side:
        inputs["attention_mask"] = mask
    with torch.no_grad():
        assert_same(result(compiled(ours), **inputs), result(eager, **inputs), mask)


@pytest.mark.slow
def test_packed_documents_are_data():
    for family in ("llama", "mistral", "llama4"):
        torch.compiler.reset()
        eager, ours = pair(family)
        fast = compiled(ours)
        for positions in ([4, 6, 3], [13], [1, 1, 11]):
            position_ids = torch.cat([torch.arange(n) for n in positions])[None].expand(2, -1)
            inputs = {"input_ids": tokens(), "position_ids": position_ids, "use_cache": False}
            with torch.no_grad():
                assert_same(result(fast, **inputs), result(eager, **inputs))


def test_gradients():
    eager, ours = pair("mistral")
    mask = padded("left")
    inputs = {"input_ids": tokens(), "attention_mask": mask, "use_cache": False}
    for model in (eager, compiled(ours)):
        result(model, **inputs)[mask.bool()].square().sum().backward()
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_steps_with_a_growing_cache(family):
    eager, ours = pair(family)
    ids, outs = tokens(), []
    for model in (eager, compiled(ours)):
        cache, parts = DynamicCache(config=eager.config), []
        with torch.no_grad():
            for start, stop in ((0, 8), *((n, n + 1) for n in range(8, 13))):
                parts.append(result(model, input_ids=ids[:, start:stop], past_key_values=cache))
        outs.append(torch.cat(parts, 1))
    assert_same(outs[1], outs[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_steps_with_a_static_cache(family):
    eager, ours = pair(family)
    ids, mask, outs = tokens(), padded("left"), []
    for model, step in ((eager, eager), (ours, compiled(ours))):
        cache, parts = StaticCache(config=eager.config, max_cache_len=16), []
        with torch.no_grad():
            some = {"input_ids": ids[:, :8], "attention_mask": mask[:, :8]}
            parts.append(result(model, **some, past_key_values=cache))
            for n in range(8, 13):
                some = {"input_ids": ids[:, n : n + 1], "attention_mask": mask[:, : n + 1]}
                parts.append(result(step, **some, past_key_values=cache))
        outs.append(torch.cat(parts, 1))
    assert_same(outs[1], outs[0], mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [sr.SlidingWindow(2), sr.LongNet((4, 8), (1, 2))], ids=["window", "longnet"]
)
def test_a_pattern_of_its_own(pattern):
    model = copy.deepcopy(made("llama"))
    hf.apply(model, pattern)
    fast = compiled(model)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8]]).expand(2, -1)
    for more in ({}, {"attention_mask": padded("left")}, {"position_ids": position_ids}):
        inputs = {"input_ids": tokens(), "use_cache": False, **more}
        with torch.no_grad():
            got, wanted = result(fast, **inputs), result(model, **inputs)
        assert_same(got, wanted, more.get("attention_mask"))
