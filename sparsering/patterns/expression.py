"""Patterns as text: expressions as `repr(pattern)` shows them, read from their syntax tree.

    parse("LongNet((2048, 4096), (1, 2)) & Causal()")

No code in the text is executed. The names t0, t1, ... stand for the pattern's tensors, in order.
"""

import ast
import difflib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from ..ground.arguments import shortened
from ..ground.keywords import with_hints
from . import blocks, keys, positions
from .algebra import Pattern
from .document_runs import FORMS
from .neighbourhood import Neighbourhood
from .per_head import PerHead
from .rearranged import Rearranged
from .selected import EdgeLists, KeyLists, SelectedBlocks
from .tree import Tree
from .varlen_mask import Varlen

BUILT_IN: dict[str, Callable[..., Pattern]] = {
    constructor.__name__: constructor
    for constructor in (
        *(positions.Full, positions.Causal, positions.PooledCausal, positions.SlidingWindow),
        *(positions.GlobalTokens, positions.Dilated, positions.LongNet, positions.Documents),
        *(positions.Packed, Tree, Varlen, keys.KeyPadding, keys.KeyMask),
        *(blocks.BlockDilated, blocks.BlockWindow, blocks.RandomBlocks, blocks.Hierarchical),
        *(blocks.BlockCausal, blocks.BlockDiffusion, positions.ChunkedCausal),
        *(blocks.Blocks, SelectedBlocks, blocks.Dense, PerHead, Neighbourhood),
        Rearranged,
    )
}
_constructors = {
    **BUILT_IN, "EdgeLists": EdgeLists, "KeyLists": KeyLists,
    "_RandomBlocksOfHead": blocks._RandomBlocksOfHead,
}  # fmt: skip
# Only the library writes these names, so no error message suggests them.
_INTERNAL = (
    "MaskMod", "Varlen", "SameRun", "InRuns", "EdgeLists", "KeyLists", "_RandomBlocksOfHead",
)  # fmt: skip

_SHORT = 4096  # texts with more characters, such as of many documents, have a smaller cache
_EXPECTED = "a pattern is an expression such as 'LongNet((2048, 4096), (1, 2)) & Causal()'"


@with_hints()
def parse(text: str, tensors: Sequence[Tensor] = ()) -> Pattern:
    """Reads a pattern from text.

    Args:
        text: constructors of the public patterns with literal arguments, joined by `&`, `|`, `+`,
            `-` and parentheses.
        tensors: the tensors that the names t0, t1, ... stand for.

    Returns: the mask or mixture, equal to the one that printed the text.

    Raises: ValueError that quotes the part that is not a pattern.

    Example:
        >>> parse("Causal() & SlidingWindow(511)") == Causal() & SlidingWindow(511)
        True
    """
    if not isinstance(text, str):
        raise ValueError(
            f"{_EXPECTED}, got a {type(text).__name__}; use a pattern object without parse"
        )
    if not isinstance(tensors, Sequence) or not all(isinstance(x, Tensor) for x in tensors):
        got = shortened(repr(tensors))
        raise ValueError(f"tensors must be a sequence of tensors, got {got}; pass pattern.tensors")
    return _parse(text, tuple(tensors)) if tensors and "t0" in text else _parse_literal(text)


def parse_owned(text: str, tensors: Sequence[Tensor]) -> Pattern:
    """Reads a pattern like `parse`, for operators, but without copying tensors on a GPU.

    Nobody may write to these tensors later.
    """
    if tensors and "t0" in text:
        return _parse(text, tuple(tensors), owned=True)
    return _parse_literal(text) if len(text) <= _SHORT else _parse_long(text)


def add_constructor(name: str, constructor: Callable[..., Pattern]) -> None:
    """Lets `parse` read a further constructor, such as a class that a user registered."""
    _constructors[name] = constructor
    _parse_literal.cache_clear()
    _parse_long.cache_clear()


@lru_cache(maxsize=1024)
def _parse_literal(text: str) -> Pattern:
    return _parse(text, ())


@lru_cache(maxsize=32)
def _parse_long(text: str) -> Pattern:
    return _parse(text, ())


def _parse(text: str, tensors: tuple[Tensor, ...], owned: bool = False) -> Pattern:
    quoted = shortened(repr(text))
    try:
        pattern = _Reader(text, tensors, owned).read(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{_EXPECTED}, got {quoted}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{_EXPECTED}, got {quoted}, which is nested too deep") from None
    except TypeError as error:
        raise ValueError(f"{error}, in pattern {quoted}") from None
    if not isinstance(pattern, Pattern):
        raise ValueError(f"{_EXPECTED}, got {quoted}")
    if not tensors:
        pattern.write_as(" ".join(text.split()))
    return pattern


class _Reader:
    """Builds a pattern from the syntax tree of its text, node by node; it executes no code."""

    def __init__(self, text: str, tensors: tuple[Tensor, ...], owned: bool) -> None:
        self.text, self.tensors, self.owned = text.strip(), tensors, owned
        self.patterns: dict[tuple[object, ...], Pattern] = {}  # so that equal calls share a pattern

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.BinOp(left, ast.BitAnd(), right):
                return self.read(left) & self.read(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return self.read(left) | self.read(right)
            case ast.BinOp(left, ast.Add(), right):
                return self.read(left) + self.read(right)
            case ast.BinOp(left, ast.Sub(), right):
                return self.read(left) - self.read(right)
            case ast.Call(ast.Name(name), arguments, keywords) if name in _constructors and all(
                k.arg for k in keywords
            ):
                named = {str(keyword.arg): self.read(keyword.value) for keyword in keywords}
                if len(named) < len(keywords):
                    raise ValueError(
                        f"{name} must have each argument once, got an argument twice; remove one"
                    )
                values = [self.read(argument) for argument in arguments]
                if self.owned and values and _constructors[name] in (SelectedBlocks, EdgeLists):
                    values[0] = blocks.Owned(values[0])
                if named or not values or not all(isinstance(x, Tensor) for x in values):
                    return _constructors[name](*values, **named)
                key = (name, *map(id, values))
                if key not in self.patterns:
                    self.patterns[key] = _constructors[name](*values)
                return self.patterns[key]
            case ast.Call(ast.Name(name), arguments, []) if name in FORMS and self.tensors:
                return FORMS[name](*map(self.read, arguments))
            case ast.Constant(int() | float() | str() | None):
                return node.value
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return -number
            case ast.Tuple(items) | ast.List(items):
                return tuple(map(self.read, items))
            case ast.Name(name) if name in (names := [f"t{i}" for i in range(len(self.tensors))]):
                return self.tensors[names.index(name)]
        part = shortened(repr(ast.get_source_segment(self.text, node)))
        raise ValueError(
            f"{part} is no part of a pattern in {shortened(repr(self.text))}; {_way_out(node)}"
        )


def _way_out(node: ast.expr) -> str:
    """Suggests a constructor with a name like the wrong one; if there is none, lists them all."""
    names = [name for name in _constructors if name not in _INTERNAL and "__v" not in name]
    name = node.func if isinstance(node, ast.Call) else node
    similar = difflib.get_close_matches(name.id, names, 1) if isinstance(name, ast.Name) else []
    if similar:
        return f"did you mean {similar[0]}(...)?"
    return (
        f"use {', '.join(names)} with literal arguments, joined by & | + -; register_pattern adds "
        "your own"
    )
