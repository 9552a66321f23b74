"""The list of planted defects that `make mutants` runs: each has its place, and a fast test."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TOOL = loaded()
MUTANTS = TOOL.mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.defect)
def test_each_defect_has_its_place_and_changes_what_runs(mutant: Any) -> None:
    text = (ROOT / mutant.file).read_text()
    wrong = TOOL.planted(mutant, text)  # raises unless each text is there once
    assert wrong != text
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(wrong)) != parsed(text)


@cache
def parsed(text: str) -> str:
    return ast.dump(ast.parse(text))


@cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / file).read_text())
    slow = [ast.unparse(x) for x in tree.body if isinstance(x, ast.Assign)]
    assert not any("pytestmark" in line and "slow" in line for line in slow), f"{file} is slow"
    return {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}


def named_tests() -> Iterator[str]:
    for mutant in MUTANTS:
        yield from mutant.tests


@pytest.mark.parametrize("name", sorted(set(named_tests())))
def test_each_named_test_exists_and_is_fast(name: str) -> None:
    file, _, test = name.partition("[")[0].partition("::")
    function = functions_of(file)[test]
    marks = [ast.unparse(x) for x in function.decorator_list]
    assert not any(mark.endswith(".slow") for mark in marks)


def test_the_names_with_their_parameters_are_collected_in_the_fast_run(
    request: pytest.FixtureRequest,
) -> None:
    names = sorted(set(named_tests()))
    items = request.session.items
    here = {item.nodeid for item in items if item.get_closest_marker("slow") is None}
    if {*names} <= here | {name.partition("[")[0] for name in here}:
        return  # of a run of all tests, which spares the collection of another
    collect = [sys.executable, *TOOL.PYTEST, "--collect-only", *names]
    run = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
    found = {line for line in run.stdout.splitlines() if "::" in line}
    whole = {line.partition("[")[0] for line in found}
    assert [name for name in names if name not in found | whole] == []


def test_each_defect_of_the_fuzzer_is_found_by_a_fast_test_or_says_why_not() -> None:
    of_fuzzer = [mutant for mutant in MUTANTS if mutant.area == "fuzzer"]
    assert sorted(mutant.defect for mutant in of_fuzzer) == sorted(TOOL.fuzzer_defects())
    assert all(bool(mutant.tests) != bool(mutant.only_slow) for mutant in of_fuzzer)


def test_there_are_many_defects_and_each_is_listed_once() -> None:
    lines = [str(mutant) for mutant in MUTANTS]
    assert len(set(lines)) == len(lines)
    assert sum(bool(mutant.tests) for mutant in MUTANTS) >= 60


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("assert one() == 1", "found"),
        ("assert one() > 0", "MISSED"),
    ],
)
def test_a_defect_is_found_where_a_test_fails_and_is_gone_afterwards(
    tmp_path: Path, body: str, expected: str
) -> None:
    code, test = tmp_path / "digits.py", tmp_path / "test_digits.py"
    code.write_text("def one():\n    return 1\n")
    test.write_text(f"from digits import one\n\n\ndef test_one():\n    {body}\n")
    mutant = TOOL.Mutant(
        area="none",
        defect="one is two",
        file="digits.py",
        changes=(("return 1", "return 2"),),
        tests=("test_digits.py::test_one",),
        only_slow="",
    )
    before = code.read_text()
    assert TOOL.outcome(tmp_path, tmp_path / "cache", mutant)[0] == expected
    assert code.read_text() == before


def test_a_test_that_is_not_there_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text("x = 1\n")
    (tmp_path / "test_digits.py").write_text("def test_one():\n    assert True\n")
    mutant = TOOL.Mutant(
        area="none",
        defect="x is 2",
        file="digits.py",
        changes=(("x = 1", "x = 2"),),
        tests=("test_digits.py::test_two",),
        only_slow="",
    )
    assert TOOL.outcome(tmp_path, tmp_path / "cache", mutant)[0] == "NOT RUN (4)"


def test_a_defect_without_its_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds the text to replace 2 times, expected once"):
        TOOL.planted(MUTANTS[0]._replace(changes=(("a", "b"),)), "a a")
