"""Writes files in one step, reads plain files safely, and names the cache folder."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` to `path` atomically; creates the folder if needed.

    A reader, also after a crash at any moment, sees the old file or the new one. It replaces a
    link, not its target. Raises OSError if it cannot write; the old file is then untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # left by a killed process, or a link planted by a stranger
        with open(part, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        if not part.is_dir():
            part.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        text = f"{error.strerror} while writing {path}; what was there before is untouched"
        raise OSError(error.errno, text) from error


def cache_folder() -> Path:
    """Returns the folder of compiled kernels and tuning results: `$SPARSERING_CACHE` if set."""
    if folder := os.environ.get("SPARSERING_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsering"


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of a JSON object's pairs, for `json.loads`.

    ValueError if a name occurs twice.
    """
    if len(values := dict(pairs)) != len(pairs):
        raise ValueError("expected distinct keys in each JSON object")
    return values


def check_file(path: Path, most: int | None = None) -> None:
    """Raises ValueError if a path is a folder, link, pipe or device, or has over `most` bytes."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is a folder, link, pipe or device, not a file")
    if most is not None and status.st_size > most:
        raise ValueError(f"{path.name} has {status.st_size} bytes, over the limit of {most}")


@contextlib.contextmanager
def opened(path: Path, most: int | None = None) -> Iterator[BinaryIO]:
    """Opens a plain file, or a link to one, for reading bytes; a pipe is refused, not waited for.

    Raises: OSError if it cannot be opened; ValueError for a folder, pipe or device, or above `most`
    bytes.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is a folder, pipe or device, not a file")
        if most is not None and status.st_size > most:
            raise ValueError(f"{path.name} has {status.st_size} bytes, over the limit of {most}")
        yield file


def read_torch_file(path: Path, way_out: str, known: Sequence[type] = ()) -> Any:
    """Loads a file of torch.save on the CPU: tensors and plain values. None of its code runs.

    Raises: OSError if it cannot be opened; ValueError, which ends with `way_out`, for another file,
    or one with objects that are neither plain nor of the classes `known`.
    """
    import torch

    with opened(path) as file, torch.serialization.safe_globals(list(known)):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # torch's own text advises to run the file's code
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            got = f"an object of {named[1]} in it" if named else "a file that torch cannot read"
            if os.fstat(file.fileno()).st_size == 0:
                got = "an empty file"
    raise ValueError(
        f"{path} must be a file of torch.save with tensors alone, got {got}; {way_out}"
    )
