"""Figures of a prior library's documents (dilated-attention-pytorch, 2025), from `prior.json`.

All on a GTX 1080 with 8 GB, float16, forward, not causal; "memory" is the peak minus the inputs.
"""

import json
from pathlib import Path
from typing import Any

_RECORD = Path(__file__).resolve().parents[1] / "records" / "prior.json"
PRIOR: dict[str, Any] = json.loads(_RECORD.read_bytes())
TABLES: dict[str, Any] = PRIOR["tables"]


def prior_figure(table: str, call: str, tokens: int | None) -> str:
    """Returns the prior documents' figure for a row of ours, "" if there is none."""
    if call.endswith((", with gradients", ", bfloat16")) and table != "chosen":
        return ""  # the prior figures are forward passes; one row of ours shows them
    for start, length, figure in TABLES[table]["beside"] if table in TABLES else ():
        if call.startswith(start) and length in (None, tokens):
            return str(figure)
    return ""
