"""Weights of Prov-GigaPath's slide encoder: its sizes by name, and a checkpoint's tensors."""

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ground.arguments import checked_integer
from ...ground.files import read_torch_file
from ...ground.keywords import with_hints
from .encoder import SlideEncoder

ARCHITECTURES = {
    "gigapath_slide_enc12l768d": {"width": 768, "num_layers": 12},
    "gigapath_slide_enc24l1024d": {"width": 1024, "num_layers": 24},
    "gigapath_slide_enc12l1536d": {"width": 1536, "num_layers": 12},
}
"""Sizes by the names of Prov-GigaPath; all have 16 heads, and MLPs of 4 times the width."""

FILE = "slide_encoder.pth"
"""Name of the slide encoder in Prov-GigaPath's folder on the Hugging Face Hub."""


@with_hints()
def segment_lengths(largest_slide: int = 262144, tile_size: int = 256) -> tuple[int, ...]:
    """Computes Prov-GigaPath's five segment lengths for slides up to a size.

    Args:
        largest_slide: pixels along the longer side.
        tile_size: pixels along a tile's side.

    Returns: lengths from 1024 up to the power of 2 in the number of tiles, evenly in log2.

    Raises: ValueError for slides of fewer than 1024 tiles.

    Example:
        >>> segment_lengths()
        (1024, 5792, 32768, 185363, 1048576)
    """
    largest_slide = checked_integer("largest_slide", largest_slide, 1)
    tile_size = checked_integer("tile_size", tile_size, 1)
    most = (largest_slide // tile_size) ** 2
    if most < 1024:
        raise ValueError(
            f"expected room for 1024 tiles or more, got {most}; pass a largest_slide of at least "
            f"{32 * tile_size} pixels"
        )
    top = most.bit_length() - 1
    return tuple(int(2 ** (10 + i * (top - 10) / 4)) for i in range(5))


@with_hints()
def load(
    path: str | os.PathLike[str],
    *,
    num_heads: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **options: Any,
) -> SlideEncoder:
    """Loads a slide encoder from a checkpoint with Prov-GigaPath's names.

    Sizes are those of the tensors. Pickled objects other than tensors are not loaded.

    Args:
        path: a file such as slide_encoder.pth, or a folder with it, such as a download of
            prov-gigapath/prov-gigapath, also in the Hub's own cache.
        num_heads: attention heads, which the file does not tell; Prov-GigaPath's have 16.
        dtype, device: of the parameters.
        options: further arguments of `SlideEncoder`, such as global_pool=True.

    Returns: a `SlideEncoder` in eval mode.

    Raises: FileNotFoundError; ValueError if tensors are missing or have other shapes. It warns of
        tensors that the encoder does not have.

    Example:
        >>> model = load("slide_encoder.pth", dtype=torch.bfloat16, device="cuda")
    """
    file = _file_of(Path(path))
    state = _state_of(file)
    named = [name for name in state if name.split(".")[-1] == "cls_token"]
    if len(named) != 1:
        raise ValueError(
            f"{file} must have one tensor named cls_token, got {len(named)} among {len(state)} "
            "tensors; pass the slide encoder's file, not the tile encoder's"
        )
    prefix = named[0].removesuffix("cls_token")
    own = {x.removeprefix(prefix): state[x] for x in state if x.startswith(prefix)}
    sizes: dict[str, Any] = _sizes_of(own, file)
    with torch.device("meta"):
        model = SlideEncoder(**sizes, num_heads=num_heads, **options)
    expected = model.state_dict()
    missing = [name for name in expected if name not in own]
    wrong = [name for name in expected if name in own and own[name].shape != expected[name].shape]
    if missing or wrong:
        name = (missing or wrong)[0]
        got = f"{len(missing)} missing" if missing else f"{list(own[name].shape)}"
        raise ValueError(
            f"{file} must have {name} {list(expected[name].shape)}, got {got}; pass a checkpoint "
            "of Prov-GigaPath's slide encoder"
        )
    unknown = [x for x in state if x.removeprefix(prefix) not in (*expected, "pos_embed")]
    if unknown:
        warnings.warn(
            f"{file} has {len(unknown)} tensors that the slide encoder does not have, such as "
            f"{unknown[0]}; they are left out",
            stacklevel=2,
        )
    model.load_state_dict({name: own[name] for name in expected}, assign=True)
    return model.to(device, dtype).requires_grad_(True).eval()


def _file_of(path: Path) -> Path:
    """Returns the path of the weights, given it or a folder that has them.

    In a folder of the Hub's cache it takes the newest snapshot.
    """
    if path.is_dir():
        files = [path / FILE, *path.glob(f"snapshots/*/{FILE}")]
        found = [x for x in files if x.is_file()]
        path = max(found, key=lambda x: x.stat().st_mtime) if found else path / FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"expected the slide encoder's weights, got no file {path}; after access is granted, "
            f"`hf download prov-gigapath/prov-gigapath {FILE}` fetches them"
        )
    return path


def _state_of(file: Path) -> dict[str, Tensor]:
    """Reads a checkpoint's tensors by name; those of Prov-GigaPath are under the key "model"."""
    options = [argparse.Namespace]  # a trainer's options, not code
    found = read_torch_file(file, "download it again", known=options)
    found = found.get("model", found) if isinstance(found, dict) else {}
    return {k: x for k, x in found.items() if isinstance(k, str) and isinstance(x, Tensor)}


def _sizes_of(state: dict[str, Tensor], file: Path) -> dict[str, int]:
    """Reads arguments of `SlideEncoder`, such as its width, from the shapes in a checkpoint."""
    layers = [x.split(".") for x in state if x.startswith("encoder.layers.")]
    first = "encoder.layers.0.ffn.fc1.weight", "patch_embed.proj.weight"
    missing = next((x for x in first if x not in state or state[x].dim() != 2), None)
    if missing is not None:
        raise ValueError(
            f"{file} must have a matrix {missing}, got none; pass a checkpoint of Prov-GigaPath's "
            "slide encoder"
        )
    return {
        "in_width": state["patch_embed.proj.weight"].shape[1],
        "width": state["patch_embed.proj.weight"].shape[0],
        "num_layers": 1 + max(int(x[2]) for x in layers if x[2].isdecimal()),
        "mlp_width": state["encoder.layers.0.ffn.fc1.weight"].shape[0],
    }
