"""Patterns as matrices drawn by hand, from `drawn_positions.txt` and `drawn_tiles.txt`.

A paragraph there is a drawing: the behaviour that it shows; the pattern as a spec of
`patterns_oracle`, the number of queries and other arguments of `to_dense`; and the counts
[B, H, Nq, Nk] in the notation of `patterns_oracle.matrix`. Lines that begin with # are comments.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracles.patterns_oracle import Spec


@dataclass(frozen=True)
class Drawing:
    """A pattern (as a spec), the arguments of `to_dense`, and the matrix as drawn."""

    behaviour: str
    spec: Spec
    arguments: dict[str, Any]
    picture: str

    @classmethod
    def parse(cls, text: str) -> "Drawing":
        """Reads the behaviour, the call and the picture, each on lines of their own."""
        behaviour, call, *rows = (line for line in text.split("\n") if line[:1] != "#")
        parsed = ast.parse(f"drawing({call})", mode="eval").body
        assert isinstance(parsed, ast.Call)
        spec, q_len = (ast.literal_eval(x) for x in parsed.args)
        others = {str(x.arg): ast.literal_eval(x.value) for x in parsed.keywords}
        return cls(behaviour, spec, {"q_len": q_len, **others}, "\n".join(rows))


DRAWINGS = [
    Drawing.parse(text)
    for name in ("drawn_positions.txt", "drawn_tiles.txt")
    for text in Path(__file__).with_name(name).read_text().strip().split("\n\n")
]
