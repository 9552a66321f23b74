"""Values that are written as text and tensors: how patterns are compared, hashed and copied."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .arguments import digest_of, same_tensor

# Expressions number the classes of one name and what they read; `repr` leaves this out.
_VERSION = re.compile(r"__v\d+(?=\()|(, )?_state='\w+'(?=\))")


class WrittenValue:
    """Base of `Pattern`: a frozen dataclass whose `expression` has t0, t1, ... for its `tensors`.

    Lengths that came as a tensor are numbers in the expression; `operands` has them as a tensor.
    """

    expression: str
    tensors: tuple[Tensor, ...]
    _given: Mapping[str, Tensor] = {}  # lengths that came as a tensor, by field
    _data: tuple[str, tuple[Tensor, ...]] | None = None  # text and tensors, with lengths as tensors
    _name: ClassVar[str] = ""  # name in the expression, "" for the name of the class

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
        """Normalises and checks the constructor's arguments."""

    def _components(self) -> tuple[Any, ...]:
        return ()

    def _spell(self, tensors: list[Tensor], as_data: bool) -> str:
        """Returns the text of the pattern, and appends its tensors to `tensors`.

        With `as_data`, lengths that came as a tensor are one of the tensors.
        """
        values = []
        for value in self._values(as_data):
            if isinstance(value, Tensor):
                values.append(f"t{len(tensors)}")
                tensors.append(value)
            elif isinstance(value, WrittenValue):
                values.append(part_text(value, tensors, as_data))
            else:
                values.append(repr(value))
        return f"{self._name or type(self).__name__}({', '.join(values)})"

    def _values(self, as_data: bool = False) -> Iterator[Any]:
        names = self.__match_args__  # type: ignore[attr-defined]  # all fields, in order, at no cost
        own = map(getattr, [self] * len(names), names)
        return map(self._given_or_own, names) if as_data else own

    def _given_or_own(self, name: str) -> Any:
        """Returns a field, as the tensor of lengths that it came as, if it did."""
        return self._given[name] if name in self._given else getattr(self, name)

    @property
    def operands(self) -> tuple[str, tuple[Tensor, ...]]:
        """Text and tensors of the pattern as an operator takes them.

        In a traced call they have lengths as tensors, so that its graph serves other lengths too.
        In an exported call there is at least one tensor, if need be one that the text does not
        name: a package of AOTInductor hands an operator None in place of an empty list.
        """
        if self._data is not None and torch.compiler.is_compiling():
            return self._data
        is_compiled = torch.compiler.is_dynamo_compiling()  # torch 2.11 then says it exports
        if not self.tensors and torch.compiler.is_exporting() and not is_compiled:
            return self.expression, (torch.empty(0),)
        return self.expression, self.tensors

    def __repr__(self) -> str:
        return _VERSION.sub("", self.expression)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        alike = self.expression == other.expression
        return alike and all(map(same_tensor, self.tensors, other.tensors))

    def __hash__(self) -> int:
        """Hashes by content, once. Of a GPU tensor it hashes only the shape, to avoid a sync."""
        if "_hash" not in vars(self):
            content = (digest_of(tensor) for tensor in self.tensors)
            object.__setattr__(self, "_hash", hash((type(self), self.expression, *content)))
        return int(vars(self)["_hash"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles only the arguments: hashes and class numbers differ by process."""
        return type(self), tuple(self._values(as_data=True))


def part_text(part: WrittenValue, tensors: list[Tensor], as_data: bool) -> str:
    """Returns the text of a part; its tensors go behind `tensors`, with numbers from there on."""
    has_tensors = part.tensors or (as_data and part._data)
    return part._spell(tensors, as_data) if has_tensors else part.expression
