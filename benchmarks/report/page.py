"""The report: one page with all tables, next to the prior documents' figures.

    page = report_page(records, gpu=None)      # self-contained HTML: nothing is loaded

`records` is the result of `benchmarks.tables.measure_tables`, or its JSON files.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from sparsering.demo.page import page_html

from ..measure import Row
from .columns import columns_of, error, rows_html, share, short, size
from .drawn import gallery_html, lengths_html, ring_html, roofline_html
from .gpu import gpu_html
from .parts import parts_html
from .prior import PRIOR

Record = Mapping[str, Any]

_STYLE = """
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
.source, .note { font-size: .85rem; opacity: .8; margin: .35rem 0; }
.why { border-left: 3px solid #d1603d; padding-left: .75rem; margin: .75rem 0; }
.figures { font-size: .85rem; }
.figures th { text-align: left; font-weight: 600; vertical-align: bottom;
  padding: .2rem .5rem .2rem 0; border-bottom: 2px solid #8888; }
.figures td:last-child { text-align: left; }
.figures td { overflow-wrap: normal; }
.figures td.short { white-space: nowrap; }
.said td:last-child { text-align: left; width: 60%; }
.out td { opacity: .75; }
details { margin: .75rem 0; }
summary { cursor: pointer; font-weight: 600; }
nav a { display: inline-block; padding: .3rem .8rem .3rem 0; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem; }
.gallery figure { margin: 0; font-size: .85rem; line-height: 1.35; }
.gallery img { display: block; margin-bottom: .25rem; }
.picture { margin: 1rem 0; }
.picture img { max-width: min(100%, 32rem); }
ul { padding-left: 1.2rem; }
.picture figcaption { font-size: .85rem; opacity: .8; }
@media (min-width: 48rem) { body { max-width: 60rem; } }
@media (max-width: 48rem) {
  .figures thead { display: none; }
  .figures tr { display: grid; grid-template-columns: 1fr 1fr; gap: .1rem .75rem;
    border-bottom: 1px solid #8888; padding: .6rem 0; }
  .figures td { border: 0; padding: 0; }
  .figures td:first-child { grid-column: 1 / -1; font-weight: 600; font-size: .95rem; }
  .figures td[data-name]::before { content: attr(data-name); display: block; font-size: .75rem;
    opacity: .75; }
  .figures .none { display: none; }
  .figures .out td[data-name] { grid-column: 1 / -1; }
  .wishes td { display: block; border: 0; padding: 0; }
  .wishes td:first-child { font-weight: 600; padding-top: .6rem; }
  .wishes td:last-child { width: auto; }
}
"""

TITLES: dict[str, tuple[str, str]] = {
    "comparison": (
        "4,096 tokens, 90% sparse",
        "One sequence, 8 heads of 64. The first rows are what the prior documents timed as 90% "
        "sparse: a window of 256 in blocks of 64. All calls of a part took turns in one process.",
    ),
    "sparsity": (
        "Time against density",
        "2,048 tokens, 8 heads of 64, blocks of 32: 10, 25 and 50% of random blocks, windows of "
        "the densities that the prior documents really had, and dense attention.",
    ),
    "lengths": (
        "4K to 1M tokens",
        "Time and memory by pattern. 8 heads of 64 up to 65,536 tokens, as the prior documents "
        "had; one head beyond.",
    ),
    "memory": (
        "Memory against length",
        "The same calls: the peak beyond the inputs, of one call in a fresh process, its layout "
        "and its result included.",
    ),
    "launches": (
        "What a call dispatches",
        "2,048 tokens, one warm call under torch's profiler. On a CPU there are no kernel "
        "launches; operators are counted: those called from Python, and all of them.",
    ),
    "layouts": (
        "Patterns: the first call, and the cache",
        "A layout is compiled on the first call and kept. The row of many calls goes round three "
        "patterns, so that each call asks for another than the one before.",
    ),
    "chosen": (
        "Hierarchical blocks, and blocks chosen by content",
        "8 heads of 64. Chosen: scores, selection of 16 blocks of 64 for each 64 queries, and "
        "attention, all three in the time; the error is that of attention to the blocks chosen.",
    ),
    "rings": (
        "The ring, by ranks",
        "131,072 tokens, 8 heads of 64, LongNet with one branch over the whole sequence. Measured: "
        "processes of one thread on this machine, which share its cores and its memory. Planned: "
        "arithmetic of RingPlan, nothing run.",
    ),
    "longest": (
        "The longest sequence, by memory",
        "8 heads of 64, float32, forward: inputs, layout, workspace and result within a limit that "
        "the system kept. Found by running: the next 4,096 tokens did not fit. Planned: the "
        "arithmetic of sr.estimate on published figures of GPUs, in float16; no GPU has run it.",
    ),
    "roofline": (
        "How near the machine's limits",
        "The peaks were measured in this run: torch's own matrix product and a copy. A call's "
        "FLOP count only the pairs that attend; its bytes are inputs and result, once.",
    ),
    "gallery": (
        "Patterns, their density and their cost",
        "One head of 64 at 4,096 tokens, float32. Queries go down, keys to the right; darker "
        "where more pairs attend.",
    ),
}  # fmt: skip


def report_page(
    records: Mapping[str, Record], gpu: Record | None = None, parts: Record | None = None
) -> str:
    """Builds the report page.

    Args:
        records: records of the tables, by name; the page names those that are missing or failed.
        gpu: the record of `python -m benchmarks.gpu`, or None.
        parts: the record of `python -m benchmarks ablation`, or None.

    Raises: ImportError without matplotlib.
    """
    body = ["<h1>Sparse attention, measured</h1>", *_summary(records), _contents()]
    for name, (title, about) in TITLES.items():
        source = "lengths" if name == "memory" else name
        body += [f'<h2 id="{name}">{title}</h2>', f"<p>{html.escape(about)}</p>"]
        record = records.get(source, {"failed": "it was not run"})
        if "rows" not in record:
            body.append(f"<p><strong>Not measured: {html.escape(record['failed'])}</strong></p>")
        else:
            body += _section(name, record, gpu)
            body.append(f'<p class="source">{html.escape(described(record))}</p>')
        if name in PRIOR["tables"]:
            body += _prior(name)
    body += parts_html(parts)
    body += gpu_html(gpu)
    body += _wishes()
    if any(record.get("quick") for record in records.values()):
        body.insert(1, '<p class="why">A trial run of tiny sizes: its figures mean nothing.</p>')
    return page_html("sparsering report", body, _STYLE)


def described(record: Record) -> str:
    """Describes when, where and at which commit a table was measured."""
    place = record["environment"]
    changed = " with uncommitted changes" if place["uncommitted_changes"] else ""
    commit = (place["commit"] or "unknown")[:10]
    return (
        f"Measured {place['date'][:16].replace('T', ' ')} UTC in {record['seconds']:.0f} s; commit "
        f"{commit}{changed}; {place['processor']}, {place['threads']} threads, "
        f"{place['cpu_capability']}; torch {place['torch']}, Python {place['python']}; "
        f"GPU: {place['gpu'] or 'none'}."
    )


def _section(name: str, record: Record, gpu: Record | None) -> list[str]:
    """Builds the rows of a table and its plots."""
    rows: Sequence[Row] = record["rows"]
    columns = columns_of(name, gpu)
    if name == "lengths":
        return [*lengths_html(rows, "ms"), *_by_length(rows, gpu)]
    if name == "memory":
        drawn = [row for row in rows if "peak_bytes" in row and row["tokens"] in MEMORY_LENGTHS]
        return [*lengths_html(rows, "peak_bytes"), _folded("Rows", rows_html(drawn, columns))]
    if name == "gallery":
        return [gallery_html(rows), _folded("All figures", rows_html(rows, columns_of("", gpu)))]
    if name == "roofline":
        return [roofline_html(rows), _folded("All figures", rows_html(rows, columns))]
    if name == "rings":
        return [rows_html(rows, columns), *ring_html(rows)]
    return [rows_html(rows, columns)]


MEMORY_LENGTHS = (256, 4096, 8192, 16384, 32768, 65536, 1 << 20)


def _by_length(rows: Sequence[Row], gpu: Record | None) -> list[str]:
    """Builds a folded table for each length; the first and the last are open."""
    columns = columns_of("lengths", gpu)
    tokens = sorted({row["tokens"] for row in rows})
    parts = []
    for length in tokens:
        own = [row for row in rows if row["tokens"] == length]
        is_open = length in (tokens[0], tokens[-1])
        parts.append(_folded(f"{length:,} tokens", rows_html(own, columns), is_open))
    return parts


def _folded(title: str, content: str, is_open: bool = False) -> str:
    mark = " open" if is_open else ""
    return f"<details{mark}><summary>{html.escape(title)}</summary>{content}</details>"


def _prior(name: str) -> list[str]:
    """Builds the prior document's figures for this table, and why ours differ."""
    prior = PRIOR["tables"][name]
    why = html.escape(prior["why"])
    cells = "".join(
        f"<tr><td>{html.escape(what)}</td><td>{html.escape(figure)}</td></tr>"
        for what, figure in prior["said"]
    )
    return [
        f'<p class="why"><strong>The prior document:</strong> {why}</p>',
        _folded(f"What it said ({PRIOR['place']})", f'<table class="said">{cells}</table>'),
    ]


def _summary(records: Mapping[str, Record]) -> list[str]:
    """Builds the introduction and the main results of this run."""
    sentences = []
    rows = {row["call"]: row for row in records.get("comparison", {}).get("rows", [])}
    dense = rows.get("all pairs, dense SDPA")
    ours = next((r for c, r in rows.items() if c.startswith("window of 256, ours")), None)
    if dense and ours:
        sentences.append(
            f"{ours['tokens']:,} tokens at a density of {share(ours['density'])}: "
            f"{short(ours['ms'])} ms, dense attention {short(dense['ms'])} ms, "
            f"{dense['ms'] / ours['ms']:.1f} times as long. Error against float64: "
            f"{error(ours['error'])}."
        )
    measured = [r for r in records.get("lengths", {}).get("rows", []) if "ms" in r]
    if measured:
        most = max(row["tokens"] for row in measured)
        for row in [r for r in measured if r["tokens"] == most and r["call"] == "LongNet"]:
            sentences.append(
                f"{most:,} tokens, LongNet, one head: {short(row['ms'] / 1e3)} s and "
                f"{size(row['peak_bytes'])} beyond the inputs."
            )
        sentences += _crossover(measured)
    items = "".join(f"<li>{html.escape(text)}</li>" for text in sentences)
    intro = (
        "The tables that a prior library published, run again: each figure with the density of "
        "the pairs that attend, its error against float64 on sampled rows, the median of warm "
        "calls with the least and the most, and the peak memory beyond the inputs. A call that "
        "returns zeros, or anything else that is wrong, is not timed."
    )
    return [f"<p>{intro}</p>", f"<ul>{items}</ul>" if items else ""]


def _crossover(rows: Sequence[Row]) -> list[str]:
    """Names the length from which each pattern was faster than dense attention."""
    dense = {row["tokens"]: row["ms"] for row in rows if row["call"].startswith("dense")}
    if not dense:
        return []
    parts = []
    for call in dict.fromkeys(row["call"] for row in rows if not row["call"].startswith("dense")):
        own = {row["tokens"]: row["ms"] for row in rows if row["call"] == call}
        faster = [n for n in sorted(dense) if n in own and own[n] < dense[n]]
        if not faster:
            parts.append(f"{call}: not up to {max(dense):,}")
        elif faster[0] > min(dense):
            parts.append(f"{call}: from {faster[0]:,} on")
    rest = "; ".join(parts)
    return [
        f"Faster than dense attention at {min(dense):,} tokens already: every pattern"
        + (f", but for {rest}." if rest else ".")
        + f" The prior documents' advice was: {PRIOR['advice']}."
    ]


def _contents() -> str:
    links = [f'<a href="#{name}">{title}</a>' for name, (title, _) in TITLES.items()]
    links += ['<a href="#parts">What each part brings</a>', '<a href="#gpu">On a GPU</a>']
    links += ['<a href="#wishes">What was wished for</a>']
    return f"<nav>{' '.join(links)}</nav>"


def _wishes() -> list[str]:
    cells = "".join(
        f"<tr><td>{html.escape(wish)}</td><td>{html.escape(became)}</td></tr>"
        for wish, became in PRIOR["wishes"]
    )
    return [
        '<h2 id="wishes">What was wished for</h2>',
        "<p>The prior documents' lists of what should come, and what became of each.</p>",
        f'<table class="said wishes">{cells}</table>',
    ]
