"""Each example ends in one line on stderr and exit code 2 for ordinary mistakes.

Examples and their options are found by reading examples/.
"""

import ast
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.pages import ROOT

import sparsering.integrations

FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
BELOW_1_IS_RIGHT = {"--seed", "--most", "--lr"}
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def ending(path: Path, arguments: list[str], monkeypatch, capsys) -> str:
    """Runs an example as a program; returns its line on stderr, without the program's name."""
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.endswith("\n"), (arguments, ended.value.code, said)
    (line,) = said.splitlines()
    name, _, text = line.partition(": ")
    assert name in (path.stem, path.name) and text, line
    return text


def options(path: Path) -> dict[str, str]:
    """The options of an example, each with the name of its type; "str" if it names none."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            keywords = {x.arg: ast.unparse(x.value) for x in node.keywords}
            if "action" not in keywords:
                kind = "choices" if "choices" in keywords else keywords.get("type", "str")
                found[ast.literal_eval(node.args[0])] = kind
    return found


@each_example
def test_wrong_arguments(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "--wrong" in ending(path, ["--wrong"], monkeypatch, capsys)
    found = options(path)
    assert found
    if "chronos" in path.read_text(encoding="utf-8") and find_spec("chronos") is None:
        return  # its imports end it
    for name, kind in found.items():
        if kind in ("int", "positive", "float", "choices"):
            text = ending(path, [name, "wrong"], monkeypatch, capsys)
            assert name in text and "wrong" in text
        if kind in ("int", "positive") and name not in BELOW_1_IS_RIGHT:
            for number in ("0", "-3"):
                assert number in ending(path, [name, number], monkeypatch, capsys)


@each_example
def test_wrong_paths(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a text")
    wrong = str(tmp_path / "file" / "nowhere")
    for name, kind in options(path).items():
        if kind not in ("Path", "str") or name == "--compiler":
            continue
        text = ending(path, [name, wrong], monkeypatch, capsys)
        assert "nowhere" in text or "chronos" in text


def hide(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets imports of a package fail, also of what is imported already."""
    for name in [module, *sys.modules]:
        if name.split(".")[0] == module:
            monkeypatch.setitem(sys.modules, name, None)
    if module == "transformers":
        monkeypatch.delattr(sparsering.integrations, module, raising=False)
        for name in [x for x in sys.modules if x.startswith("sparsering.integrations.tr")]:
            monkeypatch.delitem(sys.modules, name)


LAZILY = {  # the options with which an example needs a package
    ("train_packed", "transformers"): ["--model", "qwen3"],
    ("train_over_ranks", "accelerate"): ["--engine", "accelerate"],
    ("train_over_ranks", "lightning"): ["--engine", "lightning"],
    ("train_over_ranks", "peft"): ["--engine", "fsdp2", "--lora"],
}


@each_example
def test_a_missing_package_is_named_with_a_way_to_get_it(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {x.name.split(".")[0] for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module).split(".")[0])
    for module in modules - {"torch", "sparsering"} - set(sys.stdlib_module_names):
        lazily = LAZILY.get((path.stem, module), [])
        with monkeypatch.context() as patched:
            hide(module, patched)
            text = ending(path, lazily, patched, capsys)
        assert re.search(r"pip.* install ", text), text


def test_texts_that_are_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a short text")
    packed, long = FOLDER / "train_packed.py", FOLDER / "finetune_long_context.py"
    for path, given, said in (
        (packed, ["--text", "empty"], "empty has no text; put files into it"),
        (packed, ["--text", "file"], "--text must be a folder of texts, got file"),
        (packed, ["--text", ".", "--batch", "3"], "1 rows of 1024 tokens are fewer than --batch 3"),
        (long, ["--text", "empty"], "--text must be a file, got empty"),
        (long, ["--text", "file"], "the text has 12 tokens, fewer than --length 8192"),
    ):
        assert said in ending(path, given, monkeypatch, capsys)


def test_another_length_on_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_text("a text of some length, " * 20)
    (tmp_path / "run").mkdir()
    example = runpy.run_path(str(FOLDER / "train_packed.py"))
    options = ["--text", "texts", "--length", "32", "--steps", "4", "--out", "run"]
    args = example["parse"](options)
    settings = {name: str(getattr(args, name)) for name in example["SAME_WHEN_RESUMED"]}
    torch.save({"settings": settings}, tmp_path / "run" / "checkpoint.pt")
    options[3] = "64"
    said = ending(FOLDER / "train_packed.py", options, monkeypatch, capsys)
    assert said.startswith("run has a run with --length 32, not 64; pass the same options")
