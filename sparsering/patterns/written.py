"""Writes values as text and tensors, by which patterns are compared, hashed and pickled."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ground.arguments import digest_of, same_tensor
from ..ground.keywords import class_with_hints
from .document_runs import LengthsFrom

# Expressions mark which version of a custom class and which state they mean; `repr` omits this.
_VERSION = re.compile(r"__v\d+(?=\()|(, )?_state='\w+'(?=\))")
_SYMBOLS = {ast.BitAnd: "&", ast.BitOr: "|", ast.Add: "+", ast.Sub: "-"}


@class_with_hints
class WrittenValue:
    """Base of `Pattern`: a frozen dataclass that can be written as an `expression` and `tensors`.

    In the expression, t0, t1, ... stand for the tensors. Lengths that the user gave as a tensor are
    numbers in the expression; `operands` has them as a tensor.
    """

    expression: str
    tensors: tuple[Tensor, ...]
    # fields whose lengths the user gave as a tensor or as ids, with what was given
    _given: Mapping[str, Tensor | LengthsFrom] = {}
    # the expression and tensors with such lengths as tensors; None if there are none
    _data: tuple[str, tuple[Tensor, ...]] | None = None
    _by_keyword: ClassVar[tuple[str, ...]] = ()  # fields that the constructor takes by name alone
    _name: ClassVar[str] = ""  # name in the expression if it is not the name of the class
    # The user's own spelling, which `repr` shows: a text, or an operator and its two sides.
    # Equality ignores it and compares `expression`.
    _written: "str | tuple[str, WrittenValue, WrittenValue] | None" = None

    def __post_init__(self) -> None:
        self._validate()
        traced = torch.compiler.is_compiling()
        tensors: list[Tensor] = []
        object.__setattr__(self, "expression", self._spell(tensors, traced))
        object.__setattr__(self, "tensors", tuple(tensors))
        if not traced and (self._given or any(mask._data for mask in self._components())):
            data: list[Tensor] = []
            object.__setattr__(self, "_data", (self._spell(data, True), tuple(data)))

    def _validate(self) -> None:
        """Normalizes and checks the constructor's arguments."""

    def _components(self) -> tuple[Any, ...]:
        return ()

    def _spell(self, tensors: list[Tensor], as_data: bool) -> str:
        """Returns the pattern's text, in which t0, t1, ... stand for tensors.

        Appends these to `tensors`.

        With `as_data`, lengths that the user gave as a tensor are written as a tensor, not as
        numbers.
        """
        values = []
        for value in self._values(as_data):
            if isinstance(value, Tensor):
                values.append(f"t{len(tensors)}")
                tensors.append(value)
            elif isinstance(value, LengthsFrom):
                values.append(value.spelled(f"t{len(tensors)}"))
                tensors.append(value.numbers)
            elif isinstance(value, WrittenValue):
                values.append(part_text(value, tensors, as_data))
            else:
                values.append(repr(value))
        if self._by_keyword:
            values += [f"{name}={value!r}" for name, value in self._keywords().items()]
        return f"{self._name or type(self).__name__}({', '.join(values)})"

    def _keywords(self) -> dict[str, Any]:
        """Returns the fields of `_by_keyword` that are not at their default."""
        own = {name: getattr(self, name) for name in self._by_keyword}
        return {name: x for name, x in own.items() if x != self.__dataclass_fields__[name].default}  # type: ignore[attr-defined]

    def _values(self, as_data: bool = False) -> Iterator[Any]:
        """Yields the values of the fields that may be given by position, in order.

        With `as_data`, lengths as the user gave them.
        """
        # the fields in order; dataclasses.fields is slower
        names = self.__match_args__  # type: ignore[attr-defined]
        own = map(getattr, [self] * len(names), names)
        return map(self._given_or_own, names) if as_data else own

    def _given_or_own(self, name: str) -> Any:
        """Returns a field as the user gave it, such as lengths in a tensor, if kept.

        Else its value.
        """
        return self._given[name] if name in self._given else getattr(self, name)

    @property
    def operands(self) -> tuple[str, tuple[Tensor, ...]]:
        """Text and tensors of the pattern, in the form that the attention operator takes.

        In a traced call, lengths are among the tensors, so that the graph serves other lengths too.
        In an exported call there is at least one tensor, if need be one that the text does not
        name: a package of AOTInductor hands an operator None in place of an empty list.
        """
        if self._data is not None and torch.compiler.is_compiling():
            return self._data
        is_compiled = torch.compiler.is_dynamo_compiling()  # torch 2.11 then says it exports
        if not self.tensors and torch.compiler.is_exporting() and not is_compiled:
            return self.expression, (torch.empty(0),)
        return self.expression, self.tensors

    @property
    def normal_text(self) -> str:
        """The text that all equal patterns share, for keys in files.

        `repr` has the user's spelling.
        """
        return _VERSION.sub("", self.expression)

    def __repr__(self) -> str:
        # the names t0, t1, ... are numbered in the expression
        return self.normal_text if self.tensors else _VERSION.sub("", self._shown())

    def _shown(self) -> str:
        """Returns the text for `repr`: as the user wrote the pattern, if known, or from fields."""
        match self._written:
            case str(text):
                return text
            case (symbol, left, right):
                return f"{_side(left, symbol)} {symbol} {_side(right, symbol, right=True)}"
        return self._shown_by_default()

    def _shown_by_default(self) -> str:
        """Writes a constructor call without default arguments.

        Arguments after an omitted one are written by keyword.
        """
        values, skipped = [], False
        for name, value in zip(self.__match_args__, self._values(), strict=False):  # type: ignore[attr-defined]
            if value == self.__dataclass_fields__[name].default:  # type: ignore[attr-defined]
                skipped = True
                continue
            text = value._shown() if isinstance(value, WrittenValue) else repr(value)
            values.append(f"{name}={text}" if skipped else text)
        values += [f"{name}={value!r}" for name, value in self._keywords().items()]
        return f"{self._name or type(self).__name__}({', '.join(values)})"

    def write_as(self, written: "str | tuple[str, WrittenValue, WrittenValue]") -> None:
        """Stores how the user wrote a new pattern; this changes only what `repr` shows."""
        if not torch.compiler.is_compiling():
            object.__setattr__(self, "_written", written)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        alike = self.expression == other.expression
        return alike and all(map(same_tensor, self.tensors, other.tensors))

    def __hash__(self) -> int:
        """Hashes by content, once. For a GPU tensor it hashes only the shape, to avoid a sync."""
        if "_hash" not in vars(self):
            content = (digest_of(tensor) for tensor in self.tensors)
            object.__setattr__(self, "_hash", hash((type(self), self.expression, *content)))
        return int(vars(self)["_hash"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the arguments, because hashes and class versions differ by process."""
        state = None if self._written is None else {"_written": self._shown()}
        made = partial(type(self), **self._keywords()) if self._by_keyword else type(self)
        return made, tuple(self._values(as_data=True)), state


def _side(side: WrittenValue, symbol: str, *, right: bool = False) -> str:
    """Returns the text of one side of an operator, in parentheses where they are needed."""
    text = side._shown()
    top = ast.parse(text, mode="eval").body
    in_parentheses = top.col_offset > 0
    if not isinstance(top, ast.BinOp) or in_parentheses:
        return text
    same = _SYMBOLS.get(type(top.op)) == symbol and not right
    return text if same else f"({text})"


def part_text(part: WrittenValue, tensors: list[Tensor], as_data: bool) -> str:
    """Returns the text of a part of a pattern, and appends the part's tensors to `tensors`."""
    has_tensors = part.tensors or (as_data and part._data)
    return part._spell(tensors, as_data) if has_tensors else part.expression
