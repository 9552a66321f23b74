"""A stranger's checkpoint runs no code; each error in its JSON is one line of text.

Each test changes a copy of a whole checkpoint and gives it to the command line.
"""

import ast
import dataclasses
import hashlib
import io
import json
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from stranger import (
    RECIPE,
    about,
    assert_one_line,
    assert_refused,
    command,
    describe,
    generate,
    places,
    put,
    tensor_file,
    unpickled,
    write_about,
)

import sparsering
from sparsering.training import load_model


def test_the_checkpoint_as_it_was_written_is_taken(run):
    assert generate(run)[0] == 0
    assert command("train", "--out", run, "--resume") == (0, "")
    assert about(run)["step"] == 4


# Code that a pickle would run


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def pickled(path: Path) -> bytes:
    return pickle.dumps(Payload(path))


def zipped(path: Path) -> bytes:
    """Pickles the payload as torch.save does."""
    file = io.BytesIO()
    torch.save(Payload(path), file)
    return file.getvalue()


def test_the_payload_would_run(tmp_path):
    pickle.loads(pickled(tmp_path / "a"))
    torch.load(io.BytesIO(zipped(tmp_path / "b")), weights_only=False)
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()
    assert unpickled


@pytest.mark.parametrize("dump", [pickled, zipped])
@pytest.mark.parametrize("place", ["file", "description", "metrics.jsonl"])
def test_a_planted_pickle_does_not_run(run, tmp_path, dump, place):
    content = dump(tmp_path / "owned")
    if place == "description":
        describe(run, content)
    else:
        (tensor_file(run) if place == "file" else run / place).write_bytes(content)
    if place == "metrics.jsonl":  # which has torn lines after a crash
        assert command("train", "--out", run, "--resume") == (0, "")
    else:
        assert_refused(run)
    assert not (tmp_path / "owned").exists()


def test_a_folder_written_through_pickle_is_never_read(run, tmp_path):
    parts = run / "checkpoint-000001-0123456789ab"
    parts.mkdir()
    files = {}
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        content = pickled(tmp_path / "owned")
        (parts / name).write_bytes(content)
        files[name] = hashlib.sha256(content).hexdigest()
    tensors = {"folder": parts.name, "files": files}
    (run / "checkpoint.json").write_text(json.dumps(about(run) | {"tensors": tensors}))
    tensor_file(run).unlink()
    assert_refused(run, "a checkpoint of version 0.2.0")
    assert not (tmp_path / "owned").exists()


READERS_OF_CODE = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"),
    *("torch.load", "torch.save", "torch.distributed.checkpoint", "torch.jit.load", "torch.hub"),
    *("torch.package", "torch.export.load", "numpy", "eval", "exec", "compile", "__import__"),
    *(
        *("runpy", "code.interact", "codeop", "yaml", "importlib.import_module"),
        "torch.ops.load_library",
    ),
}
ALLOWED = {
    ("kernels/cpu/build.py", "torch.ops.load_library"),  # the kernel that was compiled here
    # its storage of safetensors; test_shards.py plants pickles where its usual storage has them
    ("training/parts.py", "torch.distributed.checkpoint"),
    # slides and Prov-GigaPath's weights are .pt and .pth files; tensors alone, see the next test
    *(("ground/files.py", "torch.load"), ("data/slides.py", "torch.save")),
}


def names_used(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports or mentions, with aliases spelled out."""
    spelled: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name
                if name.asname:
                    spelled[name.asname] = name.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                yield f"{node.module}.{name.name}"
                spelled[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        parts, value = [], node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name):
            yield ".".join([spelled.get(value.id, value.id), *reversed(parts)])


def code_readers(source: str) -> set[str]:
    prefixes = {
        name[:end]
        for name in names_used(ast.parse(source))
        for end in (*(i for i, c in enumerate(name) if c == "."), len(name))
    }
    return prefixes & READERS_OF_CODE


def test_files_of_torch_are_read_as_tensors_alone():
    package, loads = Path(sparsering.__file__).parent, 0
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {x.arg: ast.unparse(x.value) for x in node.keywords}
                assert given["weights_only"] == "True", path
                loads += 1
    assert loads == 1


def test_no_module_of_the_package_reads_what_can_run_code():
    package = Path(sparsering.__file__).parent
    found = {
        (path.relative_to(package).as_posix(), name)
        for path in package.rglob("*.py")
        for name in code_readers(path.read_text())
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "def f():\n    from pickle import loads as text"),
        *("import torch as t\nt.load('x')", "from torch import load"),
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint import FileSystemReader",
        *("from torch.distributed import checkpoint", "x = eval('1')"),
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_such_a_module_would_be_found(source):
    assert code_readers(source)


# The description


NESTED: Any = []
for _ in range(200):
    NESTED = [NESTED]
STRANGE = [None, True, -1, 1.5, 10**40, "", "x\x1b]0;\x07\u2028y", [], {}, NESTED, {"a": [1]}]
NOTES = {"torch"}  # for people; never read
FREE = {  # any value of these types, as far as can be told without the text
    "command": [str],
    "fingerprint": [str],
    "data": [str, NoneType],
    "glob": [str],
    "checkpoint_layers": [bool],
}


@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_value_of_another_kind_is_refused_at_every_place(run, share):
    values = about(run)
    names = {at: at[-1] for at in places(values) if at and at[0] not in NOTES}
    assert len(names) > 25
    for number, (at, name) in enumerate([((), ""), *names.items()]):
        old = values
        for inner in at:
            old = old[inner]
        for new in STRANGE[(share + number) % 3 :: 3]:
            write_about(run, put(values, at, new))
            code, said = generate(run)
            if isinstance(old, float) and type(new) in (int, float):
                assert code == 0 or assert_one_line(code, said) is None  # as good as any, or not
            elif (
                type(new) in FREE.get(name, [])
                or (name, new) == ("seed", -1)
                or (type(new) is type(old) and new == old)
                or (at[:1] == ("sha256",) and name.startswith("optimizer."))  # which is not loaded
            ):
                assert code == 0
                assert re.fullmatch(
                    r"1 bytes read in .*; keys and values of 1 bytes: .*\n", said
                ), said
            else:
                assert "damaged or foreign" in said, (at, new)
                assert_one_line(code, said)


@pytest.mark.parametrize("missing", [("format",), ("step",), ("recipe", "width"), ("sha256",)])
def test_a_missing_name_is_refused(run, missing):
    values = about(run)
    inner = values
    for name in missing[:-1]:
        inner = inner[name]
    del inner[missing[-1]]
    write_about(run, values)
    assert_refused(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"",
        lambda text: b"\xff\xfe" + text,
        lambda text: text.replace(b'"train"', b'"tr\xffin"'),
        lambda text: text[: len(text) // 2],
        lambda text: text + b"}",
        lambda text: b"[" * 200_000,
        lambda text: b'{"format":' * 100_000,
        lambda text: text.replace(b'"step": 1', b'"step": 1, "step": 1'),
        lambda text: text.replace(b'"step": 1', b'"step": NaN'),
        lambda text: text.replace(b'"step": 1', b'"step": Infinity'),
        lambda text: text.replace(b'"step": 1', b'"step": 1' + b"0" * 5000),
        lambda text: text.replace(b'"step": 1', b'"step": 1e0'),
        lambda text: text.replace(b'"clip_norm": 1.0', b'"clip_norm": 1e999'),
        lambda text: text.replace(b'"clip_norm": 1.0', b'"clip_norm": NaN'),
        lambda text: text.replace(b'"context": 32', b'"context": 32, "__class__": "os.system"'),
        lambda text: text + b" " * (17 << 20),
        lambda text: b"null",
        lambda text: b'{"model_type": "gpt2", "step": 7}',  # of another program
        lambda text: text.replace(b'"num_heads"', b'"heads"'),
        lambda text: text.decode().encode("utf-16")[:-1],
    ],
)
def test_json_that_is_not_as_we_write_it_is_refused(run, change):
    text = json.dumps(about(run)).encode()
    assert change(text) != text
    describe(run, change(text))
    assert_refused(run)


def test_the_message_of_a_name_from_a_file_has_no_control_characters(run):
    values = about(run)
    values["recipe"]["\x1b[31mred\x07"] = 1
    write_about(run, values)
    with pytest.raises(ValueError, match=r"unknown ones: \\x1b\[31mred\\x07") as caught:
        load_model(run)
    assert str(caught.value).isprintable()


HOSTILE_PATTERNS = [
    *("__import__('os').system('x')", "().__class__", "Causal().to_dense(4)", "t0", "\0", "\ud800"),
    *("-" * 900 + "1", "~" * 900, "(" * 900, "[" * 90 + "]" * 90, "not " * 200 + "1"),
    *("lambda:" * 140 + "1", "a" + ".a" * 400, "Full()&" * 150 + "Full()", "9" * 900),
    "x" * 10_000_000,
    *("(" * 100 + "Full()" + ")" * 200, "1if 2else 3", "'\\d'", "f'{1}'", "Full(**{})"),
    *("Dense(None)", "Causal() + 1", "1 + 1", "LongNet((1,), (1, 2))", "Full() if 1 else Full()"),
]
COSTLY_PATTERNS = [
    *("SlidingWindow(4, 4, 2147483648)", "SlidingWindow(4, 4, 1099511627776)", "Dilated(8, 2**62)"),
    *(f"Dilated({2**n}, {m})" for n in (31, 40, 61, 62) for m in (1, 4)),
    *(f"SlidingWindow(4, 4, {2**n})" for n in (57, 61, 62)),
    *(f"{name}({2**62}, 4)" for name in ("Dilated", "SlidingWindow", "BlockWindow")),
    f"Dilated(8, {2**62})",
    f"BlockDilated(({2**62},), {2**61})",
    "&".join(f"(Dilated(64, {2 + 2 * i}) | Dilated(64, {3 + 2 * i}))" for i in range(20)),
    "|".join(f"SlidingWindow(4, 4, {100 + i})" for i in range(40)),
    "(" * 50 + "Full()" + " & Causal() | Full())" * 45 + ")" * 5,
    "Packed((8,), " * 60 + "Full()" + ")" * 60,
    "KeyPadding((1, 2))",
    f"Documents(({2**62}, {2**62}))",
    "Documents(())",
    "RandomBlocks(1e-300, 1)",
    f"GlobalTokens({2**63 - 1})",
    f"Hierarchical((({2**62}, {2**62}),), {2**62})",
]


@pytest.mark.parametrize("number", range(len(HOSTILE_PATTERNS)))
def test_a_hostile_pattern_is_refused(run, number):
    values = about(run)
    write_about(run, put(values, ("recipe", "pattern"), HOSTILE_PATTERNS[number]))
    assert_refused(run)


def test_the_shapes_of_a_recipe_are_those_of_its_model():
    recipe = dataclasses.replace(RECIPE, num_layers=12)
    built = {name: p.shape for name, p in recipe.build_model().named_parameters()}
    assert dict(recipe.parameter_shapes()) == built


def test_a_pattern_of_huge_numbers_or_many_parts_runs_or_is_one_line(run):
    values = about(run)
    for pattern in COSTLY_PATTERNS:
        write_about(run, put(values, ("recipe", "pattern"), pattern))
        began = time.process_time()  # which other work does not change
        code, said = generate(run)
        if code:
            assert_one_line(code, said)
        assert time.process_time() - began < 10, pattern


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("width", 2**n) for n in (4, 20, 24, 62)),
        *(("num_layers", n) for n in (2, 10_000, 1 << 24, 1 << 62)),
        *(("num_heads", n) for n in (0, 3, 8, 1 << 24)),
        *(("seed", n) for n in (-(1 << 63) - 1, 1 << 64)),
        *(("steps", n) for n in (0, -1, 1 << 62)),
        *(("context", 1 << 41), ("batch_size", 1 << 41), ("warmup_steps", -1)),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(run, name, number):
    write_about(run, put(about(run), ("recipe", name), number))
    assert_refused(run)


@pytest.mark.parametrize("step", [0, 2, 4, 5])
def test_a_step_goes_with_its_tensors(run, step):
    """At step 0 there is no state of the optimizer; after it there is."""
    write_about(run, about(run) | {"step": step})
    if step in (0, 5):
        assert_refused(run)
    else:
        assert generate(run)[0] == 0
