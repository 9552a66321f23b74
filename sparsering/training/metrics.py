"""Reads the records of a run's `metrics.jsonl`, and cuts those after its checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ground.files import check_file, replace_file

MOST_METRICS_BYTES = 256 << 20


def cut_metrics(out: Path, step: int | None) -> list[dict[str, Any]]:
    """Removes records after `step` from `metrics.jsonl`, since the run repeats those steps.

    Returns: the records that stay.
    """
    path = out / "metrics.jsonl"
    records: list[dict[str, Any]] = []
    try:
        if step is not None:
            check_file(path, MOST_METRICS_BYTES)
            lines = path.read_bytes().splitlines()
            records = [r for r in _records(lines) if r["step"] <= step]
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise ValueError(
            f"expected the metrics of a run in {path}, got an unusable file: {error}; remove "
            "it to go on without these metrics"
        ) from None
    replace_file(path, "".join(json.dumps(record) + "\n" for record in records).encode())
    return records


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Reads the records of a run's `metrics.jsonl`; ValueError if there are none to use."""
    path = run / "metrics.jsonl"
    try:
        check_file(path, MOST_METRICS_BYTES)
        if records := list(_records(path.read_bytes().splitlines())):
            return records
        found = "a file without records"
    except FileNotFoundError:
        found = "no such file"
    except ValueError as error:
        found = f"an unusable file: {error}"
    raise ValueError(f"expected the metrics of a run in {path}, got {found}; pass train's --out")


def _records(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Parses lines of `metrics.jsonl`; skips an incomplete line, ValueError for a foreign one."""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a killed run may leave its last line incomplete
            continue
        if (
            not isinstance(record, dict)
            or type(record.get("step")) is not int
            or any(type(x) not in (int, float) or abs(x) > 1e300 for x in record.values())
        ):
            raise ValueError(f"line {number} is not a JSON object of numbers with a step")
        yield record
