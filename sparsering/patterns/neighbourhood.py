"""Windows over grids of any number of dims, as NATTEN's: `Neighbourhood`."""

import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import shortened
from ..ground.keywords import class_with_hints
from .algebra import Frame, Mask
from .grid import GridTiles, checked_shape, of_each_dim


class GridDim(NamedTuple):
    """One dim of a grid of tokens, and the window of keys that each coordinate sees there.

    Coordinates with one residue modulo the dilation form a class, numbered from 0; windows and
    strides count these numbers. The `stride` queries of a group share the window of their leader.
    """

    size: int  # number of coordinates
    window: int  # keys in a window
    dilation: int
    stride: int
    causal: bool

    def members(self, residue: Tensor) -> Tensor:
        """Returns how many coordinates have each residue."""
        return (self.size - 1 - residue) // self.dilation + 1

    def windows(self, coordinate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the keys that each query coordinate sees: residue, first number, last number."""
        residue, number = coordinate % self.dilation, coordinate // self.dilation
        return residue, *self._window(number, self.members(residue))

    def _window(self, number: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first and last number that a query sees in a class of `members` tokens."""
        group = number // self.stride * self.stride
        middle = self.stride - 1 if self.causal else self.stride // 2
        leader = torch.minimum(group + middle, members - 1)
        if self.causal:
            return (leader - self.window + 1).clamp(min=0), number
        first = torch.minimum((leader - self.window // 2).clamp(min=0), members - self.window)
        return first, first + self.window - 1

    def holds(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether query coordinates see key coordinates in this dim."""
        residue, first, last = self.windows(query)
        number = key // self.dilation
        return (number >= first) & (number <= last) & (key % self.dilation == residue)

    def queries(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first and last query coordinate that see each key coordinate.

        Between the two, every `dilation`-th coordinate sees the key.
        """
        residue, number = key % self.dilation, key // self.dilation
        most, size = self.members(residue) - 1, self.stride
        if self.causal:
            low = number
            high = (number + self.window - size) // size * size + size - 1
            high = torch.where(number + self.window - 1 >= most, most, high)
        else:
            middle, half = size // 2, self.window // 2
            lowest = number - self.window + 1 + half - middle
            low = torch.where(number < self.window, 0, -(-lowest // size) * size).clamp(min=0)
            high = (number + half - middle) // size * size + size - 1
            high = torch.where(number + half >= most, most, high)
            high = torch.where(number > most - self.window, most, high)
        high = torch.minimum(high, most)
        return low * self.dilation + residue, high * self.dilation + residue

    def reach(self, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Returns bounds (low, high) of the keys that query coordinates in [first, last] see."""
        # Windows begin later for later queries, and in classes with more members.
        few, many = self.members(last.new_tensor([self.dilation - 1, 0])).unbind()
        low = self._window(first // self.dilation, few)[0] * self.dilation
        if self.causal:
            return low, last
        high = (self._window(last // self.dilation, many)[1] + 1) * self.dilation - 1
        return low, high.clamp(max=self.size - 1)

    def repeats(self, first: Tensor, last: Tensor) -> Tensor:
        """Whether no border moves the windows of queries in [first, last].

        A shift of query and key by a multiple of `period` then changes no pair.
        """
        few = self.members(last.new_tensor(self.dilation - 1))
        low, high = (x // self.dilation // self.stride * self.stride for x in (first, last))
        if self.causal:
            return high + self.stride <= few
        middle, half = self.stride // 2, self.window // 2
        inside = (low + middle >= half) & (high + middle < few)
        return inside & (high + middle - half + self.window <= few)

    @property
    def period(self) -> int:
        return self.dilation * self.stride


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Neighbourhood(Mask):
    """A token of a grid sees the tokens in a window around it, `window` wide in each dim.

    The tokens of a grid `shape` = (n1, ..., nD) are in row-major order, as `x.flatten()` gives
    them; a call has n1 * ... * nD keys. At a border the window is shifted inwards, as in NATTEN, so
    that each query sees as many keys: with a window of 5, coordinates 0, 1 and 2 of a dim all see
    coordinates 0 to 4. A window of even size looks one token further back than forward.

    Args:
        shape: tokens in each dim, from the slowest to the fastest.
        radius: tokens on either side, for windows of odd size: `radius=r` is `window=2 * r + 1`.
            An int, or one for each dim.
        dilation: distance of neighbours in the window; an int, or one for each dim. A query sees
            the tokens of its own residue alone, and its window is shifted inside these.
        window: tokens of the window, NATTEN's kernel size; an int, or one for each dim.
        stride: neighbours that share a window, that of the one in their middle; an int, or one for
            each dim, at most the window. `stride == window` makes blocks that see themselves.
        causal: whether a query sees no later coordinate, and the window ends with it; a bool, or
            one for each dim. The first queries then see fewer keys.
        tile: if given, tokens are not in row-major order but in that of `GridTiles(shape, tile)`.
            Distances, and the weights that dropout removes, count places in this order.

    Raises: ValueError unless one of radius and window is given, if window * dilation is more than
        the tokens of a dim that is not causal, for a stride above the window, or when used with
        another number of keys.

    Example: `Neighbourhood((64, 64), 6)` for an image; `Neighbourhood((16, 64, 64), (1, 3, 3))` for
        a film; `Neighbourhood((16, 64, 64), window=(5, 7, 7), causal=(True, False, False))` for a
        film causal in time, in which a query sees its own frame and 4 before it;
        `Neighbourhood((64, 64), 3) & Causal()` to draw an image token by token.

    Source: NATTEN, Neighborhood Attention (arXiv 2204.07143), its dilation (2209.15001), and
        strides (Generalized Neighborhood Attention, 2504.16922).
    """

    shape: tuple[int, ...]
    radius: int | tuple[int, ...] | None = None
    dilation: int | tuple[int, ...] = 1
    window: int | tuple[int, ...] | None = field(default=None, kw_only=True)
    stride: int | tuple[int, ...] = field(default=1, kw_only=True)
    causal: bool | tuple[bool, ...] = field(default=False, kw_only=True)
    tile: int | tuple[int, ...] | None = field(default=None, kw_only=True)
    _by_keyword = ("window", "stride", "causal", "tile")
    _elsewhere = MappingProxyType(  # hints for NATTEN's argument names
        {
            "kernel_size": "write window=kernel_size",
            "is_causal": "write causal=is_causal; & Causal() draws token by token",
        }
    )

    def _validate(self) -> None:
        shape = checked_shape("Neighbourhood", self.shape)
        if (self.radius is None) == (self.window is None):
            given = "neither" if self.radius is None else f"{self.radius!r} and {self.window!r}"
            raise ValueError(
                "Neighbourhood needs one of radius and window, got "
                f"{shortened(given)}; radius=r is window=2 * r + 1"
            )
        values = {
            name: of_each_dim(f"Neighbourhood {name}", value, least, len(shape))
            for name, least in (("dilation", 1), ("stride", 1), ("radius", 0), ("window", 1))
            if (value := getattr(self, name)) is not None
        }
        if "radius" in values:
            values["window"] = tuple(2 * r + 1 for r in values.pop("radius"))
        causal = self._causal_dims(len(shape))
        for number, dim in enumerate(_dims(shape, causal, **values)):
            _check_dim(dim, number)
        # Equal masks have one spelling: a radius if all windows are odd, one number for equal ones.
        odd = all(window % 2 for window in values["window"])
        own: dict[str, Any] = {name: _joined(x) for name, x in values.items()} | {"radius": None}
        if odd:
            own["radius"] = _joined(tuple(window // 2 for window in values["window"]))
            own["window"] = None
        own |= {"shape": shape, "causal": _joined(causal), "tile": self._tile(shape)}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def _causal_dims(self, dims: int) -> tuple[bool, ...]:
        given = self.causal if isinstance(self.causal, tuple | list) else (self.causal,) * dims
        if len(given) != dims or any(x is not True and x is not False for x in given):
            raise ValueError(
                f"Neighbourhood causal must be a bool, or one for each of {dims} dims, got "
                f"{shortened(repr(self.causal))}; for example causal=True"
            )
        return tuple(given)

    def _tile(self, shape: tuple[int, ...]) -> int | tuple[int, ...] | None:
        """Returns the sizes of tiles, or None if tiles leave the tokens in row-major order."""
        if self.tile is None:
            return None
        tile = of_each_dim("Neighbourhood tile", self.tile, 1, len(shape))
        own = tuple(map(min, tile, shape))
        split = next((d for d, size in enumerate(own) if size > 1), len(own) - 1)
        return None if own[split + 1 :] == shape[split + 1 :] else own

    @property
    def dims(self) -> list[GridDim]:
        """The dims of the grid, slowest first."""
        number = len(self.shape)
        given = self.window
        if self.radius is not None:
            given = tuple(2 * r + 1 for r in of_each_dim("radius", self.radius, 0, number))
        causal = self.causal if isinstance(self.causal, tuple) else (self.causal,) * number
        numbers = (("window", given), ("dilation", self.dilation), ("stride", self.stride))
        each = {name: of_each_dim(name, value, 1, number) for name, value in numbers}
        return _dims(self.shape, causal, **each)

    @property
    def grid(self) -> GridTiles:
        """The order of the tokens; row-major order is that of tiles of one line each."""
        if self.tile is not None:
            return GridTiles(self.shape, self.tile)
        return GridTiles(self.shape, (*(1 for _ in self.shape[1:]), self.shape[-1]))

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
        most, grid = self.own_length - 1, self.grid
        places = (grid.coordinates(x.clamp(0, most)) for x in (p, k))
        for dim, query, key in zip(self.dims, *places, strict=True):
            pairs = pairs & dim.holds(query, key)
        return pairs


def _dims(
    shape: tuple[int, ...],
    causal: tuple[bool, ...],
    window: tuple[int, ...],
    dilation: tuple[int, ...],
    stride: tuple[int, ...],
) -> list[GridDim]:
    return list(map(GridDim, shape, window, dilation, stride, causal))


def _check_dim(dim: GridDim, number: int) -> None:
    """Raises ValueError if a window does not fit into a dim, or a stride is above the window."""
    if not dim.causal and dim.window * dim.dilation > dim.size:
        raise ValueError(
            f"Neighbourhood needs window * dilation tokens in each dim, got {dim.size} in dim "
            f"{number} for a window of {dim.window} and dilation {dim.dilation}; pass a smaller "
            "window or radius, one for each dim if need be"
        )
    if dim.stride > dim.window:
        raise ValueError(
            f"Neighbourhood needs a stride of at most the window, got {dim.stride} in dim {number} "
            f"for a window of {dim.window}; a stride equal to the window makes blocks"
        )


def _joined(values: tuple[Any, ...]) -> Any:
    """Returns the value that all dims share, or the values of all dims."""
    return values[0] if len(set(values)) == 1 else values
