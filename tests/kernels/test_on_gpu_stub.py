"""The triton backend on a stub of a GPU: Triton's own launch path, checked and counted.

A process without the interpreter runs `tests/on_gpu_stub`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_stub import CAPABILITIES, missing

TESTS = Path(__file__).parent.parent / "on_gpu_stub"


def run(*options: str, tests: Path = TESTS) -> None:
    """Runs the tests on the stub that the options of pytest choose."""
    if reason := missing():
        pytest.skip(reason)
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    for name in ("TRITON_INTERPRET", "SPARSERING_TIMES"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, tests],
        capture_output=True,
        text=True,
        env={**environment, "SPARSERING_TEST_DEVICE": "stub"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout


def test_steady_calls_launch_little_and_wait_for_nothing():
    """All files are one process: its start takes as long as the tests of several."""
    run("-m", "not slow")


@pytest.mark.slow
def test_more_of_such_calls():
    run("-m", "slow", "-k", "not sm and not test_benchmarks")


@pytest.mark.slow
def test_every_part_of_the_benchmark_runs_to_its_end():
    run("-m", "slow", tests=TESTS / "test_benchmarks.py")


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kind_of_call_is_launched(capability):
    run("-m", "slow", "-k", f"sm{capability}")
