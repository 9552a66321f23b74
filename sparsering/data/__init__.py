"""Packs documents of any lengths into rows of one length, with hardly any padding."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ground.arguments import INTEGERS, checked_integer, kind_of, shortened
from ..ground.keywords import class_with_hints, with_hints
from ..ground.rows import expand_counts
from ..patterns.algebra import Pattern
from ..patterns.positions import Packed

__all__ = ["PackedRows", "pack"]


@class_with_hints
@dataclass(frozen=True, eq=False)
class PackedRows:
    """R rows of packed documents: a dataset of dictionaries of tensors, for loaders and trainers.

    Row i has `input_ids`, `position_ids`, `labels` [length] and `lengths` [D]. Loaders stack such
    rows; `Packed(batch["lengths"], Causal())` is the pattern of a batch of them.

    Attributes:
        tokens: [R, length] int64, `pad_token` behind the last document.
        position_ids: [R, length] int64, from 0 in each document, and in the padding.
        labels: [R, length] int64: the tokens, -100 at the first token of each document and on
            padding. Models shift labels themselves.
        lengths: [R, D] int64, of documents, then padding, then zeros; each row sums to `length`.
        documents: for each row, which documents it has, in order.
        cut: number of documents longer than a row, which stand in several pieces.
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    lengths: Tensor
    documents: list[tuple[int, ...]]
    cut: int

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index], self.position_ids[index], self.labels[index], self.lengths[index]
        return dict(zip(("input_ids", "position_ids", "labels", "lengths"), row, strict=True))

    def pattern(self, inner: Pattern) -> Pattern:
        """Returns `Packed(lengths, inner)`: the inner pattern in each document of all rows."""
        return Packed(self.lengths, inner)  # type: ignore[arg-type]  # a mixture gives a mixture


@with_hints()
def pack(
    documents: Iterable[Sequence[int] | Tensor],
    length: int,
    *,
    pad_token: int = 0,
    seed: int | None = None,
) -> PackedRows:
    """Packs documents into rows of one length, each into the fullest row that has room for it.

    A document longer than a row is cut into pieces, which are documents of their own. No other
    document is cut. Every token stands once.

    Args:
        documents: lists of ints or 1-D integer tensors, at least one token each.
        length: tokens of a row.
        pad_token: token behind a row's last document.
        seed: shuffles the documents first; default: they are placed in the given order.

    Returns: the rows. Equal arguments give equal rows.

    Raises: ValueError for an empty document, one that is not of integers, or a length below 1.

    Cost: O(tokens), and a binary search for each document.

    Example:
        >>> rows = pack([[1, 2, 3], [4, 5, 6, 7], [8]], 4)
        >>> rows.tokens.tolist(), rows.lengths.tolist()
        ([[1, 2, 3, 8], [4, 5, 6, 7]], [[3, 1], [4, 0]])
    """
    length = checked_integer("length", length, 1)
    texts = [_tokens(number, x) for number, x in enumerate(documents)]
    order: Sequence[int] = range(len(texts))
    if seed is not None:
        generator = torch.Generator().manual_seed(checked_integer("seed", seed, 0))
        order = torch.randperm(len(texts), generator=generator).tolist()
    rows: list[list[tuple[int, Tensor]]] = []  # for each row, its pieces: (document, tokens)
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending, of rows that are not full
    for number in order:
        for piece in texts[number].split(length):
            place = bisect_left(room, (len(piece), 0))
            free, row = room.pop(place) if place < len(room) else (length, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append((number, piece))
            if free > len(piece):
                insort(room, (free - len(piece), row))
    sizes = [[len(piece) for _, piece in row] for row in rows]
    filled = torch.ones(len(rows), length, dtype=torch.bool)
    for free, row in room:
        sizes[row].append(free)
        filled[row, length - free :] = False
    most = max(map(len, sizes), default=0)
    lengths = torch.tensor([row + [0] * (most - len(row)) for row in sizes], dtype=torch.int64)
    lengths = lengths.view(len(rows), most)
    positions = expand_counts(lengths.flatten())[1].view(len(rows), length)
    tokens = torch.full((len(rows), length), checked_integer("pad_token", pad_token, None))
    pieces = [piece for row in rows for _, piece in row]
    if pieces:
        tokens[filled] = torch.cat(pieces)
    labels = torch.where(filled & (positions > 0), tokens, -100)
    numbers, cut = [tuple(i for i, _ in row) for row in rows], sum(len(x) > length for x in texts)
    return PackedRows(
        tokens=tokens,
        position_ids=positions,
        labels=labels,
        lengths=lengths,
        documents=numbers,
        cut=cut,
    )


def _tokens(number: int, document: object) -> Tensor:
    """Returns a document as int64 [n] on the CPU; raises ValueError for an invalid one."""
    x = document
    if isinstance(x, Sequence) and not isinstance(x, str | bytes):
        with suppress(TypeError, ValueError, RuntimeError):  # floats give a tensor of floats
            x = torch.tensor(x)
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS or x.dim() != 1 or not len(x):
        got = kind_of(x) if isinstance(x, Tensor) else shortened(repr(x))
        raise ValueError(
            "documents must be lists of ints or 1-D integer tensors, at least one token each, got "
            f"{got} for document {number}; tokenizer(text).input_ids makes a list"
        )
    return x.detach().to("cpu", torch.int64)
