"""State of a cache: keys and values in slots, their positions, and the last query to visit each.

The first slots hold the keys that the last eviction kept. A page of slots for newer tokens follows:
the i-th newer token lies in slot i of the page, in every batch entry and head.
"""

import contextlib
import itertools
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from ..call_recipe import CallRecipe
from ..layouts.cache import layout_cache
from ..layouts.layout import BlockLayout
from ..layouts.lifetimes import FOREVER, last_visits
from ..patterns.algebra import And, Frame, Mask, Pattern
from ..patterns.positions import Causal
from ..selection.summaries import BlockSummaries

_LIFETIMES = 1024  # tokens whose last visits are computed at a time
_POSITION_BITS, _MOST_TOLD = 40, 20  # bits of a sort key: at most 62 together, to fit an int64


@dataclass(frozen=True, eq=False)
class Row:
    """Keys that a batch entry keeps; entries with equal histories share one Row.

    Attributes:
        length: tokens seen.
        base: tokens seen at the last eviction.
        positions: [Hkv, slots] positions of the kept keys, -1 in empty slots.
        last: [branches, Hkv, slots] the last query of each branch that visits the key.
        exact: whether these are all live keys, so that pattern and length alone determine them.
        oldest: the least length that the entry can be cropped to.
    """

    length: int
    base: int
    positions: Tensor
    last: Tensor
    exact: bool = True
    oldest: int = 0

    def longer(self, n: int) -> "Row":
        """The row after n more tokens; faster than `replace`, as each step needs one."""
        other = object.__new__(Row)
        vars(other).update(vars(self), length=self.length + n)
        return other

    def cropped(self, length: int) -> "Row":
        """The row without its tokens from `length` on."""
        if length >= self.base:
            return replace(self, length=length)
        positions = torch.where(self.positions < length, self.positions, -1)
        return replace(self, length=length, base=length, positions=positions, exact=False)

    def positions_with(self, count: int) -> Tensor:
        """Positions [Hkv, slots + count] of kept keys and of `count` tokens since the eviction."""
        new = torch.arange(self.base, self.base + count).expand(len(self.positions), -1)
        return torch.cat((self.positions, new), 1)

    def live_with(self, count: int) -> Tensor:
        """Mask [branches, Hkv, slots + count] of keys that the branch may still visit."""
        return torch.nn.functional.pad(self.last >= self.base, (0, count), value=True)


@dataclass(eq=False)
class Steps:
    """Results that the steps of one page share.

    Attributes:
        layouts: layouts of the page's queries, by number of new tokens.
        checked: recipe of the latest step; its tokens fit the cache.
        written: number of the page's slots that may hold data: valid tokens, cropped ones, and
            those of steps that raised.
    """

    layouts: dict[int, BlockLayout] = field(default_factory=dict)
    checked: CallRecipe | None = None
    written: int = 0


@dataclass(frozen=True, eq=False)
class Held:
    """State of a `KVCache`. A step replaces it as a whole, so that a failed step changes nothing.

    Steps only write in place to `steps`, and to slots of the page that are not in use yet.

    Attributes:
        pattern: the pattern, made causal.
        heads, kv_heads: number of query heads, and of key and value heads.
        total: most tokens of a sequence (`max_length`, or the pattern's own), None for no limit.
        rollback, page: `rollback` and `page_size` of `KVCache`.
        rows: the `Row` of each batch entry.
        keys, values: [B, Hkv, slots, D]; no slots before the first token.
        since: tokens since the last eviction.
        limit: value of `since` at which the next eviction is due: a page, or less where many keys
            die at once in the entries with most keys, as only these free memory.
        elsewhere: positions of tokens since the last eviction that other ranks store.
        summaries: block summaries of a `SelectedCache`, for blocks up to the length at least.
        steps: results that the steps of this page share.
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
        """Index of the first slot of the page."""
        return self.keys.shape[2] - self.page

    def distinct(self) -> list[Row]:
        return list({id(row): row for row in self.rows}.values())

    def frame(self, queries: int, first: int) -> Frame:
        """Frame of some queries; if the total length is known, that of the whole sequence."""
        if self.total is not None:
            return Frame(self.total, self.total, self.heads, self.kv_heads, 0)
        return Frame(queries, first + queries, self.heads, self.kv_heads, first)

    def in_use(self, slots: Tensor) -> Tensor:
        """Slots of `keys` or `values` without the unused rest of the page."""
        return slots[:, :, : self.room + self.since] if slots.shape[2] else slots

    def changed(self, **changes: Any) -> "Held":
        """Returns a copy with changed attributes; faster than `replace`, as each step needs one."""
        other = object.__new__(Held)
        vars(other).update(vars(self), **changes)
        return other

    def clear_after(self, since: int) -> None:
        """Zeroes the used slots of the page from `since` on, behind those that a step will fill.

        The step's queries do not see them, but masked NaN and infinities would still spread.
        """
        if (written := self.steps.written) > since:
            for slots in (self.keys, self.values):
                slots[:, :, self.room + since : self.room + written] = 0
        self.steps.written = since

    def advanced(self, new: list[int], since: int) -> "Held":
        """Returns the state after `new` more tokens of each entry, with `since` in the page."""
        made: dict[tuple[int, int], Row] = {}
        rows = []
        for row, n in zip(self.rows, new, strict=True):
            which = id(row), n
            if which not in made:
                made[which] = row.longer(n)
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
        """Returns the state after a prompt that ran elsewhere; `positions` [n] of its keys."""
        last = self._last_visits(0, length)[..., positions]
        row = Row(length, length, positions.expand(self.kv_heads, -1), last, exact=False)
        return self.changed(rows=[row] * len(self.rows)).evicted(key, value)

    def taken(self, entries: Tensor) -> "Held":
        """Returns the state of some batch entries."""
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
        """Returns the state with the keys that later queries visit, and room for a page.

        `key`, `value`: the last tokens [B, Hkv, n, D], if they are not in the page; an entry with
        fewer new tokens has them first.
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
        """Returns the row without dead keys, and the slot [Hkv, kept] of each kept key or -1."""
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
        """Order [Hkv, slots] in which slots are kept; dead ones come last.

        Keys that the same branches will visit lie together, so that a branch skips whole tiles.
        """
        if len(last) == 1:
            return (~alive).to(torch.int8).argsort(dim=1, stable=True)
        told = last[
            :_MOST_TOLD
        ]  # branches beyond these are ignored, so that a sort key stays below FOREVER
        kind = ((told >= length).long() << torch.arange(len(told))[:, None, None]).sum(0)
        rank = (kind << _POSITION_BITS) + positions
        return torch.where(alive, rank, FOREVER).argsort(dim=1)

    def _limit(self, row: Row) -> int:
        """Number of tokens, at most a page, after which more than a page of a row's keys is dead.

        At least an eighth of a page: at the end of a segment, heads lose their keys one by one.
        """
        end = row.base + self.page
        new = self._last_visits(row.base, end if self.total is None else min(end, self.total))
        born = torch.arange(1, new.shape[2] + 1)  # counted from the base, like `dies`
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
        """Last query [branches, Hkv, stop - start] of each branch that visits each key."""
        parts = [torch.zeros(len(self.pattern.branches), self.kv_heads, 0, dtype=torch.int64)]
        while start < stop:
            first = start // _LIFETIMES * _LIFETIMES
            end = max(first + _LIFETIMES, stop)
            end = end if self.total is None else min(end, self.total)
            parts.append(self._lifetimes(first, end)[..., start - first : stop - first])
            start = end
        return torch.cat(parts, 2)

    def _lifetimes(self, start: int, stop: int) -> Tensor:
        """Last visits of the keys from start to stop, shared by all caches of the pattern."""
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


@contextlib.contextmanager
def keeping_tensors() -> Iterator[None]:
    """Context for tensors that a cache keeps: later steps may run in other modes of autograd."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _count(row: Row) -> int:
    """Largest number of keys that any head of a row holds."""
    return int((row.positions >= 0).sum(1).max()) if row.positions.numel() else 0


def _widened(row: Row, slots: int) -> Row:
    room = (0, slots - row.positions.shape[1])
    positions, last = (
        torch.nn.functional.pad(x, room, value=-1) for x in (row.positions, row.last)
    )
    return replace(row, positions=positions, last=last)


def _gathered(source: Tensor, slots: Tensor, room: int) -> Tensor:
    """Gathers slots [B or 1, Hkv, kept] of a source, then zeros: [B, Hkv, kept + room, D].

    Slots of -1, which come last, give zeros too: their keys are masked, but must not be NaN.
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
    """Returns `pattern & Causal()`, or the pattern itself if all its branches contain that mask."""
    for branch in pattern.branches:
        if Causal() not in (branch.masks if isinstance(branch, And) else (branch,)):
            return cast(Mask, pattern) & Causal()
    return pattern
