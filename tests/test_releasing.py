"""`make release` refuses what is not ready, in one line that says what to do."""

import contextlib
import datetime
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))  # of the module that the tool imports
SPEC = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)

TODAY = datetime.datetime.now(datetime.UTC).date()
CHANGES = f"""# Changelog

## [Unreleased]

## [0.3.0] - {TODAY}

In short ([what to change](docs/upgrading.md), [form](https://keepachangelog.com)):

1. Grids, and
   an order of their tiles.
2. Trees.

### Added

- `attention` takes a dictionary
  of patterns:
  - for each head.

## [0.2.0] - 2026-01-02

### Added

- Everything.
"""
FILES = {
    "CHANGELOG.md": CHANGES,
    "pyproject.toml": (
        '[project]\nname = "sparsering"\nversion = "0.3.0"\n'
        '[project.urls]\nDocumentation = "https://somebody.github.io/sparsering"\n'
        'Repository = "https://github.com/somebody/sparsering"\n'
    ),
    "sparsering/__init__.py": '__version__ = "0.3.0"\n',
    "CITATION.cff": f"cff-version: 1.2.0\nversion: 0.3.0\ndate-released: {TODAY}\n",
    "packaging/conda/recipe.yaml": 'context:\n  version: "0.3.0"\n',
    "docs/upgrading.md": "# Upgrading from 0.2.0\n\nNothing.\n",
    ".gitignore": "/runs/\n/dist/\n",
}
USER = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")


def git(root: Path, *command: str) -> None:
    subprocess.run(["git", *USER, *command], cwd=root, check=True, capture_output=True)


def change(root: Path, name: str, old: str, new: str) -> None:
    """Replaces a text in a file of the tree; where there is git, commits that."""
    text = (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new))
    if (root / ".git").exists():
        git(root, "commit", "--quiet", "--all", "--message", "change")


@pytest.fixture
def files(tmp_path):
    """Returns the files of a tree that is ready for 0.3.0, without git."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def tree(files):
    """Returns a repository that is ready for 0.3.0."""
    git(files, "init", "--quiet")
    git(files, "add", ".")
    git(files, "commit", "--quiet", "--message", "ready")
    return files


def refusal(root: Path, *arguments: str, version: str = "0.3.0") -> str:
    """Runs the command; returns what it says, which has the three parts of each refusal."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert release.main(root, [version, *arguments]) == 1
    assert re.fullmatch(r"release: expected .+, got .+; .+\n", said.getvalue()), said.getvalue()
    return said.getvalue()


def test_a_tree_that_is_ready_gives_notes_and_the_steps_of_its_owner(tree, capsys):
    dist = tree / "dist"
    dist.mkdir()
    names = (".tar.gz", "-py3-none-any.whl", "-py3-none-manylinux_2_28_x86_64.whl")
    for name in names:
        (dist / f"sparsering-0.3.0{name}").write_text("")
    assert release.main(tree, ["0.3.0", "--files", str(dist)]) == 0
    assert (tree / "runs" / "release-0.3.0.md").read_text() == (
        "In short (what to change (`docs/upgrading.md`), [form](https://keepachangelog.com)):\n\n"
        "1. Grids, and an order of their tiles.\n2. Trees.\n\n### Added\n\n"
        "- `attention` takes a dictionary of patterns:\n  - for each head.\n"
    )
    said = capsys.readouterr().out
    assert "Nothing was pushed" in said and "git push origin v0.3.0" in said
    listed = subprocess.run(["git", "tag"], cwd=tree, capture_output=True, text=True, check=True)
    assert not listed.stdout


def test_before_the_files_are_built_nothing_is_written(tree, capsys):
    assert release.main(tree, ["0.3.0"]) == 0
    assert "git push" not in capsys.readouterr().out and not (tree / "runs").exists()


HEAD = f"## [0.3.0] - {TODAY}"


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("pyproject.toml", "0.3.0", "0.2.0", "version 0.3.0 in pyproject.toml, got 0.2.0"),
        ("pyproject.toml", "version", "edition", "one line with the version in pyproject.toml"),
        ("pyproject.toml", "Repository", "Source", "project.urls] in pyproject.toml, got no Repo"),
        ("pyproject.toml", "https:", "http:", "in pyproject.toml, got 'http://somebody.github.io"),
        ("sparsering/__init__.py", "0.3.0", "0.3.1", "in sparsering/__init__.py, got 0.3.1"),
        ("CITATION.cff", "0.3.0", "0.2.9", "in CITATION.cff, got 0.2.9"),
        ("CITATION.cff", str(TODAY), "2026-01-02", "CITATION.cff, as in CHANGELOG.md, got 2026-"),
        ("packaging/conda/recipe.yaml", "0.3.0", "0.2.0", "recipe.yaml, got 0.2.0"),
        ("docs/upgrading.md", "0.2.0", "0.1.0", "`# Upgrading from 0.2.0` as the title"),
        ("CHANGELOG.md", HEAD, f"- New.\n\n{HEAD}", "under [Unreleased] in CHANGELOG.md, got 1 "),
        ("CHANGELOG.md", HEAD, "", "under [Unreleased] in CHANGELOG.md, got 1"),
        ("CHANGELOG.md", HEAD, HEAD.replace("0.3", "0.4"), "to be [0.3.0], got [0.4.0]"),
        ("CHANGELOG.md", HEAD, "## [0.3.0]", f"such as {TODAY}, got None; write `{HEAD}`"),
        ("CHANGELOG.md", HEAD, "## [0.3.0] - soon", f"such as {TODAY}, got 'soon'"),
        ("CHANGELOG.md", HEAD, "## [0.3.0] - 2026-02-03", f"{TODAY}, got 2026-02-03"),
        ("CHANGELOG.md", HEAD, "## [0.3.0] - 9999-01-01", f"{TODAY}, got 9999-01-01"),
        ("CHANGELOG.md", "[0.2.0]", "[0.3.0]", "one section [0.3.0] in CHANGELOG.md, got two"),
        ("CHANGELOG.md", "[0.2.0]", "[0.10.0]", "0.3.0 of .* to come after .* 0.10.0 of"),
        ("CHANGELOG.md", "2026-01-02", "9999-01-01", "come after .* got 0.2.0 of 9999-01-01"),
        (
            "CHANGELOG.md",
            "- `attention` takes a dictionary\n",
            "- `attention` takes a dictionary of patterns.\n" * 2,
            r"each line of \[0.3.0\] once in CHANGELOG.md, got two of '- `attention` takes",
        ),
        (
            "CHANGELOG.md",
            CHANGES.split(HEAD)[1].split("## [0.2")[0],
            "\n\n",
            "entries in CHANGELOG.md under [0.3.0], got none",
        ),
    ],
)
def test_what_is_not_ready_is_refused(files, name, old, new, says):
    change(files, name, old, new)
    pattern = says if ".*" in says or "\\" in says else re.escape(says)
    assert re.search(pattern, refusal(files))


def test_short_lines_may_come_twice(files):
    change(files, "CHANGELOG.md", "2. Trees.", "- Trees.\n- Trees.")
    release.check_changelog(files, "0.3.0", False)


@pytest.mark.parametrize("version", ["", "0.3", "0.3.0rc1", "next"])
def test_a_version_has_three_numbers(files, version):
    line = refusal(files, version=version)
    assert f"such as 0.3.0, got {version!r}; write it: make release VERSION=0.3.0" in line


def test_a_missing_file_and_a_tree_without_git_are_refused(files, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(files.parent))
    assert "a git repository, got " in refusal(files)
    (files / "CITATION.cff").unlink()
    assert "the file CITATION.cff, got none" in refusal(files)


def test_a_fix_needs_no_page_of_upgrades(files):
    for name in FILES:
        path = files / name
        path.write_text(path.read_text().replace("0.3.0", "0.3.1"))
    change(files, "docs/upgrading.md", "0.2.0", "0.1.0")
    release.check_versions(files, "0.3.1")


def test_what_is_not_committed_is_refused(tree):
    (tree / "notes.txt").write_text("")
    line = refusal(tree)
    assert "to be committed, got 1 changed files, first notes.txt; commit or stash" in line


def test_a_tag_is_free_before_a_release_and_at_its_commit_in_one(tree):
    assert "tag v0.3.0 at this commit" in refusal(tree, "--tagged")
    git(tree, "tag", "--annotate", "v0.3.0", "--message", "0.3.0")
    assert "no tag v0.3.0 exists, got one at " in refusal(tree)
    notes = tree / "runs" / "notes.md"
    assert release.main(tree, ["v0.3.0", "--tagged", "--notes", str(notes)]) == 0
    assert notes.read_text().startswith("In short")
    change(tree, "docs/upgrading.md", "Nothing", "All")
    assert "tag v0.3.0 at this commit" in refusal(tree, "--tagged")


def test_a_tag_may_be_built_on_a_later_day(tree):
    for name in ("CHANGELOG.md", "CITATION.cff"):
        change(tree, name, str(TODAY), "2026-02-03")
    assert "today's date" in refusal(tree)
    git(tree, "tag", "v0.3.0")
    assert release.main(tree, ["0.3.0", "--tagged"]) == 0


def test_files_of_other_versions_are_refused(tree):
    dist = tree / "dist"
    assert "got no files; build them: make wheels" in refusal(tree, "--files", str(dist))
    dist.mkdir()
    for version in ("0.3.0", "0.2.0"):
        (dist / f"sparsering-{version}.tar.gz").write_text("")
        (dist / f"sparsering-{version}-py3-none-any.whl").write_text("")
    assert "sparsering-0.2.0.tar.gz" in refusal(tree, "--files", str(dist))


def test_notes_that_a_page_of_releases_cannot_hold_are_the_summary(tree):
    added = "".join(f"- Entry {i} of a long list.\n" for i in range(6000))
    change(tree, "CHANGELOG.md", "- `attention` takes", f"{added}- `attention` takes")
    text = release.notes(tree, "0.3.0")
    assert text.startswith("In short") and "Entry" not in text
    assert text.endswith("All changes are in `CHANGELOG.md` of v0.3.0.\n")
    summary = CHANGES.split(HEAD)[1].split("### Added")[0]
    change(tree, "CHANGELOG.md", summary, "\n")
    path = str(tree / "runs" / "notes.md")
    git(tree, "tag", "v0.3.0")
    assert "write a summary before" in refusal(tree, "--tagged", "--notes", path)


def test_notes_of_this_changelog_are_whole():
    text = release.notes(ROOT, "0.2.0")
    section = release.sections((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))["0.2.0"][1]
    words = [re.sub(r"\[([^]]+)\]\((?!\w+:)([^)]+)\)", r"\1 (`\2`)", x) for x in (section, text)]
    assert words[0].split() == words[1].split()
    assert not re.search(r"\n {2}(?!- )\S", text) and text.count("\n- ") == section.count("\n- ")
