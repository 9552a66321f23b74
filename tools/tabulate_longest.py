"""Writes the tables of docs/longest.md: the longest sequence of each pattern on each GPU.

    .venv/bin/python tools/tabulate_longest.py

Nothing is measured. `sr.longest_sequence` and `sr.estimate` predict every number, in some seconds.
They are kept in benchmarks/records/longest-sequences.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import sparsering as sr

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "longest-sequences.json"
PAGE = ROOT / "docs" / "longest.md"

# The kernels of "triton" need compute capability 8.0: no GTX 1080, T4 or V100 is here.
GPUS = (
    *("GB200", "B200", "H200", "H100 SXM", "H100 PCIe", "A100 80GB", "A100 40GB", "L40S"),
    *("RTX A6000", "RTX 5090", "RTX 4090", "RTX 3090", "A10", "L4"),
)
PATTERNS: dict[str, sr.Pattern] = {
    "causal": sr.Causal(),
    "window": sr.SlidingWindow(4095),
    "LongNet": sr.LongNet((2048, 32768), (1, 16)) & sr.Causal(),
    "random blocks": sr.RandomBlocks(0.01, 128) & sr.Causal(),
}
LAYER: dict[str, Any] = {
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16,
}  # fmt: skip
SHOWN = "H200"  # the GPU of the table of memory by part

Row = dict[str, Any]


def predicted(gpus: tuple[str, ...] = GPUS) -> list[Row]:
    """Returns a row for each pattern, pass and GPU."""
    return [
        row(name, backward, gpu) for name in PATTERNS for backward in (False, True) for gpu in gpus
    ]


def row(name: str, backward: bool, gpu: str) -> Row:
    """Returns the longest sequence, a bound of the call's time, and its bytes by part."""
    given = {**LAYER, "backward": backward, "machine": gpu}
    tokens = sr.longest_sequence(PATTERNS[name], **given)
    cost = sr.estimate(PATTERNS[name], tokens=tokens, **given)
    return {
        "known": "planned", "gpu": gpu, "pattern": PATTERNS[name].normal_text, "name": name,
        "backward": backward, "backend": cost.backend, "tokens": tokens,
        "at_least_seconds": float(f"{cost.seconds.value:.6g}"), "bytes": cost.memory._asdict(),
    }  # fmt: skip


def longest(rows: list[Row], backward: bool) -> list[str]:
    """Returns the lines of the table of lengths."""
    found = {(row["gpu"], row["name"]): row for row in rows if row["backward"] == backward}
    lines = table("GPU", *PATTERNS)
    for gpu in GPUS:
        cells = (found[gpu, name] for name in PATTERNS)
        lines.append(
            line(gpu, *(f"{x['tokens']:,} ({shown(x['at_least_seconds'])} s)" for x in cells))
        )
    return lines


def parts(rows: list[Row]) -> list[str]:
    """Returns the lines of the table of memory by part, with backward."""
    some = [row for row in rows if row["backward"] and row["gpu"] == SHOWN]
    names = list(some[0]["bytes"])
    lines = table("pattern", *names)
    for row in some:
        whole = sum(row["bytes"].values())
        lines.append(line(row["name"], *(f"{row['bytes'][x] / whole:.1%}" for x in names)))
    return lines


def shown(seconds: float) -> str:
    """Returns seconds with two digits, or all those before the point."""
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


def table(*names: str) -> list[str]:
    """Returns the first lines of a table."""
    return [line(*names), "|" + "---|" * len(names)]


def line(*cells: str) -> str:
    """Returns a line of a table."""
    return "| " + " | ".join(cells) + " |"


def page(text: str, rows: list[Row]) -> str:
    """Returns the text of the page with its tables written anew."""
    tables = {"forward": longest(rows, False), "step": longest(rows, True), "parts": parts(rows)}
    for name, lines in tables.items():
        mark = f"<!-- {name} -->\n"
        before, _, rest = text.partition(mark)
        text = "".join([before, mark, "\n".join(lines), "\n", mark, rest.partition(mark)[2]])
    return text


def main() -> int:
    """Predicts, and writes the record and the tables."""
    rows = predicted()
    text = json.dumps({"name": RECORD.stem, "rows": rows}, indent=1) + "\n"
    RECORD.write_text(text, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
