"""What a cache holds: keys and values in slots, whose positions they are, and how long they live.

Slots are those of what was kept at the last eviction, then a page of room for the tokens since:
token i of them lies in slot i of the page, in every batch entry and head.
"""

import itertools
from collections.abc import Hashable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from ..layouts.cache import layout_cache
from ..layouts.layout import BlockLayout
from ..layouts.lifetimes import FOREVER, last_visits
from ..patterns.algebra import And, Frame, Mask, Pattern
from ..patterns.positions import Causal
from ..selection.summaries import BlockSummaries

_LIFETIMES = 1024  # tokens whose last visits are found at a time
_POSITION_BITS, _MOST_TOLD = 40, 20  # of a rank: together no more than 62


@dataclass(frozen=True, eq=False)
class Row:
    """What a batch entry keeps; entries that are alike share one.

    Attributes:
        length: tokens seen.
        base: of them at the last eviction.
        positions: [Hkv, slots] of the keys that were kept, -1 in slots of none.
        last: [branches, Hkv, slots] the last query of each branch that visits each.
        exact: whether that is all that was live, as it is for any cache of this pattern and length.
        oldest: the least length that it can be cropped to.
    """

    length: int
    base: int
    positions: Tensor
    last: Tensor
    exact: bool = True
    oldest: int = 0

    def cropped(self, length: int) -> "Row":
        """The row without its tokens from `length` on."""
        if length >= self.base:
            return replace(self, length=length)
        positions = torch.where(self.positions < length, self.positions, -1)
        return replace(self, length=length, base=length, positions=positions, exact=False)

    def positions_with(self, count: int) -> Tensor:
        """[Hkv, slots + count] positions, with those of tokens since the last eviction."""
        new = torch.arange(self.base, self.base + count).expand(len(self.positions), -1)
        return torch.cat((self.positions, new), 1)

    def live_with(self, count: int) -> Tensor:
        """[branches, Hkv, slots + count] which of them a query of a branch may still visit."""
        return torch.nn.functional.pad(self.last >= self.base, (0, count), value=True)


@dataclass(eq=False)
class Steps:
    """Results that the steps of one page share.

    Attributes:
        layouts: of the page's queries, by how many they are.
        checked: description of the tokens of a step without options, and the backend it ran on.
        written: the page's slots below it may hold tokens: those that count, cropped ones, and
            those of steps that raised.
    """

    layouts: dict[int, BlockLayout] = field(default_factory=dict)
    checked: tuple[Hashable, str] = (None, "")
    written: int = 0


@dataclass(frozen=True, eq=False)
class Held:
    """The state of a `KVCache`, which changes by being replaced: a step is whole, or not done.

    Steps write in place to slots of the page that do not count yet, and to `steps`.

    Attributes:
        pattern: causal.
        heads, kv_heads: of query, and of key and value.
        total: tokens of a whole sequence, None where any number may come.
        rollback, page: as `KVCache` has them.
        rows: of each batch entry.
        keys, values: [B, Hkv, slots, D]; no slots before the first token.
        since: tokens since the last eviction.
        limit: of them, at which the next one is due: a page, or fewer where much dies at once in an
            entry that holds as much as any, for that alone frees memory.
        elsewhere: positions of the tokens since that others store: they count, and are not here.
        summaries: of a `SelectedCache`, of blocks up to the length at least.
        steps: of this page.
    """

    pattern: Pattern
    heads: int
    kv_heads: int
    total: int | None
    rollback: int
    page: int
    rows: list[Row]
    keys: Tensor = field(default_factory=lambda: torch.empty(0, 0, 0, 0))
    values: Tensor = field(default_factory=lambda: torch.empty(0, 0, 0, 0))
    since: int = 0
    limit: int = 0
    elsewhere: tuple[int, ...] = ()
    summaries: BlockSummaries | None = None
    steps: Steps = field(default_factory=Steps)

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    @property
    def room(self) -> int:
        """The first slot of the page."""
        return self.keys.shape[2] - self.page

    def distinct(self) -> list[Row]:
        return list({id(row): row for row in self.rows}.values())

    def frame(self, queries: int, first: int) -> Frame:
        """Of some queries; of the whole sequence where it is known, which has them all."""
        if self.total is not None:
            return Frame(self.total, self.total, self.heads, self.kv_heads, 0)
        return Frame(queries, first + queries, self.heads, self.kv_heads, first)

    def in_use(self, slots: Tensor) -> Tensor:
        """The slots of `keys` or `values` that hold something, or did."""
        return slots[:, :, : self.room + self.since] if slots.shape[2] else slots

    def changed(self, **changes: Any) -> "Held":
        """Returns a copy with other attributes; each step makes one, and `replace` is slower."""
        other = object.__new__(Held)
        vars(other).update(vars(self), **changes)
        return other

    def clear_after(self, since: int) -> None:
        """Zeroes the page's slots behind those that a step is about to fill, up to `since`.

        The step's queries do not see them, but a mask does not stop NaN and infinities.
        """
        if (written := self.steps.written) > since:
            for slots in (self.keys, self.values):
                slots[:, :, self.room + since : self.room + written] = 0
        self.steps.written = since

    def advanced(self, new: list[int], since: int) -> "Held":
        """Returns the state with `new` more tokens of each entry, and `since` in the page."""
        made: dict[tuple[int, int], Row] = {}
        rows = []
        for row, n in zip(self.rows, new, strict=True):
            which = id(row), n
            if which not in made:
                kept = row.positions, row.last, row.exact, row.oldest
                made[which] = Row(row.length + n, row.base, *kept)
            rows.append(made[which])
        return self.changed(rows=rows, since=since)

    def cropped(self, length: int) -> "Held":
        """Returns the state without tokens from `length` on, where entries have one length."""
        made = {id(row): row.cropped(length) for row in self.distinct()}
        rows = [made[id(row)] for row in self.rows]
        since = max((row.length - row.base for row in rows), default=0)
        elsewhere = tuple(position for position in self.elsewhere if position < length)
        held = self.changed(rows=rows, since=since, elsewhere=elsewhere)
        past = any(row.base > length for row in self.rows)
        return held.evicted() if past else held

    def loaded(self, key: Tensor, value: Tensor, positions: Tensor, length: int) -> "Held":
        """Returns the state after a prompt that was attended to elsewhere, with keys at [n]."""
        last = self._last_visits(0, length)[..., positions]
        row = Row(length, length, positions.expand(self.kv_heads, -1), last, exact=False)
        return self.changed(rows=[row] * len(self.rows)).evicted(key, value)

    def taken(self, entries: Tensor) -> "Held":
        """Returns the state of some of its entries."""
        keys, values = (
            x.index_select(0, entries.to(x.device)) if x.shape[2] else x
            for x in (self.keys, self.values)
        )
        summaries = copy(self.summaries)
        if summaries is not None:
            summaries.select(entries)
        rows = [self.rows[i] for i in entries.tolist()]
        changed = {"rows": rows, "keys": keys, "values": values, "summaries": summaries}
        return self.changed(**changed, steps=Steps(written=self.steps.written))

    def evicted(self, key: Tensor | None = None, value: Tensor | None = None) -> "Held":
        """Returns the state with the keys that some later query visits, and room for a page.

        `key`, `value`: the last tokens [B, Hkv, n, D], where they are not in the page; entries that
        have fewer of them have the first ones.
        """
        found = {id(row): self._survivors(row) for row in self.distinct()}
        most = max((slots.shape[1] for _, slots in found.values()), default=0)
        rows = {which: _widened(row, most) for which, (row, _) in found.items()}
        chosen = {
            which: torch.nn.functional.pad(slots, (0, most - slots.shape[1]), value=-1)
            for which, (_, slots) in found.items()
        }
        every = [chosen[id(row)] for row in (self.rows if len(rows) > 1 else self.rows[:1])]
        slots = torch.stack(every) if every else torch.zeros(0, self.kv_heads, 0, dtype=torch.int64)
        keys, values = (
            _gathered(self._with(held, new), slots, self.page)
            for held, new in ((self.keys, key), (self.values, value))
        )
        widest = [row for row in rows.values() if _count(row) + self.page > most]
        return self.changed(
            rows=[rows[id(row)] for row in self.rows],
            keys=keys,
            values=values,
            since=0,
            limit=min(map(self._limit, widest), default=self.page),
            elsewhere=(),
            steps=Steps(),
        )

    def _with(self, held: Tensor, new: Tensor | None) -> Tensor:
        used = self.in_use(held)
        if new is None:
            return used
        return torch.cat((used, new), 2) if used.shape[2] else new

    def _survivors(self, row: Row) -> tuple[Row, Tensor]:
        """(the row without what is dead, the slot of each key that stays [Hkv, kept] or -1)."""
        positions = row.positions_with(row.length - row.base)
        last = torch.cat((row.last, self._last_visits(row.base, row.length)), 2)
        oldest = max(row.oldest, row.length - self.rollback)
        alive = (positions >= 0) & (last.amax(0) >= oldest)
        if self.elsewhere:
            alive &= ~torch.isin(positions, torch.tensor(self.elsewhere))
        order = self._order(positions, last, alive, row.length)
        slot = order[:, : int(alive.sum(1).max()) if alive.numel() else 0]
        positions = torch.where(alive, positions, -1).gather(1, slot)
        last = torch.where(alive, last, -1).gather(2, slot.expand(len(last), -1, -1))
        slot = torch.where(positions < 0, -1, slot)
        exact = row.exact and not self.elsewhere
        return Row(row.length, row.length, positions, last, exact, oldest), slot

    def _order(self, positions: Tensor, last: Tensor, alive: Tensor, length: int) -> Tensor:
        """[Hkv, slots] by which slots are put: the dead come last.

        Keys that the same branches will visit come together: a branch then has tiles of its own.
        """
        if len(last) == 1:
            return (~alive).to(torch.int8).argsort(dim=1, stable=True)
        told = last[
            :_MOST_TOLD
        ]  # branches beyond those tell nothing: a rank must stay below FOREVER
        kind = ((told >= length).long() << torch.arange(len(told))[:, None, None]).sum(0)
        rank = (kind << _POSITION_BITS) + positions
        return torch.where(alive, rank, FOREVER).argsort(dim=1)

    def _limit(self, row: Row) -> int:
        """After how many tokens more than a page of an entry's keys is dead, at most a page.

        No fewer than an eighth of a page: at the end of a segment heads lose theirs one by one.
        """
        end = row.base + self.page
        new = self._last_visits(row.base, end if self.total is None else min(end, self.total))
        born = torch.arange(1, new.shape[2] + 1)  # counted from the base, as all here
        old = torch.where(row.positions < 0, end, row.last.amax(0))
        last = torch.cat((old, new.amax(0)), 1)
        dies = torch.where(last < 0, 0, last - row.base + self.rollback + 1)
        dies[:, old.shape[1] :] = torch.maximum(dies[:, old.shape[1] :], born)
        dies = dies.clamp(0, self.page + 1)
        none = torch.zeros(len(dies), self.page + 2, dtype=torch.int64)
        dead = none.scatter_add(1, dies, torch.ones_like(dies)).cumsum(1)[:, : self.page + 1]
        due = torch.nonzero((dead > self.page).any(0))
        return max(int(due[0]), self.page // 8) if len(due) else self.page

    def _last_visits(self, start: int, stop: int) -> Tensor:
        """[branches, Hkv, stop - start] the last query of each branch that visits each key."""
        parts = [torch.zeros(len(self.pattern.branches), self.kv_heads, 0, dtype=torch.int64)]
        while start < stop:
            first = start // _LIFETIMES * _LIFETIMES
            end = max(first + _LIFETIMES, stop)
            end = end if self.total is None else min(end, self.total)
            parts.append(self._lifetimes(first, end)[..., start - first : stop - first])
            start = end
        return torch.cat(parts, 2)

    def _lifetimes(self, start: int, stop: int) -> Tensor:
        """The same, kept for all caches of the pattern."""
        heads = {"num_heads": self.heads, "num_kv_heads": self.kv_heads}
        key = (self.pattern, self.heads, self.kv_heads, self.total, start, stop, "last visits")

        def build() -> _Lifetimes:
            none = [torch.zeros(0, stop - start, dtype=torch.int64)]
            of_branch = [
                torch.stack(last_visits(x, start, stop, **heads, max_length=self.total) or none)
                for x in self.pattern.branches
            ]
            return _Lifetimes(torch.stack(of_branch).view(-1, self.kv_heads, stop - start))

        return layout_cache.keep(key, build).last


@dataclass(frozen=True, eq=False)
class _Lifetimes:
    last: Tensor

    @property
    def nbytes(self) -> int:
        return self.last.numel() * self.last.element_size()


def _count(row: Row) -> int:
    """Keys that a row holds, the most of any head."""
    return int((row.positions >= 0).sum(1).max()) if row.positions.numel() else 0


def _widened(row: Row, slots: int) -> Row:
    room = (0, slots - row.positions.shape[1])
    positions, last = (
        torch.nn.functional.pad(x, room, value=-1) for x in (row.positions, row.last)
    )
    return replace(row, positions=positions, last=last)


def _gathered(source: Tensor, slots: Tensor, room: int) -> Tensor:
    """Returns [B, Hkv, kept + room, D]: slots [B or 1, Hkv, kept] of a source, then zeros.

    Slots of -1, which come last, give zeros too: their keys are masked, and may not be NaN.
    """
    (batch, heads, _, width), kept = source.shape, slots.shape[2]
    result = source.new_empty(batch, heads, kept + room, width)
    result[:, :, kept:] = 0
    counts = (slots >= 0).sum(2).expand(batch, -1).tolist()
    slots = slots.to(source.device).expand(batch, -1, -1)
    for b, h in itertools.product(range(batch), range(heads)):
        n = counts[b][h]
        torch.index_select(source[b, h], 0, slots[b, h, :n], out=result[b, h, :n])
        if n < kept:
            result[b, h, n:kept] = 0
    return result


def looking_back(pattern: Pattern) -> Pattern:
    """The pattern under `Causal()`; itself where every branch says that it is."""
    for branch in pattern.branches:
        if Causal() not in (branch.masks if isinstance(branch, And) else (branch,)):
            return cast(Mask, pattern) & Causal()
    return pattern
