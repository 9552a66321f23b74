"""Runs comparisons (`bench`), tables (`report`), `ablation` and `ceiling`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsering.cli.argument_types import add_quiet, positive
from sparsering.ground.files import replace_file
from sparsering.mistakes import OneLineParser, run_command
from sparsering.plots.figure import require_matplotlib

from . import comparisons, tables
from .comparisons.ablation import ablation
from .comparisons.ceiling import TIERS, ceiling
from .report.page import report_page


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands; each sets `run`, a function of the parsed arguments."""
    parser = OneLineParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    bench = commands.add_parser(
        "bench", help="time the backends, dense attention and FlexAttention"
    )
    bench.set_defaults(run=_bench)
    add_quiet(bench)
    bench.add_argument("--out", type=Path, required=True, help="folder of the record")
    bench.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    bench.add_argument("--only", choices=comparisons.CASES, help="one comparison, by its record")

    report = commands.add_parser(
        "report",
        help="run the tables of the prior documents again, or the rest; writes one HTML page",
    )
    report.set_defaults(run=_report)
    add_quiet(report)
    report.add_argument(
        "--out", type=Path, default=Path("runs/report"), help="folder of the page and the records"
    )
    report.add_argument("--quick", action="store_true", help="tiny sizes, to try it out")
    report.add_argument(
        "--seconds", type=positive, default=480, help="time for all tables (default: %(default)s)"
    )
    report.add_argument(
        "--gpu-record",
        type=Path,
        default=Path("benchmarks/records/gpu.json"),
        help="record of `python -m benchmarks.gpu` (default: %(default)s, if it exists)",
    )

    parts = commands.add_parser("ablation", help="switch each part off and on, in turns")
    parts.set_defaults(run=_ablation)
    parts.add_argument("--out", type=Path, required=True, help="folder of the record")

    rates = commands.add_parser("ceiling", help="time products, and calls as a share of them")
    rates.set_defaults(run=_ceiling)
    rates.add_argument("--out", type=Path, required=True, help="folder of the record")
    rates.add_argument("--tier", choices=TIERS, help="measure one tier, in this process")
    rates.add_argument("--quick", action="store_true", help="small sizes, few repeats")

    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0; 1 where a table failed; 2 for a mistake."""
    return run_command("python -m benchmarks", build_parser().parse_args(argv))


def _bench(arguments: argparse.Namespace) -> int:
    for path in comparisons.main(arguments.out, arguments.quick, arguments.only):
        print(f"Wrote {path}")
    return 0


def _ablation(arguments: argparse.Namespace) -> int:
    print(f"Wrote {ablation(arguments.out)}")
    return 0


def _ceiling(arguments: argparse.Namespace) -> int:
    print(f"Wrote {ceiling(arguments.out, arguments.tier, arguments.quick)}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    require_matplotlib()  # fails now rather than after minutes of measuring
    page = arguments.out / "index.html"
    if page.exists() and not tables.failed(arguments.out):
        raise FileExistsError(
            f"{arguments.out} has a finished report, which is not overwritten; open {page}, or "
            "choose another --out"
        )
    gpu, parts = (
        json.loads(path.read_bytes()) if path.exists() else None
        for path in (arguments.gpu_record, Path(__file__).parent / "records" / "ablation.json")
    )
    records = tables.measure_tables(arguments.out, quick=arguments.quick, seconds=arguments.seconds)
    replace_file(page, report_page(records, gpu, parts).encode())
    print(f"Report: {page}")
    if failed := tables.failed(arguments.out):
        print(f"Not measured: {', '.join(failed)}; the same command tries them again")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
