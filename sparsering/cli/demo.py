"""The commands that train a small model and report on it: `demo`, `demo-ring`."""

import argparse
from pathlib import Path

from .argument_types import Commands, add_quiet


def add_commands(commands: Commands) -> None:
    """Adds `demo` and `demo-ring` to the command line's parser."""
    demo = commands.add_parser(
        "demo", help="train a small LongNet and measure it: one page, five minutes"
    )
    demo.set_defaults(run=_demo)
    ring = commands.add_parser(
        "demo-ring", help="under torchrun: train over processes that share each text, and compare"
    )
    ring.set_defaults(run=_demo_ring)
    for parser in (demo, ring):
        add_quiet(parser)
        out = Path("runs") / parser.prog.split()[-1]
        parser.add_argument("--out", type=Path, default=out, help="folder of the report")
        parser.add_argument("--quick", action="store_true", help="tiny sizes, to try it out")


def _demo(arguments: argparse.Namespace) -> int:
    from ..demo.trained import QUICK, RECIPE, demo

    return demo(arguments.out, recipe=QUICK if arguments.quick else RECIPE)


def _demo_ring(arguments: argparse.Namespace) -> int:
    """Runs `demo-ring` on each rank; after a mistake only rank 0 prints the error."""
    from ..demo.ring import QUICK, RECIPE, demo_ring
    from ..training.ranks import spoken_by

    try:
        return demo_ring(arguments.out, recipe=QUICK if arguments.quick else RECIPE)
    except (ValueError, OSError) as error:
        raise spoken_by(0, error) from None
