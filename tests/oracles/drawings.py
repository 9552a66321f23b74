"""Patterns as matrices drawn by hand: one of each kind in `kinds`, the others in text files.

A paragraph of `drawn_positions.txt` and `drawn_tiles.txt` is a drawing: the pattern as a spec of
`kinds`, the number of queries and other arguments of `to_dense`; then the counts [B, H, Nq, Nk] in
the notation of `patterns_oracle.matrix`. The first comment is the behaviour that it shows.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracles.kinds import KINDS, Spec


@dataclass(frozen=True)
class Drawing:
    """A pattern (as a spec), the arguments of `to_dense`, and the matrix as drawn."""

    behaviour: str
    spec: Spec
    arguments: dict[str, Any]
    picture: str

    @classmethod
    def parse(cls, text: str) -> "Drawing":
        """Reads the first comment, the call and the picture."""
        lines = [line.strip().partition("#") for line in text.strip().split("\n")]
        behaviour = next(comment.strip() for _, _, comment in lines if comment)
        call, *rows = (code.strip() for code, _, _ in lines if code)
        parsed = ast.parse(f"drawing({call})", mode="eval").body
        assert isinstance(parsed, ast.Call)
        spec, q_len = (ast.literal_eval(x) for x in parsed.args)
        others = {str(x.arg): ast.literal_eval(x.value) for x in parsed.keywords}
        return cls(behaviour, spec, {"q_len": q_len, **others}, "\n".join(rows))


FILES = (Path(__file__).with_name(name) for name in ("drawn_positions.txt", "drawn_tiles.txt"))
PARAGRAPHS = [part for file in FILES for part in file.read_text().strip().split("\n\n")]
DRAWINGS = [
    *(Drawing.parse(kind.drawing) for kind in KINDS.values() if kind.drawing),
    *map(Drawing.parse, PARAGRAPHS),
]
