"""Measures a decoded token where half of the heads keep a window, and keys are in 8 bits.

    python -m benchmarks.unlike_heads --out benchmarks/records

`unlike-heads.json`: one layer of 32 query heads and 8 kv heads of 128 channels, as in Llama 3 8B,
float32, one sequence of 8K, 32K and 128K tokens. Half of the kv heads see every earlier token, the
others 64 sinks and a window of 256, as DuoAttention has it; beside them a cache of all keys, and
each of both in int8 and in fp8. All caches decode in turns. `ms` is of one token of one layer,
`bytes` of the cache, `error` of out against float64 over the keys as they were given, in units of
the largest exact number of each head.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import sparsering as sr

from .measure import Row, interleaved_times, spread_of, write_record

HEADS, KV_HEADS, WIDTH = 32, 8, 128
LENGTHS, ROUNDS = (8192, 32_768, 131_072), 41
SINKS, WINDOW = 64, 256

NEAR = sr.Causal() & (sr.SlidingWindow(WINDOW - 1) | sr.GlobalTokens(SINKS, rows=False))
WAYS = {
    "all keys": sr.Causal(),
    "half of the heads stream": sr.PerHead((sr.Causal(), NEAR) * (KV_HEADS // 2)),
}
STORES = (None, "int8", "fp8")


def drawn(length: int) -> tuple[Tensor, Tensor]:
    """Draws keys and values [1, kv heads, length, width], the same at every call."""
    generator = torch.Generator().manual_seed(length)
    shape = 1, KV_HEADS, length, WIDTH
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def filled(way: str, store: str | None, keys: tuple[Tensor, Tensor]) -> sr.KVCache:
    """Makes a cache that holds a prompt."""
    cache = sr.KVCache(WAYS[way], 1, KV_HEADS, WIDTH, num_heads=HEADS, store=store)
    cache.load(*keys)
    return cache


def exact(way: str, new: list[Tensor], keys: tuple[Tensor, Tensor]) -> Tensor:
    """Computes the new token's out in float64, head by head, over the keys that it sees."""
    length, outs = keys[0].shape[2], []
    place = torch.arange(length + 1)
    near = (place < SINKS) | (place > length - WINDOW)
    for head in range(HEADS):
        of_head = head * KV_HEADS // HEADS
        seen = near if way != "all keys" and of_head % 2 else place >= 0
        key, value = (
            torch.cat((x[0, of_head], y[0, of_head]))[seen].double()
            for x, y in zip(keys, new[1:], strict=True)
        )
        weight = (key @ new[0][0, head, 0].double() * WIDTH**-0.5).softmax(0)
        outs.append(weight @ value)
    return torch.stack(outs)


def rows(length: int, rounds: int) -> list[Row]:
    """Measures all caches of one length."""
    keys = drawn(length)
    new = [torch.randn(1, heads, 1, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    caches = {(way, store): filled(way, store, keys) for way in WAYS for store in STORES}
    wanted = {way: exact(way, new, keys) for way in WAYS}
    errors = {}
    for (way, store), cache in caches.items():
        apart = (cache.attend(*new, keep=False)[0, :, 0].double() - wanted[way]).abs().amax(1)
        errors[way, store] = float((apart / wanted[way].abs().amax(1)).max())
    if not all(x < (1e-4 if store is None else 0.2) for (_, store), x in errors.items()):
        raise RuntimeError(f"the timed function is wrong: {errors}")
    calls = {str(name): partial(cache.attend, *new) for name, cache in caches.items()}
    times = interleaved_times(calls, rounds)
    return [
        {
            "length": length,
            "pattern": way,
            "store": store or "float32",
            "bytes": cache.nbytes,
            "error": errors[way, store],
            **spread_of(times[str((way, store))]),
        }
        for (way, store), cache in caches.items()
    ]


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unlike_heads", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    results = [row for length in arguments.lengths for row in rows(length, arguments.rounds)]
    write_record(arguments.out, "unlike-heads", results)


if __name__ == "__main__":
    main()
