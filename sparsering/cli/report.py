"""The command that measures and draws the report: `report`."""

import argparse
from pathlib import Path

from .arguments import Commands, positive


def add_commands(commands: Commands) -> None:
    """Adds the command of this file."""
    report = commands.add_parser(
        "report", help="run the tables of the prior documents again; writes one HTML page"
    )
    report.set_defaults(run=_report)
    report.add_argument(
        "--out", type=Path, default=Path("runs/report"), help="folder of the page and the records"
    )
    report.add_argument("--quick", action="store_true", help="tiny sizes, to try it out")
    report.add_argument(
        "--resume", action="store_true", help="take the tables that --out has from an earlier run"
    )
    report.add_argument(
        "--seconds", type=positive, default=480, help="for all tables (default: %(default)s)"
    )
    report.add_argument(
        "--gpu-record",
        type=Path,
        default=Path("benchmarks/records/gpu.json"),
        help="what `python -m benchmarks.gpu` wrote (default: %(default)s, where it is there)",
    )


def _report(arguments: argparse.Namespace) -> int:
    import json

    from ..files import replace_file
    from ..plots import require_matplotlib

    require_matplotlib()  # a missing one should show now, not after minutes
    gpu = None
    if arguments.gpu_record.exists():
        gpu = json.loads(arguments.gpu_record.read_bytes())

    from ..bench.tables import measure_tables
    from ..report.page import report_page

    records = measure_tables(
        arguments.out,
        quick=arguments.quick,
        resume=arguments.resume,
        seconds=arguments.seconds,
        say=lambda line: print(line, flush=True),
    )
    page = arguments.out / "index.html"
    replace_file(page, report_page(records, gpu).encode())
    print(f"Report: {page}")
    failed = [name for name, record in records.items() if "rows" not in record]
    if failed:
        print(f"Not measured: {', '.join(failed)}; --resume tries them again")
    return int(bool(failed))
