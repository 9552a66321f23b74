"""Cost of block selection: scores, selection and attention together, against dense attention."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sparsering.decoding import KVCache, SelectedCache
from sparsering.functional import attention
from sparsering.patterns.algebra import Pattern
from sparsering.patterns.positions import Causal
from sparsering.patterns.selected import SelectedBlocks, selections_of
from sparsering.selection import block_scores, select_blocks

from ..measure import Row, gradient_of, inputs_of, interleaved_times, sampled_error
from .cases import dense
from .decoding import Step, token_turns

HEADS, KV_HEADS, WIDTH, BLOCK, CHOSEN = 8, 2, 64, 64, 16


def selection(quick: bool) -> list[Row]:
    """16 blocks of 64, for rows of 64 queries and of 1: the whole, its parts, dense attention."""
    rows: list[Row] = []
    for length in (1024,) if quick else (4096, 16384):
        for dtype in (torch.float32, torch.bfloat16):
            for alike, backward in ((False, False), (True, False), (False, True)):
                rows += _rows(length, dtype, alike, backward, 2 if quick else 3)
    if not quick:  # dense attention takes minutes here
        for dtype, backward in (
            (torch.float32, False), (torch.bfloat16, False), (torch.float32, True),
        ):  # fmt: skip
            rows += _rows(65536, dtype, False, backward, 1)
    return rows


def selection_scores(quick: bool) -> list[Row]:
    """Share of scoring in score + select + attend, for rows of 64 queries and of 1."""
    rows: list[Row] = []
    for length in (1024,) if quick else (4096, 16384):
        for dtype in (torch.float32, torch.bfloat16):
            rows += _parts_of_whole(length, dtype, 2 if quick else 9)
    return rows


@torch.no_grad()
def _parts_of_whole(length: int, dtype: torch.dtype, rounds: int) -> list[Row]:
    inputs = _inputs(length, dtype, False)
    query, key, _ = inputs
    calls: dict[str, Callable[[], Tensor]] = {}
    last: dict[str, Tensor] = {}
    for tokens in (BLOCK, 1):
        scores = _scores(query, key, tokens)
        calls[f"{tokens}: whole"] = partial(_whole, *inputs, tokens)
        calls[f"{tokens}: score"] = partial(_scores, query, key, tokens)
        calls[f"{tokens}: select"] = partial(_chosen, scores, tokens)
        last[f"{tokens}: chosen"] = calls[f"{tokens}: select"]()
    timed = {name: partial(_note, last, name, call, (), query) for name, call in calls.items()}
    times = interleaved_times(timed, rounds)
    rows: list[Row] = []
    for tokens in (BLOCK, 1):
        whole, score, select = (times[f"{tokens}: {part}"] for part in ("whole", "score", "select"))
        pattern = SelectedBlocks(last[f"{tokens}: chosen"], BLOCK, tokens) & Causal()
        rows.append(
            {
                "rows_of": tokens, "tokens": length, "dtype": str(dtype)[6:], "pass": "forward",
                "ms": statistics.median(whole), "least": min(whole), "most": max(whole),
                "score_ms": statistics.median(score), "score_least": min(score),
                "score_most": max(score), "select_ms": statistics.median(select),
                "score_share": statistics.median(score) / statistics.median(whole),
                "error": sampled_error(last[f"{tokens}: whole"], *inputs, pattern, rows=8),
            }
        )  # fmt: skip
    return rows


def _inputs(length: int, dtype: torch.dtype, alike: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Draws queries, keys and values; with `alike` they drift, so neighbours select alike."""
    query, key, value = inputs_of(HEADS, length, WIDTH, kv_heads=KV_HEADS)
    if alike:
        query, key = (_drifting(x) for x in (query, key))
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _drifting(x: Tensor, tokens: int = 128) -> Tensor:
    """Mixes each vector with the mean of `tokens` neighbours: half of its variance is shared."""
    total = torch.nn.functional.pad(x.double().cumsum(2), (0, 0, tokens, 0))
    slow = (total[:, :, tokens:] - total[:, :, :-tokens]) / tokens**0.5
    return ((x + slow.float()) * 0.5**0.5).contiguous()


def _rows(length: int, dtype: torch.dtype, alike: bool, backward: bool, rounds: int) -> list[Row]:
    inputs = _inputs(length, dtype, alike)
    query, key, value = leaves = [x.clone().requires_grad_(backward) for x in inputs]
    grad = gradient_of(query)
    patterns: dict[str, Pattern] = {"dense SDPA": Causal(), "Causal()": Causal()}
    calls: dict[str, Callable[[], Tensor]] = {
        "dense SDPA": dense(leaves, causal=True),
        "Causal()": lambda: attention(query, key, value, Causal()),
    }
    parts: dict[str, Callable[[], Tensor]] = {}
    for tokens in (BLOCK, 1):
        name = f"selected, rows of {tokens}"
        scores = _scores(query, key, tokens)
        patterns[name] = SelectedBlocks(_chosen(scores, tokens), BLOCK, tokens) & Causal()
        calls[name] = partial(_whole, query, key, value, tokens)
        parts[f"{name}: score"] = partial(_scores, query, key, tokens)
        parts[f"{name}: select"] = partial(_chosen, scores, tokens)
    if backward and length > 30000:
        del calls["Causal()"]  # takes minutes, as dense SDPA does
    last: dict[str, Tensor] = {}
    timed: dict[str, Callable[[], object]] = {
        name: partial(_note, last, name, call, leaves, grad) for name, call in calls.items()
    }
    timed |= {} if backward else parts
    with torch.set_grad_enabled(backward):
        times = interleaved_times(timed, rounds)
        rows = [
            {
                "call": name, "pass": "forward and backward" if backward else "forward",
                "tokens": length, "dtype": str(dtype)[6:],
                "data": "neighbours alike" if alike else "random",
                "ms": statistics.median(times[name]),
                "least": min(times[name]), "most": max(times[name]),
                "of_dense": statistics.median(times[name]) / statistics.median(times["dense SDPA"]),
                **_described(patterns[name], length),
                "error": sampled_error(last[name], *inputs, patterns[name], rows=8),
            }
            for name in calls
        ]  # fmt: skip
    if not backward:
        for row in rows:
            for part in ("score", "select"):
                if f"{row['call']}: {part}" in times:
                    row[f"{part}_ms"] = statistics.median(times[f"{row['call']}: {part}"])
    return rows


@torch.no_grad()
def _scores(query: Tensor, key: Tensor, tokens: int) -> Tensor:
    return block_scores(query, key, BLOCK, query_block=tokens)


def _chosen(scores: Tensor, tokens: int) -> Tensor:
    return select_blocks(scores, CHOSEN, block_size=BLOCK, query_block=tokens)


def _whole(query: Tensor, key: Tensor, value: Tensor, tokens: int) -> Tensor:
    chosen = _chosen(_scores(query, key, tokens), tokens)
    return attention(query, key, value, SelectedBlocks(chosen, BLOCK, tokens) & Causal())


def _note(
    last: dict[str, Tensor],
    name: str,
    call: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    grad: Tensor,
) -> None:
    out = call()
    if out.requires_grad:
        torch.autograd.grad(out, leaves, grad)
    last[name] = out.detach()


def _described(pattern: Pattern, length: int) -> Row:
    """Density among causal pairs; inflation: blocks that 64 queries list, over those of one row."""
    pairs = pattern.layout(length, num_heads=HEADS, num_kv_heads=KV_HEADS).num_pairs
    row: Row = {"density": pairs / (length * (length + 1) / 2)}
    for selected in selections_of(pattern):
        row["inflation"] = float(selected.inflation(BLOCK, length).mean())
    return row


def selection_decoding(quick: bool) -> list[Row]:
    """One new token after many: selection (scores included) and attention, against dense."""
    length, steps, chosen = (4096, 8, 16) if quick else (131072, 256, 64)
    total = length + 2 * steps
    query, key, value = inputs_of(HEADS, total, WIDTH, kv_heads=KV_HEADS)
    caches = {
        "KVCache(Causal())": KVCache(Causal(), 1, KV_HEADS, WIDTH, num_heads=HEADS),
        "SelectedCache": SelectedCache(1, KV_HEADS, WIDTH, chosen, num_heads=HEADS),
    }
    with torch.no_grad():
        for cache in caches.values():
            cache.load(key[:, :, :length], value[:, :, :length])

        def tokens_at(place: int) -> list[Tensor]:
            return [x[:, :, place : place + 1] for x in (query, key, value)]

        def of_all(place: int, token: Sequence[Tensor]) -> Tensor:
            return dense((token[0], *(x[:, :, : place + 1] for x in (key, value))))()

        turns: dict[str, Step] = {"dense SDPA": of_all}
        turns |= {name: partial(_attended, cache) for name, cache in caches.items()}
        times, outs = token_turns(turns, tokens_at, range(length, total), untimed=steps)
    median = {name: statistics.median(each) for name, each in times.items()}
    timed = query[:, :, -steps:]
    errors = {
        name: sampled_error(torch.cat(outs[name], 2), timed, key, value, Causal(), rows=8)
        for name in times
        if name != "SelectedCache"  # it attends to blocks that its own scores select
    }
    return [
        {
            "call": name, "keys": length, "heads": HEADS, "kv_heads": KV_HEADS, "blocks": chosen,
            "block": BLOCK, "ms": median[name], "mean_ms": statistics.fmean(each),
            "slowest_ms": max(each), "of_sdpa": median[name] / median["dense SDPA"],
            "of_cache": median[name] / median["KVCache(Causal())"], "error": errors.get(name),
        }
        for name, each in times.items()
    ]  # fmt: skip


def _attended(cache: KVCache | SelectedCache, _: int, token: Sequence[Tensor]) -> Tensor:
    return cache.attend(*token)
