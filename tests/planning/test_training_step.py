"""A planned training step beside what a real one takes (examples/plan_training_step.py)."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

transformers = pytest.importorskip("transformers")

from benchmarks.measure import give_back_freed, peak_extra_bytes  # noqa: E402
from examples.plan_training_step import main, saved_by  # noqa: E402
from sparsering.integrations import transformers as hf  # noqa: E402

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 500}
MODELS = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 176},
    "gpt2": {"n_positions": 4096},
    "gemma3_text": {"head_dim": 16, "intermediate_size": 128, "sliding_window": 64},
    "mixtral": {"num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4},
}


def config_of(kind: str, **sizes: int) -> Any:
    return transformers.AutoConfig.for_model(kind, **(SIZES | MODELS[kind] | sizes))


def step_of(model: Any, tokens: int) -> Any:
    ids = torch.randint(0, 500, (1, tokens), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, labels=ids, use_cache=False)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_what_is_saved_is_what_a_real_step_saves(kind):
    hf.register()
    config = config_of(kind)
    planned = saved_by(config, 1, 300, torch.float32)
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="sparsering").train()
    weights = {x.untyped_storage().data_ptr() for x in model.parameters()}
    found = {}

    def keep(x):
        if (place := x.untyped_storage().data_ptr()) not in weights:
            found[place] = x
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        out = step_of(model, 300)
    keep(out.logits)
    real = sum(x.untyped_storage().nbytes() for x in found.values())
    assert planned.kept == pytest.approx(real, rel=0.02)
    assert planned.weights == sum(x.nbytes for x in model.parameters())
    assert planned.logits == out.logits.nbytes
    assert planned.inputs == 3 * 300 * 64 * 4
    assert planned.layers < planned.kept and planned.peak(True) < planned.peak(False)


def test_a_token_is_multiplied_with_its_experts_alone():
    dense = saved_by(config_of("mixtral", num_experts_per_tok=4), 1, 64, torch.bfloat16).products
    two = saved_by(config_of("mixtral", num_experts_per_tok=2), 1, 64, torch.bfloat16).products
    assert dense - two == 3 * 2 * (3 * 64 * 96)  # layers x experts x their three matrices


def training_step(kind: str, tokens: int, checkpointing: bool) -> Iterator[None]:
    """A whole step of a model whose gradients are new and whose optimizer has states."""
    hf.register()
    config = config_of(kind, hidden_size=256, num_hidden_layers=6, vocab_size=8000)
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="sparsering").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step_of(model, 64).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    give_back_freed()
    yield
    out = step_of(model, tokens)  # whose logits live until the step ends
    out.loss.backward()
    optimizer.step()
    yield
    yield


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_a_planned_peak_is_that_of_a_measured_step(monkeypatch, kind, checkpointing):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")  # freed memory goes back at once
    real = peak_extra_bytes(training_step, kind, 4096, checkpointing)
    config = config_of(kind, hidden_size=256, num_hidden_layers=6, vocab_size=8000)
    planned = saved_by(config, 1, 4096, torch.float32).peak(checkpointing)
    print(kind, checkpointing, f"planned {planned / 1e6:.0f} MB, measured {real / 1e6:.0f} MB")
    assert planned == pytest.approx(real, rel=0.03)


def plan(tmp_path: Any, capsys: Any, *words: str, kind: str = "llama") -> str:
    config_of(kind).save_pretrained(tmp_path)
    assert main([*words, "--model", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    return str(said)


def test_a_plan_says_what_fits_and_how_fast_it_can_be(tmp_path, capsys):
    said = plan(tmp_path, capsys, "--tokens", "4K", "--gpu", "H200")
    saved = saved_by(config_of("llama"), 1, 4096, torch.bfloat16)
    assert f"{saved.weights // 2:,} parameters, bfloat16" in said and "141 GB: fits" in said
    assert "time        at least" in said and "speed       at most" in said
    said = plan(tmp_path, capsys, "--tokens", "4K", "--gpu", "H200", "--memory", "1MB")
    assert said.count("does not fit") == 2
    one, eight = (
        plan(tmp_path, capsys, "--tokens", "64K", "--gpu", "H200", *words)
        for words in ([], ["--ranks", "4", "--replicas", "2", "--fsdp"])
    )
    assert "8 x H200, 4 to a row of 65,536" in eight.replace("\n", " ")
    weights = [re.search(r"weights +(\S+) (.B)", x) for x in (one, eight)]
    assert all(weights) and weights[0].groups() != weights[1].groups()


def test_a_pattern_takes_the_place_of_the_models_masks(tmp_path, capsys):
    dense = plan(tmp_path, capsys, "--tokens", "64K", "--gpu", "H200")
    sparse = plan(tmp_path, capsys, "SlidingWindow(511)", "--tokens", "64K", "--gpu", "H200")
    shares = [int(re.search(r"(\d+)% attention", x)[1]) for x in (dense, sparse)]
    assert shares[0] > 95 and shares[1] < 70


def test_a_model_that_asks_for_values_is_named(tmp_path, capsys):
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    transformers.AutoConfig.for_model("qwen3_next", **sizes).save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "--tokens", "1K"]) == 2
    said = capsys.readouterr().err
    assert "cannot be planned" in said and said.count("\n") == 1
