"""State of a cache: keys and values in slots, their positions, and the last query of each key.

The first slots store the keys that survived the last eviction. The others are the page: its slot i
is for the i-th token after that eviction. The last query of a key is the last that visits it.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call_recipe import CallRecipe
from ..layouts.cache import layout_cache
from ..layouts.layout import BlockLayout
from ..layouts.lifetimes import last_visits
from ..patterns.algebra import Frame, Pattern
from ..patterns.arguments import index_of, listed, shortened
from ..selection.summaries import BlockSummaries
from ..streams import moved

SIZES = ("heads", "kv_heads", "total", "rollback", "page_size")
_LIFETIMES = 1024  # last queries are computed and cached for at least this many keys at once


class _Record:
    def changed(self, **changes: Any) -> Self:
        """Returns a copy with changed attributes; faster than `dataclasses.replace`."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), **changes)
        return other


@dataclass(frozen=True, eq=False)
class History(_Record):
    """Length of a sequence and its keys from before the last eviction; entries may share one."""

    length: int
    base: int  # length at the last eviction, which is the position of the page's first token
    positions: Tensor  # [Hkv, slots] positions of the keys, -1 in empty slots
    last: Tensor  # [branches, Hkv, slots] position of the last query that visits the key
    exact: bool = True  # True if `base` alone determines which keys are stored before the page
    oldest: int = 0  # smallest length that the batch entry can be cropped to

    @property
    def num_keys(self) -> int:
        """Largest number of keys before the page that a kv head stores."""
        return int((self.positions >= 0).sum(1).max()) if self.positions.numel() else 0

    def cropped(self, length: int) -> "History":
        """Returns the history without the tokens at positions from `length` on."""
        if length >= self.base:
            return self.changed(length=length)
        positions = torch.where(self.positions < length, self.positions, -1)
        return self.changed(length=length, base=length, positions=positions, exact=False)

    def positions_with(self, count: int) -> Tensor:
        """Returns the key positions [Hkv, slots + count].

        First come `positions` (-1: an empty slot), then base, base + 1, ... of `count` tokens
        since the last eviction.
        """
        new = torch.arange(self.base, self.base + count).expand(len(self.positions), -1)
        return torch.cat((self.positions, new), 1)


@dataclass(eq=False)
class Page:
    """Layouts and checks that the decoding steps between two evictions share.

    The page's slots before `written` may store keys, even of cropped tokens or failed steps. Its
    slots from `written` on are zeros.
    """

    layouts: dict[int, BlockLayout] = field(default_factory=dict)  # by number of new tokens
    recipe: CallRecipe | None = None  # of the latest step; a step with this recipe skips checks
    written: int = 0


class Draft(NamedTuple):
    """A tree of new tokens that `attend` has seen, and the cache does not have yet."""

    key: Tensor  # [B, Hkv, n, D]
    value: Tensor  # [B, Hkv, n, Dv]
    parents: tuple[int, ...]  # of each token; -1: the last token of the cache
    depth: int  # most tokens on a path


@dataclass(frozen=True, eq=False)
class CacheState(_Record):
    """State of a `KVCache`. A step replaces it as a whole, so that a failed step changes nothing.

    In place, steps write only to `page` and to unused slots of the page. The next eviction comes
    after `page_limit` tokens: a page, or less if no later query visits many of the keys of a batch
    entry that has almost as many keys as the largest.
    """

    pattern: Pattern
    heads: int
    kv_heads: int
    total: int | None  # upper bound of a sequence's tokens; None if there is no bound
    rollback: int
    page_size: int
    histories: list[History]  # one per batch entry
    keys: Tensor = field(default_factory=lambda: torch.empty(0, 0, 0, 0))  # [B, Hkv, slots, D]
    values: Tensor = field(default_factory=lambda: torch.empty(0, 0, 0, 0))
    page_length: int = 0  # number of tokens since the last eviction
    page_limit: int = 0
    remote: tuple[int, ...] = ()  # positions of tokens in the page whose keys other ranks store
    summaries: BlockSummaries | None = None  # block summaries of a `SelectedCache`
    draft: Draft | None = None  # tokens of `attend(tree=)`, until `keep`
    page: Page = field(default_factory=Page)

    @property
    def lengths(self) -> list[int]:
        return [history.length for history in self.histories]

    @property
    def page_start(self) -> int:
        """Index of the first slot of the page: the number of slots for older keys."""
        return self.keys.shape[2] - self.page_size

    def distinct(self) -> list[History]:
        return list({id(history): history for history in self.histories}.values())

    def frame(self, queries: int, first: int) -> Frame:
        """Returns the `Frame` of new queries, or of the whole sequence if its length is bounded."""
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

    def in_use(self, slots: Tensor) -> Tensor:
        """Returns `keys` or `values`, given as `slots`, without the unused slots at the end."""
        return slots[:, :, : self.page_start + self.page_length]

    def with_new(self, slots: Tensor, new: Tensor | None) -> Tensor:
        """Returns the used part of `slots` (`keys` or `values`), then new tokens, if any."""
        used = self.in_use(slots)
        if new is None:
            return used
        return torch.cat((used, new), 2) if used.shape[2] else new

    def clear_page(self, start: int) -> None:
        """Zeroes the page's slots from `start` on: a NaN there would spread, although masked."""
        if (written := self.page.written) > start:
            for slots in (self.keys, self.values):
                slots[:, :, self.page_start + start : self.page_start + written] = 0
        self.page.written = start

    def new_tokens(self, lengths: Sequence[int] | Tensor | None, most: int) -> list[int]:
        """Returns the number of new tokens of each batch entry; ValueError if it is invalid."""
        entries, total = len(self.histories), self.total
        new = [most] * entries if lengths is None else listed("lengths", lengths)
        counts: list[Any] = [index_of(n) for n in new] if isinstance(new, Sequence) else []
        if len(counts) != entries or not all(n is not None and 0 <= n <= most for n in counts):
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
        """Returns the state after `new[i]` more tokens in each batch entry i."""
        longer: dict[tuple[int, int], History] = {}
        histories = []
        for history, n in zip(self.histories, new, strict=True):
            key = id(history), n
            if key not in longer:
                longer[key] = history.changed(length=history.length + n)
            histories.append(longer[key])
        return self.changed(histories=histories, page_length=page_length)

    def cropped(self, length: int) -> "CacheState":
        """Returns the state without tokens from `length` on; entries must have equal lengths."""
        shorter = {id(history): history.cropped(length) for history in self.distinct()}
        histories = [shorter[id(history)] for history in self.histories]
        page_length = max((x.length - x.base for x in histories), default=0)
        remote = tuple(position for position in self.remote if position < length)
        state = self.changed(histories=histories, page_length=page_length, remote=remote)
        past_page = any(history.base > length for history in self.histories)
        return state.evicted() if past_page else state

    def appended(self, key: Tensor, value: Tensor) -> "CacheState":
        """Returns the state after n more tokens in each batch entry, whose keys it stores."""
        new, page_length = [key.shape[2]] * len(self.histories), self.page_length + key.shape[2]
        if not self.keys.shape[2] or page_length > self.page_size:
            return self.advanced(new, self.page_length).evicted(key, value)
        self.clear_page(page_length)
        for slots, x in ((self.keys, key), (self.values, value)):
            slots.narrow(2, self.page_start + self.page_length, key.shape[2]).copy_(x)
        after = self.advanced(new, page_length)
        return after.evicted() if page_length >= self.page_limit else after

    def loaded(self, key: Tensor, value: Tensor, positions: Tensor, length: int) -> "CacheState":
        """Returns the state after a prompt of `length` tokens, with its keys at `positions`."""
        last = self._last_visits(0, length)[..., positions]
        history = History(length, length, positions.expand(self.kv_heads, -1), last, exact=False)
        return self.changed(histories=[history] * len(self.histories)).evicted(key, value)

    def of_entries(self, entries: Tensor) -> "CacheState":
        if (summaries := copy(self.summaries)) is not None:
            summaries.select(entries)
        page = Page(written=self.page.written)
        histories = [self.histories[i] for i in entries.tolist()]
        taken = self.changed(histories=histories, summaries=summaries, page=page)
        if not self.keys.shape[2]:
            return taken
        at = entries.to(self.keys.device)
        return taken.changed(keys=self.keys[at], values=self.values[at])

    def joined(self, other: "CacheState") -> "CacheState":
        """Returns the state with the batch entries of another one behind its own."""
        states = [x.evicted() if x.keys.shape[2] else x for x in (self, other)]
        if not (full := [x for x in states if x.keys.shape[2]]):
            return self.changed(histories=self.histories + other.histories)
        start = max(x.page_start for x in full)
        one, two = (x._widened(start, full[0]) for x in states)
        keys, values = torch.cat((one.keys, two.keys)), torch.cat((one.values, two.values))
        limit, histories = min(x.page_limit for x in full), one.histories + two.histories
        return full[0].changed(histories=histories, keys=keys, values=values, page_limit=limit)

    def _widened(self, start: int, like: "CacheState") -> "CacheState":
        """Returns a state with an empty page and `start` slots before it, of zeros if new."""
        room = start - max(0, self.page_start)
        wider = {}
        for history in self.distinct():
            columns = history.positions, history.last
            positions, last = (pad(x, (0, room), value=-1) for x in columns)
            wider[id(history)] = history.changed(positions=positions, last=last)
        keys, values = self.keys, self.values
        if not keys.shape[2]:  # no token yet
            size = len(self.histories), self.kv_heads, self.page_size
            keys, values = (x.new_zeros(*size, x.shape[3]) for x in (like.keys, like.values))
        keys, values = (pad(x, (0, 0, 0, room)) for x in (keys, values))
        histories = [wider[id(x)] for x in self.histories]
        return self.changed(histories=histories, keys=keys, values=values)

    def evicted(self, key: Tensor | None = None, value: Tensor | None = None) -> "CacheState":
        """Returns a state with only the keys that later queries visit, then an empty page.

        `key`, `value`: the latest tokens [B, Hkv, n, D], if they are not in the page; they may end
        with padding.
        """
        survivors = {id(history): self._survivors(history) for history in self.distinct()}
        most = max((slots.shape[1] for _, slots in survivors.values()), default=0)
        for number, (history, slots) in survivors.items():
            room = (0, most - slots.shape[1])
            columns = history.positions, history.last, slots
            positions, last, slots = (pad(x, room, value=-1) for x in columns)
            survivors[number] = history.changed(positions=positions, last=last), slots
        of_entries = [survivors[id(history)] for history in self.histories]
        slots = torch.zeros(0, self.kv_heads, 0, dtype=torch.int64)
        if of_entries:
            # if all batch entries share one history, they share one row of slots
            rows = of_entries if len(survivors) > 1 else of_entries[:1]
            slots = torch.stack([slots for _, slots in rows])
        pairs = (self.keys, key), (self.values, value)
        keys, values = (_gathered(self.with_new(*x), slots, self.page_size) for x in pairs)
        widest = [x for x, _ in survivors.values() if x.num_keys + self.page_size > most]
        limit = min(map(self._page_limit, widest), default=self.page_size)
        stored = {"histories": [x for x, _ in of_entries], "keys": keys, "values": values}
        return self.changed(**stored, page_length=0, page_limit=limit, remote=(), page=Page())

    def _survivors(self, history: History) -> tuple[History, Tensor]:
        """Returns (history after an eviction, slots [Hkv, keys] of its keys; -1 for no key)."""
        positions = history.positions_with(history.length - history.base)
        last = torch.cat((history.last, self._last_visits(history.base, history.length)), 2)
        oldest = max(history.oldest, history.length - self.rollback)
        alive = (positions >= 0) & (last.amax(0) >= oldest)
        if self.remote:
            alive &= ~torch.isin(positions, torch.tensor(self.remote))
        # keys stay in the order of positions, in which kernels sum over them
        order = (~alive).to(torch.int8).argsort(dim=1, stable=True)
        slot = order[:, : int(alive.sum(1).max()) if alive.numel() else 0]
        positions = torch.where(alive, positions, -1).gather(1, slot)
        last = torch.where(alive, last, -1).gather(2, slot.expand(len(last), -1, -1))
        slot = torch.where(positions < 0, -1, slot)
        exact = history.exact and not self.remote
        return History(
            length=history.length,
            base=history.length,
            positions=positions,
            last=last,
            exact=exact,
            oldest=oldest,
        ), slot

    def _page_limit(self, history: History) -> int:
        """Returns after how many tokens a head has over `page_size` keys that no query sees."""
        # `birth`, `death`: tokens in the page when a key is stored, and when no later query sees it
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
        # rarely, since evictions copy the cache, and keys may die at each step
        return max(int(due[0]), page_size // 8) if len(due) else page_size

    def _last_visits(self, start: int, stop: int) -> Tensor:
        """Returns [branches, Hkv, keys]: the last query that visits each key in [start, stop)."""
        first = start // _LIFETIMES * _LIFETIMES
        end = max(first + _LIFETIMES, stop)
        end = end if self.total is None else min(end, self.total)
        heads = {"num_heads": self.heads, "num_kv_heads": self.kv_heads}

        def build() -> Tensor:
            visits = [torch.zeros(0, dtype=torch.int64)]
            for branch in self.pattern.branches:
                visits += last_visits(branch, first, end, **heads, max_length=self.total)
            return torch.cat(visits).view(len(self.pattern.branches), self.kv_heads, end - first)

        key = (self.pattern, self.heads, self.kv_heads, self.total, first, end, "last visits")
        return layout_cache.keep(key, build)[..., start - first : stop - first]


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Lets the `with` body create tensors without gradients that work outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _gathered(source: Tensor, slots: Tensor, page_size: int) -> Tensor:
    """Gathers keys or values by index, and appends a page of zeros.

    A slot of -1 (no key) gives zeros too, because a masked key must not be NaN.

    Args:
        source: [B, Hkv, stored, width].
        slots: int64 [B or 1, Hkv, keys].

    Returns: [B, Hkv, keys + page_size, width].
    """
    (batch, heads, _, width), most = source.shape, slots.shape[2]
    result = source.new_empty(batch, heads, most + page_size, width)
    counts = (slots >= 0).sum(2).expand(batch, -1).tolist()
    slots = moved(slots, source.device).expand(batch, -1, -1)
    result[:, :, most:] = 0
    if source.device.type != "cpu":  # few launches, however many heads there are
        index = slots.clamp(min=0)[..., None].expand(-1, -1, -1, width)
        torch.gather(source, 2, index, out=result[:, :, :most])
        if min(map(min, counts), default=most) < most:
            result[:, :, :most].masked_fill_(slots[..., None] < 0, 0)
        return result
    for b, h in itertools.product(range(batch), range(heads)):
        n = counts[b][h]
        torch.index_select(source[b, h], 0, slots[b, h, :n], out=result[b, h, :n])
        if n < most:
            result[b, h, n:most] = 0
    return result
