"""Checks kinds of calls on a GPU: graphs, compilation, no waits, extras, modules.

Results are compared with the reference backend in float64, on the same device.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.distributed import simulate_ring
from sparsering.models import LongNetLM
from sparsering.nn import MultiheadAttention, SelectedAttention
from sparsering.selection import block_scores, select_blocks

from ..measure import Row
from .correctness import DTYPES, TF32, checked, products_of
from .device import (
    DEVICE,
    GPU,
    HALF,
    captured,
    inputs,
    refuse,
    sized,
    synchronize,
    waits_are_errors,
)
from .timing import largest, relative

BOUND = 0.02 if GPU else 1e-5  # largest error in half precision, relative to the norm


def exact(args: list[Tensor], pattern: sr.Pattern, grad: Tensor, **options: Any) -> list[Tensor]:
    """Computes out and gradients in float64."""
    own = [x.detach().double().requires_grad_() for x in args]
    in_float64 = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
             for k, x in options.items()}  # fmt: skip
    out = sr.attention(*own, pattern, backend="reference", **in_float64)
    return [out.detach(), *torch.autograd.grad(out, own, grad.double())]


def graphs() -> Iterator[Row]:
    """Captures CUDA graphs, forward and with backward, and replays them on new inputs."""
    heads, length, width = sized((4, 1024, 128), (1, 48, 16))
    patterns = {
        "random blocks": sr.RandomBlocks(0.2, sized(128, 16)),
        "longnet": sr.LongNet(sized((256, 512), (16, 32)), (1, 2)) & sr.Causal(),
        "window": sr.Causal() & sr.SlidingWindow(sized(200, 20)),
    }
    for name, pattern in patterns.items():
        args = [x.requires_grad_() for x in inputs(heads, length, width)]
        grad = torch.randn_like(args[0])

        def forward(args: list[Tensor] = args, pattern: sr.Pattern = pattern) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (sr.attention(*args, pattern, backend="triton"),)

        def both(
            args: list[Tensor] = args, pattern: sr.Pattern = pattern, grad: Tensor = grad
        ) -> tuple[Tensor, ...]:
            out = sr.attention(*args, pattern, backend="triton")
            return (out.detach(), *torch.autograd.grad(out, args, grad))

        for case, call in (("forward", forward), ("forward+backward", both)):
            replay, errors = captured(call), []
            for seed in (1, 2):
                with torch.no_grad():
                    for x, new in zip(args, inputs(heads, length, width, seed=seed), strict=True):
                        x.copy_(new)
                    grad.copy_(torch.randn_like(grad))
                got = replay()
                synchronize()
                want = exact(args, pattern, grad)
                errors += [relative(a, b) for a, b in zip(got, want, strict=False)]
            worst = largest(errors, BOUND, f"a replayed graph of {name}, {case}")
            yield {"pattern": name, "case": case, "error": worst}


def graph_of_selected() -> Iterator[Row]:
    """Replays a graph that selects new blocks each time: scores, selection, attention inside."""
    heads, length, width = sized((4, 1024, 64), (2, 96, 16))
    block, k = sized((64, 4), (16, 2))
    args = inputs(heads, length, width)

    def chosen() -> Tensor:
        scores = block_scores(args[0], args[1], block, query_block=block)
        return select_blocks(scores, k, block_size=block, query_block=block)

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            picked = chosen()
            pattern = sr.SelectedBlocks(picked, block, query_block=block) & sr.Causal()
            return sr.attention(*args, pattern, backend="triton"), picked

    replay, errors = captured(call), []
    for seed in (1, 2):
        for x, new in zip(args, inputs(heads, length, width, seed=seed), strict=True):
            x.copy_(new)
        got, picked = replay()
        synchronize()
        pattern = sr.SelectedBlocks(picked.clone(), block, query_block=block) & sr.Causal()
        want = sr.attention(*(x.double() for x in args), pattern, backend="reference")
        errors.append(relative(got, want))
    yield {"pattern": "selected blocks", "case": "scores, choice and attention",
           "error": largest(errors, BOUND, "a graph that selects")}  # fmt: skip


def compiled() -> Iterator[Row]:
    """Checks `torch.compile(mode="reduce-overhead")`, forward and backward; counts graph skips."""
    from torch._dynamo.utils import counters

    heads, length, width = sized((4, 1024, 64), (2, 48, 16))
    pattern = sr.Causal() & sr.SlidingWindow(sized(200, 20))

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.tanh(sr.attention(query * 1.5, key, value, pattern, backend="triton"))

    options = {"mode": "reduce-overhead"} if GPU else {"backend": "aot_eager"}
    counters.clear()
    run = torch.compile(layer, fullgraph=True, **options)
    errors = []
    for seed in range(5):
        args = [x.requires_grad_() for x in inputs(heads, length, width, seed=seed)]
        grad = torch.randn_like(args[0])
        torch.compiler.cudagraph_mark_step_begin()
        out = run(*args)
        got = [x.clone() for x in (out, *torch.autograd.grad(out, args, grad))]
        own = [x.detach().double().requires_grad_() for x in args]
        true = torch.tanh(sr.attention(own[0] * 1.5, *own[1:], pattern, backend="reference"))
        want = [true, *torch.autograd.grad(true, own, grad.double())]
        errors += [relative(a, b) for a, b in zip(got, want, strict=True)]
    yield {"pattern": "window", "case": "forward+backward", "error": largest(errors, BOUND, "it"),
           "graphs_skipped": counters["inductor"]["cudagraph_skips"]}  # fmt: skip


def without_waiting() -> Iterator[Row]:
    """Checks that calls never wait for the GPU: a cached pattern, selected blocks, and the layer.

    The first two calls of each compile kernels and fill caches, so they may wait.
    """
    heads, length, width = sized((4, 2048, 64), (1, 64, 16))
    block, k = sized((64, 8), (16, 2))
    window = sr.Causal() & sr.SlidingWindow(sized(300, 30))
    layer = SelectedAttention(
        heads * width, heads, block_size=block, k=k, query_block=block, causal=False
    ).to(DEVICE)

    def cached(args: list[Tensor]) -> Tensor:
        return sr.attention(*args, window, backend="triton")

    def selected(args: list[Tensor]) -> Tensor:
        query, key, _ = args
        scores = block_scores(query.detach(), key.detach(), block, query_block=block)
        picked = select_blocks(scores, k, block_size=block, query_block=block)
        pattern = sr.SelectedBlocks(picked, block, query_block=block) & sr.Causal()
        return sr.attention(*args, pattern, backend="triton")

    def module(args: list[Tensor]) -> Tensor:
        return layer(args[0].transpose(1, 2).flatten(2).float())

    calls: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "a cached pattern": cached, "selected blocks": selected, "SelectedAttention": module,
    }  # fmt: skip
    for name, call in calls.items():
        for attempt in range(3):
            args = [x.requires_grad_() for x in inputs(heads, length, width, seed=attempt)]
            synchronize()
            if attempt < 2:  # the second call takes the path with filled caches
                call(args).sum().backward()
                continue
            with waits_are_errors():
                out = call(args)
                out.sum().backward()
        synchronize()
        if not bool(out.isfinite().all() and args[0].grad.isfinite().all()):
            refuse(f"{name} without waiting is no number")
        yield {"pattern": name, "case": "forward+backward", "waits": 0 if GPU else None}


EXTRAS = ("softcap", "distance bias", "sink", "dropout", "masked keys", "all")


def extras(dtype: str, name: str) -> Iterator[Row]:
    """Checks one extra of a call, or all together, with the gradients of its tables."""
    batch, heads, kv_heads, length, width = sized((2, 4, 2, 300, 64), (1, 2, 1, 40, 16))
    kind = DTYPES[dtype] if GPU else torch.float32
    unit = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[kind]
    unit = max(unit, 1e-3 if dtype == TF32 else 0.0)
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if name in ("softcap", "all"):
        options["softcap"] = 0.7
    if name in ("distance bias", "all"):
        options["distance_bias"] = torch.randn(heads, 35, device=DEVICE)
    if name in ("sink", "all"):
        options["sink"] = torch.randn(batch, heads, length, device=DEVICE)
    if name in ("dropout", "all"):
        options |= {"dropout_p": 0.3, "dropout_seed": 11}
    bases = {"causal": sr.Causal(), "longnet": sr.LongNet((16, 91), (1, 3)) & sr.Causal()}
    for label, pattern in bases.items():
        if name in ("masked keys", "all"):
            pattern = pattern & sr.KeyMask(torch.rand(batch, length, device=DEVICE) < 0.7)
        args = [torch.randn(batch, h, length, width, device=DEVICE, dtype=kind)
                for h in (heads, kv_heads, kv_heads)]  # fmt: skip
        with products_of(dtype):
            error = _error_of_extras(args, pattern, options)
        what = f"{name} over {label} in {dtype}"
        yield {"pattern": label, "extra": name, "dtype": dtype,
               "error": largest([error], 4 * unit, what)}  # fmt: skip


def _error_of_extras(args: list[Tensor], pattern: sr.Pattern, extras: dict[str, Any]) -> float:
    """Largest error of out, lse and all gradients against float64, relative to the largest."""

    def results(kind: torch.dtype | None, backend: str) -> list[Tensor]:
        own = [x.detach().to(kind or x.dtype).requires_grad_() for x in args]
        options = {k: x.detach().to(kind or x.dtype).requires_grad_() if isinstance(x, Tensor)
                   else x for k, x in extras.items()}  # fmt: skip
        both = sr.attention(
            *own, pattern, block_size=sized(64, 16), backend=backend, return_lse=True, **options
        )
        torch.manual_seed(1)
        grads = [torch.randn_like(x, dtype=torch.float32).to(x.dtype) for x in both]
        grads[1] = torch.where(both[1].isfinite(), grads[1], 0.0)
        leaves = [*own, *(x for x in options.values() if isinstance(x, Tensor))]
        gradients = torch.autograd.grad(list(both), leaves, grads)
        return [x.detach() for x in (*both, *gradients)]

    exact, errors = results(torch.float64, "reference"), []

    def check(got: Sequence[Tensor]) -> None:
        for a, b in zip(got, exact, strict=True):
            finite = b.isfinite()
            if not torch.equal(a.isfinite(), finite):
                refuse("not finite in the same places")
            difference = (a.double() - b.double())[finite].abs().max()
            errors.append(float(difference / b[finite].abs().max().clamp(min=1.0)))

    checked(lambda: results(None, "triton"), check)
    return max(errors)


def offloaded_ring() -> Iterator[Row]:
    """Checks `simulate_ring(offload=True)`: sequence on the host, one rank's part on the GPU."""
    heads, length, width = sized((4, 4096, 64), (2, 96, 16))
    for name, pattern in {
        "window": sr.Causal() & sr.SlidingWindow(sized(700, 30)),
        "longnet": sr.LongNet(sized((512, 4096), (16, 96)), (1, 2)) & sr.Causal(),
        "causal": sr.Causal(),
    }.items():
        args = [x.cpu().requires_grad_() for x in inputs(heads, length, width)]
        grad = torch.randn_like(args[0])
        sharding = "zigzag" if name == "causal" else "contiguous"
        out = simulate_ring(*args, pattern, world_size=4, sharding=sharding, offload=True)
        got = [out, *torch.autograd.grad(out, args, grad)]
        if any(x.device.type != "cpu" for x in got):
            raise RuntimeError("results are not where the inputs are")
        want = exact([x.detach().to(DEVICE) for x in args], pattern, grad.to(DEVICE))
        errors = [relative(a.to(DEVICE), b) for a, b in zip(got, want, strict=True)]
        yield {"pattern": name, "case": "forward+backward", "ranks": 4, "tokens": length,
               "error": largest(errors, BOUND, f"the ring of {name}")}  # fmt: skip


def decoding() -> Iterator[Row]:
    """Checks `KVCache` and `SelectedCache`: a prompt, then single tokens, against one call."""
    heads, kv_heads, length, width = sized((8, 2, 700, 64), (2, 1, 60, 16))
    prompt = length - sized(40, 5)
    for name, pattern in {
        "window and global": sr.SlidingWindow(sized(100, 10)) | sr.GlobalTokens(4, rows=False),
        "longnet": sr.LongNet(sized((64, 512), (16, 32)), (1, 4)),
        "causal": sr.Causal(),
    }.items():
        args = inputs(heads, length, width, kv_heads=kv_heads)
        pattern = pattern & sr.Causal()
        cache = sr.KVCache(pattern, 1, kv_heads, width, num_heads=heads, page_size=64)
        out = _step_by_step(cache, args, prompt)
        want = sr.attention(*(x.double() for x in args), pattern, backend="reference")
        yield {"pattern": name, "tokens": length, "kept": cache.kept,
               "error": largest([relative(out, want)], BOUND, f"decoding of {name}")}  # fmt: skip
    args = inputs(heads, length, width, kv_heads=kv_heads)
    block, k = sized((32, 64), (16, 8))  # selects all blocks, so that rounding cannot change them
    chosen = sr.SelectedCache(1, kv_heads, width, k=k, block_size=block, num_heads=heads)
    out = _step_by_step(chosen, args, prompt)
    want = sr.attention(*(x.double() for x in args), sr.Causal(), backend="reference")
    yield {"pattern": "all blocks selected", "tokens": length, "kept": chosen.kept,
           "error": largest([relative(out, want)], BOUND, "a cache that selects")}  # fmt: skip


def drafts() -> Iterator[Row]:
    """Checks trees of guesses behind a cache: each token against the row of its own path."""
    heads, kv_heads, length, width = sized((8, 2, 700, 64), (2, 1, 60, 16))
    query, key, value = inputs(heads, length, width, kv_heads=kv_heads)
    prompt, parents = length - 6, [-1, 0, 0, 1, 2, 4]
    for name, pattern in {
        "causal": sr.Causal(),
        "window": sr.Causal() & sr.SlidingWindow(sized(100, 10)),
    }.items():
        cache = sr.KVCache(pattern, 1, kv_heads, width, num_heads=heads, page_size=64)
        cache.attend(*(x[:, :, :prompt] for x in (query, key, value)))
        drafted = [x[:, :, prompt:] for x in (query, key, value)]
        out, errors = cache.attend(*drafted, tree=parents), []
        for leaf in range(len(parents)):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            rows = [torch.cat((x[:, :, :prompt], y[:, :, path]), 2).double()
                    for x, y in zip((query, key, value), drafted, strict=True)]  # fmt: skip
            want = sr.attention(rows[0][:, :, -1:], *rows[1:], pattern, backend="reference")
            errors.append(relative(out[:, :, leaf : leaf + 1], want))
        cache.keep([0, 1, 3])
        yield {"pattern": name, "case": f"{len(parents)} guesses", "kept": cache.kept,
               "error": largest(errors, BOUND, f"a draft behind {name}")}  # fmt: skip


def stored() -> Iterator[Row]:
    """Checks a cache of 8 bits against attention over the rounded keys and values."""
    from sparsering.kernels.rounding import from_store, to_store

    heads, kv_heads, length, width = sized((8, 2, 500, 64), (2, 1, 60, 16))
    prompt = length - sized(20, 4)
    pattern = sr.Causal() & sr.SlidingWindow(sized(200, 30))
    query, key, value = inputs(heads, length, width, kv_heads=kv_heads)
    for store in ("int8", "fp8"):
        cache = sr.KVCache(pattern, 1, kv_heads, width, num_heads=heads, store=store)
        out = _step_by_step(cache, [query, key, value], prompt)
        rounded = [from_store(to_store(x, store), torch.float64) for x in (key, value)]
        want = sr.attention(query.double(), *rounded, pattern, backend="reference")
        # prompts round the rounded numbers to the query's dtype once more
        yield {"pattern": "window", "store": store, "bytes": cache.nbytes,
               "error": largest([relative(out, want)], BOUND, f"a cache in {store}")}  # fmt: skip


def unlike_heads() -> Iterator[Row]:
    """Checks a mask for each kv head: one call forward and backward, and a cache."""
    heads, kv_heads, length, width = sized((8, 2, 600, 64), (2, 2, 60, 16))
    near = sr.Causal() & (sr.SlidingWindow(sized(100, 9)) | sr.GlobalTokens(4, rows=False))
    pattern = sr.PerHead((sr.Causal(), near))
    args = [x.requires_grad_() for x in inputs(heads, length, width, kv_heads=kv_heads)]
    out = sr.attention(*args, pattern, backend="triton")
    grad = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, args, grad)]
    want = exact(args, pattern, grad)
    errors = [relative(a, b) for a, b in zip(got, want, strict=True)]
    yield {"pattern": "PerHead", "case": "forward+backward",
           "error": largest(errors, BOUND, "a mask for each head")}  # fmt: skip
    cache = sr.KVCache(pattern, 1, kv_heads, width, num_heads=heads, page_size=16)
    with torch.no_grad():
        own = [x.detach() for x in args]
        rows = _step_by_step(cache, own, length - sized(40, 5))
    yield {"pattern": "PerHead", "case": "a cache", "bytes": cache.nbytes,
           "error": largest([relative(rows, want[0])], BOUND, "such a cache")}  # fmt: skip


def _step_by_step(cache: sr.KVCache, args: list[Tensor], prompt: int) -> Tensor:
    outs = [cache.attend(*(x[:, :, :prompt] for x in args))]
    for place in range(prompt, args[0].shape[2]):
        outs.append(cache.attend(*(x[:, :, place : place + 1] for x in args)))
    return torch.cat(outs, 2)


MODULES = ("MultiheadAttention", "SelectedAttention", "SelectedAttention.nsa",
           "SelectedAttention.hierarchical", "LongNetLM")  # fmt: skip


def module(name: str) -> Iterator[Row]:
    """Checks a module or the language model, forward and backward, in float32 and under autocast.

    It is compared with itself in float64, which another backend computes. A layer that selects
    takes all blocks, so that rounding of scores cannot change the selection.
    """
    length, width, heads = sized((256, 256, 4), (40, 32, 2))
    block = sized(64, 16)
    torch.manual_seed(0)
    x = torch.randn(2, length, width)
    if name == "LongNetLM":
        pattern = sr.LongNet((32, 128), (1, 2))
        model = LongNetLM(pattern, width=width, num_layers=2, num_heads=heads)
        tokens = torch.randint(0, 256, (2, length + 1))
        yield from _beside_float64(
            name, model, lambda m, t: m.loss(t[:, :-1], t[:, 1:])[None], tokens
        )
    elif name == "MultiheadAttention":
        window = sr.Causal() & sr.SlidingWindow(sized(100, 10))
        layer = MultiheadAttention(width, heads, batch_first=True, pattern=window)
        yield from _beside_float64(name, layer, lambda m, x: m(x, x, x, need_weights=False)[0], x)
    else:
        _, _, preset = name.partition(".")
        make = getattr(SelectedAttention, preset) if preset else SelectedAttention
        layer = make(width, heads, num_kv_heads=heads // 2, k=8, block_size=block)
        yield from _beside_float64(name, layer, lambda m, x: m(x), x)


def _beside_float64(
    name: str, module: torch.nn.Module, run: Callable[[Any, Tensor], Tensor], x: Tensor
) -> Iterator[Row]:
    """Yields errors of the output and of all weights' gradients, in float32 and under autocast."""
    import copy

    results = []
    for kind in (torch.float64, torch.float32, HALF):
        own = copy.deepcopy(module).to(DEVICE).to(torch.float64 if kind == torch.float64 else None)
        sample = x.to(DEVICE)
        if x.is_floating_point():
            sample = sample.double() if kind == torch.float64 else sample.float()
        with torch.autocast(DEVICE, kind, enabled=kind == torch.bfloat16):
            out = run(own, sample)
        torch.manual_seed(1)
        (out * torch.randn(out.shape, dtype=torch.float64).to(out)).sum().backward()
        grads = [p.grad for p in own.parameters() if p.grad is not None]
        results.append([out.detach(), torch.cat([g.flatten().double() for g in grads])])
    for kind, got, bound in zip(("float32", "autocast"), results[1:], (1e-4, 0.05), strict=True):
        errors = [relative(a, b) for a, b in zip(got, results[0], strict=True)]
        yield {"module": name, "dtype": kind, "case": "forward+backward",
               "error": largest(errors, bound, f"{name} in {kind}")}  # fmt: skip


def others() -> Iterator[Row]:
    """Checks `attention_varlen`, `key_mass` and `torch.func.grad`, once each."""
    heads, width = sized((4, 64), (2, 16))
    lengths = sized((100, 3, 0, 250), (20, 3, 0, 30))
    total, places = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).tolist()
    args = [x[0].transpose(0, 1).contiguous() for x in inputs(heads, total, width)]
    out = sr.attention_varlen(*args, places, places, sr.Causal(), backend="triton")
    batch = [x.transpose(0, 1)[None] for x in args]
    inside = sr.Documents(lengths) & sr.Causal()
    want = sr.attention(*(x.double() for x in batch), inside, backend="reference")
    error = relative(out.transpose(0, 1)[None], want)
    yield {"call": "attention_varlen", "error": largest([error], BOUND, "attention_varlen")}

    query, key, value = inputs(heads, sized(300, 40), width, torch.float32)
    pattern = sr.SlidingWindow(sized(50, 9), 5)
    mass = sr.key_mass(query, key, pattern, block_size=sized(64, 16))
    score = query.double() @ key.double().mT * width**-0.5
    hidden = ~pattern.to_dense(query.shape[2]).bool().to(DEVICE)
    weights = score.masked_fill(hidden, -torch.inf).softmax(-1)
    yield {"call": "key_mass", "error": largest([relative(mass, weights.sum(2))], 1e-4, "key_mass")}

    def loss(query: Tensor) -> Tensor:
        return sr.attention(query, key, value, pattern, backend="triton").square().sum()

    got = torch.func.grad(loss)(query)
    own = query.double().requires_grad_()
    whole = (own @ key.double().mT * width**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    (true,) = torch.autograd.grad((whole @ value.double()).square().sum(), own)
    yield {"call": "torch.func.grad", "error": largest([relative(got, true)], 1e-4, "torch.func")}
