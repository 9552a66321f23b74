"""Layouts of a process that has no compiled kernel, as on a machine without a compiler.

Elsewhere, whether torch's operators or the kernel make a table depends on what the process has
called before. Here the tests of layouts run again, on torch's operators alone.
"""

from pathlib import Path

from helpers.forked import run

FILES = ("test_layout.py", "test_restarts.py")


def test_layouts_of_a_process_without_a_kernel(tmp_path: Path) -> None:
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow"]
    options += ["-W", "ignore:Module already imported"]  # the process is forked
    code = f"""
import pytest, torch
from sparsering.ground.kernel_library import kernel_operators
status = pytest.main({[*options, *files]!r})
assert kernel_operators() is None
raise SystemExit(status)
"""
    done = run(code, PATH=str(tmp_path), CXX="", SPARSERING_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
