"""Everything that is claimed of a GPU, in one call: `python -m benchmarks.gpu --out DIR`.

Writes `DIR/gpu.json` after each part, and `DIR/gpu.png`; a part that the file holds already, of the
same sources, is skipped, so that several short calls can share the work. Each timed call stands
beside its peers, measured in turns, with the density and an error against float64; what is wrong is
not timed. Without a GPU, under TRITON_INTERPRET=1, it runs small shapes, to be tried out.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparsering as sr
from sparsering.bench.cases import flex_call
from sparsering.bench.measure import Row, environment, sampled_error
from sparsering.kernels import triton
from sparsering.kernels.cache_folder import cache_folder

GPU = torch.cuda.is_available() and not triton.interpreting()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float32
ROUNDS = 3

Call = Callable[[], Tensor | tuple[Tensor, ...]]


def milliseconds(calls: dict[str, Call]) -> dict[str, float]:
    """Median over rounds, in each of which every call has its turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS if GPU else 1):
        for name, call in calls.items():
            if GPU:
                from triton.testing import do_bench

                times[name].append(do_bench(call, warmup=10, rep=60, return_mode="median"))
            else:
                begin = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def replayed(calls: dict[str, Call]) -> dict[str, float]:
    """Median times without what a call costs the host: as replayed CUDA graphs."""
    if not GPU:
        return {}
    from triton.testing import do_bench_cudagraph

    return {
        f"{name}, replayed": do_bench_cudagraph(call, return_mode="median")
        for name, call in calls.items()
    }


def inputs(
    heads: int, length: int, width: int, dtype: torch.dtype = HALF, kv_heads: int | None = None
) -> list[Tensor]:
    """Query, key and value of one batch entry, the same at every call."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    own = (heads, kv_heads or heads, kv_heads or heads)
    return [
        torch.randn(1, h, length, width, generator=generator, device=DEVICE, dtype=dtype)
        for h in own
    ]


def with_gradients(call: Call, args: list[Tensor], grad: Tensor) -> Call:
    """The gradients of all three, forward included."""
    for x in args:
        x.requires_grad_()
    return lambda: torch.autograd.grad(call(), args, grad)


def dense_calls(args: list[Tensor]) -> dict[str, Call]:
    """Torch's attention to all pairs, by each of its implementations that can run."""
    wanted = {"dense cudnn": SDPBackend.CUDNN_ATTENTION, "dense flash": SDPBackend.FLASH_ATTENTION}
    if not GPU:
        wanted = {"dense": SDPBackend.MATH}

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*args)

    return {name: partial(run, backend) for name, backend in wanted.items()}


def able(
    calls: dict[str, Call], prepare: Callable[[str, Call], Call] = lambda name, call: call
) -> tuple[dict[str, Call], list[Row]]:
    """The calls that run, each once, which also warms them up, and a row for each that does not."""
    running, failed = {}, []
    for name, call in calls.items():
        try:
            running[name] = prepare(name, call)
            running[name]()
        except Exception as error:  # a peer's: said, not hidden
            running.pop(name, None)
            if name == "ours":
                raise
            failed.append({"backend": name, "failed": f"{type(error).__name__}: {error}"[:300]})
    return running, failed


def exact_gradients(
    args: list[Tensor], pattern: sr.Pattern, block: int, grad: Tensor
) -> list[Tensor]:
    """Of the first head, in float64: [1, 1, N, D] each; the pattern is of whole blocks."""
    leaves = [x[:, :1].detach().double().requires_grad_() for x in args]
    heads, length = args[0].shape[1:3]
    layout = pattern.layout(length, num_heads=heads, block_size=block)
    row, key, mask, _ = layout.table(layout.passes[0], 0, 0)
    assert len(layout.passes) == 1 and bool((mask < 0).all())
    visited = torch.zeros(length // block, length // block, dtype=torch.bool)
    visited[row, key] = True
    visited = visited.to(grad.device).repeat_interleave(block, 0).repeat_interleave(block, 1)
    score = leaves[0] @ leaves[1].mT * leaves[0].shape[3] ** -0.5
    out = torch.softmax(score.masked_fill(~visited, -torch.inf), -1) @ leaves[2]
    return list(torch.autograd.grad(out, leaves, grad[:, :1].double()))


def largest(errors: list[float], bound: float, what: str) -> float:
    """The largest error. Raises where it is above the bound, or no number."""
    worst = float(torch.tensor(errors).max())
    if not worst <= bound:
        raise RuntimeError(f"{what} is wrong: errors {errors}")
    return worst


def random_blocks(heads: int, length: int, width: int, block: int, backward: bool) -> list[Row]:
    """Forward, or forward and backward, over 10% random blocks, beside the peers."""
    pattern = sr.RandomBlocks(0.1, block)
    args = inputs(heads, length, width)
    density = pattern.layout(length, num_heads=heads, block_size=block).density
    own = partial(sr.attention, *args, pattern, block_size=block)
    calls: dict[str, Call] = {"ours": partial(own, backend="triton")}
    if GPU:
        calls["flex"] = flex_call(args, pattern, block)
    if GPU and not sr.backends()["flash"]:
        calls["flash-attn-4"] = partial(own, backend="flash")
    calls |= dense_calls(args)
    errors: dict[str, float] = {}
    grad = torch.randn_like(args[0])
    exact = exact_gradients(args, pattern, block, grad) if backward else []

    def checked(name: str, call: Call) -> Call:
        """The call, once what it returns is known to be right."""
        if not backward:
            if not name.startswith("dense"):
                errors[name] = sampled_error(call(), *args, pattern)
            return call
        both = with_gradients(call, args, grad)
        if not name.startswith("dense"):
            found = [
                float((a[:, :1].double() - b).norm() / b.norm())
                for a, b in zip(both(), exact, strict=True)
            ]
            errors[name] = largest(found, 0.02, f"the gradient of {name}")
        return both

    calls, rows = able(calls, checked)
    taken = milliseconds(calls)
    for name, ms in taken.items():
        share = 1.0 if name.startswith("dense") else density
        flops = (14 if backward else 4) * heads * share * length**2 * width
        rows.append({
            "backend": name, "case": "forward+backward" if backward else "forward",
            "dtype": str(HALF)[6:], "tokens": length, "heads": heads, "head_dim": width,
            "block_size": block, "density": share, "ms": ms, "tflops": flops / ms / 1e9,
            "error": errors.get(name),
        })  # fmt: skip
    return rows


def main_shape(block: int, backward: bool) -> list[Row]:
    """B1 H16 D128 on 32768 tokens."""
    shape = (16, 32768, 128, block) if GPU else (1, 256, 16, 32)
    return random_blocks(*shape, backward)


def longnet() -> list[Row]:
    """LongNet at a million tokens, forward and backward, beside dense attention's rate per pair."""
    heads, width, length = (16, 64, 1 << 20) if GPU else (2, 16, 128)
    segments = (2048, 4096, 8192, 16384, 32768) if GPU else (16, 32)
    pattern = sr.LongNet(segments, (1, 2, 4, 6, 12) if GPU else (1, 2))
    args = inputs(heads, length, width)
    pairs = pattern.layout(length, num_heads=heads).num_pairs
    grad = torch.randn_like(args[0])
    call = partial(sr.attention, *args, pattern, backend="triton")
    error = sampled_error(call(), *args, pattern, rows=4)
    both = with_gradients(call, args, grad)
    first, second = both(), both()
    pairs_of = zip(first, second, strict=True)
    if not all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs_of):
        raise RuntimeError("gradients are not finite, or not the same bits twice")
    del first, second, pairs_of
    reference = inputs(heads, 32768 if GPU else 128, width)
    peers = {
        name: with_gradients(peer, reference, torch.randn_like(reference[0]))
        for name, peer in dense_calls(reference).items()
    }
    peers, rows = able(peers)
    for name, ms in milliseconds({"ours": both, **peers}).items():
        visited = pairs if name == "ours" else reference[0].shape[2] ** 2
        rows.append({
            "backend": name, "case": "forward+backward", "ms": ms, "pairs": visited,
            "tokens": length if name == "ours" else reference[0].shape[2],
            "tflops": 14 * heads * visited * width / ms / 1e9,
            "error": error if name == "ours" else None,
        })  # fmt: skip
    return rows


def founding_table() -> list[Row]:
    """B1 H8 D64 float16, 4096 tokens, 90% sparse and local: by events, and as a replayed graph."""
    heads, length, width = (8, 4096, 64) if GPU else (1, 128, 16)
    args = inputs(heads, length, width, torch.float16 if GPU else torch.float32)
    pattern = sr.BlockWindow(1, 128) if GPU else sr.BlockWindow(1, 16)
    density = pattern.layout(length, num_heads=heads).density
    call = partial(sr.attention, *args, pattern, backend="triton")
    error = sampled_error(call(), *args, pattern)
    shape = {"dtype": str(args[0].dtype)[6:], "tokens": length, "density": density, "error": error}
    taken = milliseconds({"ours": call}) | replayed({"ours": call})
    return [{"backend": name, **shape, "ms": ms} for name, ms in taken.items()]


def window() -> list[Row]:
    """A causal window of 4096: most of its time is in whole blocks, two in 33 are masked."""
    heads, length, width = (16, 65536, 128) if GPU else (1, 256, 16)
    pattern = sr.Causal() & sr.SlidingWindow(4096 if GPU else 64)
    args = inputs(heads, length, width)
    layout = pattern.layout(length, num_heads=heads)
    call = partial(sr.attention, *args, pattern, backend="triton")
    error = sampled_error(call(), *args, pattern)
    ms = milliseconds({"ours": call})["ours"]
    flops = 4 * heads * layout.density * length**2 * width
    return [{"backend": "ours", "tokens": length, "density": layout.density, "ms": ms,
             "tflops": flops / ms / 1e9, "error": error}]  # fmt: skip


def decoding() -> list[Row]:
    """One query against 131072 keys of 8 kv heads: the time beside reading them once."""
    length, width = (131072, 128) if GPU else (256, 16)
    query, key, value = inputs(32 if GPU else 4, length, width, kv_heads=8 if GPU else 2)
    query = query[:, :, -1:].contiguous()
    call = partial(sr.attention, query, key, value, sr.Causal(), backend="triton")
    error = sampled_error(call(), query, key, value, sr.Causal(), rows=1)
    calls: dict[str, Call] = {"ours": call, "reading": lambda: (key.sum(), value.sum())}
    taken = milliseconds(calls) | replayed(calls)
    moved = 2 * key.numel() * key.itemsize
    return [
        {"backend": name, "tokens": length, "ms": ms, "gb_per_s": moved / ms / 1e6,
         "error": error if name.startswith("ours") else None}
        for name, ms in taken.items()
    ]  # fmt: skip


def layouts() -> list[Row]:
    """Seconds to lay 2^20 tokens: built on the host and moved, and top-k blocks on the device."""
    length = 1 << 20 if GPU else 1 << 12
    blocks = length // 128
    indices = torch.randint(0, blocks, (blocks, 32), device=DEVICE)
    patterns = {
        "window": sr.Causal() & sr.SlidingWindow(4096),
        "longnet": sr.LongNet((2048, 32768), (1, 12)),
        "selected": sr.SelectedBlocks(indices, 128),
    }

    def build(pattern: sr.Pattern) -> Tensor:
        sr.layout_cache.clear()
        pattern.layout(length, block_size=128, device=DEVICE)
        if GPU:
            torch.cuda.synchronize()
        return indices

    taken = milliseconds({name: partial(build, p) for name, p in patterns.items()})
    return [{"pattern": name, "tokens": length, "ms": ms} for name, ms in taken.items()]


def memory() -> list[Row]:
    """Peak memory at a million tokens beyond inputs, outputs and lse."""
    heads, width, length = (16, 64, 1 << 20) if GPU else (1, 16, 128)
    rows: list[Row] = []
    if not GPU:
        return rows
    for name, pattern in {
        "longnet": sr.LongNet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)),
        "window": sr.Causal() & sr.SlidingWindow(4096),
    }.items():
        args = [x.requires_grad_() for x in inputs(heads, length, width)]
        grad = torch.ones_like(args[0])
        for backward in (False, False, True, True):  # the first of each lays the pattern out
            rows.append(peak(args, pattern, grad, backward))
            rows[-1] |= {"pattern": name, "backward": backward, "tokens": length}
        del rows[-2], rows[-3]
    return rows


def peak(args: list[Tensor], pattern: sr.Pattern, grad: Tensor, backward: bool) -> Row:
    """Peak memory of a call beyond what stays: inputs, outputs, lse, gradients."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = sr.attention(*args, pattern, backend="triton", return_lse=True)
    kept = out.nbytes + lse.nbytes
    if backward:
        kept += sum(x.nbytes for x in torch.autograd.grad(out, args, grad))
    extra = torch.cuda.max_memory_allocated() - before - kept
    whole = sum(x.nbytes for x in args) + kept + grad.nbytes * backward
    return {"extra_bytes": extra, "share_of_inputs_and_outputs": extra / whole}


def beyond_int32() -> list[Row]:
    """B * H * N * D just above 2^31: the last tokens of the last head, against float64."""
    if not GPU:
        return []
    heads, width = 16, 128
    length = (1 << 31) // (heads * width) + 128
    args = [x.requires_grad_() for x in inputs(heads, length, width)]
    pattern = sr.Causal() & sr.SlidingWindow(500)
    out = sr.attention(*args, pattern, backend="triton")
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, args, grad)
    tail = [x[:, -1:, -1000:].detach().double().requires_grad_() for x in args]
    exact = sr.attention(*tail, pattern, backend="reference")
    kept = [x[:, -1:, -499:] for x in (out, *grads)]
    expected = [exact, *torch.autograd.grad(exact, tail, grad[:, -1:, -1000:].double())]
    errors = [
        float((a.double() - b[:, :, -499:]).norm() / b[:, :, -499:].norm())
        for a, b in zip(kept, expected, strict=True)
    ]
    worst = largest(errors, 0.02, "what lies beyond 2^31 elements")
    return [{"elements": args[0].numel(), "error": worst}]


def correctness(dtype: torch.dtype) -> list[Row]:
    """Every pattern of the tests, forward and backward, against float64."""
    oracle = tests()
    width, names = (128, list(oracle.PATTERNS)) if GPU else (16, ["causal", "nothing"])
    case = oracle.Case(2, 4, 2, 450, 450, width, width, 128)
    if not GPU:
        case = oracle.Case(1, 2, 1, 50, 50, 16, 16, 16)
    return [against_eager(oracle.PATTERNS[name](case), case, dtype, name) for name in names]


def shapes() -> list[Row]:
    """Head dims, block sizes, strides, lengths, a block bias and selected blocks."""
    oracle = tests()
    causal, steps = oracle.PATTERNS["causal"], oracle.PATTERNS["union of steps"]
    cases = [
        (causal, oracle.Case(1, 2, 1, 300, 300, own, own, 64))
        for own in ((16, 48, 64, 72, 80, 96, 192, 256) if GPU else (24,))
    ]
    cases += [
        (steps, oracle.Case(1, 2, 1, 300, 300, 64, 64, block))
        for block in ((16, 32, 48, 96, 160, 256) if GPU else (48,))
    ]
    cases += [
        (causal, oracle.Case(2, 4, 2, 130, 300, 64, 64, 64, arrange=arrange))
        for arrange in ("tokens before heads", "one head expanded", "width before tokens")
    ][: None if GPU else 1]
    cases.append(
        (lambda case: sr.Full(), oracle.Case(1, 8, 1, 16, 5000 if GPU else 90, 64, 64, 64))
    )
    rows = [against_eager(make(case), case, HALF, repr(make(case))) for make, case in cases]
    return [*rows, biased_selection()]


def tests() -> Any:
    """The oracle of the tests."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import attention_oracle

    return attention_oracle


def against_eager(pattern: sr.Pattern, case: Any, dtype: torch.dtype, name: str) -> Row:
    """Errors of out, lse and gradients; they may be twice those of dense attention so typed."""
    oracle = tests()
    torch.manual_seed(0)
    args = [x.detach().to(DEVICE).requires_grad_() for x in oracle.inputs(case, dtype, False)]
    exact_args = [x.detach().double().requires_grad_() for x in args]
    counts = oracle.dense_counts(pattern, case).to(DEVICE)
    options = {"block_size": case.block_size, "q_start": case.q_start}
    exact = oracle.eager_attention(*exact_args, counts)
    grads = [torch.randn_like(x).nan_to_num() for x in exact]

    def all_of(results: tuple[Tensor, Tensor], wrt: list[Tensor]) -> list[Tensor]:
        given = [grad.to(x) for grad, x in zip(grads, results, strict=True)]
        given[1] = torch.where(results[1].isfinite(), given[1], 0.0)
        options = {"materialize_grads": True}
        return [x.detach() for x in results] + list(
            torch.autograd.grad(list(results), wrt, given, **options)
        )

    true = all_of(exact, exact_args)
    eager = all_of(oracle.eager_attention(*args, counts), args)
    got = sr.attention(*args, pattern, backend="triton", return_lse=True, **options)
    found = []
    for ours, theirs, c in zip(all_of(got, args), eager, true, strict=True):
        size = float(torch.cat((c[c.isfinite()].abs(), c.new_ones(1))).max())
        grant = 0.01 * torch.finfo(dtype).eps * size
        mine, bound = (oracle.errors(x, c)[0] for x in (ours, theirs))
        found.append(mine / (bound + grant))
    worst = largest(found, 2.0, f"{name} in {dtype}, head dim {case.head_dim}")
    return {"pattern": name, "dtype": str(dtype)[6:], "head_dim": case.head_dim,
            "block_size": case.block_size, "error_over_eager": worst}  # fmt: skip


def biased_selection() -> Row:
    """Selected blocks with a bias for each, and its gradient, against float64."""
    block, length = (64, 512) if GPU else (16, 64)
    indices = torch.randint(0, length // block, (1, 2, length // block, 3))
    pattern = sr.SelectedBlocks(indices, block)
    args = [x.requires_grad_() for x in inputs(2, length, 64 if GPU else 16)]
    number = pattern.layout(length, num_heads=2, block_size=block).num_blocks
    args.append(torch.randn(1, 2, number, device=DEVICE).requires_grad_())
    exact_args = [x.detach().double().requires_grad_() for x in args]
    grad = torch.randn_like(args[0])
    results = []
    for own, backend in ((args, "triton"), (exact_args, "reference")):
        out = sr.attention(*own[:3], pattern, block_bias=own[3], block_size=block, backend=backend)
        results.append([out, *torch.autograd.grad(out, own, grad.to(out))])
    found = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    worst = largest(found, 0.02 if GPU else 1e-5, "a block bias")
    return {"pattern": "SelectedBlocks with a bias", "dtype": str(HALF)[6:], "error": worst}


PARTS: dict[str, Callable[[], list[Row]]] = {
    "forward, blocks of 128": partial(main_shape, 128, False),
    "forward and backward, blocks of 128": partial(main_shape, 128, True),
    "forward, blocks of 64": partial(main_shape, 64, False),
    "forward and backward, blocks of 64": partial(main_shape, 64, True),
    "founding table": founding_table,
    "longnet": longnet,
    "window": window,
    "decoding": decoding,
    "layouts": layouts,
    "memory": memory,
    "correctness, half precision": partial(correctness, HALF),
    "correctness, shapes": shapes,
    "correctness, float16": partial(correctness, torch.float16),
    "correctness, float32": partial(correctness, torch.float32),
    "beyond int32": beyond_int32,
}


def plot(parts: dict[str, dict], path: Path) -> None:
    """Bars of TFLOP/s on visited blocks, a panel for each part that has them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {name: [row for row in part["rows"] if "tflops" in row] for name, part in parts.items()}
    shown = {name: rows for name, rows in shown.items() if rows}
    figure = Figure(figsize=(8, 0.9 + 0.32 * sum(1 + len(rows) for rows in shown.values())))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels, place = [], 0.0
    for name, rows in shown.items():
        place += 1
        for row in rows:
            color = "#c0504d" if str(row["backend"]).startswith("ours") else "#8c8c8c"
            axes.barh(place, row["tflops"], color=color)
            labels.append((place, f"{name}: {row['backend']}"))
            place += 1
    axes.set_yticks([at for at, _ in labels], [text for _, text in labels], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s on the blocks that are visited")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def digest() -> str:
    """Of what is measured: a copy of the tree may have no commit."""
    root = Path(__file__).parent.parent
    files = [Path(__file__), *sorted((root / "sparsering").rglob("*.py"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def alive() -> bool:
    """Whether the GPU still answers: an illegal access is an error for all that follows."""
    try:
        if GPU:
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def run(out: Path, only: list[str], budget: float) -> Iterator[str]:
    """Measures what is missing, part by part; yields what was done."""
    begin = time.perf_counter()
    path = out / "gpu.json"
    record = {"name": "gpu", "environment": environment(), "sources": digest(), "parts": {}}
    if path.exists():
        found = json.loads(path.read_text())
        if found["sources"] == record["sources"]:
            record = found
    out.mkdir(parents=True, exist_ok=True)
    for name in only or PARTS:
        spent = time.perf_counter() - begin
        if "rows" in record["parts"].get(name, {}):
            yield f"{name}: on record"
            continue
        if spent > budget:
            yield f"{name}: left for the next call, {spent:.0f} s are spent"
            continue
        try:
            part: dict = {"rows": PARTS[name]()}
        except Exception as error:  # recorded, so that the other parts still run
            part = {"failed": f"{type(error).__name__}: {error}"}
        broken = "failed" in part and not alive()
        part["seconds"] = time.perf_counter() - begin - spent
        record["parts"][name] = part
        path.write_text(json.dumps(record, indent=1))
        plot({n: p for n, p in record["parts"].items() if "rows" in p}, out / "gpu.png")
        yield f"{name}: {part.get('failed', '')} {part['seconds']:.1f} s"
        if broken:
            yield "the GPU answers no more: go on in a new process"
            return
        for row in part.get("rows", []):
            yield "  " + "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
                                   for k, v in row.items())  # fmt: skip


def main() -> int:
    """Exit code 1 where a part failed or is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], help="these parts")
    parser.add_argument("--budget", type=float, default=420, help="seconds; no part starts after")
    arguments = parser.parse_args()
    if reasons := triton.reasons():
        print(f"benchmarks.gpu: {'; '.join(reasons)}", file=sys.stderr)
        return 2
    print(f"tuned choices come from {cache_folder()}, if any")
    for line in run(arguments.out, arguments.only, arguments.budget):
        print(line, flush=True)
    parts = json.loads((arguments.out / "gpu.json").read_text())["parts"]
    return int(any("rows" not in parts.get(name, {}) for name in arguments.only or PARTS))


if __name__ == "__main__":
    sys.exit(main())
