"""Counts docstrings whose first word is no subject that a stranger knows; fails above 25.

`python tools/docstring_openings.py -v` prints where they are.
"""

import ast
import sys
from pathlib import Path

OPENINGS = ("What", "Of", "The same", "Which", "Those", "That")
MOST = 25

found = []
for path in sorted(Path("sparsering").rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if any(text.startswith((f"{opening} ", f"{opening}\n")) for opening in OPENINGS):
                found.append(f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
if "-v" in sys.argv:
    print(*found, sep="\n")
print(f"{len(found)} docstrings open with {', '.join(OPENINGS)} (at most {MOST})")
sys.exit(len(found) > MOST)
