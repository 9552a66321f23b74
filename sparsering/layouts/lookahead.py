"""Finds keys after the end of a call that its queries see; a cache does not have them yet.

first_ahead(BlockCausal(8), 0, 5, sequence)     ->  (0, 5): query 0 sees key 5
next_end(BlockCausal(8), 0, 5, sequence)        ->  8: no query below 8 sees a key from 8 on
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ..ground.arguments import MOST_TOKENS, shortened
from ..ground.once import one_thread
from ..patterns.algebra import And, Frame, Mask, Mixture, Not, Or, Pattern
from ..patterns.per_head import PerHead
from ..patterns.positions import Causal, Packed, SlidingWindow
from ..patterns.tree import Tree
from .cache import layout_cache
from .leaves import EMPTY, Condition
from .lower import condition
from .tiles import Axis, Origin, TilePairs

_TILE, _SPLIT = 1 << 10, 1 << 10  # positions in the smallest tile; parts of each larger tile
_MOST_KEYS = 1 << 20  # keys that are examined one by one in a sequence without end
_MOST_ENDS = 64  # ends that `next_end` tries before it gives up
PAGE = 128
"""Number of queries for which one cached answer says whether any of them sees a later key."""


class Tokens(NamedTuple):
    """The sequence of tokens that a cache is for."""

    total: int | None  # length of the sequence; None if it is not bounded
    num_heads: int
    num_kv_heads: int
    entry: int = 0  # the batch entry whose masks are examined

    @property
    def frame(self) -> Frame:
        length = MOST_TOKENS if self.total is None else self.total
        return Frame.build(length, None, self.num_heads, self.num_kv_heads, 0)


def hides_later_keys(pattern: Pattern) -> bool:
    """Whether the classes in a pattern already show that no query sees a later key.

    It evaluates no pair, and returns False if it does not know.
    """
    match pattern:
        case Causal() | SlidingWindow(_, 0, _):
            return True
        case And(masks=masks):
            return any(map(hides_later_keys, masks))
        case Or(masks=masks) | Mixture(masks=masks):
            return all(map(hides_later_keys, masks))
        case PerHead(patterns):
            return all(map(hides_later_keys, patterns))
        case Packed(_, inner) | Tree(_, _, inner, _):
            return hides_later_keys(inner)
    return False


def first_ahead(
    pattern: Pattern, begin: int, end: int, sequence: Tokens
) -> tuple[int, int] | tuple[()]:
    """Returns (query, key): a query in [begin, end) and the first key from `end` on that it sees.

    It is a pair of any branch or head of the batch entry; () if there is none.

    Raises: ValueError if a sequence without end has too many keys to examine.
    """
    if begin >= end or end >= sequence.frame.kv_len:
        return ()
    pages = {begin // PAGE, (end - 1) // PAGE}
    near = max(pages) - min(pages) <= 1
    if near and all(is_causal_page(pattern, page, sequence) for page in pages):
        return ()

    def build() -> tuple[int, int] | tuple[()]:
        searches = _searches(pattern, sequence)
        found = [x for search in searches if (x := search.lowest(begin, end, end))]
        return min(found, key=lambda pair: (pair[1], pair[0]), default=())

    return layout_cache.keep((pattern, begin, end, sequence, "ahead"), build)


@one_thread()
def next_end(pattern: Pattern, begin: int, end: int, sequence: Tokens) -> int | None:
    """Returns the smallest end from `end` on at which a call may stop without missing keys.

    That is, no query in [begin, end) sees a key from there on. If no end is found within
    `_MOST_ENDS` tries, it returns the length of the sequence, which may be None.
    """
    total = sequence.frame.kv_len
    searches = list(_searches(pattern, sequence))
    for _ in range(_MOST_ENDS):
        furthest = [key for x in searches if (key := x.highest(begin, end, total)) is not None]
        if not furthest:
            return end
        end = max(furthest) + 1
        if end >= total:
            return sequence.total
    return sequence.total


def is_causal_page(pattern: Pattern, page: int, sequence: Tokens) -> bool:
    """Whether no query of page number `page` (of `PAGE` queries) sees a later key; it is cached."""

    def build() -> bool:
        begin, end = page * PAGE, min((page + 1) * PAGE, sequence.frame.kv_len)
        searches = _searches(pattern, sequence, Not(Causal()))
        return not any(search.lowest(begin, end, begin + 1) for search in searches)

    return layout_cache.keep((pattern, page, sequence, "causal page"), build)


def _searches(
    pattern: Pattern, sequence: Tokens, within: Mask | None = None
) -> Iterator["_Search"]:
    """Yields a `_Search` for each distinct mask of a pattern's branches and heads.

    With `within`, each mask is first intersected with it.
    """
    frame, heads = sequence.frame, range(sequence.num_heads)
    entry = sequence.entry if pattern.num_batches() is not None else 0
    masks = dict.fromkeys(x.at(entry, h, frame) for x in pattern.branches for h in heads)
    for mask in masks:
        part = mask if within is None else And((mask, within))
        yield _Search(
            mask=part,
            rule=condition(part, frame),
            frame=frame,
            endless=sequence.total is None,
            pattern=pattern,
        )


class _Search(NamedTuple):
    """Searches one mask, tile by tile, for the keys that a range of queries sees."""

    mask: Mask
    rule: Condition
    frame: Frame
    endless: bool
    pattern: Pattern  # for error messages

    def lowest(self, begin: int, end: int, key: int) -> tuple[int, int] | None:
        """Returns (query, key): the first key from `key` on that a query in [begin, end) sees."""
        return next(self._pairs(begin, end, key, self.frame.kv_len, False), None)

    def highest(self, begin: int, end: int, most: int) -> int | None:
        """Returns the last key from `end` on, below `most`, that a query in [begin, end) sees."""
        pair = next(self._pairs(begin, end, end, most, True), None)
        return None if pair is None else pair[1]

    def _pairs(
        self, begin: int, end: int, low: int, high: int, backwards: bool
    ) -> Iterator[tuple[int, int]]:
        """Yields one attending (query, key) for each tile of keys in [low, high) that has any.

        Keys ascend from tile to tile, or descend if `backwards`.
        """
        examined, ranges = 0, [(low, high)]
        while ranges:
            low, high = ranges.pop()
            if high - low > _TILE:
                size = _TILE
                while size * _SPLIT < high - low:
                    size *= _SPLIT
                parts = self._visited_parts(begin, end, low, high, size)
                ranges += parts if backwards else parts[::-1]
                continue
            if pair := self._evaluated(begin, end, low, high, backwards):
                yield pair
            examined += high - low
            if self.endless and examined > _MOST_KEYS:
                raise ValueError(
                    "expected a pattern that says which keys a query sees, since the sequence has "
                    f"no end, got {shortened(str(self.pattern))}, which was asked for "
                    f"{examined:,} keys; write & Causal(), or pass max_length"
                )

    def _visited_parts(
        self, begin: int, end: int, low: int, high: int, size: int
    ) -> list[tuple[int, int]]:
        """Cuts keys [low, high) into ranges of `size`; returns those that a query may see."""
        start = torch.arange(low, high, size)
        stop = (start + size).clamp(max=high)
        keys = Axis(step=1, residue=torch.zeros_like(start), start=start, stop=stop, last=stop - 1)
        queries = _tiles([begin], [end])
        origin = Origin.of_sequence(1, self.frame.kv_len)
        number = self.rule.candidates(queries, keys, origin).expand()
        keys, queries = keys[number], queries[torch.zeros_like(number)]
        status = self.rule.status(TilePairs.of_sequence(queries, keys, self.frame.kv_len))
        some = keys[status != EMPTY]
        return list(zip(some.start.tolist(), some.stop.tolist(), strict=True))

    def _evaluated(
        self, begin: int, end: int, low: int, high: int, backwards: bool
    ) -> tuple[int, int] | None:
        """Finds the first (last if `backwards`) key in [low, high) that a query sees."""
        best: tuple[int, int] | None = None
        keys = torch.arange(low, high)
        starts = range(begin, end, _TILE)
        queries = _tiles(starts, (min(x + _TILE, end) for x in starts))
        tile = _tiles([low] * len(starts), [high] * len(starts))
        status = self.rule.status(TilePairs.of_sequence(queries, tile, self.frame.kv_len))
        some = queries[status != EMPTY]
        for first, stop in zip(some.start.tolist(), some.stop.tolist(), strict=True):
            query = torch.arange(first, stop)
            pairs = self.mask.holds(query[:, None], keys[None], self.frame)
            pairs = pairs.expand(len(query), len(keys))
            seen = torch.nonzero(pairs.any(0))[:, 0]
            if len(seen):
                at = int(seen[-1 if backwards else 0])
                key = int(keys[at])
                closer = best is None or (key > best[1] if backwards else key < best[1])
                if closer:
                    best = int(query[pairs[:, at].long().argmax()]), key
        return best


def _tiles(start: Iterable[int], stop: Iterable[int]) -> Axis:
    begin, end = (torch.tensor(list(x), dtype=torch.int64) for x in (start, stop))
    return Axis(step=1, residue=torch.zeros_like(begin), start=begin, stop=end, last=end - 1)
