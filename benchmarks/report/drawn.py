"""The report's inlined plots, drawn from its rows, each with a description in words."""

import html
from collections.abc import Sequence

import torch

from sparsering.demo.page import image_html
from sparsering.distributed import RingPlan
from sparsering.patterns.expression import parse
from sparsering.plots.traffic import traffic_image

from ..measure import Row
from ..plots import lengths_png, roofline_png, thumbnail_png
from .columns import share, short, size


def lengths_html(rows: Sequence[Row], column: str) -> list[str]:
    """Plots time or memory over the length, a line for each call."""
    drawn = [row for row in rows if row.get(column) is not None]
    if not drawn:
        return []
    what = "Time" if column == "ms" else "Peak memory"
    calls = ", ".join(dict.fromkeys(row["call"] for row in drawn))
    low, high = min(row["tokens"] for row in drawn), max(row["tokens"] for row in drawn)
    alt = f"{what} of a head over {low:,} to {high:,} tokens: {calls}; dense attention is dashed."
    return [picture_html(lengths_png(drawn, column), alt)]


def picture_html(png: bytes, caption: str) -> str:
    """Builds a picture with its caption."""
    image = image_html(png, caption)
    return (
        f'<figure class="picture">{image}<figcaption>{html.escape(caption)}</figcaption></figure>'
    )


def roofline_html(rows: Sequence[Row]) -> str:
    """Plots calls below the roofline of this machine's measured peaks."""
    peaks = {row["dtype"]: row["gflops"] for row in rows if row["call"].startswith("matrix")}
    bandwidth = next(row["gb_per_s"] for row in rows if "gb_per_s" in row) * 1e9
    points = [
        (row["call"].rsplit(",", 1)[0], row["dtype"], row["intensity"], row["gflops"])
        for row in rows
        if "intensity" in row
    ]
    rates = "; ".join(f"{dtype} {rate:,.0f} GFLOP/s" for dtype, rate in peaks.items())
    alt = (
        f"GFLOP/s of calls over their FLOP a byte, below this machine's measured peaks: {rates}; "
        f"memory {bandwidth / 1e9:,.0f} GB/s."
    )
    return picture_html(roofline_png(points, peaks, bandwidth), alt)


def gallery_html(rows: Sequence[Row]) -> str:
    """Draws a small picture of each pattern, with its density, time and memory."""
    dense = next((row for row in rows if row["call"].startswith("dense")), None)
    cards = []
    for row in rows:
        if row is dense or "ms" not in row:
            continue
        pattern = parse(row["pattern"])
        layout = pattern.layout(row["tokens"], block_size=row["block_size"])
        alt = f"{row['call']}: which keys each query sees, {share(row['density'])} of the pairs"
        times = f", dense {short(dense['ms'])}" if dense else ""
        cards.append(
            f"<figure>{image_html(thumbnail_png(layout), alt)}<figcaption>"
            f"<strong>{html.escape(row['call'])}</strong><br>{share(row['density'])} of the pairs"
            f"<br>{short(row['ms'])} ms{times}<br>{size(row['peak_bytes'])}</figcaption></figure>"
        )
    return f'<div class="gallery">{"".join(cards)}</div>'


def ring_html(rows: Sequence[Row]) -> list[str]:
    """Draws the traffic between ranks: the largest measured ring, and the first planned one."""
    pictures = []
    measured = [row for row in rows if row.get("known") == "measured" and row["ranks"] > 1]
    planned = [row for row in rows if row.get("known") == "planned"]
    for row in (*measured[-1:], *planned[:1]):
        plan = RingPlan.build(
            parse(row["pattern"]), row["tokens"], row["ranks"], num_heads=row["heads"],
            sharding=row["sharding"],
        )  # fmt: skip
        kind = row["sharding"].split(":")[0]
        caption = f"{row['ranks']} ranks, {row['tokens']:,} tokens, sharding: {kind}"
        row_bytes = 2 * row["head_dim"] * torch.float32.itemsize
        alt = f"Who sends what to whom, {row['known']}: {caption}; senders down, receivers right."
        png = traffic_image([(caption, plan.tokens, row_bytes)], panel_width=3.8)
        pictures.append(picture_html(png, alt))
    return pictures
