"""The commands that draw a pattern or a run's losses, and tune a pattern: `plot`, `tune`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .argument_types import DTYPE, PATTERN, Commands, add_quiet, positive, token_count

if TYPE_CHECKING:
    from ..patterns import Pattern

_LONGEST_TITLE = 400  # characters
_ALWAYS_DRAWN = 1 << 20  # tokens
_LONGEST_DRAWN = 1 << 24
_MOST_BLOCKS_DRAWN = 1 << 20


def add_commands(commands: Commands) -> None:
    """Adds `plot` and `tune` to the command line's parser."""
    plot = commands.add_parser("plot", help="draw a pattern, or the losses of a training run")
    plot.set_defaults(run=_plot)
    add_quiet(plot)
    add = plot.add_argument
    add("pattern", nargs="?", help=PATTERN)
    add("--length", type=token_count, help="tokens of the sequence, such as 8192 or 64K")
    add(
        "--losses", type=Path, metavar="RUN", help="folder of a run of train, in place of a pattern"
    )
    add("--out", type=Path, required=True, help="image to write, .png or .svg")
    add("--block-size", type=positive, default=128, help="tokens of a block")
    drawn = "heads of the layout, up to 4 drawn"
    add("--heads", "--num-heads", type=positive, default=1, help=drawn)

    tune = commands.add_parser(
        "tune", help="measure block sizes on this machine, and block shapes where it has a GPU"
    )
    tune.set_defaults(run=_tune)
    add_quiet(tune)
    add = tune.add_argument
    add("pattern", help=PATTERN)
    add("--tokens", type=token_count, help="sequence length (default: 32768 on a GPU, else 8192)")
    add("--heads", "--num-heads", type=positive, help="query heads (default: 16 on a GPU, else 8)")
    add("--kv-heads", type=positive, help="key and value heads (default: --heads)")
    add("--head-dim", type=positive, help="channels of a head (default: 128 on a GPU, else 64)")
    add("--dtype", **DTYPE)
    sizes = "sizes to measure (default: 64 and 128, without a GPU 32 too)"
    add("--block-sizes", type=positive, nargs="+", help=sizes)
    add("--backend", choices=("cpu", "triton"), help="default: triton if there is a GPU, else cpu")
    two_groups = (
        "on Hopper, also measure the forward kernel of two warp groups, which no GPU has run"
    )
    add("--ping-pong", action="store_true", help=two_groups)


def _plot(arguments: argparse.Namespace) -> int:
    """Runs `plot`: draws a pattern, or the losses of a run, into a file."""
    from ..ground.files import replace_file
    from ..plots.figure import kind_of, require_matplotlib

    if (arguments.pattern is None) == (arguments.losses is None):
        raise ValueError("expected a pattern, or --losses with the folder of a run; pass one")
    kind = kind_of(arguments.out)
    require_matplotlib()
    if arguments.losses is not None:
        from ..plots.losses import loss_image
        from ..training.metrics import read_metrics

        replace_file(arguments.out, loss_image(read_metrics(arguments.losses), {}, kind=kind))
        print(f"Wrote {arguments.out}: losses over the steps")
        return 0
    from ..ground.arguments import shortened
    from ..patterns.expression import parse
    from ..plots.attended import pattern_image

    if arguments.length is None:
        raise ValueError("expected the tokens of the sequence; pass --length, such as 8192")
    pattern = parse(arguments.pattern)
    _check_drawn(pattern, arguments.length, arguments.heads, arguments.block_size)
    content = pattern_image(
        pattern,
        arguments.length,
        num_heads=arguments.heads,
        block_size=arguments.block_size,
        title=shortened(" ".join(arguments.pattern.split()), _LONGEST_TITLE),
        kind=kind,
    )
    replace_file(arguments.out, content)
    print(f"Wrote {arguments.out}: queries downwards, keys to the right")
    return 0


def _check_drawn(pattern: "Pattern", length: int, heads: int, block_size: int) -> None:
    """Raises ValueError for a length whose layouts would take far more than a second.

    Their number of blocks is estimated from some rows of queries.
    """
    from ..patterns.algebra import Frame
    from ..patterns.selected import selections_of
    from ..planning.counts import about_entries

    if length <= _ALWAYS_DRAWN:
        return
    found = f"{length:,} tokens"
    if length <= _LONGEST_DRAWN:
        frame = Frame.build(length, length, heads, None, 0)
        counted = [x for x in pattern.branches if not selections_of(x)]
        blocks = sum(about_entries(x, frame, block_size) for x in counted)
        if blocks <= _MOST_BLOCKS_DRAWN:
            return
        found = f"about {blocks:,.0f} blocks"
    raise ValueError(
        f"a drawing of more than {_ALWAYS_DRAWN:,} tokens visits at most {_MOST_BLOCKS_DRAWN:,} "
        f"blocks of at most {_LONGEST_DRAWN:,} tokens, got {found}; pass fewer tokens: a picture "
        "has at most 512 pixels a side"
    )


def _tune(arguments: argparse.Namespace) -> int:
    """Runs `tune`: measures block sizes, and stores the fastest for later calls."""
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
        ping_pong=arguments.ping_pong,
    )
    print(f"Wrote {path}")
    return 0
