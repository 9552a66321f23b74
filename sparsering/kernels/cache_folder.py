"""Where compiled kernels and measured choices are kept between runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$SPARSERING_CACHE`, else `sparsering` in the user's cache folder; it need not exist."""
    if own := os.environ.get("SPARSERING_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsering"
