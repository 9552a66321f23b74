"""Writes the tables of docs/trees.md from the record of the comparison "trees".

python -m benchmarks bench --only trees --out benchmarks/records
.venv/bin/python tools/tabulate_trees.py
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "trees.json"
PAGE = ROOT / "docs" / "trees.md"
MASKS = ("create_block_mask", "create_block_mask, compiled")

Row = dict[str, Any]


def steps(rows: list[Row]) -> list[str]:
    """Returns the lines of the table of forward passes and training steps."""
    lines = table(
        "pass", "way", "seconds (least, most)", "extra memory, MB", "error", "of gradients"
    )
    for row in rows:
        if row["case"] not in ("forward", "step"):
            continue
        seconds = (f"{row[x] / 1e3:.2f}" for x in ("ms", "least_ms", "most_ms"))
        peak = f"{row['peak_bytes'] / 1e6:,.0f}" if "peak_bytes" in row else ""
        of_gradients = f"{row['gradient_error']:.0e}" if "gradient_error" in row else ""
        case = {"forward": "forward", "step": "forward and backward"}[row["case"]]
        lines.append(
            line(case, row["way"], "{} ({}, {})".format(*seconds), peak, f"{row['error']:.0e}",
                 of_gradients)
        )  # fmt: skip
    return lines


def layouts(rows: list[Row]) -> list[str]:
    """Returns the lines of the table of layouts, and of FlexAttention's masks beside them."""
    found = {(row["case"], row["tree"], row["along"], row["tokens"]): row
             for row in rows if "tree" in row}  # fmt: skip
    long = max(row["tokens"] for row in rows if row["case"] == "layout")
    short = min(row["tokens"] for row in rows if row["case"] == "layout")
    lines = table(
        "tree", "along its paths", f"{long:,} tokens, ms", "tiles", f"{short:,} tokens, ms", *MASKS
    )
    for row in rows:
        if (row["case"], row.get("tokens")) != ("layout", long):
            continue
        place = row["tree"], row["along"]
        masks = [found.get((name, *place, short)) for name in MASKS]
        lines.append(
            line(
                *place, milliseconds(row), f"{row['tiles']:,}",
                milliseconds(found["layout", *place, short]), *map(milliseconds, masks),
            )
        )  # fmt: skip
    return lines


def milliseconds(row: Row | None) -> str:
    """Returns the time of a row; nothing where it was not measured."""
    if row is None:
        return ""
    return f"{row['ms']:.1f}" if row["ms"] < 10 else f"{row['ms']:,.0f}"


def table(*names: str) -> list[str]:
    """Returns the first lines of a table."""
    return [line(*names), "|" + "---|" * len(names)]


def line(*cells: str) -> str:
    """Returns a line of a table."""
    return "| " + " | ".join(cells) + " |"


def page(text: str, rows: list[Row]) -> str:
    """Returns the text of the page with its tables written anew."""
    for name, lines in (("steps", steps(rows)), ("layouts", layouts(rows))):
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
