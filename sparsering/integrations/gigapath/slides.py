"""Checks the tiles and coordinates of slides, and gives each tile its cell of the grid."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ground.arguments import checked_number, shortened
from .grid import grid_cells


def checked_slides(
    tiles: Any, coords: Any, lengths: Any, tile_size: float, in_width: int, slide_ngrids: int
) -> list[tuple[Tensor, Tensor]]:
    """Returns (tiles [n, in_width], grid cells int64 [n, 2]) of each slide of a call."""
    tiles, coords = _listed("tiles", tiles), _listed("coords", coords)
    if len(tiles) != len(coords) or not tiles:
        raise ValueError(
            f"expected the tiles and coords of at least one slide, got {len(tiles)} tensors "
            f"of tiles and {len(coords)} of coords; pass a tensor of each for every slide"
        )
    if lengths is not None:
        sizes = _lengths(lengths, tiles)
        tiles, coords = _without_padding(tiles, sizes), _without_padding(coords, sizes)
    for number, (x, c) in enumerate(zip(tiles, coords, strict=True)):
        _check_slide(number, x, c, in_width)
    cells = [grid_cells(c, tile_size, slide_ngrids, i) for i, c in enumerate(coords)]
    return list(zip(tiles, cells, strict=True))


def checked_tile_size(tile_size: object) -> float:
    """Returns the side of a tile in pixels, a positive number."""
    size = checked_number("tile_size", tile_size, 0, math.inf)
    if not 0 < size < math.inf:
        raise ValueError(f"tile_size must be above 0, got {size}; pass the pixels of a tile's side")
    return size


def _listed(name: str, given: Any) -> list[Tensor]:
    """Returns one tensor per slide, from a single slide, a list, or a padded batch."""
    if isinstance(given, Tensor) and given.dim() == 2:
        given = given[None]
    is_list = isinstance(given, Sequence) and all(isinstance(x, Tensor) for x in given)
    if not (is_list or (isinstance(given, Tensor) and given.dim() == 3)):
        got, way_out = _what_came(given)
        raise ValueError(
            f"{name} must be a tensor of one slide, a list of them, or a padded batch, got "
            f"{got}; {way_out}"
        )
    return list(given)


def _without_padding(given: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Cuts each slide of a padded batch to its own number of tiles."""
    return [x[:n] for x, n in zip(given, sizes, strict=True)]


def _check_slide(number: int, tiles: Tensor, coords: Tensor, in_width: int) -> None:
    """Raises ValueError unless a slide has tiles [n, in_width], n > 0, and coords [n, 2]."""
    fits = tiles.dim() == 2 and tiles.shape[1] == in_width and tiles.is_floating_point()
    placed = coords.shape == (len(tiles), 2) and coords.dtype != torch.bool
    if not fits or not placed or coords.is_complex():
        raise ValueError(
            f"slide {number} must have floating point tiles [n, {in_width}] and coords "
            f"[n, 2], got {_kind(tiles)} and {_kind(coords)}; "
            + (
                "tiles.float() converts them"
                if not tiles.is_floating_point()
                else "features and their coords have one row for each tile"
            )
        )
    if not len(tiles):
        raise ValueError(f"slide {number} has no tiles; leave it out")


def _lengths(lengths: Any, tiles: list[Tensor]) -> list[int]:
    """Returns each slide's number of tiles in a padded batch; ValueError if they do not fit."""
    sizes = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    right = isinstance(sizes, Sequence) and len(sizes) == len(tiles)
    if not right or not all(
        type(n) is int and 1 <= n <= len(x) for n, x in zip(sizes, tiles, strict=True)
    ):
        raise ValueError(
            f"lengths must be {len(tiles)} integers, from 1 to the padded number of tiles, got "
            f"{shortened(repr(lengths))}; slides of unlike sizes can also be passed as a list"
        )
    return list(sizes)


def _what_came(given: Any) -> tuple[str, str]:
    """Returns (what was passed instead of slides, how to fix it), for an error message."""
    if isinstance(given, Tensor):
        return f"[{', '.join(map(str, given.shape))}]", "put the slides' tensors into a list"
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    other = next((x for x in given if not isinstance(x, Tensor)), None) if listed else given
    kind = type(other).__name__
    if hasattr(other, "__array__"):
        whole = "[torch.from_numpy(x) for x in slides]" if listed else "torch.from_numpy(x)"
        return f"a list with a {kind}" if listed else f"a {kind}", f"{whole} makes tensors"
    return shortened(repr(given)), "put the slides' tensors into a list"


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
