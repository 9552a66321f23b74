"""A pattern of each kind, for tests of what holds of all of them, and counts of one shape."""

from typing import Any

from torch import Tensor

from oracles.kinds import KINDS


def one_of_each() -> list[Any]:
    """One pattern or more of every constructor and operator, built anew at each call."""
    return [pattern for kind in KINDS.values() for pattern in kind.examples()]


INDICES = range(len(one_of_each()))
NAMES = [repr(pattern)[:60] for pattern in one_of_each()]


def expanded(dense: Tensor, batch: int, num_heads: int, q_len: int, kv_len: int) -> Tensor:
    """`to_dense`'s [H or 1, Nq, Nk] or [B, H or 1, Nq, Nk] at [B, H, Nq, Nk], the shape checked."""
    assert dense.dim() in (3, 4)
    assert dense.shape[-3] in (1, num_heads)
    assert dense.shape[-2:] == (q_len, kv_len)
    if dense.dim() == 4:
        assert dense.shape[0] == batch
    return dense.expand(batch, num_heads, q_len, kv_len)
