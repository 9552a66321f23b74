"""Measuring: attention beside its peers, interleaved in one process, with an error column.

Run it with `sparsering bench --out DIR`; each comparison writes one JSON record.
"""

from pathlib import Path

from .cases import layouts, longnet_branches, memory, million_tokens, random_blocks
from .measure import write_record

CASES = {
    "layouts": layouts,
    "random-blocks": random_blocks,
    "longnet": longnet_branches,
    "memory": memory,
    "million-tokens": million_tokens,
}


def main(out: str | Path, quick: bool = False) -> list[Path]:
    """Runs every comparison and writes one record each into `out`; `quick` takes small lengths."""
    return [write_record(Path(out), name, case(quick)) for name, case in CASES.items()]
