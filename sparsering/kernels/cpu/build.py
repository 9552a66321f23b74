"""Builds `cpu.cpp` on first use, and caches the library by torch version, processor and source.

A process builds the library in a temporary folder, under a file lock, and then moves it into the
cache. The file ends with a digest of its content; if the digest is wrong, the library is rebuilt.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...files import cache_folder, opened
from ..problem import constant_in_graphs

SOURCE = Path(__file__).with_name("cpu.cpp")
HEADERS = sorted(SOURCE.parent.rglob("*.h"))
_CAPABILITY_FLAGS = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mf16c -mprefer-vector-width=512",
    "AVX2": "-mavx2 -mfma -mf16c",
}


def build() -> Path:
    """Compiles the kernel for this torch and processor unless it is cached; returns the library.

    Raises: OSError if the cache folder cannot be written, or another user owns the library;
        RuntimeError if there is no compiler, or if the compiler fails.
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
    """Locks a file while the `with` block runs; if the process dies, the system unlocks it."""
    with open(path, "w") as file:
        with contextlib.suppress(ImportError):  # no fcntl: two processes may build, which is safe
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = _compiler()
    command = [compiler, str(SOURCE), *_flags()]
    command += [f"-isystem{path}" for path in include_paths("cpu")]
    command += [f"-L{path}" for path in library_paths("cpu")]
    command += ["-ltorch_cpu"]
    print("sparsering: compiling the CPU kernel, once, for about 20 s", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        command += ["-o", str(output)]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if run.returncode:
            lines = run.stderr.splitlines()
            errors = [line for line in lines if "error" in line] + lines[-1:] + ["it said nothing"]
            raise RuntimeError(
                f"{compiler} failed: {errors[0]}; `sparsering build` shows all\n{run.stderr}"
            )
        content = output.read_bytes()
        output.write_bytes(content + hashlib.sha256(content).digest())
        output.chmod(0o755)  # `_is_whole` rejects a file that others can write
        output.replace(library)


def _is_whole(library: Path) -> bool:
    if not library.exists():
        return False
    with opened(library) as file:
        status, content = os.fstat(file.fileno()), file.read()
    if hasattr(os, "geteuid"):
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"{library} belongs to another user (uid {status.st_uid}), who could run code as "
                "you; delete it, or set SPARSERING_CACHE to a folder of your own"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False  # another user may have changed the library
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise RuntimeError("no C++ compiler found: install g++ or clang++, or name one in CXX")


def _flags() -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = _CAPABILITY_FLAGS.get(capability, "").split()
    name = capability if vectors else "DEFAULT"
    torch_libraries = Path(torch.__file__).with_name("lib")
    return [
        *[f"-std=c++{_standard()}", "-O3", "-DNDEBUG"],
        *["-fPIC", "-shared", "-fvisibility=hidden"],
        *([f"-Wl,-rpath,{torch_libraries}"] if sys.platform == "darwin" else []),
        *[*vectors, f"-DCPU_CAPABILITY={name}", f"-DCPU_CAPABILITY_{name}"],
        *os.environ.get("SPARSERING_CXXFLAGS", "").split(),
    ]


def _standard() -> int:
    """Returns the C++ standard: the kernel needs 20, torch's headers may need a newer one."""
    header = Path(torch.__file__).with_name("include") / "ATen" / "ATen.h"
    asked = re.search(r"__cplusplus < 20(\d\d)", header.read_text()) if header.exists() else None
    return max(20, int(asked[1]) if asked else 0)  # 201703 is C++17, 202302 is C++23


@constant_in_graphs
def build_failure() -> list[str]:
    """Returns why the library cannot be loaded; [] if it is loaded."""
    return [reason] if (reason := _load()) else []


def library() -> Any:
    """Returns the kernel's operators, and loads them first if needed."""
    if reason := _load():
        raise NotImplementedError(f"cpu: {reason}")
    return torch.ops.sparsering_cpu


@cache
def _load() -> str:
    try:
        library = build()
        try:
            torch.ops.load_library(library)
        except OSError:  # built on another system that shares the cache folder
            library.unlink()
            torch.ops.load_library(build())
        _ = torch.ops.sparsering_cpu.table  # layouts take it if it is there (`kernel_operators`)
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"its kernel could not be built or loaded: {str(error).splitlines()[0]}"
        message = f"sparsering falls back to the slower 'gather' backend on the CPU: {reason}"
        warnings.warn(message, stacklevel=2)
        return reason
    return ""
