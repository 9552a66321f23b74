"""State of a cache: keys and values in slots, their positions, and the last query of each key.

The first slots of a head store its keys that survived the last eviction. The other slots are the
page: slot i of the page is for token i after that eviction. The last query of a key is the position
of the last query that visits it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ground.arguments import index_of, listed, shortened
from ..ground.once import unseen_beside
from ..kernels.rounding import Store
from ..layouts.cache import layout_cache
from ..layouts.layout import BlockLayout
from ..layouts.lifetimes import last_visits
from ..patterns.algebra import Frame, Pattern
from ..route.decision import Decision
from ..selection.summaries import BlockSummaries
from .held_rows import HeldRows

SIZES = ("heads", "kv_heads", "total", "rollback", "page_size", "store")
_LIFETIMES = 1024  # last queries are computed and cached for at least so many keys at once


class _Record:
    """Base of frozen dataclasses that are copied often, which gives them a fast `changed`."""

    def changed(self, **changes: Any) -> Self:
        """Returns a copy with some attributes replaced, faster than `dataclasses.replace`."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), **changes)
        return other


@dataclass(frozen=True, eq=False)
class History(_Record):
    """State of one sequence in a cache: its length, and its stored keys up to the last eviction.

    Batch entries may share one.
    """

    length: int
    base: int  # length at the last eviction, which is the position of the page's first token
    # int64 [1 + branches, keys of all heads, or of one if they are alike]: each key's position, and
    # its last query per branch
    keys: Tensor
    counts: tuple[int, ...]  # number of keys of each kv head
    width: int  # number of slots of each head, at least the largest count
    alike: bool  # whether all heads store keys at the same positions; tables then have one head
    exact: bool = True  # True if `base` alone determines which keys are stored before the page
    oldest: int = 0  # smallest length to which the batch entry can be cropped

    @classmethod
    def of(cls, positions: Tensor, last: Tensor, heads: int, **rest: Any) -> "History":
        """Builds the history of `heads` kv heads from positions and last queries of their keys.

        Args: `positions` [T, slots], T = 1 if all heads are alike, else `heads`. They are -1 in
        empty slots, which come after a head's keys. `last` [branches, T, slots], -1 for no query.
        """
        real, width = positions >= 0, positions.shape[1]
        counts = real.sum(1).tolist()
        keys = torch.cat((positions[None], last))
        keys = keys.flatten(1) if min(counts, default=0) == width else keys[:, real]
        alike = len(counts) < heads
        counts = counts * heads if alike else counts
        return cls(keys=keys, counts=tuple(counts), width=width, alike=alike, **rest)

    @property
    def _in_slots(self) -> Tensor:
        """The rows of `keys` as [1 + branches, T, slots], with -1 where a head has no key."""
        counts = self.counts[:1] if self.alike else self.counts
        if min(counts, default=0) == self.width:
            return self.keys.view(len(self.keys), len(counts), self.width)
        slots = torch.full((len(self.keys), len(counts), self.width), -1)
        slots[:, torch.arange(self.width) < torch.tensor(counts)[:, None]] = self.keys
        return slots

    @property
    def positions(self) -> Tensor:
        """Positions of the keys [T, slots], -1 in empty slots; T = 1 if all heads are alike."""
        return self._in_slots[0]

    @property
    def last(self) -> Tensor:
        """Position of the last query that sees each key, [branches, T, slots]; -1 for none."""
        return self._in_slots[1:]

    @property
    def num_keys(self) -> int:
        """The largest number of keys that a kv head stores before the page."""
        return max(self.counts, default=0)

    def cropped(self, length: int) -> "History":
        """Returns the history as if the tokens at positions from `length` on had never come."""
        if length >= self.base:
            return self.changed(length=length)
        positions = torch.where(self.positions < length, self.positions, -1)
        return History.of(
            positions,
            self.last,
            len(self.counts),
            length=length,
            base=length,
            exact=False,
            oldest=self.oldest,
        )

    def positions_with(self, count: int) -> Tensor:
        """Returns the key positions [T, slots + count] with `count` tokens of the page.

        First come `positions` (-1 for an empty slot), then base, base + 1, ... for the page's
        tokens.
        """
        positions = self.positions
        new = torch.arange(self.base, self.base + count).expand(len(positions), -1)
        return torch.cat((positions, new), 1)


@dataclass(eq=False)
class Page:
    """The layouts and checks that the decoding steps between two evictions share.

    The page's slots before `written` may store keys, even of cropped tokens or failed steps. Its
    slots from `written` on are zeros.
    """

    layouts: dict[int, BlockLayout] = field(default_factory=dict)  # by number of new tokens
    decision: Decision | None = None  # the latest step's; a step with the same one skips checks
    written: int = 0


class Draft(NamedTuple):
    """A tree of new tokens that `attend(tree=)` has computed, but the cache does not store yet."""

    key: Tensor  # [B, Hkv, n, D]
    value: Tensor  # [B, Hkv, n, Dv]
    parents: tuple[int, ...]  # each token's parent; -1 stands for the last token of the cache
    depth: int  # the most tokens on a path


@dataclass(frozen=True, eq=False)
class CacheState(_Record):
    """The state of a `KVCache`; a step replaces it as a whole, so a failed step changes nothing.

    In place, steps only write to `page` and to unused slots of the page. The next eviction comes
    after `page_limit` tokens. This is a page, or less if later queries do not visit many keys of a
    batch entry that stores almost as many as the largest.
    """

    pattern: Pattern
    heads: int
    kv_heads: int
    total: int | None  # upper bound of a sequence's tokens; None if there is no bound
    rollback: int  # number of latest tokens that `crop` can remove
    page_size: int
    store: Store | None  # format of 8 bits to which keys and values are rounded; None for floats
    histories: list[History]  # one per batch entry
    keys: HeldRows = field(default_factory=HeldRows.empty)
    values: HeldRows = field(default_factory=HeldRows.empty)
    page_length: int = 0  # number of tokens since the last eviction
    page_limit: int = 0
    remote: tuple[int, ...] = ()  # positions of tokens in the page whose keys other ranks store
    summaries: BlockSummaries | None = None  # only in a `SelectedCache`: it scores blocks by them
    draft: Draft | None = None  # the tokens of `attend(tree=)` until `keep` is called
    page: Page = field(default_factory=Page)

    @property
    def lengths(self) -> list[int]:
        return [history.length for history in self.histories]

    def distinct(self) -> list[History]:
        """Returns each history once; batch entries with equal lengths often share one object."""
        return list({id(history): history for history in self.histories}.values())

    def frame(self, queries: int, first: int) -> Frame:
        """Returns the `Frame` of new queries, or of the whole text if its length is bounded."""
        if self.total is not None:
            return Frame(
                q_len=self.total,
                kv_len=self.total,
                num_heads=self.heads,
                num_kv_heads=self.kv_heads,
                q_start=0,
            )
        return Frame(
            q_len=queries,
            kv_len=first + queries,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            q_start=first,
        )

    def clear_page(self, start: int) -> None:
        """Writes zeros to the page's slots from `start` on, since a NaN there would spread."""
        if (written := self.page.written) > start:
            for held in (self.keys, self.values):
                held.clear(start, written)
        self.page.written = start

    def new_tokens(self, lengths: Sequence[int] | Tensor | None, most: int) -> list[int]:
        """Returns how many new tokens each batch entry gets; ValueError if `lengths` are wrong."""
        entries, total = len(self.histories), self.total
        new = [most] * entries if lengths is None else listed("lengths", lengths)
        counts: list[Any] = [index_of(n) for n in new] if isinstance(new, Sequence) else []
        wrong = [n for n in counts if n is None or not 0 <= n <= most]
        if len(counts) != entries or wrong:
            raise ValueError(
                f"lengths must be {entries} ints from 0 to {most}, the new tokens of each batch "
                f"entry, got {shortened(repr(new))}; leave lengths out if no token is padding"
            )
        for history, n in zip(self.histories, counts, strict=True):
            if total is not None and history.length + n > total:
                raise ValueError(
                    f"the cache is for {total} tokens, got {n} more after {history.length}; give "
                    "KVCache a larger max_length, and a pattern for that length"
                )
        return counts

    def advanced(self, new: list[int], page_length: int) -> "CacheState":
        """Returns the state with lengths that are larger by `new[i]` for entry i; moves no keys."""
        longer: dict[tuple[int, int], History] = {}
        histories = []
        for history, n in zip(self.histories, new, strict=True):
            key = id(history), n
            if key not in longer:
                longer[key] = history.changed(length=history.length + n)
            histories.append(longer[key])
        return self.changed(histories=histories, page_length=page_length)

    def cropped(self, length: int) -> "CacheState":
        """Returns the state without the tokens from `length` on; all entries are equally long."""
        shorter = {id(history): history.cropped(length) for history in self.distinct()}
        histories = [shorter[id(history)] for history in self.histories]
        page_length = max((x.length - x.base for x in histories), default=0)
        remote = tuple(position for position in self.remote if position < length)
        state = self.changed(histories=histories, page_length=page_length, remote=remote)
        past_page = any(history.base > length for history in self.histories)
        return state.evicted() if past_page else state

    def appended(self, key: Tensor, value: Tensor) -> "CacheState":
        """Returns the state after n more tokens in each batch entry, and stores their keys."""
        new, page_length = [key.shape[2]] * len(self.histories), self.page_length + key.shape[2]
        if not self.keys.num_slots or page_length > self.page_size:
            return self.advanced(new, self.page_length).evicted(key, value)
        self.clear_page(page_length)
        for held, x in ((self.keys, key), (self.values, value)):
            held.write(x, self.page_length)
        after = self.advanced(new, page_length)
        return after.evicted() if page_length >= self.page_limit else after

    def loaded(self, key: Tensor, value: Tensor, positions: Tensor, length: int) -> "CacheState":
        """Returns the state after a prompt that was attended elsewhere, with its keys stored."""
        last = self._last_visits(0, length)[..., positions]
        positions = positions.expand(last.shape[1], -1)
        history = History.of(
            positions, last, self.kv_heads, length=length, base=length, exact=False
        )
        return self.changed(histories=[history] * len(self.histories)).evicted(key, value)

    def of_entries(self, entries: Tensor) -> "CacheState":
        """Returns the state of some batch entries, given by index."""
        if (summaries := self.summaries) is not None:
            summaries = summaries.fork()
            summaries.select(entries)
        page = Page(written=self.page.written)
        histories = [self.histories[i] for i in entries.tolist()]
        taken = self.changed(histories=histories, summaries=summaries, page=page)
        if not self.keys.num_slots:
            return taken
        at = entries.to(self.keys.rows.device)
        return taken.changed(keys=self.keys.of_entries(at), values=self.values.of_entries(at))

    def copied(self) -> "CacheState":
        """Returns a copy with keys and values in memory of its own, since steps write in place."""
        return self.changed(
            histories=list(self.histories),
            keys=self.keys.copied(),
            values=self.values.copied(),
            summaries=copy(self.summaries),
            page=Page(written=self.page.written),
        )

    def joined(self, other: "CacheState") -> "CacheState":
        """Returns the state with the batch entries of another state after its own."""
        states = [x.evicted() if x.keys.num_slots else x for x in (self, other)]
        if not (full := [x for x in states if x.keys.num_slots]):
            return self.changed(histories=self.histories + other.histories)
        older = tuple(map(max, zip(*(x.keys.older for x in full), strict=True)))
        one, two = (x._widened(older, full[0]) for x in states)
        keys, values = (
            HeldRows(torch.cat((x.rows, y.rows)), older, self.page_size)
            for x, y in ((one.keys, two.keys), (one.values, two.values))
        )
        limit, histories = min(x.page_limit for x in full), one.histories + two.histories
        return full[0].changed(histories=histories, keys=keys, values=values, page_limit=limit)

    def _widened(self, older: tuple[int, ...], like: "CacheState") -> "CacheState":
        """Returns a state with `older` slots per head and an empty page, so that states can join.

        `like` gives the dtype and width of keys if the state has none yet.
        """
        wider = {id(x): x.changed(width=max(older)) for x in self.distinct()}
        histories, batch = [wider[id(x)] for x in self.histories], len(self.histories)
        keys = self.keys.widened(older, batch, like.keys)
        values = self.values.widened(older, batch, like.values)
        return self.changed(histories=histories, keys=keys, values=values)

    def evicted(self, key: Tensor | None = None, value: Tensor | None = None) -> "CacheState":
        """Returns a state with only the keys that later queries visit, and an empty page.

        `key` and `value` [B, Hkv, n, D] are the latest tokens if they are not in the page; they may
        end with padding.
        """
        survivors = {id(history): self._survivors(history) for history in self.distinct()}
        most = max((slots.shape[1] for _, slots in survivors.values()), default=0)
        for number, (history, slots) in survivors.items():
            slots = pad(slots, (0, most - slots.shape[1]), value=-1)
            survivors[number] = history.changed(width=most), slots
        of_entries = [survivors[id(history)] for history in self.histories]
        slots = torch.zeros(0, self.kv_heads, 0, dtype=torch.int64)
        if of_entries:
            # If all batch entries share one history, they also share one row of slots.
            rows = of_entries if len(survivors) > 1 else of_entries[:1]
            slots = torch.stack([slots for _, slots in rows]).expand(-1, self.kv_heads, -1)
        keys, values = (
            held.gathered(slots, self.page_length, new, self.page_size)
            for held, new in ((self.keys, key), (self.values, value))
        )
        widest = [x for x, _ in survivors.values() if x.num_keys + self.page_size > most]
        limit = min(map(self._page_limit, widest), default=self.page_size)
        stored = {"histories": [x for x, _ in of_entries], "keys": keys, "values": values}
        return self.changed(**stored, page_length=0, page_limit=limit, remote=(), page=Page())

    def _survivors(self, history: History) -> tuple[History, Tensor]:
        """Finds the keys of a history that an eviction keeps, and the slots that they are in now.

        Returns: the history after it; the slots [T, keys] that they are in now, -1 for no key.
        """
        positions = history.positions_with(history.length - history.base)
        last = torch.cat((history.last, self._last_visits(history.base, history.length)), 2)
        oldest = max(history.oldest, history.length - self.rollback)
        alive = (positions >= 0) & (last.amax(0) >= oldest)
        if self.remote:
            alive &= ~torch.isin(positions, torch.tensor(self.remote))
        if bool(alive.all()):  # as in causal patterns, where sorting the many keys takes long
            slot = torch.arange(positions.shape[1]).expand_as(positions)
        else:
            # Keys stay in the order of their positions, because kernels sum in this order.
            order = (~alive).to(torch.int8).argsort(dim=1, stable=True)
            slot = order[:, : int(alive.sum(1).max()) if alive.numel() else 0]
            positions = torch.where(alive, positions, -1).gather(1, slot)
            last = torch.where(alive, last, -1).gather(2, slot.expand(len(last), -1, -1))
            slot = torch.where(positions < 0, -1, slot)
        length, exact = history.length, history.exact and not self.remote
        after = History.of(
            positions,
            last,
            self.kv_heads,
            length=length,
            base=length,
            exact=exact,
            oldest=oldest,
        )
        return after, slot

    def _page_limit(self, history: History) -> int:
        """Returns the number of new tokens after which the next eviction should come.

        It is due when some head stores more than `page_size` keys that no later query visits; a
        full page is the upper limit.
        """
        # `birth` and `death` count the tokens in the page when a key is stored, and from when on no
        # later query sees it.
        base, page_size = history.base, self.page_size
        end = base + page_size if self.total is None else min(base + page_size, self.total)
        old = torch.where(history.positions < 0, base + page_size, history.last.amax(0))
        last = torch.cat((old, self._last_visits(base, end).amax(0)), 1)
        death = torch.where(last < 0, 0, last - base + self.rollback + 1)
        birth = pad(torch.arange(1, end - base + 1), (old.shape[1], 0))
        death = torch.maximum(death, birth).clamp(max=page_size + 1)
        deaths = torch.zeros(len(death), page_size + 2, dtype=torch.int64)
        dead = deaths.scatter_add(1, death, torch.ones_like(death)).cumsum(1)[:, :-1]
        due = torch.nonzero((dead > page_size).any(0))
        # An eviction copies the cache, so wait for at least an eighth of a page of new tokens.
        return max(int(due[0]), page_size // 8) if len(due) else page_size

    def _last_visits(self, start: int, stop: int) -> Tensor:
        """Returns the last query that sees each key in [start, stop): [branches, T, keys].

        T = 1 if the pattern is the same in all heads, else Hkv.
        """
        first = start // _LIFETIMES * _LIFETIMES
        end = max(first + _LIFETIMES, stop)
        end = end if self.total is None else min(end, self.total)
        heads = {"num_heads": self.heads, "num_kv_heads": self.kv_heads}
        tables = 1 if are_alike(self.pattern, self.heads, self.kv_heads) else self.kv_heads

        def build() -> Tensor:
            visits = [torch.zeros(0, dtype=torch.int64)]
            for branch in self.pattern.branches:
                of_heads = last_visits(branch, first, end, **heads, max_length=self.total)
                visits += of_heads[:tables]
            return torch.cat(visits).view(len(self.pattern.branches), tables, end - first)

        key = (self.pattern, self.heads, self.kv_heads, self.total, first, end, "last visits")
        return layout_cache.keep(key, build)[..., start - first : stop - first]


def are_alike(pattern: Pattern, heads: int, kv_heads: int) -> bool:
    """Whether all heads see the same keys, so that their tables in a cache have one head."""
    frame = Frame(q_len=0, kv_len=0, num_heads=heads, num_kv_heads=kv_heads, q_start=0)
    return pattern.num_tables(frame) == 1


@contextlib.contextmanager
def ordinary_tensors(beside: Tensor | None = None) -> Iterator[None]:
    """Lets the `with` body create tensors without gradients that work outside inference mode.

    If the keys `beside` have a shape but no numbers, tables on the host still get numbers.
    """
    with torch.inference_mode(False), torch.no_grad(), unseen_beside(beside):
        yield
