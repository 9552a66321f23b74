"""Checks of a cache's arguments, and results for tokens that are padding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import sum_dtype
from ..patterns.arguments import listed, shortened


def checked_lengths(lengths: Tensor | Sequence[int], entries: int, most: int) -> list[int]:
    """Returns the new tokens per entry; ValueError unless each entry has a number up to `most`."""
    new: list[int] = listed("lengths", lengths)
    fits = isinstance(new, Sequence) and len(new) == entries
    if not fits or not all(type(n) is int and 0 <= n <= most for n in new):
        raise ValueError(
            f"lengths must be {entries} ints from 0 to {most}, the new tokens of each entry, got "
            f"{shortened(repr(new))}; leave it out where all are new"
        )
    return list(new)


def check_dtype(held: torch.dtype | None, key: Tensor) -> None:
    """Raises ValueError where a cache holds keys of another dtype."""
    if held not in (None, key.dtype):
        raise ValueError(
            f"the cache holds {held}, got keys of {key.dtype}; cast with .to({held}), or make "
            "another cache"
        )


def nothing_new(query: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Attention (out, lse) of queries that are all padding: zeros, and -inf."""
    out = query.new_zeros(*query.shape[:3], value_dim)
    return out, out.new_full(query.shape[:3], -torch.inf, dtype=sum_dtype(query))


def with_padding(found: tuple[Tensor, Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Appends rows of padding to (out, lse): zeros, and -inf."""
    if not padding:
        return found
    pad = torch.nn.functional.pad
    return pad(found[0], (0, 0, 0, padding)), pad(found[1], (0, padding), value=-torch.inf)
