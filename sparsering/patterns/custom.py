"""Custom masks: a user's class with `holds` becomes a pattern.

    @register_pattern
    class Prefix(Mask):
        length: int

        def holds(self, p, k, frame):
            return (k <= p) | (k < self.length)

    attention(query, key, value, Prefix(100) & SlidingWindow(512, 512))

Cost: the layout of a custom mask evaluates every pair once, O(Nq Nk) time, unless the class defines
`Mask.candidates` or `Mask.status` for tiles. Attention costs as much as for any mask.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ground.arguments import checked_integer, kind_of, shortened
from ..ground.keywords import with_hints
from .algebra import And, Frame, Mask, Not, Or, Pattern
from .expression import BUILT_IN, add_constructor
from .function_state import Reads

Own = TypeVar("Own", bound=Mask)


@with_hints()
def register_pattern(cls: type[Own]) -> type[Own]:
    """Turns a subclass of `Mask` that defines `holds` into a pattern like the library's own.

    The class becomes a frozen dataclass, whose annotated attributes are its arguments: numbers,
    strings, None, CPU tensors (copied), tuples of these, or masks. Its patterns combine by `&`,
    `|`, `+`, run on every backend, under torch.compile and over ranks, and `parse` reads them.
    `holds` gets only positions inside the sequence; the class may override other methods of `Mask`
    too. A class may be registered again under its name, as when a notebook cell runs again: `parse`
    then reads the newest class, and patterns of earlier classes do not change. A pattern that is
    created after a global or class attribute which its methods read has changed is another one; a
    pattern from before keeps the layouts that it has, and raises ValueError where it needs `holds`.

    Returns: the class, `cls`.

    Raises: TypeError for a class that cannot be a pattern, ValueError for a name that is taken.

    Example:
        >>> @register_pattern
        ... class Diagonal(Mask):
        ...     offset: int = 0
        ...     def holds(self, p, k, frame):
        ...         return p - k == self.offset
    """
    if not (isinstance(cls, type) and issubclass(cls, Mask)):
        raise TypeError(
            f"register_pattern needs a subclass of sparsering.Mask, got {shortened(repr(cls))}"
        )
    name = cls.__name__
    if "_name" in vars(cls):
        return cls
    if inherited := [base.__name__ for base in cls.__mro__ if base in _LAID_OUT_BY_CLASS]:
        raise TypeError(
            f"{name} must not derive from {inherited[0]}, whose layouts ignore a new `holds`; "
            f"derive from Mask, and combine the two with &, or call {inherited[0]}(...).holds"
        )
    if cls.holds is Mask.holds:
        raise TypeError(
            f"{name} must define holds(self, p, k, frame), which says whether query position p "
            "pairs with key position k"
        )
    own = (*BUILT_IN, "MaskMod", "EdgeLists", "KeyLists")
    if name in own or (name[:1] == "t" and name[1:].isdigit()) or "__v" in name:
        raise ValueError(f"{name} is a name of the library's own patterns; choose another")
    if "__init__" in vars(cls) and not is_dataclass(cls):
        raise TypeError(
            f"{name} must not define __init__: annotate its arguments in the class, as in "
            "`length: int`, and check them in __post_init__, which ends with "
            "super().__post_init__()"
        )
    if taken := {"expression", "tensors", *dir(Mask)} & set(vars(cls).get("__annotations__", {})):
        raise TypeError(
            f"{name} must not call an argument {sorted(taken)[0]!r}, because every mask has an "
            "attribute of this name; rename it"
        )
    pattern = dataclass(frozen=True, repr=False, eq=False)(cls)
    odd = [x.name for x in fields(pattern) if x.kw_only or not x.init]  # type: ignore[arg-type]
    if odd:
        raise TypeError(
            f"{name} must take {odd[0]!r} as a plain argument, got a field that is keyword-only or "
            "not in __init__; write it as `name: type = default`"
        )
    _versions[name] += 1
    attributes: dict[str, Any] = {
        **{method: getattr(Pattern, method) for method in ("__repr__", "__eq__", "__hash__")},
        "_components": lambda self: tuple(masks_of(self).values()),
        "__post_init__": _with_expression(cls.__post_init__),
        "holds": _inside_sequence(cls.holds),
        "_name": f"{name}__v{_versions[name]}",
        "_spell": _spell,
        "_reads": Reads(pattern, *(getattr(cls, name) for name in _ASKED)),
        **{"_state": "", "_first_state": None, "_accepted": {}},
    }
    for method in ("status", "candidates"):
        if getattr(cls, method) is not getattr(Mask, method):
            attributes[method] = _checked(getattr(cls, method))
    if cls.at is Mask.at:
        attributes["at"] = _at
    if "_validate" not in vars(cls):
        attributes["_validate"] = _freeze_arguments
    for attribute, value in attributes.items():
        setattr(pattern, attribute, value)
    add_constructor(name, pattern)
    add_constructor(pattern._name, partial(_in_state, pattern))
    return pattern


_LAID_OUT_BY_CLASS = {x for x in BUILT_IN.values() if isinstance(x, type)} | {And, Or, Not}
_ASKED = ("holds", "status", "candidates", "at", "num_tables", "num_batches", "check")
_versions: Counter[str] = Counter()  # number of classes registered under each name
_unreadable = itertools.count()


def _state_of(cls: Any, exact: bool = False) -> str:
    """Hashes the globals and class attributes that the methods of a user's mask read now.

    The result is "" while these equal those of the class's first pattern. `exact` compares tensors
    by content, not by version counter.
    """
    if (state := cls._reads.now(exact)) is None:
        return f"unreadable{next(_unreadable)}" if exact else "unreadable"
    if cls._first_state is None:
        cls._first_state = state
    return "" if state == cls._first_state else state


def _in_state(cls: type[Mask], *values: Any, _state: str = "", **named: Any) -> Mask:
    """Constructs a pattern whose hash `_state` is known already, as in `parse` and `at`."""
    pattern = object.__new__(cls)
    object.__setattr__(pattern, "_state", _state)
    pattern.__init__(*values, **named)  # type: ignore[misc]
    return pattern


def _spell(self: Any, tensors: list[Tensor], as_data: bool) -> str:
    text = Pattern._spell(self, tensors, as_data)
    if torch.compiler.is_compiling() or not self._state:
        return text
    return f"{text[:-1]}{', ' * (text[-2] != '(')}_state={self._state!r})"


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of a user's mask: it raises if globals that it reads have changed since.

    Raises ValueError if globals or class attributes that it reads changed since the pattern was
    made. Changes that the method makes itself are accepted.
    """

    def checked(self: Any, *arguments: Any) -> Any:
        cls: Any = type(self)
        if _state_of(cls) not in (self._state, cls._accepted.get(self._state), "unreadable"):
            raise ValueError(
                f"{self} reads globals or class attributes that have changed since it was created, "
                "so its mask is another; create it again"
            )
        result = method(self, *arguments)
        if (state := _state_of(cls)) != self._state:  # the method itself changed what it reads
            cls._accepted[self._state] = state
        return result

    return checked


def _with_expression(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps a mask's `__post_init__`: before it, stores `_state_of` the class.

    After it, the text.
    """

    def check(self: Mask) -> None:
        if not torch.compiler.is_compiling() and "_state" not in vars(self):
            object.__setattr__(self, "_state", _state_of(type(self), exact=True))
        post_init(self)
        if "expression" not in vars(self):
            Pattern.__post_init__(self)

    return check


def _fits(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of shape `shape` can be expanded to the shape `target`."""
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(a in (1, b) for a, b in sizes)


def masks_of(pattern: Mask) -> dict[str, Mask]:
    """Returns those arguments of a pattern that are masks themselves, by field name."""
    values = {field.name: getattr(pattern, field.name) for field in fields(pattern)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if isinstance(value, Mask)}


def _at(self: Any, batch: int, head: int, frame: Frame) -> Mask:
    """Replaces `Mask.at` in a custom mask: applies `at` to the arguments that are masks."""
    changes = {name: mask.at(batch, head, frame) for name, mask in masks_of(self).items()}
    return with_masks(self, changes) if changes else self


def with_masks(pattern: Any, changes: dict[str, Mask]) -> Any:
    """Returns a pattern with other masks as arguments, by field name."""
    if "_reads" not in vars(type(pattern)):
        return replace(pattern, **changes)
    values = {x.name: changes.get(x.name, getattr(pattern, x.name)) for x in fields(pattern)}
    return _in_state(type(pattern), **values, _state=pattern._state)


def _freeze_arguments(pattern: Pattern) -> None:
    """Replaces a custom mask's arguments by immutable values that can be written as text."""
    for field in fields(pattern):  # type: ignore[arg-type]
        value = getattr(pattern, field.name)
        label = f"{type(pattern).__name__} {field.name}"
        frozen = value if isinstance(value, Mask) else _frozen(label, value)
        object.__setattr__(pattern, field.name, frozen)


def _frozen(label: str, value: object) -> object:
    """Returns an immutable copy of an argument.

    TypeError if it is of no type that `parse` reads.
    """
    match value:
        case None | bool():
            return value
        case list() | tuple():
            return tuple(_frozen(label, item) for item in value)
        case Tensor() if value.device.type == "cpu" and value.layout is torch.strided:
            return value.detach().clone()
        case float() if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{label} must be finite, got {value}; pass None for no bound")
        case float():  # `parse` may not read the repr of a subclass, such as numpy.float64
            return float(value)
        case str():
            return str.__str__(value)
    try:
        return checked_integer(label, value, None, None)
    except TypeError:
        raise TypeError(
            f"{label} must be a number, a string, None, a CPU tensor, a tuple of these, or a mask, "
            f"got {shortened(repr(value))}"
        ) from None


def _inside_sequence(holds: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a user's `holds`, which then gets only positions inside the sequence.

    Tiles may extend past its end, so positions are clamped before the call.

    It also checks the dtype and shape of the result, and expands it to all pairs.
    """
    checked = _checked(holds)

    def inside(self: Mask, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        p, k = frame.inside(p, k)
        try:
            pairs = checked(self, p, k, frame)
        except Exception as error:
            error.add_note(f"raised by the `holds` of {self}, a mask of your own")
            raise
        shape = torch.broadcast_shapes(p.shape, k.shape)
        is_bool = isinstance(pairs, Tensor) and pairs.dtype == torch.bool
        if not is_bool or not _fits(pairs.shape, shape):
            raise ValueError(
                f"{type(self).__name__}.holds must give a bool tensor that broadcasts to "
                f"{tuple(shape)}, got {kind_of(pairs)}; compare tensors with ==, <=, &, |"
            )
        return pairs.expand(shape)

    return inside
