"""Print the modules and lines of each folder of sources; fail where one is over its budget.

Run as `python tools/line_budget.py`, or through `make lint`. Modules are Python and C++ files, and
every physical line counts, because every line is read. A file longer than 450 lines hides a second
subject; a folder of more than 17 modules, a second room. The sources
are `sparsering/` and `benchmarks/`.
"""

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("sparsering", "benchmarks")
MAX_LINES = 450
MAX_MODULES = 17


def main() -> int:
    """Print the report; return 1 where a file or a folder is over its budget, else 0."""
    folders: dict[Path, dict[Path, int]] = defaultdict(dict)
    for path in (x for name in SOURCES for x in sorted((ROOT / name).rglob("*"))):
        if path.suffix in {".py", ".cpp", ".h"}:
            lines = path.read_text(encoding="utf-8").splitlines()
            folders[path.parent.relative_to(ROOT)][path] = len(lines)
    faults = []
    for folder, files in folders.items():
        print(f"{len(files):3d} modules  {sum(files.values()):5d} lines  {folder}")
        if len(files) > MAX_MODULES:
            faults.append(f"{folder} has {len(files)} modules, over the budget of {MAX_MODULES}")
        faults += [
            f"{path.relative_to(ROOT)} has {lines} lines, over the budget of {MAX_LINES}"
            for path, lines in files.items()
            if lines > MAX_LINES
        ]
    print(*faults, sep="\n", end="")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
