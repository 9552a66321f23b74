"""Training: exact resumption, whole checkpoints whatever happens, and text split by file."""

import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_runs import ForkedCommand

import sparsering as sr
from sparsering.cli import main
from sparsering.demo.step_times import TimedAttention
from sparsering.demo.trained import QUICK, bigram_loss, demo, unigram_loss
from sparsering.training import Recipe, load_model, loop, read_text, train
from sparsering.training.checkpoint import load_checkpoint
from sparsering.training.data import training_window, validation_windows

RECIPE = Recipe(
    pattern="LongNet((16, 64), (1, 4))",
    context=64,
    width=16,
    num_layers=1,
    num_heads=2,
    steps=8,
    warmup_steps=2,
    dtype="float32",
)


@pytest.fixture
def corpus(tmp_path):
    """Twenty files, each of its own words."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02d}.txt").write_text(f"file {i:02d} says so. " * 40)
    return folder


@pytest.fixture
def recipe(corpus):
    return dataclasses.replace(RECIPE, data=str(corpus))


def losses(folder: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def validation_losses(folder: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fails(capsys, *argv: object) -> str:
    """The one line that a command with exit code 2 prints on stderr."""
    capsys.readouterr()
    assert main([str(argument) for argument in argv]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("sparsering: ")
    assert "Traceback" not in line
    return line


def test_a_resumed_run_equals_an_uninterrupted_one(recipe, tmp_path):
    whole = train(recipe, tmp_path / "whole", validate_every=4)
    train(recipe, tmp_path / "parts", validate_every=4, stop_after=3)
    assert load_checkpoint(tmp_path / "parts").step == 3
    parts = train(recipe, tmp_path / "parts", validate_every=4, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert list(losses(tmp_path / "parts")) == list(range(1, 9))
    assert validation_losses(tmp_path / "parts") == validation_losses(tmp_path / "whole")
    pairs = zip(whole.model.parameters(), parts.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_records_after_the_checkpoint_are_cut_on_resumption(recipe, tmp_path):
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "run", stop_after=4)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 99.0}\n{"step": 6, "lo')
    train(recipe, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_two_runs_have_the_same_losses_and_another_seed_has_others(recipe, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(dataclasses.replace(recipe, seed=seed), tmp_path / name)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")
    assert losses(tmp_path / "a")[8] < losses(tmp_path / "a")[1]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=SLOW),
        pytest.param(signal.SIGKILL, marks=SLOW),
    ],
)
def test_a_signalled_run_leaves_a_whole_checkpoint_and_resumes(recipe, tmp_path, number):
    out = tmp_path / "run"
    recipe = dataclasses.replace(recipe, steps=100_000)
    command = [sys.executable, "-m", "sparsering", "train", "--out", out, "--save-every", 2]
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name != "checkpoint_layers":
            command += ["--" + field.name.replace("_", "-"), value]
    process: subprocess.Popen | ForkedCommand
    if number == signal.SIGTERM:
        process = ForkedCommand("sparsering", [str(x) for x in command[3:]], tmp_path / "log")
    else:
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or max(losses_so_far(out), default=0) < 5:
            printed = (tmp_path / "log").read_text()
            assert process.poll() is None and time.monotonic() < deadline, printed
            time.sleep(0.01)
        process.send_signal(number)
        code = process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
    step = load_checkpoint(out).step
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
        assert step >= 4
    else:
        assert code == 128 + number
        assert step == max(losses_so_far(out))
        assert "--resume" in (tmp_path / "log").read_text()
    train(recipe, out, resume=True, stop_after=step + 2)
    train(recipe, tmp_path / "whole", stop_after=step + 2)
    assert losses(out) == losses(tmp_path / "whole")


def losses_so_far(folder: Path) -> list[int]:
    text = (folder / "metrics.jsonl").read_text()
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [r["step"] for line in whole if "loss" in (r := json.loads(line))]


def test_resuming_needs_a_checkpoint_the_same_recipe_and_the_same_text(recipe, tmp_path, capsys):
    out = tmp_path / "run"
    assert "no checkpoint.safetensors" in fails(capsys, "train", "--out", out, "--resume")
    assert not out.exists()
    train(recipe, out, stop_after=2)
    before = contents(out)
    line = fails(capsys, "train", "--out", out, "--data", recipe.data, "--context", 64)
    assert "width 16" in line and "pass --resume without these options" in line
    assert "width 16" in fails(capsys, "train", "--out", out, "--resume", "--width", 32)
    (Path(recipe.data) / "00.txt").write_text("changed " * 99)
    line = fails(capsys, "train", "--out", out, "--resume")
    assert f"trained on, {recipe.data}, got another at {recipe.data} (files or" in line
    assert contents(out) == before


def test_a_moved_corpus_resumes(recipe, corpus, tmp_path):
    train(recipe, tmp_path / "run", stop_after=2)
    moved = corpus.rename(tmp_path / "elsewhere")
    argv = ["train", "--out", tmp_path / "run", "--resume", "--data", moved]
    assert main([str(argument) for argument in argv]) == 0
    assert load_checkpoint(tmp_path / "run").step == 8


class FullDisk:
    """Lets the first `room` files through; then there is no space left on the device."""

    def __init__(self, room):
        self.room = room

    def __call__(self, number):
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("room", range(6))
def test_a_full_disk_leaves_the_last_checkpoint_whole(recipe, tmp_path, capsys, monkeypatch, room):
    out = tmp_path / "run"
    argv = ["train", "--out", out, "--save-every", 2, "--data", recipe.data, "--quiet"]
    for name in ("pattern", "context", "width", "num_layers", "num_heads", "steps", "dtype"):
        argv += ["--" + name.replace("_", "-"), getattr(recipe, name)]
    monkeypatch.setattr("sparsering.ground.files.os.fsync", FullDisk(room))
    assert "No space left" in fails(capsys, *argv)
    monkeypatch.undo()
    assert not list(out.glob(".*"))
    if room < 1:  # not even the first checkpoint
        assert not contents(out)
    else:
        # a file for step 0, one of metrics, one for each checkpoint
        assert load_checkpoint(out).step == max(0, (room - 2) * 2)
        assert main(["train", "--out", str(out), "--resume"]) == 0
        argv[2] = tmp_path / "whole"
        assert main([str(argument) for argument in argv]) == 0
        assert losses(out) == losses(tmp_path / "whole")


def test_a_loss_that_is_not_finite_ends_the_run(recipe, tmp_path, capsys, monkeypatch):
    step_of = loop.training_step

    def training_step(model, optimizer, recipe, step, *windows, **options):
        loss, norm, rate = step_of(model, optimizer, recipe, step, *windows, **options)
        return (loss, math.nan, rate) if step == 5 else (loss, norm, rate)

    monkeypatch.setattr(loop, "training_step", training_step)
    with pytest.raises(FloatingPointError, match="checkpoint of step 4 is whole"):
        train(recipe, tmp_path / "run", save_every=4)
    assert load_checkpoint(tmp_path / "run").step == 4


def test_text_is_split_by_file(corpus):
    text = read_text(corpus, context=64, seed=0)
    assert len(text.train_files) + len(text.validation_files) == 20
    assert not set(text.train_files) & set(text.validation_files)
    train_bytes, validation_bytes = (bytes(t.tolist()) for t in (text.train, text.validation))
    for name in text.train_files:
        assert (corpus / name).read_bytes() in train_bytes
        assert f"file {name[:2]} says".encode() not in validation_bytes
    for name in text.validation_files:
        assert (corpus / name).read_bytes() in validation_bytes
        assert f"file {name[:2]} says".encode() not in train_bytes
    assert 0.05 < len(text.validation) / (len(text.train) + len(text.validation)) < 0.2
    again, other = read_text(corpus, context=64, seed=0), read_text(corpus, context=64, seed=5)
    assert again.fingerprint == text.fingerprint
    assert other.validation_files != text.validation_files


def test_a_single_file_is_validated_on_its_end(tmp_path):
    content = bytes(i % 95 + 32 for i in range(5000))
    (tmp_path / "one.txt").write_bytes(content)
    text = read_text(tmp_path / "one.txt", context=64)
    assert bytes(text.train.tolist()) + bytes(text.validation.tolist()) == content
    assert len(text.validation) == 500


def test_the_default_text_is_the_standard_library():
    text = read_text(context=16384)
    assert {"dataclasses.py", "json/decoder.py"} <= {*text.train_files, *text.validation_files}
    assert not [n for n in text.train_files if "site-packages" in n or "/test/" in n]
    assert len(text.train) > 4_000_000


TEXT = b"text " * 1000


@pytest.mark.parametrize(
    ("files", "data", "message"),
    [
        ({}, "nowhere", "found nothing"),
        ({}, "", "found none that match"),
        ({".secret": TEXT}, "", "found none that match"),
        ({"a.txt": TEXT, "b.bin": b"ELF\0" * 1000}, "", "b.bin has a NUL byte at 3"),
        ({"a.txt": b"short"}, "a.txt", "at least 130 bytes of text"),
        ({"a.txt": b""}, "a.txt", "at least 130 bytes of text"),
        ({"a.txt": b"x" * 5000, "b.txt": b"y" * 60}, "", "in the validation files, got"),
    ],
)
def test_unusable_text_is_one_line(tmp_path, capsys, files, data, message):
    folder, out = tmp_path / "text", tmp_path / "run"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    said = fails(capsys, "train", "--data", folder / data, "--context", 64, "--out", out)
    assert message in said
    assert not out.exists()


def test_a_glob_picks_the_text_of_a_folder(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.bin").write_bytes(b"ELF\0" * 1000)
    assert read_text(tmp_path, context=64, glob="*.txt").train_files == ("a.txt[:4500]",)


def test_windows_are_a_function_of_seed_and_step():
    text = torch.arange(256, dtype=torch.uint8).repeat(20)

    def window(seed, step):
        return training_window(text, context=32, batch_size=2, seed=seed, step=step)

    tokens, targets = window(3, 7)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal((tokens + 1) % 256, targets)
    assert torch.equal(window(3, 7)[0], tokens)
    assert not torch.equal(window(3, 8)[0], tokens)
    assert not torch.equal(window(4, 7)[0], tokens)
    assert not torch.equal(tokens[0], tokens[1])


def test_validation_windows_do_not_overlap_and_reach_the_end():
    text = (torch.arange(101) % 256).to(torch.uint8)
    windows = validation_windows(text, context=10, count=8)
    starts = [int(tokens[0, 0]) for tokens, _ in windows]
    assert starts[0] == 0 and len(starts) == 8
    assert all(b - a >= 10 for a, b in itertools.pairwise(starts))
    assert len(validation_windows(text, context=10, count=99)) == 10
    assert len(validation_windows(text[:11], context=10, count=8)) == 1


def test_baselines_by_hand():
    text = torch.tensor(list(b"aab"), dtype=torch.uint8)
    windows = validation_windows(torch.tensor(list(b"ab"), dtype=torch.uint8), context=1, count=1)
    assert unigram_loss(text, windows) == pytest.approx(-math.log(2 / 259))  # "b": 1 + 1 of 3 + 256
    assert bigram_loss(text, windows) == pytest.approx(-math.log(2 / 258))  # "ab": 1 + 1 of 2 + 256


def test_timed_attention_changes_no_gradient():
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    timed = TimedAttention(lambda q, k, v: sr.attention(q, k, v, sr.Causal()))
    plain = torch.autograd.grad(sr.attention(q, k, v, sr.Causal()).sum(), (q, k, v))
    out = timed(q, k, v)
    forward = timed.seconds
    got = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    assert 0 < forward < timed.seconds


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    recipe = Recipe(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [recipe.learning_rate_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_a_demo_writes_a_self_contained_report_and_is_not_overwritten(recipe, tmp_path, capsys):
    out = tmp_path / "demo"
    code = demo(out, recipe=recipe)
    printed = capsys.readouterr().out
    assert code == (0 if "does not beat" not in printed else 1)
    names = {"checkpoint.safetensors", "metrics.jsonl", "report.html"}
    images = {"speed.png", "dense.png", "pattern.png", "start.png", "loss.png"}
    assert names | images <= set(contents(out))
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert page.index("fewer bytes of keys") < page.index("<img") < page.index("<details>")
    assert f"seed {recipe.seed}" in page and recipe.pattern in page
    assert 'name="viewport"' in page
    assert "http" not in page.replace("http-equiv", "")
    for name in ("byte unigram", "byte bigram", "tokens/s, sparse", "peak memory", "tokens/s, gen"):
        assert name in printed and name in page
    assert "full caches would hold" in printed and "0.04 MB, " in page  # 300 x 2 x 16 x 4 bytes
    before = contents(out)
    with pytest.raises(FileExistsError, match=r"finished demo.*open .*report.html, or .* --out"):
        demo(out, recipe=recipe)
    assert contents(out) == before
    with pytest.raises(FileExistsError, match=r"found one of demo; --init .* begins"):
        train(recipe, out, resume=True)  # its report would be of another checkpoint
    assert contents(out) == before
    capsys.readouterr()
    assert main(["demo", "--out", str(out)]) == 2
    line = capsys.readouterr().err
    assert "which is not overwritten" in line and line.count("\n") == 1
    assert contents(out) == before


def test_a_stopped_demo_names_the_command_that_goes_on(tmp_path, capsys, monkeypatch):
    def stopped(*arguments, **options):
        run = train(*arguments, **options, stop_after=2)
        run.stopped_by = signal.SIGTERM
        return run

    monkeypatch.setattr("sparsering.demo.trained.train", stopped)
    out = tmp_path / "a demo"
    assert main(["demo", "--out", str(out), "--quick"]) == 128 + signal.SIGTERM
    said = capsys.readouterr().out
    assert f"Stopped at step 2 of {QUICK.steps}" in said
    command = shlex.split(said.rpartition("to go on: ")[2])
    assert command[-4:] == ["demo", "--out", str(out), "--quick"]
    monkeypatch.undo()
    assert main(command[command.index("demo") :]) == 0
    assert (out / "report.html").exists()


def test_a_demo_without_matplotlib_trains_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", "--out", str(tmp_path / "demo"), "--quick"]) == 2
    assert "install 'sparsering[plots]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_demo_that_was_stopped_goes_on(recipe, tmp_path, capsys, monkeypatch):
    """Whether it was stopped in its training or while it measured."""
    out = tmp_path / "demo"
    train(recipe, out, command="demo", stop_after=3)

    def stop(run: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparsering.demo.trained.step_times", stop)
    with pytest.raises(KeyboardInterrupt):
        demo(out, recipe=recipe)
    assert load_checkpoint(out).step == recipe.steps and not (out / "report.html").exists()
    monkeypatch.undo()
    assert demo(out, recipe=recipe) in (0, 1)
    whole = train(recipe, tmp_path / "whole")
    tokens = torch.tensor([list(b"file")])
    assert torch.equal(load_model(out)(tokens), whole.model.eval()(tokens))
    assert (out / "report.html").exists()


def test_a_run_goes_on_by_itself_and_a_finished_one_is_refused(recipe, tmp_path, capsys):
    out = tmp_path / "run"
    train(recipe, out, stop_after=3)
    capsys.readouterr()
    assert train(recipe, out).step == recipe.steps
    assert "Going on after step 3" in capsys.readouterr().out
    before = contents(out)
    with pytest.raises(
        FileExistsError, match=r"finished run of 8 steps.*--steps above 8, or .*out"
    ):
        train(recipe, out)
    assert contents(out) == before
    assert train(dataclasses.replace(recipe, steps=9), out).step == 9


def test_a_demo_leaves_another_run_alone(recipe, tmp_path):
    train(recipe, tmp_path / "run", stop_after=2)
    before = hashlib.sha256(repr(sorted(contents(tmp_path / "run").items())).encode()).digest()
    with pytest.raises(
        FileExistsError, match=r"expected no run in .*, or one of demo, found one of train; choose"
    ):
        demo(tmp_path / "run")
    after = hashlib.sha256(repr(sorted(contents(tmp_path / "run").items())).encode()).digest()
    assert before == after


def test_a_run_goes_on_beyond_its_steps(recipe, tmp_path):
    train(recipe, tmp_path / "run")
    longer = dataclasses.replace(recipe, steps=12)
    run = train(longer, tmp_path / "run", resume=True)
    assert run.step == 12 and sorted(losses(tmp_path / "run")) == list(range(1, 13))
    assert load_checkpoint(tmp_path / "run").recipe.steps == 12
    with pytest.raises(ValueError, match=r"--steps must be at least 12, .* got 11"):
        train(dataclasses.replace(recipe, steps=11), tmp_path / "run", resume=True)


def test_a_run_begins_with_the_weights_of_another(recipe, tmp_path, capsys):
    first = train(recipe, tmp_path / "first")
    (tmp_path / "other.txt").write_text("other words. " * 200)
    other = dataclasses.replace(recipe, data=str(tmp_path / "other.txt"), seed=5)
    run = train(other, tmp_path / "second", init=tmp_path / "first", stop_after=0)
    for a, b in zip(run.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(run.optimizer.state.values()) and run.step == 0
    assert train(other, tmp_path / "second", resume=True).step == 8
    # The same command goes on, unless the weights of --init are others now.
    longer = dataclasses.replace(other, steps=9)
    assert train(longer, tmp_path / "second", init=tmp_path / "first").step == 9
    with pytest.raises(ValueError, match="got a run of other weights; leave --init out"):
        train(longer, tmp_path / "second", resume=True, init=tmp_path / "second")
    wider = dataclasses.replace(other, width=32)
    with pytest.raises(ValueError, match=r"'width': 16.*got \{'width': 32"):
        train(wider, tmp_path / "third", init=tmp_path / "first")
    options = ["--data", other.data, "--context", "64", "--width", "16", "--num-layers", "1"]
    options += ["--steps", "1", "--init", str(tmp_path / "nowhere")]
    assert main(["train", "--out", str(tmp_path / "fourth"), *options]) == 2
    assert "found no checkpoint.safetensors" in capsys.readouterr().err
