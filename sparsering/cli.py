"""The command line: `sparsering train | demo | demo-ring | generate | plot | info | bench | ...`.

What a user got wrong, or the machine cannot do, ends in one line on stderr and exit code 2.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# Imports stand inside the commands: `--help` and a mistyped option should not wait for matplotlib
# or the model.

USER_ERRORS = (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError)
TOO_LARGE = (MemoryError, OverflowError, RecursionError)
LONGEST_LINE = 2000

_RECIPE_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("pattern", str, "attention pattern, as a Python expression of the pattern names"),
    ("data", str, "text file or folder (default: the Python standard library's sources)"),
    ("glob", str, "which names of a folder to read, such as '*.txt'"),
    ("context", int, "tokens per window"),
    ("batch-size", int, "windows per step"),
    ("steps", int, "optimizer steps"),
    ("width", int, "channels of the model"),
    ("num-layers", int, "transformer blocks"),
    ("num-heads", int, "attention heads"),
    ("learning-rate", float, "peak learning rate"),
    ("warmup-steps", int, "steps of linear warm-up"),
    ("weight-decay", float, "AdamW's decay of the weight matrices"),
    ("clip-norm", float, "largest norm of the gradient"),
    ("seed", int, "of weights, split and order"),
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each sets `run`, a function of the parsed arguments."""
    parser = _Parser(
        prog="sparsering", description="Exact sparse attention over declared patterns."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a byte-level LongNet model on text")
    train.set_defaults(run=_train)
    train.add_argument("--out", type=Path, required=True, help="folder of metrics and checkpoint")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    for name, kind, text in _RECIPE_OPTIONS:
        train.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    train.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default=argparse.SUPPRESS,
        help="auto: bfloat16 autocast where the CPU multiplies it in hardware",
    )
    train.add_argument(
        "--checkpoint-layers",
        action="store_true",
        default=argparse.SUPPRESS,
        help="recompute each block in backward to save memory",
    )
    train.add_argument("--save-every", type=_positive, default=50, help="steps between checkpoints")
    train.add_argument(
        "--validate-every", type=_positive, default=50, help="steps between validations"
    )
    train.add_argument(
        "--stop-after", type=_positive, help="stop, as if interrupted, after this step"
    )

    train.add_argument(
        "--sequence-parallel",
        type=_positive,
        help="under torchrun: processes that share one window's tokens; the others take windows",
    )
    train.add_argument(
        "--sharding",
        choices=("contiguous", "zigzag", "balanced", "auto"),
        help="under torchrun: which process has which tokens (default: contiguous)",
    )
    train.add_argument(
        "--timeout", type=float, help="under torchrun: seconds to wait for a peer (default: 60)"
    )

    demo = commands.add_parser("demo", help="train, measure and report, in under five minutes")
    demo.set_defaults(run=_demo)
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the report")
    demo.add_argument("--resume", action="store_true", help="go on with an interrupted demo")

    ring = commands.add_parser(
        "demo-ring", help="under torchrun: train with windows in shards, and show what moves"
    )
    ring.set_defaults(run=_demo_ring)
    ring.add_argument(
        "--out", type=Path, default=Path("runs/demo-ring"), help="folder of the picture and metrics"
    )

    generate = commands.add_parser(
        "generate", help="continue a text with a trained model, as it comes"
    )
    generate.set_defaults(run=_generate)
    generate.add_argument("checkpoint", type=Path, help="folder that train or demo wrote")
    generate.add_argument("--prompt", default="\n", help="text to continue")
    generate.add_argument("--num-bytes", type=_positive, default=300, help="bytes to add at most")
    generate.add_argument("--stop", metavar="TEXT", help="end with this text, once it has come")
    generate.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest byte"
    )
    generate.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest bytes")
    generate.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the fewest likeliest bytes whose chances sum to P",
    )
    generate.add_argument("--seed", type=int, default=0, help="of the draws")

    plot = commands.add_parser("plot", help="draw a pattern")
    plot.set_defaults(run=_plot)
    plot.add_argument("pattern", help="such as 'LongNet((1024, 4096), (1, 4)) & Causal()'")
    plot.add_argument("--length", type=_positive, required=True, help="tokens")
    plot.add_argument("--out", type=Path, required=True, help="PNG file to write")
    plot.add_argument("--block-size", type=_positive, default=128, help="of the layout")
    plot.add_argument(
        "--heads", type=_positive, default=1, help="heads of the layout, up to 4 drawn"
    )

    info = commands.add_parser("info", help="versions, threads, CPU features and backends")
    info.set_defaults(run=_info)

    bench = commands.add_parser("bench", help="time the backends beside dense and FlexAttention")
    bench.set_defaults(run=_bench)
    bench.add_argument("--out", type=Path, required=True, help="folder of the record")
    bench.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    bench.add_argument("--only", metavar="NAME", help="one comparison, by the name of its record")

    tune = commands.add_parser(
        "tune", help="measure block shapes and sizes of the Triton kernels on this GPU"
    )
    tune.set_defaults(run=_tune)
    tune.add_argument("pattern", help="such as 'LongNet((1024, 4096), (1, 4)) & Causal()'")
    tune.add_argument("--tokens", type=_positive, default=32768, help="of the sequence")
    tune.add_argument("--heads", type=_positive, default=16, help="query heads")
    tune.add_argument("--kv-heads", type=_positive, help="key and value heads (default: --heads)")
    tune.add_argument("--head-dim", type=_positive, default=128, help="channels of a head")
    tune.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of inputs"
    )
    tune.add_argument(
        "--block-sizes", type=_positive, nargs="+", default=(64, 128), help="to choose from"
    )

    build = commands.add_parser("build", help="compile the CPU kernel now, not on first use")
    build.set_defaults(run=_build)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 2 for errors of use, 128 + n after signal n."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print("sparsering: interrupted", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        print(f"sparsering: {_in_one_line(str(error) or type(error).__name__)}", file=sys.stderr)
        return 2
    except TOO_LARGE as error:
        told = _in_one_line(f"{type(error).__name__} {error}")
        print(f"sparsering: too large a number or size for this machine: {told}", file=sys.stderr)
        return 2


def _train(arguments: argparse.Namespace) -> int:
    from dataclasses import fields, replace

    from .training.checkpoint import read_about
    from .training.loop import train
    from .training.recipe import Recipe
    from .training.torchrun import ranks_of_torchrun, starts_again

    given = {f.name: getattr(arguments, f.name) for f in fields(Recipe) if f.name in arguments}
    if given.get("data") is not None:
        given["data"] = str(Path(given["data"]).resolve())
    with ranks_of_torchrun(
        arguments.sequence_parallel, sharding=arguments.sharding, timeout=arguments.timeout
    ) as ranks:
        resume = arguments.resume or starts_again(ranks, arguments.out)
        base = Recipe()
        if resume:
            base = ranks.together(lambda: read_about(arguments.out).recipe)
        run = train(
            replace(base, **given),
            arguments.out,
            resume=resume,
            save_every=arguments.save_every,
            validate_every=arguments.validate_every,
            stop_after=arguments.stop_after,
            ranks=ranks,
        )
        if ranks.leads:
            print(
                f"Step {run.step} of {run.recipe.steps}: validation loss {run.validation_loss:.4f} "
                "nats per byte."
            )
            if run.step < run.recipe.steps:
                print(f"Stopped; to go on: {ranks.start('train')} --out {arguments.out} --resume")
    return 0 if run.stopped_by is None else 128 + run.stopped_by


def _demo(arguments: argparse.Namespace) -> int:
    from .training.demo import demo

    return demo(arguments.out, resume=arguments.resume)


def _demo_ring(arguments: argparse.Namespace) -> int:
    from .training.demo_ring import demo_ring

    return demo_ring(arguments.out)


def _generate(arguments: argparse.Namespace) -> int:
    import codecs
    import os

    import torch

    from .report.html import printable
    from .training.checkpoint import load_model
    from .training.measure import TimedTokens

    model = load_model(arguments.checkpoint)
    prompt = arguments.prompt.encode(errors="surrogateescape")  # the bytes that were typed
    stop = None if arguments.stop is None else arguments.stop.encode(errors="surrogateescape")
    caches = model.caches(max_length=len(prompt) + arguments.num_bytes)
    tokens = TimedTokens(
        model.generate(
            torch.tensor([list(prompt)], dtype=torch.int64),
            arguments.num_bytes,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            stop=stop,
            generator=torch.Generator().manual_seed(arguments.seed),
            caches=caches,
        )
    )
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        print(printable(text.decode(prompt)), end="", flush=True)
        for token in tokens:
            print(printable(text.decode(bytes(token.tolist()))), end="", flush=True)
        print(printable(text.decode(b"", final=True)), flush=True)
    except BrokenPipeError:  # as `head` has read enough; Python would flush once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except BaseException:
        print(flush=True)  # what is said of it begins a line
        raise
    held, full = model.cache_bytes(caches)
    pace = f", then {tokens.tokens_per_s:,.0f} tokens/s" if tokens.tokens_per_s else ""
    print(
        f"{len(prompt):,} bytes read in {tokens.prompt_seconds:.2f} s{pace}; keys and values of "
        f"{caches[0].length:,} bytes: {held:,} bytes held, {full:,} in a full cache",
        file=sys.stderr,
    )
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    from .files import replace_file
    from .patterns.expression import parse
    from .plots import pattern_png

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


def _info(arguments: argparse.Namespace) -> int:
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    import sparsering

    from .training.recipe import best_dtype

    def installed(name: str, extra: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return f"not installed (pip install 'sparsering[{extra}]')"

    features: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    wide = [
        "avx2",
        "avx512_f",
        "avx512_bf16",
        "amx_tile",
        "amx_bf16",
        "neon",
        "sve",
        "bf16",
        "i8mm",
    ]
    lines = [
        ("sparsering", sparsering.__version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("rich", installed("rich", "cli")),
        ("safetensors", installed("safetensors", "cli")),
        ("matplotlib", installed("matplotlib", "plots")),
        ("triton", installed("triton", "triton")),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
        ("cpu", f"{features.get('cpu_name', platform.processor() or platform.machine())}"),
        ("cpu kernels", torch.backends.cpu.get_cpu_capability()),
        ("cpu features", ", ".join(name for name in wide if features.get(name)) or "unknown"),
        ("training dtype", f"{best_dtype()} (what --dtype auto takes here)"),
        ("gpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
    ]
    for name, value in lines:
        print(f"{name:<15} {value}")
    print("backends")
    for name, reasons in sparsering.backends().items():
        print(f"  {name:<13} {'; '.join(reasons) or 'usable'}")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from . import bench

    if arguments.only not in (None, *bench.CASES):
        raise ValueError(f"--only must be one of {', '.join(bench.CASES)}, got {arguments.only!r}")
    for path in bench.main(arguments.out, arguments.quick, arguments.only):
        print(f"Wrote {path}")
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    import torch

    from .kernels.triton.tune import tune
    from .patterns.expression import parse

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


def _build(arguments: argparse.Namespace) -> int:
    from .kernels import cpu

    try:
        print(cpu.build())
    except RuntimeError as error:  # the compiler's whole say
        print(f"sparsering: {error}", file=sys.stderr)
        return 2
    return 0


def _in_one_line(text: str) -> str:
    """A message as a terminal may have it: names in it can be a stranger's."""
    from .patterns.arguments import shortened

    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return shortened(plain, LONGEST_LINE)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return number


if __name__ == "__main__":
    sys.exit(main())
