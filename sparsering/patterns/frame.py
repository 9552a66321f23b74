"""Frames: the lengths and heads that a pattern is compiled for."""

from typing import NamedTuple

from torch import Tensor

from ..ground.arguments import MOST_TOKENS, checked_integer

Restarts = tuple[tuple[int, ...], tuple[int, ...]]
"""(query lengths, key lengths) of adjacent documents, in each of which positions restart."""

MOST_HEADS = 1 << 20
"""The largest number of heads; it bounds memory, since a layout may have a table per head."""


class Frame(NamedTuple):
    """Lengths and heads that a pattern is compiled for, and the position of the first query."""

    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    q_start: int

    @classmethod
    def build(
        cls, q_len: int, kv_len: int | None, heads: int, kv_heads: int | None, q_start: int | None
    ) -> "Frame":
        kv_len = q_len if kv_len is None else kv_len
        kv_heads = heads if kv_heads is None else kv_heads
        values = (q_len, kv_len, heads, kv_heads)
        q_len, kv_len, heads, kv_heads = (
            checked_integer(name, value, 0, MOST_HEADS if "heads" in name else MOST_TOKENS)
            for name, value in zip(cls._fields, values, strict=False)
        )
        if heads % kv_heads if kv_heads else heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {heads} and "
                f"{kv_heads}; each key/value head serves an equal group of query heads"
            )
        q_start = kv_len - q_len if q_start is None else q_start
        q_start = checked_integer("q_start", q_start, -MOST_TOKENS)
        return cls(q_len, kv_len, heads, kv_heads, q_start)

    def inside(self, p: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Clamps positions into the sequence, because tiles may end past it."""
        last_query, last_key = self.q_start + max(0, self.q_len - 1), max(0, self.kv_len - 1)
        return p.clamp(self.q_start, last_query), k.clamp(0, last_key)

    def of_document(self, q_len: int, kv_len: int) -> "Frame":
        """Returns the frame of one document.

        Its last query stands at the position of its last key.
        """
        return self._replace(q_len=q_len, kv_len=kv_len, q_start=kv_len - q_len)

    def of_documents(self, q_lengths: Tensor, kv_lengths: Tensor) -> "Frame":
        """Returns a frame as long as the longest of some documents, lengths [documents].

        Only masks that ignore lengths may read it, because documents have different lengths.
        """
        longest = int(kv_lengths.max())
        return self.of_document(longest - int((kv_lengths - q_lengths).min()), longest)

    def kv_head(self, head: int) -> int:
        return head * self.num_kv_heads // max(1, self.num_heads)
