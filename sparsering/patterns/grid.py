"""Tokens of a grid in the order of tiles, and boxes of coordinates around ranges of positions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ground.arguments import MOST_TOKENS, checked_integer, checked_integers, shortened
from ..ground.keywords import class_with_hints


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Returns the tokens of each dim of a grid; raises ValueError unless there is a token."""
    sizes = checked_integers(f"{name} shape", shape, 1)
    if not sizes or math.prod(sizes) > MOST_TOKENS:
        raise ValueError(
            f"{name} shape must have the tokens of each dim of a grid, got "
            f"{shortened(repr(sizes))}; for example (64, 64)"
        )
    return sizes


def of_each_dim(label: str, value: Any, least: int, dims: int) -> tuple[int, ...]:
    """Returns a number for each dim; repeats a single one. ValueError if the count differs."""
    if not isinstance(value, Sequence) and getattr(value, "ndim", 0) == 0:
        return (checked_integer(label, value, least),) * dims
    numbers = checked_integers(label, value, least)
    if len(numbers) != dims:
        raise ValueError(
            f"{label} must be an int, or one for each of {dims} dims, got {len(numbers)}: "
            f"{shortened(repr(numbers))}"
        )
    return numbers


@class_with_hints
@dataclass(frozen=True)
class GridTiles:
    """The tokens of a grid tile after tile, so that neighbours in space are near in the sequence.

    Tiles follow one another in row-major order, and so do the tokens inside a tile. Tiles at the
    upper ends of the grid are cut to the grid; nothing is padded. In row-major order 64 neighbours
    of a line see many more keys than 64 tokens of a cube, so a `Neighbourhood` over tiles of 3 dims
    visits a half or less.

    Args:
        shape: tokens in each dim, from the slowest to the fastest.
        tile: tokens of a tile in each dim; an int, or one for each dim. A larger one than the
            grid's dim is as large as the dim.

    Raises: ValueError for sizes below 1, another number of dims, or a tensor with other tokens.

    Cost: `order` and `inverse` take O(tokens) time and memory, once.

    Example:
        >>> tiles = GridTiles((16, 64, 64), 4)
        >>> x = tiles.arrange(x)  # [B, H, N, D], before the first layer
        >>> out = attention(x, x, x, Neighbourhood((16, 64, 64), 3, tile=4))
        >>> out = tiles.restore(out)  # after the last one

    Source: NATTEN's token permutation (arXiv 2504.16922); sliding tile attention (2502.04507).
    """

    shape: tuple[int, ...]
    tile: int | tuple[int, ...]
    _orders: dict[str, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        shape = checked_shape("GridTiles", self.shape)
        sizes = of_each_dim("GridTiles tile", self.tile, 1, len(shape))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "tile", tuple(map(min, sizes, shape)))

    @property
    def tokens(self) -> int:
        """Number of tokens of the grid."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of a whole tile in each dim."""
        return self.tile  # type: ignore[return-value]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of tiles in each dim."""
        return tuple(-(-n // t) for n, t in zip(self.shape, self.sizes, strict=True))

    @property
    def order(self) -> Tensor:
        """The row-major place of each token in the order of tiles, int64 [N], on the CPU."""
        if "order" not in self._orders:
            place = torch.zeros((), dtype=torch.int64)
            for n, x in zip(self.shape, self.coordinates(torch.arange(self.tokens)), strict=True):
                place = place * n + x
            self._orders["order"] = place
        return self._orders["order"]

    @property
    def inverse(self) -> Tensor:
        """The place in the order of tiles of each token in row-major order, int64 [N]."""
        if "inverse" not in self._orders:
            self._orders["inverse"] = torch.empty_like(self.order).scatter_(
                0, self.order, torch.arange(self.tokens)
            )
        return self._orders["inverse"]

    def arrange(self, x: Tensor, dim: int = 2) -> Tensor:
        """Returns x with the N tokens of `dim`, in row-major order, in the order of tiles."""
        return self._gathered(x, dim, self.order)

    def restore(self, x: Tensor, dim: int = 2) -> Tensor:
        """Returns x with the N tokens of `dim`, in the order of tiles, in row-major order."""
        return self._gathered(x, dim, self.inverse)

    def _gathered(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.tokens:
            raise ValueError(
                f"expected {self.tokens} tokens in dim {dim}, one for each of the grid "
                f"{self.shape}, got a tensor {tuple(x.shape)}; pass dim= of its tokens"
            )
        return x.index_select(dim, index.to(x.device))

    def coordinates(self, position: Tensor) -> list[Tensor]:
        """Returns the coordinates in each dim of positions in this order, which lie in the grid."""
        corner, inside, _ = self._digits(position)
        return [a + b for a, b in zip(corner, inside, strict=True)]

    def position(self, coordinates: Sequence[Tensor]) -> Tensor:
        """Returns the positions of coordinates: the inverse of `coordinates`."""
        begin, within, held = (torch.zeros_like(coordinates[0]) for _ in range(3))
        held += 1  # tokens of a tile in the dims so far
        rest = self.tokens
        for n, size, x in zip(self.shape, self.sizes, coordinates, strict=True):
            rest //= n
            low = x // size * size
            begin = begin + held * low * rest
            height = (n - low).clamp(max=size)
            within = within * height + x - low
            held = held * height
        return begin + within

    def boxes(self, first: Tensor, last: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns each dim's least and largest coordinate of the positions from first to last."""
        corner, low, _ = self._digits(first)
        corner_of_last, high, sizes = self._digits(last)
        # Positions are numbers whose digits are the tile in each dim, then the place inside it. The
        # digits before the first one that differs are fixed; those after it take every value.
        equal = torch.ones_like(first, dtype=torch.bool)
        tiles = []
        for n, a, b in zip(self.shape, corner, corner_of_last, strict=True):
            tiles.append((torch.where(equal, a, 0), torch.where(equal, b, n - 1)))
            equal = equal & (a == b)
        found = []
        for n, size, (begin, end), a, b, height in zip(
            self.shape, self.sizes, tiles, low, high, sizes, strict=True
        ):
            in_tile = torch.where(begin == end, height - 1, size - 1)
            least = begin + torch.where(equal, a, 0)
            found.append((least, (end + torch.where(equal, b, in_tile)).clamp(max=n - 1)))
            equal = equal & (a == b)
        return found

    def _digits(self, position: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns for each dim the tile's first coordinate, the place in the tile, its height."""
        held, rest = torch.ones_like(position), self.tokens
        corners: list[Tensor] = []
        heights: list[Tensor] = []
        for n, size in zip(self.shape, self.sizes, strict=True):
            rest //= n
            slab = held * (size * rest)
            number = position // slab
            position = position - number * slab
            corners.append(number * size)
            heights.append((n - corners[-1]).clamp(max=size))
            held = held * heights[-1]
        inside = []
        for height in reversed(heights):
            inside.append(position % height)
            position = position // height
        return corners, inside[::-1], heights
