"""Draws the traffic of ring attention: how much each rank sends to each other rank."""

from collections.abc import Sequence

from torch import Tensor

from .figure import image, new_figure, wrapped


def traffic_image(
    panels: Sequence[tuple[str, Tensor, int]], *, panel_width: float = 4.8, kind: str = "png"
) -> bytes:
    """Draws the traffic of ring attention: senders downwards, receivers to the right.

    A darker cell means more rows; all panels share one scale.

    Args:
        panels: (caption, number of rows of keys and values [receiver, sender] as `RingPlan.tokens`
            counts them, bytes of a row).
        panel_width: inches of each panel. Cells show numbers if there are at most 8 ranks, or at
            most 4 in panels narrower than 4.8 inches.
        kind: "png" or "svg".
    """
    figure = new_figure(panel_width * len(panels), panel_width + 0.1)
    legible = 8 if panel_width >= 4.8 else 4
    most = max(1, *(int(tokens.max()) for _, tokens, _ in panels))
    for place, (caption, tokens, row_bytes) in enumerate(panels, 1):
        rows = tokens.T  # [sender, receiver]
        world = len(rows)
        shade = (rows / most).pow(0.4)  # keeps small numbers visible
        axes = figure.add_subplot(1, len(panels), place)
        axes.imshow(shade.numpy(), cmap="Blues", vmin=0, vmax=2, interpolation="nearest")
        for sender in range(world if world <= legible else 0):
            for receiver in range(world):
                count = int(rows[sender, receiver])
                kilobytes = f"\n{count * row_bytes / 1024:,.0f} KiB"
                text = "own" if sender == receiver else f"{count:,}{kilobytes if count else ''}"
                axes.text(receiver, sender, text, ha="center", va="center", fontsize=8)
        total = int(rows.sum())
        sums = f"{total:,} rows, {total * row_bytes / (1 << 20):,.2f} MiB in all"
        axes.set_title(f"{wrapped(caption, int(12.5 * panel_width))}\n{sums}", fontsize=8.5)
        axes.set_xlabel("receiving rank", fontsize=8)
        axes.set_ylabel("sending rank", fontsize=8)
        ticks = range(0, world, -(-world // 16))
        axes.set_xticks(ticks)
        axes.set_yticks(ticks)
        axes.tick_params(labelsize=7, length=0)
    what = "Keys and values that one layer's forward pass moves, in rows (one token of one head)"
    figure.suptitle(wrapped(what, int(12.5 * panel_width * len(panels))), fontsize=9)
    return image(figure, kind)
