"""A picture of a ring: who sends what to whom."""

from collections.abc import Sequence

from torch import Tensor

from .figure import new_figure, png, wrapped


def traffic_png(panels: Sequence[tuple[str, Tensor, int]]) -> bytes:
    """Draws who sends what to whom in a ring: senders downwards, receivers to the right.

    Darker where more moves, all panels alike.

    Args:
        panels: (caption, [receiver, sender] rows of keys and values that move as `RingPlan.tokens`
            counts them, bytes of a row).

    Raises: ImportError without matplotlib.
    """
    figure = new_figure(4.8 * len(panels), 4.9)
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
        axes.set_title(f"{wrapped(caption, 60)}\n{total:,} rows, {size}", fontsize=8.5)
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
    return png(figure)
