"""Builds the demo's report as one self-contained HTML page, and its table as plain text."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

Rows = Sequence[tuple[str, str]]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; line-height: 1.25; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; width: 100%; }
td { border-bottom: 1px solid #8884; padding: .35rem .5rem .35rem 0; vertical-align: top;
     overflow-wrap: anywhere; }
td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
@media (prefers-color-scheme: dark) { img { filter: invert(.9) hue-rotate(180deg); } }
details { margin: 1.5rem 0; }
summary { cursor: pointer; font-weight: 600; }
""".strip()


_GRIDS = """
body { max-width: 70rem; }
.numbers, .pictures { display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); }
.numbers p { margin: 0; }
.numbers b { display: block; font-size: 2.4rem; line-height: 1.1; }
.pictures { grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
.pictures figure { margin: 0; }
figcaption, .where { font-size: .85rem; opacity: .8; }
"""


def report_html(
    title: str,
    summary: str,
    numbers: Rows,
    images: Mapping[str, bytes],
    rows: Rows,
    conditions: str,
) -> str:
    """Builds the demo's page: large numbers, PNGs by caption, and a folded table of rows.

    `numbers` has large figures, each with what it is. `conditions` says where, when and with what
    the figures were measured.
    """
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(summary)}</p>", '<div class="numbers">']
    body += [f"<p><b>{escape(figure)}</b>{escape(what)}</p>" for figure, what in numbers]
    body += ["</div>", '<div class="pictures">']
    for caption, png in images.items():
        caption_html = f"<figcaption>{escape(caption)}</figcaption>"
        body.append(f"<figure>{image_html(png, caption)}{caption_html}</figure>")
    body += ["</div>", f"<details><summary>All {len(rows)} figures of this run</summary><table>"]
    body += [f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows]
    body += ["</table></details>", f'<p class="where">{escape(conditions)}</p>']
    return page_html(title, body, _GRIDS)


def page_html(title: str, body: Sequence[str], style: str = "") -> str:
    """Builds a self-contained HTML page from lines of HTML; `style` is additional CSS."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def image_html(png: bytes, alt: str) -> str:
    """Builds an HTML image that contains the PNG; `alt` describes it in words."""
    data = base64.b64encode(png).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def table(rows: Rows) -> str:
    """Formats rows as lines of text, names on the left and values on the right."""
    names, values = (max(len(row[side]) for row in rows) for side in (0, 1))
    return "\n".join(f"  {name:<{names}}  {value:>{values}}" for name, value in rows)
