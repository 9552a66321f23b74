"""Messages say to type what works where they are printed, and finished runs are kept."""

import ast
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers import forked
from helpers.pages import ROOT
from test_page_commands import COMMANDS, FINISHED

from sparsering.ground import commands

SOURCES = [path for name in ("sparsering", "benchmarks") for path in (ROOT / name).rglob("*.py")]
TYPED = re.compile(
    r"pip install|python -m|torchrun -|"
    r"\bsparsering (build|tune|train|plan|generate|plot|try|info|demo)\b"
)
NAMES = re.compile(  # a program's own name in its messages, and names in records and their pages
    r"(python -m benchmarks(\.\w+)*(: )?)$|record of `|Every candidate of|"
    r"What `sparsering tune`|<code>"
)


@cache
def texts(path: Path) -> list[str]:
    """The strings of a module that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Expr)}
    found = [x for x in ast.walk(tree) if isinstance(x, ast.Constant) and id(x) not in alone]
    return [x.value for x in found if isinstance(x.value, str)]


def test_messages_name_programs_of_this_python():
    """`commands` writes them, so that they work in an environment that is not activated too."""
    typed = [
        (str(path.relative_to(ROOT)), text)
        for path in SOURCES
        for text in texts(path)
        if TYPED.search(text) and not NAMES.search(text) and path.name != "commands.py"
    ]
    assert not typed


def test_programs_of_this_python_are_named_by_what_path_finds(monkeypatch, tmp_path):
    bin = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{bin}{os.pathsep}{os.environ['PATH']}")
    assert commands.install("hf") == "pip install 'sparsering[hf]'"
    assert commands.sparsering("build") == "sparsering build"
    (tmp_path / "pip").write_text("#!/bin/sh\n")
    (tmp_path / "pip").chmod(0o755)
    for path in (str(tmp_path), ""):  # another Python's, and none
        monkeypatch.setenv("PATH", path)
        assert commands.install("hf") == f"{sys.executable} -m pip install 'sparsering[hf]'"
        assert commands.sparsering("info") == f"{sys.executable} -m sparsering info"


def test_what_a_message_says_to_type_runs(monkeypatch):
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    monkeypatch.setenv("PATH", environment["PATH"])
    for command in (
        commands.sparsering("--version"),
        commands.program("pip", "pip") + " --version",
    ):
        subprocess.run(command, shell=True, check=True, env=environment, capture_output=True)
    torchrun = shlex.split(commands.program("torchrun", "torch.distributed.run"))
    assert torchrun[:2] == [sys.executable, "-m"] and len(torchrun) == 3
    help_of_module = (
        "import runpy, sys\n"
        f"sys.argv = ['torchrun', '--help']\nrunpy.run_module({torchrun[2]!r}, None, '__main__')"
    )
    done = forked.run(help_of_module)  # a fresh process imports torch for seconds
    assert done.returncode == 0 and "--nproc-per-node" in done.stdout


# Each replaces one file, or records of the same measurement, in one step.
RECORDS = [
    *("benchmarks/costs.py", "benchmarks/edges.py", "benchmarks/first_calls.py"),
    "benchmarks/strangers.py",
    *("benchmarks/graphs.py", "benchmarks/unlike_heads.py", "benchmarks/programs.py"),
    "benchmarks/derivatives.py",
    *("benchmarks/grids.py", "benchmarks/masks.py"),
    "benchmarks/batch_invariant.py",
    *("benchmarks/neighbourhoods.py", "benchmarks/serving.py", "benchmarks/meshes.py"),
    "benchmarks/export.py",
    *("benchmarks/spheres.py", "benchmarks/video.py"),
    *("benchmarks/comparisons/ceiling.py", "benchmarks/new_layouts.py"),
    *("benchmarks/packed_steps.py", "benchmarks/shared_models.py", "benchmarks/steps_memory.py"),
    *("benchmarks/new_plans.py", "benchmarks/sharded_parameters.py", "benchmarks/listed_ranks.py"),
    *("benchmarks/ring.py", "benchmarks/compare.py", "benchmarks/tables/planned.py"),
    *("benchmarks/gpu/__main__.py", "benchmarks/gpu/stages.py", "benchmarks/selection/run.py"),
    *("benchmarks/selection/pictures.py", "sparsering/cli/patterns.py"),
    "examples/slide_heatmap.py",
]


def writers() -> list[str]:
    """The modules with an option --out."""
    sources = [*SOURCES, *(ROOT / "examples").glob("*.py")]
    told = (x for x in sources if "--out" in x.read_text(encoding="utf-8"))  # most have none
    return sorted(str(x.relative_to(ROOT)) for x in told if "--out" in texts(x))


@pytest.mark.parametrize("module", writers())
def test_what_writes_runs_refuses_a_finished_one(module):
    """Found by its code; the message is provoked by the command of a page that runs it twice."""
    if module in RECORDS:
        return
    written = [*texts(ROOT / module), *texts(ROOT / "sparsering/training/resuming.py")]
    if module == "sparsering/cli/demo.py":
        written += [*texts(ROOT / "sparsering/demo/trained.py")]
    assert any(FINISHED in text for text in written), f"{module}: refuse a finished run"
    program = {
        "sparsering/cli/training.py": "sparsering train",
        "sparsering/cli/demo.py": "sparsering demo",
        "benchmarks/__main__.py": "make",
    }
    name = program.get(module, Path(module).name.replace(".", r"\."))
    assert any(name in x.pattern and x.again for x in COMMANDS), f"no page runs {module}"


def test_no_record_is_named_that_is_not_written():
    assert not set(RECORDS) - set(writers())
