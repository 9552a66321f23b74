"""Writes the tables of docs/masks.md from the record "masks".

python -m benchmarks.masks --out benchmarks/records
.venv/bin/python tools/tabulate_masks.py
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "masks.json"
PAGE = ROOT / "docs" / "masks.md"
OURS = "sparsering"

Row = dict[str, Any]


def times(rows: list[Row]) -> list[str]:
    """Returns the lines of the table of what ran, ours first for each mask."""
    lines = table(
        "mask", "pairs", "library", "plan, again", "forward", "backward", "of ours", "peak", "error"
    )
    for row in rows:
        if "refused" in row:
            continue
        first = row["library"] == OURS
        plan = ""
        if row["plan_ms"] is not None:
            plan = f"{duration(row['plan_ms'])}, {duration(row['warm_plan_ms'])}"
        back = duration(row["backward"]["ms"]) if "backward" in row else "refused"
        library = row["library"]
        if row["sampled"] > 1:
            library += f" (1 of {row['sampled']} chunks, scaled)"
        lines.append(
            line(
                row["mask"] if first else "", f"{row['density']:.2%}" if first else "",
                library, plan, duration(row["forward"]["ms"]), back,
                "" if first else ratios(row, rows), megabytes(row["bytes"]),
                f"{row['error']:.0e}, {row['error_backward']:.0e}"
                if "error_backward" in row else f"{row['error']:.0e}",
            )
        )  # fmt: skip
    return lines


def ratios(row: Row, rows: list[Row]) -> str:
    """Times of a row over ours on the same mask, forward and backward; bold below 1."""
    own = next(x for x in rows if (x["mask"], x["library"]) == (row["mask"], OURS))
    found = []
    for kind in ("forward", "backward"):
        if kind in row:
            ratio = row[kind]["ms"] / own[kind]["ms"]
            found.append(f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.3g}")
    return ", ".join(found)


def slower(rows: list[Row]) -> set[tuple[str, str, str]]:
    """Names the (mask, library, kind) in which another library's time is below ours."""
    found = set()
    for row in rows:
        own = next(x for x in rows if (x["mask"], x["library"]) == (row["mask"], OURS))
        for kind in ("forward", "backward"):
            if kind in row and row[kind]["ms"] < own[kind]["ms"]:
                found.add((row["mask"], row["library"], kind))
    return found


def refused(rows: list[Row]) -> list[str]:
    """Returns the lines of the table of reasons, one for each library and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    gigabytes = re.compile(r"[\d,]+ GB")
    needs = [x[0] for row in rows if (x := gigabytes.search(row.get("refused", "")))]
    needs.sort(key=lambda x: int(x.removesuffix(" GB").replace(",", "")))
    for row in rows:
        if "refused" in row:
            reason = row["refused"]
            if needs:
                reason = gigabytes.sub(f"{needs[0]} to {needs[-1]}", reason)
            reasons.setdefault((row["library"], reason), []).append(row["mask"])
        if "refused_backward" in row:
            reason = f"{row['refused_backward']}; forward runs"
            reasons.setdefault((row["library"], reason), []).append(row["mask"])
    all_masks = len({row["mask"] for row in rows})
    lines = table("library", "refused: why", "masks")
    for (library, reason), masks in sorted(reasons.items()):
        named = "all" if len(masks) == all_masks else "; ".join(masks)
        lines.append(line(library, reason, named))
    return lines


def duration(ms: float) -> str:
    """Writes milliseconds with two or three digits and their unit."""
    if ms >= 1000:
        return f"{ms / 1000:.3g} s" if ms < 1e5 else f"{ms / 1000:.0f} s"
    return f"{ms:.3g} ms" if ms >= 1 else f"{ms:.2f} ms"


def megabytes(count: int | None) -> str:
    """Writes bytes in MB; nothing where they were not measured."""
    return "" if count is None else f"{count / 1e6:,.0f} MB"


def table(*names: str) -> list[str]:
    """Returns the first lines of a table."""
    return [line(*names), "|" + "---|" * len(names)]


def line(*cells: str) -> str:
    """Returns a line of a table."""
    return "| " + " | ".join(cells) + " |"


def page(text: str, rows: list[Row]) -> str:
    """Returns the text of the page with its tables written anew."""
    for name, lines in (("times", times(rows)), ("refused", refused(rows))):
        mark = f"<!-- {name} -->\n"
        before, _, rest = text.partition(mark)
        text = "".join([before, mark, "\n".join(lines), "\n", mark, rest.partition(mark)[2]])
    return text


def main() -> int:
    """Writes the tables."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
