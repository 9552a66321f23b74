"""A planned training step beside what a real one takes (`sparsering plan --model`)."""

import argparse
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import sparsering as sr

transformers = pytest.importorskip("transformers")

from benchmarks.measure import give_back_freed, peak_extra_bytes  # noqa: E402
from sparsering.cli import main  # noqa: E402
from sparsering.cli.planned_models import OWN, planned_model  # noqa: E402
from sparsering.cli.planned_models import saved_by_config as saved_by  # noqa: E402
from sparsering.integrations import transformers as hf  # noqa: E402
from sparsering.models import LongNetEncoder, LongNetLM  # noqa: E402
from sparsering.planning import training_step as training_step_module  # noqa: E402
from sparsering.planning.estimate import Scenario  # noqa: E402

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
    assert main(["plan", *words, "--model", str(tmp_path)]) == 0
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
    assert main(["plan", "--model", str(tmp_path), "--tokens", "1K"]) == 2
    said = capsys.readouterr().err
    assert "cannot be planned" in said and said.count("\n") == 1


def own_model(name: str, **options: Any) -> Any:
    """Returns what `plan --model NAME` plans, by its options."""
    words = {"width", "layers", "in_width", "vocab_size", "heads", "kv_heads", "head_dim"}
    given = dict.fromkeys(words) | {"pattern": PATTERN, "model": name, **options}
    return planned_model(argparse.Namespace(**given))


PATTERN = "LongNet((512, 2048), (1, 4))"
WIDTH, LAYERS, TOKENS = 256, 2, 2048


def own_training_step(name: str, checkpointing: bool, loss: str) -> Iterator[None]:
    """A whole step of the library's own model whose optimizer has states."""
    sizes = {"width": WIDTH, "num_layers": LAYERS, "num_heads": 4}
    pattern = sr.parse(PATTERN)
    if name == "longnet":
        model: Any = LongNetLM(pattern, checkpoint_layers=checkpointing, **sizes)
    else:
        sizes |= {"in_width": 384, "axes": 2}
        model = LongNetEncoder(pattern, checkpoint_layers=checkpointing, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(tokens: int) -> None:
        if name == "longnet":
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            model.loss(ids, ids).backward()
        else:
            tiles, places = torch.zeros(1, tokens, 384), torch.zeros(tokens, 2)
            states = model(tiles, places)
            (states[:, 0].sum() if loss == "class token" else states.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(TOKENS)  # layouts and states
    give_back_freed()
    yield
    step(TOKENS)
    yield
    yield


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("longnet-encoder", "class token"),
        pytest.param("longnet-encoder", "all", marks=pytest.mark.slow),
        pytest.param("longnet", "next byte", marks=pytest.mark.slow),
    ],
)
def test_a_planned_peak_of_our_own_models_is_that_of_a_step(monkeypatch, name, loss, checkpointing):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")  # freed memory goes back at once
    real = peak_extra_bytes(own_training_step, name, checkpointing, loss)
    sizes = {"in_width": 384} if name == "longnet-encoder" else {}
    planned = own_model(name, width=WIDTH, layers=LAYERS, heads=4, **sizes)
    scenario = Scenario(
        pattern=planned.patterns[0], tokens=TOKENS, num_heads=4, num_kv_heads=4, head_dim=64,
        dtype=torch.float32, batch_size=1, backward=True, machine=None, ranks=1, sharding="auto",
        backend=None, block_size=None,
    )  # fmt: skip
    step = training_step_module._step_of(planned, scenario, 1)
    beside = step.peak(checkpointing) - 3 * step.weights  # weights and states were there before
    print(f"{name} {loss} {checkpointing} planned {beside / 1e6:.0f}, measured {real / 1e6:.0f} MB")
    assert beside == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("model", [*OWN, "llama"])
def test_without_tokens_the_plan_says_the_longest_row_that_trains(tmp_path, capsys, model):
    words = ["plan", "--gpu", "L4", "--memory", "2GB", "--model", model]
    if model == "llama":
        config_of("llama", num_hidden_layers=1).save_pretrained(tmp_path)
        words[-1] = str(tmp_path)
    else:
        words += ["--width", "128", "--layers", "2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    longest = [int(x.replace(",", "")) for x in re.findall(r"about ([\d,]+) tokens", said)]
    assert len(longest) == 2 and 1000 < longest[0] < longest[1]
    for tokens, place in zip(longest, (0, 1), strict=True):
        for factor, fits in ((1.0, True), (1.15, False)):
            assert main([*words, "--tokens", str(int(tokens * factor))]) == 0
            lines = re.findall(r"^peak .*: (fits|does not fit)$", capsys.readouterr().out, re.M)
            assert (lines[place] == "fits") == fits
    assert main([*words, "--memory", "1MB"]) == 0
    assert capsys.readouterr().out.count("none: ") == 2


def test_a_slide_encoder_of_12_x_768_trains_on_25000_tiles_in_24_gb(capsys):
    assert main(["plan", "--model", "longnet-encoder", "--memory", "24GB"]) == 0
    said = capsys.readouterr().out
    assert "LongNetEncoder, 12 layers, 86,135,040 parameters, float32" in said
    assert "longest     about 25,000 tokens" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "longnet-encoder", "--head-dim", "64"], "leave --head-dim out"),
        (["--model", "longnet", "--in-width", "64"], "leave --in-width out"),
        (["--model", "longnet", "--take", "1"], "leave --model out"),
        (["--width", "64", "--tokens", "4K"], "name a model"),
        (["Causal()"], "pass --tokens"),
    ],
    ids=str,
)
def test_options_that_do_not_belong_are_one_line(capsys, words, message):
    assert main(["plan", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--model", "LongNetEncoder"], "got LongNetEncoder; did you mean longnet-encoder?"),
        (["--model", "longnet", "--memory", "24"], "such as 24GB, got 24 bytes; name a unit"),
    ],
)
def test_a_near_name_and_a_size_without_a_unit_are_asked_about(capsys, arguments, told):
    try:
        code = main(["plan", "--tokens", "4K", *arguments])
    except SystemExit as ended:  # of the parser
        code = ended.code
    assert code == 2
    assert told in capsys.readouterr().err
