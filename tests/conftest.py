"""Sets up every test: one thread, repeatable examples, seeded tensors, poisoned memory.

`pytest --hypothesis-profile=explore` draws fresh hypothesis examples instead of the fixed ones,
`--shuffle SEED` another order of the tests.
"""

import contextlib
import gc
import json
import os
import platform
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from helpers.covering import mark_slow_outside_coverings
from helpers.poison import poisoned
from helpers.quick_interpreter import quicken
from torch import Tensor

BEGIN = time.monotonic()
gc.disable()  # until all modules are imported
os.environ["OMP_NUM_THREADS"] = "1"  # also of what tests start: two wait for each other, mostly
torch.set_num_threads(1)
os.environ.setdefault("MPLBACKEND", "Agg")  # before matplotlib is imported: no test opens a window
DEVICE = os.environ.get("SPARSERING_TEST_DEVICE", "")  # "cuda": see `device_runs`
assert DEVICE in ("", "cuda", "stub"), f"SPARSERING_TEST_DEVICE is cuda or stub, got {DEVICE}"
ON_STUB = DEVICE == "stub"  # tests/on_gpu_stub runs alone
os.environ.pop("TRITON_INTERPRET", None)
if not DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: they run on CPU tensors

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")


# torch.manual_seed keeps the stack of each of its calls for a GPU that may be initialised later
SEED = torch.manual_seed if DEVICE else torch.default_generator.manual_seed


class TorchRandom:
    """Torch's default generator, for hypothesis to seed before each example and restore after."""

    seed = staticmethod(SEED)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps only a weak reference
hypothesis.register_random(TORCH_RANDOM)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start each test from the same random numbers, in whatever order the tests run."""
    SEED(0)


@pytest.fixture
def threads() -> Iterator[None]:
    """Leave behind as many threads as there were."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    """Make uninitialised memory visible: what an allocation holds is NaN until it is written.

    torch has a facility for this (`torch.utils.deterministic.fill_uninitialized_memory`), which
    reaches C++ allocations too but acts only under `torch.use_deterministic_algorithms`. That flag
    also replaces algorithms: an `index_put_(accumulate=True)` whose bits change from run to run
    becomes repeatable, so that our own tests of bit-for-bit determinism could not fail. Hence the
    patch of the Python names, once per session so that compiled code keeps its guards. A test of a
    C++ kernel can turn the facility on around its one call. Processes that a test starts are not
    poisoned, nor are names bound by `from torch import empty`, nor the GPU stub, which counts
    operators.
    """
    if ON_STUB:
        yield
        return
    with torch.device("meta"):
        torch.empty(0)  # which from now on knows torch.empty by what it is here
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(Tensor, name, poisoned(getattr(Tensor, name)))
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Take half off the time of Triton's interpreter, with the same bits.

    Where kernels are compiled, Triton's types stay as they are: its compiler would crash.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not DEVICE:
            quicken(patch)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that show tests which need others before them."""
    group = parser.getgroup("order")
    group.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a drawn order")
    group.addoption("--draw", type=int, metavar="N", help="run N tests, drawn by --shuffle's seed")


def pytest_collection_finish() -> None:
    """Spares every search for garbage the half million objects that modules have imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Marks what coverings leave out as slow before -m chooses, and orders what it leaves."""
    mark_slow_outside_coverings(items)
    yield
    put_in_order(config, items)


def put_in_order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the tests into the order that `--shuffle` draws, and leaves the first `--draw`.

    Else the longest come first: at the end, one worker would wait for another.
    """
    seed, number = config.getoption("--shuffle"), config.getoption("--draw")
    items.sort(key=lambda item: "_run_to_their_result_and_again" not in item.name)
    if seed is None and number is None:
        return
    random.Random(seed or 0).shuffle(items)
    if number is not None:
        config.hook.pytest_deselected(items=items[number:])
        del items[number:]


def commit() -> str:
    """Returns the commit that the tests run at, with a "+" if files differ from it, or ""."""
    git = ["git", "-C", str(Path(__file__).parent)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        head = subprocess.check_output([*git, "rev-parse", "--short=10", "HEAD"], text=True)
        changed = subprocess.check_output([*git, "status", "--porcelain"], text=True)
        return head.strip() + ("+" if changed else "")
    return ""


def _places(spent: Counter[str]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Returns seconds by folder, seconds by file, and the number of tests by folder."""
    by_folder: Counter[str] = Counter()
    by_file: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    for name, seconds in spent.items():
        file = name.partition("::")[0]
        folder = file.rpartition("/")[0] or file
        by_folder[folder] += seconds
        by_file[file] += seconds
        cases[folder] += 1
    return by_folder, by_file, cases


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints where the time went, and writes a record to the file in SPARSERING_TIMES.

    The record has versions, outcomes, and the seconds of folders, files and the slowest tests.
    """
    path = os.environ.get("SPARSERING_TIMES")
    if not path:
        return
    spent: Counter[str] = Counter()
    stats = terminalreporter.stats
    for report in chain(*stats.values()):
        if hasattr(report, "duration"):
            spent[report.nodeid] += report.duration
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    by_folder, by_file, cases = _places(spent)
    whole = sum(spent.values())
    terminalreporter.section("where the time went")
    for name, seconds in by_folder.most_common():
        share = f"{seconds / max(whole, 1e-9):4.0%}"
        terminalreporter.write_line(f"{seconds:7.1f} s {share}  {cases[name]:5,} in {name}")
    terminalreporter.write_line("the ten slowest")
    for name, seconds in spent.most_common(10):
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
    config = terminalreporter.config
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    times = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions,
        "tests": [*(config.args if named else []), *filter(None, [config.option.keyword])],
        "seconds": round(time.monotonic() - BEGIN, 1),
        "load_average": os.getloadavg()[0],
        "outcomes": {name: len(found) for name, found in stats.items() if name},
        "failed": sorted({x.nodeid for name in ("failed", "error") for x in stats.get(name, ())}),
        "seconds_of_tests": round(whole, 1),
        "folders": {
            name: {"cases": cases[name], "seconds": round(x, 1)}
            for name, x in by_folder.most_common()
        },
        "files": {name: round(x, 1) for name, x in by_file.most_common()},
        "slowest": [[name, round(x, 2)] for name, x in spent.most_common(400)],
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(times, indent=1) + "\n")
