"""The model: a call's slides become vectors and heat maps, one slide after another."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...ground.arguments import checked_flag, checked_integer, checked_number, shortened
from ...ground.keywords import class_with_hints
from ...ground.out_of_memory import ran_out_of_memory, return_memory
from ...nn.transformer import checked_heads
from ...nn.zero_keys import check_reproducible, checked_padding, zero_sink
from ...patterns.positions import LongNet
from .grid import positions
from .layers import EncoderLayer, Heat, SlideTokens, by_rows
from .slides import checked_slides, checked_tile_size

LEAST_ROWS = 256
"""Fewest rows that a layer computes at a time, where memory runs out."""


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
        self.in_width = in_width = checked_integer("in_width", in_width, 1)
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
        blocks = (EncoderLayer(width, self.num_heads, mlp_width) for _ in range(num_layers))
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
        heat, size = _heat(heat), checked_tile_size(tile_size)
        slides = checked_slides(tiles, coords, lengths, size, self.in_width, self.slide_ngrids)
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
        heat, size = _heat(heat), checked_tile_size(tile_size)
        slides = checked_slides(tiles, coords, lengths, size, self.in_width, self.slide_ngrids)
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
                    return_memory()  # not in the except clause, which still holds tensors
        finally:
            for module, training in modes:
                module.training = training
        return _stacked(found, heat)

    def _encoded(
        self, tiles: Tensor, grid: Tensor, heat: Heat, rows: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Encodes one slide: tiles [n, in_width] in grid cells `grid` [n, 2], `rows` at a time.

        Returns: slide [width], layers [num_layers + 1, width], and heat [num_layers, n] or None.
        """
        weight, length = self.cls_token, 1 + len(tiles)

        def projected(part: slice) -> Tensor:
            x = self.patch_embed["proj"](tiles[part].to(weight.device, weight.dtype))
            place = positions(grid[part], self.slide_ngrids, weight)
            return (x.to(place.dtype) + place).to(weight.dtype)

        x = by_rows(projected, tiles, rows)
        x = torch.cat((weight[0], x))
        x = F.dropout(x, self.dropout, self.training)
        sink = None
        if self.zero_padding == "torchscale":
            check_reproducible(self.pattern, 0, length, False, None)
            sink = zero_sink(self.pattern, self.num_heads, length, x)
        how = SlideTokens(self.pattern, sink, rows, heat, self.dropout)
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
        last = self.norm(by_rows(lambda part: norm(read[part]), read, rows).mean(0))
        return last, torch.stack(pooled), torch.stack(received) if received else None

    def _pooled(self, x: Tensor) -> Tensor:
        """Returns a slide's vector [width] from the class token and tiles, [1 + n, width]."""
        return self.norm(x[1:].mean(0) if self.global_pool else x[0])

    def _shares(self) -> list[Tensor | None]:
        """Draws the factors [2] of stochastic depth for each block's two branches, or None."""
        depth = len(self.layers)
        if not self.training or not self.drop_path:
            return [None] * depth
        rate = torch.linspace(0, self.drop_path, depth)[:, None]
        shares = (torch.rand(depth, 2) >= rate) / (1 - rate)
        return list(shares.to(self.cls_token.device, self.cls_token.dtype))


def _stacked(found: list[tuple[Tensor, Tensor, Tensor | None]], heat: Heat) -> SlideEmbedding:
    """Joins what `_encoded` returned for each slide to one `SlideEmbedding`."""
    slides, layers, maps = zip(*found, strict=True)
    return SlideEmbedding(
        slide=torch.stack(slides),
        layers=torch.stack(layers, 1),
        heat=None if heat is None else list(maps),
    )


def _heat(heat: object) -> Heat:
    """Returns `heat`; ValueError unless it is None, "class" or "all"."""
    if heat not in (None, "class", "all"):
        raise ValueError(
            f'heat must be None, "class" or "all", got {shortened(repr(heat))}; "class" is what '
            "the class token looks at"
        )
    return heat
