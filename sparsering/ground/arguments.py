"""Checks, freezes and compares arguments of patterns, and shortens them for error messages."""

import math
import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state
from torch._subclasses.fake_tensor import FakeTensor

from .rows import mix

MOST_TOKENS = 1 << 53
"""The largest length in a pattern, so that sums of positions fit in 64 bits."""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SAMPLE = 1 << 14  # a tensor's hash reads at most so many elements, evenly spaced


def not_a_pattern(other: object) -> str:
    """Returns error text about a value that should be a pattern, with a suggested fix."""
    got, way_out = type(other).__name__, "patterns are made by Causal(), LongNet(...), ..."
    if isinstance(other, type):
        got, way_out = f"the class {other.__name__}", "call it with its arguments"
    elif isinstance(other, str):
        way_out = "parse(text) reads one"
    elif callable(getattr(other, "mask_mod", None)):  # a BlockMask of FlexAttention
        way_out = "from_mask_mod(block_mask.mask_mod) makes a pattern of its function"
    elif hasattr(other, "ndim"):
        way_out = "Dense(mask) takes bool [Nq, Nk] of pairs, KeyMask(valid) bool [Nk] of keys"
    elif callable(other):
        way_out = "from_mask_mod(function) takes FlexAttention's mask_mod"
    return f"got {got}; {way_out}"


def escaped(text: str) -> str:
    """Escapes unprintable characters except line breaks, because a terminal would obey them."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def shortened(text: str, most: int = 200) -> str:
    """Returns a text for a message: escapes unprintable characters, and cuts out a long middle."""
    half, text = most // 2, escaped(text)
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def index_of(value: object) -> int | None:
    """Returns an integer, also one of numpy, as an int.

    None for a bool, a tensor or anything else.
    """
    if type(value) is int:
        return value  # operator.index would make it a constant of a compiled function
    try:
        return None if isinstance(value, bool | Tensor) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # classes, and arrays of several numbers, have a failing __index__
        return None


def way_to_tensor(x: object) -> str:
    """Returns the end of an error message about `x`, which should be a tensor: how to get one."""
    if not hasattr(type(x), "__torch_function__"):
        return "convert numbers by torch.as_tensor"
    return "to trace the call, use torch.export, or torch.fx.wrap a function of yours that makes it"


def checked_integer(
    name: str, value: object, least: int | None, most: int | None = MOST_TOKENS
) -> int:
    """Returns the value as an int from `least` to `most`; else TypeError or ValueError."""
    try:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # tensors without data (on meta) raise RuntimeError
        got = shortened(repr(value)) + "; wrap it in int()" * isinstance(value, str | float)
        if isinstance(value, Tensor) and not value.is_nested and value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}; a length is its .shape[2]"
        raise TypeError(f"{name} must be an int, got {got}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {shortened(str(number))}")
    return number


def is_finite(number: object) -> bool:
    """Whether the value is a real number (not a tensor) in the range of finite floats."""
    return isinstance(number, Real) and math.isfinite(as_float(number))


def checked_flag(name: str, value: object) -> bool:
    """Returns `value` if it is True or False; raises TypeError for anything else."""
    if type(value) is not bool:
        raise TypeError(f"{name} must be True or False, got {shortened(repr(value))}")
    return value


def kind_of(value: object) -> str:
    """Returns dtype and shape of a tensor, or the type of another value, as text."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__


def freeze_integer(pattern: object, name: str, *bounds: int | None) -> None:
    """Replaces the field `name` of a frozen pattern by a checked int, within `bounds`.

    `bounds` are the least and most values of `checked_integer`; None is no bound.
    """
    number = checked_integer(f"{type(pattern).__name__} {name}", getattr(pattern, name), *bounds)
    object.__setattr__(pattern, name, number)


def freeze_integers(pattern: object, name: str, *bounds: int | None) -> None:
    """Replaces the field `name` of a frozen pattern, a sequence, by a tuple of checked ints."""
    numbers = checked_integers(f"{type(pattern).__name__} {name}", getattr(pattern, name), *bounds)
    object.__setattr__(pattern, name, numbers)


def checked_integers(
    name: str, value: object, least: int | None, most: int | None = MOST_TOKENS
) -> tuple[int, ...]:
    """Returns a sequence, tensor or array as a tuple of ints, each checked by `checked_integer`."""
    numbers = listed(name, value)
    if isinstance(numbers, str) or not isinstance(numbers, Sequence):
        raise TypeError(f"{name} must be a sequence of ints, got {shortened(repr(value))}")
    return tuple(checked_integer(f"each of {name}", item, least, most) for item in numbers)


def listed(name: str, value: Any) -> Any:
    """Returns a tensor or array as nested lists of numbers, and any other value unchanged."""
    if isinstance(value, Tensor) and (
        value.is_meta or value.is_nested or value.layout is not torch.strided
    ):
        kind = "nested" if value.is_nested else value.layout
        raise TypeError(
            f"{name} must be numbers, got a {kind} tensor on {value.device}; pass a list, as "
            ".tolist() of a dense tensor makes"
        )
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value


def as_float(value: Any) -> float:
    """Returns the value as a float, possibly infinite; NaN if it is no number."""
    if isinstance(value, bool | str | bytes | bytearray):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def checked_number(name: str, value: object, least: float, most: float = math.inf) -> float:
    """Returns the value as a finite float from `least` to `most`; else raises ValueError."""
    if isinstance(value, bool) or not is_finite(value) or not least <= value <= most:  # type: ignore[operator]
        bounds = f"from {least:g} up" if most == math.inf else f"from {least:g} to {most:g}"
        raise ValueError(
            f"{name} must be a finite number {bounds}, got {shortened(repr(value))}; wrap it in "
            "float()"
        )
    return float(value)  # type: ignore[arg-type]


def checked_dtype(name: str, value: object) -> torch.dtype | None:
    """Returns `value` if it is a torch.dtype or None; raises TypeError for anything else."""
    if value is not None and not isinstance(value, torch.dtype):
        raise TypeError(
            f"{name} must be a dtype such as torch.float32 or None, got {shortened(repr(value))}"
        )
    return value


def is_traced(x: Tensor) -> bool:
    """Whether a compiler or tracer records operators on a tensor, whose numbers may then change."""
    return torch.compiler.is_compiling() or type(x) is FakeTensor or _records()


def is_shape_alone(x: object) -> bool:
    """Whether a tensor has a shape but no numbers, as on the meta device or under FakeTensorMode.

    False if a tracer records: its graph gets numbers later, so checks of numbers must still raise.
    """
    return isinstance(x, Tensor) and (isinstance(x, FakeTensor) or x.is_meta) and not _records()


def _records() -> bool:
    """Whether torch.jit.trace or torch.fx records the operators that this thread calls now."""
    if _get_tracing_state() is not None:
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")  # slow to import
    return proxies is not None and proxies.get_proxy_mode() is not None


def freeze_lengths(pattern: Any, name: str, least: int = 0, nested: bool = True) -> None:
    """Replaces the field `name` of a frozen pattern, some lengths, by a tuple of checked ints.

    With `nested`, lengths may be given per batch entry; the field is then a tuple of tuples.

    A tensor of integers, [n] or with `nested` [B, n], is kept as well, as data for traced calls.
    While a compiler traces, a tensor has no numbers and stays the field; the operator checks it
    later.
    """
    value, label = getattr(pattern, name), f"{pattern._name or type(pattern).__name__} {name}"
    if isinstance(value, Tensor) and is_traced(value):
        if value.dtype not in INTEGERS or value.dim() not in ((1, 2) if nested else (1,)):
            raise ValueError(
                f"{label} must be an int64 tensor [n]{' or [B, n]' * nested}, got "
                f"{kind_of(value)}; torch.tensor([...]) of ints makes one"
            )
        object.__setattr__(pattern, name, value.detach().to(torch.int64, copy=True))
        return
    lengths: Any = listed(label, value)
    first: Any = lengths[0] if isinstance(lengths, Sequence) and len(lengths) else None
    each = not isinstance(first, int) and (
        isinstance(first, Sequence) or (hasattr(first, "ndim") and first.ndim == 1)
    )
    if nested and each and not isinstance(first, str):
        label += " of a batch entry"
        lengths = tuple(checked_integers(label, entry, least) for entry in lengths)
    else:
        lengths = checked_integers(label, lengths, least)
    object.__setattr__(pattern, name, lengths)
    if isinstance(value, Tensor):
        given = {**pattern._given, name: value.detach().to("cpu", torch.int64, copy=True)}
        object.__setattr__(pattern, "_given", given)


def per_entry(lengths: Any) -> bool:
    """Whether `lengths` has one sequence for each batch entry, instead of one for all entries."""
    if isinstance(lengths, Tensor):
        return lengths.dim() == 2
    return bool(lengths) and isinstance(lengths[0], tuple)


def same_lengths(a: tuple[int, ...] | Tensor, b: tuple[int, ...] | Tensor) -> bool:
    """Whether lengths are equal; tensors, kept while a compiler traces, count only if identical."""
    return a is b or (isinstance(a, tuple) and isinstance(b, tuple) and a == b)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal shapes, dtypes, devices and numbers."""
    if a.shape != b.shape or a.device != b.device or a.dtype != b.dtype:
        return False
    return a is b or torch.equal(a, b)


def digest_of(tensor: Tensor) -> int:
    """Hashes a tensor's shape and, if it is on the CPU, evenly spaced elements of it."""
    content = 0
    if tensor.device.type == "cpu" and tensor.numel():
        numbers = tensor.contiguous().flatten()
        if tensor.is_floating_point() or tensor.is_complex():
            numbers = numbers.view(torch.uint8)
        numbers = numbers[:: -(-len(numbers) // _SAMPLE)]
        content = int((mix(torch.arange(len(numbers))) * numbers).sum())
    return hash((tuple(tensor.shape), content))
