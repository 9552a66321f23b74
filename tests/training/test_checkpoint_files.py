"""A stranger's checkpoint: each error in its files is one line of text.

Each test changes a copy of a whole checkpoint and gives it to the command line.
"""

import contextlib
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from stranger import (
    about,
    assert_one_line,
    assert_refused,
    command,
    describe,
    generate,
    header,
    places,
    put,
    seal,
    sealed,
    tensor_file,
    with_header,
    write_about,
)

from sparsering.ground.files import replace_file
from sparsering.training.checkpoint import load_checkpoint

# The file of tensors


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
                *([], 5, None, "x", b"", b"{"),
                *(b"[" * 100_000, b'{"a":' * 50_000, b'{"\xff":1}'),
            )
        ),
        lambda content: with_header({**header(content)[0], "__metadata__": 5}, header(content)[1]),
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
    assert change(content) != content
    tensor_file(run).write_bytes(change(content))
    assert_refused(run)


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {new if n == old else n: x for n, x in tensors.items()}


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {n: x for n, x in tensors.items() if n != name}


def replaced(name: str, by: torch.Tensor) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {**tensors, name: by}


STEP = "optimizer.embedding.weight.step"


@pytest.mark.parametrize(
    "change",
    [
        renamed(EMBEDDING, "model.embedding.weights"),
        renamed(EMBEDDING, "embedding.weight"),
        renamed(EMBEDDING, "\x1b]0;owned\x07\u2028"),
        renamed(EMBEDDING, f"{EMBEDDING}[0:255]"),
        without(EMBEDDING),
        without(STEP),
        without("model.norm.weight"),
        lambda tensors: {**tensors, "optimizer.embedding.weight.more": torch.ones(3)},
        lambda tensors: {**tensors, "model.blocks.1.norm.weight": torch.ones(8)},
        lambda tensors: {},
        replaced(EMBEDDING, torch.ones(256, 8, dtype=torch.float64)),
        replaced(EMBEDDING, torch.ones(256, 8, dtype=torch.bool)),
        replaced(EMBEDDING, torch.ones(256, 8, dtype=torch.complex64)),
        replaced(EMBEDDING, torch.ones(8, 256)),
        replaced(EMBEDDING, torch.ones(0, 8)),
        replaced(EMBEDDING, torch.ones(0, 2**40)),
        replaced(EMBEDDING, torch.ones(())),
        replaced(STEP, torch.ones(1)),
    ],
)
def test_tensors_that_are_not_those_of_the_model_are_refused(run, change):
    seal(run, change(load(tensor_file(run).read_bytes())))
    assert_refused(run)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_without_a_finite_score_are_one_line(run, value):
    tensors = load(tensor_file(run).read_bytes())
    for name in tensors:
        if name.startswith("model."):
            tensors[name] = torch.full_like(tensors[name], value)
    seal(run, tensors)
    for argv in (
        ("generate", run, "--num-bytes", 1),
        ("generate", run, "--num-bytes", 1, "--temperature", 0),
        ("train", "--out", run, "--resume"),
    ):
        code, said = command(*argv)
        assert_one_line(code, said)
        assert "expected" in said and "finite" in said


@pytest.mark.parametrize("name", [EMBEDDING, "optimizer.embedding.weight.exp_avg"])
@pytest.mark.parametrize("end", [False, True], ids=["first byte", "last byte"])
def test_a_damaged_tensor_is_refused_where_it_is_read(run, name, end):
    """A model is loaded without the optimizer's state; training needs both."""
    content = bytearray(tensor_file(run).read_bytes())
    start, stop = header(content)[0][name]["data_offsets"]
    content[len(content) - len(header(content)[1]) + (stop - 1 if end else start)] ^= 1
    tensor_file(run).write_bytes(content)
    code, said = command("train", "--out", run, "--resume")
    assert_one_line(code, said)
    assert f"damaged or foreign one: the sha256 of {name} is not" in said
    code, said = generate(run)
    assert code == (2 if name == EMBEDDING else 0)
    assert (f"the sha256 of {name} is not" in said) == (name == EMBEDDING)


def make_older(run: Path, files: int = 1) -> dict[str, Any]:
    """Replaces a checkpoint by what version 0.2.0 wrote; returns its description."""
    tensors = load(tensor_file(run).read_bytes())
    values = about(run) | {"format": "sparsering checkpoint 2", "tensors": {"files": {}}}
    del values["sha256"], values["init"]
    for part in range(files):
        content = save(dict(list(tensors.items())[part::files]))
        digest = hashlib.sha256(content).hexdigest()
        name = f"checkpoint-000001-{digest[:12]}.safetensors"
        (run / name).write_bytes(content)
        values["tensors"]["files"][name] = {"bytes": len(content), "sha256": digest}
    (run / "checkpoint.json").write_text(json.dumps(values))
    tensor_file(run).unlink()
    return values


@pytest.mark.parametrize("files", [1, 2])
def test_a_checkpoint_of_an_older_version_is_read(run, files):
    """It wrote `checkpoint.json`, and a file of tensors or one for each rank."""
    before, tensors = load_checkpoint(run), load(tensor_file(run).read_bytes())
    make_older(run, files)
    assert generate(run)[0] == 0
    assert vars(load_checkpoint(run)) == vars(before)
    assert {n: x.tolist() for n, x in load(tensor_file(run).read_bytes()).items()} == {
        n: x.tolist() for n, x in tensors.items()
    }
    assert command("train", "--out", run, "--resume") == (0, "")


def file_entry(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Any], Any]:
    """A change of the files that a description names."""
    return lambda values: values | {"tensors": {"files": change(values["tensors"]["files"])}}


@pytest.mark.parametrize(
    "change",
    [
        lambda values: [],
        lambda values: values | {"format": "another"},
        lambda values: {name: x for name, x in values.items() if name != "tensors"},
        lambda values: values | {"tensors": 5},
        lambda values: values | {"tensors": {"files": []}},
        file_entry(lambda files: {}),
        file_entry(lambda files: {"../" + name: x for name, x in files.items()}),
        file_entry(
            lambda files: dict(
                zip(["checkpoint-1-000000000000.safetensors"], files.values(), strict=True)
            )
        ),
        file_entry(lambda files: {name: x | {"sha256": "0" * 64} for name, x in files.items()}),
        file_entry(lambda files: {name: x | {"bytes": 7} for name, x in files.items()}),
        file_entry(lambda files: {name: x | {"bytes": "x"} for name, x in files.items()}),
        file_entry(lambda files: dict.fromkeys(files, 5)),
    ],
)
def test_a_damaged_checkpoint_of_an_older_version_is_refused(run, change):
    values = change(make_older(run))
    (run / "checkpoint.json").write_text(json.dumps(values))
    for code, said in (generate(run), command("train", "--out", run, "--resume")):
        assert_one_line(code, said)
        assert "damaged or foreign" in said


# What stands where a file should be


PLACED: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "link to the right file": lambda path: path.symlink_to(path.rename(path.parents[1] / "file")),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "nothing": lambda path: path.unlink(),
    "huge file": lambda path: os.truncate(path, 1 << 40),  # takes no room on the disk
}


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", ["checkpoint.safetensors", "metrics.jsonl"])
def test_only_plain_files_are_opened(run, placed, name):
    PLACED[placed](run / name)
    if name != "metrics.jsonl":
        assert_refused(run, "checkpoint")
    elif placed == "nothing":
        assert command("train", "--out", run, "--resume") == (0, "")
    else:
        assert_one_line(*command("train", "--out", run, "--resume"))


METRICS = (
    *("5", "[]", "null", '"x"', "{}", '{"step": "1"}', '{"step": true}', '{"step": 1.0}'),
    *(
        '{"step": 1, "loss": "x"}',
        '{"step": 1, "loss": [1]}',
        f'{{"step": 1, "loss": 1{"0" * 400}}}',
    ),
)


@pytest.mark.parametrize("line", METRICS)
def test_metrics_that_are_no_records_are_one_line(run, line):
    (run / "metrics.jsonl").write_text(f"{line}\n")
    code, said = command("train", "--out", run, "--resume")
    assert_one_line(code, said)
    assert "metrics.jsonl" in said


def test_nothing_outside_the_folder_is_written_or_removed(run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (run / ".checkpoint.safetensors.1.part").symlink_to(outside / "kept")
    (run / ".checkpoint.safetensors.2.part").symlink_to(outside)
    (run / ".checkpoint.safetensors.3.part").mkdir()
    (run / ".checkpoint.safetensors.4.part").write_text("of a process that was killed")
    for name in ("checkpoint.safetensors", "metrics.jsonl"):
        (run / f".{name}.{os.getpid()}.part").symlink_to(outside / "kept")
    assert command("train", "--out", run, "--resume") == (0, "")
    assert [path.name for path in run.glob(".*")] == [".checkpoint.safetensors.3.part"]
    assert (outside / "kept").read_text() == "kept"
    assert about(run)["step"] == 4


def test_a_link_in_place_of_a_file_is_replaced(tmp_path):
    (tmp_path / "outside").write_text("kept")
    (tmp_path / "file").symlink_to(tmp_path / "outside")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "outside").read_text() == "kept"
    assert (tmp_path / "file").read_text() == "new" and not (tmp_path / "file").is_symlink()


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


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


few_and_many = pytest.mark.parametrize("count", [40, pytest.param(150, marks=pytest.mark.slow)])


@few_and_many
def test_any_edit_of_the_description_is_taken_or_one_line(whole, count):
    @settings(max_examples=count)
    @given(changes=edits)
    def check(changes):
        with copied(whole) as run:
            describe(run, edited(json.dumps(about(run)).encode(), changes))
            assert_taken_or_refused(run)

    check()


@few_and_many
def test_any_edit_of_a_file_is_taken_or_one_line(whole, count):
    @settings(max_examples=count)
    @given(changes=edits, in_header=st.booleans())
    def check(changes, in_header):
        with copied(whole) as run:
            content = tensor_file(run).read_bytes()
            if in_header:
                head, data = content[8 : -len(header(content)[1])], header(content)[1]
                tensor_file(run).write_bytes(with_header(edited(head, changes), data))
            else:
                new = edited(content, changes)
                with contextlib.suppress(ValueError, KeyError, TypeError, struct.error):
                    new = sealed(new)
                tensor_file(run).write_bytes(new)
            assert_taken_or_refused(run)

    check()


@few_and_many
def test_any_value_at_any_place_is_taken_or_one_line(whole, count):
    @settings(max_examples=count)
    @given(data=st.data(), new=anything)
    def check(data, new):
        with copied(whole) as run:
            values = about(run)
            at = data.draw(st.sampled_from(list(places(values))))
            write_about(run, put(values, at, new))
            assert_taken_or_refused(run)

    check()
