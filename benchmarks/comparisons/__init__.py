"""Comparisons of attention with its peers: interleaved times in one process, and errors.

Run them with `python -m benchmarks bench --out DIR`; each writes one JSON record.
"""

from pathlib import Path

from sparsering.ground.progress import progress

from ..measure import write_record
from ..plots import sweeps_png
from .cases import (
    decode,
    layouts,
    longnet_branches,
    memory,
    million_tokens,
    random_blocks,
    small,
    window,
)
from .decoding import batches, decoding
from .drafts import drafts
from .extras import extras
from .generated import generated
from .gigapath import gigapath
from .lists import lists
from .modules import converted, hierarchical, modules
from .prefill import prefill
from .proposals import proposals
from .rows import rows
from .selection import selection, selection_decoding, selection_scores
from .small_nodes import of_small_nodes
from .sweeps import sweeps
from .transformers import indexed, transformers
from .trees import of_trees

CASES = {
    "layouts": layouts,
    "random-blocks": random_blocks,
    "longnet": longnet_branches,
    "window": window,
    "small": small,
    "decode": decode,
    "decoding": decoding,
    "batches": batches,
    "lists": lists,
    "modules": modules,
    "hierarchical": hierarchical,
    "converted": converted,
    "prefill": prefill,
    "proposals": proposals,
    "drafts": drafts,
    "generated": generated,
    "extras": extras,
    "selection": selection,
    "selection-decoding": selection_decoding,
    "selection-scores": selection_scores,
    "rows": rows,
    "gigapath": gigapath,
    "sweeps": sweeps,
    "memory": memory,
    "million-tokens": million_tokens,
    "transformers": transformers,
    "indexed": indexed,
    "trees": of_trees,
    "small-nodes": of_small_nodes,
}


def main(out: str | Path, quick: bool = False, only: str | None = None) -> list[Path]:
    """Runs all comparisons, or `only` one, and writes a record of each into `out`.

    `quick` takes small lengths.

    Returns: paths of the records and of the plot of the sweeps.
    """
    paths = []
    names = list(CASES) if only is None else [only]
    with progress("bench", len(names), "comparison") as work:
        for name in names:
            rows = CASES[name](quick)
            paths.append(write_record(Path(out), name, rows))
            if name == "sweeps":
                paths.append(Path(out) / "sweeps.png")
                paths[-1].write_bytes(sweeps_png(rows, title="H4 D64 float32"))
            work.advance(note=name)
    return paths
