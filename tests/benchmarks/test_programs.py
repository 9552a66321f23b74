"""The parts that run other programs, with stand-ins for compute-sanitizer and ncu."""

import json
import os
import stat
from pathlib import Path

import pytest

from benchmarks.gpu import programs


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Writes a program that prints a text, its arguments to a file, and ends with a code."""

    def write(name: str, text: str, code: int = 0) -> Path:
        (tmp_path / "said").write_text(text)
        path = tmp_path / name
        path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/told\n'
            f"echo $PYTORCH_NO_CUDA_MEMORY_CACHING >> {tmp_path}/told\n"
            f"cat {tmp_path}/said\nexit {code}\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "told"

    return write


def test_programs_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(programs, "_found", lambda program: None)
    (row,) = programs.sanitized("memcheck")
    assert row["left_out"] == "compute-sanitizer is not on this machine"
    (row,) = programs.profiled("key")
    assert row["left_out"] == "ncu is not on this machine"
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    (row,) = programs.kernel_tests("test_triton.py")
    assert row["left_out"] == "pytest or hypothesis is missing"


def test_the_sanitizer_watches_the_smoke_and_its_faults_fail(tool):
    told = tool("compute-sanitizer", "out\n========= ERROR SUMMARY: 0 errors\n")
    (row,) = programs.sanitized("memcheck")
    assert row["found"] == "0 errors"
    lines = told.read_text().split("\n")
    assert lines[:4] == ["--tool", "memcheck", "--error-exitcode", "9"]
    assert lines[5:9] == ["-m", "benchmarks.gpu.programs", "smoke", "1"]
    fault = "========= Invalid __global__ read of size 4 bytes\n"
    tool("compute-sanitizer", f"{fault}========= ERROR SUMMARY: 1 error\n", 9)
    with pytest.raises(RuntimeError, match="memcheck: 1 error; Invalid __global__ read of size 4"):
        list(programs.sanitized("memcheck"))
    tool("compute-sanitizer", "no GPU\n", 1)
    with pytest.raises(RuntimeError, match="racecheck: exit code 1, no GPU"):
        list(programs.sanitized("racecheck"))


def test_a_program_that_hangs_is_ended(tool, monkeypatch):
    told = tool("compute-sanitizer", "")
    told.with_name("compute-sanitizer").write_text("#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(programs, "sized", lambda on_gpu, rehearsed: 0.3)
    with pytest.raises(RuntimeError, match="memcheck: did not end in time"):
        list(programs.sanitized("memcheck"))


def test_ncu_gives_the_metrics_that_decide_what_to_do_next(tool):
    metrics = {
        "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "61.5"),
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": ("%", "70.1"),
        "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "0.8"),
        "launch__registers_per_thread": ("register/thread", "253"),
        "device__attribute_architecture": ("", "368"),
    }
    table = [
        ["ID", "Kernel Name", *metrics],
        ["", "", *(unit for unit, _ in metrics.values())],
        ["0", "forward_kernel", *(value for _, value in metrics.values())],
    ]
    lines = [",".join(json.dumps(cell) for cell in line) for line in table]
    told = tool("ncu", "==PROF== Connected\n" + "\n".join(lines) + "\n")
    (row,) = programs.profiled("forward")
    assert row["lts__t_sectors.avg.pct_of_peak_sustained_elapsed %"] == "70.1"
    assert len([name for name in row if "__" in name]) == 4
    assert "regex:^forward_kernel" in told.read_text() and "none" in told.read_text()
    tool("ncu", "==ERROR== ERR_NVGPUCTRPERM - no permission\n", 1)
    (row,) = programs.profiled("key")
    assert row["left_out"] == "==ERROR== ERR_NVGPUCTRPERM - no permission"


def test_tests_of_the_kernels_are_counted_and_the_first_failure_is_named(monkeypatch):
    said = "tests/kernels/test_triton.py::test_a PASSED [ 50%]\n"
    ended: list[int | None] = [0]
    monkeypatch.setattr(programs, "_output", lambda *rest: (said, ended[0]))
    (row,) = programs.kernel_tests("test_triton.py")
    assert row["passed"] == 1 and row["to_its_end"]
    ended[0] = None
    (row,) = programs.kernel_tests("test_triton.py")
    assert row["passed"] == 1 and not row["to_its_end"]
    said += "tests/kernels/test_triton.py::test_b[x y] FAILED [100%]\nE   assert 1 == 2\n"
    ended[0] = 1
    where = r"1 tests passed, then tests/kernels/test_triton.py::test_b\[x y\]: assert 1 == 2"
    with pytest.raises(RuntimeError, match=where):
        list(programs.kernel_tests("test_triton.py"))
