"""Exact neighbourhood attention for models of diffusers, at the cost of their windows.

    from sparsering.integrations import diffusers
    diffusers.use(decoder)           # LTX2VideoDiffusionDecoderModel, of LTX-2.5
    diffusers.use(decoder, False)    # as before

diffusers' own processors need FlexAttention's compiler, or NATTEN on a GPU. Here the same windows
are a `Neighbourhood`, forward and backward, on any device.
"""

from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..functional import attention
from ..ground.commands import install
from ..ground.keywords import with_hints
from ..patterns.grid import GridTiles
from ..patterns.neighbourhood import Neighbourhood

try:
    from diffusers.models.autoencoders.ltx2_diffusion_decoder import (
        LTX2VideoVaeNeighborhoodAttention,
    )
except ImportError as error:
    raise ImportError(
        "sparsering.integrations.diffusers needs diffusers 0.42 or newer, which has LTX-2's "
        f"diffusion decoder; {install('diffusers')}"
    ) from error

__all__ = ["use"]

Model = TypeVar("Model", bound=nn.Module)


@with_hints()
def use(model: Model, on: bool = True) -> Model:
    """Lets the neighbourhood attention of a diffusers model run in this library, in place.

    Each such module gets a processor that computes the windows of its `kernel_size` exactly:
    softmax(q k^T) v over the tokens of the window, shifted inwards at the borders of the grid. The
    weights, the names of `state_dict`, and all other processors stay as they are.

    Args:
        model: a model with `LTX2VideoVaeNeighborhoodAttention` modules, such as
            `LTX2VideoDiffusionDecoderModel`, before or after it is moved to a device.
        on: False gives each module the processor back that it had before.

    Returns: the model.

    Raises: ValueError if the model has no such module.

    Cost: a call takes time in proportion to the pairs that its tiles visit, and memory in
        proportion to the tokens. No mask is built.

    Example:
        >>> decoder = use(LTX2VideoDiffusionDecoderModel.from_pretrained(path))
        >>> video = decoder.decode(latents).sample

    Source: LTX-2; NATTEN's windows (arXiv 2204.07143).
    """
    found = isinstance(model, nn.Module) and [
        module
        for module in model.modules()
        if isinstance(module, LTX2VideoVaeNeighborhoodAttention)
    ]
    if not found:
        raise ValueError(
            "expected a model with LTX2VideoVaeNeighborhoodAttention modules, got "
            f"{type(model).__name__}, which has none; pass the decoder of LTX-2.5, for example "
            "pipeline.diffusion_decoder"
        )
    for module in found:
        own = isinstance(module.processor, NeighbourhoodProcessor)
        if on and not own:
            module.set_processor(NeighbourhoodProcessor(module.processor))
        elif own and not on:
            module.set_processor(module.processor.replaced)
    return model


class NeighbourhoodProcessor:
    """Computes the attention of a `LTX2VideoVaeNeighborhoodAttention` over a `Neighbourhood`.

    diffusers builds a mask only for its own processor, so `block_mask` is None.
    """

    def __init__(self, replaced: Any) -> None:
        self.replaced = replaced  # the processor that `use(model, False)` puts back

    def __call__(self, attn: Any, hidden_states: Tensor, block_mask: Any = None) -> Tensor:
        """Returns the attention of tokens [B, T, H, W, C], projected, in the same shape."""
        shape = tuple(hidden_states.shape[1:4])
        window = tuple(map(min, attn.kernel_size, shape))  # as diffusers clamps it
        tile = chosen_tile(shape, window)
        pattern = Neighbourhood(shape, window=window, tile=tile)
        query, key, value = (
            x.flatten(1, 3).transpose(1, 2) for x in attn.project_qkv(hidden_states)
        )  # [B, heads, T * H * W, D]; the queries are scaled
        if tile is None:
            out = attention(query, key, value, pattern, scale=1.0)
        else:
            tiles = GridTiles(shape, tile)
            query, key, value = (tiles.arrange(x) for x in (query, key, value))
            out = tiles.restore(attention(query, key, value, pattern, scale=1.0))
        return attn.to_out[0](out.transpose(1, 2).reshape(hidden_states.shape))


@torch.compiler.assume_constant_result
def chosen_tile(shape: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the sides of tiles in which a grid's windows visit fewest pairs; None: row-major."""
    return _tile_of(shape, window)


@lru_cache(maxsize=64)
def _tile_of(shape: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...] | None:
    """Compares row-major order with one kind of tile; runs once for each grid and window.

    Twice a window's radius is a multiple of each side, so that a tile sees whole tiles, and 64 to
    128 tokens fill a block of the kernels.
    """
    sides = [
        [n for n in range(1, min(size, 128) + 1) if (width - 1) % n == 0]
        for size, width in zip(shape, window, strict=True)
    ]
    whole = [tile for tile in product(*sides) if 64 <= prod(tile) <= 128]
    if not whole:
        return None

    def keys_for_each_token(tile: tuple[int, ...]) -> float:
        return prod(n + width - 1 for n, width in zip(tile, window, strict=True)) / prod(tile)

    best = min(whole, key=keys_for_each_token)
    in_tiles, in_rows = (
        Neighbourhood(shape, window=window, tile=tile).layout(prod(shape), num_heads=1).density
        for tile in (best, None)
    )
    # Arranging copies query, key, value and output once, so a small gain does not pay.
    return best if in_tiles < 0.8 * in_rows else None
