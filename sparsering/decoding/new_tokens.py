"""The new tokens of a step, checks of their number and dtype, and results for padding."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..numerics import sum_dtype
from ..patterns.arguments import listed, shortened


class NewTokens(NamedTuple):
    """Query, key and value [B, H, n, D] of the new tokens, and the extras of their call."""

    query: Tensor
    key: Tensor
    value: Tensor
    extras: Mapping[str, Any]

    def first(self, n: int) -> "NewTokens":
        """Returns the first `n` of the tokens."""
        query, key, value, extras = self
        if extras["sink"] is not None and extras["sink"].shape[2] > 1:
            extras = {**extras, "sink": extras["sink"][:, :, :n]}
        return NewTokens(query[:, :, :n], key[:, :, :n], value[:, :, :n], extras)

    def of_entries(self, entries: Tensor) -> "NewTokens":
        """Returns the tokens of some batch entries."""
        query, key, value, extras = self
        extras = {name: x[entries] if isinstance(x, Tensor) else x for name, x in extras.items()}
        return NewTokens(query[entries], key[entries], value[entries], extras)


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


def check_dtype(dtype: torch.dtype | None, key: Tensor) -> None:
    """Raises ValueError if a cache holds keys of another dtype."""
    if dtype not in (None, key.dtype):
        raise ValueError(
            f"the cache holds {dtype}, got keys of {key.dtype}; cast with .to({dtype}), or make "
            "another cache"
        )


def nothing_new(query: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Attention (out, lse) of queries that are all padding: zeros, and -inf."""
    out = query.new_zeros(*query.shape[:3], value_dim)
    return out, out.new_full(query.shape[:3], -torch.inf, dtype=sum_dtype(query))


def with_padding(results: tuple[Tensor, Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Appends rows of padding to (out, lse): zeros, and -inf."""
    if not padding:
        return results
    return pad(results[0], (0, 0, 0, padding)), pad(results[1], (0, padding), value=-torch.inf)
