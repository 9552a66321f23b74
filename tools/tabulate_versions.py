"""Writes the tables of versions in docs/install.md, from records of runs of the tests.

    make test TORCH=2.14.1
    .venv/bin/python tools/tabulate_versions.py runs/tests-2.14.1.json

A file is the record of a run. In benchmarks/records/versions.json it takes the place of the run
that was made beside the same torch and transformers. Without files, the tables are written from
the runs that are there. A run is refused if its files were not those of a commit.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "versions.json"
PAGE = ROOT / "docs" / "install.md"
KEPT = ("date", "commit", "versions", "outcomes", "failed", "seconds", "tests")


def order(version: str) -> list[int]:
    """Returns the numbers of a version, to sort by: 2.9.1 is before 2.11.0."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def sorted_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorts runs by torch, then by transformers."""
    return sorted(
        runs, key=lambda run: [order(run["versions"][x]) for x in ("torch", "transformers")]
    )


def joined(runs: list[dict[str, Any]], fresh: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the runs of both; the fresh one of two with the same versions and tests."""
    versions = {
        (run["versions"]["torch"], run["versions"]["transformers"], *run["tests"]): run
        for run in [*runs, *({name: run[name] for name in KEPT} for run in fresh)]
    }
    return sorted_runs(list(versions.values()))


def row(run: dict[str, Any], packages: tuple[str, ...]) -> str:
    """Returns a line of a table."""
    counts = [run["outcomes"].get(name, 0) for name in ("passed", "failed", "skipped")]
    counts[1] += run["outcomes"].get("error", 0)
    cells = [run["versions"].get(name, "none") for name in packages]
    cells += [f"{count:,}" for count in counts]
    return "| " + " | ".join([*cells, run["date"][:10], f"`{run['commit']}`"]) + " |"


def table(runs: list[dict[str, Any]], packages: tuple[str, ...]) -> list[str]:
    """Returns the lines of a table of runs, with a column for each package."""
    head = [*packages, "passed", "failed", "skipped", "date", "commit"]
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *(row(run, packages) for run in runs),
    ]


def page(text: str, runs: list[dict[str, Any]]) -> str:
    """Returns the text of the page with its tables written anew."""
    whole = [run for run in runs if not run["tests"]]
    parts = [run for run in runs if run["tests"]]
    tables = {
        "torch": table(whole, ("torch", "triton", "python")),
        "transformers": table(parts, ("transformers", "torch", "python")),
    }
    for name, lines in tables.items():
        mark = f"<!-- {name} -->\n"
        before, _, rest = text.partition(mark)
        text = "".join([before, mark, "\n".join(lines), "\n", mark, rest.partition(mark)[2]])
    return text


def main(paths: list[str]) -> int:
    """Takes over the records of `paths`, and writes the tables; returns 1 if one is refused."""
    fresh = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    for path, run in zip(paths, fresh, strict=True):
        if not run["commit"] or run["commit"].endswith("+"):
            print(f"{path}: its files were not those of a commit; commit, and run it again")
            return 1
    old = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    runs = joined(old, fresh)
    RECORD.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
