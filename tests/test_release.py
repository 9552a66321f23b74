"""A release agrees with itself: versions, and promises with the runs of the workflow."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import sparsering

ROOT = Path(__file__).parent.parent


def test_one_version_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, day = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", changes, re.MULTILINE)[0]
    citation = dict(
        re.findall(
            r"^(version|date-released): *(\S+)$",
            (ROOT / "CITATION.cff").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    assert sparsering.__version__ == project["version"] == newest == citation["version"]
    assert day == citation["date-released"]
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    assert f'version: "{newest}"' in recipe


def test_the_oldest_python_and_torch_are_those_of_the_workflow():
    """The workflow runs the versions that `pyproject.toml` promises."""
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = [*project["dependencies"], project["requires-python"]]
    told = workflow.read_text(encoding="utf-8")
    for needed in oldest:
        version = needed.partition(">=")[2]
        assert f'"{version}' in told, f"the workflow does not run {needed}"


def minors(text: str) -> list[int]:
    return [int(minor) for minor in re.findall(r"\b2\.(\d+)\b", text)]


def test_the_weekly_run_has_a_row_for_each_minor_version_of_torch_and_the_nightly():
    workflow = (ROOT / ".github" / "workflows" / "versions.yml").read_text(encoding="utf-8")
    (row,) = re.findall(r"^ *torch: \[(.*)\]$", workflow, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (oldest,) = minors(project["dependencies"][0])
    rows = minors(row)
    assert rows == list(range(oldest, rows[-1] + 1)) and row.endswith("newest, nightly")
    pinned = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    assert minors(re.findall(r"^torch==(.*)$", pinned, re.MULTILINE)[0])[0] in rows
    (transformers,) = project["optional-dependencies"]["hf"]
    assert f'transformers: ["{transformers.partition(">=")[2]}", newest]' in workflow


# Jobs that may write: one opens an issue, one attests and uploads a release, one shows its notes.
WRITES = {"versions.yml": ["issues"], "release.yml": ["attestations", "id-token", "contents"]}


def test_only_jobs_that_must_may_write():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        assert "\npermissions:\n  contents: read\n" in text, path
        assert re.findall(r"^      ([\w-]+): write\b", text, re.MULTILINE) == WRITES.get(
            path.name, []
        )
        assert text.count(": write") == len(WRITES.get(path.name, [])), path


def test_the_tables_of_versions_are_those_of_the_record():
    spec = importlib.util.spec_from_file_location("versions", ROOT / "tools/tabulate_versions.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text(encoding="utf-8")
    runs = json.loads(tool.RECORD.read_text(encoding="utf-8")) if tool.RECORD.exists() else []
    assert tool.page(text, runs) == text
    run = {
        "date": "2026-01-31T12:00:00",
        "commit": "0123456789",
        "versions": {"torch": "2.9.1", "transformers": "5.1", "python": "3.11.1"},
        "tests": [],
        "outcomes": {"passed": 1234, "error": 1, "failed": 2},
        "failed": [],
        "seconds": 1.0,
    }
    newer = {**run, "versions": {**run["versions"], "torch": "2.11.0+cpu"}}
    again = {**run, "outcomes": {"passed": 1240}}
    assert tool.joined([newer, run], [again]) == [again, newer]
    assert tool.row(run, ("torch", "triton")) == (
        "| 2.9.1 | none | 1,234 | 3 | 0 | 2026-01-31 | `0123456789` |"
    )
