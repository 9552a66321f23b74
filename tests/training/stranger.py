"""Changes to a checkpoint, as a stranger would make them, and what the command line says of it.

Tensors are sealed again after a change, as their author would: their hashes are right.
"""

import contextlib
import copy
import hashlib
import io
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from sparsering.cli import main
from sparsering.training import Recipe

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


def tensor_file(run: Path) -> Path:
    return run / "checkpoint.safetensors"


def about(run: Path) -> Any:
    """The description of a checkpoint."""
    head, _ = header(tensor_file(run).read_bytes())
    return json.loads(head["__metadata__"]["sparsering"])


def describe(run: Path, text: bytes) -> None:
    """Puts a text in place of the description, also one that is not UTF-8."""
    head, data = header(tensor_file(run).read_bytes())
    head["__metadata__"] = {"sparsering": text.decode(errors="surrogateescape")}
    new = json.dumps(head, ensure_ascii=False).encode(errors="surrogateescape")
    tensor_file(run).write_bytes(with_header(new, data))


def write_about(run: Path, values: object) -> None:
    describe(run, json.dumps(values).encode())


def sealed(content: bytes) -> bytes:
    """A file with the hashes of the tensors that it has."""
    head, data = header(content)
    values = json.loads(head["__metadata__"]["sparsering"])
    spans = {n: slice(*x["data_offsets"]) for n, x in head.items() if n != "__metadata__"}
    values["sha256"] = {n: hashlib.sha256(data[span]).hexdigest() for n, span in spans.items()}
    return with_header({**head, "__metadata__": {"sparsering": json.dumps(values)}}, data)


def seal(run: Path, tensors: dict[str, Tensor]) -> None:
    """Puts these tensors in place of the checkpoint's."""
    description = {"sparsering": json.dumps(about(run))}
    tensor_file(run).write_bytes(sealed(save(tensors, description)))


def command(*argv: object) -> tuple[int, str]:
    """The exit code of a command and what it says on stderr."""
    argv = (*argv, "--quiet") if argv[0] == "train" else argv
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
    began = time.process_time()  # which other work does not change
    for code, said in (generate(run), command("train", "--out", run, "--resume")):
        assert_one_line(code, said)
        assert what in said
    assert time.process_time() - began < 10
    assert sorted((path.name, path.lstat().st_mtime_ns) for path in run.iterdir()) == before


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


def header(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(head: object, data: bytes) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data
