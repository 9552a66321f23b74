"""Code that takes a pattern or a condition apart names all its fields, in the package's source.

A class that gains a field then fails here wherever the field would be lost: `Tree` gained `length`,
and a function that knew its other three fields built trees without it.
"""

import ast
import importlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType

import pytest

import sparsering as sr
from sparsering.layouts.leaves import Condition
from sparsering.patterns.algebra import Pattern

PACKAGE = Path(sr.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")


NOT_REBUILT = (  # these read fields of named tuples that are no patterns
    "Tree(tree.lengths, tree.parents, part)",
    "SlidingWindow(kind.left)",
    "SlidingWindow(kind.left, kind.right)",
    "MaskMod(named.name, batch_size if by_batch else None, by_head)",
)


def value_of(name: ast.expr, module: object) -> object:
    """Returns what a dotted name means in a module; None if it is no such name."""
    if isinstance(name, ast.Attribute):
        return getattr(value_of(name.value, module), name.attr, None)
    return getattr(module, name.id, None) if isinstance(name, ast.Name) else None


def names_of(kind: object) -> tuple[str, ...] | None:
    """Returns the fields of a class of patterns or conditions; None for other values."""
    if isinstance(kind, type) and issubclass(kind, Pattern | Condition) and is_dataclass(kind):
        return tuple(field.name for field in fields(kind) if field.init)
    return None


def fits(node: ast.Call | ast.MatchClass, names: tuple[str, ...]) -> bool:
    """Whether a call or a `case` gives each field."""
    if isinstance(node, ast.MatchClass):
        return len(node.patterns) + len(node.kwd_attrs) == len(names)
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    given = {keyword.arg for keyword in node.keywords}
    return starred or None in given or len(node.args) + len(given) == len(names)


def partial_patterns(tree: ast.AST, module: object) -> Iterator[str]:
    """Yields each `case X(...)` that names some fields of X, but not all.

    `case X():` names none on purpose: its body reads fields by name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchClass) and (node.patterns or node.kwd_attrs):
            names = names_of(value_of(node.cls, module))
            if names is not None and not fits(node, names):
                yield f"line {node.lineno}: case {ast.unparse(node)} of fields {names}"


def partial_rebuilds(tree: ast.AST, module: object) -> Iterator[str]:
    """Yields each call X(...) with a field of another X that does not give all fields.

    The other X is taken apart by `case X(...)`, or is `self`, or its fields are read by name.
    """
    for scope in ast.walk(tree):
        if isinstance(scope, ast.match_case):
            taken = {
                value_of(node.cls, module)
                for node in ast.walk(scope.pattern)
                if isinstance(node, ast.MatchClass)
            }
            for node in calls(scope):
                kind = value_of(node.func, module)
                if kind in taken and (names := names_of(kind)) and not fits(node, names):
                    yield f"line {node.lineno}: {ast.unparse(node)} of fields {names}"
    for node in calls(tree):
        names = names_of(value_of(node.func, module))
        if names and reads_of(node, names) and not fits(node, names):
            if ast.unparse(node) in NOT_REBUILT:
                continue
            yield f"line {node.lineno}: {ast.unparse(node)} of fields {names}"


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def reads_of(call: ast.Call, names: tuple[str, ...]) -> bool:
    """Whether an argument is `x.field` in the place of that field, so that `x` is rebuilt."""
    given = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    return any(
        isinstance(part, ast.Attribute) and part.attr == name
        for name, argument in given
        for part in ast.walk(argument)
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_code_that_takes_a_value_apart_knows_all_its_fields(path):
    tree = ast.parse(path.read_text())
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module: ModuleType = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    assert [*partial_patterns(tree, module), *partial_rebuilds(tree, module)] == []


def test_a_forgotten_field_is_seen():
    source = """
match mask:
    case Tree(_, _, inner):
        other = Tree((1,), (-1,), inner)
    case Packed(lengths, inner):
        again = Packed(lengths, inner)
    case Dilated():
        other = Dilated(2 * mask.segment_length, mask.dilation_rate)
    case Documents(_) | Dilated(_, _, _):
        other = Dilated(2 * mask.segment_length, mask.dilation_rate, mask.offset)
"""
    tree = ast.parse(source)
    assert [x.split(":")[0] for x in partial_patterns(tree, sr)] == ["line 3"]
    lines = sorted({x.split(":")[0] for x in partial_rebuilds(tree, sr)})
    assert lines == ["line 4", "line 8"]
