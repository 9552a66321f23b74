"""Measures the tables of the prior library's documents again, with densities and errors.

`python -m benchmarks report` runs them and draws the page (`benchmarks.report.page`).
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsering.ground.files import replace_file
from sparsering.ground.progress import progress

from ..measure import Budget, Row, environment
from .comparison import comparison, gallery, roofline, sparsity
from .lengths import lengths, longest
from .overhead import chosen, launches, layouts
from .rings import rings

Measure = Callable[[bool, Budget], list[Row]]

TABLES: dict[str, tuple[Measure, float]] = {
    "comparison": (comparison, 0.16),
    "sparsity": (sparsity, 0.04),
    "gallery": (gallery, 0.04),
    "launches": (launches, 0.05),
    "layouts": (layouts, 0.06),
    "chosen": (chosen, 0.07),
    "roofline": (roofline, 0.05),
    "rings": (rings, 0.12),
    "longest": (longest, 0.11),
    "lengths": (lengths, 0.30),
}
"""The function that measures each table, and the table's share of the time."""


def measure_tables(
    out: Path,
    *,
    quick: bool = False,
    seconds: float = 480.0,
    say: Callable[[str], object] | None = None,
) -> dict[str, dict[str, Any]]:
    """Measures every table and writes `out/NAME.json` for each as it is done.

    A table that is in `out` from a run that was stopped is not measured again. It may be of any
    commit: its record names the commit.

    Args:
        quick: tiny sizes, to try everything out; the figures mean nothing.
        seconds: time for all tables; calls that do not fit are left out, and their rows say so.
        say: called with a line for each table; default prints it.

    Returns: the records by name: environment, seconds, rows. A table with a wrong or failed call
        has "failed" in place of rows; the other tables still run.
    """
    records: dict[str, dict[str, Any]] = {}
    with progress("report", len(TABLES), "table") as work:
        tell = say or work.say
        for name, (measure, share) in TABLES.items():
            path = out / f"{name}.json"
            if (earlier := _on_record(path, quick)) is not None:
                records[name] = earlier
                tell(f"{name}: on record")
            else:
                records[name] = _measured(name, measure, 30 if quick else seconds * share, quick)
                replace_file(path, json.dumps(records[name], indent=1).encode())
                told = records[name].get("failed", "measured")
                tell(f"{name}: {told}, {records[name]['seconds']:.0f} s")
            work.advance(note=name)
    return records


def _measured(name: str, measure: Measure, seconds: float, quick: bool) -> dict[str, Any]:
    """Returns the record of one table; its error, in place of rows, if it failed."""
    begin = time.perf_counter()
    record: dict[str, Any] = {"name": name, "quick": quick, "environment": environment()}
    try:
        record["rows"] = measure(quick, Budget(seconds))
    except Exception as error:  # recorded, because the other tables must still run
        record["failed"] = f"{type(error).__name__}: {error}"
    record["seconds"] = time.perf_counter() - begin
    return record


def failed(out: Path) -> list[str]:
    """Names the tables that a run could not measure."""
    return [name for name in TABLES if "rows" not in (_record(out / f"{name}.json") or {})]


def _on_record(path: Path, quick: bool) -> dict[str, Any] | None:
    """Reads a table's record of an earlier run; None if it is missing or incomplete."""
    record = _record(path) or {}
    return record if record.get("quick") == quick and "rows" in record else None


def _record(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record
