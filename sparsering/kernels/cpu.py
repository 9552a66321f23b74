"""The CPU backend: `cpu.cpp`, compiled on first use and kept per torch, processor kind and source.

The library is built next to where it will lie and moved there in one step, under a lock that dies
with its holder; it carries a digest of itself, and one that does not match is built again. Where it
cannot be built, `reasons` says why.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..layout import BlockLayout, Pass
from .cache_folder import cache_folder
from .inputs import dense_rows, positive_scale, signed_gradient

SOURCE = Path(__file__).with_name("cpu.cpp")
HEADERS = sorted(SOURCE.parent.glob("cpu_*.h"))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CAPABILITY_FLAGS = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mf16c -mprefer-vector-width=512",
    "AVX2": "-mavx2 -mfma -mf16c",
}
_MOST_REPEATED_WORK = 1.4  # seven products of `run_tiles` to the five of `run_heads`


def reasons(*tensors: Tensor) -> list[str]:
    """Why the kernel cannot run on these tensors, or at all."""
    found = []
    if any(x.device.type != "cpu" for x in tensors):
        found.append("it runs on the CPU alone")
    if any(x.dtype not in _DTYPES for x in tensors):
        found.append("it computes in float32; float64 stays with gather")
    return found or _build_failure()


def forward(
    layout: BlockLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_bias: Tensor | None,
    scale: float,
    *,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over a layout; see `gather.forward`. lse is float32."""
    query, scale = positive_scale(query, scale)
    out, lse = _library().forward(
        dense_rows(query),
        dense_rows(key),
        dense_rows(value),
        None if block_bias is None else block_bias.float().contiguous(),
        _first_entry(layout),
        [x for p in layout.passes for x in _tables(p)],
        [p.step for p in layout.passes],
        layout.block_size,
        scale,
        in_float32,
    )
    return out, lse


def backward(
    layout: BlockLayout,
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and block_bias; see `gather.backward`.

    Bits are the same for one number of threads: with fewer kv heads than threads can share evenly,
    dK and dV are summed in a sweep of their own.
    """
    positive, positive_by = positive_scale(query, scale)
    heads, threads = len(key) * key.shape[1], torch.get_num_threads()
    by_head = -(-heads // threads) * threads <= _MOST_REPEATED_WORK * heads
    dq, dk, dv, dbias = _library().backward(
        dense_rows(grad_out),
        grad_lse.contiguous(),
        dense_rows(positive),
        dense_rows(key),
        dense_rows(value),
        None if block_bias is None else block_bias.float().contiguous(),
        dense_rows(out),
        lse.contiguous(),
        _first_entry(layout),
        [x for p in layout.passes for x in _tables(p)],
        [] if by_head else [x.contiguous() for p in layout.passes for x in p.transpose],
        [p.step for p in layout.passes],
        layout.block_size,
        positive_by,
        in_float32,
    )
    dq = signed_gradient(dq, scale)
    return dq, dk, dv, None if block_bias is None else dbias.to(block_bias.dtype)


def build() -> Path:
    """Compiles the kernel for this torch and processor unless that was done; returns the library.

    Raises OSError (the folder cannot be written) or RuntimeError (no compiler, or it failed), with
    what to do.
    """
    folder = cache_folder()
    machine = (torch.__version__, str(torch.version.git_version), platform.machine())
    recipe = "\0".join([*machine, *platform.libc_ver(), *_flags()]).encode()
    recipe += b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))
    library = folder / f"cpu-{hashlib.sha256(recipe).hexdigest()[:16]}.so"
    if _is_whole(library):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(library.with_suffix(".lock")):
        if not _is_whole(library):
            _compile(library)
    return library


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the system lets go of it where a process dies."""
    with open(path, "w") as file:
        try:
            import fcntl
        except ImportError:  # no such thing here: two processes may do the same work twice
            pass
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = _compiler()
    command = [compiler, str(SOURCE), *_flags()]
    command += [f"-isystem{path}" for path in include_paths("cpu")]
    command += [f"-L{path}" for path in library_paths("cpu")]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    print("sparsering: compiling the CPU kernel, once, for about 15 s", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        done = subprocess.run(
            [*command, "-o", str(made)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            lines = done.stderr.splitlines()
            told = [line for line in lines if "error" in line] + lines[-1:] + ["it said nothing"]
            raise RuntimeError(
                f"{compiler} failed: {told[0]}; `sparsering build` shows all\n{done.stderr}"
            )
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        made.replace(library)


def _is_whole(library: Path) -> bool:
    if not library.exists():
        return False
    content = library.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise RuntimeError("no C++ compiler found (c++, g++ or clang++; or name one in CXX)")


def _flags() -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = _CAPABILITY_FLAGS.get(capability, "").split()
    known = capability if vectors else "DEFAULT"
    return [
        *["-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden"],
        *[*vectors, f"-DCPU_CAPABILITY={known}", f"-DCPU_CAPABILITY_{known}"],
        *os.environ.get("SPARSERING_CXXFLAGS", "").split(),
    ]


@torch.compiler.assume_constant_result
def _build_failure() -> list[str]:
    """Why there is no library, [] once it is loaded."""
    if reason := _load():
        _warn(reason)
    return [reason] if reason else []


def _library() -> Any:
    """The loaded operators; a compiled graph may call them before anything else did."""
    if reason := _load():
        raise NotImplementedError(f"cpu: {reason}")
    return torch.ops.sparsering_cpu


@cache
def _load() -> str:
    try:
        library = build()
        try:
            torch.ops.load_library(library)
        except OSError:  # of another system, in a folder that both share
            library.unlink()
            torch.ops.load_library(build())
    except (ImportError, OSError, RuntimeError) as error:
        return f"its kernel could not be built or loaded: {str(error).splitlines()[0]}"
    return ""


@cache
def _warn(reason: str) -> None:
    message = f"sparsering falls back to the slower 'gather' backend on the CPU: {reason}"
    warnings.warn(message, stacklevel=2)


def _first_entry(layout: BlockLayout) -> Tensor:
    return layout.first_entry.contiguous()


def _tables(p: Pass) -> list[Tensor]:
    tables = (
        p.query_start, p.query_stop, p.key_start, p.key_stop,
        p.row_ptr, p.key_tile, p.mask, p.bitmaps,
    )  # fmt: skip
    return [x.contiguous() for x in tables]
