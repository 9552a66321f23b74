"""Check that a version is ready to be released, and write its notes. It never pushes anything.

    make release VERSION=0.3.0                        # this, `make wheels docs`, this with --files
    python tools/release.py 0.3.0                     # read the tree: changelog, addresses, tag
    python tools/release.py 0.3.0 --files dist        # its files too; writes the notes
    python tools/release.py 0.3.0 --tagged --notes notes.md    # in release.yml, from the tag

The first error ends the run with one line that says what was expected, what came, and a way out.
The notes are the version's section of CHANGELOG.md: its lines are joined, since a page of releases
breaks them where the file does, and links to files are written out, since they lead nowhere there.
"""

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

from addresses import check_addresses

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = r"\d+\.\d+\.\d+"
# Where the version stands, and the pattern of its line.
VERSIONS = {
    "pyproject.toml": rf'^version = "({NUMBERS})"$',
    "sparsering/__init__.py": rf'^__version__ = "({NUMBERS})"$',
    "CITATION.cff": rf"^version: ({NUMBERS})$",
    "packaging/conda/recipe.yaml": rf'^  version: "({NUMBERS})"$',
}
CITED = r"^date-released: (\S+)$"
SECTION = re.compile(rf"^## \[(Unreleased|{NUMBERS})\](?: - (\S+))?$", re.MULTILINE)
UPGRADING = "docs/upgrading.md"
MOST_CHARACTERS = 125_000  # of a release's notes on GitHub
STEPS = """
Ready: {version} at {commit}. Nothing was pushed. What is left is yours:

  1. Once: the accounts (CONTRIBUTING.md, "A release": a trusted publisher on PyPI, an environment).
  2. git tag -a v{version} -m "sparsering {version}"
  3. git push origin v{version}     # release.yml builds, tries, attests, uploads; then the notes
  4. pip install sparsering=={version}     # in an empty environment, when the run has ended
  5. Upload runs/docs/html to the host of the pages (CONTRIBUTING.md, "The site").

The notes are in {notes}.
"""


def order(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, to sort by."""
    return tuple(int(number) for number in version.split("."))


def read(root: Path, name: str) -> str:
    """Returns the text of a file of the tree."""
    if not (root / name).is_file():
        raise ValueError(f"expected the file {name}, got none in {root}; run this in a checkout")
    return (root / name).read_text(encoding="utf-8")


def git(root: Path, *command: str) -> str:
    """Returns what git prints."""
    done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"expected a git repository, got {said!r} of `git {' '.join(command)}`; release from "
            "a clone"
        )
    return done.stdout.strip()


def versions(root: Path) -> dict[str, str]:
    """Returns the version that each file of `VERSIONS` names."""
    found = {}
    for name, line in VERSIONS.items():
        lines = re.findall(line, read(root, name), re.MULTILINE)
        if len(lines) != 1:
            raise ValueError(
                f"expected one line with the version in {name}, got {len(lines)}; write one that "
                f"matches {line}"
            )
        found[name] = lines[0]
    return found


def sections(changelog: str) -> dict[str, tuple[str | None, str]]:
    """Returns the date and the text of each section, newest first; `Unreleased` is one of them."""
    heads = list(SECTION.finditer(changelog))
    ends = [head.start() for head in heads[1:]] + [len(changelog)]
    found: dict[str, tuple[str | None, str]] = {}
    for head, end in zip(heads, ends, strict=True):
        if head[1] in found:
            raise ValueError(
                f"expected one section [{head[1]}] in CHANGELOG.md, got two; join them"
            )
        found[head[1]] = (head[2], changelog[head.end() : end].strip())
    return found


def check_changelog(root: Path, version: str, tagged: bool) -> None:
    """Checks that the version's section is cut: first, dated, whole, and nothing is left above."""
    found = sections(read(root, "CHANGELOG.md"))
    left = found.pop("Unreleased", (None, ""))[1]
    if left:
        raise ValueError(
            f"expected nothing under [Unreleased] in CHANGELOG.md, got {len(left.splitlines())} "
            f"lines; cut them: write `## [{version}] - <date>` above them"
        )
    newest = next(iter(found), None)
    if newest != version:
        raise ValueError(
            f"expected the newest section of CHANGELOG.md to be [{version}], got [{newest}]; write "
            f"`## [{version}] - <date>` below [Unreleased]"
        )
    told, text = found.pop(version)
    check_date(root, version, told, found, tagged)
    if not re.search(r"^(- |\d+\. )", text, re.MULTILINE):
        raise ValueError(
            f"expected entries in CHANGELOG.md under [{version}], got none; say what has changed"
        )
    entries = [line for line in text.splitlines() if len(line) > 40]
    twice = next((line for line in entries if entries.count(line) > 1), None)
    if twice:
        raise ValueError(
            f"expected each line of [{version}] once in CHANGELOG.md, got two of {twice[:60]!r}; "
            "delete one"
        )


def check_date(
    root: Path,
    version: str,
    told: str | None,
    older: dict[str, tuple[str | None, str]],
    tagged: bool,
) -> None:
    """Checks that a version's date is a day, today's unless tagged, and after those before it."""
    today = datetime.datetime.now(datetime.UTC).date()
    try:
        day = datetime.date.fromisoformat(told or "")
    except ValueError:
        raise ValueError(
            f"expected a date in CHANGELOG.md after [{version}], such as {today}, got {told!r}; "
            f"write `## [{version}] - {today}`"
        ) from None
    days = {today, datetime.date.today()}  # UTC's and this machine's
    if day > max(days) or (not tagged and day not in days):
        raise ValueError(
            f"expected today's date in CHANGELOG.md after [{version}], {today}, got {day}; write "
            f"{today} there and in CITATION.cff"
        )
    for other, (other_day, _) in older.items():
        if order(other) >= order(version) or str(other_day) > str(day):
            raise ValueError(
                f"expected {version} of {day} to come after all versions in CHANGELOG.md, got "
                f"{other} of {other_day}; choose a higher version, or correct the date"
            )
    (cited,) = re.findall(CITED, read(root, "CITATION.cff"), re.MULTILINE) or ("none",)
    if cited != str(day):
        raise ValueError(
            f"expected date-released {day} in CITATION.cff, as in CHANGELOG.md, got {cited}; write "
            f"`date-released: {day}`"
        )


def check_versions(root: Path, version: str) -> None:
    """Checks that all files name the version, and the page of upgrades the one before it."""
    for name, found in versions(root).items():
        if found != version:
            raise ValueError(
                f"expected version {version} in {name}, got {found}; write it in {name}, or "
                f"release {found}"
            )
    before = [name for name in sections(read(root, "CHANGELOG.md")) if name != "Unreleased"][1:]
    title = read(root, UPGRADING).partition("\n")[0]
    # A fix of a version needs no page: nobody has to change their code.
    if before and version.endswith(".0") and title != f"# Upgrading from {before[0]}":
        raise ValueError(
            f"expected `# Upgrading from {before[0]}` as the title of {UPGRADING}, got {title!r}; "
            f"write what code of {before[0]} has to change"
        )


def check_git(root: Path, version: str, tagged: bool) -> str:
    """Checks that all is committed, and that the tag is free, or here; returns the commit."""
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        raise ValueError(
            f"expected all changes to be committed, got {len(changed)} changed files, first "
            f"{changed[0].split()[-1]}; commit or stash them"
        )
    commit = git(root, "rev-parse", "HEAD")
    tag = f"v{version}"
    there = git(root, "tag", "--list", tag)
    if there and not tagged:
        raise ValueError(
            f"expected that no tag {tag} exists, got one at {git(root, 'rev-list', '-n1', tag)[:9]}"
            f"; a released version stays as it is: choose the next, or, if it was never pushed, "
            f"`git tag -d {tag}`"
        )
    if tagged and (not there or git(root, "rev-list", "-n1", tag) != commit):
        at = git(root, "rev-list", "-n1", tag)[:9] if there else "nothing"
        raise ValueError(
            f"expected the tag {tag} at this commit, {commit[:9]}, got it at {at}; check out {tag}"
        )
    return commit


def check_files(folder: Path, version: str) -> None:
    """Checks that a folder has the sdist and the wheels of the version, and nothing else."""
    wanted = f"sparsering-{version}.tar.gz", f"sparsering-{version}-py3-none-any.whl"
    held = sorted(path.name for path in folder.glob("*"))
    lacks = [name for name in wanted if name not in held]
    foreign = [x for x in held if not re.fullmatch(rf"sparsering-{version}(-.+\.whl|\.tar\.gz)", x)]
    if lacks or foreign:
        raise ValueError(
            f"expected {' and '.join(wanted)} in {folder}, and wheels for platforms, got "
            f"{held or 'no files'}; build them: make wheels"
        )


def check(root: Path, version: str, tagged: bool = False) -> str:
    """Checks all of a tree that a release of the version needs; returns the commit."""
    if not re.fullmatch(NUMBERS, version):
        raise ValueError(
            f"expected a version such as 0.3.0, got {version!r}; write it: "
            "make release VERSION=0.3.0"
        )
    check_changelog(root, version, tagged)
    check_versions(root, version)
    check_addresses(root)
    return check_git(root, version, tagged)


def notes(root: Path, version: str) -> str:
    """Returns the notes of a version; where they are too long, those before the first heading."""
    text = sections(read(root, "CHANGELOG.md"))[version][1]
    text = re.sub(r"\[([^]]+)\]\((?!\w+:)([^)]+)\)", r"\1 (`\2`)", text)
    text = re.sub(r"(?<=\S)\n(?: *)(?=\S)(?!- |\d+\. |#|```|\|)", " ", text) + "\n"
    if len(text) > MOST_CHARACTERS:
        text = re.split(r"^### ", text, maxsplit=1, flags=re.MULTILINE)[0].strip()
        text += f"\n\nAll changes are in `CHANGELOG.md` of v{version}.\n"
    if not 1 < len(text) <= MOST_CHARACTERS or text.startswith("\n\nAll changes"):
        raise ValueError(
            f"expected notes of at most {MOST_CHARACTERS:,} characters, got {len(text):,}; write a "
            f"summary before the first ### of [{version}] in CHANGELOG.md"
        )
    return text


def main(root: Path = ROOT, arguments: list[str] | None = None) -> int:
    """Check the tree; with the files of a release or a place for notes, write these too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="such as 0.3.0; v0.3.0 is the same")
    parser.add_argument("--files", type=Path, help="folder of the sdist and the wheels")
    parser.add_argument("--notes", type=Path, help="default: runs/release-0.3.0.md")
    parser.add_argument("--tagged", action="store_true", help="the tag exists: it must be here")
    given = parser.parse_args(arguments)
    version = given.version.removeprefix("v")
    try:
        commit = check(root, version, given.tagged)
        print(f"release: {version} is the newest version in all files; all is committed")
        if given.files:
            check_files(given.files, version)
        if given.files or given.notes:
            path = given.notes or root / "runs" / f"release-{version}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(notes(root, version), encoding="utf-8")
            if not given.tagged:
                print(STEPS.format(version=version, commit=commit[:9], notes=path))
    except ValueError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
