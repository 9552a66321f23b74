"""Drafts: attends from a tree of guessed tokens after a cache, which then keeps one path of it."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import checked_index
from ..ground.arguments import MOST_TOKENS, checked_integers, shortened
from ..ground.numerics import merge_attention
from ..ground.streams import moved
from ..kernels.backends import BACKENDS
from ..layouts.cache import layout_cache
from ..layouts.gathered_keys import page_over
from ..layouts.layout import BlockLayout
from ..patterns.algebra import Frame, Pattern
from ..patterns.tree import Tree, has_tree
from ..route.decision import Decision
from ..route.work import Work
from .cache_state import CacheState, Draft
from .held_rows import HeldRows
from .steps import (
    IN_PAGES,
    NewTokens,
    attend_spans,
    empty_results,
    run_backend,
    slot_positions,
)


def draft_of(state: CacheState, tokens: NewTokens, tree: Sequence[int] | Tensor) -> Draft:
    """Checks `tree`, each new token's parent, and returns the draft.

    ValueError for a wrong parent.
    """
    n, parents = tokens.query.shape[2], checked_integers("tree", tree, -MOST_TOKENS)
    if len(parents) != n:
        raise ValueError(
            f"tree needs a parent for each of the {n} new tokens, got {len(parents)}; -1 stands "
            "for the last cached token"
        )
    depth = [0] * (n + 1)  # the last item is for parent -1, the end of the cached tokens
    for token, parent in enumerate(parents):
        if not -1 <= parent < token:
            raise ValueError(
                f"each parent in tree must come before its token, got parent {parent} of token "
                f"{token}; -1 stands for the last cached token"
            )
        depth[token] = depth[parent] + 1
    length, deepest = max(state.lengths, default=0), max(depth)
    if state.total is not None and length + deepest > state.total:
        raise ValueError(
            f"the cache is for {state.total} tokens, got a draft of depth {deepest} after "
            f"{length}; give KVCache a larger max_length, or cut the draft"
        )
    if has_tree(state.pattern) or state.remote:
        raise ValueError(
            "a draft needs a cache whose pattern has no Tree, with all keys of its page, got "
            f"{shortened(str(state.pattern))}; call attend without tree="
        )
    key, value = tokens.key.clone(), tokens.value.clone()  # the caller may overwrite its own
    return Draft(key=key, value=value, parents=parents, depth=deepest)


def attend_draft(
    state: CacheState, decision: Decision, tokens: NewTokens, draft: Draft
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a draft's tokens; each sees cached tokens and its own ancestors.

    1. The cached tokens and the draft become one tree per batch entry (`_tree_over`).
    2. One tile of queries visits the cache's slots, then the new keys: no key is copied, and the
       layers of a model share layouts (`_attend_in_slots`).
    3. Longer drafts and other options take the keys in the order of their positions
       (`_attend_by_position`).
    """
    backend = BACKENDS[decision.backend]
    merges = backend.reads_layouts and not backend.is_invariant  # merging results changes bits
    fits = 0 < tokens.query.shape[2] <= _tile_of(state)
    if fits and merges and state.histories and tokens.options.in_use.keys() <= IN_PAGES:
        return _attend_in_slots(state, decision, tokens, draft)
    return _attend_by_position(state, decision, tokens, draft)


def _tree_over(state: CacheState, draft: Draft, lengths: Sequence[int]) -> Tree:
    """Returns a `Tree` pattern: one node with all cached tokens, and the draft's tokens below it.

    `lengths` has the cached tokens of each batch entry; the tree has entries if there are several.
    """
    count = len(draft.parents)
    nodes: Any = tuple((length, *(1,) * count) for length in lengths)
    above: Any = ((-1, *(parent + 1 for parent in draft.parents)),) * len(lengths)
    if len(lengths) == 1:
        nodes, above = nodes[0], above[0]
    end = max(state.lengths, default=0) + draft.depth if state.total is None else state.total
    return Tree(nodes, above, state.pattern, end)  # type: ignore[arg-type]


def _tile_of(state: CacheState) -> int:
    """Returns how many queries a tile has in a draft's layouts, where keys are cache slots."""
    return max(state.page_size, 128)


def _attend_by_position(
    state: CacheState, decision: Decision, tokens: NewTokens, draft: Draft
) -> tuple[Tensor, Tensor]:
    """Attends with the batch entries of each length apart, because a tree needs one length."""
    tokens = tokens.in_floats()
    out, lse = empty_results(tokens.query, tokens.value.shape[3])
    for length in set(state.lengths):
        counts = [len(draft.parents) if x == length else 0 for x in state.lengths]
        within = state.changed(pattern=_tree_over(state, draft, [length]), total=None)
        found = attend_spans(within, decision, tokens, counts)
        index = torch.tensor(counts, device=tokens.query.device).nonzero()[:, 0]
        out[index], lse[index] = (x[index] for x in found)
    return out, lse


def _attend_in_slots(
    state: CacheState, decision: Decision, tokens: NewTokens, draft: Draft
) -> tuple[Tensor, Tensor]:
    """Attends to the cached keys where they lie and to the draft's own keys.

    Merges both results.
    """
    query, n, device = tokens.query, len(draft.parents), tokens.query.device
    lengths = state.lengths if len(set(state.lengths)) > 1 else state.lengths[:1]
    pattern = _tree_over(state, draft, lengths)
    histories = state.distinct() if len(state.distinct()) == 1 else state.histories
    starts = torch.tensor(lengths)  # [B or 1]
    new = (starts[:, None, None] + torch.arange(n)).expand(len(histories), state.kv_heads, n)
    frame = Frame(
        q_len=n,
        kv_len=max(lengths) + n,
        num_heads=state.heads,
        num_kv_heads=state.kv_heads,
        q_start=max(lengths),
    )
    drafted = _Keys(
        key=tokens.key,
        value=tokens.value,
        positions=new,
        live=[new >= 0] * len(pattern.branches),
        held=None,
    )
    parts = [drafted]
    if (held := state.keys).num_slots:
        old, alive = slot_positions(histories, state.page_length, held.columns(_tile_of(state)))
        parts.insert(
            0,
            _Keys(
                key=held.by_head,
                value=state.values.by_head,
                positions=old,
                live=alive,
                held=held,
            ),
        )
    # If its base determines a history, the layers of a model share the layouts over it.
    known = "draft", pattern, frame, histories[0].base, state.rollback, state.page_size, device
    exact = len(histories) == 1 and histories[0].exact
    results, options = [], tokens.options
    for keys in parts:
        seen = keys.positions, keys.live, starts, keys.held
        build = partial(_layout, pattern, seen, frame, _tile_of(state), device)
        layout = layout_cache.keep((*known, keys is drafted), build).ready() if exact else build()
        problem = Work(layout=layout).problem(
            query, keys.key, keys.value, decision.scale, in_float32=True, **options.in_use
        )
        results.append(run_backend(decision.backend, problem))
        options = options.changed(sink=None)  # the first part has counted the sink
    outs, lses = zip(*results, strict=True)  # [B, Hq, n, Dv] and [B, Hq, n] of each part
    out, lse = merge_attention(outs, lses)
    return out.to(query.dtype), lse


class _Keys(NamedTuple):
    """One of the two sets of keys that a draft attends to: the cached ones, or the draft's own."""

    key: Tensor  # [B, Hkv, slots, D]
    value: Tensor  # [B, Hkv, slots, Dv]
    positions: Tensor  # [B or 1, Hkv, slots] position of the key in each slot; -1 if it is empty
    live: Any  # for each branch, bool [B or 1, Hkv, slots], False if no later query visits the key
    held: HeldRows | None  # says where each head's slots are in `key`; None if heads are alike


def _layout(tree: Pattern, seen: Any, frame: Frame, block: int, place: torch.device) -> BlockLayout:
    """Builds the layout of the draft's queries, one tile, over the keys of one `_Keys`."""
    # positions [B, Hkv, slots]; `live`, the same for each branch; starts [B]; `held` or None
    positions, live, starts, held = seen
    passes, n = [], frame.q_len
    queries = -(-n // 8) * 8  # bitmaps have whole bytes of queries
    for number, branch in enumerate(tree.branches):
        p = page_over(number, branch, positions, live[number], starts, frame, queries, block)
        p = p.like(query_stop=p.query_stop.clamp(max=n))
        passes.append(p if held is None else held.placed(p, block))
    slots = positions.shape[2] if held is None else held.num_slots
    frame = frame._replace(kv_len=slots, q_start=slots - n)
    layout = BlockLayout(frame, block, tuple(passes), math.nan)
    return layout if place.type == "cpu" else layout.on_gpu(place)


def kept(state: CacheState, path: Sequence[int] | Tensor) -> CacheState:
    """Returns the state without its draft, after the tokens on a path of it.

    ValueError if `path` is no path from the cache's end.
    """
    if (draft := state.draft) is None:
        raise ValueError("keep needs a draft, got none; call attend(tree=) first")
    index = checked_index("path", path, len(draft.parents))
    before = -1
    for token in index.tolist():
        if draft.parents[token] != before:
            raise ValueError(
                f"a path must go on from child to child, got token {token} with parent "
                f"{draft.parents[token]} behind {before}; a first token has parent -1"
            )
        before = token
    state = state.changed(draft=None)
    index = moved(index, draft.key.device)
    key, value = (x[:, :, index] for x in draft[:2])
    return state.appended(key, value) if len(index) else state
