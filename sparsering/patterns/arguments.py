"""Arguments of patterns: checked, frozen, compared; and how much of them an error quotes."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..rows import mix

MOST_TOKENS = 1 << 53
"""The largest length that a pattern names: with room for products in 64 bits."""


def shortened(text: str, most: int = 200) -> str:
    """The text, its middle left out where it is long."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def checked_integer(
    name: str, value: object, least: int | None, most: int | None = MOST_TOKENS
) -> int:
    """The value as an int within bounds; TypeError or ValueError naming it otherwise."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, got {shortened(repr(value))}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {shortened(str(number))}")
    return number


def freeze_integer(
    pattern: object, name: str, least: int | None, most: int | None = MOST_TOKENS
) -> None:
    """Replaces an argument by a checked int."""
    number = checked_integer(
        f"{type(pattern).__name__} {name}", getattr(pattern, name), least, most
    )
    object.__setattr__(pattern, name, number)


def freeze_integers(
    pattern: object, name: str, least: int | None, most: int | None = MOST_TOKENS
) -> None:
    """Replaces a sequence argument by a tuple of checked ints."""
    label = f"{type(pattern).__name__} {name}"
    value = getattr(pattern, name)
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{label} must be a sequence of ints, got {shortened(repr(value))}")
    numbers = tuple(checked_integer(f"each of {label}", item, least, most) for item in value)
    object.__setattr__(pattern, name, numbers)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same content, in the same place."""
    if a.shape != b.shape or a.device != b.device or a.dtype != b.dtype:
        return False
    return a is b or torch.equal(a, b)


def digest_of(tensor: Tensor) -> int:
    """A hash of shape and content; of shape alone where reading it would wait for a device."""
    content = 0
    if tensor.device.type == "cpu" and tensor.numel():
        numbers = tensor.contiguous().flatten()
        if tensor.is_floating_point() or tensor.is_complex():
            numbers = numbers.view(torch.uint8)
        content = int((mix(torch.arange(len(numbers))) * numbers).sum())
    return hash((tuple(tensor.shape), content))
