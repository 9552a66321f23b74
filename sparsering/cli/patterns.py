"""The commands that look at a pattern: `plot`, `tune`."""

import argparse
from pathlib import Path

from .arguments import Commands, positive


def add_commands(commands: Commands) -> None:
    """Adds the commands of this file."""
    plot = commands.add_parser("plot", help="draw a pattern")
    plot.set_defaults(run=_plot)
    plot.add_argument("pattern", help="such as 'LongNet((1024, 4096), (1, 4)) & Causal()'")
    plot.add_argument("--length", type=positive, required=True, help="tokens")
    plot.add_argument("--out", type=Path, required=True, help="PNG file to write")
    plot.add_argument("--block-size", type=positive, default=128, help="of the layout")
    plot.add_argument(
        "--heads", type=positive, default=1, help="heads of the layout, up to 4 drawn"
    )

    tune = commands.add_parser(
        "tune", help="measure block shapes and sizes of the Triton kernels on this GPU"
    )
    tune.set_defaults(run=_tune)
    tune.add_argument("pattern", help="such as 'LongNet((1024, 4096), (1, 4)) & Causal()'")
    tune.add_argument("--tokens", type=positive, default=32768, help="of the sequence")
    tune.add_argument("--heads", type=positive, default=16, help="query heads")
    tune.add_argument("--kv-heads", type=positive, help="key and value heads (default: --heads)")
    tune.add_argument("--head-dim", type=positive, default=128, help="channels of a head")
    tune.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of inputs"
    )
    tune.add_argument(
        "--block-sizes", type=positive, nargs="+", default=(64, 128), help="to choose from"
    )


def _plot(arguments: argparse.Namespace) -> int:
    from ..files import replace_file
    from ..patterns.expression import parse
    from ..plots import pattern_png

    if arguments.out.suffix.lower() != ".png":
        raise ValueError(f"--out must name a .png file, got {arguments.out}")
    png = pattern_png(
        parse(arguments.pattern),
        arguments.length,
        num_heads=arguments.heads,
        block_size=arguments.block_size,
        title=arguments.pattern,
    )
    replace_file(arguments.out, png)
    print(f"Wrote {arguments.out}")
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    import torch

    from ..kernels.triton.tune import tune
    from ..patterns.expression import parse

    path = tune(
        parse(arguments.pattern),
        tokens=arguments.tokens,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads or arguments.heads,
        head_dim=arguments.head_dim,
        dtype=getattr(torch, arguments.dtype),
        block_sizes=arguments.block_sizes,
    )
    print(f"Wrote {path}")
    return 0
