"""The report's GPU section: the record of `python -m benchmarks.gpu` as tables."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..measure import Row
from .columns import NOT_MEASURED, Column, error, milliseconds, rows_html, share, short, size

Record = Mapping[str, Any]

_NAMES = ("setting", "backend", "pattern", "extra", "module", "call", "kernel", "case")
_REASONS = ("left_out", "failed", "refused", "cannot")
_HIDDEN = {*_NAMES, *_REASONS, "ms", "least_ms", "most_ms", "rounds", "tried", "us", "free_bytes"}
_OPEN = ("main shapes", "founding table", "longnet")

_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "density": ("density", share),
    "tflops": ("TFLOP/s", lambda x: short(x)),
    "gb_per_s": ("GB/s", lambda x: short(x)),
    "error": ("error", error),
    "error_over_dense": ("error over dense attention's", lambda x: short(x)),
    "extra_bytes": ("extra memory", size),
    "share_of_inputs_and_outputs": ("of inputs and outputs", share),
    "differs": ("differs by", error),
}
"""Headings and formats of known figures; other figures show under their own names."""


def gpu_html(gpu: Record | None) -> list[str]:
    """Lines of HTML with the whole GPU record, or a note that there is none."""
    lines = ['<h2 id="gpu">On a GPU</h2>']
    if gpu is None:
        text = (
            f"{NOT_MEASURED.capitalize()}: there is no record of a GPU. On one, <code>python -m "
            "benchmarks.gpu --out benchmarks/records</code> writes it, and this page then has its "
            "figures here and in the rows that it fits."
        )
        return [*lines, f"<p>{text}</p>"]
    place = gpu["environment"]
    if place["gpu"] is None:
        lines.append('<p class="why">A rehearsal without a GPU: its figures mean nothing.</p>')
    commit = (place.get("commit") or "unknown")[:10]
    software = [f"{name} {place[name]}" for name in ("torch", "triton", "cuda") if place.get(name)]
    summary = ", ".join([str(place["gpu"] or "no GPU"), f"commit {commit}", *software])
    lines.append(f"<p>{html.escape(summary)}.</p>")
    lines += _bars(gpu.get("bars", ()))
    for name, part in gpu["parts"].items():
        lines.append(_part(name, part))
    return lines


def _bars(bars: Sequence[Row]) -> list[str]:
    """Builds a table of the GPU's performance targets, with figures and verdicts."""
    if not bars:
        return []

    def number(bar: Row, key: str) -> str:
        if bar[key] is None:
            return NOT_MEASURED if key == "found" else ""
        return f"{bar[key]:.4g} {bar['unit']}".strip()

    def met(bar: Row) -> str:
        if bar["floor_met"] is None:
            return ""
        return "aim met" if bar["aim_met"] else "floor met" if bar["floor_met"] else "missed"

    columns = [
        Column("asked", lambda bar: bar["bar"]),
        Column("found", lambda bar: number(bar, "found")),
        Column("floor", lambda bar: "at most " * bar["at_most"] + number(bar, "floor")),
        Column("aim", lambda bar: number(bar, "aim")),
        Column("", met),
    ]
    return [rows_html(bars, columns)]


def _part(name: str, part: Record) -> str:
    """Builds the section of a part: missing cases, values common to all rows, and the rows."""
    said = [f"<p>{html.escape(part['about'])}</p>"] if part.get("about") else []
    missing = {case: how for case, how in part.get("cases", {}).items() if _why(how)}
    for case, how in missing.items():
        said.append(f"<p><strong>{html.escape(f'{case}: {_why(how)}')}</strong></p>")
    if "failed" in part:
        said.append(f"<p><strong>{html.escape('failed, ' + str(part['failed']))}</strong></p>")
    rows = [_with_reason(row) for row in part.get("rows", ())]
    if rows:
        measured = [row for row in rows if "left_out" not in row] or rows
        keys = list(dict.fromkeys(key for row in measured for key in row if key not in _HIDDEN))
        same = {
            key: measured[0][key] for key in keys
            if key not in _FIGURES and len(measured) > 1
            and all(key in row and row[key] == measured[0][key] for row in measured)
        }  # fmt: skip
        if same:
            shared = ", ".join(f"{_heading(key)} {_text(key, x)}" for key, x in same.items())
            said.append(f'<p class="note">All rows: {html.escape(shared)}.</p>')
        columns = _columns(name, measured, [key for key in keys if key not in same])
        said.append(rows_html(rows, columns))
    mark = " open" if name in _OPEN or missing else ""
    title = f"{name}: {len(missing)} of {len(part['cases'])} missing" if missing else name
    return f"<details{mark}><summary>{html.escape(title)}</summary>{''.join(said)}</details>"


def _why(state: Record) -> str:
    return next((f"{how}, {state[how]}" for how in ("failed", "left") if how in state), "")


def _with_reason(row: Row) -> Row:
    """Adds `left_out` to a row without figures: the reason, whatever its key was."""
    why = next((row[name] for name in _REASONS if row.get(name)), None)
    return row if why is None else {**row, "left_out": str(why)}


def _columns(name: str, rows: Sequence[Row], keys: Sequence[str]) -> list[Column]:
    """Columns of a part: the row's name, its time if any row has one, and each key."""
    differ = [key for key in _NAMES if len({row.get(key) for row in rows}) > 1]

    def called(row: Row) -> str:
        parts = (str(row[key]) for key in differ or _NAMES if row.get(key))
        return ", ".join(dict.fromkeys(parts)) or name

    columns = [Column("call", called)]
    if any("ms" in row for row in rows):
        columns.append(Column("ms, median (least - most)", milliseconds))
    return columns + [Column(_heading(key), _cell(key)) for key in keys]


def _heading(key: str) -> str:
    return _FIGURES[key][0] if key in _FIGURES else key.replace("_", " ")


def _cell(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else _text(key, row[key])


def _text(key: str, value: Any) -> str:
    if key in _FIGURES:
        return _FIGURES[key][1](value)
    if isinstance(value, float):
        return short(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
