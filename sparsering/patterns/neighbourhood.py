"""Windows over grids of any number of dims, as NATTEN's: `Neighbourhood`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import MOST_TOKENS, checked_integer, checked_integers, shortened
from ..ground.keywords import class_with_hints
from .algebra import Frame, Mask


class GridDim(NamedTuple):
    """One dim of a grid of tokens: its window, and how a position's coordinate is computed."""

    size: int  # number of coordinates
    stride: int  # difference in position between neighbors in this dim
    radius: int
    dilation: int

    def coordinate(self, position: Tensor) -> Tensor:
        return position // self.stride % self.size

    def windows(self, coordinate: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where the window of each query coordinate begins.

        Keys with one residue modulo the dilation form a class, numbered from 0. Returns (residue,
        number of the window's first key in this class); windows at an edge are shifted inward.
        """
        residue = coordinate % self.dilation
        last = (self.size - 1 - residue) // self.dilation
        first = (coordinate // self.dilation - self.radius).clamp(min=0)
        return residue, torch.minimum(first, last - 2 * self.radius)

    def holds(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether query coordinates see key coordinates in this dim."""
        residue, first = self.windows(query)
        index = key // self.dilation
        near = (index >= first) & (index <= first + 2 * self.radius)
        return near & (key % self.dilation == residue)

    def keys(self, query: Tensor) -> Tensor:
        """Returns the coordinates of all keys that queries [...] see, [..., 2 radius + 1]."""
        residue, first = self.windows(query)
        index = first[..., None] + torch.arange(2 * self.radius + 1)
        return index * self.dilation + residue[..., None]

    def queries(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first and last query coordinate that see each key coordinate.

        Between the two, every `dilation`-th coordinate sees the key.
        """
        residue, index = key % self.dilation, key // self.dilation
        last = (self.size - 1 - residue) // self.dilation
        low = torch.where(index <= 2 * self.radius, 0, index - self.radius)
        high = torch.where(index >= last - 2 * self.radius, last, index + self.radius)
        return low * self.dilation + residue, high * self.dilation + residue

    def reach(self, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Returns bounds (low, high) of the keys that query coordinates in [first, last] see."""
        far, size = self.radius * self.dilation, self.size
        low = torch.clamp(first - far, max=size - self.dilation - 2 * far).clamp(min=0)
        high = torch.clamp(last + far, min=2 * far + self.dilation - 1).clamp(max=size - 1)
        return low, high


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Neighbourhood(Mask):
    """A token of a grid sees the tokens in a window around it, 2 radius + 1 wide in each dim.

    The tokens of a grid `shape` = (n1, ..., nD) are in row-major order, as `x.flatten()` gives
    them; a call has n1 * ... * nD keys. At a border the window is shifted inwards, as in NATTEN, so
    that each query sees (2 radius + 1)^D keys: with radius 2, coordinates 0, 1 and 2 of a dim all
    see coordinates 0 to 4. With a dilation, a query sees each dilation-th token alone, and its
    window is shifted inside the tokens of its own residue: coordinate i sees those j with
    j % dilation == i % dilation. NATTEN's kernel size is 2 radius + 1.

    Args:
        shape: tokens in each dim, from the slowest to the fastest.
        radius: tokens on either side; an int, or one for each dim.
        dilation: distance of neighbours in the window; an int, or one for each dim.

    Raises: ValueError if (2 radius + 1) * dilation is more than the tokens of a dim, or when used
        with another number of keys.

    Example: `Neighbourhood((64, 64), 6)` for an image; `Neighbourhood((16, 64, 64), (1, 3, 3))` for
        a film; `Neighbourhood((64, 64), 3) & Causal()` to draw an image token by token. A film of
        64 x 64 causal in time, in which a query sees its own frame and 4 before it, is
        `Neighbourhood((16, 64, 64), (4, 3, 3)) & BlockCausal(4096) & BlockWindow(4, 4096)`.

    Source: NATTEN, Neighborhood Attention (arXiv 2204.07143) and its dilation (2209.15001).
    """

    shape: tuple[int, ...]
    radius: int | tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    _elsewhere = MappingProxyType(  # hints for NATTEN's argument names
        {
            "kernel_size": "its windows are 2 * radius + 1 wide; write radius=kernel_size // 2 ("
            "even sizes: the rule of docs/coming-from.md#natten)",
            "stride": "its windows move by one token; for others docs/coming-from.md#natten has a "
            "rule, which from_mask_mod takes",
            "is_causal": "causality is a pattern; write & Causal() to draw token by token, or for "
            "a film causal in time & BlockCausal(frame) & BlockWindow(k - 1, frame), with radius "
            "k - 1 in time (docs/coming-from.md#natten)",
        }
    )

    def _validate(self) -> None:
        shape = checked_integers("Neighbourhood shape", self.shape, 1)
        if not shape or math.prod(shape) > MOST_TOKENS:
            raise ValueError(
                "Neighbourhood shape must have the tokens of each dim of a grid, got "
                f"{shortened(repr(shape))}; for example (64, 64)"
            )
        object.__setattr__(self, "shape", shape)
        for name, least in (("radius", 0), ("dilation", 1)):
            numbers = _of_each_dim(name, getattr(self, name), least, len(shape))
            alike = len(set(numbers)) == 1
            object.__setattr__(self, name, numbers[0] if alike else numbers)
        for number, dim in enumerate(self.dims):
            if (2 * dim.radius + 1) * dim.dilation > dim.size:
                raise ValueError(
                    f"Neighbourhood needs (2 * radius + 1) * dilation tokens in each dim, got "
                    f"{dim.size} in dim {number} for radius {dim.radius} and dilation "
                    f"{dim.dilation}; pass a smaller radius, one for each dim if need be"
                )

    @property
    def dims(self) -> list[GridDim]:
        """The dims of the grid, slowest first (the last dim has stride 1)."""
        found, stride = [], self.own_length
        for number, size in enumerate(self.shape):
            stride //= size
            window = (
                x[number] if isinstance(x, tuple) else x for x in (self.radius, self.dilation)
            )
            found.append(GridDim(size, stride, *window))
        return found

    @property
    def own_length(self) -> int:
        return math.prod(self.shape)

    def check(self, frame: Frame) -> None:
        if frame.kv_len != self.own_length:
            raise ValueError(
                f"Neighbourhood of shape {self.shape} is for {self.own_length} tokens, got "
                f"{frame.kv_len} keys; pass the shape of the grid that the keys are of"
            )

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        pairs = (p >= 0) & (p < self.own_length) & (k < self.own_length)
        for dim in self.dims:
            pairs = pairs & dim.holds(dim.coordinate(p), dim.coordinate(k))
        return pairs


def _of_each_dim(name: str, value: Any, least: int, dims: int) -> tuple[int, ...]:
    """Returns a number for each dim; repeats a single one. ValueError if the count differs."""
    label = f"Neighbourhood {name}"
    if not isinstance(value, Sequence) and getattr(value, "ndim", 0) == 0:
        return (checked_integer(label, value, least),) * dims
    numbers = checked_integers(label, value, least)
    if len(numbers) != dims:
        raise ValueError(
            f"{label} must be an int, or one for each of {dims} dims, got {len(numbers)}: "
            f"{shortened(repr(numbers))}"
        )
    return numbers
