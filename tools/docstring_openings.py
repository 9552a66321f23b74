"""Fails if the first word of a docstring is no subject that a stranger knows, and prints where."""

import ast
import sys
from pathlib import Path

OPENINGS = ("What", "Of", "The same", "Which", "Those", "That")

found = []
folders = ("sparsering", "benchmarks", "examples", "tests", "tools")
for path in sorted(x for folder in folders for x in Path(folder).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if any(text.startswith((f"{opening} ", f"{opening}\n")) for opening in OPENINGS):
                found.append(f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
print(*found, f"{len(found)} docstrings open with {', '.join(OPENINGS)}", sep="\n")
sys.exit(bool(found))
