"""Measures a training step of a model whose tokens several processes share (`hf.parallelize`).

    python -m benchmarks.shared_models --out benchmarks/records

The model is like Gemma 3: five layers with a window of 1,024 tokens, then one with all earlier
tokens; random weights, float32. `shared-models.json`: a step over 4 processes of one thread, beside
one process on the same cores, and beside an all-gather: the same shards and kernels, but every rank
receives all keys. Methods take turns; a wrong loss or gradient raises before timing.
`shared-models-memory.json`: peak memory of a rank with equally many tokens on each rank.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import sparsering as sr
from sparsering.distributed import unshard
from sparsering.distributed.exchange import Traffic
from sparsering.distributed.ring import ring_attention
from sparsering.distributed.sharding import owned_ranges
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import override

from .measure import (
    Row,
    distance_of,
    interleaved_times,
    of_ranks,
    of_slowest,
    peak_of,
    slowest_milliseconds,
    write_record,
)

TOKENS, TOKENS_OF_RANK, WORLD, ROUNDS, WINDOW = 32768, 8192, 4, 3, 1024


def model_of(length: int) -> Any:
    """Builds the model, with equal weights on every rank."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    hf.register()
    torch.manual_seed(0)
    types = ["sliding_attention"] * 5 + ["full_attention"]
    config = Gemma3TextConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=len(types),
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=WINDOW,
        layer_types=types, max_position_embeddings=length, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).train()
    model.set_attn_implementation("sparsering")
    return model


def tokens_of(length: int) -> Tensor:
    """Draws a sequence [1, length], the same on every rank."""
    return torch.randint(1, 256, (1, length), generator=torch.Generator().manual_seed(1))


def step(model: Any, tokens: Tensor) -> list[Tensor]:
    """Runs forward and backward; returns the loss and the gradients of all parameters."""
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def gathered(query: Tensor, key: Tensor, value: Tensor, pattern: sr.Pattern, **more: Any) -> Tensor:
    """Computes what `ring_attention` does, after an all-gather of keys and values."""
    group, sharding, extras = more.pop("group"), more.pop("sharding"), more
    whole = (unshard(x, group=group, sharding=sharding) for x in (key, value))
    key, value = (x.contiguous() for x in whole)
    length, outs, first = key.shape[2], [], 0
    for start, stop in owned_ranges(sharding, length, group.size())[group.rank()]:
        part = query[:, :, first : first + stop - start]
        outs.append(sr.attention(part, key, value, pattern, q_start=start, **extras))
        first += stop - start
    return torch.cat(outs, 2)


@contextmanager
def all_gathers() -> Iterator[None]:
    """Makes shared layers receive all keys."""
    before = override.ring_attention
    override.ring_attention = gathered  # type: ignore[assignment]
    try:
        yield
    finally:
        override.ring_attention = before


def steps(length: int, rank: int) -> dict[str, Callable[[], list[Tensor] | None]]:
    """Training steps by method, on models of equal weights."""
    one, shared, tokens = model_of(length), model_of(length), tokens_of(length)
    hf.parallelize(shared, loss="share")

    def alone() -> list[Tensor] | None:
        if rank > 0:
            return None
        torch.set_num_threads(os.cpu_count() or 1)  # as many cores as the ranks have together
        result = step(one, tokens)
        torch.set_num_threads(1)
        return result

    def gathering() -> list[Tensor]:
        with all_gathers():
            return step(shared, tokens)

    return {
        "one process": alone,
        "hf.parallelize": lambda: step(shared, tokens),
        "all-gather of keys": gathering,
    }


@contextmanager
def counted() -> Iterator[list[int]]:
    """Sums the bytes that this rank receives in forward passes of shared layers."""
    total = [0]

    def counting(*arguments: Any, **options: Any) -> Any:
        out = ring_attention(*arguments, **options)
        traffic: Traffic = ring_attention.last_traffic()  # type: ignore[attr-defined]
        total[0] += traffic.received_bytes
        return out

    before = override.ring_attention
    override.ring_attention = counting  # type: ignore[assignment]
    try:
        yield total
    finally:
        override.ring_attention = before


def times(rank: int, world: int, length: int, rounds: int) -> list[Row]:
    """Measures all methods; times of the slowest rank. Raises for a wrong loss or gradient."""
    calls = steps(length, rank)
    expected = calls["one process"]()
    distances: dict[str, float] = {}
    for name in list(calls)[1:]:
        with counted() as bytes_received:
            result = calls[name]()
        if name == "hf.parallelize":
            moved = of_slowest(bytes_received[0], world)
        assert result is not None
        for x in result:
            dist.all_reduce(x)
        if rank == 0:
            assert expected is not None
            distances[name] = distance_of(result, expected)
            if not distances[name] <= 1e-4:
                raise RuntimeError(f"{name} computes wrong gradients: {distances[name]:.3g}")
    clock = partial(slowest_milliseconds, world=world)
    taken = interleaved_times(calls, rounds, clock=clock, warm=True)
    sizes = 2 * 2 * 64 * 4 * 6  # keys and values, kv heads, head dim, bytes, layers
    received = {
        "one process": 0.0, "hf.parallelize": moved,
        "all-gather of keys": length * (world - 1) / world * sizes,
    }  # fmt: skip
    return [
        {
            "model": "like Gemma 3, windows of 1,024", "method": name, "tokens": length,
            "processes": 1 if name == "one process" else world,
            "ms": statistics.median(taken[name]), "received_mb_forward": received[name] / 1e6,
            "gradient_error": distances.get(name, 0.0),
        }
        for name in calls
    ]  # fmt: skip


def memories(rank: int, world: int, length: int) -> list[Row]:
    """Measures the peak memory of a step, beside the model, on the rank that needs most."""
    rows: list[Row] = []
    calls = steps(length * world, rank)
    for name in list(calls)[1:]:
        calls[name]()  # builds layouts and gradients
        of_slowest(0.0, world)
        peak = of_slowest(peak_of(calls[name]), world)
        rows.append({
            "model": "like Gemma 3, windows of 1,024", "method": name, "processes": world,
            "tokens_of_rank": length, "peak_extra_mb": peak / 1e6,
        })  # fmt: skip
    return rows


def main() -> int:
    """Writes the records."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_models", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--quick", action="store_true", help="short sequences, one round")
    arguments = parser.parse_args()
    tokens, of_rank = (2048, 512) if arguments.quick else (TOKENS, TOKENS_OF_RANK)
    rounds = 1 if arguments.quick else ROUNDS
    write_record(arguments.out, "shared-models", of_ranks(times, WORLD, tokens, rounds))
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ[name] = "65536"  # freed memory leaves the process, so peaks are those of a call
    rows = [row for world in (4, 8) for row in of_ranks(memories, world, of_rank)]
    write_record(arguments.out, "shared-models-memory", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
