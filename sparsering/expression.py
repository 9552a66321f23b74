"""Patterns as text: the Python expression that `repr(pattern)` gives, read from its syntax tree,
never evaluated.

    parse("LongNet((2048, 4096), (1, 2)) & Causal()")

Tensors have no literal: `Pattern.expression` names them t0, t1, ... in the order of
`Pattern.tensors`.
"""

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from . import block_patterns, patterns
from .algebra import Pattern

CONSTRUCTORS = {
    name: getattr(module, name)
    for module, names in (
        (
            patterns,
            "Full Causal SlidingWindow GlobalTokens Dilated LongNet Documents Packed KeyPadding",
        ),
        (
            block_patterns,
            "BlockDilated BlockWindow RandomBlocks Hierarchical Blocks SelectedBlocks Dense",
        ),
    )
    for name in names.split()
}

_NUMBERS = 1 << 63
_EXPECTED = "a pattern is an expression such as 'LongNet((2048, 4096), (1, 2)) & Causal()'"


def parse(text: str, tensors: Sequence[Tensor] = ()) -> Pattern:
    """Reads a pattern.

    Args:
        text: constructors of the public patterns with literal arguments, joined by `&`, `|`, `+`
            and parentheses.
        tensors: what the names t0, t1, ... stand for.

    Raises: ValueError naming the part that is not a pattern.
    """
    return _parse(text, tuple(tensors)) if tensors else _parse_literal(text)


@lru_cache(maxsize=1024)
def _parse_literal(text: str) -> Pattern:
    return _parse(text, ())


def _parse(text: str, tensors: tuple[Tensor, ...]) -> Pattern:
    try:
        pattern = _Reader(text, tensors).read(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{_EXPECTED}, got {text!r}: {error.msg}") from None
    except TypeError as error:
        raise ValueError(f"{error}, in pattern {text!r}") from None
    except (RecursionError, MemoryError):  # Python's parser says either
        raise ValueError(
            f"{_EXPECTED}, got {len(text)} characters that are nested too deep"
        ) from None
    if not isinstance(pattern, Pattern):
        raise ValueError(f"{_EXPECTED}, got {text!r}")
    return pattern


class _Reader:
    def __init__(self, text: str, tensors: tuple[Tensor, ...]) -> None:
        self.text, self.tensors = text, tensors

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.BinOp(left, ast.BitAnd(), right):
                return self.read(left) & self.read(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return self.read(left) | self.read(right)
            case ast.BinOp(left, ast.Add(), right):
                return self.read(left) + self.read(right)
            case ast.Call(ast.Name(name), arguments, keywords) if name in CONSTRUCTORS and all(
                k.arg for k in keywords
            ):
                named = {str(keyword.arg): self.read(keyword.value) for keyword in keywords}
                return CONSTRUCTORS[name](*map(self.read, arguments), **named)
            case ast.Constant(float() | str() | None):
                return node.value
            case ast.Constant(int(number)) if number < _NUMBERS:
                return number
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)) if (
                number <= _NUMBERS
            ):
                return -number
            case ast.Tuple(items) | ast.List(items):
                return tuple(map(self.read, items))
            case ast.Name(name) if name in (names := [f"t{i}" for i in range(len(self.tensors))]):
                return self.tensors[names.index(name)]
        raise ValueError(
            f"{ast.get_source_segment(self.text.strip(), node)!r} is no part of a pattern in "
            f"{self.text!r}; "
            f"use {', '.join(CONSTRUCTORS)} with literal arguments of 64 bits, joined by & | +"
        )
