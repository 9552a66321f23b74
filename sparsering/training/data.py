"""Text as bytes: reads a file or folder, splits it by file, and cuts windows out of it.

    text = read_text("corpus/", context=16384, seed=0)
    tokens, targets = training_window(text.train, context=16384, batch_size=1, seed=0, step=7)

Files are joined by one NUL byte, which no text file contains. A step's windows depend on (seed,
step) alone, so a resumed run sees the same windows as an uninterrupted one.
"""

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..ground.keywords import class_with_hints, with_hints

SEPARATOR = b"\0"
Windows = list[tuple[Tensor, Tensor]]
"""Pairs of (tokens, targets), each int64 [B, N]."""


@class_with_hints
@dataclass(frozen=True, eq=False)
class Text:
    """Holds training and validation bytes, of different files or of two parts of one file."""

    train: Tensor  # uint8 [bytes]
    validation: Tensor  # uint8 [bytes]
    train_files: tuple[str, ...]  # paths in the folder; "name[:n]" for the first n bytes of a file
    validation_files: tuple[str, ...]
    fingerprint: str  # sha256 over the names and bytes of all files


@with_hints()
def read_text(
    path: str | Path | None = None,
    *,
    context: int,
    seed: int = 0,
    glob: str = "*",
    validation_share: float = 0.1,
) -> Text:
    """Reads a text file, or all files of a folder, and splits them by file.

    Args:
        path: a file or a folder (read recursively, without hidden names and `__pycache__`).
            Default: the `*.py` files of Python's standard library on this machine, without tests.
        context: tokens per window; training and validation each need context + 1 bytes.
        seed: decides which files are for validation.
        glob: file names to read in a folder.
        validation_share: approximate share of bytes for validation: whole files, or the end of a
            single file.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: no file matches, a file is binary (has a NUL byte), or the text is too short.
    """
    if path is None:
        excluded = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        files = _files_below(Path(sysconfig.get_paths()["stdlib"]), "*.py", excluded)
    else:
        files = _text_files(Path(path), glob)
    contents = {name: _read(file) for name, file in files.items()}
    total = sum(map(len, contents.values()))
    source = "the standard library" if path is None else str(path)
    if total < 2 * (context + 1):
        raise ValueError(
            f"expected at least {2 * (context + 1)} bytes of text (context + 1 = {context + 1} "
            f"each to train and to validate), got {total} in {source}; give more text"
            + (f" or a --context of at most {total // 2 - 1}" if total > 3 else "")
        )
    target = max(round(validation_share * total), context + 1)
    if len(contents) == 1:
        ((name, content),) = contents.items()
        cut = total - target
        contents = {f"{name}[:{cut}]": content[:cut], f"{name}[{cut}:]": content[cut:]}
        validation_files = [f"{name}[{cut}:]"]
    else:
        validation_files = _validation_files(contents, target, seed)
    train_files = [name for name in contents if name not in validation_files]
    train = SEPARATOR.join(contents[name] for name in train_files)
    validation = SEPARATOR.join(contents[name] for name in validation_files)
    for side, joined in (("training", train), ("validation", validation)):
        if len(joined) < context + 1:
            raise ValueError(
                f"expected at least context + 1 = {context + 1} bytes in the {side} files, got "
                f"{len(joined)} (the {total} bytes of {source} are split by file); give more "
                "files, or a smaller --context"
            )
    digest = hashlib.sha256(f"{train_files}{validation_files}".encode())
    digest.update(train)
    digest.update(validation)
    sides = [torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (train, validation)]
    train_names, validation_names = tuple(train_files), tuple(validation_files)
    return Text(
        train=sides[0],
        validation=sides[1],
        train_files=train_names,
        validation_files=validation_names,
        fingerprint=digest.hexdigest(),
    )


def training_window(
    train: Tensor, *, context: int, batch_size: int, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """Draws the (tokens, targets) of a step, int64 [batch_size, context], from (seed, step)."""
    draw = random.Random(f"{seed}:{step}")
    starts = [draw.randrange(len(train) - context) for _ in range(batch_size)]
    windows = torch.stack([train[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def validation_windows(validation: Tensor, *, context: int, count: int) -> Windows:
    """Cuts up to `count` evenly spaced windows of (tokens, targets), without overlap."""
    count = max(1, min(count, (len(validation) - 1) // context))
    gap = (len(validation) - 1 - context) // max(count - 1, 1)
    windows = [validation[i * gap : i * gap + context + 1].long()[None] for i in range(count)]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def _text_files(path: Path, glob: str) -> dict[str, Path]:
    """Returns {name: file} for a file or a folder's files; an error if there are none."""
    if not path.exists():
        raise FileNotFoundError(
            f"expected a text file or a folder at {path}, found nothing; check --data"
        )
    if path.is_file():
        return {path.name: path}
    if not path.is_dir():
        raise ValueError(
            f"expected a text file or a folder at {path}, got neither; copy the text to a file"
        )
    if not (files := _files_below(path, glob, {"__pycache__"})):
        raise ValueError(
            f"expected text files in the folder {path}, found none that match {glob!r}; check "
            "--data, --glob"
        )
    return files


def _files_below(folder: Path, glob: str, excluded: set[str]) -> dict[str, Path]:
    """Returns {relative name: file} below a folder, without hidden and excluded names."""
    names = [file.relative_to(folder) for file in sorted(folder.rglob(glob)) if file.is_file()]
    return {
        name.as_posix(): folder / name
        for name in names
        if not any(part.startswith(".") or part in excluded for part in name.parts)
    }


def _read(file: Path) -> bytes:
    """Reads a file; ValueError if it has a NUL byte, which is used to separate files."""
    content = file.read_bytes()
    if (place := content.find(SEPARATOR)) >= 0:
        raise ValueError(
            f"expected text, got a binary file: {file} has a NUL byte at {place}; remove it, or "
            "choose the text files of the folder with --glob '*.txt'"
        )
    return content


def _validation_files(contents: dict[str, bytes], target: int, seed: int) -> list[str]:
    """Draws files for validation, of about `target` bytes but at most half of all bytes."""
    order = sorted(contents)
    random.Random(f"{seed}:validation").shuffle(order)
    most = sum(map(len, contents.values())) // 2
    names: list[str] = []
    size = 0
    for name in order:
        if size < target and size + len(contents[name]) <= most:
            names.append(name)
            size += len(contents[name])
    return names
