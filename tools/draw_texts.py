"""Draws texts of the project for a reader who has not seen it, to ask which are clear at once.

    .venv/bin/python tools/draw_texts.py SEED

It prints 20 private docstrings, 10 public ones (their first paragraphs), 10 comments, 10 error
messages and 10 paragraphs of README and docs, each with a number and its place. The same seed draws
the same texts of a commit.
"""

import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTS = {"private docstring": 20, "public docstring": 10, "comment": 10, "error": 10, "page": 10}
Text = tuple[str, str, str]  # kind, place, text


def of_module(path: Path) -> Iterator[Text]:
    """Yields docstrings, error messages and comments of a Python file."""
    source = path.read_text(encoding="utf-8")
    place = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
            is_private = node.name.startswith("_")
            kind = "private docstring" if is_private else "public docstring"
            yield kind, f"{place}:{node.lineno} {node.name}", text.split("\n\n")[0]
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield "error", f"{place}:{node.lineno}", ast.unparse(node.exc.args[0])
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and len(token.string) > 20:
            yield "comment", f"{place}:{token.start[0]}", token.line.strip()


def of_page(path: Path) -> Iterator[Text]:
    """Yields the paragraphs of a page that are prose."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if len(words) > 80 and words[0] not in "#|!<":
            yield "page", str(path.relative_to(ROOT)), words


def drawn(seed: int) -> list[Text]:
    """Returns the texts that a seed draws."""
    texts = [x for p in sorted((ROOT / "sparsering").rglob("*.py")) for x in of_module(p)]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts += [x for page in pages for x in of_page(page)]
    draw = random.Random(seed)
    return [
        x
        for kind, count in COUNTS.items()
        for x in draw.sample([t for t in texts if t[0] == kind], count)
    ]


if __name__ == "__main__":
    for number, (kind, place, text) in enumerate(drawn(int(sys.argv[1])), 1):
        print(f"{number}. {kind}, {place}\n{text}\n")
