"""Builds figures as PNG bytes, without a display and without matplotlib's global state."""

import io
import textwrap
from typing import Any

SPARSE, DENSE, GREY = "#1f6f8b", "#d1603d", "#8a8f98"


def require_matplotlib() -> None:
    """Raises ImportError, with the command to install it, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("drawings need matplotlib; pip install 'sparsering[plots]'") from None


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure; `width` and `height` are inches."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """Converts a figure to the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, bbox_inches="tight", pad_inches=0.1)
    return buffer.getvalue()


def wrapped(text: str, width: int) -> str:
    """Breaks a text between words into lines of about `width` characters."""
    return textwrap.fill(text, width + 1, break_long_words=False, break_on_hyphens=False)


def short_count(count: int) -> str:
    """Formats a count in powers of 1024, such as 1.5K."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= unit and count % (unit // 4) == 0:
            return f"{count / unit:g}{letter}"
    return f"{count:,}"
