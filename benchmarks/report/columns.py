"""Columns of the report's tables: each formats a figure of a measured row as text."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..measure import Row
from .prior import TABLES, prior_figure

NOT_MEASURED = "not measured"


class Column(NamedTuple):
    """A heading, and a function that returns a row's text; "" for rows without the figure."""

    heading: str
    text: Callable[[Row], str]


def rows_html(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Builds an HTML table; on a narrow screen each row becomes a card with labelled figures."""
    heads = "".join(f"<th>{html.escape(column.heading)}</th>" for column in columns)
    body = []
    for row in rows:
        if "left_out" in row:
            first, *_ = columns
            body.append(
                f'<tr class="out"><td>{html.escape(first.text(row))}</td>'
                f'<td colspan="{len(columns) - 1}" data-name="left out">'
                f"{html.escape(row['left_out'])}</td></tr>"
            )
            continue
        cells = [f"<td>{html.escape(columns[0].text(row))}</td>"]
        for column in columns[1:]:
            name, text = html.escape(column.heading, quote=True), html.escape(column.text(row))
            kind = "none" if not text else "short" if len(text) < 8 else "long"
            cells.append(f'<td data-name="{name}" class="{kind}">{text}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    content = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<table class="figures">{content}</table>'


def columns_of(table: str, gpu: Mapping[str, Any] | None) -> list[Column]:
    """Columns of a table: the common ones, its own, GPU and prior figures."""
    common = [
        Column("call", lambda row: row["call"]),
        Column("density", lambda row: share(row.get("density"))),
        Column("error", lambda row: error(row.get("error"))),
        Column("ms, median (least - most)", milliseconds),
        Column("peak memory", lambda row: size(row.get("peak_bytes"))),
    ]
    on_gpu = Column("on a GPU", lambda row: gpu_figure(gpu, table, row))
    if table not in TABLES:
        return [*common, *_MORE.get(table, []), on_gpu]
    prior = Column(
        "prior document", lambda row: prior_figure(table, row["call"], row.get("tokens"))
    )
    return [*common, *_MORE.get(table, []), on_gpu, prior]


def milliseconds(row: Row) -> str:
    """Formats median and range as "2.31 (2.29 - 2.40)"."""
    if "ms" not in row:
        return ""
    return f"{short(row['ms'])} ({short(row['least_ms'])} - {short(row['most_ms'])})"


def short(number: float) -> str:
    """Formats a number with two or three significant digits and thousands separators."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2g}" if number < 1 else f"{number:.2f}"


def share(number: float | None) -> str:
    """Formats a share of all (query, key) pairs, such as 7.67%."""
    if number is None:
        return ""
    percent = 100 * number
    return f"{percent:.3g}%" if percent < 99.95 else "100%"


def error(number: float | None) -> str:
    """Formats an error relative to the largest exact output, such as 3e-7."""
    if number is None:
        return ""
    mantissa, exponent = f"{number:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}" if number else "0"


def size(number: float | None) -> str:
    """Formats bytes as decimal MB or GB."""
    if number is None:
        return ""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{short(number / 1e6)} MB"


def gpu_figure(gpu: Mapping[str, Any] | None, table: str, row: Row) -> str:
    """Text of the GPU record's figure for a row, or "not measured".

    It is of a forward call with as many tokens; the text names its heads if they differ.
    """
    part, start, name = _ON_GPU.get((table, row["call"].split(",")[0]), ("", "", ""))
    if gpu is None or gpu["environment"]["gpu"] is None or not row["call"].startswith(start):
        return NOT_MEASURED
    for figures in gpu["parts"].get(part, {}).get("rows", ()):
        fits = figures.get("backend") == name and figures.get("tokens") == row.get("tokens")
        if fits and "ms" in figures and figures.get("case", "forward") == "forward":
            parts = [f"{short(figures['ms'])} ms"]
            if figures.get("density") is not None:
                parts.append(f"density {share(figures['density'])}")
            if figures.get("heads") not in (None, row.get("heads")):
                parts.append(f"{figures['heads']} heads")
            return ", ".join([*parts, *([figures["dtype"]] if "dtype" in figures else [])])
    return NOT_MEASURED


_ON_GPU = {
    ("comparison", "window of 256"): ("founding table", "window of 256, ours (cpu)", "ours"),
    ("comparison", "all pairs"): ("founding table", "all pairs, dense SDPA", "dense flash"),
    ("lengths", "window in blocks"): ("founding table", "", "ours"),
    ("lengths", "dense SDPA"): ("founding table", "", "dense flash"),
    ("lengths", "LongNet"): ("longnet", "", "ours"),
}
"""(Table, call) -> (part of the GPU record, start of the call, backend in that part)."""


def _count(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:,}" if isinstance(row.get(name), int) else ""


_MORE: dict[str, list[Column]] = {
    "comparison": [Column("GFLOP/s", lambda row: f"{row['gflops']:,.0f}")],
    "sparsity": [Column("GFLOP/s", lambda row: f"{row['gflops']:,.0f}")],
    "lengths": [Column("heads", _count("heads"))],
    "memory": [
        Column("bytes a token and head", lambda row: _bytes_a_token(row)),
    ],
    "launches": [
        Column("operators from Python", _count("outermost")),
        Column("operators in all", _count("operators")),
    ],
    "layouts": [
        Column(
            "layout, cold, ms", lambda row: short(row["layout_ms"]) if "layout_ms" in row else ""
        ),
        Column("first call, ms", lambda row: short(row["first_ms"]) if "first_ms" in row else ""),
        Column("layout's share", lambda row: _layout_share(row)),
        Column("calls, built, hits", lambda row: _hits(row)),
    ],
    "chosen": [Column("scorer's parameters that learn", lambda row: row.get("learns", ""))],
    "rings": [
        Column("known", lambda row: row.get("known", "")),
        Column("most a rank receives", lambda row: size(row.get("received_bytes"))),
        Column("largest load / mean", lambda row: f"{row['load_max_over_mean']:.2f}"),
    ],
    "longest": [
        Column("known", lambda row: row.get("known", "measured")),
        Column("most tokens", _count("tokens")),
        Column("of a memory of", lambda row: size(row.get("limit_bytes"))),
        Column("did not fit", _count("did_not_fit")),
        Column("a call takes at least", lambda row: _seconds(row.get("at_least_seconds"))),
    ],
    "roofline": [
        Column("at best", lambda row: _rate(row)),
        Column("FLOP a byte", lambda row: f"{row['intensity']:.3g}" if "intensity" in row else ""),
    ],
}


def _bytes_a_token(row: Row) -> str:
    if not row.get("peak_bytes"):
        return ""
    return f"{row['peak_bytes'] / row['tokens'] / row['heads']:,.0f}"


def _seconds(number: float | None) -> str:
    return "" if number is None else f"{short(number)} s, by published peaks"


def _layout_share(row: Row) -> str:
    if not row.get("first_ms") or "layout_ms" not in row:
        return ""
    return f"{row['layout_ms'] / row['first_ms']:.0%}"


def _hits(row: Row) -> str:
    if "calls" not in row:
        return ""
    return f"{row['calls']}, {row['built']}, {row['hit_rate']:.1%}"


def _rate(row: Row) -> str:
    if "gb_per_s" in row:
        return f"{row['gb_per_s']:,.0f} GB/s"
    return f"{row['gflops']:,.0f} GFLOP/s"
