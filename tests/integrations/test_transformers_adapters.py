"""Adapters of peft: the pattern travels with them, and wrappers stand for the model inside."""

import copy
import json
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers_models import made

import sparsering as sr
from sparsering.integrations import transformers as hf

peft = pytest.importorskip("peft")
hf.register()
# peft reads a property that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
WINDOW = sr.SlidingWindow(3) | sr.GlobalTokens(1, rows=False)
IDS = torch.arange(34).view(2, 17) % 50 + 3


@pytest.fixture
def base(tmp_path):
    """The folder of a model without a pattern."""
    made("llama", "sdpa").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def fresh(base, implementation="sdpa"):
    return AutoModelForCausalLM.from_pretrained(base, attn_implementation=implementation)


def with_lora(model):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, x in tuned.named_parameters():
            if "lora_B" in name:
                x.normal_(std=0.5)
    return tuned.eval()


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("pattern", [WINDOW, {0: sr.SlidingWindow(2)}])
@pytest.mark.parametrize("implementation", ["sdpa", "sparsering"])
def test_an_adapter_keeps_its_pattern(base, tmp_path, pattern, implementation):
    model = fresh(base)
    dense = logits(model)
    hf.apply(model, pattern)
    tuned = with_lora(model)
    wanted = logits(tuned)
    assert (wanted - dense).abs().max() > 1e-3
    tuned.save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = peft.PeftModel.from_pretrained(fresh(base, implementation), tmp_path / "adapter")
        assert torch.equal(logits(again), wanted)
        whole = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert torch.equal(logits(whole), wanted)
        assert torch.equal(logits(hf.load(tmp_path / "adapter")), wanted)
        loaded = hf.load(tmp_path / "adapter", cls=peft.AutoPeftModelForCausalLM)
        assert torch.equal(logits(loaded), wanted)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(hf.load(tmp_path / "merged")), wanted, rtol=0, atol=1e-6)


def test_adapters_of_other_patterns_and_of_none(base, tmp_path):
    model = fresh(base)
    hf.apply(model, WINDOW)
    tuned = with_lora(model)
    tuned.save_pretrained(tmp_path / "adapter")
    other = fresh(base)
    hf.apply(other, sr.SlidingWindow(5))
    with pytest.warns(UserWarning, match=r"was saved with the pattern .* keeps its own, Sliding"):
        peft.PeftModel.from_pretrained(other, tmp_path / "adapter")
    with_lora(fresh(base)).save_pretrained(tmp_path / "adapter")  # in the place of the first
    again = peft.PeftModel.from_pretrained(fresh(base), tmp_path / "adapter")
    assert again.get_base_model().config._attn_implementation == "sdpa"
    (tmp_path / "adapter" / "sparsering.json").write_text(json.dumps({"pattern": 3}))
    with pytest.raises(ValueError, match=r'must hold {"pattern": text}'):
        peft.PeftModel.from_pretrained(fresh(base), tmp_path / "adapter")


class Inside(torch.nn.Module):
    """Stands for DDP, FSDP and what accelerate makes: a module that holds the model."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments, **options):
        return self.module(*arguments, **options)


WRAPPERS = {
    "peft": with_lora,
    "module": Inside,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "peft, compiled, module": lambda x: Inside(torch.compile(with_lora(x), backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_stands_for_the_model_inside(wrap):
    torch.compiler.reset()
    model = made("llama", "sdpa")
    wrapped = WRAPPERS[wrap](model)
    other = copy.deepcopy(model)  # with the same adapters, and nothing around it
    hf.apply(wrapped, WINDOW)
    hf.apply(other, WINDOW)
    wanted = logits(other)
    assert torch.equal(logits(wrapped), wanted)
    assert hf.explain(wrapped) == hf.explain(other)
    with hf.using(wrapped, sr.Causal()):
        inside = logits(wrapped)
    with hf.using(other, sr.Causal()):
        assert torch.equal(inside, logits(other))
    assert len(hf.SparseCache(wrapped).layers) == len(hf.SparseCache(other).layers)
    hf.parallelize(wrapped)
    hf.parallelize(other)
    assert torch.equal(logits(wrapped), logits(other))
    torch.testing.assert_close(logits(wrapped), wanted, rtol=0, atol=1e-6)
    assert hf.explain(wrapped) == hf.explain(other)
    assert hf.local_positions(wrapped).tolist() == list(range(17))
    hf.parallelize(wrapped, False)
    assert torch.equal(logits(wrapped), wanted)
    torch.compiler.reset()
