"""Decoding with `KVCache`: time and bytes per token, against caches that keep everything.

All calls take turns token by token, like the layers of a model, so that no cache stays in the
processor's cache. The measured tokens are the last ones before a length, mostly a power of 2:
there the segments of a LongNet end and its cache is largest.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsering.decoding import KVCache
from sparsering.functional import attention
from sparsering.patterns.algebra import Mask, Mixture, Pattern
from sparsering.patterns.positions import Causal, GlobalTokens, LongNet, SlidingWindow

from ..measure import Row, error_of_rows

HEADS, WIDTH, PAGE, PART = 8, 64, 128, 8192
EVERYTHING = "Causal()"
PATTERNS: dict[str, Mask | Mixture] = {
    "Causal() & SlidingWindow(4095)": Causal() & SlidingWindow(4095),
    "Causal() & (SlidingWindow(4096) | GlobalTokens(64, rows=False))": Causal()
    & (SlidingWindow(4096) | GlobalTokens(64, rows=False)),
    "LongNet((2048, 8192, 32768), (1, 4, 16)) & Causal()": LongNet((2048, 8192, 32768), (1, 4, 16))
    & Causal(),
    "LongNet((2048, 4096, 8192), (1, 2, 4)) & Causal()": LongNet((2048, 4096, 8192), (1, 2, 4))
    & Causal(),
}
FIXED = "attention, one length"
MOST_OF_ALL, MOST_HELD = 1 << 16, 1 << 26  # limits: tokens of Causal(), numbers in a full cache

Name = TypeVar("Name")
Step = Callable[[int, Sequence[Tensor]], Tensor]  # (position, its query, key and value) -> out


def decoding(quick: bool) -> list[Row]:
    """One token after 1K to 1M cached tokens.

    The peers are dense SDPA and `attention` on a cache that keeps everything, up to 2^26 numbers in
    it (128K tokens of one batch entry).
    """
    pages, rows = 1 if quick else 3, []
    for dtype in (torch.float32, torch.bfloat16):
        for batch, last in ((1, 11 if quick else 20), (8, 10 if quick else 14)):
            lengths = [1 << exponent for exponent in range(10, last + 1)]
            rows += tokens_after(lengths, batch, dtype, PATTERNS, pages)
    return rows


def batches(quick: bool) -> list[Row]:
    """32 sequences of different lengths, in one cache and in one cache each; prompts in parts."""
    rows: list[Row] = []
    pages = 1 if quick else 3
    for dtype in (torch.float32, torch.bfloat16):
        for name, pattern in list(PATTERNS.items())[1:3]:
            lengths = [200 + 7800 * i // 31 for i in range(32)]
            rows += of_many_lengths(lengths[:4] if quick else lengths, dtype, name, pattern, pages)
            parts = (512, 2048) if quick else (512, 2048, 8192, 32768)
            rows += prompts_in_parts(parts, dtype, name, pattern, pages)
    return rows


def tokens_after(
    lengths: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    patterns: Mapping[str, Mask | Mixture],
    pages: int,
) -> list[Row]:
    """Measures the last pages of tokens before each length; the caches grow between lengths."""
    sequences, patterns = _Sequences(batch, dtype), {**patterns, EVERYTHING: Causal()}
    caches = {name: _cache(pattern, batch) for name, pattern in patterns.items()}
    most = max((n for n in lengths if batch * HEADS * n * WIDTH <= MOST_HELD), default=0)
    everything = {  # own copies, as a shared one would stay in the processor's cache
        name: [x.clone() for x in sequences.tokens(0, most)[1:]] for name in patterns
    }
    in_dense = [x.clone() for x in everything[EVERYTHING]]
    rows: list[Row] = []
    for length in lengths:
        first = length - (pages + 1) * PAGE
        if length > MOST_OF_ALL:
            caches.pop(EVERYTHING, None)
        steps: dict[tuple[str, str], Step] = {}
        for name, cache in caches.items():
            _prefill(cache, sequences, first)
            steps["cache", name] = _cached(cache)
            if length <= most:
                steps[FIXED, name] = _same_length(patterns[name], everything[name], length)
        if length <= most:
            steps["dense", EVERYTHING] = _dense(in_dense)
        largest: dict[str, tuple[int, int]] = {}
        watch = partial(_note_largest, largest, caches)
        each = partial(sequences.tokens, count=1)
        times, outs = token_turns(steps, each, range(first, length), PAGE, watch)
        for (backend, name), taken in times.items():
            pattern, out, start = patterns[name], torch.cat(outs[backend, name], 2), first + PAGE
            if backend == FIXED:
                out, start = out[:, :, -1:], length - 1
            everywhere = length, 2 * batch * HEADS * length * WIDTH * dtype.itemsize
            keys, size = largest[name] if backend == "cache" else everywhere
            counts = pattern.to_dense(1, length, num_heads=HEADS, q_start=length - 1)
            rows.append({
                "case": "one token", "pattern": name, "backend": backend, "dtype": str(dtype)[6:],
                "batch": batch, "tokens": length, "heads": HEADS, "head_dim": WIDTH,
                "pairs": float(counts.expand(HEADS, 1, -1).sum() / HEADS), "kept": keys,
                "bound": pattern.cache_bound(num_heads=HEADS), "bytes": size,
                **_timing(taken, batch),
                "error": sequences.error(out, pattern, [start] * batch),
            })  # fmt: skip
    return rows


def of_many_lengths(
    lengths: Sequence[int],
    dtype: torch.dtype,
    name: str,
    pattern: Mask | Mixture,
    pages: int,
) -> list[Row]:
    """Measures sequences of different lengths in one cache (one call), and in one cache each."""
    batch = len(lengths)
    sequences, together = _Sequences(batch, dtype), _cache(pattern, batch)
    alone = [_cache(pattern, 1) for _ in lengths]
    prompt: dict[str, float] = {"one cache": 0.0, "a cache each": 0.0}
    for start in range(0, max(lengths), 2048):
        new = [min(max(length - start, 0), 2048) for length in lengths]
        tokens = sequences.tokens(start, max(new))
        begin = time.perf_counter()
        together.attend(*tokens, lengths=new)
        between = time.perf_counter()
        for entry, (cache, n) in enumerate(zip(alone, new, strict=True)):
            if n:
                cache.attend(*(x[entry : entry + 1, :, :n] for x in tokens))
        prompt["one cache"] += (between - begin) * 1e3
        prompt["a cache each"] += (time.perf_counter() - between) * 1e3

    def each(_: int, tokens: Sequence[Tensor]) -> Tensor:
        return torch.cat([c.attend(*(x[i : i + 1] for x in tokens)) for i, c in enumerate(alone)])

    steps: dict[str, Step] = {"one cache": _cached(together), "a cache each": each}

    def tokens_at(position: int) -> tuple[Tensor, ...]:
        return sequences.tokens([length + position for length in lengths], 1)

    times, outs = token_turns(steps, tokens_at, range((pages + 1) * PAGE), PAGE)
    sizes = {
        "one cache": together.nbytes,
        "a cache each": sum(cache.nbytes for cache in alone),
    }
    mean = statistics.fmean(times["a cache each"])
    return [
        {
            "case": "many lengths", "pattern": name, "backend": backend,
            "dtype": str(dtype)[6:], "batch": batch, "shortest": min(lengths),
            "longest": max(lengths), "heads": HEADS, "head_dim": WIDTH, "bytes": sizes[backend],
            "prompt_ms": prompt[backend], **_timing(taken, batch),
            "times_separate": mean / statistics.fmean(taken),
            "error": sequences.error(
                torch.cat(outs[backend], 2), pattern, [length + PAGE for length in lengths], rows=3
            ),
        }
        for backend, taken in times.items()
    ]  # fmt: skip


def prompts_in_parts(
    parts: Sequence[int],
    dtype: torch.dtype,
    name: str,
    pattern: Mask | Mixture,
    rounds: int,
) -> list[Row]:
    """Measures a prompt as long as the largest part, in parts of each size."""
    sequences, length = _Sequences(1, dtype), max(parts)
    times: dict[int, list[float]] = {part: [] for part in parts}
    outs: dict[int, Tensor] = {}
    tokens = sequences.tokens(0, length)
    for number in range(rounds + 1):
        for part in parts:
            cache, results = _cache(pattern, 1), []
            start = time.perf_counter()
            for chunk in zip(*(x.split(part, 2) for x in tokens), strict=True):
                results.append(cache.attend(*chunk))
            if number:
                times[part].append((time.perf_counter() - start) * 1e3)
            outs[part] = torch.cat(results, 2)
    whole = statistics.median(times[length])
    return [
        {
            "case": "prompt in parts", "pattern": name, "dtype": str(dtype)[6:],
            "tokens": length, "part": part, "heads": HEADS, "head_dim": WIDTH,
            "ms": statistics.median(taken), "times_whole": statistics.median(taken) / whole,
            "error": sequences.error(outs[part], pattern, [0], rows=32),
        }
        for part, taken in times.items()
    ]  # fmt: skip


class _Sequences:
    """Batch of sequences of any length: a pool of tokens, repeated, with an offset per entry.

    The pool's size is prime, so a cache that mixes up positions reads a different key.
    """

    PERIOD = 8191

    def __init__(self, batch: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (3, HEADS, self.PERIOD, WIDTH)
        self._pool = torch.randn(shape, generator=generator).to(dtype)
        self._offset = 977 * torch.arange(batch)[:, None]

    def tokens(self, start: int | Sequence[int], count: int) -> tuple[Tensor, ...]:
        """Query, key and value [B, H, count, D] of tokens from `start` (one, or one per entry)."""
        position = torch.as_tensor(start).view(-1, 1) + torch.arange(count)
        place = (position + self._offset) % self.PERIOD  # [B, count]
        return self._pool[:, :, place].transpose(1, 2).contiguous().unbind()

    def error(self, out: Tensor, pattern: Pattern, starts: Sequence[int], rows: int = 8) -> float:
        """Largest error of some rows of `out` against float64 softmax over the visible keys.

        Relative to the largest value; raises if wrong. `out` begins at position `starts[entry]`.
        """

        def exact_row(row: int) -> Tensor:
            at = [(entry, start + row) for entry, start in enumerate(starts)]
            return torch.stack([self._exact(pattern, *place) for place in at])

        return error_of_rows(out, exact_row, min(rows, out.shape[2]))

    def _exact(self, pattern: Pattern, entry: int, position: int) -> Tensor:
        counts = pattern.to_dense(1, position + 1, num_heads=HEADS, q_start=position)
        outs = []
        for head, count in enumerate(counts.expand(HEADS, 1, -1)[:, 0]):
            visible = count.nonzero()[:, 0]
            place = (
                torch.cat((torch.tensor([position]), visible)) + self._offset[entry]
            ) % self.PERIOD
            query, key, value = self._pool[:, head, place].double()
            score = key[1:] @ query[0] * WIDTH**-0.5 + count[visible].double().log()
            outs.append(torch.softmax(score, 0) @ value[1:])
        return torch.stack(outs)[:, None]


def _cache(pattern: Mask | Mixture, batch: int) -> KVCache:
    return KVCache(pattern, batch, HEADS, WIDTH, page_size=PAGE)


def _prefill(cache: KVCache, sequences: _Sequences, length: int) -> None:
    """Fills a cache up to a length, in parts."""
    for start in range(cache.length, length, PART):
        cache.attend(*sequences.tokens(start, min(PART, length - start)))


def _note_largest(
    largest: dict[str, tuple[int, int]], caches: Mapping[str, KVCache], position: int
) -> None:
    """Updates the largest number of keys and bytes of each cache so far."""
    for name, cache in caches.items():
        keys, size = largest.get(name, (0, 0))
        largest[name] = max(keys, cache.kept), max(size, cache.nbytes)


def _cached(cache: KVCache) -> Step:
    return lambda _, tokens: cache.attend(*tokens)


def _same_length(pattern: Pattern, everything: Sequence[Tensor], length: int) -> Step:
    """Step that calls `attention` on the first `length` keys, the same number in every call."""
    key, value = (x[:, :, :length] for x in everything)
    return lambda _, tokens: attention(tokens[0], key, value, pattern)


def _dense(everything: Sequence[Tensor]) -> Step:
    """Step of torch's own attention over a preallocated cache of all keys."""

    def step(position: int, tokens: Sequence[Tensor]) -> Tensor:
        for cache, x in zip(everything, tokens[1:], strict=True):
            cache[:, :, position : position + 1] = x
        key, value = (x[:, :, : position + 1] for x in everything)
        return F.scaled_dot_product_attention(tokens[0], key, value)

    return step


def token_turns(
    steps: Mapping[Name, Step],
    tokens_at: Callable[[int], Sequence[Tensor]],
    positions: range,
    untimed: int,
    watch: Callable[[int], None] = lambda position: None,
) -> tuple[dict[Name, list[float]], dict[Name, list[Tensor]]]:
    """Runs steps in turn, token by token; milliseconds and outputs after `untimed` tokens.

    `tokens_at(position)` returns query, key and value; `watch(position)` runs after each token.
    """
    times: dict[Name, list[float]] = {name: [] for name in steps}
    outs: dict[Name, list[Tensor]] = {name: [] for name in steps}
    for position in positions:
        tokens = tokens_at(position)
        for name, step in steps.items():
            begin = time.perf_counter()
            out = step(position, tokens)
            if position >= positions.start + untimed:
                times[name].append((time.perf_counter() - begin) * 1e3)
                outs[name].append(out)
        watch(position)
    return times, outs


def _timing(times: Sequence[float], batch: int) -> Row:
    """Times of one token: median; mean, which includes evictions; median of each page's slowest."""
    slowest = [max(times[i : i + PAGE]) for i in range(0, len(times), PAGE)]
    mean = statistics.fmean(times)
    return {
        "ms": statistics.median(times), "mean_ms": mean, "slowest_ms": statistics.median(slowest),
        "tokens_per_second": batch / mean * 1e3,
    }  # fmt: skip
