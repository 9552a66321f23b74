"""Machines by name, with their makers' published figures: memory, bandwidth, FLOP/s, links.

    machine = named("H200")
    machine.peak("bfloat16")          # FLOP/s without structured sparsity

No program reaches a published peak, so a time that follows from it is a lower bound. GPU figures
are for dense products: half of those that data sheets state for 2:4 sparsity. float32 is IEEE
float32, not TF32, which torch disables by default.
"""

import math
from dataclasses import dataclass, field

from ..patterns.arguments import shortened


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


def _gpu(
    name: str, memory: int, bandwidth: float, single: float, half: float, link: float, source: str
) -> Machine:
    peaks = {"float32": single * 1e12, "bfloat16": half * 1e12, "float16": half * 1e12}
    return Machine(name, "gpu", memory * 10**9, bandwidth * 1e9, peaks, link * 1e9, source)


def _apple(name: str, memory: int, bandwidth: float, date: str) -> Machine:
    source = f"Apple, announcement of {name} ({date}): up to {memory} GB, {bandwidth} GB/s"
    return Machine(name, "cpu", memory * 10**9, bandwidth * 1e9, {}, None, source)


def _socket(
    name: str, channels: int, transfers: int, cycles: float, flop: dict[str, int], source: str
) -> Machine:
    peaks = {dtype: cycles * count for dtype, count in flop.items()}
    return Machine(name, "cpu", None, channels * 8 * transfers * 1e6, peaks, None, source)


_LIST = (
    # Memory in GB, bandwidth in GB/s, TFLOP/s in float32 and in half precision with float32 sums,
    # and GB/s of a link in one direction. Data sheets state links as the sum of both directions,
    # and half precision with sparsity, at twice the rate: 1,979 (H100 SXM, H200), 1,513 (H100
    # PCIe), 624 (A100), 242 (L4). So both are halved here. Pascal computes float16 in float32.
    _gpu("H200", 141, 4800, 67, 989.5, 450, "NVIDIA H200 data sheet (SXM; NVLink 900 GB/s)"),
    _gpu("H100 SXM", 80, 3350, 67, 989.5, 450, "NVIDIA H100 data sheet (SXM; NVLink 900 GB/s)"),
    _gpu("B200", 180, 8000, 75, 2250, 900, "NVIDIA DGX B200 data sheet (NVLink 1.8 TB/s)"),
    _gpu("H100 PCIe", 80, 2000, 51, 756.5, 64, "NVIDIA H100 data sheet (PCIe Gen5 128 GB/s)"),
    _gpu("A100 80GB", 80, 2039, 19.5, 312, 300, "NVIDIA A100 data sheet (SXM; NVLink 600 GB/s)"),
    _gpu("A100 40GB", 40, 1555, 19.5, 312, 300, "NVIDIA A100 data sheet (SXM; NVLink 600 GB/s)"),
    _gpu("L4", 24, 300, 30.3, 121, 32, "NVIDIA L4 data sheet (PCIe Gen4 x16 64 GB/s)"),
    _gpu("V100", 32, 900, 15.7, 125, 150, "NVIDIA V100 data sheet (SXM2 32GB; NVLink 300 GB/s)"),
    _gpu("L40S", 48, 864, 91.6, 362, 32, "NVIDIA L40S data sheet (PCIe Gen4 x16 64 GB/s)"),
    _gpu("A10", 24, 600, 31.2, 125, 32, "NVIDIA A10 data sheet (PCIe Gen4 x16 64 GB/s)"),
    _gpu("T4", 16, 300, 8.1, 65, 16, "NVIDIA T4 data sheet (PCIe Gen3 x16 32 GB/s)"),
    _gpu("RTX 5090", 32, 1792, 104.8, 209.5, 64, "NVIDIA RTX Blackwell white paper (PCIe Gen5)"),
    _gpu("RTX 4090", 24, 1008, 82.6, 165.2, 32, "NVIDIA Ada white paper (PCIe Gen4 x16 64 GB/s)"),
    _gpu("RTX 3090", 24, 936, 35.6, 71, 32, "NVIDIA Ampere GA102 white paper (PCIe Gen4 x16)"),
    _gpu("GTX 1080", 8, 320, 8.9, 8.9, 16, "NVIDIA GTX 1080 white paper (PCIe Gen3 x16 32 GB/s)"),
    # Apple's chips in their largest configuration: memory in GB, bandwidth in GB/s. Apple does not
    # publish FLOP/s or clock rates of the CPU.
    _apple("M2 Ultra", 192, 800, "June 2023"),
    _apple("M3 Max", 128, 400, "October 2023"),
    _apple("M4 Max", 128, 546, "October 2024"),
    # One socket with every core at its highest clock, an upper bound of its speed. The numbers are
    # memory channels of 8 bytes, 10^6 transfers/s of a channel, cores * Hz, and FLOP per cycle of a
    # core by dtype. float32: two AVX-512 units multiply and add 16 numbers each. float16: 32 each.
    # bfloat16: 1,024 by AMX, as Intel states.
    _socket(
        "Xeon 8480+", 8, 4800, 56 * 3.8 * 1e9, {"float32": 64, "float16": 128, "bfloat16": 1024},
        "Intel, Xeon Platinum 8480+ specifications and AMX brief; one socket",
    ),
    # Zen 4: AVX-512 over two 256-bit units; float16 is computed in float32.
    _socket(
        "EPYC 9654", 12, 4800, 96 * 3.7 * 1e9, {"float32": 32, "float16": 32, "bfloat16": 64},
        "AMD, EPYC 9004 series specifications (Genoa); one socket",
    ),
    # Zen 5: two full 512-bit units.
    _socket(
        "EPYC 9755", 12, 6400, 128 * 4.1 * 1e9, {"float32": 64, "float16": 64, "bfloat16": 128},
        "AMD, EPYC 9005 series specifications (Turin); one socket",
    ),
    # AWS does not publish FLOP/s or clock rates.
    _socket(
        "Graviton4", 12, 5600, 0, {},
        "AWS, announcement of Graviton4 (November 2023): 12 channels of DDR5-5600",
    ),
)  # fmt: skip
MACHINES: dict[str, Machine] = {machine.name: machine for machine in _LIST}

# Other common names of the machines above, in lower case without spaces and dashes.
_OTHER_NAMES = {
    "h100": "H100 SXM",
    "a100": "A100 80GB",
    "4090": "RTX 4090",
    "sapphirerapids": "Xeon 8480+",
    "genoa": "EPYC 9654",
    "turin": "EPYC 9755",
}


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character not in " -_")


_BY_PLAIN_NAME = {_plain(name): machine for name, machine in MACHINES.items()}
_BY_PLAIN_NAME |= {other: MACHINES[name] for other, name in _OTHER_NAMES.items()}


def machine_of(machine: Machine | str | None) -> Machine | None:
    """Returns the machine of a name; a `Machine`, or None for this machine, is returned as is."""
    return machine if machine is None or isinstance(machine, Machine) else named(machine)


def named(name: str) -> Machine:
    """Returns the machine of a name, whatever its case, spaces and dashes: "h200", "A100 80GB".

    "H100" alone means the SXM card, "A100" alone the card with 80 GB.

    Raises: ValueError for an unknown name; the message lists all names.
    """
    machine = _BY_PLAIN_NAME.get(_plain(name)) if isinstance(name, str) else None
    if machine is None:
        raise ValueError(
            f"machine must be one of {', '.join(MACHINES)}, got {shortened(repr(name))}; leave it "
            "out for this machine, which `sparsering calibrate` measures"
        )
    return machine
