"""Timed parts: attention over blocks, LongNet at a million tokens, layouts, overhead, memory.

Calls and their peers are timed in turns. Each row has the density and an error against float64;
wrong results raise before timing.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import sparsering as sr

from ..measure import Row
from .device import (
    DEVICE,
    GPU,
    HALF,
    free_memory,
    inputs,
    peak_beyond,
    poisoned,
    refuse,
    sized,
    synchronize,
)
from .peers import Flex, checked, dense, flops, ours, sparse
from .timing import (
    Call,
    error_of_gradients,
    error_of_rows,
    exact_gradients,
    largest,
    on_the_host,
    prepared,
    relative,
    replayed,
    taken,
    with_gradients,
)

DENSITIES = (0.1, 0.02, 0.05, 0.2, 0.5)
HEADS = sized(16, 2)
MAIN_TOKENS = sized(32768, 256)


def ceilings() -> Iterator[Row]:
    """Measures the GPU's peaks with a large matrix product and a copy, on random numbers."""
    n = sized(8192, 64)
    a, b = (torch.randn(n, n, device=DEVICE, dtype=HALF) for _ in range(2))
    source = torch.randn(sized(1 << 30, 1 << 12), device=DEVICE, dtype=HALF)
    target = torch.full_like(source, torch.nan)
    calls: dict[str, Call] = {"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}

    def right(name: str, call: Call) -> Call:
        got = call()
        if name == "matmul":
            assert isinstance(got, Tensor)
            largest([relative(got[:16], a[:16].double() @ b.double())], 0.02, "the product")
        elif not torch.equal(target, source):
            refuse("the copy is none")
        return call

    calls, _ = prepared(calls, right)
    for name, time in taken(calls).items():
        rate = {"tflops": 2 * n**3 / time["ms"] / 1e9} if name == "matmul" else {
            "gb_per_s": 2 * source.nbytes / time["ms"] / 1e6}  # fmt: skip
        yield {"backend": name, "dtype": str(HALF)[6:], **time, **rate}


def main_shape(width: int, block: int) -> Iterator[Row]:
    """Times B1 H16 on 32768 tokens with 10% random blocks: forward, and forward and backward."""
    flexes = {"flex": Flex(), "flex, FLASH": Flex(backend="FLASH")}
    yield from over_blocks(width, block, MAIN_TOKENS, 0.1, flexes, with_dense=True, exactly=True)


def beside_tuned_flex(width: int, block: int) -> Iterator[Row]:
    """Times the main shape beside FlexAttention with its own search for the fastest kernel."""
    flexes = {"flex, max-autotune": Flex(mode="max-autotune-no-cudagraphs")}
    yield from over_blocks(width, block, MAIN_TOKENS, 0.1, flexes, with_dense=False, exactly=True)


def grid(width: int, block: int, tokens: int, with_flex: bool) -> Iterator[Row]:
    """Times densities from 2% to 50%, 10% first; dense attention only beside the first.

    All heads share one table, since drawing one for each head would take long.
    """
    sr.layout_cache.set_limit(2 << 30)  # tables of many tokens exceed the default limit
    flexes = {"flex": Flex()} if with_flex else {}
    for number, share in enumerate(sized(DENSITIES, DENSITIES[:2])):
        if flops(HEADS, share * tokens**2, width, False) > 2e14:
            yield {"backend": "ours", "tokens": tokens, "head_dim": width, "block_size": block,
                   "density": share, "left_out": "seconds a call"}  # fmt: skip
            continue
        with_dense = number == 0 and tokens <= 1 << 17
        yield from over_blocks(width, block, tokens, share, flexes, with_dense, exactly=False)


def over_blocks(
    width: int,
    block: int,
    tokens: int,
    share: float,
    flexes: dict[str, Flex],
    with_dense: bool,
    exactly: bool,
) -> Iterator[Row]:
    """Times ours and the peers at one shape over random blocks."""
    sr.layout_cache.clear()
    pattern = sr.RandomBlocks(share, block, per_head=exactly)
    args = inputs(HEADS, tokens, width)
    density = pattern.layout(tokens, num_heads=HEADS, block_size=block).density
    grad = torch.randn_like(args[0])
    exact = exact_gradients(args, pattern, block, grad)[1:] if exactly else []
    calls = {"ours": ours(args, pattern, block), **sparse(args, pattern, block, flexes)}
    calls |= dense(args) if with_dense else {}
    for backward in (False, True):
        errors: dict[str, float] = {}
        check = partial(with_gradients_checked, grad=grad, exact=exact) if backward else _checked
        running, failed = prepared(calls, partial(check, args=args, pattern=pattern, errors=errors))
        case = "forward+backward" if backward else "forward"
        yield from ({**row, "case": case} for row in failed)
        for name, time in taken(running).items():
            visited = 1.0 if name.startswith("dense") else density
            work = flops(HEADS, visited * tokens**2, width, backward)
            yield {
                "backend": name, "case": case, "dtype": str(HALF)[6:], "tokens": tokens,
                "heads": HEADS, "head_dim": width, "block_size": block, "drawn": share,
                "density": visited, **time, "tflops": work / time["ms"] / 1e9,
                "error": errors[name],
            }  # fmt: skip


def _checked(
    name: str,
    call: Call,
    *,
    args: Sequence[Tensor],
    pattern: sr.Pattern,
    errors: dict[str, float],
) -> Call:
    """Returns the call after comparing some rows of its output with float64."""
    own = sr.Full() if name.startswith("dense") else pattern
    rows = 8 if args[0].shape[2] <= MAIN_TOKENS else 3  # a row over a million tokens takes 1 s
    return checked(name, call, partial(error_of_rows, args=args, pattern=own, rows=rows), errors)


def with_gradients_checked(
    name: str,
    call: Callable[[], Tensor],
    *,
    args: Sequence[Tensor],
    pattern: sr.Pattern,
    errors: dict[str, float],
    grad: Tensor,
    exact: Sequence[Tensor],
) -> Call:
    """Returns the call with gradients after checking their sums and, against `exact`, one head."""

    def error(got: Sequence[Tensor]) -> float:
        distances = [sums(args, grad, got, call)]
        if not name.startswith("dense"):
            distances += [relative(x[:, :1], y) for x, y in zip(got, exact, strict=False)]
        return largest(distances, 0.05, f"the gradient of {name}")

    return checked(name, with_gradients(call, args, grad), error, errors)


def sums(
    args: Sequence[Tensor], grad: Tensor, got: Sequence[Tensor], call: Callable[[], Tensor]
) -> float:
    """Computes `error_of_gradients` of a call's gradients; it runs the call again for its out."""
    with torch.no_grad():
        return error_of_gradients(call(), got, args, grad)


def founding_table() -> Iterator[Row]:
    """Times B1 H8 D64 float16, 4096 tokens, a 90% sparse window: from Python and as a graph."""
    heads, length, width = sized((8, 4096, 64), (1, 128, 16))
    kind = sized(torch.float16, torch.float32)
    pattern = sr.BlockWindow(1, sized(128, 16))
    block = sized(128, 32)
    density = pattern.layout(length, num_heads=heads, block_size=block).density
    sets = [inputs(heads, length, width, kind, seed=seed) for seed in range(sized(6, 2))]
    shape = {"dtype": str(kind)[6:], "tokens": length, "heads": heads, "head_dim": width}
    errors: dict[str, float] = {}
    check = partial(_checked, args=sets[0], pattern=pattern, errors=errors)
    own = [partial(sr.attention, *args, pattern, backend="triton") for args in sets]
    calls, failed = prepared({"ours": own[0], **dense(sets[0])}, check)
    yield from failed
    times = taken(calls) | {"ours, replayed": replayed(own)}
    for name, time in times.items():
        yield {"backend": name, "case": "forward", **shape,
               "density": 1.0 if name.startswith("dense") else density,
               **time, "error": errors[name.partition(",")[0]]}  # fmt: skip
    grad = torch.randn_like(sets[0][0])
    both = with_gradients(own[0], sets[0], grad)
    error = sums(sets[0], grad, both(), own[0])
    yield {"backend": "ours", "case": "forward+backward", **shape, "density": density,
           **taken({"ours": both})["ours"], "error": error}  # fmt: skip


def longnet() -> Iterator[Row]:
    """Times LongNet at a million tokens, forward and backward, and dense attention's rate."""
    heads, width, length = sized((16, 64, 1 << 20), (2, 16, 128))
    segments = sized((2048, 4096, 8192, 16384, 32768), (16, 32))
    pattern = sr.LongNet(segments, sized((1, 2, 4, 6, 12), (1, 2)))
    args = inputs(heads, length, width)
    layout = pattern.layout(length, num_heads=heads)
    grad = torch.randn_like(args[0])
    call = partial(sr.attention, *args, pattern, backend="triton")
    both = with_gradients(call, args, grad)
    with poisoned():
        out = call().detach()
        first = both()
    error = error_of_rows(out, args, pattern, rows=4)
    sums = error_of_gradients(out, first, args, grad)
    del out
    second = both()
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        refuse("gradients are not the same bits twice")
    del first, second
    short = inputs(heads, MAIN_TOKENS, width)
    short_grad = torch.randn_like(short[0])
    for case, ours_, make in (
        ("forward", call, lambda peer: peer),
        ("forward+backward", both, lambda peer: with_gradients(peer, short, short_grad)),
    ):
        peers = {name: make(peer) for name, peer in dense(short).items()}
        calls, failed = prepared(peers, lambda name, peer: peer)
        yield from failed
        with torch.set_grad_enabled(case != "forward"):
            times = taken({"ours": ours_, **calls}, rounds=3)
        for name, time in times.items():
            own = name == "ours"
            tokens = length if own else MAIN_TOKENS
            pairs = layout.num_pairs if own else tokens**2
            yield {
                "backend": name, "case": case, "dtype": str(HALF)[6:], "tokens": tokens,
                "heads": heads, "head_dim": width, "density": layout.density if own else 1.0,
                **time, "pairs": float(pairs),
                "tflops": flops(heads, pairs, width, case != "forward") / time["ms"] / 1e9,
                "error": (error if case == "forward" else sums) if own else None,
            }  # fmt: skip


def layouts() -> Iterator[Row]:
    """Times building layouts of 2^20 tokens on the host and copying them, uncached.

    The layout of selected blocks is built on the GPU.
    """
    length, heads, block = sized(1 << 20, 1 << 12), HEADS, 128
    blocks = length // block
    picked = torch.randint(0, blocks, (blocks, sized(32, 4)), device=DEVICE)
    few, many = ((2048, 32768), (1, 12)), ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    patterns = {
        "causal window of 4096": sr.Causal() & sr.SlidingWindow(4096),
        "LongNet of 5 branches": sr.LongNet(*many),
        "causal LongNet of 2": sr.LongNet(*few) & sr.Causal(),
        "window and global tokens": sr.SlidingWindow(4096, 4096) | sr.GlobalTokens(64),
        "window of blocks": sr.BlockWindow(4, block),
        "selected, 32 of each row": sr.SelectedBlocks(picked, block),
    }

    def build(pattern: sr.Pattern) -> Tensor:
        sr.layout_cache.clear()
        pattern.layout(length, num_heads=heads, block_size=block, device=DEVICE)
        synchronize()
        return picked

    for name, pattern in patterns.items():
        layout = pattern.layout(length, num_heads=heads, block_size=block, device=DEVICE)
        pairs = float(layout.num_pairs)
        time = on_the_host(partial(build, pattern), calls=1, rounds=9)
        yield {"pattern": name, "tokens": length, "heads": heads, "pairs": pairs,
               **time}  # fmt: skip


def overhead() -> Iterator[Row]:
    """Times a tiny call on the host, layout cached, without waiting; and torch's own call."""
    args = inputs(1, sized(128, 32), sized(64, 16))
    pattern = sr.Causal()
    call = partial(sr.attention, *args, pattern, backend="triton")
    default = partial(sr.attention, *args, pattern)
    error = error_of_rows(call(), args, pattern)
    calls: dict[str, Call] = {"ours": call, "ours, backend not named": default, **dense(args)}
    calls, failed = prepared(calls, lambda name, peer: peer)
    yield from failed
    for name, peer in calls.items():
        time = on_the_host(peer)
        of_ours = None if name.startswith("dense") else error
        yield {"backend": name, "case": "forward", "tokens": args[0].shape[2], **time,
               "us": time["ms"] * 1e3, "error": of_ours}  # fmt: skip
    leaves = [x.requires_grad_() for x in args]
    learning = partial(sr.attention, *leaves, pattern, backend="triton")
    grad = torch.randn_like(args[0])
    for case, run in (
        ("forward that learns", learning),
        ("forward+backward", with_gradients(learning, leaves, grad)),
    ):
        time = on_the_host(run)
        yield {"backend": "ours", "case": case, "tokens": args[0].shape[2], **time,
               "us": time["ms"] * 1e3, "error": error}  # fmt: skip


def memory() -> Iterator[Row]:
    """Measures peak memory at a million tokens beyond inputs, outputs, lse and gradients."""
    heads, width, length = sized((16, 64, 1 << 20), (1, 16, 128))
    cases = {
        "longnet": sr.LongNet(*sized(((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)),
                                     ((16, 32), (1, 2)))),
        "window": sr.Causal() & sr.SlidingWindow(sized(4096, 32)),
    }  # fmt: skip
    for name, pattern in cases.items():
        args = [x.requires_grad_() for x in inputs(heads, length, width)]
        grad = torch.randn_like(args[0])
        for backward, attempt in itertools.product((False, True), (0, 1)):
            results: list[Tensor] = []

            def run(
                args: list[Tensor] = args, pattern: sr.Pattern = pattern, grad: Tensor = grad,
                backward: bool = backward, results: list[Tensor] = results,
            ) -> None:  # fmt: skip
                results += sr.attention(*args, pattern, backend="triton", return_lse=True)
                if backward:
                    results += torch.autograd.grad(results[0], args, grad)

            extra = peak_beyond(run) - (sum(x.nbytes for x in results) if GPU else 0)
            whole = sum(x.nbytes for x in (*args, *results)) + grad.nbytes * backward
            if attempt:  # the first attempt also built the layout
                yield {"pattern": name, "case": "forward+backward" if backward else "forward",
                       "tokens": length, "heads": heads, "head_dim": width, "extra_bytes": extra,
                       "share_of_inputs_and_outputs": extra / whole,
                       "free_bytes": free_memory()}  # fmt: skip
