"""The command line: what it writes, and one clear line for every error."""

import contextlib
import dataclasses
import html
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparsering as sr
from sparsering.cli import main
from sparsering.cli.machine import numa_nodes
from sparsering.training import Recipe, train


def run(*argv):
    return main([str(argument) for argument in argv])


def test_plot_writes_a_picture_that_depends_on_the_pattern(tmp_path, capsys):
    for name, pattern in (("a", "Causal()"), ("b", "Causal() & SlidingWindow(8)")):
        out = tmp_path / "new" / f"{name}.png"
        assert run("plot", pattern, "--length", 128, "--out", out, "--heads", 2) == 0
        assert out.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "new" / "a.png").read_bytes() != (tmp_path / "new" / "b.png").read_bytes()
    assert not list((tmp_path / "new").glob(".*"))


@pytest.mark.parametrize(
    "pattern",
    [
        "__import__('os').system('touch owned')",
        "__import__('os')",
        "Causal().to_dense(4)",
        "[Causal() for x in (1,)][0]",
        "Causal",
        "Causal( &",
        "SlidingWindow(-1)",
        "Documents((4, 4))",
        "",
        "(" + "-" * 5000 + "1)",  # Python's own parser gives up on these
        "lambda:" * 5000 + "1",
        "Full()&" * 5000 + "Full()",
        "SlidingWindow(1" + "0" * 30 + ")",
    ],
)
def test_a_bad_pattern_is_one_line_and_nothing_is_written(tmp_path, capsys, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "p.png"
    out.write_bytes(b"older")
    assert run("plot", pattern, "--length", 64, "--out", out) == 2
    line = capsys.readouterr().err
    assert line.startswith("sparsering: ") and line.count("\n") == 1
    assert out.read_bytes() == b"older"
    assert [p.name for p in tmp_path.iterdir()] == ["p.png"]


def test_an_svg_says_what_it_shows(tmp_path):
    text, out = "LongNet((16, 64), (1, 4)) & Causal()", tmp_path / "p.SVG"
    assert run("plot", text, "--length", 128, "--out", out, "--heads", 4) == 0
    shown = html.unescape(out.read_text())
    layout = sr.LongNet((16, 64), (1, 4)) & sr.Causal()
    pairs = layout.layout(128, num_heads=4).num_pairs
    assert text in shown and "key position (tokens)" in shown and "head 3 of 4" in shown
    assert f"{pairs:,.0f} pairs a head, {pairs / 128**2:.2%} of all at 128 tokens" in shown
    for branch in layout.branches:  # the legend
        share = branch.layout(128, num_heads=4).num_pairs / 128**2
        assert f"{str(branch)[1:-1]}: {share:.2%}" in shown


def test_losses_of_a_run_are_drawn(tmp_path, capsys):
    train(Recipe(context=64, width=16, num_layers=1, steps=2), tmp_path / "run")
    assert run("plot", "--losses", tmp_path / "run", "--out", tmp_path / "p.svg") == 0
    shown = (tmp_path / "p.svg").read_text()
    assert "training" in shown and "validation" in shown and "loss (nats per byte)" in shown
    assert run("plot", "--losses", tmp_path, "--out", tmp_path / "q.svg") == 2
    assert "got no such file; pass train's --out" in capsys.readouterr().err
    assert not (tmp_path / "q.svg").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("Causal()", "--length", 64, "--out", "p.jpg"), ".png or .svg file, got p.jpg"),
        (("Causal()", "--out", "p.png"), "pass --length"),
        (("--out", "p.png"), "expected a pattern, or --losses"),
        (("Causal()", "--losses", "run", "--out", "p.png"), "expected a pattern, or --losses"),
    ],
)
def test_a_bad_plot_is_one_line(capsys, options, message):
    assert run("plot", *options) == 2
    line = capsys.readouterr().err
    assert message in line and line.count("\n") == 1


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("plot", "Causal()", "--length", 64, "--out", tmp_path / "p.png") == 2
    line = capsys.readouterr().err
    assert "drawings need matplotlib" in line and "install 'sparsering[plots]'" in line
    assert line.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("length", ["0", "-3", "many"])
def test_a_bad_option_is_one_line(capsys, length):
    with pytest.raises(SystemExit) as caught:
        run("plot", "Causal()", "--length", length, "--out", "p.png")
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert "tokens must be a whole number, or a text such as" in line and line.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [("\x1b[31mred",), ("info", "--\x1b[31mred\x07"), ("plan", "\x1b[31mred", "--tokens", 9)],
)
def test_no_control_character_of_an_argument_reaches_the_terminal(capsys, argv):
    with contextlib.suppress(SystemExit):
        assert run(*argv) == 2
    line = capsys.readouterr().err
    assert "\\x1b[31mred" in line and line[:-1].isprintable()


def test_numa_nodes_and_the_processors_of_the_process(tmp_path, monkeypatch):
    for number, processors in ((0, "0-3,8-11"), (1, "4-7")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{processors}\n")
    (tmp_path / "node10").mkdir()  # without a list
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 0, 1, 2}, raising=False)
    told = "0: processors 0-3,8-11; 1: processors 4-7; 10: processors unknown"
    assert numa_nodes(tmp_path) == f"{told}; this process runs on 0-2,8"
    monkeypatch.delattr(os, "sched_getaffinity")
    assert numa_nodes(tmp_path / "none") == "unknown"


def test_info_tells_versions_threads_and_every_backend(capsys):
    assert run("info") == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and sr.__version__ in printed
    assert f"{torch.get_num_threads()} of" in printed
    assert "numa nodes" in printed
    lines = printed[printed.index("backends") :].splitlines()[1:]
    states = dict(line.split(maxsplit=1) for line in lines)
    assert states.keys() == sr.backends().keys()
    assert states["gather"] == "usable"


@pytest.mark.parametrize(
    ("module", "argv", "extra"),
    [
        ("safetensors", ("train", "--out", "d"), "cli"),
    ],
)
def test_a_missing_package_names_its_extra(tmp_path, capsys, monkeypatch, module, argv, extra):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert run(*argv) == 2
    assert f"sparsering[{extra}]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a model that goes on with abcabc, and a umlaut after each x."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(("abcabcabc" * 9 + "x\u00e4" * 30) * 20, encoding="utf-8")
    recipe = Recipe(
        pattern="SlidingWindow(8)",
        data=str(folder / "text.txt"),
        context=32,
        batch_size=4,
        width=32,
        num_layers=1,
        steps=40,
        warmup_steps=4,
        dtype="float32",
    )
    train(recipe, folder / "run")
    return folder / "run"


def test_generate_continues_the_prompt_and_says_its_pace(trained, tmp_path, capsys):
    greedy = ("--num-bytes", 6, "--temperature", 0)
    assert run("generate", trained, "--prompt", "abcab", *greedy) == 0
    printed = capsys.readouterr()
    assert printed.out == "abcabcabcab\n"
    said = re.fullmatch(
        r"5 bytes read in [0-9.]+ s, then [0-9,]+ tokens/s; keys and values of 10 bytes: "
        r"2,560 bytes, in a cache with room for more, of ([0-9,]+)\n",
        printed.err,
    )
    assert said and int(said[1].replace(",", "")) > 2560
    for draft in ("ngram", trained):
        assert run("generate", trained, "--prompt", "abcab", *greedy, "--draft", draft) == 0
        drafted = capsys.readouterr()
        assert drafted.out == printed.out
        assert re.search(r"then [0-9,]+ tokens/s \([1-6]\.[0-9] tokens a pass\); keys", drafted.err)
    long = "abc" * 2000  # what is held does not grow with the prompt
    assert run("generate", trained, "--prompt", long, *greedy) == 0
    printed = capsys.readouterr()
    assert printed.out == long + "abcabc\n"
    held, whole = re.search(": ([0-9,]+) bytes held, ([0-9,]+) in a full", printed.err).groups()
    assert int(held.replace(",", "")) < int(whole.replace(",", ""))
    assert run("generate", trained, "--prompt", "") == 2
    assert run("generate", tmp_path / "nowhere") == 2


def test_generate_stops_after_a_text_and_draws_from_few(trained, capsys):
    options = ("--prompt", "abcab", "--num-bytes", 30)
    assert run("generate", trained, *options, "--temperature", 0, "--stop", "bca") == 0
    assert capsys.readouterr().out == "abcabcabca\n"
    for few in (("--top-k", 1), ("--top-p", 1e-6), ("--top-k", 5, "--top-p", 0.01)):
        assert run("generate", trained, *options, "--temperature", 2, *few) == 0
        assert capsys.readouterr().out == "abcab" + "cab" * 10 + "\n"
    texts = []
    for seed in (1, 1, 2):
        assert run("generate", trained, *options, "--temperature", 9, "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--top-k", 0), "top_k must be an int above 0, got 0"),
        (("--top-p", 2), "top_p must be above 0 and at most 1, got 2.0"),
        (("--temperature", -1), "temperature must be a finite number from 0 up, got -1.0"),
        (("--stop", ""), "stop must have a token, got an empty sequence"),
    ],
)
def test_generate_refuses_in_one_line_and_before_any_text(trained, capsys, options, said):
    assert run("generate", trained, *options) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


class Pieces(io.StringIO):
    """Records the text written at each flush."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def flush(self):
        self.seen.append(self.getvalue())


def test_generate_streams_each_character_when_it_is_whole(trained, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Pieces())
    options = ("--num-bytes", 6, "--temperature", 0)
    assert run("generate", trained, "--prompt", "x\u00e4x", *options) == 0
    text = "x\u00e4x\u00e4x\u00e4x\u00e4"[: 3 + 4]  # each umlaut is two bytes
    assert list(dict.fromkeys(sys.stdout.seen)) == [
        *(text[:end] for end in range(3, len(text) + 1)),
        text + "\n",
    ]
    monkeypatch.setattr(sys, "stdout", Pieces())  # the bytes of a character may end the prompt
    assert run("generate", trained, "--prompt", "x\udcc3", "--num-bytes", 1, *options[2:]) == 0
    assert sys.stdout.getvalue() == "x\u00e4\n"
    monkeypatch.setattr(sys, "stdout", Pieces())  # and may not come at all
    assert run("generate", trained, "--prompt", "x\u00e4x", "--num-bytes", 1, *options[2:]) == 0
    assert sys.stdout.getvalue() == "x\u00e4x\ufffd\n"


def test_generate_ends_quietly_where_nobody_reads_on(trained):
    command = [sys.executable, "-m", "sparsering", "generate", str(trained), "--num-bytes", "99999"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(20)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 128 + 13


def test_build_prints_where_the_kernel_lies(capsys):
    assert run("build") == 0
    library = Path(capsys.readouterr().out.strip())
    assert library.name.startswith("cpu-") and library.exists()


def test_build_prints_all_that_a_failing_compiler_says(tmp_path, capsys, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho one error >&2; echo and its context >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPARSERING_CACHE", str(tmp_path))
    assert run("build") == 2
    told = capsys.readouterr().err
    assert "one error" in told and "and its context" in told


def test_build_for_a_gpu_says_where_there_is_none(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("build", "--gpu") == 2
    assert "--gpu needs a GPU" in capsys.readouterr().err


def test_the_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sparsering"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module("sparsering", run_name="__main__")
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert "COMMAND" in said and said.count("\n") == 1


def test_the_help_of_train_shows_the_default_of_each_setting(capsys):
    with pytest.raises(SystemExit, match="0"):
        run("train", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    for setting in dataclasses.fields(Recipe):
        line = re.search(rf"--{setting.name.replace('_', '-')} (?!\[)[^-].*?(?= --|$)", shown)
        shows = setting.default in (None, False, "") or f"(default: {setting.default})" in shown
        assert line and shows, setting.name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "vit", "num_hidden_layers": 1}', "for vit: got a forward without input_i"),
        ('{"model_type": "resnet"}', "for resnet: got no num_hidden_layers"),
        ('{"model_type": "swin"}', r"for swin: got num_attention_heads=.3, 6, 12, 24."),
        ('{"model_type": "t5", "d_model": 32}', "for t5: got an encoder with a decoder"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "llama: got num_hidden_layers=0"),
        ('{"model_type": "gptj", "n_layer": 1, "n_embd": 64, "n_head": 4}', "for gptj: got with"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "folder with a config.json.*'wide'"),
        ("{", "folder with a config.json, .* not a valid JSON file"),
        ("[]", "folder with a config.json, .* Unrecognized model"),
    ],
)
def test_try_names_what_a_config_of_another_kind_lacks(config, message, tmp_path, capsys):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(config)
    assert main(["try", "--model", str(path), "--length", "64"]) == 2
    out, error = capsys.readouterr()
    assert not out and re.search(message, error), error
