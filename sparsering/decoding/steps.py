"""Computes attention from new tokens to a cache, in one of two ways.

If the new tokens fit in the page, they attend to the cache's tensors in place, and all steps of the
page share one layout. In other cases (prompts, and options that depend on positions), the visited
keys are copied in the order of their positions, and a layout for them is compiled.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call import Call, Options
from ..ground.numerics import round_up, sum_dtype, without_autocast
from ..ground.streams import moved
from ..kernels.backends import BACKENDS
from ..kernels.problem import Problem
from ..kernels.rounding import Store, from_store, is_in_store, to_store
from ..layouts.cache import layout_cache
from ..layouts.compile import assemble, compile_passes, default_block_size
from ..layouts.gathered_keys import Spanned, page_over
from ..layouts.last_query import last_query_layout
from ..layouts.layout import BlockLayout
from ..layouts.terms import disjoint_terms
from ..patterns.algebra import Frame, Mask, Pattern
from ..patterns.keys import KeyMask
from ..patterns.selected import has_lists
from ..route.decision import Decision
from ..route.options import for_queries
from ..route.run import attend
from ..route.work import Work
from .cache_state import CacheState, History

_CPU = torch.device("cpu")
_STOPS = "query stops"  # key of `_query_stops`'s result in the memo of a page's layout
IN_PAGES = {"softcap", "sink"}
"""Options that do not depend on the positions of keys, which slots do not tell."""


class NewTokens(NamedTuple):
    """Query, key and value [B, H, n, D] of new tokens, and further options such as softcap.

    In a cache with `store`, keys and values are rows in 8 bits (kernels/rounding.py).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: Options

    def in_store(self, store: Store | None) -> "NewTokens":
        """Rounds keys and values to the 8-bit format that the cache stores, if it has one."""
        if store is None:
            return self
        return self._replace(key=to_store(self.key, store), value=to_store(self.value, store))

    def in_floats(self) -> "NewTokens":
        """Converts keys and values from the 8-bit format of the cache to the query's dtype."""
        if not is_in_store(self.key):
            return self
        dtype = self.query.dtype
        return self._replace(key=from_store(self.key, dtype), value=from_store(self.value, dtype))

    def first(self, n: int) -> "NewTokens":
        """Returns the first n tokens of every batch entry, with options cut accordingly."""
        query, key, value = (x[:, :, :n] for x in self[:3])
        return NewTokens(query, key, value, for_queries(self.options, lambda x: x[:, :, :n]))

    def of_entries(self, entries: Tensor) -> "NewTokens":
        """Returns the new tokens of some batch entries, given by index."""
        query, key, value = (x[entries] for x in self[:3])
        return NewTokens(query, key, value, self.options.mapped(lambda x: x[entries]))


def fits_page(state: CacheState, backend: str, new: list[int], tokens: NewTokens) -> bool:
    """Whether `attend_page` can run: all entries have equally many new tokens, and they fit."""
    return (
        len(set(new)) == 1
        and state.keys.num_slots > 0
        and state.page_length + new[0] <= state.page_size
        and BACKENDS[backend].reads_layouts
        and not (state.remote and "key_mask" not in BACKENDS[backend].extras)
        and tokens.options.in_use.keys() <= IN_PAGES
    )


def page_layout(state: CacheState, queries: int) -> BlockLayout:
    """Returns a layout of `queries` new tokens over all slots, which the page's other steps reuse.

    It only has views of the page's tables. So a step in the capture of a CUDA graph stores no
    memory that only the replay fills, and all steps share the walks of the page.
    """
    layouts = state.page.layouts
    if state.page_size not in layouts:
        layouts[state.page_size] = _whole_page_layout(state)
    if queries not in layouts:
        whole = layouts[state.page_size]
        if _STOPS not in whole.memo:  # a copied cache, whose layouts begin without a memo
            whole.memo[_STOPS] = moved(_query_stops(whole), state.keys.rows.device)
        stops = whole.memo[_STOPS][queries]
        passes = tuple(
            p.cut(stops[: p.query_stop.numel()].view_as(p.query_stop), p.key_stop, p)
            for p in whole.passes
        )
        layouts[queries] = replace(whole, frame=whole.frame._replace(q_len=queries), passes=passes)
    return layouts[queries]


def _query_stops(layout: BlockLayout) -> Tensor:
    """Returns `Pass.query_stop` for 0, 1, ... queries of a page: int64 [page_size + 1, tiles].

    A row has a number for each query tile of a pass. It begins at an address that is aligned to 16
    bytes, because kernels are compiled for the alignment of tensors.
    """
    most = max((p.query_stop.numel() for p in layout.passes), default=0)
    numbers = torch.arange(layout.frame.q_len + 1)[:, None]
    return numbers.expand(-1, round_up(most, 2)).contiguous()


def _whole_page_layout(state: CacheState) -> BlockLayout:
    """Builds the layout of a page full of queries over all slots; steps cut it to their queries."""
    histories = state.distinct() if len(state.distinct()) == 1 else state.histories
    held, page_size, device = state.keys, state.page_size, state.keys.rows.device
    slots = held.num_slots

    def build() -> BlockLayout:
        block = max(page_size, 128)
        # [entries, Hkv, keys], and [branches, entries, Hkv, keys], False for dead keys
        positions, live = slot_positions(histories, page_size, held.columns(block))
        if state.total is not None:  # the page may be longer than what is left of the sequence
            positions = positions.masked_fill(positions >= state.total, -1)
        starts = torch.tensor([x.base for x in histories])
        frame = state.frame(page_size, int(starts.max()))
        rest = starts, frame, page_size, block
        size = default_block_size(state.pattern, frame.kv_len)
        passes = []
        for number, branch in enumerate(state.pattern.branches):
            # the passes that a whole sequence has, so that sums have the same segments
            for grid, term in disjoint_terms(branch, size):
                segments = partial(grid.segment_of, block_size=size)
                boundary = 0 if held.are_even else held.columns(block)
                p = page_over(number, term, positions, live[number], *rest, segments, boundary)
                passes.append(held.placed(p, block))
        frame = Frame(
            q_len=page_size,
            kv_len=slots,
            num_heads=state.heads,
            num_kv_heads=state.kv_heads,
            q_start=slots - page_size,
        )
        layout = BlockLayout(frame, block, tuple(passes), math.nan)
        stops = {_STOPS: _query_stops(layout)}
        if device != _CPU:
            return layout.on_gpu(device, stops)
        layout.memo.update(stops)
        for p in passes:
            _ = p.transposed_bitmaps  # computed now and cached for all steps of the page
        return layout

    if len(histories) > 1 or not histories[0].exact:
        return build()
    base = histories[0].base
    key = (state.pattern, state.frame(0, base), base, state.rollback, page_size, held.older, device)
    return layout_cache.keep((*key, "page"), build).ready()


def slot_positions(histories: Sequence[History], count: int, columns: int) -> tuple[Tensor, Tensor]:
    """Returns (positions, liveness) of the keys in a layout's slots, older ones then the page.

    Returns: positions [entries, T, slots] of the keys, -1 for no key, T = 1 if all heads are alike;
    and bool [branches, entries, T, slots], False for keys that no later query sees.
    """
    rows, alive = [], []
    for history in histories:
        room, number = columns - history.width, torch.arange(history.base, history.base + count)
        positions = history.positions
        page = number.expand(len(positions), -1)
        rows.append(torch.cat((pad(positions, (0, room), value=-1), page), 1))
        alive.append(pad(history.last >= history.base, (0, room + count), value=True))
    return torch.stack(rows), torch.stack(alive, 1)


def attend_page(
    state: CacheState, layout: BlockLayout, decision: Decision, tokens: NewTokens
) -> tuple[Tensor, Tensor]:
    """Writes new keys and values into their slots, and attends with a layout of `page_layout`."""
    query, key, value, options = tokens
    keys, values = state.keys, state.values
    state.clear_page(state.page_length + query.shape[2])
    rows = (state.page_length,) * len(layout.passes)
    mask = None
    if state.remote:
        place = torch.tensor(state.remote) - state.histories[0].base
        place = (torch.tensor(state.keys.firsts)[:, None] + place).flatten()
        mask = torch.ones(1, state.keys.num_slots, dtype=torch.bool)
        mask = moved(mask.index_fill(1, place, False), query.device)
    problem = Work(layout=layout, first_bitmap_rows=rows, key_mask=mask).problem(
        query,
        keys.rows if keys.are_even else keys.by_head,
        values.rows if keys.are_even else values.by_head,
        decision.scale,
        **options.in_use,
    )
    if (run := BACKENDS[decision.backend].forward_after) is not None:
        return run(problem, (key, value, [x + state.page_length for x in state.keys.firsts]))
    keys.write(key, state.page_length)
    values.write(value, state.page_length)
    return run_backend(decision.backend, problem)


def attend_spans(
    state: CacheState, decision: Decision, tokens: NewTokens, new: list[int]
) -> tuple[Tensor, Tensor]:
    """Attends from `new[i]` tokens of batch entry i to copies of the keys that they visit.

    Entries with equal cached positions are computed in one call. Returns: out [B, Hq, n, Dv] and
    lse [B, Hq, n]. If entries have different numbers of new tokens, the rows after them are 0 and
    -inf.
    """
    tokens = tokens.in_floats()
    groups: dict[tuple[int, int], list[int]] = {}
    for entry, (history, n) in enumerate(zip(state.histories, new, strict=True)):
        groups.setdefault((id(history), n), []).append(entry)
    if len(groups) == 1:
        return _Group(
            state=state, history=state.histories[0], entries=None, decision=decision, tokens=tokens
        ).attend()
    query, _, value, _ = tokens
    out, lse = empty_results(query, value.shape[3])
    whole = not _runs_spans(state, decision.backend) and state.pattern.num_batches() is not None
    for (_, n), numbers in groups.items():
        if not n:
            continue
        index = torch.tensor(numbers, device=query.device)
        entries = torch.arange(len(query), device=query.device) if whole else index
        part, history = tokens.first(n).of_entries(entries), state.histories[numbers[0]]
        results = _Group(
            state=state, history=history, entries=entries, decision=decision, tokens=part
        ).attend()
        out[index, :, :n], lse[index, :, :n] = (x[index] if whole else x for x in results)
    return out, lse


def _runs_spans(state: CacheState, name: str) -> bool:
    """Whether a backend can attend to copied keys: it reads layouts, and hides keys if need be.

    Keys must be hidden if other ranks store some, or if some were cropped. Lists of single keys
    have no layout.
    """
    backend = BACKENDS[name]
    if backend.runs_lists and has_lists(state.pattern):
        return False
    all_stored = not state.remote and all(x.exact for x in state.distinct())
    return backend.reads_layouts and (all_stored or "key_mask" in backend.extras)


class _Group(NamedTuple):
    """New tokens of the batch entries whose keys are at the same positions, attended together."""

    state: CacheState
    history: History
    entries: Tensor | None  # indices of the batch entries; None if the group is the whole batch
    decision: Decision
    tokens: NewTokens  # new tokens of these entries only

    def attend(self) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of the group's new tokens; copies only the keys that they visit."""
        query, *_, options = self.tokens
        state, decision, begin = self.state, self.decision, self.history.length
        frame = state.frame(query.shape[2], begin)
        apart = self.entries is not None and state.pattern.num_batches() is not None
        if begin == 0 and frame.kv_len == query.shape[2] and not state.remote and not apart:
            return self._attend_call(self.tokens, state.pattern, 0)
        if not _runs_spans(state, decision.backend):
            return self._attend_whole(frame)
        layout, rows = self._layout(frame)
        if apart:
            entries = cast(Tensor, self.entries).cpu()
            layout = replace(layout, passes=tuple(p.of_entries(entries) for p in layout.passes))
        spanned = Spanned.of(layout)
        keys, values = self._spread(spanned)
        passes = tuple(p.to(query.device) for p in spanned.layout.passes)
        layout = replace(spanned.layout, passes=passes)
        mask = self._stored(spanned)
        mask = None if mask is None else moved(mask, query.device)
        work = Work(layout=layout, first_bitmap_rows=rows, key_mask=mask)
        problem = work.problem(query, keys, values, decision.scale, **options.in_use)
        return run_backend(decision.backend, problem)

    def _attend_call(
        self, tokens: NewTokens, pattern: Pattern, q_start: int
    ) -> tuple[Tensor, Tensor]:
        """Runs `attention` with the group's tokens as queries, as on a whole sequence."""
        decision = self.decision
        call = Call(
            query=tokens.query,
            key=tokens.key,
            value=tokens.value,
            pattern=pattern,
            scale=decision.scale,
            q_start=q_start,
            block_size=decision.block_size,
            options=tokens.options,
        )
        return attend(call, Decision.of(call, decision.backend))

    def _stored(self, spanned: Spanned) -> Tensor | None:
        """Returns bool [1, spanned.length]: False for keys that are not stored; None if all are."""
        history, remote = self.history, self.state.remote
        if history.exact and not remote:
            return None
        end = history.length + self.tokens.query.shape[2]
        stored = history.positions_with(history.length - history.base).flatten()
        stored = torch.cat((stored[stored >= 0], torch.arange(history.length, end)))
        stored = stored[~torch.isin(stored, torch.tensor(remote, dtype=torch.int64))]
        # One mask serves all heads: the pattern of a head that has evicted a key does not visit it.
        mask = torch.zeros(1, spanned.length + 1, dtype=torch.bool)
        return mask.index_fill(1, spanned.place_of(stored), True)[:, :-1]

    def _layout(self, frame: Frame) -> tuple[BlockLayout, tuple[int, ...]]:
        """Returns (layout of the new queries, their first rows in each pass's bitmaps)."""
        pattern, size = self.state.pattern, self.decision.block_size
        begin, queries = self.history.length, self.tokens.query.shape[2]
        size = default_block_size(pattern, frame.kv_len) if size is None else size
        if self.state.total is None:
            layout = last_query_layout(pattern, frame, size, _CPU)
            return layout or (layout_cache.layout(pattern, frame, size, _CPU), ())

        def build() -> BlockLayout:
            compiled = compile_passes(pattern, frame, size, queries=[(begin, begin + queries)])
            rows = frame._replace(q_start=begin, q_len=queries)
            passes = tuple(assemble(c, rows) for c in compiled)
            return BlockLayout(rows, size, passes, math.nan)

        return layout_cache.keep((pattern, frame, size, begin, queries, "rows"), build), ()

    def _spread(self, spanned: Spanned) -> list[Tensor]:
        """Copies cached and new (keys, values) to [B, Hkv, spanned.length, D], zeros in gaps.

        Returns keys and values, [batch, Hkv, spanned.length, D] each.
        """
        state, history, length = self.state, self.history, spanned.length
        positions = history.positions_with(state.page_length)
        place = torch.where(positions < 0, length, spanned.place_of(positions.clamp(min=0)))
        place = place.expand(state.kv_heads, -1)
        device, results = self.tokens.key.device, []
        places = [
            head * (length + 1) + own  # in the result, heads lie one after the other
            for head, own in enumerate(state.keys.in_slots(place, history.width, length))
        ]
        index = moved(torch.cat(places), device) if places else None
        for held, new in ((state.keys, self.tokens.key), (state.values, self.tokens.value)):
            batch, heads, count, width = new.shape
            # The extra place at the end receives the keys that are not visited.
            result = new.new_zeros(batch, heads, length + 1, width)
            if index is not None:
                cached = held.rows if self.entries is None else held.rows[self.entries]
                cached = from_store(cached, new.dtype) if is_in_store(cached) else cached
                result.flatten(1, 2).index_copy_(1, index, cached.flatten(1, 2))
            new_place = spanned.place_of(torch.arange(history.length, history.length + count))
            result[:, :, moved(new_place, new.device)] = new
            results.append(result[:, :, :length])
        return results

    def _attend_whole(self, frame: Frame) -> tuple[Tensor, Tensor]:
        """Attends over all positions, for backends without layouts; evicted keys are zeros.

        It is for lists of keys, and for backends that read no layout.
        """
        query, pattern = self.tokens.query, self.state.pattern
        begins, ends = torch.zeros(1, dtype=torch.int64), torch.full((1,), frame.kv_len)
        everything = Spanned(BlockLayout(frame, 128, (), math.nan), begins, ends)
        keys, values = self._spread(everything)
        first, n = self.history.length - frame.q_start, query.shape[2]
        rest = frame.q_len - first - n  # zero queries after the new ones, whose results are unused
        query = pad(query, (0, 0, first, rest))
        options = for_queries(self.tokens.options, lambda x: pad(x, (first, rest)))
        if (mask := self._stored(everything)) is not None:
            pattern = cast(Mask, pattern) & KeyMask(mask[0])
        tokens = NewTokens(query, keys, values, options)
        out, lse = self._attend_call(tokens, pattern, frame.q_start)
        return out[:, :, first : first + n], lse[:, :, first : first + n]


def empty_results(query: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of queries that visit no key: zeros and -inf."""
    out = query.new_zeros(*query.shape[:3], value_dim)
    return out, query.new_full(query.shape[:3], -torch.inf, dtype=sum_dtype(query))


def run_backend(name: str, problem: Problem) -> tuple[Tensor, Tensor]:
    """Runs a backend's forward pass outside autocast, and returns (out, lse)."""
    with without_autocast(problem.query):
        return BACKENDS[name].forward(problem)
