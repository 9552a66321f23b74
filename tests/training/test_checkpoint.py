"""A stranger's checkpoint: it runs no code, and whatever is wrong with it is one line.

Each test changes a copy of a whole checkpoint and gives it to the command line. Files are sealed
anew after a change, as their author would: the hashes in `checkpoint.json` are right.
"""

import ast
import contextlib
import copy
import dataclasses
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import sparsering
from sparsering.cli import main
from sparsering.files import replace_file
from sparsering.training import Recipe, load_model, train
from sparsering.training.checkpoint import OLDER_FORMAT

RECIPE = Recipe(
    pattern="SlidingWindow(8)",
    context=32,
    width=8,
    num_layers=1,
    num_heads=2,
    steps=4,
    warmup_steps=2,
    dtype="float32",
)

unpickled: list[str] = []
"""Names that something has unpickled in this process, ever."""


def note_unpickling(event: str, arguments: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        unpickled.append(".".join(map(str, arguments)))


sys.addaudithook(note_unpickling)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder with a checkpoint of step 1, as it was written."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text("abc " * 400)
    recipe = dataclasses.replace(RECIPE, data=str(folder / "text.txt"))
    train(recipe, folder / "run", stop_after=1)
    return folder / "run"


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def about(run: Path) -> Any:
    return json.loads((run / "checkpoint.json").read_text())


def write_about(run: Path, values: object) -> None:
    (run / "checkpoint.json").write_text(json.dumps(values))


def tensor_file(run: Path) -> Path:
    (path,) = run.glob("checkpoint-*.safetensors")
    return path


def seal(run: Path, *contents: bytes) -> None:
    """Puts files with these contents in place of the checkpoint's."""
    values = about(run)
    for name in values["tensors"]["files"]:
        (run / name).unlink()
    values["tensors"]["files"] = {}
    for content in contents:
        digest = hashlib.sha256(content).hexdigest()
        name = f"checkpoint-000001-{digest[:12]}.safetensors"
        (run / name).write_bytes(content)
        values["tensors"]["files"][name] = {"bytes": len(content), "sha256": digest}
    write_about(run, values)


def command(*argv: object) -> tuple[int, str]:
    """The exit code of a command and what it says on stderr."""
    before = len(unpickled)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main([str(argument) for argument in argv])
    assert unpickled[before:] == []
    return code, said.getvalue()


def generate(run: Path) -> tuple[int, str]:
    return command("generate", run, "--num-bytes", 1)


def assert_one_line(code: int, said: str) -> None:
    assert code == 2
    assert said.startswith("sparsering: ") and said.endswith("\n") and said.count("\n") == 1
    assert len(said) < 3000 and said[:-1].isprintable()


def assert_refused(run: Path, what: str = "damaged or foreign") -> None:
    """Both commands say one line with this in it, and leave the folder as it is."""
    before = sorted((path.name, path.lstat().st_mtime_ns) for path in run.iterdir())
    began = time.monotonic()
    for code, said in (generate(run), command("train", "--out", run, "--resume")):
        assert_one_line(code, said)
        assert what in said
    assert time.monotonic() - began < 10
    assert sorted((path.name, path.lstat().st_mtime_ns) for path in run.iterdir()) == before


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
    """As torch.save writes it."""
    file = io.BytesIO()
    torch.save(Payload(path), file)
    return file.getvalue()


def test_the_payload_would_run(tmp_path):
    pickle.loads(pickled(tmp_path / "a"))
    torch.load(io.BytesIO(zipped(tmp_path / "b")), weights_only=False)
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()
    assert unpickled


@pytest.mark.parametrize("dump", [pickled, zipped])
@pytest.mark.parametrize("place", ["tensors", "checkpoint.json", "metrics.jsonl"])
def test_a_planted_pickle_does_not_run(run, tmp_path, dump, place):
    content = dump(tmp_path / "owned")
    if place == "tensors":
        seal(run, content)
    else:
        (run / place).write_bytes(content)
    if place == "metrics.jsonl":  # which has torn lines after a crash
        assert command("train", "--out", run, "--resume") == (0, "")
    else:
        assert_refused(run)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("format_", [OLDER_FORMAT, "sparsering checkpoint 2"])
def test_a_folder_written_through_pickle_is_never_read(run, tmp_path, format_):
    parts = run / "checkpoint-000001-0123456789ab"
    parts.mkdir()
    files = {}
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        content = pickled(tmp_path / "owned")
        (parts / name).write_bytes(content)
        files[name] = hashlib.sha256(content).hexdigest()
    tensors = {"folder": parts.name, "files": files}
    write_about(run, about(run) | {"format": format_, "tensors": tensors})
    if format_ == OLDER_FORMAT:
        assert_refused(run, "written through pickle by an early version")
        assert_refused(run, "train anew with another --out")
    assert_refused(run)
    assert not (tmp_path / "owned").exists()


READERS_OF_CODE = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"),
    *("torch.load", "torch.save", "torch.distributed.checkpoint", "torch.jit.load", "torch.hub"),
    *("torch.package", "torch.export.load", "numpy", "eval", "exec", "compile", "__import__"),
    *(
        "runpy",
        "code.interact",
        "codeop",
        "yaml",
        "importlib.import_module",
        "torch.ops.load_library",
    ),
}
ALLOWED = {
    ("kernels/cpu/build.py", "torch.ops.load_library"),  # the kernel that was compiled here
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
        "import pickle",
        "def f():\n    from pickle import loads as text",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint import FileSystemReader",
        "from torch.distributed import checkpoint",
        "x = eval('1')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_such_a_module_would_be_found(source):
    assert code_readers(source)


# checkpoint.json


def places(value: object, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where values stand in JSON."""
    yield at
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*at, name))


def put(values: Any, at: tuple[str, ...], new: object) -> Any:
    """A copy with another value at a place."""
    if not at:
        return new
    values = copy.deepcopy(values)
    inner = values
    for name in at[:-1]:
        inner = inner[name]
    inner[at[-1]] = new
    return values


NESTED: Any = []
for _ in range(200):
    NESTED = [NESTED]
STRANGE = [None, True, -1, 1.5, 10**40, "", "x\x1b]0;\x07\u2028y", [], {}, NESTED, {"a": [1]}]
NOTES = {"torch", "threads", "rng"}  # for people; never read
FREE = {  # any value of these types, as far as can be told without the text
    "command": [str],
    "fingerprint": [str],
    "launch": [str, NoneType],
    "data": [str, NoneType],
    "glob": [str],
    "checkpoint_layers": [bool],
}


def test_a_value_of_another_kind_is_refused_at_every_place(run):
    values = about(run)
    names = {at: at[-1] for at in places(values) if at and at[0] not in NOTES}
    assert len(names) > 25
    for at, name in [((), ""), *names.items()]:
        old = values
        for inner in at:
            old = old[inner]
        for new in STRANGE:
            write_about(run, put(values, at, new))
            code, said = generate(run)
            if isinstance(old, float) and type(new) in (int, float):
                assert code == 0 or assert_one_line(code, said) is None  # as good as any, or not
            elif type(new) in FREE.get(name, []) or (name, new) == ("seed", -1):
                assert code == 0
                assert re.fullmatch(r"1 bytes read in .* in a full cache\n", said), said
            else:
                assert "damaged or foreign" in said, (at, new)
                assert_one_line(code, said)


@pytest.mark.parametrize("missing", [("format",), ("step",), ("recipe", "width"), ("tensors",)])
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
        lambda text: text.decode().encode("utf-16")[:-1],
    ],
)
def test_json_that_is_not_as_we_write_it_is_refused(run, change):
    path = run / "checkpoint.json"
    text = path.read_bytes()
    path.write_bytes(change(text))
    assert path.read_bytes() != text
    assert_refused(run)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/", "/etc/passwd", "../outside.safetensors", "a/../b.safetensors"),
        *(
            "checkpoint-1.safetensors\0",
            "checkpoint-\u00e9.safetensors",
            "checkpoint-1.safetensors\n",
        ),
        *("checkpoint-/x.safetensors", "checkpoint-1.pt", "outside.safetensors", "\ud800", "C:x"),
        "checkpoint-" + "0" * 4000 + ".safetensors",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(run, name):
    """Also where the file is there, and is the right one."""
    values = about(run)
    ((old, sealed),) = values["tensors"]["files"].items()
    with contextlib.suppress(OSError, ValueError):
        shutil.copy(run / old, run / name)
    write_about(run, values | {"tensors": {"files": {name: sealed}}})
    assert_refused(run)


HOSTILE_PATTERNS = [
    *("__import__('os').system('x')", "().__class__", "Causal().to_dense(4)", "t0", "\0", "\ud800"),
    *("-" * 900 + "1", "~" * 900, "(" * 900, "[" * 90 + "]" * 90, "not " * 200 + "1"),
    *(
        "lambda:" * 140 + "1",
        "a" + ".a" * 400,
        "Full()&" * 150 + "Full()",
        "9" * 900,
        "x" * 10_000_000,
    ),
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
        began = time.monotonic()
        code, said = generate(run)
        if code:
            assert_one_line(code, said)
        assert time.monotonic() - began < 10, pattern


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


# The files of tensors


def header(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(head: object, data: bytes) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data


EMBEDDING = "model.embedding.weight"


def changed_entry(**values: object) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        head, data = header(content)
        return with_header(head | {EMBEDDING: head[EMBEDDING] | values}, data)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: b"abc",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content + b"\0",
        lambda content: b"\0" * len(content),
        lambda content: struct.pack("<Q", 2**63) + content[8:],
        lambda content: struct.pack("<Q", 99_999_999) + content[8:],
        lambda content: struct.pack("<Q", 1) + content[8:],
        lambda content: struct.pack("<Q", 0) + content[8:],
        *(
            lambda content, head=head: with_header(head, content)
            for head in (
                [],
                5,
                None,
                "x",
                b"",
                b"{",
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b'{"\xff":1}',
            )
        ),
        lambda content: with_header({"__metadata__": 5, **header(content)[0]}, header(content)[1]),
        lambda content: with_header(
            json.dumps(header(content)[0]).encode() + b" " * (17 << 20), header(content)[1]
        ),
        *(
            changed_entry(shape=shape)
            for shape in ([], [8, 256], [2048], [256, 8, 1], [-256, -8], [2**62, 2**62], "x", [0.5])
        ),
        *(changed_entry(dtype=dtype) for dtype in ("F64", "I32", "F16", "F4", "", 5, "O")),
        *(
            changed_entry(data_offsets=offsets)
            for offsets in ([0, 0], [-1, 8], [8, 0], [2**62, 2**62 + 8192], [0], "x", None)
        ),
    ],
)
def test_a_file_with_a_wrong_header_is_refused(run, change):
    content = tensor_file(run).read_bytes()
    seal(run, change(content))
    assert tensor_file(run).read_bytes() != content
    assert_refused(run)


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    return lambda tensors: [{new if n == old else n: x for n, x in tensors.items()}]


def in_parts(*rows: str) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """The embedding [256, 8] as parts of these rows, in files of their own."""

    def cut(tensors: dict[str, Any]) -> list[dict[str, Any]]:
        rest = dict(tensors)
        embedding = rest.pop(EMBEDDING)
        files = [rest]
        for text in rows:
            first, stop = (max(0, int(x)) for x in text.split(":"))
            files.append({f"{EMBEDDING}[{text}]": embedding[first:stop] + len(files)})
        return files

    return cut


def without(name: str) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    return lambda tensors: [{n: x for n, x in tensors.items() if n != name}]


def replaced(name: str, by: torch.Tensor) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    return lambda tensors: [{**tensors, name: by}]


STEP = "optimizer.embedding.weight.step"


@pytest.mark.parametrize(
    "change",
    [
        renamed(EMBEDDING, "model.embedding.weights"),
        renamed(EMBEDDING, "embedding.weight"),
        renamed(EMBEDDING, "\x1b]0;owned\x07\u2028"),
        renamed(EMBEDDING, f"{EMBEDDING}[0:255]"),
        renamed(EMBEDDING, f"{EMBEDDING}[1:257]"),
        renamed(EMBEDDING, f"{EMBEDDING}[-256:0]"),
        renamed(EMBEDDING, f"{EMBEDDING}[256:0]"),
        renamed(EMBEDDING, f"{EMBEDDING}[0:{'9' * 5000}]"),
        renamed(EMBEDDING, f"{EMBEDDING}[0:\u0662\u0665\u0666]"),
        renamed(EMBEDDING, f"{EMBEDDING}[0:256][0:256]"),
        renamed(STEP, f"{STEP}[0:1]"),
        lambda tensors: [
            *without(EMBEDDING)(tensors),
            {f"{EMBEDDING}[0:256]": torch.ones(128, 8)},
        ],
        lambda tensors: [
            {**tensors, EMBEDDING: torch.ones(2, 8), f"{EMBEDDING}[2:256]": torch.ones(254, 8)}
        ],
        without(EMBEDDING),
        without(STEP),
        without("model.norm.weight"),
        lambda tensors: [{**tensors, "optimizer.embedding.weight.more": torch.ones(3)}],
        lambda tensors: [{**tensors, "model.blocks.1.norm.weight": torch.ones(8)}],
        lambda tensors: [{**tensors, f"{EMBEDDING}[0:256]": torch.ones(256, 8)}],
        lambda tensors: [tensors, {f"{EMBEDDING}[0:256]": torch.ones(256, 8)}],
        lambda tensors: [{}],
        lambda tensors: [],
        replaced(EMBEDDING, torch.ones(256, 8, dtype=torch.float64)),
        replaced(EMBEDDING, torch.ones(256, 8, dtype=torch.bool)),
        replaced(EMBEDDING, torch.ones(256, 8, dtype=torch.complex64)),
        replaced(EMBEDDING, torch.ones(8, 256)),
        replaced(EMBEDDING, torch.ones(0, 8)),
        replaced(EMBEDDING, torch.ones(0, 2**40)),
        replaced(EMBEDDING, torch.ones(())),
        replaced(STEP, torch.ones(1)),
        in_parts("0:128"),
        in_parts("128:256"),
        in_parts("0:128", "129:256"),
        in_parts("0:128", "100:256"),
        in_parts("0:128", "0:128", "128:256"),
        in_parts("0:256", "0:256"),
        in_parts("0:128", "128:256", "256:300"),
        in_parts("-128:0", "0:256"),
        lambda tensors: [
            *in_parts("0:128")(tensors),
            {f"{EMBEDDING}[128:256]": torch.ones(128, 7)},
        ],
        lambda tensors: [
            *in_parts("0:128")(tensors),
            {f"{EMBEDDING}[128:256]": torch.ones(128, 8, dtype=torch.float64)},
        ],
        lambda tensors: [*in_parts("0:128")(tensors), {f"{EMBEDDING}[128:256]": torch.ones(128)}],
    ],
)
def test_tensors_that_are_not_those_of_the_model_are_refused(run, change):
    seal(run, *map(save, change(load(tensor_file(run).read_bytes()))))
    assert_refused(run)


def test_parts_that_make_a_whole_are_taken(run, whole):
    change = in_parts("0:1", "1:100", "100:100", "100:256")
    seal(run, *map(save, change(load(tensor_file(run).read_bytes()))))
    expected = dict(load_model(whole).named_parameters())
    expected["embedding.weight"] = expected["embedding.weight"].clone()
    for number, (first, stop) in enumerate([(0, 1), (1, 100), (100, 100), (100, 256)], 1):
        expected["embedding.weight"][first:stop] += number  # by which `in_parts` tells them apart
    assert all(torch.equal(x, expected[name]) for name, x in load_model(run).named_parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_without_a_finite_score_are_one_line(run, value):
    tensors = load(tensor_file(run).read_bytes())
    for name in tensors:
        if name.startswith("model."):
            tensors[name] = torch.full_like(tensors[name], value)
    seal(run, save(tensors))
    for argv in (
        ("generate", run, "--num-bytes", 1),
        ("generate", run, "--num-bytes", 1, "--temperature", 0),
        ("train", "--out", run, "--resume"),
    ):
        code, said = command(*argv)
        assert_one_line(code, said)
        assert "expected" in said and "finite" in said


@pytest.mark.parametrize("key", ["bytes", "sha256"])
def test_a_file_other_than_the_one_that_was_written_is_refused(run, key):
    values = about(run)
    (sealed,) = values["tensors"]["files"].values()
    sealed[key] = sealed[key] + 1 if key == "bytes" else "0" * 64
    write_about(run, values)
    assert_refused(run)


# What stands where a file should be


def folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_in_place(path: Path) -> None:
    """To the right file, outside."""
    path.symlink_to(path.rename(path.parent.parent / path.name))


def pipe_in_place(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device_in_place(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def nothing_in_place(path: Path) -> None:
    path.unlink()


def huge_in_place(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk


@pytest.mark.parametrize(
    "place",
    [
        folder_in_place,
        link_in_place,
        pipe_in_place,
        device_in_place,
        nothing_in_place,
        huge_in_place,
    ],
)
@pytest.mark.parametrize("name", ["checkpoint.json", "tensors", "metrics.jsonl"])
def test_only_plain_files_are_opened(run, place, name):
    place(tensor_file(run) if name == "tensors" else run / name)
    if name != "metrics.jsonl":
        assert_refused(run, "checkpoint")
    elif place is nothing_in_place:
        assert command("train", "--out", run, "--resume") == (0, "")
    else:
        assert_one_line(*command("train", "--out", run, "--resume"))


@pytest.mark.parametrize(
    "line",
    [
        *("5", "[]", "null", '"x"', "{}", '{"step": "1"}', '{"step": true}', '{"step": 1.0}'),
        *(
            '{"step": 1, "loss": "x"}',
            '{"step": 1, "loss": [1]}',
            '{"step": 1, "loss": 1' + "0" * 400,
        ),
    ],
)
def test_metrics_that_are_no_records_are_one_line(run, line):
    (run / "metrics.jsonl").write_text(line + ("}\n" if line.endswith("0") else "\n"))
    code, said = command("train", "--out", run, "--resume")
    assert_one_line(code, said)
    assert "metrics.jsonl" in said


def test_nothing_outside_the_folder_is_written_or_removed(run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (run / "checkpoint-link.safetensors").symlink_to(outside / "kept")
    (run / "checkpoint-folder.safetensors").symlink_to(outside)
    (run / "checkpoint-own.safetensors").mkdir()
    for name in ("checkpoint.json", "metrics.jsonl"):
        (run / f".{name}.{os.getpid()}.part").symlink_to(outside / "kept")
    assert command("train", "--out", run, "--resume") == (0, "")
    assert (outside / "kept").read_text() == "kept"
    assert about(run)["step"] == 4


def test_a_link_in_place_of_a_file_is_replaced(tmp_path):
    (tmp_path / "outside").write_text("kept")
    (tmp_path / "file").symlink_to(tmp_path / "outside")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "outside").read_text() == "kept"
    assert (tmp_path / "file").read_text() == "new" and not (tmp_path / "file").is_symlink()


# Checkpoints of the first format


def first_format(run: Path, random_state: torch.Tensor) -> None:
    """Makes it what one process wrote before, torch's random state included."""
    path = tensor_file(run)
    content = save({**load(path.read_bytes()), "rng": random_state})
    digest = hashlib.sha256(content).hexdigest()
    path.unlink()
    tensors = {
        "file": f"checkpoint-000001-{digest[:12]}.safetensors",
        "bytes": len(content),
        "sha256": digest,
    }
    (run / tensors["file"]).write_bytes(content)
    values = about(run) | {"format": OLDER_FORMAT, "tensors": tensors}
    del values["launch"]
    write_about(run, values)


@pytest.mark.parametrize("size", [5056, 3])
def test_one_file_of_the_first_format_goes_on(run, whole, tmp_path, size):
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    first_format(run, torch.full((size,), 255, dtype=torch.uint8))  # which torch would not take
    for folder in (run, other):
        assert generate(folder)[0] == 0
        assert command("train", "--out", folder, "--resume") == (0, "")
    assert tensor_file(run).read_bytes() == tensor_file(other).read_bytes()
    assert about(run) == about(other)


# Whatever else


@contextlib.contextmanager
def copied(whole: Path) -> Iterator[Path]:
    copy_ = whole.with_name("copy")
    shutil.copytree(whole, copy_)
    try:
        yield copy_
    finally:
        shutil.rmtree(copy_)


edits = st.lists(
    st.tuples(
        st.integers(0, 10**6),  # where
        st.integers(0, 4),  # how many bytes go
        st.binary(max_size=4)
        | st.sampled_from([b"\0", b"[", b"]", b"{", b'"', b"-", b"9" * 30, b":"]),
    ),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, removed, added in changes:
        place %= len(content) + 1
        content = content[:place] + added + content[place + removed :]
    return content


def assert_taken_or_refused(run: Path) -> None:
    code, said = generate(run)
    if code:
        assert_one_line(code, said)


@settings(max_examples=150)
@given(changes=edits)
def test_any_edit_of_the_json_is_taken_or_one_line(whole, changes):
    with copied(whole) as run:
        path = run / "checkpoint.json"
        path.write_bytes(edited(path.read_bytes(), changes))
        assert_taken_or_refused(run)


@settings(max_examples=150)
@given(changes=edits, in_header=st.booleans())
def test_any_edit_of_a_file_is_taken_or_one_line(whole, changes, in_header):
    with copied(whole) as run:
        content = tensor_file(run).read_bytes()
        if in_header:
            head, data = content[8 : -len(header(content)[1])], header(content)[1]
            seal(run, with_header(edited(head, changes), data))
        else:
            seal(run, edited(content, changes))
        assert_taken_or_refused(run)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(data=st.data(), new=anything)
def test_any_value_at_any_place_is_taken_or_one_line(whole, data, new):
    with copied(whole) as run:
        values = about(run)
        at = data.draw(st.sampled_from(list(places(values))))
        write_about(run, put(values, at, new))
        assert_taken_or_refused(run)
