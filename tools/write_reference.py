"""Writes the lists of docs/reference: each public name with the first sentence of its docstring.

    .venv/bin/python tools/write_reference.py

Pages keep their order and headings. A name that no page has is added at the end of the first list
of its module; one that is public no longer is removed.
"""

import importlib
import inspect
import re
from pathlib import Path

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs" / "reference").glob("*.md"))


def line_of(module: str, name: str) -> str:
    """Returns the item of a name."""
    doc = getattr(importlib.import_module(module), name).__doc__
    return f"- `{name}`: {inspect.cleandoc(doc or '').splitlines()[0]}"


def main() -> None:
    """Writes the pages anew, and prints those that changed."""
    pages = {page: page.read_text(encoding="utf-8").splitlines() for page in PAGES}
    lists: dict[str, list[tuple[Path, int]]] = {}  # of each module: the places behind its lists
    listed: dict[str, set[str]] = {}
    for page, lines in pages.items():
        module, kept = "", []
        for line in lines:
            if heading := re.match(r"## `([\w.]+)`$", line):
                module = heading[1]
            item = re.match(r"- `(\w+)`: ", line)
            if item and item[1] not in importlib.import_module(module).__all__:
                continue
            kept.append(line_of(module, item[1]) if item else line)
            if item:
                listed.setdefault(module, set()).add(item[1])
                places = lists.setdefault(module, [])
                places[:] = [x for x in places if x[0] != page] + [(page, len(kept))]
        lines[:] = kept
    # From the end of a page, so that what is added moves no place that is still to come.
    for module, places in sorted(lists.items(), key=lambda x: x[1][0][1], reverse=True):
        page, place = places[0]
        missing = sorted(set(importlib.import_module(module).__all__) - listed[module])
        pages[page][place:place] = [line_of(module, name) for name in missing]
    for page, lines in pages.items():
        text = "\n".join(lines) + "\n"
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"Wrote {page}")


if __name__ == "__main__":
    main()
