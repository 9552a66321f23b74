"""Checks `benchmarks.compare`: equal builds raise no alarm, planted slow-downs of 15% are found.

    python tools/check_compare.py --out benchmarks/records

Writes `compare.json`: the largest ratio of each run of equal builds, and the cases that each
planted slow-down makes slower by the verdict.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import compare, unpacked
from benchmarks.measure import write_record

SLOW = """

def _slowed(function):
    from time import perf_counter

    def slow(*arguments, **options):
        begin = perf_counter()
        result = function(*arguments, **options)
        end = begin + 1.15 * (perf_counter() - begin)
        while perf_counter() < end:
            pass
        return result

    return slow


"""
PLANTED = {
    "every call": "attention = _slowed(attention)\n",
    "every layout": "Pattern.layout = _slowed(Pattern.layout)\n",
}


def main() -> int:
    """Runs the comparisons; returns 1 if a verdict is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--equal", type=int, default=10, help="runs of equal builds; default 10")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder = Path("runs/compare").resolve()
    base = unpacked("HEAD", folder)
    rows: list[dict[str, Any]] = []
    wrong = 0
    for name, line in PLANTED.items():
        planted = folder / f"slow {name}"
        shutil.rmtree(planted, ignore_errors=True)
        shutil.copytree(base, planted)
        with open(planted / "sparsering" / "__init__.py", "a") as file:
            file.write(SLOW + line)
        found = [row["case"] for row in compare(base, planted) if row["slower"]]
        wrong += not found
        rows.append({"run": f"{name} takes 15% longer", "slower": len(found), "cases": found})
    for number in range(given.equal):
        other = compare(base, base)
        worst = max(other, key=lambda row: row["ratio"] - row["noise"])
        slower = [row["case"] for row in other if row["slower"]]
        wrong += bool(slower)
        rows.append(
            {"run": f"equal builds {number + 1}", "slower": len(slower), "cases": slower}
            | {"worst": worst["case"], "ratio": worst["ratio"], "noise": worst["noise"]}
        )
    write_record(given.out, "compare", rows)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
