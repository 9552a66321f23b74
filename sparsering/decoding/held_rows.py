"""`HeldRows`: how the keys or the values of a cache lie in memory, by kv head.

Each head has its older rows, in the order of their positions, and then a page for new tokens.
Layouts over them (`gathered_keys.page_over`) know where each head's rows begin.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ground.arguments import is_shape_alone
from ..ground.numerics import round_up
from ..ground.streams import moved
from ..layouts.layout import Pass

_ROOM = 8  # on a CPU, memory for later pages is at most one row per so many older rows


@dataclass(frozen=True, eq=False)
class HeldRows:
    """The keys or the values in memory: each kv head has older rows, then a page for new ones.

    If all heads hold equally many rows ("even"), `rows` has a dim of heads. Otherwise the rows of
    the heads lie one head after the other, so that each head takes only the memory that it needs.
    """

    # [B, Hkv, slots, width]; if heads are not even, [B, 1, slots of all heads, width]
    rows: Tensor
    older: tuple[int, ...]  # number of rows before the page, for each kv head
    page_size: int
    room: int = 0  # if heads are even, allocated slots after the page, for later pages
    # The next three are stored because each decoding step reads them.
    num_slots: int = field(init=False)  # dim 2 of `rows`; 0 before the first key
    are_even: bool = field(init=False)  # whether all heads hold equally many rows
    firsts: tuple[int, ...] = field(init=False)  # first slot of each head's page; one if even
    memo: dict[str, Tensor] = field(default_factory=dict, init=False)  # `firsts` on the device

    def __post_init__(self) -> None:
        even = self.rows.shape[1] == len(self.older)
        ends = itertools.accumulate(n + self.page_size for n in self.older)
        firsts = self.older[:1] if even else tuple(end - self.page_size for end in ends)
        for name, value in (
            ("num_slots", self.rows.shape[2]),
            ("are_even", even),
            ("firsts", firsts),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def empty(cls) -> "HeldRows":
        """Returns the rows of a cache that has seen no token yet."""
        return cls(torch.empty(0, 0, 0, 0), (), 0)

    @classmethod
    def zeros(cls, like: "HeldRows", older: Sequence[int], batch: int) -> "HeldRows":
        """Returns zeros with the dtype, device, width and page size of `like`."""
        kept, page, width = tuple(older), like.page_size, like.rows.shape[3]
        return cls(_new(like.rows, batch, kept, page, width).zero_(), kept, page)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, the page, and the slots before them that earlier pages left behind.

        Room that was never written to takes no memory on a CPU.
        """
        if not self.rows.nbytes:
            return 0
        left_behind = self.rows.storage_offset() // self.rows.shape[3]
        return self.rows.nbytes // self.num_slots * (self.num_slots + left_behind)

    @property
    def by_head(self) -> Tensor:
        """The rows as [B, Hkv, slots, width]; heads that are not even all see the same slots."""
        return self.rows if self.are_even else self.rows.expand(-1, len(self.older), -1, -1)

    def heads(self) -> list[Tensor]:
        """Returns a view of each kv head's rows: [B, older rows + page, width]."""
        if self.are_even:
            return list(self.rows.unbind(1))
        sizes = [n + self.page_size for n in self.older]
        return list(self.rows[:, 0].split(sizes, 1))

    def write(self, new: Tensor, first: int) -> None:
        """Writes rows [B, Hkv, n, width] to slots of the page from `first` on."""
        n = new.shape[2]
        if self.are_even:
            self.rows.narrow(2, self.older[0] + first, n).copy_(new)
            return
        if self.rows.device.type == "cpu":
            for head, begin in enumerate(self.firsts):
                self.rows[:, 0].narrow(1, begin + first, n).copy_(new[:, head])
            return
        if (begins := self.memo.get("firsts")) is None:  # few launches, as in `_gather`
            begins = self.memo["firsts"] = moved(torch.tensor(self.firsts), self.rows.device)
        slots = begins + first
        if n > 1:
            slots = (slots[:, None] + torch.arange(n, device=slots.device)).flatten()
        self.rows[:, 0].index_copy_(1, slots, new.flatten(1, 2))

    def clear(self, first: int, stop: int) -> None:
        """Writes zeros to the page's slots `first` to `stop` - 1 of every head."""
        for begin in self.firsts:
            self.rows[:, :, begin + first : begin + stop].zero_()

    def in_use(self, count: int) -> list[Tensor]:
        """Returns a view of each head's rows in use: the older ones, and `count` of the page."""
        return [x[:, : n + count] for x, n in zip(self.heads(), self.older, strict=True)]

    def in_slots(self, numbers: Tensor, width: int, unused: int) -> list[Tensor]:
        """Arranges one number per row like the rows in memory: [older + page] for each head.

        `numbers` [Hkv, width + count] are those of the older rows, of which the longest head has
        `width`, and of `count` slots of the page. The page's other slots get the number `unused`.
        """
        parts, rest = [], self.page_size - (numbers.shape[1] - width)
        for head, n in enumerate(self.older):
            own = numbers[head, :n], numbers[head, width:], numbers.new_full((rest,), unused)
            parts.append(torch.cat(own))
        return parts

    def with_new(self, count: int, new: Tensor) -> Tensor:
        """Returns the rows that are in use, then `new` rows: [B, Hkv, slots + n, width]."""
        used = self.rows[:, :, : self.rows.shape[2] - self.page_size + count]
        return torch.cat((used, new), 2) if used.shape[2] else new

    def gathered(self, slots: Tensor, count: int, new: Tensor | None, page: int) -> "HeldRows":
        """Returns new rows with the given slots of each head as older rows, and an empty page.

        Args:
            slots: int64 [B or 1, Hkv, most], -1 behind a head's last. They count the older rows of
                the head with the most, then `count` slots of the page, then `new`.
            new: rows [B, Hkv, n, width] behind those of the page, or None.
            page: slots of the new page.
        """
        counts = (0,) * slots.shape[1]
        if len(slots):
            counts = tuple((slots >= 0).sum(2).amax(0).tolist())
        drops_first = new is None and self._drops_first(slots, count)
        if drops_first and count <= self.room:
            return self._slid(slots.shape[2], count)
        like = self.rows if new is None else new
        batch, width, room = len(like), like.shape[-1], 0
        if like.device.type == "cpu" and len(set(counts)) == 1:
            # Memory that was never written to costs nothing, but fresh memory costs more than a
            # copy. With room for later pages, few evictions need fresh memory.
            room = max(0, round(counts[0] / _ROOM / page) - 1) * page
        result = HeldRows(_new(like, batch, counts, page, width, room), counts, page, room)
        if is_shape_alone(like):
            return result
        if drops_first:
            end = self.older[0] + count
            kept = self.rows[:, :, end - counts[0] : end]
            result.rows[:, :, : counts[0]].copy_(kept)
            result.rows[:, :, counts[0] :].zero_()
            return result
        if like.device.type != "cpu":
            self._gather(slots, count, new, result)
            return result
        used = self.in_use(count) if self.num_slots else [None] * len(counts)
        for head, (older, to) in enumerate(zip(used, result.heads(), strict=True)):
            parts = [x for x in (older, None if new is None else new[:, head]) if x is not None]
            source = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            own = self._within(slots[:, head], head)
            for entry in range(batch):
                places = own[entry if len(own) > 1 else 0]
                places = places[: int((places >= 0).sum())]
                torch.index_select(source[entry], 0, places, out=to[entry, : len(places)])
                to[entry, len(places) :] = 0
        return result

    def _drops_first(self, slots: Tensor, count: int) -> bool:
        """Whether `gathered` keeps all rows but the first ones, equally many in each head."""
        kept = slots.shape[2]
        if not (self.are_even and len(slots) and kept):
            return False
        end = self.older[0] + count
        return bool((slots == torch.arange(end - kept, end)).all())

    def _slid(self, kept: int, count: int) -> "HeldRows":
        """Does `gathered` without a copy, if only first rows are dropped and there is room.

        The next page follows this one in memory.
        """
        end = self.older[0] + count
        batch, heads, _, width = self.rows.shape
        begin = self.rows.storage_offset() + (end - kept) * width
        size = batch, heads, kept + self.page_size, width
        rows = self.rows.as_strided(size, self.rows.stride(), begin)
        rows[:, :, kept:].zero_()
        return HeldRows(rows, (kept,) * heads, self.page_size, self.room - count)

    def _within(self, slots: Tensor, head: int) -> Tensor:
        """Converts slot numbers that count from the widest head's page to those of this head.

        `slots` are numbered for the head with the most older rows; -1 stays.
        """
        widest = max(self.older, default=0)
        own = self.older[head] if self.older else 0
        return torch.where(slots >= widest, slots - (widest - own), slots)

    def _gather(self, slots: Tensor, count: int, new: Tensor | None, to: "HeldRows") -> None:
        """Does `gathered` on a GPU, with a number of launches that does not grow with the heads."""
        source = self.rows.flatten(1, 2) if self.num_slots else None  # [B, slots of all heads, w]
        held = 0 if source is None else source.shape[1]
        if new is not None:
            more = new.flatten(1, 2)
            source = more if source is None else torch.cat((source, more), 1)
        assert source is not None
        each, parts = held // max(1, len(self.older)), []
        for head, n in enumerate(to.older):
            own = self._within(slots[:, head, :n], head)
            older = self.older[head] if self.older else 0
            first = head * each if self.are_even else self.firsts[head] - older
            end, length = older + count, 0 if new is None else new.shape[2]
            place = torch.where(own < end, own + first, own - end + held + head * length)
            parts += [torch.where(own < 0, -1, place), own.new_full((len(own), to.page_size), -1)]
        index = torch.cat(parts, 1)  # [B or 1, slots of all heads]
        size = len(source), *index.shape[1:], source.shape[2]
        rows = to.rows.view(size)
        places = moved(index.clamp(min=0), source.device)[..., None].expand(size)
        torch.gather(source, 1, places, out=rows)
        # Zeros, because a masked key must not be NaN.
        rows.masked_fill_(moved(index < 0, source.device)[..., None], 0)

    def widened(self, older: Sequence[int], batch: int, like: "HeldRows") -> "HeldRows":
        """Copies the rows to memory with `older` older rows per head; the added rows are zeros."""
        result = HeldRows.zeros(like, older, batch)
        if self.num_slots:
            for source, n, to in zip(self.heads(), self.older, result.heads(), strict=True):
                to[:, :n] = source[:, :n]
        return result

    def copied(self) -> "HeldRows":
        """Returns a copy in memory of its own, without the spare room for later pages."""
        return HeldRows(self.rows.clone(), self.older, self.page_size)

    def of_entries(self, entries: Tensor) -> "HeldRows":
        """Returns the rows of some batch entries."""
        if is_shape_alone(self.rows):
            rows = self.rows.new_empty(len(entries), *self.rows.shape[1:])
        else:
            rows = self.rows[entries]
        return HeldRows(rows, self.older, self.page_size)

    def columns(self, block_size: int) -> int:
        """Returns how many slots before the page a layout needs, so that `placed` can move it."""
        widest = max(self.older, default=0)
        return widest if self.are_even else round_up(widest, block_size)

    def placed(self, p: Pass, block_size: int) -> Pass:
        """Returns a pass whose key tiles begin where each head's rows lie in memory."""
        if self.are_even:
            return p
        older = torch.tensor(self.older)[:, None]  # [Hkv, 1]
        page = torch.tensor(self.firsts)[:, None]
        start, boundary = p.key_start, self.columns(block_size)
        behind = start >= boundary
        first = torch.where(behind, page + start - boundary, page - older + start)
        count = p.key_stop - start
        count = torch.where(behind, count, torch.minimum(count, older - start).clamp(min=0))
        first = torch.where(count > 0, first, 0)
        heads = len(self.older)
        one_each = {
            name: x.expand(heads, -1).contiguous()
            for name in ("query_start", "query_stop", "query_segment", "key_segment")
            if (x := getattr(p, name)) is not None and x.dim() == 2
        }
        covers = p.covers[0], False
        return p.like(key_start=first, key_stop=first + count, covers=covers, **one_each)


def _new(
    like: Tensor, batch: int, older: Sequence[int], page: int, width: int, room: int = 0
) -> Tensor:
    """Allocates `older` rows and a page for each head; if all have equally many, also `room`."""
    if len(set(older)) <= 1:
        slots = sum(older[:1]) + page
        return like.new_empty(batch, len(older), slots + room, width).narrow(2, 0, slots)
    return like.new_empty(batch, 1, sum(older) + page * len(older), width)
