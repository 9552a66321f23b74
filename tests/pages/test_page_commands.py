"""Every command of README.md and docs/ is run as it is typed, to its saved result, and repeated.

The commands are read from the pages, so a new one that `COMMANDS` does not know is a failure. Each
runs in a folder that links to the checkout. What is appended makes it small. Those of README and of
each page's first screen are fast tests, a test for each group of commands that read one another's
files; there 2 processes take the place of 4, all are forked from one that has imported torch, and
those commands of one process are repeated that then are refused. Whole pages are slow tests, of
fresh processes and torchrun's own.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import forked
from helpers.pages import PAGES, README, ROOT, SHELLS, blocks
from test_first_screens import SCREEN

BIN = Path(sys.executable).parent
WARNINGS = [  # a command's code must not use what is deprecated
    "error::FutureWarning",
    "error::DeprecationWarning",
    # torch's own, from its first compile; see pyproject.toml
    "ignore:`torch.jit.script_method` is:DeprecationWarning",
    "ignore:`torch.jit.script` is deprecated",
    # transformers 5.24 calls it `cache`; 5.23 knows no other name
    "ignore:`past_key_values` is deprecated:FutureWarning",
]
FINISHED = "which is not overwritten"


class Command(NamedTuple):
    """A kind of command, and how a test runs it."""

    pattern: str  # of the whole command
    small: str = ""  # options that are appended
    writes: str = ""  # a file that it leaves
    again: str = ""  # the message that refuses its repetition; "" if it can be repeated
    not_run: str = ""  # why it is not run, or where else


TINY = "--context 256 --width 32 --num-layers 1 --steps 2"
COMMANDS = [
    Command(r".*--help"),
    Command(
        r"torchrun --nproc-per-node 2 examples/finetune_long_context\.py",
        "--length 256 --steps 2",
        "runs/long-context/model/model.safetensors",
        FINISHED,
    ),
    Command(
        r"torchrun --nproc-per-node 2 examples/train_over_ranks\.py .*",
        "--steps 2 --length 64",
        "runs/shared/losses.json",
        FINISHED,
    ),
    Command(r"sparsering demo", "--quick", "runs/demo/report.html", FINISHED),
    Command(
        r"torchrun --standalone --nproc-per-node 4 -m sparsering demo-ring",
        "--quick",
        "runs/demo-ring/report.txt",
        FINISHED,
    ),
    Command(r"sparsering build"),
    Command(r"sparsering info"),
    Command(r"sparsering plan .*"),
    Command(r"sparsering train .*--out runs/mine .*", TINY, "runs/mine/metrics.jsonl", FINISHED),
    Command(
        r"sparsering train --out runs/chosen .*",
        f"{TINY} --schedule 0:dense,1:2 --blocks 2",
        "runs/chosen/metrics.jsonl",
        FINISHED,
    ),
    Command(
        r"torchrun .*-m sparsering train --sequence-parallel 4 --out runs/ranks",
        TINY,
        "runs/ranks/metrics.jsonl",
        FINISHED,
    ),
    Command(
        r"torchrun .*-m sparsering train .*--shard .*--out runs/large",
        f"{TINY} --num-heads 2",
        "runs/large/metrics.jsonl",
        FINISHED,
    ),
    Command(r"sparsering generate .*"),
    Command(r"sparsering plot .* --out window\.png", writes="window.png"),
    Command(r"sparsering plot --losses runs/mine .*", writes="losses.svg"),
    Command(r"sparsering try .*", "--length 256 --seconds 1"),
    Command(
        r"python examples/train_packed\.py --steps 100",
        "--steps 2 --length 64 --text my_texts --compiler eager",
        "runs/packed/losses.json",
        FINISHED,
    ),
    Command(
        r"python examples/train_packed\.py --model qwen3 .*",
        "--steps 2 --length 64 --text my_texts --compiler eager",
        "runs/packed-qwen3/losses.json",
        FINISHED,
    ),
    Command(r"python examples/train_answers\.py", "--steps 1 --groups 1"),
    Command(
        r"python examples/make_slides\.py .*", "--side 12", "runs/slides/labels.json", FINISHED
    ),
    Command(
        r"python examples/finetune_slides\.py .*",
        "--steps 2 --batch 2",
        "runs/tuned-slides/slide_encoder.pth",
        FINISHED,
    ),
    Command(
        r"torchrun --nproc-per-node 2 examples/finetune_slides\.py .*",
        "--steps 2 --batch 2",
        "runs/tuned-last/slide_encoder.pth",
        FINISHED,
    ),
    Command(r"pip install .*", not_run="see test_extras_that_pages_install_exist"),
    Command(
        r"make report|python -m benchmarks report .*",
        again=FINISHED,
        not_run="a minute of tiny sizes: tests/benchmarks/test_tables.py, slow",
    ),
    Command(r"make (test|fuzz)( SECONDS=3600)?", not_run="these are the tests"),
    Command(
        r"python -m benchmarks\.gpu.*|sh benchmarks/gpu/first\.sh",
        not_run="tests/benchmarks/test_gpu.py",
    ),
    Command(
        r"python tests/kernels/compile_triton\.py .*",
        not_run="tests/kernels/test_triton_compile.py compiles",
    ),
    Command(
        r"(torchrun .*|python )train_(long|v4)\.py", not_run="tests/pages/test_parallel_page.py"
    ),
    Command(
        r"torchrun --nproc-per-node 4 train\.py", not_run="the page's block, tests/pages/test_docs"
    ),
    Command(
        r"torchrun (--numa-binding|--nproc-per-node 2 --no-python) .*",
        not_run="tests/distributed/test_numa_binding.py",
    ),
]


def commands_of(script: str) -> Iterator[tuple[dict[str, str], str]]:
    """Yields (variables, command) of each line of a shell block, joined lines as one."""
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        variables = {}
        while words and re.match(r"(\w+)=", words[0]):
            name, value = words.pop(0).split("=", 1)
            variables[name] = value
        if words and words[0] != "export":
            yield variables, shlex.join(words)


def known(command: str) -> Command | None:
    """The first entry of `COMMANDS` for a command as it is printed on the page."""
    plain = " ".join(shlex.split(command))
    return next((x for x in COMMANDS if re.fullmatch(x.pattern, plain)), None)


def page_commands(last_line: float = math.inf) -> dict[Path, list[tuple[dict[str, str], str]]]:
    """The commands of blocks that begin up to a line of each page."""
    found = {}
    for page in PAGES:
        shells = [x for x in blocks(page.read_text(encoding="utf-8")) if x.language in SHELLS]
        found[page] = [pair for x in shells if x.line <= last_line for pair in commands_of(x.code)]
    return found


ALL = page_commands()


def test_every_command_of_the_pages_is_known():
    unknown = [(page.name, y) for page, found in ALL.items() for _, y in found if not known(y)]
    assert not unknown, f"add them to COMMANDS: {unknown}"
    typed = [known(command) for found in ALL.values() for _, command in found]
    assert not [x.pattern for x in COMMANDS if x not in typed], "no page has these any more"


def test_extras_that_pages_install_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    installs = [y for found in ALL.values() for _, y in found if y.startswith("pip install")]
    named = [name for y in installs for x in re.findall(r"\[(.*?)\]", y) for name in x.split(",")]
    assert named and not set(named) - set(extras)


def checkout(folder: Path) -> Path:
    """Makes a folder in which commands find the checkout's files and write their own."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git", "docs", ".venv"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").mkdir()  # with a stamp newer than the requirements: make installs nothing
    for path in (ROOT / ".venv").iterdir():
        if path.name != ".installed":
            (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv" / ".installed").touch()
    (folder / "my_texts").mkdir()
    (folder / "my_texts" / "text.txt").write_text("a text to learn from. " * 400)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (folder / "path" / "or").mkdir(parents=True)
    (folder / "path" / "or" / "config.json").write_text(json.dumps(config))
    return folder


def variables_of_commands() -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    warnings = ",".join(WARNINGS)
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": warnings}
    return {**own, "GLOO_SOCKET_IFNAME": "lo"}


def run(folder: Path, command: str, variables: dict[str, str]) -> tuple[int, str]:
    environment = {**os.environ, **variables_of_commands(), **variables}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


FORKED = """
import builtins, os, re, runpy, sys, warnings
for line in {warnings!r}:
    action, message, category = (line + ":Warning").split(":")[:3]
    warnings.filterwarnings(action, re.escape(message), getattr(builtins, category))
os.environ.pop("TRITON_INTERPRET", None)
os.chdir({folder!r})
program, *words = sys.argv = {words!r}
if program == "python":
    sys.argv = words
    sys.path.insert(0, os.path.dirname(words[0]))
    runpy.run_path(words[0], run_name="__main__")
elif program == "torchrun":
    from helpers.torchrun import main
    main(words)
else:
    from sparsering.cli import main
    sys.exit(main())
"""


def of_few_processes(folder: Path, command: str, variables: dict[str, str]) -> tuple[int, str]:
    """Runs a command in a forked process, of which torchrun forks two."""
    words = shlex.split(command.replace("--nproc-per-node 4", "--nproc-per-node 2"))
    if words[0] not in ("sparsering", "python", "torchrun"):
        return run(folder, command, variables)
    code = FORKED.format(warnings=WARNINGS, folder=str(folder), words=words)
    done = forked.run(code, **variables_of_commands(), **variables)
    return done.returncode, done.stdout + done.stderr


def test_warnings_of_commands_are_errors(tmp_path):
    """A command whose code warns of something deprecated fails, as a page's block does."""
    for category in ("FutureWarning", "DeprecationWarning"):
        code = f"import warnings; warnings.warn('old', {category})"
        failed, said = run(tmp_path, f'python -c "{code}"', {})
        assert failed and f"{category}: old" in said
        (tmp_path / "old.py").write_text(code)
        failed, said = of_few_processes(tmp_path, "python old.py", {})
        assert failed and f"{category}: old" in said


Run = list[tuple[dict[str, str], str, Command]]


def to_run(pages: dict[Path, list[tuple[dict[str, str], str]]]) -> dict[Path, Run]:
    """The commands of each page that no page before it has."""
    chosen: dict[Path, Run] = {}
    seen: set[str] = set()
    for page, found in pages.items():
        for variables, command in found:
            kind = known(command)
            if command not in seen and kind is not None and not kind.not_run:
                chosen.setdefault(page, []).append((variables, command, kind))
            seen.add(command)
    return chosen


FIRST = page_commands(SCREEN) | {README: ALL[README]}
EVERY = to_run(ALL)
MINE = "runs/mine"  # what one command of README writes and others read


def groups(commands: Run) -> Iterator[Run]:
    """Yields the commands that read one another's files, then each other one alone."""
    if together := [x for x in commands if MINE in x[1]]:
        yield together
    yield from ([x] for x in commands if MINE not in x[1])


FAST = [
    pytest.param(commands, id=f"{page.name}: {commands[0][1][:40]}")
    for page, found in to_run(FIRST).items()
    for commands in groups(found)
]


@pytest.mark.parametrize("commands", FAST)
def test_commands_of_a_first_screen_run_to_their_result_and_again(commands, tmp_path):
    refused = [x for x in commands if x[1].startswith("sparsering ") and x[2].again]
    run_to_their_result(commands, tmp_path, refused, of_few_processes)


@pytest.mark.slow
@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_commands_of_a_page_run_to_their_result_and_again(page, tmp_path):
    run_to_their_result(EVERY[page], tmp_path, EVERY[page], run)


def run_to_their_result(
    commands: Run, folder: Path, repeated: Run, run: Callable[..., tuple[int, str]]
) -> None:
    folder = checkout(folder)
    for variables, command, kind in commands:
        code, said = run(folder, f"{command} {kind.small}", variables)
        assert code == 0, f"{command}\n{said}"
        assert not kind.writes or (folder / kind.writes).stat().st_size, command
    before = contents(folder)
    for variables, command, kind in repeated:
        if not kind.writes:
            continue
        code, said = run(folder, f"{command} {kind.small}", variables)
        assert (code != 0) == bool(kind.again) and kind.again in said, f"{command}\n{said}"
    assert contents(folder) == before, "a refused repetition has changed files"


def contents(folder: Path) -> dict[str, bytes]:
    """The files of all runs."""
    return {str(x): x.read_bytes() for x in folder.rglob("runs/**/*") if x.is_file()}


def test_commands_of_a_block():
    script = '# a comment\nexport A=1\nB=2 sparsering plan "Causal() & x" \\\n  --tokens 4 # so\n'
    assert list(commands_of(script)) == [({"B": "2"}, "sparsering plan 'Causal() & x' --tokens 4")]
    assert known("sparsering conquer") is None
    assert known("sparsering demo") is not known("sparsering demonstrate")


def test_make_runs_the_same_demos():
    for target, command in (
        ("demo", "sparsering demo --out runs/new --quick"),
        ("demo-ring", "-m sparsering demo-ring --out runs/new --quick"),
    ):
        lines = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", target]
        lines += ["OUT=runs/new", "ARGS=--quick"]
        done = subprocess.run(lines, cwd=ROOT, capture_output=True, text=True, check=True)
        assert " ".join(shlex.split(done.stdout)).endswith(command)
