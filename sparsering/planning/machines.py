"""Machines by name, with their makers' published figures: memory, bandwidth, FLOP/s, links.

    machine = named("H200")
    machine.peak("bfloat16")          # FLOP/s without structured sparsity

No program reaches a published peak, so a time that follows from it is a lower bound. GPU figures,
in `machines.json`, are for dense products with sums in float32: half of those that data sheets
state for 2:4 sparsity. Links count one direction, half of the sum that data sheets state. float32
is IEEE float32, not TF32, which torch disables by default. A CPU is one socket with every core at
its highest clock; an Apple chip is its largest configuration.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..ground.arguments import checked_number, shortened
from .sizes import parse_bytes


@dataclass(frozen=True)
class Machine:
    """One accelerator, or one CPU socket, as its maker describes it or as it was measured."""

    name: str  # the name that `named` accepts
    kind: str  # "gpu" or "cpu"
    memory_bytes: int | None  # of the device; None for server CPUs, whose owners choose it
    bandwidth: float  # bytes/s of the memory
    # FLOP/s of dense products by dtype name; empty if the maker does not publish them
    peaks: dict[str, float] = field(hash=False)
    # bytes/s that one device receives from its peers; None if it depends on the network
    link_bandwidth: float | None
    source: str  # publication that the figures come from
    known: str = "published"  # or "measured here"

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense products in a dtype, such as "float32"; infinite if not published."""
        return self.peaks.get(dtype, math.inf)


def _machine(row: dict[str, Any]) -> Machine:
    """Converts a row of `machines.json`, in GB and TFLOP/s, to a `Machine`."""
    memory, link = (row[name] for name in ("memory_gb", "link_gb_s"))
    peaks = {dtype: peak * 1e12 for dtype, peak in row["tflops"].items()}
    figures = memory and memory * 10**9, row["bandwidth_gb_s"] * 1e9, peaks, link and link * 1e9
    return Machine(row["name"], row["kind"], *figures, row["source"])


_ROWS = json.loads(Path(__file__).with_name("machines.json").read_text())
MACHINES: dict[str, Machine] = {row["name"]: _machine(row) for row in _ROWS}

OTHER_NAMES = {"gpu": "its name goes into machine=; write machine='H100' or another name"}
"""Hints for planning functions if they are called with the name of a command's option."""


def _plain(name: str) -> str:
    """Returns a name in lower case without spaces, dashes and underscores, to compare names."""
    return "".join(character for character in name.lower() if character not in " -_")


_BY_PLAIN_NAME = {_plain(name): machine for name, machine in MACHINES.items()}
_BY_PLAIN_NAME |= {row["also"]: MACHINES[row["name"]] for row in _ROWS if "also" in row}


def machine_of(machine: Machine | str | None) -> Machine | None:
    """Looks up a machine by name; returns a `Machine`, or None for this machine, unchanged."""
    return machine if machine is None or isinstance(machine, Machine) else named(machine)


def described(
    machine: Machine | None, tflops: float | None, bandwidth: float | None, memory: object
) -> Machine:
    """Builds a GPU that `MACHINES` lacks, from its TFLOP/s, memory bandwidth in GB/s and memory.

    Raises: ValueError unless no machine is named, and all three are given and above 0.
    """
    if machine is not None or memory in (None, "total") or not (tflops and bandwidth):
        raise ValueError(
            "a described machine takes --tflops, --bandwidth and --memory, all above 0, and no "
            f"--gpu, got {tflops}, {bandwidth} and {memory}; give all three"
        )
    rate = checked_number("--tflops", tflops, 0) * 1e12
    peaks = dict.fromkeys(("float32", "bfloat16", "float16"), rate)
    speed = checked_number("--bandwidth", bandwidth, 0) * 1e9
    size = parse_bytes(memory)  # type: ignore[arg-type]
    return Machine(
        name="a described GPU",
        kind="gpu",
        memory_bytes=size,
        bandwidth=speed,
        peaks=peaks,
        link_bandwidth=None,
        source="as described",
    )


def named(name: str) -> Machine:
    """Looks up a machine by name, in any case, with or without spaces and dashes: "A100 80GB".

    "H100" alone means the SXM card, "A100" alone the card with 80 GB.

    Raises: ValueError for an unknown name; the message lists all names.
    """
    machine = _BY_PLAIN_NAME.get(_plain(name)) if isinstance(name, str) else None
    if machine is None:
        raise ValueError(
            f"machine must be one of {', '.join(MACHINES)}, got {shortened(repr(name))}; leave it "
            "out for this machine"
        )
    return machine
