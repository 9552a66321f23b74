"""Files of a slide's tiles: features and coordinates, as extractors such as TRIDENT write them.

    slide = read_slide("slide.h5")
    model.embed(slide.features, slide.coords, tile_size=slide.tile_size)

An .h5 file needs the package h5py. A .pt file has the same fields and needs nothing.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import check_tensor
from ..ground.arguments import shortened
from ..ground.commands import install
from ..ground.files import read_torch_file
from ..ground.keywords import class_with_hints, with_hints

__all__ = ["Slide", "read_slide", "save_slide"]

_SIZES = ("patch_size_level0", "tile_size")
"""Names that files have for a tile's side; TRIDENT writes the first, as an attribute of coords."""
_WAY_OUT = "write it by save_slide"


@class_with_hints
@dataclass(frozen=True, eq=False)
class Slide:
    """Holds the tiles of a slide.

    Attributes:
        features: [n, C], floating point.
        coords: [n, 2], the corner of each tile in pixels of level 0.
        tile_size: side of a tile in pixels of level 0.
    """

    features: Tensor
    coords: Tensor
    tile_size: float = 256


@with_hints()
def save_slide(path: str | os.PathLike[str], slide: Slide) -> None:
    """Writes a slide's features, coords and tile size.

    Args:
        path: a file that ends in .h5, or in .pt.
        slide: what to write.

    Raises: ValueError for other endings, and for what is no tensor; ImportError for .h5 without
        h5py.

    Example:
        >>> save_slide("slide.h5", Slide(features, coords, 512))
    """
    path = _checked_ending(path)
    check_tensor("features", slide.features, "[n, C]")
    check_tensor("coords", slide.coords, "[n, 2]")
    values = {"features": slide.features.cpu(), "coords": slide.coords.cpu()}
    if path.suffix == ".pt":
        torch.save({**values, _SIZES[0]: slide.tile_size}, path)
        return
    with _h5py().File(path, "w") as file:
        for name, x in values.items():
            if x.dtype == torch.bfloat16:  # a dtype that h5 does not know
                x = x.float()
            file.create_dataset(name, data=x.numpy())
        file["coords"].attrs[_SIZES[0]] = slide.tile_size


@with_hints()
def read_slide(path: str | os.PathLike[str]) -> Slide:
    """Reads a slide from a file with the fields "features" and "coords".

    Args:
        path: a file that ends in .h5, or in .pt. Features may be [1, n, C], as some extractors
            write them. The tile size is the attribute "patch_size_level0" of coords, default 256.

    Returns: a `Slide`.

    Raises: FileNotFoundError; ValueError for other fields, shapes, contents or endings; ImportError
        for .h5 without h5py. Code that a file may hold does not run.

    Example:
        >>> slide = read_slide("slide.h5")
    """
    path = _checked_ending(path)
    if not path.is_file():
        raise FileNotFoundError(f"expected a file of a slide's tiles, got no file {path}")
    found = _h5_fields(path) if path.suffix == ".h5" else read_torch_file(path, _WAY_OUT)
    fields = found if isinstance(found, dict) else {}
    x, coords = (fields.get(name) for name in ("features", "coords"))
    if not isinstance(x, Tensor) or not isinstance(coords, Tensor):
        got = shortened(str(list(found))) if isinstance(found, dict) else type(found).__name__
        if "features" in fields and "coords" in fields:
            got = f"{type(x).__name__} and {type(coords).__name__}"
        raise ValueError(
            f"{path} must have features [n, C] and coords [n, 2], got {got}; {_WAY_OUT}"
        )
    x, coords = (t[0] if t.dim() == 3 and len(t) == 1 else t for t in (x, coords))
    if x.dim() != 2 or coords.shape != (len(x), 2):
        raise ValueError(
            f"{path} must have features [n, C] and coords [n, 2], got {list(x.shape)} and "
            f"{list(coords.shape)}; each tile has a row in both"
        )
    if not x.is_floating_point() or coords.dtype == torch.bool or coords.is_complex():
        kinds = (str(t.dtype).removeprefix("torch.") for t in (x, coords))
        raise ValueError(
            f"{path} must have features of floating point and coords of numbers, got "
            f"{' and '.join(kinds)}; convert them, then {_WAY_OUT}"
        )
    sizes = [_size(fields[name], name, path) for name in _SIZES if name in fields]
    return Slide(features=x, coords=coords, tile_size=sizes[0] if sizes else 256)


def _h5_fields(path: Path) -> dict[str, Any]:
    """Reads features and coords of an .h5 file, and the attributes of coords, by name.

    If the file has neither, the result has the names in the file, for an error.
    """
    h5py = _h5py()
    try:
        with h5py.File(path, "r") as file:
            both = {x: file[x] for x in ("features", "coords") if x in file}
            found = {name: _tensor_of(x[:]) if _has_numbers(x) else x for name, x in both.items()}
            found |= dict(both["coords"].attrs) if "coords" in both else {}
            return found if both else dict.fromkeys(file)
    except OSError as error:
        if not os.access(path, os.R_OK):
            raise
        got = shortened(str(error))
        raise ValueError(f"{path} must be a whole HDF5 file, got: {got}; {_WAY_OUT}") from error


def _tensor_of(x: Any) -> Tensor:
    """Converts an array of an .h5 file to a dtype and byte order that torch can compute with."""
    unsigned = x.dtype.kind == "u" and x.dtype.itemsize > 1
    return torch.from_numpy(x.astype("int64" if unsigned else x.dtype.newbyteorder("=")))


def _has_numbers(x: Any) -> bool:
    """Whether an entry of an .h5 file is an array of numbers that torch knows."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", ())
    return dtype is not None and dtype.kind in "buif" and dtype.itemsize <= 8 and bool(shape)


def _size(value: Any, name: str, path: Path) -> float:
    """Returns a tile's side as a float; raises ValueError unless it is a positive number."""
    try:
        size = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several, a text
        size = math.nan
    if not 0 < size < math.inf:
        raise ValueError(
            f"{path} must have a positive number as {name}, a tile's side in pixels of level 0, "
            f"got {shortened(repr(value))}; {_WAY_OUT}"
        )
    return size


def _checked_ending(path: str | os.PathLike[str]) -> Path:
    """Returns the path; raises ValueError unless it ends in .h5 or .pt."""
    path = Path(path)
    if path.suffix not in (".h5", ".pt"):
        raise ValueError(f"path must end in .h5 or .pt, got {path.name}; .pt needs no package")
    return path


def _h5py() -> Any:
    """Imports h5py; raises ImportError with the command that installs it."""
    try:
        import h5py
    except ImportError:
        raise ImportError(f".h5 files need h5py; {install('slides')}, or take .pt files") from None
    return h5py
