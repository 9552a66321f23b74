"""Machines by name, with their makers' published figures: memory, bandwidth, FLOP/s, links.

    machine = named("H200")
    machine.peak("bfloat16")          # FLOP/s without structured sparsity

A published peak is never reached: a time that follows from it is a bound ("at least"), not a
measurement. Figures of GPUs are for dense products; data sheets that double them for 2:4 sparsity
are halved here. float32 is IEEE float32, not TF32, which torch disables by default.
"""

import math
from dataclasses import dataclass, field

from ..patterns.arguments import shortened

GB = 10**9
GIGA = 10.0**9
TERA = 10.0**12


@dataclass(frozen=True)
class Machine:
    """One accelerator, or one CPU socket, as its maker describes it or as it was measured.

    Attributes:
        name: The name that `named` accepts.
        kind: "gpu" or "cpu".
        memory_bytes: Memory of the device; None for server CPUs, whose owners choose it.
        bandwidth: Of that memory, in bytes/s.
        peaks: FLOP/s of dense products by dtype name; empty where the maker publishes neither
            rates nor clocks.
        link_bandwidth: Bytes/s that one device receives from its peers, one direction; None if it
            depends on the network.
        source: Publication that the figures come from.
        known: "published" or "measured here".
    """

    name: str
    kind: str
    memory_bytes: int | None
    bandwidth: float
    peaks: dict[str, float] = field(hash=False)
    link_bandwidth: float | None
    source: str
    known: str = "published"

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense products in a dtype, such as "float32".

        Infinite where no figure is published: memory alone then bounds the time.
        """
        return self.peaks.get(dtype, math.inf)


def _gpu(
    name: str,
    *,
    memory: int,
    bandwidth: float,
    float32: float,
    half: float,
    link: float,
    source: str,
) -> Machine:
    """Builds a GPU from the units of data sheets: GB, GB/s, TFLOP/s, and GB/s of one direction."""
    return Machine(
        name=name,
        kind="gpu",
        memory_bytes=memory * GB,
        bandwidth=bandwidth * GIGA,
        peaks={"float32": float32 * TERA, "bfloat16": half * TERA, "float16": half * TERA},
        link_bandwidth=link * GIGA,
        source=source,
    )


def _cpu(
    name: str,
    *,
    channels: int,
    megatransfers: int,
    cores: int,
    gigahertz: float,
    per_cycle: dict[str, int],
    source: str,
) -> Machine:
    """Builds one socket with every core at its highest clock, so that no call can be faster.

    Args:
        name: Name of the machine.
        channels: Number of memory channels, 8 bytes wide each.
        megatransfers: Transfers of one channel, in 10^6/s.
        cores: Number of cores of the socket.
        gigahertz: Highest clock of a core.
        per_cycle: FLOP of one core in one cycle, by dtype.
        source: Publication that the figures come from.
    """
    return Machine(
        name=name,
        kind="cpu",
        memory_bytes=None,
        bandwidth=channels * 8 * megatransfers * 10.0**6,
        peaks={dtype: cores * gigahertz * GIGA * flop for dtype, flop in per_cycle.items()},
        link_bandwidth=None,
        source=source,
    )


def _apple(name: str, *, memory: int, bandwidth: float, source: str) -> Machine:
    """Builds an Apple chip in its largest configuration; Apple publishes no CPU rates or clocks."""
    return Machine(
        name=name,
        kind="cpu",
        memory_bytes=memory * GB,
        bandwidth=bandwidth * GIGA,
        peaks={},
        link_bandwidth=None,
        source=source,
    )


# Makers state NVLink and PCIe as the sum of both directions, so a device receives half of it. Half
# precision means products with float32 sums. Data sheets state it with sparsity, twice the rate:
# 1,979 (H100 SXM, H200), 1,513 (H100 PCIe), 624 (A100), 242 (L4).
_ALL = (
    _gpu(
        "H200",
        memory=141,
        bandwidth=4800,
        float32=67,
        half=989.5,
        link=450,
        source="NVIDIA H200 data sheet (SXM; NVLink 900 GB/s)",
    ),
    _gpu(
        "H100 SXM",
        memory=80,
        bandwidth=3350,
        float32=67,
        half=989.5,
        link=450,
        source="NVIDIA H100 data sheet (SXM; NVLink 900 GB/s)",
    ),
    _gpu(
        "H100 PCIe",
        memory=80,
        bandwidth=2000,
        float32=51,
        half=756.5,
        link=64,
        source="NVIDIA H100 data sheet (PCIe Gen5 128 GB/s, no NVLink bridge)",
    ),
    _gpu(
        "A100 80GB",
        memory=80,
        bandwidth=2039,
        float32=19.5,
        half=312,
        link=300,
        source="NVIDIA A100 data sheet (SXM; NVLink 600 GB/s)",
    ),
    _gpu(
        "A100 40GB",
        memory=40,
        bandwidth=1555,
        float32=19.5,
        half=312,
        link=300,
        source="NVIDIA A100 data sheet (SXM; NVLink 600 GB/s)",
    ),
    _gpu(
        "L4",
        memory=24,
        bandwidth=300,
        float32=30.3,
        half=121,
        link=32,
        source="NVIDIA L4 data sheet (PCIe Gen4 x16 64 GB/s)",
    ),
    _gpu(
        "RTX 4090",
        memory=24,
        bandwidth=1008,
        float32=82.6,
        half=165.2,
        link=32,
        source="NVIDIA Ada GPU architecture white paper (PCIe Gen4 x16 64 GB/s)",
    ),
    _apple(
        "M2 Ultra",
        memory=192,
        bandwidth=800,
        source="Apple, announcement of M2 Ultra (June 2023): up to 192 GB, 800 GB/s",
    ),
    _apple(
        "M3 Max",
        memory=128,
        bandwidth=400,
        source="Apple, announcement of M3 Max (October 2023): up to 128 GB, 400 GB/s",
    ),
    _apple(
        "M4 Max",
        memory=128,
        bandwidth=546,
        source="Apple, announcement of M4 Max (October 2024): up to 128 GB, 546 GB/s",
    ),
    _cpu(
        "Xeon 8480+",
        channels=8,
        megatransfers=4800,
        cores=56,
        gigahertz=3.8,
        # AVX-512: two units of 16 lanes; AVX512-FP16 twice as many; AMX as Intel states it.
        per_cycle={"float32": 64, "float16": 128, "bfloat16": 1024},
        source="Intel, Xeon Platinum 8480+ specifications and AMX brief; one socket",
    ),
    _cpu(
        "EPYC 9654",
        channels=12,
        megatransfers=4800,
        cores=96,
        gigahertz=3.7,
        # Zen 4: AVX-512 over two 256-bit units; float16 is computed in float32.
        per_cycle={"float32": 32, "float16": 32, "bfloat16": 64},
        source="AMD, EPYC 9004 series specifications (Genoa); one socket",
    ),
    _cpu(
        "EPYC 9755",
        channels=12,
        megatransfers=6400,
        cores=128,
        gigahertz=4.1,
        # Zen 5: two full 512-bit units.
        per_cycle={"float32": 64, "float16": 64, "bfloat16": 128},
        source="AMD, EPYC 9005 series specifications (Turin); one socket",
    ),
    Machine(
        name="Graviton4",
        kind="cpu",
        memory_bytes=None,
        bandwidth=12 * 8 * 5600 * 10.0**6,
        peaks={},
        link_bandwidth=None,
        source="AWS, announcement of Graviton4 (November 2023): 12 channels of DDR5-5600",
    ),
)

MACHINES: dict[str, Machine] = {machine.name: machine for machine in _ALL}

# Other common names of the machines above.
_OTHER_NAMES = {
    "h100": "H100 SXM",
    "a100": "A100 80GB",
    "4090": "RTX 4090",
    "sapphire rapids": "Xeon 8480+",
    "genoa": "EPYC 9654",
    "turin": "EPYC 9755",
}


def _plain(name: str) -> str:
    """Returns a name without case, spaces, dashes and underscores."""
    return "".join(character for character in name.lower() if character not in " -_")


_BY_PLAIN_NAME = {_plain(name): machine for name, machine in MACHINES.items()} | {
    _plain(other): MACHINES[name] for other, name in _OTHER_NAMES.items()
}


def named(name: str) -> Machine:
    """Returns the machine of a name, in any case, with or without spaces: "h200", "A100 80GB".

    "H100" alone means the SXM card, "A100" alone the card with 80 GB.

    Raises:
        ValueError: No machine has this name; the message lists all names.
    """
    found = _BY_PLAIN_NAME.get(_plain(name)) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"machine must be one of {', '.join(MACHINES)}, got "
            f"{shortened(repr(name))}; for this machine leave it out and run `sparsering calibrate`"
        )
    return found
