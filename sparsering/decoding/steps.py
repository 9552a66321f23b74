"""Attention of new tokens to a cache: over the slots of a page, or over spans of positions.

One layout serves all queries of a page, over all slots: kept ones and those of the page. Tokens
that fit the page attend to keys in place. All else, prompts and extras that depend on positions,
copies keys into the spans of positions that it visits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..call_recipe import CallRecipe
from ..dispatch import BACKENDS
from ..kernels import cpu
from ..kernels.problem import Problem
from ..layouts.cache import layout_cache
from ..layouts.compile import assemble, compile_passes, default_block_size
from ..layouts.gathered_keys import Spanned, page_over
from ..layouts.last_query import last_query_layout
from ..layouts.layout import BlockLayout
from ..numerics import sum_dtype, without_autocast
from ..ops import attend
from ..patterns.algebra import Frame, Mask
from ..patterns.keys import KeyMask
from .held import Held, Row

_CPU = torch.device("cpu")

Options = Mapping[str, Any]


def fits_page(held: Held, backend: str, new: list[int], extras: Options) -> bool:
    """Whether all entries have equally many new tokens, and the page can serve this call."""
    return (
        len(set(new)) == 1
        and held.keys.shape[2] > 0
        and held.since + new[0] <= held.page
        and BACKENDS[backend].forward is not None
        and not (held.elsewhere and "key_mask" not in BACKENDS[backend].extras)
        and extras["distance_bias"] is extras["dropout_p"] is None  # both need key positions
    )


def _page_layout(held: Held) -> BlockLayout:
    """Layout of the page's queries over all slots; entries with equal histories share tables."""
    rows = held.distinct() if len(held.distinct()) == 1 else held.rows
    slots, row = held.keys.shape[2], rows[0]
    if len(rows) > 1 or not row.exact:
        return _page_over(held, rows)
    history = row.base, held.rollback, held.page, slots
    key = (held.pattern, held.frame(0, row.base), history, held.keys.device, "page")

    def build() -> BlockLayout:
        made = _page_over(held, rows)
        return made if held.keys.device == _CPU else made.kept(held.keys.device)

    return layout_cache.keep(key, build).ready()


def _page_over(held: Held, rows: list[Row]) -> BlockLayout:
    block = max(held.page, 128)
    positions = torch.stack([row.positions_with(held.page) for row in rows])
    live = torch.stack([row.live_with(held.page) for row in rows], 1)
    starts = torch.tensor([row.base for row in rows])
    frame = held.frame(held.page, int(starts.max()))
    made = page_over(held.pattern, positions, live, starts, frame, held.page, block)
    passes = tuple(p.to(held.keys.device) for p in made)
    if held.keys.device == _CPU:
        for p in passes:
            _ = p.transposed_bitmaps  # builds the table once, for all steps
    slots = held.keys.shape[2]
    frame = Frame(held.page, slots, held.heads, held.kv_heads, slots - held.page)
    return BlockLayout(frame, block, passes, math.nan)


def laid_page(held: Held, queries: int) -> BlockLayout:
    """Returns the page's layout for a number of queries, and stores it for later steps."""
    laid = held.steps.layouts
    if held.page not in laid:
        laid[held.page] = _page_layout(held)
    if queries not in laid:
        whole = laid[held.page]
        stops = (torch.full_like(p.query_stop, queries) for p in whole.passes)
        passes = tuple(p.like(query_stop=x) for p, x in zip(whole.passes, stops, strict=True))
        frame = whole.frame._replace(q_len=queries)
        laid[queries] = replace(whole, frame=frame, passes=passes)
    return laid[queries]


def attend_page(
    held: Held,
    layout: BlockLayout,
    recipe: CallRecipe,
    inputs: Sequence[Tensor],
    extras: Options,
) -> tuple[Tensor, Tensor]:
    """Writes the new keys into their slots and attends; `layout` is for this number of queries."""
    query, key, value = inputs
    first = held.room + held.since
    held.clear_after(held.since + query.shape[2])
    slot = (held.since,) * len(layout.passes)
    here = None
    if held.elsewhere:
        place = torch.tensor(held.elsewhere) - held.rows[0].base + held.room
        here = torch.ones(1, held.keys.shape[2], dtype=torch.bool)
        here = here.index_fill(1, place, False).to(query.device)
    problem = Problem(
        layout, query, held.keys, held.values, recipe.scale, slots=slot, key_mask=here, **extras
    )
    if recipe.backend == "cpu":  # its kernel writes the new keys itself
        return cpu.forward(problem, (key, value, first))
    for slots, new in ((held.keys, key), (held.values, value)):
        slots.narrow(2, first, new.shape[2]).copy_(new)
    return _run(recipe.backend, problem)


def attend_spans(
    held: Held,
    recipe: CallRecipe,
    inputs: Sequence[Tensor],
    new: list[int],
    extras: Options,
) -> tuple[Tensor, Tensor]:
    """Attends from each entry's last `new` tokens to cached keys; equal entries go together."""
    groups: dict[tuple[int, int], list[int]] = {}
    for entry, (row, n) in enumerate(zip(held.rows, new, strict=True)):
        groups.setdefault((id(row), n), []).append(entry)
    query, _, value = inputs
    if len(groups) == 1:
        return _Alike(held, held.rows[0], None).attend(recipe, inputs, extras)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=sum_dtype(query))
    whole = not _runs_spans(held, recipe.backend) and held.pattern.num_batches() is not None
    every = torch.arange(len(query), device=query.device)
    for (_, n), entries in groups.items():
        if not n:
            continue
        index = torch.tensor(entries, device=query.device)
        taken = every if whole else index
        part, of_part = of_first(n, *_of_entries(taken, inputs, extras))
        alike = _Alike(held, held.rows[entries[0]], taken)
        found = alike.attend(recipe, part, of_part)
        out[index, :, :n], lse[index, :, :n] = (x[index] if whole else x for x in found)
    return out, lse


def _runs_spans(held: Held, backend: str) -> bool:
    """Whether a backend runs layouts, and can mask the keys of spans that are not stored here."""
    found = BACKENDS[backend]
    here = not held.elsewhere and all(row.exact for row in held.distinct())
    return found.forward is not None and (here or "key_mask" in found.extras)


def of_first(
    queries: int, inputs: Sequence[Tensor], extras: Options
) -> tuple[Sequence[Tensor], Options]:
    """Returns the inputs and extras of the first `queries` new tokens."""
    sink = extras["sink"]
    if sink is not None and sink.shape[2] > 1:
        extras = {**extras, "sink": sink[:, :, :queries]}
    return [x[:, :, :queries] for x in inputs], extras


def _of_entries(
    entries: Tensor, inputs: Sequence[Tensor], extras: Options
) -> tuple[Sequence[Tensor], Options]:
    """Returns the inputs and extras of some batch entries."""
    of_extras = {name: x[entries] if isinstance(x, Tensor) else x for name, x in extras.items()}
    return [x[entries] for x in inputs], of_extras


class _Alike:
    """Batch entries that share a `Row`; `entries` are their numbers, None for all."""

    def __init__(self, held: Held, row: Row, entries: Tensor | None) -> None:
        self._held, self._row, self._entries = held, row, entries

    def attend(
        self, recipe: CallRecipe, inputs: Sequence[Tensor], extras: Options
    ) -> tuple[Tensor, Tensor]:
        query, pattern, begin = inputs[0], self._held.pattern, self._row.length
        frame = self._held.frame(query.shape[2], begin)
        elsewhere = self._held.elsewhere
        apart = self._entries is not None and pattern.num_batches() is not None
        if begin == 0 and frame.kv_len == query.shape[2] and not elsewhere and not apart:
            whole = CallRecipe(recipe.backend, recipe.scale, 0, recipe.block_size)
            return attend(whole, query, inputs[1], inputs[2], pattern, extras)
        if not _runs_spans(self._held, recipe.backend):
            return self._attend_whole(recipe, inputs, frame, extras)
        layout, slots = self._layout(query.shape[2], frame, recipe.block_size)
        if apart:
            entries = cast(Tensor, self._entries).cpu()
            layout = replace(layout, passes=tuple(p.of_entries(entries) for p in layout.passes))
        spanned = Spanned.of(layout)
        keys, values = self._spread(inputs, spanned)
        passes = tuple(p.to(query.device) for p in spanned.layout.passes)
        moved = replace(spanned.layout, passes=passes)
        here = self._here(query.shape[2], spanned)
        here = None if here is None else here.to(query.device)
        problem = Problem(
            moved, query, keys, values, recipe.scale, slots=slots, key_mask=here, **extras
        )
        return _run(recipe.backend, problem)

    def _here(self, new: int, spanned: Spanned) -> Tensor | None:
        """Mask [1, tokens] of the spans' positions whose keys are stored here; None for all.

        One mask serves all heads: a head does not visit keys that are dead for it alone.
        """
        held, row = self._held, self._row
        if row.exact and not held.elsewhere:
            return None
        every = row.positions_with(row.length - row.base).flatten()
        every = torch.cat((every[every >= 0], torch.arange(row.length, row.length + new)))
        every = every[~torch.isin(every, torch.tensor(held.elsewhere, dtype=torch.int64))]
        mask = torch.zeros(1, spanned.length + 1, dtype=torch.bool)
        return mask.index_fill(1, spanned.place_of(every), True)[:, :-1]

    def _layout(
        self, queries: int, frame: Frame, block_size: int | None
    ) -> tuple[BlockLayout, tuple[int, ...]]:
        """Layout of the new queries, and the `slots` of its `Problem`."""
        pattern, begin = self._held.pattern, self._row.length
        size = default_block_size(pattern, frame.kv_len) if block_size is None else block_size
        if self._held.total is None:
            found = last_query_layout(pattern, frame, size, _CPU)
            return found or (layout_cache.layout(pattern, frame, size, _CPU), ())

        def build() -> BlockLayout:
            here = [(begin, begin + queries)]
            compiled = compile_passes(pattern, frame, size, queries=here)
            rows = frame._replace(q_start=begin, q_len=queries)
            passes = tuple(assemble(c, rows, size) for c in compiled)
            return BlockLayout(rows, size, passes, math.nan)

        key = (pattern, frame, size, begin, queries, "rows")
        return layout_cache.keep(key, build), ()

    def _spread(self, inputs: Sequence[Tensor], spanned: Spanned) -> list[Tensor]:
        """Copies kept and new keys, and values, into a layout's spans: [b, Hkv, tokens, D]."""
        held, row, length = self._held, self._row, spanned.length
        positions = row.positions_with(held.since)
        place = torch.where(positions < 0, length, spanned.place_of(positions.clamp(min=0)))
        results = []
        for slots, new in ((held.keys, inputs[1]), (held.values, inputs[2])):
            batch, heads, count, width = new.shape
            result = new.new_zeros(batch, heads, length + 1, width)  # the last slot is dropped
            if row.length:
                kept = held.in_use(slots)
                kept = kept if self._entries is None else kept[self._entries]
                index = place.to(new.device)[None, :, :, None].expand(batch, -1, -1, width)
                result.scatter_(2, index, kept)
            fresh = spanned.place_of(torch.arange(row.length, row.length + count))
            result[:, :, fresh.to(new.device)] = new
            results.append(result[:, :, :length])
        return results

    def _attend_whole(
        self, recipe: CallRecipe, inputs: Sequence[Tensor], frame: Frame, extras: Options
    ) -> tuple[Tensor, Tensor]:
        """Attends over all positions, evicted keys as zeros, on a backend without layouts."""
        query, begin, pattern = inputs[0], self._row.length, self._held.pattern
        begins, ends = torch.zeros(1, dtype=torch.int64), torch.full((1,), frame.kv_len)
        everything = Spanned(BlockLayout(frame, 128, (), math.nan), begins, ends)
        keys, values = self._spread(inputs, everything)
        n, first = query.shape[2], begin - frame.q_start  # place of the new queries in the frame
        every = torch.nn.functional.pad(query, (0, 0, first, frame.q_len - first - n))
        extras, sink = dict(extras), extras["sink"]
        if sink is not None and sink.shape[2] > 1:
            extras["sink"] = torch.nn.functional.pad(sink, (first, frame.q_len - first - n))
        whole = CallRecipe(recipe.backend, recipe.scale, frame.q_start, recipe.block_size)
        if (here := self._here(n, everything)) is not None:
            pattern = cast(Mask, pattern) & KeyMask(here[0])
        out, lse = attend(whole, every, keys, values, pattern, extras)
        return out[:, :, first : first + n], lse[:, :, first : first + n]


def _run(backend: str, problem: Problem) -> tuple[Tensor, Tensor]:
    how = BACKENDS[backend]
    assert how.forward is not None
    with without_autocast(problem.query):
        return how.forward(problem if how.reads_slots else problem.in_first_slots())
