"""Drafts: a tree of guessed tokens behind a cache, of which the cache then keeps one path."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call_recipe import CallRecipe
from ..checks import checked_index
from ..dispatch import BACKENDS
from ..kernels.problem import Problem
from ..layouts.cache import layout_cache
from ..layouts.gathered_keys import page_over
from ..layouts.layout import BlockLayout
from ..numerics import merge_attention
from ..patterns.algebra import Frame, Pattern
from ..patterns.arguments import MOST_TOKENS, checked_integers, shortened
from ..patterns.tree import Tree, has_tree
from ..streams import moved
from .cache_state import CacheState, Draft
from .steps import IN_PAGES, NewTokens, attend_spans, empty_results, run_backend


def draft_of(state: CacheState, tokens: NewTokens, tree: Sequence[int] | Tensor) -> Draft:
    """Checks the parents of new tokens; ValueError names the first that is wrong."""
    n, parents = tokens.query.shape[2], checked_integers("tree", tree, -MOST_TOKENS)
    if len(parents) != n:
        raise ValueError(
            f"tree needs a parent for each of the {n} new tokens, got {len(parents)}; -1 stands "
            "for the last cached token"
        )
    depth = [0] * (n + 1)  # last item: of the cached tokens' end
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
    state: CacheState, recipe: CallRecipe, tokens: NewTokens, draft: Draft
) -> tuple[Tensor, Tensor]:
    """Attends from a draft's tokens, which are nodes of a tree below one of all cached tokens.

    One tile of queries walks the cache's slots, then the new keys: no key is copied, and the layers
    of a model share layouts. Longer drafts, and other extras, take the keys by position.
    """
    query, n, lengths = tokens.query, tokens.query.shape[2], state.lengths
    every = lengths if len(set(lengths)) > 1 else lengths[:1] or [0]
    nodes: Any = tuple((length, *(1,) * n) for length in every)
    parents = (-1, *(parent + 1 for parent in draft.parents))
    above: Any = (parents,) * len(every)
    nodes, above = (nodes, above) if len(every) > 1 else (nodes[0], above[0])
    end = max(every) + draft.depth if state.total is None else state.total
    pattern: Pattern = Tree(nodes, above, state.pattern, end)  # type: ignore[arg-type]
    block = max(state.page_size, 128)
    walks = bool(n and state.histories) and BACKENDS[recipe.backend].forward is not None
    if n > block or not walks or not tokens.extras.in_use.keys() <= IN_PAGES:
        out, lse = empty_results(query, tokens.value.shape[3])
        for length in set(lengths):  # a tree has the keys of its own entries
            tree: Pattern = Tree((length, *(1,) * n), parents, state.pattern, end)  # type: ignore[arg-type]
            counts = [n if x == length else 0 for x in lengths]
            found = attend_spans(state.changed(pattern=tree, total=None), recipe, tokens, counts)
            index = torch.tensor(counts, device=query.device).nonzero()[:, 0]
            out[index], lse[index] = (x[index] for x in found)
        return out, lse
    histories = state.distinct() if len(state.distinct()) == 1 else state.histories
    starts = torch.tensor(every)
    old = torch.stack([x.positions_with(state.page_length) for x in histories])  # [B, Hkv, slots]
    new = (starts[:, None, None] + torch.arange(n)).expand(*old.shape[:2], n)  # [B, Hkv, n]
    # [branches, Hkv, slots] of each entry; slots of the page behind the history are alive
    alive = [pad(x.last >= x.base, (0, state.page_length), value=True) for x in histories]
    frame = Frame(
        q_len=n,
        kv_len=max(every) + n,
        num_heads=state.heads,
        num_kv_heads=state.kv_heads,
        q_start=max(every),
    )
    cached = state.in_use(state.keys), state.in_use(state.values), old, torch.stack(alive, 1)
    # (keys [B, Hkv, slots, D], values, positions [B, Hkv, slots], alive by branch) of both parts
    drafted = tokens.key, tokens.value, new, [new >= 0] * len(pattern.branches)
    known = "draft", pattern, frame, histories[0].base, state.rollback, state.page_size
    exact = len(histories) == 1 and histories[0].exact
    parts, extras = [], tokens.extras.in_use
    for key, value, *seen in (cached, drafted) if state.keys.shape[2] else (drafted,):
        build = partial(_layout, pattern, (*seen, starts), frame, block, query.device)
        key_of = *known, query.device, key is cached[0]
        layout = layout_cache.keep(key_of, build).ready() if exact else build()
        problem = Problem(
            layout=layout,
            query=query,
            key=key,
            value=value,
            scale=recipe.scale,
            in_float32=True,
            **extras,
        )
        parts.append(run_backend(recipe.backend, problem))
        extras = {name: x for name, x in extras.items() if name != "sink"}  # it counts once
    outs, lses = zip(*parts, strict=True)  # [B, Hq, n, Dv] and [B, Hq, n] of each part
    out, lse = merge_attention(outs, lses)
    return out.to(query.dtype), lse


def _layout(tree: Pattern, seen: Any, frame: Frame, block: int, place: torch.device) -> BlockLayout:
    positions, live, starts = seen  # [B, Hkv, slots], the same by branch, [B]
    passes, n = [], frame.q_len
    queries = -(-n // 8) * 8  # bitmaps have whole bytes of queries
    for number, branch in enumerate(tree.branches):
        p = page_over(number, branch, positions, live[number], starts, frame, queries, block)
        passes.append(p.like(query_stop=p.query_stop.clamp(max=n)).to(place))
    frame = frame._replace(kv_len=positions.shape[2], q_start=positions.shape[2] - n)
    return BlockLayout(frame, block, tuple(passes), math.nan).shared(place)


def kept(state: CacheState, path: Sequence[int] | Tensor) -> CacheState:
    """Returns the state without its draft, after the draft's tokens on a path; or ValueError."""
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
    key, value = (x[:, :, moved(index, x.device)] for x in draft[:2])
    return state.appended(key, value) if len(index) else state
