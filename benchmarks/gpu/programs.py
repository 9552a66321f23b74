"""Cases that run other programs: the kernels' tests, compute-sanitizer, and Nsight Compute (ncu).

A program that is not on this machine is named in its row, and the case passes.

    python -m benchmarks.gpu.programs smoke      # what compute-sanitizer watches
    python -m benchmarks.gpu.programs profiled   # what ncu measures
"""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

import sparsering as sr

from ..measure import Row
from . import correctness
from .device import DEVICE, GPU, STUB, inputs, sized, synchronize

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_triton.py", "test_triton_extras.py", "test_triton_lists.py")
_ONE_TEST = {
    "test_triton.py": "test_the_precision_that_the_user_asks_for_is_heard",
    "test_triton_extras.py": "test_rows_without_keys_have_their_sink_or_nothing",
    "test_triton_lists.py": "test_lists_without_slots_leave_the_sink",
}  # of a rehearsal
SANITIZERS = ("memcheck", "racecheck", "synccheck")
_DOUBTED = ("racecheck",)  # knows bulk copies and wgmma only in part, and may report what is right
_FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
_METRICS = re.compile(
    r"sm__(inst_executed_pipe|pipe)_tensor.*pct|lts__t_sectors\.avg\.pct|dram__throughput.*pct"
    r"|sm__throughput.*pct|.*issue_stalled_(barrier|long_scoreboard|math_pipe_throttle|wait)\S*ratio"
    r"|gpu__time_duration\.sum|launch__(registers|shared_mem|occupancy)\S*"
)


def kernel_tests(name: str) -> Iterator[Row]:
    """Runs one file of the kernels' tests on this GPU, until the first failure or 90 s."""
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        yield {"program": "pytest", "case": name, "left_out": "pytest or hypothesis is missing"}
        return
    real = GPU and not STUB
    command = [sys.executable, "-m", "pytest", f"tests/kernels/{name}", "-x", "-v", "--no-header"]
    command += ["-p", "no:cacheprovider", "-m", "not slow"]
    command += [] if real else ["-k", _ONE_TEST[name]]
    own = {"SPARSERING_TEST_DEVICE": "cuda" if real else ""}
    output, code = _output(command, sized(90.0, 250.0), own)
    passed = len(re.findall(r" PASSED", output))
    ran = re.findall(r"^(\S+::.*?) (?:PASSED|SKIPPED)", output, re.MULTILINE)
    if code not in (0, None):
        failed = re.search(r"^(\S+::.*) (FAILED|ERROR)", output, re.MULTILINE)
        said = re.findall(r"^E +(.*)", output, re.MULTILINE)[:2]
        where = failed[1] if failed else f"exit code {code}: {output.strip()[-200:]}"
        raise RuntimeError(f"{passed} tests passed, then {where}: {'; '.join(said)}"[:500])
    yield {"program": "pytest", "case": name, "passed": passed, "to_its_end": code is not None,
           "last": ran[-1] if ran else None}  # fmt: skip


def sanitized(tool: str) -> Iterator[Row]:
    """Runs the smoke under a tool of compute-sanitizer; what racecheck finds is only recorded."""
    program = _found("compute-sanitizer")
    if program is None:
        yield {"program": tool, "left_out": "compute-sanitizer is not on this machine"}
        return
    command = [program, "--tool", tool, "--error-exitcode", "9", *_this("smoke")]
    # torch's allocator would hide accesses beyond a tensor
    output, code = _output(command, sized(100.0, 250.0), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", output)
    if code is None or summary is None:
        ended = "did not end in time" if code is None else f"exit code {code}, {output[-300:]}"
        raise RuntimeError(f"{tool}: {ended}")
    faults = re.findall(r"^=+ +((?:Invalid|Error|Warning|Program hit).*)", output, re.MULTILINE)
    if code and tool not in _DOUBTED:
        raise RuntimeError(f"{tool}: {summary[1]}; {'; '.join(faults[:3])}")
    if code:  # to be read by someone: bits that differ from run to run are what makes a part fail
        yield {"program": tool, "case": "smoke", "found": summary[1].strip(), "first": faults[:3]}
        return
    yield {"program": tool, "case": "smoke", "found": summary[1].strip()}


def profiled(kernel: str) -> Iterator[Row]:
    """Profiles one launch of a kernel at the main shape; the clocks stay as they are."""
    program = _found("ncu")
    if program is None:
        yield {"program": "ncu", "kernel": kernel, "left_out": "ncu is not on this machine"}
        return
    sections = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis",
                "WarpStateStats", "LaunchStats")  # fmt: skip
    command = [program, "--clock-control", "none", "--kernel-name", f"regex:^{kernel}_kernel"]
    command += ["--launch-skip", "1", "--launch-count", "1", "--csv", "--page", "raw"]
    command += [x for name in sections for x in ("--section", name)]
    output, code = _output([*command, *_this("profiled")], sized(60.0, 250.0), {})
    table = [line for line in output.splitlines() if line.startswith('"')]
    if code or len(table) < 3:  # often: ERR_NVGPUCTRPERM, counters are for administrators
        why = re.findall(r"^==ERROR==.*", output, re.MULTILINE)
        said = "; ".join(why)[:300] or f"exit code {code}: {output[-200:]}"
        yield {"program": "ncu", "kernel": kernel, "left_out": said}
        return
    names, units, values = list(csv.reader(table))[:3]
    found = {
        f"{name} {unit}".strip(): value for name, unit, value in
        zip(names, units, values, strict=False) if _METRICS.search(name)
    }  # fmt: skip
    yield {"program": "ncu", "kernel": kernel, "case": "main shape", **found}


def _found(program: str) -> str | None:
    path = os.pathsep.join((os.environ.get("PATH", ""), *_FOLDERS))
    return shutil.which(program, path=path)


def _this(what: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.programs", what]


def _output(command: list[str], seconds: float, own: dict[str, str]) -> tuple[str, int | None]:
    """Runs a command in the repository; returns its output and exit code, None if it was ended."""
    names = {**os.environ, "PYTHONPATH": str(ROOT), **own}
    names = {name: x for name, x in names.items() if x or name not in own}
    process = subprocess.Popen(
        command, cwd=ROOT, env=names, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: the program and its children
        output, _ = process.communicate()
        return output, None
    return output, process.returncode


def main(what: str) -> None:
    """Runs what another program watches: the smoke, or two passes of the main shape."""
    if what == "smoke":
        print(*correctness.smoke())
        print(*correctness.choice())
        return
    heads, length, width, block = sized((16, 32768, 128, 128), (2, 64, 16, 16))
    args = [x.requires_grad_() for x in inputs(heads, length, width)]
    grad = torch.ones(1, heads, length, width, device=DEVICE, dtype=args[0].dtype)
    for _ in range(2):
        out = sr.attention(*args, sr.RandomBlocks(0.1, block), block_size=block, backend="triton")
        torch.autograd.grad(out, args, grad)
    synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
