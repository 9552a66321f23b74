"""Pictures as PNG bytes: patterns, loss curves, speeds, who sends what to whom.

    Path("pattern.png").write_bytes(pattern_png(LongNet((1024, 4096), (1, 4)), 1 << 20))

Drawn without a display and without matplotlib's global state. Needs matplotlib: `pip install
sparsering[plots]`.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .algebra import Pattern
from .compile import unpack
from .layout import BlockLayout, Pass

SPARSE, DENSE, GREY = "#1f6f8b", "#d1603d", "#8a8f98"
_NAMES = {"cpu": "sparsering", "flex": "FlexAttention", "dense": "dense SDPA"}


def pattern_png(
    pattern: Pattern,
    length: int,
    *,
    num_heads: int = 1,
    block_size: int = 128,
    title: str | None = None,
) -> bytes:
    """Draws which keys each query sees: queries downwards, keys to the right, darker where more
    pairs are in.

    Args:
        pattern: any.
        length: tokens, of queries and of keys.
        num_heads: heads of the layout; up to four are drawn, side by side.
        block_size: of the layout that is drawn.
        title: default: the pattern's expression.

    Returns: a PNG file's bytes.

    Raises: ValueError where the pattern does not fit; ImportError without matplotlib.

    Cost: O(visited blocks) time, memory bounded.
    """
    if length < 1:
        raise ValueError(f"a drawing needs a length of at least 1 token, got {length}")
    layout = pattern.layout(length, num_heads=num_heads, block_size=block_size)
    shown = min(num_heads, 4)
    figure = _figure(4.2 * shown, 5.0)
    for head in range(shown):
        axes = figure.add_subplot(1, shown, head + 1)
        draw_pattern(axes, layout, head=head)
        share = f"{layout.num_pairs / length**2:.2%} of all pairs"
        axes.set_title(f"head {head}" if num_heads > 1 else share, fontsize=9)
    figure.suptitle(_wrapped(title or str(pattern), 52 * shown), fontsize=9)
    return _png(figure)


def patterns_png(
    panels: Sequence[tuple[str, Pattern, int]],
    *,
    num_heads: int = 1,
    head: int = 0,
    columns: int = 1,
) -> bytes:
    """Draws one head of several (caption, pattern, length in tokens), `columns` side by side.

    Errors and cost as `pattern_png`.
    """
    rows = -(-len(panels) // columns)
    figure = _figure(4.6 * columns, 5.0 * rows)
    for place, (caption, pattern, length) in enumerate(panels, 1):
        layout = pattern.layout(length, num_heads=num_heads)
        axes = figure.add_subplot(rows, columns, place)
        draw_pattern(axes, layout, head=head)
        pairs = f"{layout.num_pairs:,.0f} pairs per head ({layout.num_pairs / length**2:.2%})"
        axes.set_title(f"{_wrapped(caption, 44)}\n{pairs}", fontsize=8.5)
    return _png(figure)


def draw_pattern(axes: Any, layout: BlockLayout, *, head: int = 0, cells: int = 512) -> None:
    """Draws one head of a layout on matplotlib axes, in at most cells x cells pixels."""
    frame = layout.frame
    step = max((p.step for p in layout.passes), default=1)
    if frame.q_len > cells and frame.q_len // step >= 128:
        cells = min(cells, frame.q_len // step)  # areas that all hold a position of each residue
    shares = pair_shares(layout, cells, head=head)
    shade = torch.where(shares > 0, 0.25 + 0.75 * shares.clamp(max=1).pow(0.4), 0)  # few still show
    axes.imshow(
        shade.numpy(),
        cmap="Blues",
        vmin=0,
        vmax=1,
        extent=(0, frame.kv_len, frame.q_start + frame.q_len, frame.q_start),
        interpolation="nearest",
    )
    axes.set_xlabel("key position", fontsize=8)
    axes.set_ylabel("query position", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[:].set_visible(False)  # they would hide a first or last column of one pixel
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [round(low + i * (high - low) / 4) for i in range(5)]
        axis.set_ticks(ticks, [_tokens(tick) for tick in ticks])


def pair_shares(
    layout: BlockLayout, cells: int, *, head: int = 0, most_samples: int = 1 << 24
) -> Tensor:
    """[rows, columns] pairs in each cell over its positions; 1 is dense, more where pairs count
    twice.

    Every position of every tile is counted where there are few; else evenly chosen ones stand for
    their neighbours.

    Args:
        layout: any; its first batch entry is drawn.
        cells: most rows and columns.
        head: query head.
        most_samples: pairs to look at, at most, about.
    """
    q_len, kv_len = layout.frame.q_len, layout.frame.kv_len
    rows, columns = min(cells, q_len), min(cells, kv_len)
    counts = torch.zeros(rows * columns, dtype=torch.float64)
    per_entry = max(most_samples // max(layout.num_blocks, 1), 64)
    samples = min(layout.block_size, math.isqrt(per_entry))
    slots = torch.arange(samples) * layout.block_size // samples
    for p in layout.passes:
        for part in _parts(layout, p, head, samples):
            q, k, held = _sampled_pairs(layout, p, head, part, slots)
            cell = (q * rows // q_len)[:, :, None] * columns + (k * columns // kv_len)[:, None, :]
            counts += torch.bincount(cell[held], minlength=len(counts))
    weight = (layout.block_size / samples) ** 2
    row_size = torch.bincount(torch.arange(q_len) * rows // q_len, minlength=rows)
    column_size = torch.bincount(torch.arange(kv_len) * columns // kv_len, minlength=columns)
    return counts.view(rows, columns) * weight / (row_size[:, None] * column_size)


def _parts(layout: BlockLayout, p: Pass, head: int, samples: int) -> Sequence[Tensor]:
    """The entries of a pass, in pieces of a few million sampled pairs."""
    entries = torch.arange(len(layout.table(p, 0, head)[0]))
    return entries.split(max((1 << 22) // samples**2, 1))


def _sampled_pairs(
    layout: BlockLayout, p: Pass, head: int, entries: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query indices [n, s], key positions [n, s] and which of their pairs [n, s, s] are in."""
    row, key, mask, tiles = layout.table(p, 0, head)
    row, key, mask = row[entries], key[entries], mask[entries]
    q = p.query_start[tiles][row, None] + p.step * slots
    k = p.key_start[tiles][key, None] + p.step * slots
    held = (q < p.query_stop[tiles][row, None])[:, :, None] & (k < p.key_stop[tiles][key, None])[
        :, None, :
    ]
    partial = mask >= 0
    numbers, inverse = mask[partial].unique(return_inverse=True)
    bitmaps = unpack(p.bitmaps[numbers], layout.block_size)[:, slots][:, :, slots]
    held[partial] &= bitmaps[inverse]
    return q, k, held


def loss_png(metrics: Sequence[Mapping[str, Any]], baselines: Mapping[str, float]) -> bytes:
    """Draws the training and validation losses of `metrics.jsonl`'s records over steps, and levels
    to compare with.

    Raises: ImportError without matplotlib.
    """
    figure = _figure(4.6, 3.6)
    axes = figure.add_subplot()
    steps = [(r["step"], r["loss"]) for r in metrics if "loss" in r]
    checks = [(r["step"], r["validation_loss"]) for r in metrics if "validation_loss" in r]
    if steps:
        axes.plot(
            *zip(*steps, strict=True), color=SPARSE, alpha=0.45, linewidth=1, label="training"
        )
    if checks:
        axes.plot(
            *zip(*checks, strict=True), color=SPARSE, marker="o", markersize=4, label="validation"
        )
    for (name, level), style in zip(baselines.items(), ("--", ":", "-."), strict=False):
        axes.axhline(
            level, color=DENSE, linestyle=style, linewidth=1.2, label=f"{name} {level:.3f}"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def speed_png(seconds: Mapping[str, tuple[float, float]], *, title: str) -> bytes:
    """Draws a bar per name: (seconds in attention, seconds in all), stacked.

    Raises: ImportError without matplotlib.
    """
    figure = _figure(4.6, 1.1 + 0.7 * len(seconds))
    axes = figure.add_subplot()
    names = list(seconds)
    attention = [seconds[name][0] for name in names]
    rest = [seconds[name][1] - seconds[name][0] for name in names]
    axes.barh(names, rest, color=GREY, label="everything else")
    axes.barh(names, attention, left=rest, color=SPARSE, label="attention")
    for place, name in enumerate(names):
        axes.text(seconds[name][1], place, f" {seconds[name][1]:.2f} s", va="center", fontsize=9)
    axes.set_xlim(0, max(total for _, total in seconds.values()) * 1.25)
    axes.set_xlabel("seconds per training step")
    axes.set_title(title, fontsize=9)
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def traffic_png(panels: Sequence[tuple[str, Tensor, int]]) -> bytes:
    """Draws who sends what to whom in a ring: senders downwards, receivers to the right, darker
    where more moves, all panels alike.

    Args:
        panels: (caption, [receiver, sender] rows of keys and values that move as `RingPlan.tokens`
            counts them, bytes of a row).

    Raises: ImportError without matplotlib.
    """
    figure = _figure(4.8 * len(panels), 4.9)
    most = max(1, *(int(tokens.max()) for _, tokens, _ in panels))
    for place, (caption, tokens, row_bytes) in enumerate(panels, 1):
        rows = tokens.T  # [sender, receiver]
        world = len(rows)
        shade = (rows / most).pow(0.4)  # few still show
        axes = figure.add_subplot(1, len(panels), place)
        axes.imshow(shade.numpy(), cmap="Blues", vmin=0, vmax=2, interpolation="nearest")
        for sender in range(world if world <= 8 else 0):  # more would not be legible
            for receiver in range(world):
                count = int(rows[sender, receiver])
                kilobytes = f"\n{count * row_bytes / 1024:,.0f} KiB"
                text = "own" if sender == receiver else f"{count:,}{kilobytes if count else ''}"
                axes.text(receiver, sender, text, ha="center", va="center", fontsize=8)
        total = int(rows.sum())
        size = f"{total * row_bytes / (1 << 20):,.2f} MiB in all"
        axes.set_title(f"{_wrapped(caption, 60)}\n{total:,} rows, {size}", fontsize=8.5)
        axes.set_xlabel("receiving rank", fontsize=8)
        axes.set_ylabel("sending rank", fontsize=8)
        ticks = range(0, world, -(-world // 16))
        axes.set_xticks(ticks)
        axes.set_yticks(ticks)
        axes.tick_params(labelsize=7, length=0)
    figure.suptitle(
        "Keys and values that one layer's forward pass moves, in rows (one token of one head)",
        fontsize=9,
    )
    return _png(figure)


def sweeps_png(rows: Sequence[Mapping[str, Any]], *, title: str) -> bytes:
    """Draws milliseconds over density, tokens and block size, a line per backend, from the rows of
    the benchmark record "sweeps".

    Raises: ImportError without matplotlib.
    """
    figure = _figure(11.5, 3.6)
    panels = (
        ("density", "density", "share of blocks visited"),
        ("length", "tokens", "tokens (causal window of 2048)"),
        ("block size", "block_size", "tokens per block (10% of blocks)"),
    )
    for place, (sweep, column, label) in enumerate(panels):
        axes = figure.add_subplot(1, 3, place + 1)
        own = [row for row in rows if row["sweep"] == sweep]
        # A dense row stands at what its neighbour "cpu" visits: it has no density of its own.
        where = [next(r for r in own[: i + 1][::-1] if r["backend"] == "cpu")[column]
                 for i in range(len(own))]  # fmt: skip
        for backend, color in (("cpu", SPARSE), ("flex", DENSE), ("dense", GREY)):
            line = [
                (x, r["ms"]) for x, r in zip(where, own, strict=True) if r["backend"] == backend
            ]
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", color=color, label=_NAMES[backend])
        axes.set_xscale("log", base=10 if sweep == "density" else 2)
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("milliseconds, forward")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    return _png(figure)


def require_matplotlib() -> None:
    """Raises ImportError naming the extra where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("drawings need matplotlib; pip install 'sparsering[plots]'") from None


def _figure(width: float, height: float) -> Any:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, bbox_inches="tight", pad_inches=0.1)
    return buffer.getvalue()


def _tokens(count: int) -> str:
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= unit and count % (unit // 4) == 0:
            return f"{count / unit:g}{letter}"
    return f"{count:,}"


def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > width and lines[-1]:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)
