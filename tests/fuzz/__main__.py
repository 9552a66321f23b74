"""Runs `python -m fuzz --seconds 3600`: attacks in several processes, and prints the coverage.

Run it from the repository with `tests` on PYTHONPATH, as `make fuzz` does. Exit status 1 means
that a case failed: its script is printed, and the same seed draws it again.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from .attack import Coverage, attack_by_name

KINDS = ("calls", "caches", "selections", "rings", "hostile")
KINDS += ("trees", "long", "ways", "layouts", "models", "ranks", "steps", "company")
KINDS += ("derivatives",)


def main() -> int:
    """Attacks each kind for some seconds; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each kind (default 60)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", default=str(int(time.time())), help="default the time")
    parser.add_argument("--backends", nargs="+", help="only these (default all)")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=cores, help="processes (default all cores)")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="cases under way")
    parser.add_argument("--record", type=Path, help="JSON file to add the coverage to")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {given.seed}, {given.jobs} processes", flush=True)
    failed = False
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        work = {
            pool.submit(
                attack_by_name, name, given.seconds, given.seed, given.out / name, given.backends
            ): name
            for name in given.kinds
        }
        for done in as_completed(work):
            name = work[done]
            try:
                coverage, fault = done.result()
            except BrokenProcessPool:
                under_way = [f"{path.name}: {path.read_text()}" for path in given.out.iterdir()]
                print("\n## A process died; the cases under way:", *under_way, sep="\n\n")
                return 1
            print(report(name, coverage), flush=True)
            if given.record is not None:
                keep(given.record, name, coverage, fault, f"{given.seconds:g} s, seed {given.seed}")
            if fault:
                failed = True
                print(f"\n## FAULT in {name}\n\n{fault}", flush=True)
    return int(failed)


def report(name: str, coverage: Coverage) -> str:
    """Formats the coverage as text."""
    cells, empty = len(coverage.right), len(coverage.empty())
    lines = [
        f"\n## {name}: {coverage.cases} cases in {coverage.seconds:.0f} processor seconds; of "
        f"{cells} combinations {cells - empty} asked for, {empty} never",
        coverage.table(),
        "Refused by name:",
        *sorted({f"- {reason[:160]}" for reason in coverage.reasons.values()}),
    ]
    return "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:])


def keep(record: Path, name: str, coverage: Coverage, fault: str, attack: str) -> None:
    """Replaces the results of one kind of attack in a JSON record."""
    from benchmarks.measure import environment

    kinds = json.loads(record.read_text())["kinds"] if record.exists() else {}
    kinds[name] = {
        "attack": attack,
        "cases": coverage.cases,
        "processor_seconds": round(coverage.seconds),
        "combinations": len(coverage.right),
        "never_drawn": len(coverage.empty()),
        "fault": fault,
        "table": coverage.table().splitlines(),
        "refusals": sorted(set(coverage.reasons.values())),
        "environment": environment(),
    }
    record.write_text(json.dumps({"name": "fuzz", "kinds": kinds}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
