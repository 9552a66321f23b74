"""Lists of single keys beside dense attention and beside a gather of the same keys in plain torch.

A layer as DeepSeek's: 16 query heads of width 128 over one key head, one list of k keys for all
heads of a query, drawn among its earlier keys. "with backward" counts 3.5 times the products of a
forward. "attained" is the rate of torch's matrix product here, in GFLOP/s.

`neighbours` has lists that neighbouring queries share in part, as an indexer's do. "halves in
turns" gives the same queries in another order: between two neighbours comes one of the text's other
half, so that the kernel does not merge their lists.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import sparsering as sr

from ..measure import Row, error_of_rows, gradient_of, inputs_of, interleaved

HEADS, WIDTH = 16, 128
CELLS = 1 << 21  # (query, key) pairs that the peer gathers at a time


def lists(quick: bool) -> list[Row]:
    """Measures k of 64, 512 and 2,048 keys at each length, then `neighbours`; calls take turns."""
    lengths = {512: 1} if quick else {4096: 3, 16384: 1, 65536: 1}
    rows, attained = [], _attained(256 if quick else 2048)
    for length, rounds in lengths.items():
        for k in (64, 512, 2048):
            if k < length:
                rows += _rows(length, k, rounds, attained)
    return rows + neighbours(quick)


def neighbours(quick: bool) -> list[Row]:
    """Measures lists that neighbouring queries share in part, for 1 to 16 heads of a list."""
    length = 512 if quick else 4096
    rows: list[Row] = []
    for k in (64,) if quick else (64, 512):
        for smoothed in (0, 16, 64, 256):
            listed = _indexed(length, k, smoothed)
            for heads in (1, 2, 4, 8, 16):
                rows += _neighbours(listed, smoothed, heads, 1 if quick else 5)
    return rows


def _indexed(length: int, k: int, smoothed: int) -> Tensor:
    """Lists of the last k / 8 tokens and of the earlier ones with the largest scores.

    A score is the product of a key's random features with those of a query, which are sums of
    `smoothed` random vectors in a row; without any, the tokens are drawn at random.
    """
    generator = torch.Generator().manual_seed(k)
    steps = torch.randn(length + smoothed, 8, generator=generator).cumsum(0)
    features = steps[smoothed:] - steps[:length]
    keys = torch.randn(length, 8, generator=generator)
    position, parts = torch.arange(length), []
    for rows in position.split(512):
        away = rows[:, None] - position
        scores = (
            features[rows] @ keys.T if smoothed else torch.rand(away.shape, generator=generator)
        )
        scores = scores.masked_fill((away >= 0) & (away < k // 8), torch.inf)
        best = scores.masked_fill(away < 0, -torch.inf).topk(k)
        parts.append(best.indices.where(best.values > -torch.inf, -1))
    return torch.cat(parts)


def _neighbours(listed: Tensor, smoothed: int, heads: int, rounds: int) -> list[Row]:
    """Measures lists in the order of the text, and with the text's halves in turns."""
    length, k = listed.shape
    query, key, value = inputs_of(heads, length, WIDTH, kv_heads=1)
    overlap = (listed[1:, :, None] == listed[:-1, None]).any(-1)[length // 2 :].double().mean()
    turns = torch.arange(length).view(2, -1).T.flatten()
    orders = {"ours": torch.arange(length), "halves in turns": turns}
    rows: list[Row] = []
    for backward in (False, True):
        steps, errors = {}, {}
        for name, order in orders.items():
            inputs, own = (query[:, :, order], key, value), listed[order]
            call = partial(sr.attention, pattern=sr.SelectedBlocks(own, 1), q_start=0)
            errors[name] = error_of_rows(call(*inputs), partial(_exact_row, *inputs, own), 16)
            steps[name] = _step(call, inputs, backward)
        times = interleaved(steps, rounds)
        rows += [
            {
                "case": "neighbours", "call": name, "tokens": length, "k": k, "heads": heads,
                "kv_heads": 1, "head_dim": WIDTH, "backward": backward, "smoothed": smoothed,
                "overlap": overlap.item(), "ms": ms, "times_ours": ms / times["ours"],
                "error": errors[name],
            }
            for name, ms in times.items()
        ]  # fmt: skip
    return rows


def _rows(length: int, k: int, rounds: int, attained: float) -> list[Row]:
    query, key, value = inputs_of(HEADS, length, WIDTH, kv_heads=1)
    generator = torch.Generator().manual_seed(k)
    position = torch.arange(1, length + 1)[:, None]
    listed = (torch.rand(length, k, generator=generator) * position).long()
    pattern = sr.SelectedBlocks(listed, 1)
    pairs = float(sr.attention(*_ones(query, key), pattern, return_lse=True)[1].exp().mean())
    rows: list[Row] = []
    for backward in (False, True):
        calls = {
            "ours": lambda q, k, v: sr.attention(q, k, v, pattern),
            "gather in torch": lambda q, k, v: _gathered(q, k, v, listed),
            "dense SDPA": _dense,
        }
        if length > 1 << 15 or k != (64 if length < 4096 else 512):
            del calls["dense SDPA"]  # minutes; its time does not depend on k
        if length * k > 1 << (18 if backward else 23):
            del calls["gather in torch"]  # minutes: its backward adds up rows one by one
        first = time.perf_counter()
        out = sr.attention(query, key, value, pattern)
        first = time.perf_counter() - first
        error = error_of_rows(out, partial(_exact_row, query, key, value, listed), 16)
        steps = {name: _step(call, (query, key, value), backward) for name, call in calls.items()}
        for name, ms in interleaved(steps, rounds).items():
            full = name == "dense SDPA"
            flops = 4 * HEADS * WIDTH * length * ((length + 1) / 2 if full else pairs)
            rate = flops * (3.5 if backward else 1) / ms / 1e6
            rows.append({
                "case": "lists", "call": name, "tokens": length, "k": k, "heads": HEADS,
                "kv_heads": 1, "head_dim": WIDTH, "backward": backward, "ms": ms,
                "gflops": rate, "attained": attained, "of_attained": rate / attained,
                "density": 1.0 if full else 2 * pairs / (length + 1),
                "times_ours": None, "error": error if name == "ours" else None,
                "first_call_ms": first * 1e3 if name == "ours" and not backward else None,
            })  # fmt: skip
        ours = rows[-len(calls)]["ms"]
        for row in rows[-len(calls) :]:
            row["times_ours"] = row["ms"] / ours
    return rows


def _ones(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns inputs whose scores are 0, so that lse is the log of a query's number of keys."""
    return torch.zeros_like(query[:, :1]), key, key


def _exact_row(query: Tensor, key: Tensor, value: Tensor, listed: Tensor, row: int) -> Tensor:
    keys = listed[row].unique()
    keys = keys[keys >= 0]
    score = query[:, :, row : row + 1].double() @ key[:, :, keys].double().mT * WIDTH**-0.5
    return torch.softmax(score, -1) @ value[:, :, keys].double()


def _gathered(query: Tensor, key: Tensor, value: Tensor, listed: Tensor) -> Tensor:
    """Gathers each query's keys, as code without a kernel does; a repeated key counts once."""
    ordered, order = listed.sort(dim=1, stable=True)
    again = torch.diff(ordered, dim=1, prepend=ordered[:, :1] - 1) == 0
    bias = torch.zeros(listed.shape).masked_fill(again.scatter(1, order, again), -torch.inf)
    step, parts = max(1, CELLS // listed.shape[1]), []
    for rows in torch.arange(len(listed)).split(step):
        own = query[0, :, rows].transpose(0, 1)  # [n, heads, width]
        keys, values = (x[0, 0][listed[rows]] for x in (key, value))  # [n, k, width]
        scores = own @ keys.mT * WIDTH**-0.5 + bias[rows][:, None]
        parts.append(scores.softmax(-1) @ values)
    return torch.cat(parts).transpose(0, 1)[None]


def _dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    wide = (x.expand(-1, HEADS, -1, -1) for x in (key, value))
    key, value = wide
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _step(
    call: Callable[..., Tensor], inputs: tuple[Tensor, ...], backward: bool
) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_(backward) for x in inputs]

    def run() -> None:
        out = call(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, gradient_of(out))

    return run


def _attained(size: int) -> float:
    """Returns the GFLOP/s of torch's matrix product."""
    a, b = torch.randn(2, size, size)
    ms = interleaved({"product": lambda: a @ b}, 7)["product"]
    return 2 * size**3 / ms / 1e6
