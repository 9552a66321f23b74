"""The commands that draw and tune a pattern: `plot`, `tune`."""

import argparse
from pathlib import Path

from .argument_types import DTYPE, PATTERN, Commands, positive


def add_commands(commands: Commands) -> None:
    """Adds `plot` and `tune` to the command line's parser."""
    plot = commands.add_parser("plot", help="draw a pattern")
    plot.set_defaults(run=_plot)
    add = plot.add_argument
    add("pattern", help=PATTERN)
    add("--length", type=positive, required=True, help="tokens of the sequence")
    add("--out", type=Path, required=True, help="PNG file to write")
    add("--block-size", type=positive, default=128, help="tokens of a block")
    drawn = "heads of the layout, up to 4 drawn"
    add("--heads", "--num-heads", type=positive, default=1, help=drawn)

    tune = commands.add_parser(
        "tune", help="measure block sizes on this machine, and block shapes where it has a GPU"
    )
    tune.set_defaults(run=_tune)
    add = tune.add_argument
    add("pattern", help=PATTERN)
    add("--tokens", type=positive, help="sequence length (default: 32768 on a GPU, else 8192)")
    add("--heads", "--num-heads", type=positive, help="query heads (default: 16 on a GPU, else 8)")
    add("--kv-heads", type=positive, help="key and value heads (default: --heads)")
    add("--head-dim", type=positive, help="channels of a head (default: 128 on a GPU, else 64)")
    add("--dtype", **DTYPE)
    sizes = "sizes to measure (default: 64 and 128, without a GPU 32 too)"
    add("--block-sizes", type=positive, nargs="+", help=sizes)
    add("--backend", choices=("cpu", "triton"), help="default: triton if there is a GPU, else cpu")


def _plot(arguments: argparse.Namespace) -> int:
    from ..files import replace_file
    from ..layouts.drawing import picture
    from ..patterns.expression import parse

    if arguments.out.suffix.lower() != ".png":
        raise ValueError(f"--out must name a .png file, got {arguments.out}")
    options = {"num_heads": arguments.heads, "block_size": arguments.block_size}
    layout = parse(arguments.pattern).layout(arguments.length, **options)
    replace_file(arguments.out, picture(layout, min(arguments.heads, 4)))
    share = layout.num_pairs / arguments.length**2
    print(f"Wrote {arguments.out}: queries downwards, keys to the right, {share:.2%} of all pairs")
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    import torch

    from ..kernels.tune import tune
    from ..patterns.expression import parse

    gpu = (arguments.backend or ("triton" if torch.cuda.is_available() else "cpu")) == "triton"
    heads = arguments.heads or (16 if gpu else 8)
    path = tune(
        "triton" if gpu else "cpu",
        parse(arguments.pattern),
        tokens=arguments.tokens or (32768 if gpu else 8192),
        num_heads=heads,
        num_kv_heads=arguments.kv_heads or heads,
        head_dim=arguments.head_dim or (128 if gpu else 64),
        dtype=getattr(torch, arguments.dtype or ("bfloat16" if gpu else "float32")),
        block_sizes=arguments.block_sizes or ((64, 128) if gpu else (32, 64, 128)),
    )
    print(f"Wrote {path}")
    return 0
