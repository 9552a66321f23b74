"""Masks that are defined by positions: windows, global tokens, LongNet's branches, documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ground.arguments import (
    MOST_TOKENS,
    checked_flag,
    checked_integer,
    checked_integers,
    freeze_integer,
    freeze_integers,
    freeze_lengths,
    is_traced,
    per_entry,
    shortened,
)
from ..ground.keywords import class_with_hints, with_hints
from .algebra import And, Frame, Mask, Mixture, Pattern
from .document_runs import LengthsFrom, looks_like_ids

MOST_DILATION = 1 << 31


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Full(Mask):
    """Every query sees every key."""

    asks_frame = False

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return (p == p) & (k == k)


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Causal(Mask):
    """A query sees the keys up to its own position: k <= p."""

    asks_frame = False

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return k <= p


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class PooledCausal(Mask):
    """A query at position p sees pooled key c if the key's last token is at p or earlier.

    `pool_blocks(x, size, stride)` computes the keys. Query positions count tokens, not pooled keys,
    so a call needs `q_start`: 0 for a whole sequence. The first size - 1 queries see no key.

    Example: `attention(query, *(pool_blocks(x, 32, 16) for x in (key, value)), PooledCausal(32,
    16), q_start=0)`.

    Source: NSA (arXiv 2502.11089), section 3.3.1.
    """

    size: int
    stride: int
    asks_frame = False

    def _validate(self) -> None:
        freeze_integer(self, "size", 1)
        freeze_integer(self, "stride", 1, MOST_DILATION)

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return p >= k * self.stride + (self.size - 1)


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class SlidingWindow(Mask):
    """A query sees `left` keys before it, itself, and `right` keys after it.

    So p - left <= k <= p + right and (p - k) % dilation == 0; None means no bound on that side.

    Example: `SlidingWindow(511)` is causal and sees 512 keys.

    Source: Longformer (arXiv 2004.05150), sections 3.1-3.2.
    """

    left: int | None
    right: int | None = 0
    dilation: int = 1
    asks_frame = False
    _elsewhere = dict.fromkeys(  # hints for argument names of other libraries
        ("window", "window_size", "sliding_window", "size"),
        "left and right do not count the token itself; write left=window - 1 for a window of past "
        "tokens, or left=right=window // 2 for one around the token",
    )

    def _validate(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                freeze_integer(self, name, 0)
        freeze_integer(self, "dilation", 1, MOST_DILATION)

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        pairs = (p - k) % self.dilation == 0
        if self.left is not None:
            pairs = pairs & (k >= p - self.left)
        return pairs if self.right is None else pairs & (k <= p + self.right)


@with_hints()
def ChunkedCausal(size: int) -> And:  # noqa: N802 - named like a mask class, as LongNet
    """Returns causal attention within chunks of `size` tokens, as in Llama 4's local layers."""
    return And((Dilated(checked_integer("ChunkedCausal size", size, 1, MOST_TOKENS), 1), Causal()))


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class GlobalTokens(Mask):
    """The first `count` tokens see all (`rows`), are seen by all (`columns`), or both.

    So (rows and 0 <= p < count) or (columns and k < count).

    Example: `Causal() & (SlidingWindow(511) | GlobalTokens(4))` is a window with 4 sinks.
    """

    count: int
    rows: bool = True
    columns: bool = True
    asks_frame = False

    def _validate(self) -> None:
        freeze_integer(self, "count", 0)
        for name in ("rows", "columns"):
            checked_flag(f"GlobalTokens {name}", getattr(self, name))

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        row = (p >= 0) & (p < (self.count if self.rows else 0))
        return row | (k < (self.count if self.columns else 0))


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Dilated(Mask):
    """One LongNet branch: a query sees a key of its segment if both are on the grid of the head.

    The segment of x is floor(x / segment_length). x is on the grid of kv head h where
    (x mod segment_length) mod dilation_rate == s(h): the grid restarts at each segment. `offset`
    gives s: "head" = h mod r, "block" = floor(h / ceil(H / r)), an int, or one int per kv head,
    modulo r = dilation_rate.

    Source: LongNet (arXiv 2307.02486), equations 3-5 and 13-15; torchscale computes "block".
    """

    segment_length: int
    dilation_rate: int
    offset: str | int | tuple[int, ...] = "head"
    asks_frame = False

    def _validate(self) -> None:
        freeze_integer(self, "segment_length", 1)
        freeze_integer(self, "dilation_rate", 1, MOST_DILATION)
        if isinstance(self.offset, str):
            if self.offset not in ("head", "block"):
                raise ValueError(
                    'Dilated offset must be "head", "block", an int or one int per kv head, '
                    f"got {shortened(repr(self.offset))}"
                )
        elif isinstance(self.offset, Sequence):
            freeze_integers(self, "offset", None, None)
        else:
            freeze_integer(self, "offset", None, None)

    def offset_of(self, kv_head: int, num_kv_heads: int) -> int:
        """Returns the offset s(h) of one kv head, in [0, dilation_rate)."""
        if self.offset == "head":
            return kv_head % self.dilation_rate
        if self.offset == "block":
            return kv_head // -(-num_kv_heads // self.dilation_rate)
        offset = self.offset[kv_head] if isinstance(self.offset, tuple) else int(self.offset)
        return offset % self.dilation_rate

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return replace(self, offset=self.offset_of(frame.kv_head(head), frame.num_kv_heads))

    def check(self, frame: Frame) -> None:
        if isinstance(self.offset, tuple) and len(self.offset) != frame.num_kv_heads:
            raise ValueError(
                f"Dilated offset must hold one int per kv head ({frame.num_kv_heads}), got "
                f'{len(self.offset)}; pass a single int for all heads, or "head"'
            )

    def num_tables(self, frame: Frame) -> int:
        return 1 if isinstance(self.offset, int) or self.dilation_rate == 1 else frame.num_kv_heads

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return self.on_grid(self.offset_of(0, 1), p, k)

    def on_grid(self, s: int | Tensor, p: Tensor, k: Tensor) -> Tensor:
        """Whether p and k lie in one segment, and both at its places s, s + r, s + 2 r, ..."""
        w, r = self.segment_length, self.dilation_rate
        if r == 1:
            return p // w == k // w
        # Positions off the grid get a segment that equals no other, so one comparison is enough.
        p_segment = torch.where(p % w % r == s, p // w, -MOST_TOKENS)
        return p_segment == torch.where(k % w % r == s, k // w, MOST_TOKENS)


@with_hints()
def LongNet(  # noqa: N802 - named like a mask class, since it constructs a pattern
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offset: str | int | tuple[int, ...] = "head",
) -> Mixture | Dilated:
    """The mixture `Dilated(w1, r1, offset) + Dilated(w2, r2, offset) + ...`.

    w1, w2, ... are `segment_lengths`; r1, r2, ... are `dilation_rates`; one of each: a `Dilated`.

    Raises: ValueError if there are not as many lengths as rates, or if both are empty.

    Example: `LongNet((2048, 4096), (1, 2)) & Causal()`.

    Source: LongNet (arXiv 2307.02486), equations 6-10: mixing branches by their softmax
    denominators is one softmax over the multiset union of their keys.
    """
    lengths = checked_integers("LongNet segment_lengths", segment_lengths, 1)
    rates = checked_integers("LongNet dilation_rates", dilation_rates, 1)
    if len(lengths) != len(rates) or not lengths:
        raise ValueError(
            "LongNet needs as many segment_lengths as dilation_rates, at least one, got "
            f"{len(lengths)} and {len(rates)}"
        )
    masks = tuple(Dilated(w, r, offset) for w, r in zip(lengths, rates, strict=True))
    pattern = masks[0] if len(masks) == 1 else Mixture(masks)
    own_offset = "" if masks[0].offset == "head" else f", {masks[0].offset!r}"
    pattern.write_as(f"LongNet({lengths}, {rates}{own_offset})")
    return pattern


Lengths = tuple[int, ...] | tuple[tuple[int, ...], ...] | Tensor
"""Document lengths: one tuple for all batch entries, or one tuple per batch entry.

An int64 tensor, [n] or [B, n], is kept only while a compiler traces; else it becomes tuples.
"""


@class_with_hints
class _InDocuments(Mask):
    """Base class of masks whose first field holds lengths of documents, tree nodes or blocks."""

    lengths: Lengths
    _unit = "document"  # the word for one of them in errors
    _counts = "lengths"  # the word for their numbers of tokens in errors

    @property
    def entries(self) -> tuple[tuple[int, ...], ...]:
        return entries_of(self.lengths)

    @property
    def common_lengths(self) -> tuple[int, ...] | None:
        """The document lengths of every batch entry; None if batch entries differ."""
        return self.entries[0] if len(set(self.entries)) == 1 else None

    @property
    def own_length(self) -> int:
        return min(map(sum, self.entries))

    def ends(self) -> Tensor:
        """Position after the last token of each document, [documents].

        `lengths` must be one tuple.
        """
        return torch.tensor(self.lengths, dtype=torch.int64).cumsum(0)

    def _validate(self) -> None:
        given: Any = self.lengths
        if isinstance(given, LengthsFrom):  # a traced one stays the field, without its lengths
            if not is_traced(given.numbers):
                object.__setattr__(self, "lengths", given.lengths())
                object.__setattr__(self, "_given", {**self._given, "lengths": given})
            return
        try:
            freeze_lengths(self, "lengths")
        except ValueError as error:
            if "must be at least 0" not in str(error):
                raise
            raise ValueError(f"{error}; {self._from_tokens()}") from None

    def _own_batches(self) -> int | None:
        lengths: Any = self._given_or_own("lengths")
        if isinstance(lengths, LengthsFrom):
            return lengths.num_batches
        return len(lengths) if per_entry(lengths) else None

    def check(self, frame: Frame) -> None:
        for number, entry in enumerate(self.entries):
            by_token, total = len(entry) == frame.kv_len, sum(entry)
            of = f" of batch entry {number}" if per_entry(self.lengths) else ""
            if total == frame.kv_len:
                own = self._given_or_own("lengths")
                if by_token and not isinstance(own, LengthsFrom) and looks_like_ids(entry):
                    raise ValueError(
                        f"{self._label} {self._counts}{of} look like ids of {self._unit}s, one for "
                        f"each of {total} tokens; {self._from_tokens()}, or leave out lengths of 0"
                    )
                continue
            way_out = f"give padding a {self._unit} of its own"
            if entry[:1] == (0,) and entry[-1] == frame.kv_len:
                way_out = f"these look like cumulative lengths: {self._from_ends()}"
            elif by_token:
                way_out = f"{self._from_tokens()}, which are one number for each token"
            raise ValueError(
                f"{self._label} {self._counts}{of} must sum to the key length {frame.kv_len}, got "
                f"{total}; {way_out}"
            )
        super().check(frame)  # checks the inner pattern in the frames of the documents

    @property
    def _label(self) -> str:
        return self._name or type(self).__name__

    def _from_ends(self) -> str:
        takes_ends = isinstance(self, Documents | Packed)
        return "from_cu_seqlens takes them" if takes_ends else "pass their differences"

    def _from_tokens(self) -> str:
        name, inner = type(self).__name__, ", pattern" * isinstance(self, Packed)
        return (
            f"{name}.from_ids(ids{inner}) takes ids of documents, "
            f"{name}.from_positions(position_ids{inner}) positions"
        )


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Documents(_InDocuments):
    """A query sees the keys of its own document; a sequence is divided into adjacent documents.

    `lengths`, in tokens, sum to Nk; a length may be 0. A sequence of ints is for all batch entries;
    a sequence of sequences of ints has one per batch entry. An int64 tensor, [n] or [B, n], does
    the same and is data of compiled functions: other lengths of its shape compile nothing again.

    `from_ids`, `from_positions` and `from_cu_seqlens` take the same in other forms.

    Example: `Documents((100, 156))` for 256 tokens.
    """

    lengths: Lengths

    @classmethod
    def from_ids(cls, ids: Tensor, *, most: int | None = None) -> "Documents":
        """Builds a `Documents` from ids of documents, one for each token.

        A run of equal ids is a document. An id that comes back is another document, so ids of
        modalities are not for it. Ids are data of compiled functions: one graph for all rows of a
        shape.

        Args:
            ids: int32 or int64 [N] or [B, N], any numbers, -1 too.
            most: largest number of documents in a row, default any number. Lengths of 0 stand
                behind those of a row with fewer documents.

        Returns: `Documents` of the runs' lengths, to which it is equal.

        Raises: ValueError if `ids` are no such tensor, or a row has over `most` documents.

        Example: `Documents.from_ids(torch.tensor([7, 7, 4]))`.
        """
        return _of(cls, LengthsFrom.checked("ids", ids, most))

    @classmethod
    def from_positions(cls, position_ids: Tensor, *, most: int | None = None) -> "Documents":
        """Builds a `Documents` from position ids, which restart in each document.

        A document begins at each token whose position is not the one before plus 1.

        Args:
            position_ids: int32 or int64 [N] or [B, N].
            most: as in `from_ids`.

        Returns: `Documents` of the documents' lengths, to which it is equal.

        Raises: ValueError if they are no such tensor, or a row has over `most` documents.

        Example: `Documents.from_positions(torch.tensor([0, 1, 0]))`.
        """
        return _of(cls, LengthsFrom.checked("positions", position_ids, most))

    @classmethod
    def from_cu_seqlens(cls, cu: Tensor) -> "Documents":
        """Builds a `Documents` from cumulative lengths: 0, then the end of each document.

        Args:
            cu: int32 or int64 [n + 1], ascending from 0 to Nk; they are data of compiled functions.

        Returns: `Documents` of their differences, to which it is equal.

        Raises: ValueError if they are no such tensor, do not begin with 0, or fall.

        Example: `Documents.from_cu_seqlens(torch.tensor([0, 100, 256]))`.
        """
        return _of(cls, LengthsFrom.checked("cu_seqlens", cu))

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return Documents(self.entries[batch]) if per_entry(self.lengths) else self

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        ends = self.ends()
        same = torch.searchsorted(ends, p, right=True) == torch.searchsorted(ends, k, right=True)
        return same & (p >= 0) & (k < frame.kv_len)


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Packed(_InDocuments):
    """A pattern inside each document, where positions restart at 0.

    `lengths` are as in `Documents`. Each document is a whole sequence for the inner pattern (Nq =
    Nk = its length). Packed of a mixture is a mixture. If batch entries have different documents,
    tiles may cross the ends of documents.

    Example: `Packed((100, 156), LongNet((32, 64), (1, 2)) & Causal())`.
    """

    lengths: Lengths
    pattern: Mask

    def __new__(cls, lengths: Lengths, pattern: Pattern) -> Any:  # `Packed` or a `Mixture`
        if isinstance(pattern, Mixture):
            return Mixture(tuple(cls(lengths, mask) for mask in pattern.branches))
        return super().__new__(cls)

    @classmethod
    def from_ids(cls, ids: Tensor, pattern: Pattern, *, most: int | None = None) -> Any:
        """Builds a `Packed` from ids of documents, one for each token.

        A run of equal ids is a document. An id that comes back is another document, so ids of
        modalities are not for it. Ids are data of compiled functions: one graph for all rows of a
        shape.

        Args:
            ids: int32 or int64 [N] or [B, N], any numbers, -1 too.
            pattern: mask or mixture inside each document.
            most: largest number of documents in a row, default any number. Lengths of 0 stand
                behind those of a row with fewer documents.

        Returns: `Packed` of the runs' lengths, to which it is equal.

        Raises: ValueError if `ids` are no such tensor, or a row has over `most` documents.

        Example: `Packed.from_ids(torch.tensor([7, 7, 4]), Causal())`.
        """
        return _of(cls, LengthsFrom.checked("ids", ids, most), pattern)

    @classmethod
    def from_positions(
        cls, position_ids: Tensor, pattern: Pattern, *, most: int | None = None
    ) -> Any:
        """Builds a `Packed` from position ids, which restart in each document.

        A document begins at each token whose position is not the one before plus 1.

        Args:
            position_ids: int32 or int64 [N] or [B, N].
            pattern: mask or mixture inside each document.
            most: as in `from_ids`.

        Returns: `Packed` of the documents' lengths, to which it is equal.

        Raises: ValueError if they are no such tensor, or a row has over `most` documents.

        Example: `Packed.from_positions(torch.tensor([0, 1, 0]), Causal())`.
        """
        return _of(cls, LengthsFrom.checked("positions", position_ids, most), pattern)

    @classmethod
    def from_cu_seqlens(cls, cu: Tensor, pattern: Pattern) -> Any:
        """Builds a `Packed` from cumulative lengths: 0, then the end of each document.

        Args:
            cu: int32 or int64 [n + 1], ascending from 0 to Nk; they are data of compiled functions.
            pattern: mask or mixture inside each document.

        Returns: `Packed` of their differences, to which it is equal.

        Raises: ValueError if they are no such tensor, do not begin with 0, or fall.

        Example: `Packed.from_cu_seqlens(torch.tensor([0, 100, 256]), Causal())`.
        """
        return _of(cls, LengthsFrom.checked("cu_seqlens", cu), pattern)

    def _validate(self) -> None:
        check_inner("Packed", self.pattern)
        super()._validate()

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        lengths = self.entries[batch] if per_entry(self.lengths) else self.lengths
        return Packed(lengths, self.pattern.at(batch, head, frame))

    def _frames(self, frame: Frame) -> Iterator[Frame]:
        for length in {length for entry in self.entries for length in entry if length}:
            yield frame.of_document(length, length)

    def _components(self) -> tuple[Mask, ...]:
        return (self.pattern,)

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        return holds_in_documents(self.pattern, p, k, lengths, lengths, frame)


def _of(cls: Any, lengths: LengthsFrom, *pattern: Pattern) -> Any:
    """Calls `cls(lengths, *pattern)` with a `LengthsFrom`, which its type hints leave out.

    They leave it out because they are for users.
    """
    return cls(lengths, *pattern)


def intersection(masks: Sequence[Mask]) -> Mask:
    """Joins masks by `&`; returns `Full()` if there is none, and a single mask unchanged."""
    return And(tuple(masks)) if len(masks) > 1 else masks[0] if masks else Full()


def entries_of(lengths: Lengths) -> tuple[tuple[int, ...], ...]:
    """Returns document lengths, a tuple for each batch entry; only one if all entries share it."""
    return lengths if per_entry(lengths) else (lengths,)  # type: ignore[return-value]


def check_inner(name: str, pattern: object) -> None:
    """Raises TypeError if the inner pattern of a `Packed`, `Varlen` or `Tree` is no mask."""
    if not isinstance(pattern, Mask):
        raise TypeError(
            f"{name} needs a pattern for each document, got {type(pattern).__name__}; for example "
            "Causal()"
        )


def holds_in_documents(
    pattern: Mask, p: Tensor, k: Tensor, q_lengths: Tensor, kv_lengths: Tensor, frame: Frame
) -> Tensor:
    """Returns bool, True where p and k lie in one document and `pattern` holds there.

    `Packed` and `Varlen` call it with positions p and k in the whole sequence, which broadcast, and
    lengths [documents]. Inside a document, positions restart and the last query is at the last key.
    """
    if not kv_lengths.any():
        return (p != p) | (k != k)
    q_ends, kv_ends = q_lengths.cumsum(0), kv_lengths.cumsum(0)
    p_document = torch.searchsorted(q_ends, p, right=True)
    k_document = torch.searchsorted(kv_ends, k, right=True)
    inside = (p_document == k_document) & (p >= 0) & (k >= 0) & (k < frame.kv_len)
    most = len(kv_lengths) - 1
    p_document, k_document = p_document.clamp(max=most), k_document.clamp(max=most)
    p, k = p - (q_ends - kv_lengths)[p_document], k - (kv_ends - kv_lengths)[k_document]
    if not pattern.asks_frame:
        return inside & pattern.holds(p, k, frame.of_documents(q_lengths, kv_lengths))
    result = torch.zeros(inside.shape, dtype=torch.bool)
    pair = torch.nonzero(inside.flatten())[:, 0]
    scale = int(kv_lengths.max()) + 1  # one integer then encodes both lengths of a document
    kind = (q_lengths * scale + kv_lengths)[k_document.expand(inside.shape).flatten()[pair]]
    if len(kind) and kind.min() < kind.max():  # sort, to evaluate equal lengths together
        kind, order = kind.sort(stable=True)
        pair = pair[order]
    distinct, counts = kind.unique_consecutive(return_counts=True)
    for number, part in zip(distinct.tolist(), pair.split(counts.tolist()), strict=True):
        query, key = (x.expand(inside.shape).flatten()[part] for x in (p, k))
        of_kind = pattern.holds(query, key, frame.of_document(*divmod(number, scale)))
        result.view(-1)[part] = of_kind.expand(len(part))
    return result
