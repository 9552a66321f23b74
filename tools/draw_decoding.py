"""Draws the pictures of docs/decoding.md.

`python -m tools.draw_decoding benchmarks/records/decoding.json docs` writes docs/decoding.png, of
the record, and docs/kept.png.
"""

import json
import sys
from pathlib import Path

from benchmarks.plots import decoding_png
from sparsering import Causal, LongNet
from sparsering.plots.attended import kept_image

PATTERN = LongNet((64, 256), (1, 4)) & Causal()
LENGTHS = (180, 250, 280)
TITLE = "LongNet((64, 256), (1, 4)) & Causal(): keys kept (blue) and forgotten (grey)"


def main(record: Path, out: Path) -> None:
    """Writes both."""
    told = json.loads(record.read_text())
    rows = [
        row
        for row in told["rows"]
        if row["case"] == "one token" and row["batch"] == 1 and row["dtype"] == "float32"
    ]
    processor = f"{told['environment']['threads']} threads of {told['environment']['processor']}"
    title = f"One token after another, {rows[0]['heads']} heads, D 64, float32; {processor}"
    (out / "decoding.png").write_bytes(decoding_png(rows, title=title))
    (out / "kept.png").write_bytes(kept_image(PATTERN, LENGTHS, num_heads=4, title=TITLE))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
