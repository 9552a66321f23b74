"""Hints for keywords that a function, constructor or method does not have.

An error suggests a similar name and lists all names. Calls with right names pay only for a check of
the names that they pass.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch

from .arguments import shortened

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def refuse_unknown(verb: str, name: str, options: Sequence[str]) -> NoReturn:
    """Raises TypeError for a keyword that is no option of `verb`, with the most similar option."""
    traced = torch.compiler.is_compiling()  # torch.compile cannot trace difflib
    similar = [] if traced else difflib.get_close_matches(name, options, 1)
    hint = f" (did you mean {similar[0]}?)" if similar else ""
    if not options:
        raise TypeError(f"{verb} has no option {shortened(name)}, and no others; leave it out")
    names = ", ".join(options)
    raise TypeError(f"{verb} has no option {shortened(name)}{hint}; its options are {names}")


def with_hints(
    reasons: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function so that unknown keywords are refused with a hint.

    `reasons` says what to write instead of names that users bring from other libraries; these raise
    ValueError.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        return _checked(function, function.__name__, parameters, reasons or {})

    return decorate


def inner(method: Callable[P, R]) -> Callable[P, R]:
    """Marks a method that the library itself calls often: `class_with_hints` does not wrap it."""
    method._is_inner = True  # type: ignore[attr-defined]
    return method


def class_with_hints(cls: C) -> C:
    """Decorates a class so that its constructor and public methods refuse unknown keywords.

    Methods marked as `inner` stay as they are. A method that passes its `**options` on leaves the
    check to the function that gets them. A class may have a table `_elsewhere` for names from other
    libraries, like `reasons` of `with_hints`.
    """
    first = "__new__" if "__new__" in vars(cls) else "__init__"  # it sees the arguments first
    public = [x for x in vars(cls) if not x.startswith("_")]
    for name in (first, *public):
        member = vars(cls).get(name) or getattr(cls, name)
        function = getattr(member, "__func__", member)  # of a class method or static method
        if not isinstance(function, FunctionType) or hasattr(function, "_is_inner"):
            continue
        verb = cls.__name__ if name == first else f"{cls.__name__}.{name}"
        bound = not isinstance(member, staticmethod) or name == "__new__"
        names = list(inspect.signature(function).parameters.values())[bound:]
        reasons = vars(cls).get("_elsewhere", {}) if name == first else {}
        checked = _checked(function, verb, names, reasons)
        kind = staticmethod if name == "__new__" else type(member)
        setattr(cls, name, checked if kind is FunctionType else kind(checked))
    return cls


def _checked(
    function: Callable[P, R],
    verb: str,
    parameters: Iterable[inspect.Parameter],
    reasons: Mapping[str, str],
) -> Callable[P, R]:
    """Wraps `function` so that a keyword it does not have raises an error that lists its keywords.

    `verb` is the name in the error; `reasons` may say, for a keyword, why it is not taken.
    """
    parameters = list(parameters)
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        return function  # it takes every keyword
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    names = [x.name for x in parameters if x.kind not in by_place]
    known = frozenset(names)

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> R:
        for name in named:
            if name not in known:
                _refuse(verb, name, [x for x in names if x not in named], reasons)
        return function(*args, **named)

    return cast(Callable[P, R], checked)


def _refuse(verb: str, name: str, options: Iterable[str], reasons: Mapping[str, str]) -> NoReturn:
    if name in reasons:
        raise ValueError(f"{verb} takes no {name}: {reasons[name]}")
    refuse_unknown(verb, name, list(options))
