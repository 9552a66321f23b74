"""Lifetimes of keys: the last query that visits each key, computed without a layout.

    last_visits(Causal() & SlidingWindow(511), 0, 4)       ->  [tensor([511, 512, 513, 514])]

In a sequence without end, visits become periodic in the query position. So a key that is visited
in one whole period, after the pattern became periodic, is visited forever.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import MOST_TOKENS, checked_integer, shortened
from ..ground.once import one_thread, unseen
from ..patterns.algebra import And, Frame, Mask, Mixture, Or, Pattern, check_fits
from ..patterns.positions import Full, Packed
from ..patterns.selected import SelectedBlocks
from ..patterns.tree import Tree
from .joints import AnyOf
from .leaves import EMPTY, Condition, Repeats
from .leaves import FOREVER as FOREVER
from .lower import condition
from .terms import distinct_heads
from .tiles import Axis, TilePairs

_KEYS_AT_A_TIME = 1 << 16
_TILE, _SPLIT = 1 << 10, 1 << 10  # keys in the smallest tile; parts of each larger tile
_MOST_POSITION = 1 << 60
_MOST_KEYS = 1 << 32  # most keys that are examined one by one, which takes 32 GB
_MOST_PERIOD = 1 << 40  # longest period of a pattern, in queries
_MOST_SHIFT = 1 << 26  # most positions that `cache_bound` examines in an endless sequence


@one_thread()
def last_visits(
    pattern: Pattern,
    start: int,
    stop: int,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    max_length: int | None = None,
) -> list[Tensor]:
    """Returns the last query position at `start` or later that visits each key in [start, stop).

    It is the last visit by any query head of the kv head, in any branch or batch entry.
    `SelectedBlocks` counts as `Full`, since later selections are not known.

    Returns: int64 [stop - start] for each kv head; -1 for no visit, `FOREVER` if they never end.

    Cost: O(stop - start) time and memory for each distinct mask.
    """
    start = checked_integer("start", start, 0)
    stop = checked_integer("stop", stop, start)
    with unseen(pattern):
        sequence = _sequence(pattern, num_heads, num_kv_heads, max_length)
        sequence.check_position("stop", stop)
        of_mask = {mask: sequence.last(rule, start, stop) for mask, rule in sequence.rules.items()}
        parts = ([of_mask[mask] for mask in masks] for masks in sequence.masks)
        return [_latest(part, stop - start) for part in parts]


@one_thread()
def live_keys(
    pattern: Pattern, length: int, num_heads: int, num_kv_heads: int | None, max_length: int | None
) -> list[Tensor]:
    """Implements `Pattern.live_keys`; its arguments are documented there."""
    length = checked_integer("length", length, 0)
    with unseen(pattern):
        sequence = _sequence(pattern, num_heads, num_kv_heads, max_length)
        sequence.check_position("length", length)
        of_mask = {}
        for mask, rule in sequence.rules.items():
            parts = [torch.zeros(0, dtype=torch.int64)]
            for key in sequence.keys_seen_after(length, rule):
                parts.append(key[sequence.last_of(rule, key, length) >= 0])
            of_mask[mask] = torch.cat(parts)
        return [_union([of_mask[mask] for mask in masks]) for masks in sequence.masks]


@one_thread()
def cache_bound(
    pattern: Pattern, num_heads: int, num_kv_heads: int | None, max_length: int | None
) -> int | None:
    """Implements `Pattern.cache_bound`; its arguments are documented there."""
    with unseen(pattern):
        sequence = _sequence(pattern, num_heads, num_kv_heads, max_length)
        repeats = sequence.shifted() if sequence.length is None else Repeats(sequence.length, 0)
        stop = repeats.first + repeats.period
        of_mask = {mask: sequence.last(rule, 0, stop) for mask, rule in sequence.rules.items()}
        most = 0
        for masks in sequence.masks:
            last = _latest([of_mask[mask] for mask in masks], stop)
            bound = sequence.most_ever(last, repeats) if repeats.period else _most_live(last)
            if bound is None:
                return None
            most = max(most, bound)
        return most


class _Sequence(NamedTuple):
    """A pattern over a sequence of a given length, or without end."""

    pattern: Pattern  # for error messages
    length: int | None  # tokens of the sequence; None if it has no end
    frame: Frame  # lengths and heads; a sequence without end has `MOST_TOKENS` tokens in it
    masks: list[list[Mask]]  # for each kv head, the masks of its query heads and branches
    rules: dict[Mask, Condition]  # each mask, converted to a condition (leaves.py)

    def check_position(self, name: str, position: int) -> None:
        if self.length is not None and position > self.length:
            raise ValueError(
                f"{name} must be at most the {self.length} tokens of the sequence, got {position}; "
                f"pass a larger max_length, or a pattern of more tokens than "
                f"{shortened(str(self.pattern))}"
            )

    def needs_length(self, got: str) -> ValueError:
        """Returns the error for an endless pattern without a short period; `got` describes it."""
        return ValueError(
            f"expected a pattern with a short period, since the sequence has no end, got {got}; "
            f"pass max_length, the most tokens of the sequence, for {shortened(str(self.pattern))}"
        )

    def too_many(self, of: str, length: int, way_out: str = "") -> ValueError:
        """Returns the error for keys that would take an hour to look at."""
        return ValueError(
            f"expected {of} in which at most {_MOST_KEYS:,} keys are looked at, got {length:,} "
            f"tokens of {shortened(str(self.pattern))}; pass fewer tokens{way_out}"
        )

    def last(self, rule: Condition, start: int, stop: int) -> Tensor:
        """Returns the last query from `start` on that visits each key in [start, stop), or -1."""
        if stop - start > _MOST_KEYS:
            raise self.too_many(
                "a sequence",
                stop - start,
                "; without max_length, a pattern that repeats is answered for every length",
            )
        keys = torch.arange(start, stop)
        for part in keys.split(_KEYS_AT_A_TIME) if len(keys) else ():
            part.copy_(self.last_of(rule, part, start))
        return keys

    def last_of(self, rule: Condition, k: Tensor, first_query: int) -> Tensor:
        """Returns for each key of `k` (ascending) the last query that sees it, or -1.

        It is -1 if no query does, and FOREVER if there is always a later one.
        """
        if self.length is not None:
            return self._descend(rule, k, self.length - 1, first_query)
        if (repeats := rule.future(int(k[-1]) + 1)) is None:
            raise self.needs_length("a mask whose period is not known")
        first, period, empty = repeats
        if first > _MOST_POSITION or period > _MOST_PERIOD:
            raise self.needs_length(f"a period of {period} tokens, from position {first} on")
        if empty:
            return self._descend(rule, k, first - 1, first_query)
        first = max(first, first_query)
        last = self._descend(rule, k, first + period - 1, first_query)
        return last.masked_fill_(last >= first, FOREVER)

    def _descend(self, rule: Condition, k: Tensor, most: int, least: int) -> Tensor:
        """Returns the last query in [least, most] that sees each key, or -1 if none does."""
        last = rule.before(k, torch.full_like(k, most), self.frame)
        pending = torch.nonzero((last < most) & (last >= least) & (not rule.settled))[:, 0]
        while len(pending):  # go on for keys whose `last` is only an upper bound so far
            above = last[pending]
            below = last[pending] = rule.before(k[pending], above, self.frame)
            pending = pending[(below < above) & (below >= least)]
        return last.masked_fill_(last < least, -1)

    def keys_seen_after(self, length: int, rule: Condition) -> Iterator[Tensor]:
        """Yields the keys below `length` that later queries may see, one tensor at a time."""
        end = FOREVER if self.length is None else self.length
        begin, size = torch.zeros(min(1, length, end - length), dtype=torch.int64), _TILE
        while size < length:
            size *= _SPLIT
        while size > _TILE and len(begin):
            size //= _SPLIT
            kept, count = [begin[:0]], 0
            for part in begin.split(_KEYS_AT_A_TIME // _SPLIT):
                kept.append(self._seen_tiles(part, size, length, end, rule))
                count += len(kept[-1])
                if size > _TILE and count * _SPLIT * _TILE > _MOST_KEYS:
                    raise self.too_many("a length", length)
            begin = torch.cat(kept)
        for tiles in begin.split(_KEYS_AT_A_TIME // _TILE):
            key = (tiles[:, None] + torch.arange(_TILE)).flatten()
            if len(key := key[key < length]):
                yield key

    def _seen_tiles(
        self, begin: Tensor, size: int, length: int, end: int, rule: Condition
    ) -> Tensor:
        """Cuts tiles of keys into smaller ones; returns the starts of those that may be seen.

        `begin` has the first key of each tile. Returns the first keys of the small tiles that
        queries in [length, end) may visit by `rule`.
        """
        begin = (begin[:, None] + size * torch.arange(_SPLIT)).flatten()
        begin = begin[begin < length]
        none, stop = torch.zeros_like(begin), (begin + size).clamp(max=length)
        queries = Axis(
            step=1, residue=none, start=none + length, stop=none + end, last=none + (end - 1)
        )
        keys = Axis(step=1, residue=none, start=begin, stop=stop, last=stop - 1)
        status = rule.status(TilePairs.of_sequence(queries, keys, self.frame.kv_len))
        return begin[status != EMPTY]

    def shifted(self) -> Repeats:
        """Returns by how much query and key may both move so that the same pairs attend."""
        if (repeats := AnyOf(self.rules.values()).shifted()) is None:
            raise self.needs_length("a mask whose period is not known")
        first, period, _ = repeats
        if first + period > _MOST_SHIFT:
            raise self.needs_length(f"a period of {period} tokens, from position {first} on")
        return repeats

    def most_ever(self, last: Tensor, repeats: Repeats) -> int | None:
        """Returns the most keys that are live at once; None if there is no bound.

        `last` has the last visit of each key below first + period.
        """
        first, period = repeats.first, repeats.period
        early, later = last[:first], last[first:]
        if (later == FOREVER).any():
            return None
        age = (later - torch.arange(first, first + period)).clamp(min=0)
        # Each later key has a copy in every period. If it lives n periods, n copies live at once.
        whole, rest = age // period, age % period
        ends = torch.bincount(torch.arange(period) + rest, minlength=2 * period)
        change = (torch.arange(2 * period) < period).long() - ends
        wave = change.cumsum(0).view(2, period).sum(0)  # live keys beyond `whole`, by place
        ever = int((early == FOREVER).sum() + whole.sum() + wave.max())
        passing = early[early < FOREVER]
        until = max(first, int(passing.max()) if len(passing) else 0)
        if until > _MOST_SHIFT:
            raise self.needs_length(f"a pattern that begins to repeat after {until} positions")
        copy = torch.arange(-(-(until - first) // period))[:, None]
        alike = torch.where(later >= 0, later + period * copy, -1).flatten()[: until - first]
        return max(ever, _most_live(torch.cat((early, alike))))


def _sequence(
    pattern: Pattern, num_heads: int, num_kv_heads: int | None, max_length: int | None
) -> _Sequence:
    """Checks that a pattern fits the heads and the length, and converts its masks to conditions.

    A selection counts as `Full`, since later selections are unknown. `max_length` is the number of
    tokens; None stands for the length that the pattern requires, or for no end if it requires none.
    """
    plain = _without_selection(pattern)
    length = own_length(plain, max_length)
    frame = Frame.build(MOST_TOKENS if length is None else length, None, num_heads, num_kv_heads, 0)
    check_fits(plain, frame)
    masks: list[dict[Mask, None]] = [{} for _ in range(frame.num_kv_heads)]
    for branches, places in distinct_heads(plain, frame).items():
        for _, head in places:
            masks[frame.kv_head(head)].update(dict.fromkeys(branches))
    sequence = _Sequence(
        pattern=pattern,
        length=length,
        frame=frame,
        masks=[list(of_head) for of_head in masks],
        rules={},
    )
    for mask in dict.fromkeys(itertools.chain(*masks)):
        if length is None and mask.asks_frame:
            raise sequence.needs_length("a mask that depends on the sequence's length")
        sequence.rules[mask] = condition(mask, frame)
    return sequence


def _without_selection(pattern: Pattern) -> Pattern:
    """Replaces each selection by `Full`, since any query may still select any key."""
    match pattern:
        case SelectedBlocks():
            return Full()
        case And(masks) | Or(masks) | Mixture(masks):
            return type(pattern)(tuple(map(_without_selection, masks)))  # type: ignore[arg-type]
        case Packed(_, inner) | Tree(_, _, inner, _):
            return replace(pattern, pattern=_without_selection(inner))  # type: ignore[arg-type]
    return pattern


def own_length(pattern: Pattern, max_length: int | None = None) -> int | None:
    """Returns `max_length` if it is given, else the length that the pattern requires, else None."""
    if max_length is not None:
        return checked_integer("max_length", max_length, 0)
    return pattern.own_length


def _latest(parts: list[Tensor], keys: int) -> Tensor:
    """Returns the last query that sees each key under any of several masks; -1 if none does."""
    return reduce(torch.maximum, parts, torch.full((keys,), -1, dtype=torch.int64))


def _union(parts: list[Tensor]) -> Tensor:
    """Returns the keys that are in any part, ascending."""
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0].clone()  # the caller may write to it, and heads share the original
    return torch.cat(filled).unique() if filled else torch.zeros(0, dtype=torch.int64)


def _most_live(last: Tensor) -> int:
    """Returns the most keys in use at once; `last` [keys] has the last query of each key, or -1."""
    key = torch.arange(len(last))
    living = last > key
    born, dead = key[living] + 1, last[living].clamp(max=len(last)) + 1
    born, dead = (torch.bincount(x, minlength=len(last) + 2) for x in (born, dead))
    return int((born - dead).cumsum(0)[:-1].max())
