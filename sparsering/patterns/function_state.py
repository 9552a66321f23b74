"""Digests of everything that functions read: while it is equal, a mask_mod gives the same mask.

    Reads(function).now()       # None if a part of it cannot be read

A digest covers the code, constants, defaults, closures, and the globals and attributes whose names
occur in the code. Functions and classes of torch, NumPy and Python's library count by name only.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..ground.buffers import add_bytes
from ..ground.namespace import NAMESPACE

_LIBRARIES = {*sys.stdlib_module_names, "numpy", "torch", NAMESPACE} - {"__main__"}
_PLAIN = {bool, int, float, complex, str, bytes, type(None), type(...), slice, range}
_PLAIN |= {torch.dtype, torch.device, torch.Size}
_PARTS: dict[type, tuple[str, ...]] = {
    **{MethodType: ("__func__", "__self__"), partial: ("func", "args", "keywords")},
    **{property: ("fget",), staticmethod: ("__func__",), classmethod: ("__func__",)},
}
_HIDES = {"eval", "exec", "getattr", "globals", "locals", "vars", "__dict__", "__import__"}
_MOST_PARTS = 10_000


class Reads:
    """Computes a digest of what functions or classes read, so that a caller notices changes."""

    def __init__(self, *roots: Any) -> None:
        self.roots, self.state = roots, ""
        self.quick: tuple[str, Any] = ("", None)

    def now(self, exact: bool = False) -> str | None:
        """Returns the digest now; None if something cannot be read.

        Unless `exact`, a tensor counts as unchanged while its version counter is, so that a
        repeated call does not hash its numbers.
        """
        try:
            quick = _state(self.roots, quick=True)
            if exact or quick[0] != self.quick[0]:
                self.state = _state(self.roots, quick=False)[0]
        except Exception:  # whatever an object raises when it is read
            return None
        self.quick = quick
        return self.state


def _state(roots: tuple[Any, ...], quick: bool) -> tuple[str, Any]:
    """Returns a digest of all that `roots` read, and the objects that it read to find out.

    The caller holds these objects, so that no other object gets their addresses, which a quick
    digest contains. It repeats until the code that was read names no further attributes.
    """
    names: set[str] = set()
    while True:
        reader = _StateReader(sorted(names), quick)
        parts = repr([reader.read(root) for root in roots])
        if reader.names <= names:
            return hashlib.blake2b(parts.encode(), digest_size=12).hexdigest(), reader.seen
        names |= reader.names


class _StateReader:
    """Turns objects into nested tuples whose `repr` is hashed; `seen` stops endless cycles."""

    def __init__(self, attributes: list[str], quick: bool) -> None:
        self.attributes, self.quick = attributes, quick
        self.names: set[str] = set()  # names that the code read so far uses
        self.seen: dict[int, tuple[int, Any]] = {}  # (running number, object), by address

    def read(self, value: Any) -> Any:
        if (kind := type(value)) in _PLAIN:
            return kind.__name__, repr(value)
        if id(value) in self.seen:
            return self.seen[id(value)][0]
        self.seen[id(value)] = len(self.seen), value
        if len(self.seen) > _MOST_PARTS:
            raise ValueError("too much to read")
        if kind in _PARTS:
            return kind.__name__, [self.read(getattr(value, name)) for name in _PARTS[kind]]
        match value:
            case Tensor() if self.quick and not value.is_inference():
                return id(value), value._version
            case Tensor():
                numbers = hashlib.blake2b()
                add_bytes(numbers, value)
                return str(value.dtype), tuple(value.shape), numbers.digest()
            case CodeType():
                self.names.update(value.co_names)
                if self.names & _HIDES:
                    raise ValueError("the code hides what it reads")
                names = value.co_names, value.co_varnames, value.co_freevars
                return value.co_code, names, [self.read(x) for x in value.co_consts]
            case FunctionType():
                return self.function(value)
            case BuiltinFunctionType() if not isinstance(value.__self__, ModuleType | type | None):
                return value.__name__, self.read(value.__self__)
            case ModuleType():
                own = {} if in_library(value.__name__) else vars(value)
                return value.__name__, [self.read(own.get(x)) for x in self.attributes]
            case type():
                return value.__module__, value.__qualname__, self.parts_of_class(value)
        return self.contents(value)

    def contents(self, value: Any) -> Any:
        """Reads the items of a container; of another object, the attributes that functions name."""
        kind, items = type(value), list[Any]()
        if isinstance(value, dict):
            items = [(self.read(x), self.read(y)) for x, y in value.items()]
        elif isinstance(value, tuple | list):
            items = [self.read(x) for x in value]
        elif isinstance(value, set | frozenset):
            items = sorted(repr(self.read(x)) for x in value)
        if kind in (dict, tuple, list, set, frozenset):
            return kind.__name__, items
        if hasattr(value, "__wrapped__"):
            return self.read(value.__wrapped__)
        if in_library(kind.__module__) or isinstance(value, Enum):
            reduced = value.__reduce_ex__(4)  # pickle's description of the object
            parts = [reduced] if isinstance(reduced, str) else reduced
            return [self.read(list(x) if isinstance(x, Iterator) else x) for x in parts]
        for name in self.attributes:
            with suppress(AttributeError):
                items.append((name, self.read(getattr(value, name))))
        return self.read(kind), items

    def function(self, value: FunctionType) -> Any:
        """Reads a function: its code, defaults and closure, and the globals that its code names."""
        cells = [self.read(cell.cell_contents) for cell in value.__closure__ or ()]
        if in_library(value.__module__):
            return value.__module__, value.__qualname__, cells
        reads = [
            (name, self.read(known[name]))
            for name in sorted(names_of(value.__code__))
            for known in (value.__globals__, sys.modules)  # its body may import modules
            if name in known
        ]
        reads += [(x, self.read(y)) for x, y in vars(value).items() if x in self.attributes]
        options = self.read(value.__defaults__), self.read(value.__kwdefaults__)
        return self.read(value.__code__), options, cells, reads

    def parts_of_class(self, cls: type) -> Any:
        """Reads a class: the attributes that functions name, and methods such as `__call__`."""
        return [
            (name, self.read(part))
            for base in cls.__mro__
            if not in_library(base.__module__)
            for name, part in vars(base).items()
            if name in self.attributes or (name.startswith("__") and isinstance(part, FunctionType))
        ]


def in_library(module: str | None) -> bool:
    """Whether a module belongs to torch, NumPy, Python's library or this package."""
    return (module or "").partition(".")[0] in _LIBRARIES


def names_of(code: CodeType) -> set[str]:
    """Returns the globals and attributes that code and its inner functions name."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*map(names_of, inner))
