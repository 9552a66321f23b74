"""Prov-GigaPath's slide encoder: its weights, slides of unlike sizes in a call, heat maps of tiles.

    model = gigapath.load("slide_encoder.pth")
    found = model.embed([tiles, others], [coords, other_coords], heat="class")
    found.slide                                    # [2, 768]
    found.heat[0]                                  # [12, n]: what each tile receives in each layer

Slides are computed one after another, so none needs padding, and each has the result that it has
alone. No attention weights are stored, and no CUDA, flash-attn or half precision is needed.
"""

import argparse
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..functional import attention
from ..ground.arguments import checked_flag, checked_integer, checked_number, shortened
from ..ground.files import read_torch_file
from ..ground.keywords import class_with_hints, with_hints
from ..ground.numerics import sum_dtype
from ..ground.out_of_memory import ran_out_of_memory, return_memory
from ..nn.transformer import checked_heads
from ..nn.zero_keys import check_reproducible, checked_padding, zero_sink
from ..patterns.algebra import Pattern
from ..patterns.positions import LongNet
from ..weights import key_mass

__all__ = ["SlideEmbedding", "SlideEncoder", "load", "segment_lengths"]

ARCHITECTURES = {
    "gigapath_slide_enc12l768d": {"width": 768, "num_layers": 12},
    "gigapath_slide_enc24l1024d": {"width": 1024, "num_layers": 24},
    "gigapath_slide_enc12l1536d": {"width": 1536, "num_layers": 12},
}
"""Sizes by the names of Prov-GigaPath; all have 16 heads, and MLPs of 4 times the width."""

FILE = "slide_encoder.pth"
"""Name of the slide encoder in Prov-GigaPath's folder on the Hugging Face Hub."""

LEAST_ROWS = 256
"""Fewest rows that a layer computes at a time, where memory runs out."""

Heat = Literal["class", "all"] | None


@class_with_hints
@dataclass(frozen=True, eq=False)
class SlideEmbedding:
    """Holds the results of B slides.

    Attributes:
        slide: [B, width], after the last norms.
        layers: [num_layers + 1, B, width]: of the states before the first block, and after each.
            They lack the encoder's own last norm, as Prov-GigaPath's `all_layer_embed` does.
        heat: of each slide [num_layers, n], n its tiles, mean over heads; None if not asked for.
    """

    slide: Tensor
    layers: Tensor
    heat: list[Tensor] | None


@dataclass(frozen=True)
class _Pass:
    """Says how a slide's tokens attend, and what else is computed in each layer."""

    pattern: Pattern
    sink: Tensor | None
    """[1, H, N]: the log of the number of zero keys that each row sees; None: there are none."""
    rows: int | None
    """The most rows to compute at a time; None: all of them."""
    heat: Heat
    dropout: float


class _Attention(nn.Module):
    """Projections of dilated attention, under torchscale's names."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.k_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.inner_attn_ln = nn.LayerNorm(width)

    def heads(self, x: Tensor) -> Tensor:
        """Views rows [n, width] as [1, H, n, D]."""
        return x.view(1, len(x), self.num_heads, -1).transpose(1, 2)


class _MLP(nn.Module):
    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, mlp_width), nn.Linear(mlp_width, width)
        self.ffn_layernorm = nn.LayerNorm(mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = F.gelu(x.to(sum_dtype(x))).to(x.dtype)
        return self.fc2(self.ffn_layernorm(x))


class _Layer(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.self_attn = _Attention(width, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.ffn = _MLP(width, mlp_width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(
        self, x: Tensor, how: _Pass, shares: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the new rows of x [N, width], and what each row's key received, [N] or None.

        `shares` [2] scales the outputs of attention and of the MLP, as stochastic depth does.
        """
        first, second = (1.0, 1.0) if shares is None else shares
        states, received = self._attended(x, how, first)

        def mapped(part: slice) -> Tensor:
            out = self.ffn(self.final_layer_norm(states[part]))
            return states[part] + second * F.dropout(out, how.dropout, self.training)

        return _by_rows(mapped, states, how.rows), received

    def _attended(
        self, x: Tensor, how: _Pass, share: Tensor | float
    ) -> tuple[Tensor, Tensor | None]:
        """Returns x + share * attention(norm(x)), and what each row's key received."""
        attn, norm = self.self_attn, self.self_attn_layer_norm
        whole = norm(x) if how.rows is None else None

        def normed(part: slice) -> Tensor:
            return norm(x[part]) if whole is None else whole[part]

        k = attn.heads(_by_rows(lambda part: attn.k_proj(normed(part)), x, how.rows))
        v = attn.heads(_by_rows(lambda part: attn.v_proj(normed(part)), x, how.rows))
        received: list[Tensor] = []

        def attended(part: slice) -> Tensor:
            q = attn.heads(attn.q_proj(normed(part)))
            sink = None if how.sink is None else how.sink[..., part]
            if how.heat == "all" or (how.heat == "class" and part.start == 0):
                out, lse = attention(
                    q, k, v, how.pattern, q_start=part.start, sink=sink, return_lse=True
                )
                if how.heat == "class":  # the first row alone
                    q, lse = q[:, :, :1], lse[:, :, :1]
                mass = key_mass(q, k, how.pattern, lse, q_start=part.start)
                received.append(mass[0].mean(0))
            else:
                out = attention(q, k, v, how.pattern, q_start=part.start, sink=sink)
            out = attn.inner_attn_ln(out.transpose(1, 2).flatten(2)[0])
            return x[part] + share * F.dropout(attn.out_proj(out), how.dropout, self.training)

        states = _by_rows(attended, x, how.rows)
        return states, torch.stack(received).sum(0) if received else None


def _by_rows(function: Callable[[slice], Tensor], x: Tensor, rows: int | None) -> Tensor:
    """Computes a function of slices of rows of x, at most `rows` at a time: [len(x), ...]."""
    if rows is None or rows >= len(x):
        return function(slice(0, len(x)))
    out: Tensor | None = None
    for start in range(0, len(x), rows):
        part = function(slice(start, min(start + rows, len(x))))
        if out is None:
            out = part.new_empty(len(x), *part.shape[1:])
        out[start : start + len(part)] = part
    assert out is not None
    return out


@class_with_hints
class SlideEncoder(nn.Module):
    """Encodes slides as vectors by LongNet's attention over tiles; parameters as Prov-GigaPath's.

    Args:
        in_width: channels of a tile's features.
        width, num_layers, num_heads: channels of the states, blocks, and heads of each block.
        mlp_width: channels inside a block's MLP; default 4 * width.
        segment_lengths, dilation_rates: of LongNet's branches, in tokens (tiles, and the class
            token before them).
        slide_ngrids: a slide's largest number of tiles along each side.
        global_pool: a slide is the mean of its tiles' states; by default the class token's state.
        dropout, drop_path: probabilities, in training, of dropping a channel, and a block's output
            (stochastic depth: it rises linearly from 0 in the first block).
        zero_padding: "torchscale", as the pretrained weights expect: the tokens that fill up
            segments are keys of logit 0 and value 0; or "exact", without them.
        checkpoint_layers: store only each block's input for backward, which runs the block again.

    Weights are drawn from torch's global generator; `load` reads pretrained ones.

    Raises: ValueError if an argument is invalid.

    Example:
        >>> model = SlideEncoder(**ARCHITECTURES["gigapath_slide_enc12l768d"])
        >>> found = model.embed(tiles, coords)  # [n, 1536], [n, 2]
        >>> found.slide  # [1, 768]

    Source: Prov-GigaPath (Nature 630, 2024); LongNet (arXiv 2307.02486), section 3.
    """

    def __init__(
        self,
        *,
        in_width: int = 1536,
        width: int = 768,
        num_layers: int = 12,
        num_heads: int = 16,
        mlp_width: int | None = None,
        segment_lengths: Sequence[int] = (1024, 5792, 32768, 185363, 1048576),
        dilation_rates: Sequence[int] = (1, 2, 4, 8, 16),
        slide_ngrids: int = 1000,
        global_pool: bool = False,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        zero_padding: str = "torchscale",
        checkpoint_layers: bool = False,
    ) -> None:
        super().__init__()
        in_width = checked_integer("in_width", in_width, 1)
        width, self.num_heads = checked_heads(width, num_heads)
        if width % 4:
            raise ValueError(
                f"width must be a multiple of 4, for positions of two axes, got {width}; take 768"
            )
        num_layers = checked_integer("num_layers", num_layers, 1)
        mlp_width = checked_integer("mlp_width", 4 * width if mlp_width is None else mlp_width, 1)
        self.pattern = LongNet(segment_lengths, dilation_rates, offset="block")
        self.slide_ngrids = checked_integer("slide_ngrids", slide_ngrids, 1)
        self.global_pool = checked_flag("global_pool", global_pool)
        self.dropout = checked_number("dropout", dropout, 0, 1)
        self.drop_path = checked_number("drop_path", drop_path, 0, 1)
        if self.drop_path == 1:
            raise ValueError("drop_path must be at least 0 and below 1, got 1.0; 0.0 drops nothing")
        self.zero_padding = checked_padding(zero_padding)
        self.checkpoint_layers = checked_flag("checkpoint_layers", checkpoint_layers)
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(in_width, width)})
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        blocks = (_Layer(width, self.num_heads, mlp_width) for _ in range(num_layers))
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(blocks), "layer_norm": nn.LayerNorm(width)}
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, from the first."""
        found = self.encoder["layers"]
        assert isinstance(found, nn.ModuleList)
        return found

    def forward(
        self,
        tiles: Tensor | Sequence[Tensor],
        coords: Tensor | Sequence[Tensor],
        *,
        lengths: Sequence[int] | Tensor | None = None,
        tile_size: float = 256,
        heat: Heat = None,
    ) -> SlideEmbedding:
        """Encodes slides, with gradients: the call of a training step, `model(tiles, coords)`.

        `embed` is the same without gradients and dropout, and goes on where memory runs out.

        Args:
            tiles: one slide [n, in_width], a list of slides of any sizes, or a padded batch
                [B, N, in_width] with `lengths`. Floating point; it is computed in the dtype of the
                weights, or that of autocast.
            coords: of the same form, [n, 2] each: the corner of each tile in pixels of level 0.
            lengths: tiles of each slide of a padded batch, default N; later tiles are not read.
            tile_size: side of a tile in pixels of level 0.
            heat: also return what each tile receives of the attention of the "class" token, or of
                "all" tokens (exact column sums of the weights, without gradients).

        Returns: `SlideEmbedding`.

        Raises: ValueError for invalid shapes, for a slide without tiles, and for coordinates
            outside the grid of slide_ngrids x slide_ngrids tiles.

        Warns: where a slide's tiles are `tile_size` apart in no direction, but form a grid of
            another spacing, which it names; and where many tiles share a cell.
        """
        heat, slides = _heat(heat), self._slides(tiles, coords, lengths, _size(tile_size))
        found = [self._encoded(x, grid, heat, None) for x, grid in slides]
        return _stacked(found, heat)

    @torch.no_grad()
    def embed(
        self,
        tiles: Tensor | Sequence[Tensor],
        coords: Tensor | Sequence[Tensor],
        *,
        lengths: Sequence[int] | Tensor | None = None,
        tile_size: float = 256,
        heat: Heat = None,
    ) -> SlideEmbedding:
        """Encodes slides without gradients and without dropout, in train mode too.

        To train, call the model itself: `model(tiles, coords)`.

        Where memory runs out, a slide is computed again with half of the rows at a time, down to
        `LEAST_ROWS`; later slides begin with the rows that sufficed. Results stay the same, up to
        rounding.

        Args:
            tiles, coords, lengths, tile_size, heat: as `forward`.

        Returns: `SlideEmbedding`.

        Raises: as `forward`; the error of the allocator, if not even `LEAST_ROWS` rows fit.
        """
        heat, slides = _heat(heat), self._slides(tiles, coords, lengths, _size(tile_size))
        found, rows = [], None
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            for x, grid in slides:
                while True:
                    try:
                        found.append(self._encoded(x, grid, heat, rows))
                        break
                    except (RuntimeError, MemoryError) as error:
                        tried = min(rows or len(x) + 1, len(x) + 1)
                        if not ran_out_of_memory(error) or tried <= LEAST_ROWS:
                            raise
                    rows = max(LEAST_ROWS, tried // 2)
                    return_memory()  # here: the except clause holds the failed call's tensors
        finally:
            for module, training in modes:
                module.training = training
        return _stacked(found, heat)

    def _slides(
        self, tiles: Any, coords: Any, lengths: Any, tile_size: float
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns (tiles [n, in_width], cells of the grid int64 [n, 2]) of each slide."""
        width = self.patch_embed["proj"].in_features
        both = []
        for name, given in (("tiles", tiles), ("coords", coords)):
            if isinstance(given, Tensor) and given.dim() == 2:
                given = given[None]
            listed = isinstance(given, Sequence) and all(isinstance(x, Tensor) for x in given)
            if not (listed or (isinstance(given, Tensor) and given.dim() == 3)):
                got, way_out = _what_came(given)
                raise ValueError(
                    f"{name} must be a tensor of one slide, a list of them, or a padded batch, got "
                    f"{got}; {way_out}"
                )
            both.append(list(given))
        if len(both[0]) != len(both[1]) or not both[0]:
            raise ValueError(
                f"expected the tiles and coords of at least one slide, got {len(both[0])} tensors "
                f"of tiles and {len(both[1])} of coords; pass a tensor of each for every slide"
            )
        if lengths is not None:
            sizes = _lengths(lengths, both[0])
            both = [[x[:n] for x, n in zip(given, sizes, strict=True)] for given in both]
        for number, (x, c) in enumerate(zip(*both, strict=True)):
            fits = x.dim() == 2 and x.shape[1] == width and x.is_floating_point()
            if not fits or c.shape != (len(x), 2) or c.dtype == torch.bool or c.is_complex():
                raise ValueError(
                    f"slide {number} must have floating point tiles [n, {width}] and coords "
                    f"[n, 2], got {_kind(x)} and {_kind(c)}; "
                    + (
                        "tiles.float() converts them"
                        if not x.is_floating_point()
                        else "features and their coords have one row for each tile"
                    )
                )
            if not len(x):
                raise ValueError(f"slide {number} has no tiles; leave it out")
        cells = [_grid(c, tile_size, self.slide_ngrids, i) for i, c in enumerate(both[1])]
        return list(zip(both[0], cells, strict=True))

    def _encoded(
        self, tiles: Tensor, grid: Tensor, heat: Heat, rows: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (slide [width], layers [num_layers + 1, width], heat [num_layers, n])."""
        weight, length = self.cls_token, 1 + len(tiles)

        def projected(part: slice) -> Tensor:
            x = self.patch_embed["proj"](tiles[part].to(weight.device, weight.dtype))
            place = _positions(grid[part], self.slide_ngrids, weight)
            return (x.to(place.dtype) + place).to(weight.dtype)

        x = _by_rows(projected, tiles, rows)
        x = torch.cat((weight[0], x))
        x = F.dropout(x, self.dropout, self.training)
        sink = None
        if self.zero_padding == "torchscale":
            check_reproducible(self.pattern, 0, length, False, None)
            sink = zero_sink(self.pattern, self.num_heads, length, x)
        how = _Pass(self.pattern, sink, rows, heat, self.dropout)
        pooled, received = [self._pooled(x)], []
        for layer, share in zip(self.layers, self._shares(), strict=True):
            if self.checkpoint_layers and torch.is_grad_enabled():
                x, mass = checkpoint(layer, x, how, share, use_reentrant=False)
            else:
                x, mass = layer(x, how, share)
            pooled.append(self._pooled(x))
            if mass is not None:
                received.append(mass[1:])  # without the class token
        norm = self.encoder["layer_norm"]
        read = x[1:] if self.global_pool else x[:1]
        last = self.norm(_by_rows(lambda part: norm(read[part]), read, rows).mean(0))
        return last, torch.stack(pooled), torch.stack(received) if received else None

    def _pooled(self, x: Tensor) -> Tensor:
        """Returns the slide's vector of states [1 + n, width]."""
        return self.norm(x[1:].mean(0) if self.global_pool else x[0])

    def _shares(self) -> list[Tensor | None]:
        """Draws each block's `shares` of stochastic depth; None if nothing is dropped."""
        depth = len(self.layers)
        if not self.training or not self.drop_path:
            return [None] * depth
        rate = torch.linspace(0, self.drop_path, depth)[:, None]
        shares = (torch.rand(depth, 2) >= rate) / (1 - rate)
        return list(shares.to(self.cls_token.device, self.cls_token.dtype))


def _stacked(found: list[tuple[Tensor, Tensor, Tensor | None]], heat: Heat) -> SlideEmbedding:
    slides, layers, maps = zip(*found, strict=True)
    return SlideEmbedding(
        slide=torch.stack(slides),
        layers=torch.stack(layers, 1),
        heat=None if heat is None else list(maps),
    )


def _heat(heat: object) -> Heat:
    if heat not in (None, "class", "all"):
        raise ValueError(
            f'heat must be None, "class" or "all", got {shortened(repr(heat))}; "class" is what '
            "the class token looks at"
        )
    return heat


def _size(tile_size: object) -> float:
    size = checked_number("tile_size", tile_size, 0, math.inf)
    if not 0 < size < math.inf:
        raise ValueError(f"tile_size must be above 0, got {size}; pass the pixels of a tile's side")
    return size


def _lengths(lengths: Any, tiles: list[Tensor]) -> list[int]:
    """Returns the tiles of each slide of a padded batch."""
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
    """Returns what was passed in place of slides' tensors, and a way out."""
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


def _grid(coords: Tensor, tile_size: float, slide_ngrids: int, number: int) -> Tensor:
    """Returns the cells int64 [n, 2], on the CPU, of tiles at these pixels."""
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
    """Says what is wrong with cells [n, 2] of `size` pixels for tiles at these pixels, if anything.

    Several extractors begin a grid of their own in each piece of tissue. So a few tiles may share
    a cell although the size is right, which is nothing to tell.
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
            return None  # every third tile of a grid, say
        effect = "their positions in the encoder's grid have gaps"
    else:
        return None
    return (
        f"has tiles {spacing:g} apart, got tile_size={size:g}, so {effect}; pass "
        f"tile_size={spacing:g}, or coords in pixels of level 0"
    )


def _spacing(pixels: Tensor) -> float | None:
    """Measures how far apart neighbours of a regular grid of tiles are; pixels [n, 2].

    It is the most common distance between tiles that follow one another in a row or a column.
    None if tiles do not form a grid of it: fewer than 16 such distances, or more than a tenth of
    them are no multiples.
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
    """Whether nine tenths of the distances are multiples of a unit, up to a twentieth of it."""
    parts = distances / unit
    return bool(((parts - parts.round()).abs() < 0.05).double().mean() >= 0.9)


@cache
def _position_table(slide_ngrids: int, channels: int) -> Tensor:
    """Returns sines, then cosines, of each cell of an axis, float32 [slide_ngrids, channels]."""
    with torch.inference_mode(False):
        frequency = 10000.0 ** -(torch.arange(channels // 2, dtype=torch.float64) / (channels / 2))
        angle = torch.arange(slide_ngrids, dtype=torch.float64)[:, None] * frequency
        return torch.cat((angle.sin(), angle.cos()), 1).float()


def _positions(grid: Tensor, slide_ngrids: int, like: Tensor) -> Tensor:
    """Returns fixed position embeddings [n, width]: of the second coordinate, then of the first."""
    table = _position_table(slide_ngrids, like.shape[-1] // 2)
    return table[grid.flip(1)].flatten(1).to(like.device, sum_dtype(like))


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
    """Returns the slide encoder's file of a file, a folder, or a folder of the Hub's cache."""
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
    """Returns the tensors of a checkpoint, which may lie under "model" as Prov-GigaPath's do."""
    options = [argparse.Namespace]  # a trainer's options, not code
    found = read_torch_file(file, "download it again", known=options)
    found = found.get("model", found) if isinstance(found, dict) else {}
    return {k: x for k, x in found.items() if isinstance(k, str) and isinstance(x, Tensor)}


def _sizes_of(state: dict[str, Tensor], file: Path) -> dict[str, int]:
    """Reads the arguments of `SlideEncoder` that shapes of tensors tell."""
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
