"""Finds the kernel's library in the wheel, or builds `cpu.cpp` on first use and caches the library.

A process builds it in a temporary folder, under a lock, and moves it into the cache. The file ends
with a digest of its content, so that a damaged library is noticed and built again.
"""

import atexit
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
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...ground.commands import sparsering
from ...ground.files import cache_folder, opened
from ...ground.kernel_library import load_existing_kernel, loaded_operators
from ...ground.namespace import CPU_NAMESPACE
from ..problem import constant_in_graphs

SOURCE = Path(__file__).with_name("cpu.cpp")
_VECTOR_FLAGS = {
    "DEFAULT": "",
    "AVX2": "-mavx2 -mfma -mf16c",
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mf16c -mprefer-vector-width=512",
}


def vectors() -> str:
    """Returns the vector instructions to compile for: DEFAULT, AVX2 or AVX512.

    It is the value of SPARSERING_CPU, or the most that this processor has.
    """
    able, most = list(_VECTOR_FLAGS), torch.backends.cpu.get_cpu_capability()
    del able[able.index(most) + 1 if most in able else 1 :]
    if (name := (os.environ.get("SPARSERING_CPU") or able[-1]).upper()) not in able:
        raise ValueError(f"SPARSERING_CPU is {name}; this machine runs {', '.join(able)}")
    return name


def build(compiles: bool = False) -> Path:
    """Returns the path of the library: the wheel's, or one built here and kept in the cache.

    If `compiles`, the wheel's is not considered.
    """
    if not compiles and (library := _of_the_wheel()) is not None:
        return library
    try:
        return _cached(cache_folder())
    except OSError as error:
        folder = _of_this_user()
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="sparsering-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        told = f"the CPU kernel goes to {folder}: SPARSERING_CACHE names a better"
        print(f"sparsering: {error}; {told}", file=sys.stderr)
        return _cached(folder)


def _of_the_wheel() -> Path | None:
    """Returns the wheel's library for this processor; None without one, or with custom flags."""
    library = SOURCE.with_name(f"binary-{vectors().lower()}.so")
    return library if library.exists() and not os.environ.get("SPARSERING_CXXFLAGS") else None


def _of_this_user() -> Path | None:
    """Returns a temporary folder that this user's processes share and no other user can write."""
    if not hasattr(os, "geteuid"):
        return None
    folder = Path(tempfile.gettempdir()) / f"sparsering-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()  # lstat, so that a link is not followed
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return folder if private and status.st_uid == os.geteuid() else None


def _library_in(folder: Path) -> Path:
    """Returns the path in a cache folder; its name has a digest of torch, flags and sources."""
    machine = (torch.__version__, str(torch.version.git_version), platform.machine())
    recipe = "\0".join([*machine, *platform.libc_ver(), *_flags()]).encode()
    recipe += b"".join(path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.rglob("*.h"))))
    return folder / f"cpu-{hashlib.sha256(recipe).hexdigest()[:16]}.so"


def _cached(folder: Path) -> Path:
    """Returns the library in a cache folder, and first compiles it if it is missing or damaged."""
    library = _library_in(folder)
    if _is_whole(library):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as file:  # unlocked if the process dies
        with contextlib.suppress(ImportError):  # no fcntl: two processes may build, which is safe
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        if not _is_whole(library):
            _compile(library)
    return library


def _compile(library: Path) -> None:
    """Compiles the kernel in a temporary folder, appends a digest, and moves it to `library`."""
    from torch.utils.cpp_extension import include_paths, library_paths

    command = [_compiler(), str(SOURCE), *_flags()]
    command += [f"-isystem{path}" for path in include_paths("cpu")] + ["-ltorch_cpu"]
    command += [f"-L{path}" for path in library_paths("cpu")]
    print("sparsering: compiling the CPU kernel, once; it takes 20 s to 2 minutes", file=sys.stderr)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        command += ["-o", str(output)]
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if run.returncode:
            lines = run.stderr.splitlines()
            errors = [line for line in lines if "error" in line] + lines[-1:] + ["it said nothing"]
            told = f"{command[0]} failed: {errors[0]}; `{sparsering('build')}` shows all"
            raise RuntimeError(f"{told}\n{run.stderr}")
        content = output.read_bytes()
        output.write_bytes(content + hashlib.sha256(content).digest())
        output.chmod(0o755)  # `_is_whole` rejects a file that others can write
        output.replace(library)
    seconds = time.monotonic() - begin
    print(f"sparsering: compiled the CPU kernel in {seconds:.0f} s", file=sys.stderr)


def _is_whole(library: Path) -> bool:
    """Whether a library exists, matches its digest, and cannot be changed by another user."""
    if not library.exists():
        return False
    with opened(library) as file:
        status, content = os.fstat(file.fileno()), file.read()
    if hasattr(os, "geteuid"):
        if status.st_uid not in (0, os.geteuid()):
            owner = f"belongs to another user (uid {status.st_uid}), who could run code as you"
            raise PermissionError(f"{library} {owner}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False  # another user may have changed the library
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise RuntimeError("no C++ compiler found: install g++ or clang++, or name one in CXX")


def _flags() -> list[str]:
    name, torch_libraries = vectors(), Path(torch.__file__).with_name("lib")
    return [
        *f"-std=c++{_standard()} -O3 -DNDEBUG -fPIC -shared -fvisibility=hidden".split(),
        *([f"-Wl,-rpath,{torch_libraries}"] if sys.platform == "darwin" else []),
        f'-DSPARSERING_NAMESPACE="{CPU_NAMESPACE}"',
        *[*_VECTOR_FLAGS[name].split(), f"-DCPU_CAPABILITY={name}", f"-DCPU_CAPABILITY_{name}"],
        *os.environ.get("SPARSERING_CXXFLAGS", "").split(),
    ]


def _standard() -> int:
    """Returns the C++ standard to compile with: 20, or a newer one that torch's headers need."""
    header = Path(torch.__file__).with_name("include") / "ATen" / "ATen.h"
    asked = re.search(r"__cplusplus < 20(\d\d)", header.read_text()) if header.exists() else None
    return max(20, int(asked[1]) if asked else 0)  # 201703 is C++17, 202302 is C++23


@constant_in_graphs
def build_failure() -> tuple[str, ...]:
    """Returns the reason, as a tuple of one, why the library cannot be loaded; () if it can."""
    return (reason,) if (reason := _load()) else ()


def library() -> Any:
    """Returns the kernel's operators, and builds or loads the library at the first call."""
    if reason := _load():
        raise NotImplementedError(f"cpu: {reason}")
    return getattr(torch.ops, CPU_NAMESPACE)


def load_existing() -> None:
    """Loads the library for layouts if the wheel or the cache has it; it never compiles."""
    if loaded_operators() is not None:
        return
    with contextlib.suppress(ImportError, OSError, RuntimeError, ValueError):
        wheels = _of_the_wheel()
        library = _library_in(cache_folder()) if wheels is None else wheels
        if wheels is not None or _is_whole(library):
            _open(library)


load_existing_kernel.append(load_existing)


@cache
def _load() -> str:
    """Builds and loads the library, once per process; returns "", or why that failed."""
    if loaded_operators() is not None:  # for a layout, perhaps while another cache was named
        return ""
    try:
        library = build()
        try:
            _open(library)
        except OSError:  # the library was built for another system: compile it here
            if library.parent != SOURCE.parent:  # the cache folder is shared between systems
                library.unlink()
            _open(build(compiles=True))
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"its kernel could not be built or loaded: {str(error).splitlines()[0]}"
        message = f"sparsering falls back to the slower 'gather' backend on the CPU: {reason}"
        warnings.warn(message, stacklevel=2)
        return reason
    return ""


def _open(library: Path) -> None:
    """Loads a library; a second one would end the process, as both register the operators."""
    torch.ops.load_library(library)
    # torch.ops stores the library on this first access, and `loaded_operators` looks there
    _ = getattr(torch.ops, CPU_NAMESPACE).table
