"""Each dotted name of ours in backticks, on a page or in a docstring, is the name of something."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from helpers.pages import ROOT

import sparsering

NAME = re.compile(r"`(\w+(?:\.\w+)+)(?:\(.*?\))?`")
SHORT = {"sr": "sparsering", "hf": "sparsering.integrations.transformers"}
# Variables: a model of transformers, its config, one of its layers.
FOREIGN = {"model", "config", "layer"}


def owners() -> dict[str, list[Any]]:
    """Modules and classes of the package by the names that texts have for them or an instance.

    A `KVCache` may be called `cache`, and a `BlockLayout` `layout`.
    """
    found: dict[str, list[Any]] = {"sparsering": [sparsering]}
    for info in pkgutil.walk_packages(sparsering.__path__, "sparsering."):
        if info.name == "sparsering.__main__":
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # an optional package is not there
            continue
        found.setdefault(info.name.rpartition(".")[2], []).append(module)
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == info.name:
                last_word = re.findall(r"[A-Z][a-z]*|$", name)[-2:][0].lower()
                for key in (name, last_word):
                    found.setdefault(key, []).append(value)
    return found


def texts() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if path.name == "upgrading.md":  # the first column has names that are gone
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
        yield path.name, text
    for path in sorted((ROOT / "sparsering").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}", ast.get_docstring(node) or ""


def leads_on(thing: Any, path: list[str]) -> bool:
    """Whether a thing has these attributes; a field or an attribute set by a method counts."""
    for name in path:
        if not hasattr(thing, name):
            source = inspect.getsource(thing) if inspect.isclass(thing) else ""
            return bool(re.search(rf"^    {name}:|self\.{name}\b", source, re.MULTILINE))
        thing = getattr(thing, name)
    return True


def test_every_dotted_name_of_ours_exists():
    known, unknown = owners(), []
    for place, text in texts():
        for found in NAME.findall(text):
            first, *rest = (SHORT.get(found.split(".")[0], "") or found).split(".")
            if found.split(".")[0] in SHORT:
                rest += found.split(".")[1:]
            foreign = first in FOREIGN or (first != "sparsering" and find_spec(first) is not None)
            if (
                foreign
                or first not in known
                or found.endswith(
                    (".py", ".cpp", ".html", ".txt", ".png", ".json", ".jsonl", ".safetensors")
                )
            ):
                continue
            if not any(leads_on(owner, rest) for owner in known[first]):
                unknown.append(f"{place}: {found}")
    assert not unknown, "\n".join(unknown)
