"""Timed parts: windows, packed documents, blocks, selections and decoding, beside their peers.

Calls take turns. Each row has the density and an error against float64; wrong results raise before
timing.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.kernels.triton.launch import Launch
from sparsering.selection import select_blocks

from ..flex import causal_window
from ..measure import Row, spread_of
from . import block_sparse
from .device import DEVICE, GPU, HALF, inputs, sized, synchronize
from .peers import Flex, checked, dense, flash_3, flops, ours
from .speed import HEADS, MAIN_TOKENS, sums
from .timing import (
    Call,
    error_of_rows,
    largest,
    on_the_host,
    prepared,
    replayed,
    taken,
    watching,
    with_gradients,
)

BLOCK = sized(128, 16)  # of masks and layouts


def window(size: int) -> Iterator[Row]:
    """Times a causal window of some keys; its edges are masked, which weighs in small windows."""
    heads, length, width = sized((16, 65536, 128), (1, 256, 16))
    args = inputs(heads, length, width)
    pattern = sr.Causal() & sr.SlidingWindow(size)
    peers = flash_3(args, size)
    peers["flex"] = Flex().call(args, partial(_mask, causal_window(size), length), BLOCK)
    yield from _beside(pattern, args, peers)


def documents() -> Iterator[Row]:
    """Times causal attention inside packed documents of many lengths."""
    heads, length, width = sized((16, 65536, 128), (1, 256, 16))
    args = inputs(heads, length, width)
    lengths = []
    for share in (8, 64, 16, 128, 4, 32, 256, 8, 16, 64):  # ragged: none is a multiple of a block
        lengths.append(max(1, length // share - 3))
    lengths.append(length - sum(lengths))
    number = torch.repeat_interleave(
        torch.arange(len(lengths), device=DEVICE), torch.tensor(lengths, device=DEVICE)
    )

    def same(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (number[q] == number[k]) & (q >= k)

    pattern = sr.Documents(lengths) & sr.Causal()
    peers = {"flex": Flex().call(args, partial(_mask, same, length), BLOCK)}
    yield from _beside(pattern, args, peers)


def selected() -> Iterator[Row]:
    """Times selected blocks, laid out once and anew, beside random blocks of the same density."""
    block, length, width = sized(128, 16), MAIN_TOKENS, sized(128, 16)
    blocks, args = length // block, inputs(HEADS, length, width)
    many = max(1, blocks // 10)
    picked = torch.rand(1, HEADS, blocks, blocks, device=DEVICE).topk(many, -1).indices
    selection = sr.SelectedBlocks(picked, block)
    random = sr.RandomBlocks(many / blocks, block, per_head=True)
    calls: dict[str, Call] = {
        "ours": ours(args, selection, block),
        "ours, laid out anew": lambda: sr.attention(
            *args, sr.SelectedBlocks(picked, block), block_size=block, backend="triton"
        ),
        "ours, random blocks": ours(args, random, block),
    }
    patterns = {"ours, random blocks": random}
    errors: dict[str, float] = {}

    def right(name: str, call: Call) -> Call:
        of_rows = partial(error_of_rows, args=args, pattern=patterns.get(name, selection))
        return checked(name, call, of_rows, errors)

    calls, _ = prepared(calls, right)
    density = random.layout(length, num_heads=HEADS, block_size=block).density
    for name, time in taken(calls).items():
        work = flops(HEADS, density * length**2, width, False)
        yield {"backend": name, "case": "forward", "dtype": str(HALF)[6:], "tokens": length,
               "heads": HEADS, "head_dim": width, "block_size": block, "density": density,
               **time, "tflops": work / time["ms"] / 1e9, "error": errors[name]}  # fmt: skip


def share_of_dense(width: int, block: int) -> Iterator[Row]:
    """Times 10% random blocks beside our own dense attention and the kernels made for blocks.

    `share_of_dense` is the rate of a visited pair over that of `Full()` by our kernels.
    """
    length = MAIN_TOKENS
    pattern = sr.RandomBlocks(0.1, block, per_head=False)  # FlashInfer has one list for all heads
    args = inputs(HEADS, length, width)
    grad = torch.randn_like(args[0])
    layout = pattern.layout(length, num_heads=HEADS, block_size=block, device=DEVICE)
    calls: dict[str, Callable[[], Tensor]] = {
        "ours, dense": ours(args, sr.Full(), block), "ours": ours(args, pattern, block),
        **dense(args),
        block_sparse.CUDNN: partial(sr.attention, *args, pattern, backend="cudnn"),
        block_sparse.FLASHINFER: block_sparse.FlashInfer(args, block).call(layout),
    }  # fmt: skip
    for backward in (False, True):
        case, errors = "forward+backward" if backward else "forward", dict[str, float]()
        if backward:
            del calls[block_sparse.FLASHINFER]
            yield {"backend": block_sparse.FLASHINFER, "case": case, "left_out": "no backward"}

        def right(name: str, call: Any, backward: bool = backward, errors: Any = errors) -> Call:
            own = sr.Full() if "dense" in name else pattern
            if not backward:
                of_rows = partial(error_of_rows, args=args, pattern=own)
                return checked(name, call, of_rows, errors)

            def error(got: Sequence[Tensor]) -> float:
                return largest([sums(args, grad, got, call)], 0.05, f"the gradient of {name}")

            return checked(name, with_gradients(call, args, grad), error, errors)

        running, failed = prepared(dict(calls), right)
        yield from ({**row, "case": case} for row in failed)
        times, dense_rate = taken(running), 0.0
        for name, time in times.items():
            density = 1.0 if "dense" in name else layout.density
            rate = flops(HEADS, density * length**2, width, backward) / time["ms"] / 1e9
            dense_rate = dense_rate or rate  # of the first call
            yield {"backend": name, "case": case, "dtype": str(HALF)[6:], "tokens": length,
                   "heads": HEADS, "head_dim": width, "block_size": block, "density": density,
                   **time, "tflops": rate, "share_of_dense": rate / dense_rate,
                   "error": errors[name]}  # fmt: skip


def packed_heads(width: int, block: int) -> Iterator[Row]:
    """Times heads that share keys in one program, and one head at a time, in turns."""
    length, heads, kv_heads = MAIN_TOKENS, *sized((16, 4), (4, 2))
    args = inputs(heads, length, width, kv_heads=kv_heads)
    pattern = sr.RandomBlocks(0.1, block, per_head=False)
    density = pattern.layout(length, num_heads=heads, num_kv_heads=kv_heads,
                             block_size=block).density  # fmt: skip
    together = ours(args, pattern, block)

    def alone() -> Tensor:
        with one_head_at_a_time():
            return together()

    errors: dict[str, float] = {}

    def right(name: str, call: Call) -> Call:
        return checked(name, call, partial(error_of_rows, args=args, pattern=pattern), errors)

    running, _ = prepared({"ours, packed": together, "ours, a head at a time": alone}, right)
    for name, time in taken(running).items():
        work = flops(heads, density * length**2, width, False)
        yield {"backend": name, "case": "forward", "dtype": str(HALF)[6:], "tokens": length,
               "heads": heads, "kv_heads": kv_heads, "head_dim": width, "block_size": block,
               "density": density, **time, "tflops": work / time["ms"] / 1e9,
               "error": errors[name]}  # fmt: skip


@contextlib.contextmanager
def one_head_at_a_time() -> Iterator[None]:
    """Makes calls in the block keep the heads of a group in programs of their own."""
    from sparsering.kernels.triton import call

    usual = call.packed_rows
    call.packed_rows = lambda kernel, problem: 0
    try:
        yield
    finally:
        call.packed_rows = usual


def new_masks(block: int) -> Iterator[Row]:
    """Times from a new choice of blocks on the GPU to the launch of the first tile.

    `ms` is the host's time until it has launched the attention kernel, `first_tile_ms` the time
    between events until the GPU can start it. FlashInfer's plan() gets its compressed rows ready;
    ours get a bool mask, indices, or scores. The choice differs each time; nothing is cached.
    """
    length, width, turns = MAIN_TOKENS, sized(128, 16), sized(30, 3)
    blocks, args = length // block, inputs(HEADS, length, width)
    many = max(1, blocks // 10)
    scores = [torch.rand(1, HEADS, blocks, blocks, device=DEVICE) for _ in range(turns + 3)]
    picked = [x.topk(many, -1).indices for x in scores]
    masks = [torch.zeros_like(x, dtype=torch.bool).scatter_(3, i, True)
             for x, i in zip(scores, picked, strict=True)]  # fmt: skip
    options: dict[str, Any] = {"block_size": block, "query_block": block, "sink": 0, "local": 0}

    def attend(pattern: sr.Pattern) -> None:
        sr.attention(*args, pattern, block_size=block, backend="triton")

    ways: dict[str, tuple[list[Tensor], Callable[[Tensor], None]]] = {
        "ours, indices": (picked, lambda x: attend(sr.SelectedBlocks(x, block))),
        "ours, scores": (scores, lambda x: attend(sr.SelectedBlocks(
            select_blocks(x, many, causal=False, **options), block))),
        "ours, bool mask": (masks, lambda x: attend(sr.Blocks(x, block))),
    }  # fmt: skip
    shape = {"case": "new mask", "tokens": length, "heads": HEADS, "block_size": block,
             "density": many / blocks}  # fmt: skip
    for name, (choices, start) in ways.items():
        taken_ms = [_until_launched(partial(start, x)) for x in choices][3:]
        times = spread_of([host for host, _ in taken_ms])
        first = sorted(ms for _, ms in taken_ms)[len(taken_ms) // 2]
        yield {"backend": name, **shape, **times, "first_tile_ms": first}
    row_ptr = torch.arange(blocks + 1, dtype=torch.int32, device=DEVICE) * many
    rows = [x[0, 0].sort(-1).values.int().flatten() for x in picked]
    peer, number = block_sparse.FlashInfer(args, block), itertools.count()

    def plan() -> Tensor:
        peer.plan(row_ptr, rows[next(number) % len(rows)])
        return row_ptr

    calls, failed = prepared({f"{block_sparse.FLASHINFER}, plan": plan}, lambda name, call: call)
    yield from ({**row, **shape} for row in failed)
    for name, call in calls.items():
        yield {"backend": name, **shape, **on_the_host(call, calls=1, rounds=turns)}


def _until_launched(start: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds from an idle GPU to the first kernel of attention: the host's, and the GPU's."""
    seen: list[tuple[float, Any]] = []

    def watch(run: Callable[[], None], launch: Launch, _: Any) -> None:
        first = launch.config is not None and not seen  # other kernels have no config
        event = torch.cuda.Event(enable_timing=True) if GPU and first else None
        if event is not None:
            event.record()
        run()
        if first:
            seen.append((perf_counter(), event))

    sr.layout_cache.clear()
    synchronize()
    with watching(watch):
        began = torch.cuda.Event(enable_timing=True) if GPU else None
        if began is not None:
            began.record()
        begin = perf_counter()
        start()
    synchronize()
    end, event = seen[0]
    host = 1e3 * (end - begin)
    return host, host if began is None else float(began.elapsed_time(event))


def decoding() -> Iterator[Row]:
    """Times one query against 131072 keys of 8 kv heads, and reading the keys once."""
    length, width = sized((131072, 128), (256, 16))
    heads, kv_heads = sized((32, 8), (4, 2))
    query, key, value = inputs(heads, length, width, kv_heads=kv_heads)
    args = query[:, :, -1:].contiguous(), key, value
    errors: dict[str, float] = {}

    def right(name: str, call: Call) -> Call:
        return checked(name, call, partial(error_of_rows, args=args, pattern=sr.Causal(), rows=1),
                       errors)  # fmt: skip

    peers = {"ours": partial(sr.attention, *args, sr.Causal(), backend="triton"), **dense(args)}
    peers["flex"] = Flex().call(args, lambda: None, BLOCK)
    calls, failed = prepared(dict(peers), right)
    yield from failed
    calls["reading"] = lambda: (key.sum(), value.sum())
    times = taken(calls)
    for name in ("ours", "reading"):
        times[f"{name}, replayed"] = replayed([calls[name]])
    moved = key.nbytes + value.nbytes
    for name, time in times.items():
        yield {"backend": name, "tokens": length, "heads": heads, "kv_heads": kv_heads,
               "head_dim": width, **time, "gb_per_s": moved / time["ms"] / 1e6,
               "error": errors.get(name.partition(",")[0])}  # fmt: skip
    cache = sr.KVCache(sr.SlidingWindow(sized(4095, 31)), 1, kv_heads, width, num_heads=heads)
    prompt = inputs(heads, sized(8192, 64), width, kv_heads=kv_heads)
    cache.attend(*prompt)
    token = [x[:, :, :1] for x in prompt]
    time = on_the_host(lambda: (cache.attend(*token), synchronize())[0], sized(256, 2), 5)
    yield {"backend": "ours, a token of a KVCache", "tokens": cache.kept, "heads": heads,
           "kv_heads": kv_heads, "head_dim": width, **time}  # fmt: skip


def _mask(inside: Callable[..., Tensor], length: int) -> Any:
    """Builds FlexAttention's mask of a function of positions; it evaluates all pairs."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        inside, None, None, length, length, device=DEVICE, BLOCK_SIZE=BLOCK, _compile=GPU
    )


def _beside(
    pattern: sr.Pattern, args: Sequence[Tensor], peers: dict[str, Callable[[], Tensor]]
) -> Iterator[Row]:
    """Times a pattern's forward, and forward and backward, in turns with its peers."""
    heads, length, width = args[0].shape[1:]
    layout, grad = pattern.layout(length, num_heads=heads), torch.randn_like(args[0])
    calls: dict[str, Call] = {
        "ours": partial(sr.attention, *args, pattern, backend="triton"), **peers
    }  # fmt: skip
    for backward in (False, True):
        errors: dict[str, float] = {}

        def right(name: str, call: Any, backward: bool = backward, errors: Any = errors) -> Call:
            if not backward:
                return checked(name, call, partial(error_of_rows, args=args, pattern=pattern),
                               errors)  # fmt: skip

            def error(got: Sequence[Tensor]) -> float:
                return largest([sums(args, grad, got, call)], 0.05, f"the gradient of {name}")

            return checked(name, with_gradients(call, args, grad), error, errors)

        case = "forward+backward" if backward else "forward"
        running, failed = prepared(calls, right)
        yield from ({**row, "case": case} for row in failed)
        for name, time in taken(running).items():
            yield {"backend": name, "case": case, "dtype": str(HALF)[6:], "tokens": length,
                   "heads": heads, "head_dim": width, "density": layout.density, **time,
                   "tflops": flops(heads, layout.num_pairs, width, backward) / time["ms"] / 1e9,
                   "error": errors[name]}  # fmt: skip
