"""The commands that predict costs before a run: `plan`, `calibrate`."""

import argparse
from collections.abc import Callable

from .argument_types import Commands, positive


def add_commands(commands: Commands) -> None:
    """Adds the commands of this file."""
    plan = commands.add_parser(
        "plan", help="what a pattern costs on a machine: time, memory, what fits, over ranks"
    )
    plan.set_defaults(run=_plan)
    add = plan.add_argument
    add("pattern", help="such as 'LongNet((1024, 4096), (1, 4)) & Causal()'")
    add("--tokens", type=_size("parse_tokens"), required=True, help="of a sequence: 65536, 64K, 1M")
    add("--memory", type=_size("parse_bytes"), help="of one device: 24GB (default: all it has)")
    add("--gpu", "--machine", dest="machine", help="such as H200 (default: this machine)")
    add("--ranks", type=positive, default=1, help="devices that share each sequence")
    add("--sharding", default="auto", help="which rank has which tokens")
    add("--heads", type=positive, default=8, help="query heads")
    add("--kv-heads", type=positive, help="key and value heads (default: --heads)")
    add("--head-dim", type=positive, default=64, help="channels of a head")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of inputs (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    add("--batch-size", type=positive, default=1, help="sequences of one call")
    passes = plan.add_mutually_exclusive_group().add_argument
    passes("--backward", action="store_true", help="with gradients, as in training")
    passes("--forward", dest="backward", action="store_false", help="without gradients (default)")
    add("--backend", help="default: the one that would run")
    add("--block-size", type=positive, help="default: the one that would be chosen")

    calibrate = commands.add_parser(
        "calibrate", help="measure this machine for some seconds, for `plan` and `sr.estimate`"
    )
    calibrate.set_defaults(run=_calibrate)


def _size(parser: str) -> Callable[[str], int]:
    """Turns a function of `planning.sizes` into an argument type that imports it when called."""

    def parse(text: str) -> int:
        from ..planning import sizes

        try:
            return int(getattr(sizes, parser)(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _plan(arguments: argparse.Namespace) -> int:
    import torch

    from ..patterns.expression import parse
    from ..planning.estimate import Scenario
    from ..planning.machines import machine_of
    from ..planning.screen import screen

    machine = machine_of(arguments.machine)
    on_gpu = machine is not None and machine.kind == "gpu"
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if on_gpu else "float32"))
    scenario = Scenario(
        parse(arguments.pattern), arguments.tokens, arguments.heads, arguments.kv_heads,
        arguments.head_dim, dtype, arguments.batch_size, arguments.backward, machine,
        arguments.ranks, arguments.sharding, arguments.backend, arguments.block_size,
    )  # fmt: skip
    print(screen(scenario, arguments.memory, arguments.pattern))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from ..planning.calibrate import calibrate

    calibration, path = calibrate()
    threads, error = calibration.threads, f"{100 * calibration.error:.0f}%"
    print(f"calibrated for {threads} threads; half of its own calls are told within {error}")
    print(f"Wrote {path}")
    return 0
