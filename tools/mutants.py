"""Plants each defect of `mutants.toml` in a copy of the tree: a fast test must find it.

`make mutants` runs all of them, `make mutants ONLY=window` those whose line holds the text. First
all named tests must pass without a defect. Then each defect is planted alone, its tests run, and
the file is restored. Prints a line for each defect; the exit status is 1 if one is missed.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
PLANTED = ROOT / "tests" / "fuzz" / "test_planted.py"
LONGEST = 600  # seconds for the tests of one defect; the first of them may compile the kernel
PASSED, FAILED = 0, 1  # exit statuses of pytest; 2 to 5 say that no test ran, or not to its end
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow")


class Mutant(NamedTuple):
    """One defect: texts of a file and what takes their place, and the tests that fail then."""

    area: str
    defect: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]
    only_slow: str

    def __str__(self) -> str:
        return f"{self.area}: {self.defect}"


def fuzzer_defects() -> dict[str, tuple[str, ...]]:
    """Returns the fuzzer's defects by name: (kind of attack, file, right, wrong, and so on)."""
    spec = importlib.util.spec_from_file_location("planted_defects", PLANTED)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DEFECTS


def mutants() -> list[Mutant]:
    """Returns all defects of `mutants.toml`, and those of the fuzzer that it names."""
    entries: dict[str, Any] = tomllib.loads(LIST.read_text())
    found = [
        Mutant(
            area=entry["area"],
            defect=entry["defect"],
            file=entry["file"],
            changes=((entry["right"], entry["wrong"]),),
            tests=tuple(entry["tests"]),
            only_slow="",
        )
        for entry in entries["mutant"]
    ]
    defects = fuzzer_defects()
    for entry in entries["fuzzer"]:
        _, file, *changes = defects[entry["defect"]]
        found.append(
            Mutant(
                area="fuzzer",
                defect=entry["defect"],
                file=f"sparsering/{file}",
                changes=tuple(zip(changes[::2], changes[1::2], strict=True)),
                tests=tuple(entry.get("tests", ())),
                only_slow=entry.get("only_slow", ""),
            )
        )
    return found


def planted(mutant: Mutant, text: str) -> str:
    """Returns the file's text with the defect; ValueError unless each right text is there once."""
    for right, wrong in mutant.changes:
        if (times := text.count(right)) != 1:
            told = f"{mutant.file} holds the text to replace {times} times, expected once"
            raise ValueError(f"{mutant}: {told}:\n{right}")
        text = text.replace(right, wrong)
    return text


def copy_tree(folder: Path) -> None:
    """Copies the files that git tracks, as they are now, and compiles the package.

    The compiled files hold the hash of their source, not its date: one of a file without its defect
    is never taken for one with it.
    """
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(source.read_bytes())
    compiler = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compiler, "sparsering"], cwd=folder, check=True)


def run_tests(folder: Path, tests: list[str], cache: Path | None) -> tuple[int | None, str]:
    """Returns pytest's exit status, None if it took too long, and what it printed."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if cache:
        environment["SPARSERING_CACHE"] = str(cache)
    command = [sys.executable, *PYTEST, *tests]
    try:
        run = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no end within {LONGEST} s"
    return run.returncode, run.stdout


def outcome(folder: Path, cache: Path, mutant: Mutant) -> tuple[str, str]:
    """Plants one defect, runs its tests and restores the file; returns ("found", "") if they fail.

    Otherwise returns "MISSED", or "NOT RUN" with pytest's exit status, and what pytest printed.
    """
    path = folder / mutant.file
    text = path.read_text()
    path.write_text(planted(mutant, text))
    try:
        # The kernel with a defect is compiled into a cache that is thrown away.
        status, printed = run_tests(
            folder, list(mutant.tests), cache if path.suffix in (".h", ".cpp") else None
        )
    finally:
        path.write_text(text)
    if status == FAILED:
        return "found", ""
    return ("MISSED" if status == PASSED else f"NOT RUN ({status})"), printed


def main() -> int:
    """Runs the defects that the command line picks; returns 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a text that the defect's line must hold")
    only = parser.parse_args().only
    begin = time.monotonic()
    picked = [mutant for mutant in mutants() if only in f"{mutant} {mutant.file} {mutant.tests}"]
    run = [mutant for mutant in picked if not mutant.only_slow]
    if not picked:
        print(f"no defect of {LIST.name} holds the text {only!r}")
        return 1
    missed: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder, cache = Path(temporary, "tree"), Path(temporary, "cache")
        copy_tree(folder)
        named = sorted({test for mutant in run for test in mutant.tests})
        status, printed = run_tests(folder, named, None) if named else (PASSED, "")
        if status != PASSED:
            print(f"{printed}\nthe tests must pass before a defect is planted, got status {status}")
            return 1
        print(f"{len(named)} tests pass without a defect, {time.monotonic() - begin:.0f} s")
        for mutant in run:
            start = time.monotonic()
            found, printed = outcome(folder, cache, mutant)
            print(f"{found:7} {time.monotonic() - start:5.1f} s  {mutant}  [{mutant.tests[0]}]")
            if found != "found":
                missed.append(mutant)
                print(printed)
    for mutant in picked:
        if mutant.only_slow:
            print(f"slow             {mutant}  [{mutant.only_slow}]")
    for area, number in sorted(Counter(mutant.area for mutant in run).items()):
        lost = sum(mutant.area == area for mutant in missed)
        print(f"{area:14} {number - lost:3} of {number} found")
    print(f"{len(run) - len(missed)} of {len(run)} found, {time.monotonic() - begin:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
