"""Compares the speed of this checkout with that of another revision, in turns.

    python -m benchmarks.compare --base main~5
    python -m benchmarks.compare --base v0.3 --out runs/compare     # also writes compare.json

The other revision is unpacked into runs/compare/REVISION. Each round times every case in two fresh
processes, one for each revision, in alternating order. A case's ratio is the median over rounds of
this checkout's time divided by the other's. Its noise is two standard errors of that median. While
no case is slower, those between a clear yes and a clear no get more rounds. The exit status is 1 if
a case is slower by more than 10% beyond its noise.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, MOST_ROUNDS = 6, 18
SLOWER, LEAST_NOISE = 1.10, 0.01
CALLS, SECONDS = 5, 0.15  # of a case in a process: at least so many, at least so long

Case = Callable[[], Any]


def cases() -> dict[str, Case]:
    """README's rows, smaller where they take seconds, and twelve small calls, on one thread."""
    import torch

    import sparsering as sr
    from sparsering.distributed import RingPlan

    def inputs(heads: int, tokens: int, width: int = 64, dtype: Any = torch.float32) -> list[Any]:
        generator = torch.Generator().manual_seed(tokens)
        shape = (3, 1, heads, tokens, width)
        return list(torch.randn(shape, generator=generator).to(dtype).unbind())

    def forward(tensors: list[Any], pattern: sr.Pattern, **options: Any) -> Case:
        return lambda: sr.attention(*tensors, pattern, **options)

    def training(tensors: list[Any], pattern: sr.Pattern, **options: Any) -> Case:
        leaves = [x.requires_grad_() for x in tensors]
        weight = torch.ones_like(leaves[2])
        return lambda: torch.autograd.grad(
            sr.attention(*leaves, pattern, **options), leaves, weight
        )

    def new_layout(make: Callable[[int], sr.Pattern], tokens: int) -> Case:
        numbers = iter(range(1 << 30))

        def build() -> Any:
            return make(next(numbers)).layout(tokens)

        return build

    def decoding(pattern: sr.Pattern, tokens: int) -> Case:
        cache = sr.KVCache(pattern, 1, 8, 64)
        query, key, value = inputs(8, tokens)
        cache.attend(query, key, value)
        token = [x[:, :, :1].contiguous() for x in (query, key, value)]
        return lambda: [cache.attend(*token) for _ in range(8)]

    bf16 = torch.bfloat16
    blocks = sr.RandomBlocks(0.1, 128)
    longnet = sr.LongNet((1024, 4096, 8192), (1, 4, 8)) & sr.Causal()
    window = sr.Causal() & sr.SlidingWindow(1023)
    packed = sr.Packed((300, 212, 100, 412), sr.Causal())
    lengths = iter(range(65536, 1 << 30, 128))
    extras = {"softcap": 30.0, "sink": torch.zeros(4)}
    table = sr.alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625]), 256)
    return {
        "random blocks, 8K": forward(inputs(8, 8192), blocks),
        "random blocks, 8K, bfloat16": forward(inputs(8, 8192, dtype=bf16), blocks),
        "random blocks with backward, 4K": training(inputs(8, 4096), blocks),
        "random blocks with backward, 4K, bfloat16": training(
            inputs(8, 4096, dtype=bf16), blocks
        ),
        "LongNet, 8K": forward(inputs(8, 8192), longnet),
        "LongNet with backward, 4K": training(inputs(4, 4096), longnet),
        "window of 1,024, 16K": forward(inputs(2, 16384), window),
        "layout of a window, 64K": new_layout(lambda i: sr.SlidingWindow(4096 + i), 65536),
        "layout of 20 documents, 64K": new_layout(
            lambda i: sr.Causal() & sr.Documents((3000 + i,) * 20 + (5536 - 20 * i,)), 65536
        ),
        "plan of 8 ranks, 64K": lambda: RingPlan.build(window, next(lengths), 8),
        "8 tokens after 16,384": decoding(sr.Causal() & sr.SlidingWindow(4095), 16384),
        "causal, 4K": forward(inputs(4, 4096), sr.Causal()),
        # small calls, of which the time outside the kernel is a good part
        "causal, 64 tokens": forward(inputs(8, 64), sr.Causal()),
        "causal in bfloat16, 128 tokens": forward(inputs(8, 128, dtype=bf16), sr.Causal()),
        "causal with backward, 128 tokens": training(inputs(8, 128), sr.Causal()),
        "window, 512 tokens": forward(inputs(4, 512), sr.SlidingWindow(64) & sr.Causal()),
        "documents, 1,024 tokens": forward(inputs(4, 1024), packed),
        "documents with backward, 1,024 tokens": training(inputs(4, 1024), packed),
        "softcap and sink, 512 tokens": forward(inputs(4, 512), sr.Causal(), **extras),
        "ALiBi, 512 tokens": forward(inputs(4, 512), sr.Causal(), distance_bias=table),
        "dropout, 512 tokens": forward(
            inputs(4, 512), sr.Causal(), dropout_p=0.1, dropout_seed=1
        ),
        "grouped heads, 512 tokens": forward(
            [inputs(8, 512)[0], *inputs(2, 512)[1:]], sr.Causal()
        ),
        "head dim 128, 512 tokens": forward(inputs(4, 512, 128), sr.Causal()),
        "gather, 512 tokens": forward(inputs(4, 512), sr.Causal(), backend="gather"),
    }  # fmt: skip


def timed() -> dict[str, float]:
    """Median milliseconds of each case, in this process, without those that raise."""
    import torch

    found, threads = {}, torch.get_num_threads()
    for name, call in cases().items():
        # two threads that wait for each other would make small calls as noisy as the machine is
        torch.set_num_threads(1 if name.endswith(" tokens") else threads)
        try:
            call(), call()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < CALLS or time.perf_counter() - begin < SECONDS:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = statistics.median(times)
    return found


def measure(folder: Path) -> dict[str, float]:
    """Times the cases in a fresh process that imports the package of a folder."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
    report = json.loads(done.stdout)
    assert Path(report["package"]).is_relative_to(folder), f"{report['package']} was imported"
    times: dict[str, float] = report["times"]
    return times


def verdict(ratios: list[float]) -> tuple[float, float]:
    """Returns the median of the ratios of rounds, and its noise: two standard errors.

    The deviation is that of a normal distribution with the same median absolute deviation.
    """
    middle = statistics.median(ratios)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in ratios)
    return middle, max(LEAST_NOISE, 2 * 1.2533 * spread / math.sqrt(len(ratios)))


def is_open(ratios: list[float]) -> bool:
    """Whether more rounds may change whether a case counts as slower."""
    middle, noise = verdict(ratios)
    return middle > 1.05 and middle - 2 * noise <= SLOWER <= middle + 2 * noise


def compare(base: Path, head: Path, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Measures both folders in turns; returns a row for each case that both have."""
    times: dict[str, list[tuple[float, float]]] = {}
    number = 0
    while number < rounds or (number < MOST_ROUNDS and _may_change(times)):
        turns = (("base", base), ("head", head))
        found = {which: measure(x) for which, x in (turns if number % 2 == 0 else turns[::-1])}
        if failed := sorted(found["base"].keys() - found["head"].keys()):
            raise RuntimeError(f"these cases run in the other revision alone: {', '.join(failed)}")
        for name in found["base"]:
            times.setdefault(name, []).append((found["base"][name], found["head"][name]))
        number += 1
        print(f"round {number} measured", file=sys.stderr, flush=True)
    rows = []
    for name, pairs in sorted(times.items()):
        ratio, noise = verdict(_ratios(pairs))
        old, new = (statistics.median(x) for x in zip(*pairs, strict=True))
        row = {"case": name, "base_ms": old, "ms": new, "ratio": ratio, "noise": noise}
        rows.append(row | {"rounds": len(pairs), "slower": ratio - noise > SLOWER})
    return rows


def _ratios(pairs: list[tuple[float, float]]) -> list[float]:
    return [new / old for old, new in pairs]


def _may_change(times: dict[str, list[tuple[float, float]]]) -> bool:
    """Whether more rounds may change the exit status: no case is slower yet, and some are open."""
    ratios = [_ratios(pairs) for pairs in times.values()]
    slower = any(ratio - noise > SLOWER for ratio, noise in map(verdict, ratios))
    return not slower and any(map(is_open, ratios))


def unpacked(revision: str, folder: Path) -> Path:
    """Returns a folder with the files of a revision, and its commit as the folder's name."""
    git = ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    target = folder / commit
    if not (target / "sparsering").is_dir():
        target.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(
            ["git", "archive", commit, "sparsering"], capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    return target.resolve()


def main() -> int:
    """Prints a line for each case; returns 1 if one is slower."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", help="the revision to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"at least; default {ROUNDS}")
    parser.add_argument("--out", type=Path, help="folder for compare.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        import sparsering

        print(json.dumps({"package": sparsering.__file__, "times": timed()}))
        return 0
    head = Path(__file__).resolve().parents[1]
    rows = compare(unpacked(given.base, head / "runs" / "compare"), head, given.rounds)
    for row in rows:
        mark = "  SLOWER" if row["slower"] else ""
        print(
            f"{row['case']:45} {row['base_ms']:9.3f} -> {row['ms']:9.3f} ms   "
            f"{row['ratio']:.3f} +- {row['noise']:.3f}{mark}"
        )
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "compare.json").write_text(json.dumps(rows, indent=1))
    return int(any(row["slower"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
