"""Measures every GPU claim, in calls of less than nine minutes that continue one another.

    python -m benchmarks.gpu --out DIR            # writes DIR/gpu.json and DIR/gpu.png
    python -m benchmarks.gpu --out DIR --table    # prints the record as lines for README and docs
    python -m benchmarks.gpu --call quarter       # the best fifteen minutes
    python -m benchmarks.gpu --call first         # the parts of one call of the first half hour
    python -m benchmarks.gpu --list               # the parts, in order, with seconds

Repeating the call measures what is missing. Without a GPU, TRITON_INTERPRET=1 rehearses all parts
on small shapes.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from sparsering.ground.files import replace_file
from sparsering.kernels import triton

from . import parts, running, table

RECORDS = Path("benchmarks/records")


def main() -> int:
    """Runs the command; exit code 1 if a case failed or is missing, 2 if it could not measure."""
    arguments = _arguments()
    if arguments.list:
        for line in _listed():
            print(line)
        return 0
    out: Path = arguments.out
    record = running.read(out / "gpu.json") or running.read(arguments.resume / "gpu.json")
    if arguments.table:
        if record is None:
            print(f"benchmarks.gpu: there is no record in {out}", file=sys.stderr)
            return 2
        print(*table.markdown(record), sep="\n")
        table.plot(record, out / "gpu.png")
        return 0
    if reasons := triton.reasons():
        print(f"benchmarks.gpu: {'; '.join(reasons)}", file=sys.stderr)
        return 2
    try:
        replace_file(out / "gpu.trial", b"")
        (out / "gpu.trial").unlink()
    except OSError as error:
        print(f"benchmarks.gpu: {error}; name another --out", file=sys.stderr)
        return 2
    session = running.Session(out, record, arguments.commit, arguments.keep)
    chosen = dict.fromkeys(arguments.only, ()) | parts.calls_by_name().get(arguments.call, {})
    try:
        for line in running.run(session, chosen, arguments.budget, arguments.processes):
            print(f"{session.spent:4.0f} s  {line}", flush=True)
    except RuntimeError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    if find_spec("matplotlib") is None:
        print(f"{out / 'gpu.png'} is not drawn: the package matplotlib is missing")
    else:
        table.plot(session.record, out / "gpu.png")
    return _summary(session, chosen)


def _summary(session: running.Session, chosen: Mapping[str, Sequence[str]]) -> int:
    """Prints the failed cases and the bars; returns 1 if cases are missing or failed."""
    missing = 0
    for name, cases in (chosen or dict.fromkeys(parts.PARTS, ())).items():
        for case in cases or parts.PARTS[name].cases:
            state = session.state(name, case) or {"left": "not begun"}
            missing += "left" in state or "failed" in state
            if "failed" in state:
                print(f"FAILED  {name} | {case}: {state['failed']}")
    for bar in session.record["bars"]:
        value = "not measured" if bar["found"] is None else f"{bar['found']:.4g} {bar['unit']}"
        met = {None: "", True: "met", False: "NOT MET"}[bar["floor_met"]]
        aim = f", aim {bar['aim']:g}" if bar["aim"] is not None else ""
        print(f"{bar['bar']}: {value} (floor {bar['floor']:g}{aim}) {met}")
    print(f"{missing} cases are missing or failed; {session.spent:.0f} s; {session.path}")
    return int(missing > 0)


def _listed() -> Iterator[str]:
    for call, chosen in parts.calls_by_name().items():
        seconds = sum(parts.seconds_of(*part) for part in chosen.items())
        yield f"{seconds:4.0f} s  --call {call}, estimated:"
        for name, cases in chosen.items():
            part = parts.PARTS[name]
            kind = "timed" if part.timed else "shared"
            seconds = parts.seconds_of(name, cases)
            line = f"{seconds:6.0f} s (bound {part.bound:3.0f})  {kind:6}  {name}"
            yield f"{line}: {len(cases or part.cases)} cases"
    yield f"{sum(part.seconds for part in parts.PARTS.values()):4.0f} s in all, estimated"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--out", type=Path, default=RECORDS, help="folder of the record (default: %(default)s)")
    add(
        "--resume",
        type=Path,
        default=RECORDS,
        help="folder of an earlier call's record, where --out has none (default: %(default)s)",
    )
    add(
        "--only",
        nargs="+",
        choices=list(parts.PARTS),
        default=[],
        metavar="PART",
        help="run only these parts",
    )
    add(
        "--call",
        choices=list(parts.calls_by_name()),
        help="run only the parts of one call: quarter, or one of the first half hour",
    )
    add(
        "--budget",
        type=float,
        default=500,
        help="seconds after which no case starts (default: %(default)g)",
    )
    add(
        "--processes",
        type=int,
        default=6 if (os.cpu_count() or 1) >= 8 else 2,
        help="processes that run the untimed cases (default: %(default)s)",
    )
    add("--commit", default="", help="commit of the sources, if they are no git checkout")
    add(
        "--keep",
        action="store_true",
        help="also keep the results of other sources; each case names its own",
    )
    add("--table", action="store_true", help="print the record as Markdown, and draw it")
    add("--list", action="store_true", help="print the parts in order, with their estimated times")
    arguments = parser.parse_args()  # fmt: skip
    if not re.fullmatch(r"[0-9a-f]{7,40}|", arguments.commit):
        parser.error(f"--commit must be the digits of a commit, got {arguments.commit!r}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
