"""Lifetimes of keys: the last query that visits each key, for every pattern, by arithmetic.

    last_visits(Causal() & SlidingWindow(511), 0, 4)       ->  [tensor([511, 512, 513, 514])]

They decide which keys a cache still needs (`live_keys`) and how large it grows (`cache_bound`).
For a sequence without end, queries are examined until the keys that they see repeat; a key that is
visited within one such period is visited forever.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns.algebra import And, Frame, Mask, Mixture, Or, Pattern, check_fits
from ..patterns.arguments import MOST_TOKENS, checked_integer, shortened
from ..patterns.blocks import (
    BlockDilated,
    Blocks,
    BlockWindow,
    BlockwiseMask,
    Dense,
    Hierarchical,
)
from ..patterns.keys import KeyMask
from ..patterns.positions import (
    Causal,
    Dilated,
    Documents,
    Full,
    GlobalTokens,
    Packed,
    PooledCausal,
    SlidingWindow,
    entries_of,
)
from ..patterns.selected import SelectedBlocks
from ..patterns.varlen import Varlen
from ..rows import expand_counts
from .descents import (
    AllOf,
    AnyOf,
    Asked,
    AtDistances,
    Descent,
    FirstKeys,
    FirstQueries,
    InDocuments,
    InSegment,
    ListedBlocks,
    Near,
    NearBlocks,
    Pooled,
    Repeats,
    ValidKeys,
)
from .terms import distinct_kv_heads
from .tiles import Ranges

FOREVER = 1 << 62
"""Value of the last visit of a key that is visited without end."""

_KEYS_AT_A_TIME = 1 << 16
_MOST_POSITION = 1 << 60
_MOST_PERIOD = 1 << 40  # longest period, in queries, of the visits to a key
_MOST_SHIFT = 1 << 26  # positions examined for the bound of an endless sequence


def last_visits(
    pattern: Pattern,
    start: int,
    stop: int,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    max_length: int | None = None,
) -> list[Tensor]:
    """The last query position at `start` or later that visits each key in [start, stop).

    All query heads of a kv head, branches of a mixture and batch entries count. The blocks of
    `SelectedBlocks` are not known beforehand, so it counts as `Full`.

    Returns: int64 [stop - start] for each kv head; -1 where no query visits the key, `FOREVER`
        where visits do not end.

    Raises: ValueError where the pattern depends on a length that is not given, or does not fit.

    Cost: O(stop - start) time and memory for each distinct mask.
    """
    start = checked_integer("start", start, 0)
    stop = checked_integer("stop", stop, start)
    sequence = _sequence(pattern, num_heads, num_kv_heads, max_length)
    sequence.check_position("stop", stop)
    of_mask = {
        mask: sequence.last(descent, start, stop, start)
        for mask, descent in sequence.descents.items()
    }
    nothing = torch.full((stop - start,), -1, dtype=torch.int64)
    return [_latest([of_mask[mask] for mask in masks], nothing) for masks in sequence.masks]


def live_keys(
    pattern: Pattern, length: int, num_heads: int, num_kv_heads: int | None, max_length: int | None
) -> list[Tensor]:
    """Implements `Pattern.live_keys`."""
    length = checked_integer("length", length, 0)
    sequence = _sequence(pattern, num_heads, num_kv_heads, max_length)
    sequence.check_position("length", length)
    of_mask = {}
    for mask, descent in sequence.descents.items():
        parts = [torch.zeros(0, dtype=torch.int64)]
        for key in _keys(descent.keys(length, length)):
            parts.append(key[sequence.last_of(descent, key, length, length) >= 0])
        of_mask[mask] = torch.cat(parts)
    return [_union([of_mask[mask] for mask in masks]) for masks in sequence.masks]


def cache_bound(
    pattern: Pattern, num_heads: int, num_kv_heads: int | None, max_length: int | None
) -> int | None:
    """Implements `Pattern.cache_bound`."""
    sequence = _sequence(pattern, num_heads, num_kv_heads, max_length)
    repeats = sequence.shifted() if sequence.length is None else Repeats(sequence.length, 0)
    stop = repeats.first + repeats.period
    nothing = torch.full((stop,), -1, dtype=torch.int64)
    of_mask = {
        mask: sequence.last(descent, 0, stop, 0) for mask, descent in sequence.descents.items()
    }
    most = 0
    for masks in sequence.masks:
        last = _latest([of_mask[mask] for mask in masks], nothing)
        bound = sequence.most_ever(last, repeats) if repeats.period else _most_live(last)
        if bound is None:
            return None
        most = max(most, bound)
    return most


class _Sequence(NamedTuple):
    """A pattern over a sequence of some length, or without end.

    Attributes:
        pattern: the pattern, for error messages.
        length: in tokens; None: without end.
        masks: for each kv head, the masks whose union its queries see.
        descents: the descent of each of these masks.
    """

    pattern: Pattern
    length: int | None
    masks: list[list[Mask]]
    descents: dict[Mask, Descent]

    def check_position(self, name: str, position: int) -> None:
        """Raises ValueError where the position is past the end."""
        if self.length is not None and position > self.length:
            raise ValueError(
                f"{name} must be at most the {self.length} tokens of the sequence, got {position}; "
                f"pass a larger max_length, or a pattern of more tokens than "
                f"{shortened(str(self.pattern))}"
            )

    def needs_length(self, got: str) -> ValueError:
        return ValueError(
            f"expected a pattern whose pairs repeat without end, got {got}; pass max_length, the "
            f"most tokens that there will be, for {shortened(str(self.pattern))}"
        )

    def last(self, descent: Descent, start: int, stop: int, first_query: int) -> Tensor:
        """Last query at `first_query` or later that visits each key in [start, stop), or -1."""
        found = torch.full((stop - start,), -1, dtype=torch.int64)
        ranges = [(max(low, start), high) for low, high in descent.keys(first_query, stop)]
        for key in _keys(ranges):
            low = int(key[0]) - start
            found[low : low + len(key)] = self.last_of(descent, key, stop, first_query)
        return found

    def last_of(self, descent: Descent, k: Tensor, stop: int, first_query: int) -> Tensor:
        """Last query at `first_query` or later that visits each of the keys k < stop, or -1."""
        if self.length is not None:
            return _descend(descent, k, self.length - 1, first_query)
        repeats = descent.future(stop)
        if repeats is None:
            raise self.needs_length("a mask of which that is not known")
        first, period, empty = repeats
        if first > _MOST_POSITION or period > _MOST_PERIOD:
            raise self.needs_length(f"one of period {period} from {first} on")
        if empty:
            return _descend(descent, k, first - 1, first_query)
        first = max(first, first_query)
        last = _descend(descent, k, first + period - 1, first_query)
        return last.masked_fill_(last >= first, FOREVER)

    def shifted(self) -> Repeats:
        """How pairs repeat when both positions are shifted alike."""
        found = AnyOf(self.descents.values()).shifted() if self.descents else Repeats(0, 1)
        if found is None:
            raise self.needs_length("a mask of which that is not known")
        if found.first + found.period > _MOST_SHIFT:
            raise self.needs_length(
                f"one that repeats every {found.period} positions from {found.first} on"
            )
        return found

    def most_ever(self, last: Tensor, repeats: Repeats) -> int | None:
        """Most keys ever live at once, from last visits of one period of keys; None: unbounded."""
        first, period = repeats.first, repeats.period
        early, later = last[:first], last[first:]
        if (later == FOREVER).any():
            return None
        age = (later - torch.arange(first, first + period)).clamp(min=0)
        whole, rest = age // period, age % period
        ends = torch.bincount(torch.arange(period) + rest, minlength=2 * period)
        change = (torch.arange(2 * period) < period).long() - ends
        wave = change.cumsum(0).view(2, period).sum(0)
        ever = int((early == FOREVER).sum() + whole.sum() + wave.max())
        passing = early[early < FOREVER]
        until = max(first, int(passing.max()) if len(passing) else 0)
        if until > _MOST_SHIFT:
            raise self.needs_length(f"one that begins to repeat after {until} positions")
        copy = torch.arange(-(-(until - first) // period))[:, None]
        alike = torch.where(later >= 0, later + period * copy, -1).flatten()[: until - first]
        return max(ever, _most_live(torch.cat((early, alike))))


def _sequence(
    pattern: Pattern, num_heads: int, num_kv_heads: int | None, max_length: int | None
) -> _Sequence:
    """Checks a pattern and lowers its masks to descents."""
    laid = _without_selection(pattern)
    length = own_length(laid, max_length)
    frame = Frame.build(MOST_TOKENS if length is None else length, None, num_heads, num_kv_heads, 0)
    check_fits(laid, frame)
    masks: list[dict[Mask, None]] = [{} for _ in range(frame.num_kv_heads)]
    for seen, places in distinct_kv_heads(laid, frame).items():
        for _, kv_head in places:
            if kv_head < len(masks):
                masks[kv_head].update(dict.fromkeys(seen))
    sequence = _Sequence(pattern, length, [list(found) for found in masks], {})
    for found in masks:
        for mask in found:
            if length is None and mask.asks_frame:
                raise sequence.needs_length("one that depends on the sequence's length")
            if mask not in sequence.descents:
                sequence.descents[mask] = descent(mask, frame)
    return sequence


def _without_selection(pattern: Pattern) -> Pattern:
    """Replaces each selection in a pattern by `Full`."""
    match pattern:
        case SelectedBlocks():
            return Full()
        case And(masks) | Or(masks) | Mixture(masks):
            return type(pattern)(tuple(map(_without_selection, masks)))  # type: ignore[arg-type]
        case Packed(lengths, inner):
            return Packed(lengths, _without_selection(inner))  # type: ignore[arg-type]
    return pattern


def own_length(pattern: Pattern, max_length: int | None = None) -> int | None:
    """Length of a sequence: `max_length`, else the least that the pattern implies; None: no end."""
    if max_length is not None:
        return checked_integer("max_length", max_length, 0)
    return min(_own_lengths(pattern), default=None)


def _own_lengths(pattern: Pattern) -> set[int]:
    """Lengths in tokens that the parts of a pattern are made for."""
    match pattern:
        case Documents(lengths) | Packed(lengths, _):
            return {sum(entry) for entry in entries_of(lengths)}
        case Varlen(_, kv_lengths, _):
            return {sum(kv_lengths)}
        case KeyMask(table) | Dense(table):
            return {table.shape[-1]}
        case Blocks(active, block_size):
            return {min(active.shape[-2:]) * block_size}
        case And(masks) | Or(masks) | Mixture(masks):
            return {length for mask in masks for length in _own_lengths(mask)}
    return set()


def descent(mask: Mask, frame: Frame) -> Descent:
    """Lowers the mask of one head and batch entry (`Mask.at`) to a descent."""
    match mask:
        case Full():
            return Near(None, None, 1)
        case Causal():
            return Near(None, 0, 1)
        case PooledCausal(size, stride):
            return Pooled(size, stride)
        case SlidingWindow(left, right, dilation):
            return Near(left, right, dilation)
        case GlobalTokens(count, rows, columns):
            keys = FirstKeys(count if columns else 0)
            return AnyOf((FirstQueries(count), keys)) if rows else keys
        case Dilated(length, rate, _):
            return InSegment(length, rate, mask.offset_of(0, 1))
        case BlockDilated(rates, size):
            return AtDistances(size, tuple(sorted({0, *rates, *(-rate for rate in rates)})))
        case BlockWindow(radius, size):
            return NearBlocks(size, 1, radius)
        case Hierarchical():
            levels = mask.in_blocks()
            return AnyOf(NearBlocks(mask.block_size, *level) for level in levels)
        case Documents():
            return _in_documents(mask, Full(), frame)
        case Packed(_, inner):
            return _in_documents(mask.documents, inner, frame)
        case KeyMask(valid):
            return ValidKeys(valid)
        case And(masks):
            return AllOf(descent(part, frame) for part in masks)
        case Or(masks):
            return AnyOf(descent(part, frame) for part in masks)
        case BlockwiseMask():
            return _listed(mask, frame)
    return Asked(mask, frame)


def _in_documents(documents: Documents, inner: Mask, frame: Frame) -> Descent:
    (lengths,) = entries_of(documents.lengths)
    starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    distinct = list(dict.fromkeys(lengths)) if inner.asks_frame else [0]
    frames = (frame._replace(q_len=length, kv_len=length, q_start=0) for length in distinct)
    number = {length: number for number, length in enumerate(distinct)}
    kinds = torch.tensor([number.get(length, 0) for length in lengths], dtype=torch.int64)
    return InDocuments(starts, kinds, tuple(descent(inner, of_kind) for of_kind in frames))


def _listed(mask: BlockwiseMask, frame: Frame) -> Descent:
    rows = -(-frame.q_len // mask.block_size)
    if not rows:
        return FirstKeys(0)
    row, first, last = mask.spans(torch.arange(rows), frame.kv_len)
    last = last.clamp(max=rows - 1)  # there are as many key blocks as query blocks
    span, number = expand_counts((last - first + 1).clamp(min=0))
    row, column = row[span], first[span] + number
    held = mask.blocks_hold(row, column, frame.kv_len)
    return ListedBlocks(mask.block_size, rows, (column * rows + row)[held].unique())


def _descend(descent: Descent, k: Tensor, most: int, least: int) -> Tensor:
    """Last query in [least, most] that pairs with each key, or -1."""
    found = descent.before(k, torch.full_like(k, most))
    if descent.settled:
        return found.masked_fill_(found < least, -1)
    going = torch.nonzero((found < most) & (found >= least))[:, 0]
    while len(going):
        above, key = found[going], k[going]
        below = descent.before(key, above)
        found[going] = below
        going = going[(below < above) & (below >= least)]
    return found.masked_fill_(found < least, -1)


def _keys(ranges: Ranges) -> Iterator[Tensor]:
    """Yields the keys of ranges in chunks."""
    for low, high in ranges:
        for begin in range(low, high, _KEYS_AT_A_TIME):
            yield torch.arange(begin, min(high, begin + _KEYS_AT_A_TIME))


def _latest(parts: list[Tensor], nothing: Tensor) -> Tensor:
    latest = nothing.clone()
    for part in parts:
        torch.maximum(latest, part, out=latest)
    return latest


def _union(parts: list[Tensor]) -> Tensor:
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0].clone()  # several heads may share the original
    return torch.cat(filled).unique() if filled else torch.zeros(0, dtype=torch.int64)


def _most_live(last: Tensor) -> int:
    """Most keys live at once after any number of tokens up to len(last)."""
    key = torch.arange(len(last))
    living = last > key
    born, dead = key[living] + 1, last[living].clamp(max=len(last)) + 1
    change = torch.bincount(born, minlength=len(last) + 2) - torch.bincount(
        dead, minlength=len(last) + 2
    )
    return int(change.cumsum(0)[:-1].max())
