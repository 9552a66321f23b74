"""The library of the CPU kernel: one that cannot be built, is broken, or is built twice at once."""

import hashlib
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from helpers.forked import run

from sparsering.kernels import cpu
from sparsering.kernels.cpu.build import _flags, vectors

ATTEND = """
import torch, sparsering as sr
args = torch.randn(3, 1, 2, 40, 16)
for _ in range(2):
    out = sr.attention(*args, sr.Causal())
exact = sr.attention(*args, sr.Causal(), backend="reference")
assert (out - exact).abs().max() < 1e-5
print(sr.backends()["cpu"])
"""


def fallen_back(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("falls back to the slower 'gather'") == 1
    for word in words:
        assert word in done.stderr and word in done.stdout


def fake_compiler(folder: Path, script: str) -> dict[str, str]:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"CXX": str(path), "SPARSERING_CACHE": str(folder / "cache")}


def test_without_a_library_for_lack_of_a_compiler_gather_runs_with_one_warning(tmp_path):
    fallen_back(run(ATTEND, PATH=str(tmp_path), SPARSERING_CACHE=str(tmp_path)), "no C++ compiler")


def test_what_a_compiler_of_the_library_says_is_quoted(tmp_path):
    broken = fake_compiler(tmp_path, "echo 'cpu.cpp:1: error: I am tired' >&2; exit 1")
    fallen_back(run(ATTEND, **broken), "I am tired")
    assert not list((tmp_path / "cache").glob("*.so"))


def is_temporary(folder: Path, environment: dict[str, str], word: str) -> None:
    """Checks that a kernel runs from a temporary folder, and why."""
    folder.mkdir(exist_ok=True)
    done = run(ATTEND, **environment, TMPDIR=str(folder))
    assert done.returncode == 0 and done.stdout == "[]\n", done.stderr
    assert done.stderr.count("SPARSERING_CACHE names a better") == 1 and word in done.stderr


def test_where_the_folder_cannot_be_written_the_library_is_in_a_temporary_one(tmp_path):
    (tmp_path / "file").touch()
    environment = copying_compiler(tmp_path) | {"SPARSERING_CACHE": str(tmp_path / "file" / "x")}
    for _ in range(2):  # the second process compiles nothing
        is_temporary(tmp_path / "temporary", environment, "Not a directory")
    own = tmp_path / "temporary" / f"sparsering-{os.geteuid()}"
    assert own.stat().st_mode & 0o777 == 0o700 and list(own.glob("cpu-*.so"))
    assert (tmp_path / "count").read_text() == "once\n"


@pytest.mark.parametrize("strange", ["writable by others", "a link", "a file"])
def test_a_temporary_folder_that_others_could_change_is_not_used(tmp_path, strange):
    (tmp_path / "file").touch()
    environment = copying_compiler(tmp_path) | {"SPARSERING_CACHE": str(tmp_path / "file" / "x")}
    folder = tmp_path / "temporary"
    own, elsewhere = folder / f"sparsering-{os.geteuid()}", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir(mode=0o700)
    if strange == "a link":
        own.symlink_to(elsewhere)
    elif strange == "a file":
        own.touch()
    else:
        own.mkdir()
        own.chmod(0o777)
    is_temporary(folder, environment, "Not a directory")
    assert [x.name for x in folder.glob("sparsering-*")] == [own.name]  # another one is gone again
    assert not [*elsewhere.iterdir(), *(own.iterdir() if own.is_dir() else ())]


def test_a_killed_compiler_leaves_no_library_behind(tmp_path):
    killed = fake_compiler(
        tmp_path, 'while [ "$1" != -o ]; do shift; done; echo x > $2; kill -9 $$'
    )
    fallen_back(run(ATTEND, **killed), "failed")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_named_backend_without_a_library_raises(tmp_path):
    code = ATTEND.replace("sr.Causal())\nexact", "sr.Causal(), backend='cpu')\nexact")
    done = run(code, PATH=str(tmp_path), SPARSERING_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert "cpu: its kernel could not be built or loaded: no C++ compiler" in done.stderr


def copying_compiler(tmp_path: Path, seconds: int = 0) -> dict[str, str]:
    """Instead of 20 seconds of compiling: copies this process's own library, and counts."""
    whole = cpu.build().read_bytes()[:-32]
    (tmp_path / "made.so").write_bytes(whole)
    script = (
        f"echo once >> {tmp_path}/count; sleep {seconds}\n"
        f'while [ "$1" != -o ]; do shift; done; cp {tmp_path}/made.so "$2"'
    )
    return fake_compiler(tmp_path, script)


@pytest.mark.parametrize("asked, standard", [("201703", 20), ("202002", 20), ("202302", 23)])
def test_the_compiler_is_told_the_standard_that_torch_asks_for(tmp_path, asked, standard):
    header = tmp_path / "include" / "ATen" / "ATen.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#if !defined(_MSC_VER) && __cplusplus < {asked}L\n#error\n#endif\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
        flags = _flags()
    assert [flag for flag in flags if flag.startswith("-std=")] == [f"-std=c++{standard}"]


def test_torch_still_says_the_standard_where_the_build_looks_for_it():
    """A torch whose header says it in other words would get C++20, whatever it needs."""
    header = Path(torch.__file__).with_name("include") / "ATen" / "ATen.h"
    assert re.search(r"__cplusplus < 20\d\d", header.read_text())


def test_a_truncated_library_is_built_again(tmp_path):
    environment = copying_compiler(tmp_path)
    for length in (None, 0, 100, 100_000):
        if length is not None:
            (library,) = (tmp_path / "cache").glob("*.so")
            library.write_bytes(library.read_bytes()[:length])
        done = run(ATTEND, **environment)
        assert done.returncode == 0 and done.stdout == "[]\n", done.stderr
    assert (tmp_path / "count").read_text() == "once\n" * 4


def test_a_built_library_needs_no_compiler(tmp_path):
    environment = copying_compiler(tmp_path)
    assert run(ATTEND, **environment).stdout == "[]\n"
    done = run(ATTEND, **{**environment, "CXX": "", "PATH": str(tmp_path)})
    assert done.stdout == "[]\n" and not done.stderr


def test_a_library_that_does_not_load_is_built_again(tmp_path):
    environment = copying_compiler(tmp_path)
    assert run(ATTEND, **environment).stdout == "[]\n"
    (library,) = (tmp_path / "cache").glob("*.so")
    foreign = b"the library of another system"
    library.write_bytes(foreign + hashlib.sha256(foreign).digest())
    assert run(ATTEND, **environment).stdout == "[]\n"
    assert (tmp_path / "count").read_text() == "once\n" * 2


@pytest.mark.parametrize("mode", [0o775, 0o757, pytest.param(0o666, marks=pytest.mark.slow)])
def test_a_library_that_others_may_write_is_built_again(tmp_path, mode):
    environment = copying_compiler(tmp_path)
    assert run(ATTEND, **environment).stdout == "[]\n"
    (library,) = (tmp_path / "cache").glob("*.so")
    library.chmod(mode)
    for _ in range(2):
        assert run(ATTEND, **environment).stdout == "[]\n"
        assert library.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "count").read_text() == "once\n" * 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a file away")
def test_a_library_of_another_user_is_refused_and_named(tmp_path):
    environment = copying_compiler(tmp_path)
    assert run(ATTEND, **environment).stdout == "[]\n"
    (library,) = (tmp_path / "cache").glob("*.so")
    os.chown(library, 12345, -1)
    is_temporary(tmp_path / "temporary", environment, "belongs to another user (uid 12345)")


def test_two_processes_build_one_library_once(tmp_path):
    environment = copying_compiler(tmp_path, seconds=1)
    results = []
    workers = [
        threading.Thread(target=lambda: results.append(run(ATTEND, **environment)))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [done.stdout for done in results] == ["[]\n"] * 2, [done.stderr for done in results]
    assert (tmp_path / "count").read_text() == "once\n"


@pytest.mark.parametrize("name", ["avx9000", "AVX512"])
def test_vectors_that_do_not_run_here_are_refused_by_name(name):
    environment = {"SPARSERING_CPU": name, "ATEN_CPU_CAPABILITY": "default"}
    done = run("from sparsering.kernels import cpu; cpu.build()", **environment)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f"ValueError: SPARSERING_CPU is {name.upper()}; this machine runs DEFAULT"


def test_a_library_of_the_wheel_is_taken_unless_it_does_not_load(tmp_path):
    """The stand-in for a wheel's library is the one that was compiled for these tests."""
    environment = copying_compiler(tmp_path)
    source = shutil.copy(Path(cpu.__file__).with_name("cpu.cpp"), tmp_path)
    binary = tmp_path / f"binary-{vectors().lower()}.so"
    code = f"""
import importlib, pathlib
importlib.import_module("sparsering.kernels.cpu.build").SOURCE = pathlib.Path({source!r})
{ATTEND}"""
    for content, compiled in ((tmp_path / "made.so").read_bytes(), 0), (b"of another system", 1):
        binary.write_bytes(content)
        done = run(code, **environment)
        assert done.stdout == "[]\n", done.stderr
        assert len(list(tmp_path.glob("cache/*.so"))) == compiled
        assert binary.read_bytes() == content


LAYOUT = """
import os
import sparsering as sr
from sparsering.ground.kernel_library import kernel_operators
pattern = sr.LongNet((64, 256), (1, 4)) & sr.Causal()
layout = pattern.layout(1000)
print(kernel_operators() is not None, layout.num_blocks, layout.num_pairs)
"""


def test_a_layout_alone_is_compiled_by_the_library_that_exists(tmp_path):
    """A user of a GPU, or of layouts alone, makes no call that would load it."""
    cpu.build()
    done = run(LAYOUT)
    assert done.returncode == 0 and not done.stderr, done.stderr
    loaded, *figures = done.stdout.split()
    missing = run(LAYOUT, SPARSERING_CACHE=str(tmp_path / "cache"))
    assert missing.returncode == 0 and not missing.stderr, missing.stderr
    assert (loaded, missing.stdout.split()) == ("True", ["False", *figures])
    assert not (tmp_path / "cache").exists(), "nothing is compiled for a layout"


@pytest.mark.parametrize("first", ["layout", "attention"])
def test_a_process_keeps_its_library_when_another_cache_is_named(tmp_path, first):
    """Two libraries would both register the operators, which ends the process."""
    made = cpu.build()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / made.name).write_bytes(made.read_bytes())
    code = f"""
import os
parts = {{"layout": {LAYOUT!r}, "attention": {ATTEND!r}}}
first = {first!r}
exec(parts.pop(first))
os.environ["SPARSERING_CACHE"] = {str(tmp_path / "other")!r}
exec(*parts.values())
"""
    done = run(code)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "True" in done.stdout and "[]" in done.stdout


def test_a_damaged_library_is_no_library_for_layouts(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    whole = cpu.build()
    (folder / whole.name).write_bytes(whole.read_bytes()[:-1000])
    done = run(LAYOUT, SPARSERING_CACHE=str(folder))
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.startswith("False")
