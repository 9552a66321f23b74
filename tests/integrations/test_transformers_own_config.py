"""Sets attention, or a pattern, for one model; others of its config object stay as they were."""

import copy
import tempfile
from contextlib import ExitStack

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedConfig
from transformers_families import tiny
from transformers_models import made, result, tokens

import sparsering as sr
from sparsering.integrations import transformers as hf

NARROW, WIDE = sr.SlidingWindow(2), sr.SlidingWindow(5)


def applied(model, stack):
    hf.apply(model, NARROW)


def set_by_name(model, stack):
    hf.register()
    model.set_attn_implementation("sparsering")


def in_a_block(model, stack):
    stack.enter_context(hf.using(model, NARROW))


def over_ranks(model, stack):
    hf.parallelize(model)


WAYS = (applied, set_by_name, in_a_block, over_ranks)


def twin(model, config):
    """Returns a model of the same weights that is made of this config object."""
    other = LlamaForCausalLM(config).double().eval()
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def logits(model):
    return result(model, input_ids=tokens())


@pytest.mark.parametrize("is_made", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_another_model_of_the_config_stays_as_it_was(way, is_made):
    model = made("llama")
    config, wanted, text = model.config, logits(model), model.config.to_dict()
    others = [twin(model, config)] if is_made == "before" else []
    with ExitStack() as stack:
        way(model, stack)
        others = others or [twin(model, config)]
        assert model.config is not config and config.to_dict() == text
        assert model.config._attn_implementation == "sparsering"
        (other,) = others
        assert other.config is config and config._attn_implementation == "eager"
        assert torch.equal(logits(other), wanted)
        if way in (applied, in_a_block):
            assert not torch.allclose(logits(model), wanted)
    assert torch.equal(logits(other), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_made_of_a_model_s_own_config_stays_as_it_was(way):
    model = made("llama")
    hf.apply(model, WIDE)
    other = twin(model, model.config)
    wanted = logits(other)
    torch.testing.assert_close(logits(model), wanted)
    with ExitStack() as stack:
        way(model, stack)
        hf.apply(model, NARROW)
        assert torch.equal(logits(other), wanted)
    assert not torch.allclose(logits(model), wanted)


def test_a_part_of_a_model_changes_the_whole_model_and_no_other():
    model = made("llama")
    other, wanted = twin(model, model.config), logits(model)
    hf.apply(model.model, NARROW)
    assert model.config is model.model.config is model.model.layers[1].self_attn.config
    whole = made("llama")
    hf.apply(whole, NARROW)
    assert hf.explain(model) == hf.explain(whole)
    assert torch.equal(logits(model), logits(whole)) and torch.equal(logits(other), wanted)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert hf.explain(hf.load(folder)) == hf.explain(model)


def test_nested_blocks_of_two_models_of_one_config_end_as_they_began():
    model = made("llama")
    with hf.using(model, NARROW):
        other = twin(model, model.config)  # a config that is held
        with hf.using(other, WIDE), hf.using(model, WIDE):
            torch.testing.assert_close(logits(model), logits(other))
        assert model.config._attn_implementation == "sparsering"
    for each in (model, other, copy.deepcopy(model)):
        assert torch.equal(logits(each), logits(made("llama")))


def configs_of(model):
    """Returns the ids of all configs that a model's modules, their lists and dicts hold."""
    waiting = [vars(x) for x in model.modules()]
    found, seen = set(), set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, PreTrainedConfig):
            found.add(id(value))
            value = vars(value)
        if isinstance(value, dict | list | tuple):
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return found


@pytest.mark.parametrize(
    "family", ["llama4_text", "glm5_next", "gemma4_text", "mllama", "bert (masked LM)"]
)
def test_no_part_of_a_model_keeps_the_shared_config(family):
    model = tiny(family)
    parts = {id(x) for x in model.modules()}
    before = configs_of(model)
    hf.register()
    model.set_attn_implementation("sparsering")
    assert before and not before & configs_of(model)
    assert parts == {id(x) for x in model.modules()}
