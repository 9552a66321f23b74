"""Builds figures and image files, without a display and without matplotlib's global state."""

import io
import textwrap
from pathlib import Path
from typing import Any

from ..ground.commands import install

SPARSE, DENSE, GREY = "#1f6f8b", "#d1603d", "#8a8f98"
KINDS = ("png", "svg")  # endings of file names, and formats of images


def require_matplotlib() -> None:
    """Raises ImportError, with the command to install it, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(f"drawings need matplotlib; {install('plots')}") from None


def kind_of(path: Path) -> str:
    """Returns "png" or "svg" by the ending of a file name; ValueError for another ending."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise ValueError(f"--out must name a .png or .svg file, got {path}")
    return kind


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure; `width` and `height` are inches."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def image(figure: Any, kind: str = "png") -> bytes:
    """Converts a figure to the bytes of a file of `kind` "png" or "svg".

    Equal figures give equal bytes. Text in an SVG stays text, which can be searched and read aloud.
    """
    import matplotlib

    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 160}
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sparsering"}):
        figure.savefig(buffer, format=kind, bbox_inches="tight", pad_inches=0.1, **options)
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
