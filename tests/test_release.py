"""A release agrees with itself: versions, and promises with the runs of the workflow."""

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


def test_the_oldest_python_and_torch_are_those_of_the_workflow():
    """The workflow runs the versions that `pyproject.toml` promises."""
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = [*project["dependencies"], project["requires-python"]]
    told = workflow.read_text(encoding="utf-8")
    for needed in oldest:
        version = needed.partition(">=")[2]
        assert f'"{version}' in told, f"the workflow does not run {needed}"
