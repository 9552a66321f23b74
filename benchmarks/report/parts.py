"""The report's section on single parts: the record of `python -m benchmarks ablation`."""

import html
from collections.abc import Mapping
from typing import Any

from ..measure import Row
from .columns import NOT_MEASURED, error, short

_PROMISE = (
    "Each part switched off and on, in turns, on one call. The prior documents promise memory -40 "
    "to -60%, speed +30 to +50% and communication -50 to -70% from parts like these."
)
_HEADINGS = ("part", "off", "on", "on / off", "peak, MB", "received, MB", "error")


def parts_html(record: Mapping[str, Any] | None) -> list[str]:
    """Lines of HTML with a row for each part, or a note that there is no record."""
    lines = ['<h2 id="parts">What each part brings</h2>', f"<p>{_PROMISE}</p>"]
    if record is None:
        text = f"{NOT_MEASURED.capitalize()}: <code>python -m benchmarks ablation</code> does."
        return [*lines, f"<p>{text}</p>"]
    head = "".join(f"<th>{name}</th>" for name in _HEADINGS)
    rows = "".join(_row(row) for row in record["rows"])
    place = record["environment"]
    source = f"Measured {place['date'][:10]} at {str(place['commit'])[:10]}; {place['processor']}."
    return [
        *lines,
        f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>',
        f'<p class="source">{html.escape(source)}</p>',
    ]


def _row(row: Row) -> str:
    cells = [
        row["part"],
        f"{short(row['ms_off'])} ms",
        f"{short(row['ms_on'])} ms",
        f"{row['on_over_off']:.2f}",
        _both(row, "peak_mb", short),
        _both(row, "received_mb", short),
        _both(row, "error", error),
    ]
    named = zip(_HEADINGS, cells, strict=True)
    return (
        "<tr>"
        + "".join(
            f'<td data-name="{name}" class="{"short" if text else "none"}">{html.escape(text)}</td>'
            for name, text in named
        )
        + "</tr>"
    )


def _both(row: Row, name: str, text: Any) -> str:
    if f"{name}_off" not in row:
        return ""
    return f"{text(row[f'{name}_off'])} to {text(row[f'{name}_on'])}"
