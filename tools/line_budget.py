"""Print the lines of each module under sparsering/ and fail where one is over its budget.

Run as `python tools/line_budget.py`, or through `make lint`. Modules are Python and C++ files, and
every physical line counts, because every line is read. Too many modules, or a median that creeps
up, is a warning: the shape of the whole is a judgement, the length of one file is not.
"""

import statistics
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "sparsering"
MAX_LINES = 450
MAX_MEDIAN = 200
MAX_MODULES = 30


def main() -> int:
    """Print the report; return 1 where a module is over MAX_LINES, else 0."""
    paths = sorted(path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".cpp", ".h"})
    num_lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    for path, lines in sorted(num_lines.items(), key=lambda item: -item[1]):
        verdict = f"  over the budget of {MAX_LINES}" if lines > MAX_LINES else ""
        print(f"{lines:5d}  {path.relative_to(PACKAGE.parent)}{verdict}")
    median = statistics.median(num_lines.values())
    print(f"{len(paths)} modules, {sum(num_lines.values())} lines, median {median:g}")
    if len(paths) > MAX_MODULES:
        print(f"warning: more than {MAX_MODULES} modules")
    if median > MAX_MEDIAN:
        print(f"warning: the median is over {MAX_MEDIAN} lines")
    return int(max(num_lines.values()) > MAX_LINES)


if __name__ == "__main__":
    sys.exit(main())
