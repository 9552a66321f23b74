"""The reference of docs/reference has every public name, whose docstring has its parts."""

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from helpers.pages import ROOT

from sparsering import Mask, Pattern

FOLDER = ROOT / "docs" / "reference"
MODULES = (
    *("sparsering", "sparsering.distributed", "sparsering.integrations.torchscale"),
    *("sparsering.integrations.transformers", "sparsering.models", "sparsering.nn"),
    *("sparsering.selection", "sparsering.data", "sparsering.planning"),
    *("sparsering.models.gigapath", "sparsering.integrations.trident", "sparsering.data.slides"),
    *("sparsering.integrations.diffusers", "sparsering.export"),
    *("sparsering.integrations.anemoi", "sparsering.integrations.trl"),
)


def public_names(module: str) -> list[str]:
    return list(importlib.import_module(module).__all__)


PUBLIC = [(module, name) for module in MODULES for name in public_names(module)]


def of_each_name(check: Callable[[str, str], None]) -> Callable[[], None]:
    """Makes one test of a check of every public name; it tells all the names that fail."""

    def test() -> None:
        failures = []
        for module, name in PUBLIC:
            try:
                check(module, name)
            except AssertionError as error:
                failures.append(f"{module}.{name}: {error}")
        assert not failures, "\n".join(failures)

    return test


ABSTRACT = (Mask, Pattern)  # that only refuse to be made


@functools.cache
def listed() -> dict[tuple[str, str], str]:
    """Descriptions on the pages by (module, name): list items below a module's heading."""
    found = {}
    for page in sorted(FOLDER.glob("*.md")):
        module = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if heading := re.match(r"## `([\w.]+)`$", line):
                module = heading[1]
            elif item := re.match(r"- `(\w+)`: (.*)$", line):
                assert (module, item[1]) not in found, f"{module}.{item[1]} is listed twice"
                found[module, item[1]] = item[2]
    return found


def value_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def own_doc(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


@of_each_name
def test_name_is_listed_with_its_first_sentence(module, name):
    first = own_doc(value_of(module, name)).split("\n")[0]
    expected = f"- `{name}`: {first}"
    assert listed().get((module, name)) == first, f"run tools/write_reference.py: {expected}"


def test_nothing_else_is_listed():
    assert set(listed()) <= set(PUBLIC)


@of_each_name
def test_first_line_is_a_sentence(module, name):
    first, _, rest = own_doc(value_of(module, name)).partition("\n")
    assert first.endswith((".", ").")) and (not rest or rest.startswith("\n"))


def described(doc: str) -> str:
    """The docstring, and those that it takes arguments of: "as `attention`", "as for ..."."""
    for other in re.findall(r"\bas(?: for| in)? `(\w+)`", doc):
        for module, name in PUBLIC:
            if name == other:
                doc += own_doc(value_of(module, name))
    return doc


@of_each_name
def test_every_argument_is_described(module, name):
    value = value_of(module, name)
    if not callable(value) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = [
        x.name
        for x in inspect.signature(value).parameters.values()
        if x.kind not in kinds and not x.name.startswith("_")
    ]
    text = described(own_doc(value))
    missing = [x for x in arguments if not re.search(rf"\b{x}\b", text)]
    assert not missing, f"the docstring of {module}.{name} does not name {missing}"


@of_each_name
def test_result_is_described(module, name):
    """By "Returns", or by a first sentence that names a value: "The mask of ..."."""
    value = value_of(module, name)
    if not inspect.isfunction(value) or value.__annotations__["return"] is None:
        return
    doc = own_doc(value)
    is_verb = re.match(r"(?!This|Its)[A-Z][a-z]+s\b", doc)
    assert "Returns" in doc or not is_verb, f"{module}.{name} lacks what it returns"


def raises(value: Any) -> bool:
    """Whether its own code has a `raise`, or that of a class's constructor."""
    code = vars(value).get("__init__") if inspect.isclass(value) else value
    if not inspect.isfunction(code) or value in ABSTRACT:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except OSError:  # a constructor that dataclass wrote
        return False
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


@of_each_name
def test_errors_are_described(module, name):
    value = value_of(module, name)
    if raises(value):
        assert re.search(r"\b[Rr]aises?\b", own_doc(value)), f"{module}.{name} lacks what it raises"


@of_each_name
def test_methods_have_docstrings(module, name):
    value = value_of(module, name)
    if not inspect.isclass(value):
        return
    own = [member for member in vars(value) if not member.startswith("_")]
    fields = {*getattr(value, "__annotations__", ()), *getattr(value, "_fields", ())}
    missing = [
        member
        for member in own
        if member not in fields
        and (callable(getattr(value, member)) or isinstance(vars(value)[member], property))
        and not inspect.getdoc(getattr(value, member))
    ]
    assert not missing, f"{module}.{name} has methods without a docstring: {missing}"


def test_a_docstring_without_its_parts_is_found():
    def halves(text: str, width: int) -> str:
        """Cuts a text.

        Raises: as its first half does.
        """
        if not text:
            raise ValueError("expected text, got none")
        return text[width:]

    assert raises(halves)
    assert not re.search(r"\bwidth\b", described(own_doc(halves)))
    assert "query" in described("Args: as `attention`.")
