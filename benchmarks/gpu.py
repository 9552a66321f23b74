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

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparsering as sr
from sparsering.bench.cases import flex_call
from sparsering.bench.measure import Row, environment, interleaved, sampled_error
from sparsering.files import cache_folder
from sparsering.kernels import triton

from .gpu_correctness import DEVICE, GPU, HALF, correctness, inputs, largest, shapes

ROUNDS = 3

Call = Callable[[], Tensor | tuple[Tensor, ...]]


def milliseconds(calls: dict[str, Call]) -> dict[str, float]:
    """Median over rounds, in each of which every call has its turn."""
    if not GPU:
        return interleaved(calls, 1)
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(do_bench(call, warmup=10, rep=60, return_mode="median"))
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
    folders = (root / "benchmarks", root / "sparsering")
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
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
