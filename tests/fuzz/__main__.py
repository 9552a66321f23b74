"""`python -m fuzz --seconds 3600 --jobs 2`: attack, print the table of what was covered."""

import argparse
import multiprocessing
import os
import sys
import time

from .attack import attack_by_name

KINDS = ("calls", "caches")


def main() -> int:
    """Attack by several processes; 1 where a case failed, which is printed."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of each kind (default 60)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default the time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.jobs} processes", flush=True)
    failed = False
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for name in given.kinds:
            begin = time.monotonic()
            work = [(name, given.seconds, f"{given.seed} {job}") for job in range(given.jobs)]
            total, faults = None, []
            for coverage, fault in pool.imap_unordered(attack_by_name, work):
                total = coverage if total is None else total.merge(coverage) or total
                faults += [fault] * bool(fault)
            assert total is not None
            print(
                f"\n## {name}: {total.right.total()} combinations right, "
                f"{total.refused.total()} refused, {len(total.empty())} of {len(total.right)} "
                f"never asked for, {time.monotonic() - begin:.0f} s\n\n{total.table()}"
            )
            reasons = sorted({reason[:150] for reason in total.reasons.values()})
            print("\n".join(["", "Refused:", *(f"- {reason}" for reason in reasons)]), flush=True)
            for fault in faults:
                failed = True
                print(f"\n## FAULT in {name}\n\n{fault}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
