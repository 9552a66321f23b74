"""The grid of a slide's tiles: the cell of each tile, its spacing, and the positions of cells."""

import warnings
from functools import cache

import torch
from torch import Tensor

from ...ground.numerics import sum_dtype


def grid_cells(coords: Tensor, tile_size: float, slide_ngrids: int, number: int) -> Tensor:
    """Returns the cell of each tile, int64 [n, 2] on the CPU, from its corner in pixels [n, 2].

    It warns if `tile_size` does not seem to be the spacing of the tiles. `number` is the slide's,
    for messages. Raises ValueError if a cell lies outside the grid.
    """
    pixels = coords.detach().to("cpu")
    size = int(tile_size) if tile_size == int(tile_size) else tile_size
    cells = torch.div(pixels, size, rounding_mode="floor")
    if not bool(((cells >= 0) & (cells < slide_ngrids)).all()):
        raise ValueError(
            f"coords // tile_size must be from 0 to {slide_ngrids - 1}, got {cells.min().item():g} "
            f"to {cells.max().item():g} in slide {number}; pass pixels of level 0, and the size of "
            "a tile there as tile_size"
        )
    if len(cells) >= 8 and bool((cells == cells[0]).all()) and bool((pixels != pixels[0]).any()):
        warnings.warn(
            f"all tiles of slide {number} lie in one cell of {size:g} pixels, as if coords counted "
            "tiles; pass pixels of level 0, or tile_size=1",
            stacklevel=4,
        )
    elif (wrong := _wrong_size(pixels, cells, float(size))) is not None:
        warnings.warn(f"slide {number} {wrong}", stacklevel=4)
    return cells.long()


def _wrong_size(pixels: Tensor, cells: Tensor, size: float) -> str | None:
    """Returns a warning if `tile_size` does not fit the distances between tiles, else None.

    Several extractors begin a new grid in each piece of tissue. So a few tiles may share a cell
    although the size is right, and that is no reason to warn.
    """
    n = len(cells)
    distinct = len((cells[:, 0] * (1 + int(cells[:, 1].max())) + cells[:, 1]).unique())
    spacing = _spacing(pixels)
    if spacing is None or abs(spacing - size) <= 1e-4 * size:
        if distinct >= 0.9 * n:
            return None
        return (
            f"has {n:,} tiles in {distinct:,} cells of tile_size={size:g} pixels, so tiles share "
            "positions; pass each tile once, with its pixels of level 0"
        )
    if distinct < (n if spacing < 0.99 * size else 0.9 * n):
        effect = f"{n:,} tiles share {distinct:,} cells of the encoder's grid"
    elif spacing > 1.01 * size:
        offsets = pixels.double() - pixels[0]
        if _are_multiples(offsets, size) and not _are_multiples(offsets, spacing):
            return None  # for example, only every third tile of a grid was kept
        effect = "their positions in the encoder's grid have gaps"
    else:
        return None
    return (
        f"has tiles {spacing:g} apart, got tile_size={size:g}, so {effect}; pass "
        f"tile_size={spacing:g}, or coords in pixels of level 0"
    )


def _spacing(pixels: Tensor) -> float | None:
    """Returns the distance of neighboring tiles of a regular grid, from their pixels [n, 2].

    It is the most common distance between tiles that follow one another in a row or a column. The
    result is None if there are fewer than 16 such distances, or if more than a tenth of them are
    not multiples of it, because the tiles then do not form a grid.
    """
    distances = []
    for line, along in ((0, 1), (1, 0)):
        order = pixels[:, along].argsort(stable=True)
        order = order[pixels[order, line].argsort(stable=True)]
        step = pixels[order].double().diff(dim=0)
        distances.append(step[(step[:, line] == 0) & (step[:, along] > 0), along])
    found = torch.cat(distances)
    if len(found) < 16:
        return None
    about = (found.log2() * 512).round()  # distances in a bin are equal to 0.14%
    spacing = found[about == about.mode().values].median()
    return spacing.item() if _are_multiples(found, spacing.item()) else None


def _are_multiples(distances: Tensor, unit: float) -> bool:
    """Whether at least 90% of the distances are multiples of `unit`, to within 5% of it."""
    parts = distances / unit
    return bool(((parts - parts.round()).abs() < 0.05).double().mean() >= 0.9)


@cache
def _position_table(slide_ngrids: int, channels: int) -> Tensor:
    """Returns the embedding of each cell along one axis: sines, then cosines, [cells, channels]."""
    with torch.inference_mode(False):
        frequency = 10000.0 ** -(torch.arange(channels // 2, dtype=torch.float64) / (channels / 2))
        angle = torch.arange(slide_ngrids, dtype=torch.float64)[:, None] * frequency
        return torch.cat((angle.sin(), angle.cos()), 1).float()


def positions(grid: Tensor, slide_ngrids: int, like: Tensor) -> Tensor:
    """Returns fixed position embeddings [n, width] of cells `grid` [n, 2].

    The first half of the channels is for the second coordinate, the other half for the first.
    `like` [.., width] gives width and device.
    """
    table = _position_table(slide_ngrids, like.shape[-1] // 2)
    return table[grid.flip(1)].flatten(1).to(like.device, sum_dtype(like))
