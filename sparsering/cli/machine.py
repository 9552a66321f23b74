"""The commands about this machine: `info`, `build`."""

import argparse
import os
import sys
from pathlib import Path

from .argument_types import Commands

EXTRAS = (("safetensors", "cli"), ("tqdm", "cli"), ("matplotlib", "plots"), ("triton", "triton"))


def add_commands(commands: Commands) -> None:
    """Adds `info` and `build` to the command line's parser."""
    info = commands.add_parser("info", help="versions, threads, CPU features and backends")
    info.set_defaults(run=_info)
    build = commands.add_parser("build", help="compile the CPU kernel now, not on first use")
    gpu = "also compile Triton's kernels of causal attention with this head dim (64)"
    build.add_argument("--gpu", type=int, nargs="?", const=64, metavar="HEAD_DIM", help=gpu)
    build.set_defaults(run=_build)


def _info(arguments: argparse.Namespace) -> int:
    """Runs `info`: prints versions, what the machine has, and which backends can run."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    import sparsering

    from ..ground.commands import install
    from ..training.recipe import best_dtype

    def installed(name: str, extra: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return f"not installed ({install(extra)})"

    features: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    vector_features = (
        "avx2",
        "avx512_f",
        "avx512_bf16",
        "amx_tile",
        "amx_bf16",
        "neon",
        "sve",
        "bf16",
        "i8mm",
    )
    lines = [
        ("sparsering", sparsering.__version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        *((name, installed(name, extra)) for name, extra in EXTRAS),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
        ("numa nodes", numa_nodes()),
        ("cpu", f"{features.get('cpu_name', platform.processor() or platform.machine())}"),
        ("cpu kernels", torch.backends.cpu.get_cpu_capability()),
        ("cpu features", ", ".join(filter(features.get, vector_features)) or "unknown"),
        ("training dtype", f"{best_dtype()} (what --dtype auto takes here)"),
        ("gpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
    ]
    for name, value in lines:
        print(f"{name:<15} {value}")
    print("backends")
    for name, reasons in sparsering.backends().items():
        print(f"  {name:<13} {'; '.join(reasons) or 'usable'}")
    return 0


def _build(arguments: argparse.Namespace) -> int:
    """Runs `build`: compiles the CPU kernel, and with --gpu Triton's kernels."""
    import torch

    from .. import Causal, attention
    from ..ground.arguments import escaped
    from ..kernels import cpu

    if arguments.gpu and not torch.cuda.is_available():
        raise ValueError("--gpu needs a GPU that torch.cuda can use, got none; leave --gpu out")
    for dtype in (torch.float32, torch.bfloat16, torch.float16) if arguments.gpu else ():
        x = torch.randn(1, 1, 512, arguments.gpu, dtype=dtype, device="cuda", requires_grad=True)
        attention(x, x, x, Causal(), backend="triton").sum().backward()
    try:
        print(cpu.build())
    except RuntimeError as error:  # `main` would shorten the compiler's output
        print(f"sparsering: {escaped(str(error))}", file=sys.stderr)
        return 2
    return 0


def numa_nodes(system: Path = Path("/sys/devices/system/node")) -> str:
    """Describes, for `sparsering info`, the memory nodes and the processors for this process."""
    numbers = sorted(int(path.name[4:]) for path in system.glob("node[0-9]*"))
    nodes = [f"{n}: processors {_text(system / f'node{n}' / 'cpulist')}" for n in numbers]
    bound = ""
    if hasattr(os, "sched_getaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        bound = f"; this process runs on {_ranges(mine)}"
    return ("; ".join(nodes) or "unknown") + bound


def _text(path: Path) -> str:
    """Returns the text of a system's file, or "unknown" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _ranges(numbers: list[int]) -> str:
    """Writes ascending numbers as ranges, such as 0-3,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
