"""Encoder for long sequences of vectors, such as the tiles of a slide or windows of a genome.

    model = LongNetEncoder(LongNet((1024, 4096), (1, 4)), in_width=1536, width=768, axes=2)
    states = model(tiles, coordinates)             # [B, N, 1536], [B, N, 2] -> [B, 1 + N, 768]
    slide = states[:, 0]                           # state of the class token

It has the transformer blocks of `LongNetLM`, and tokens also attend to later tokens.
"""

import math
import warnings
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checks import check_pattern, check_tensor
from ..functional import attention
from ..ground.arguments import checked_flag, checked_integer, checked_number, is_traced
from ..ground.keywords import class_with_hints
from ..nn.transformer import Attend, Block, checked_sizes, rotary_table
from ..patterns.algebra import Pattern

_PIXELS = 16
"""If all distances between coordinates have at least this common divisor, they look like pixels.
Coordinates in steps of a grid have 1."""


@class_with_hints
class LongNetEncoder(nn.Module):
    """Encodes sequences of vectors with a transformer whose attention follows any pattern.

    Args:
        pattern: pattern over the whole sequence, in which a class token is token 0.
        in_width: channels of the input, which a linear layer maps to width; None: x has `width`
            channels, and there is no such layer.
        width: channels of the residual stream; width / num_heads must be a multiple of 2 * axes.
        num_layers, num_heads: transformer blocks, and attention heads in each.
        mlp_ratio: MLP channels per channel of width.
        class_token: put a learned token before all others.
        axes: 1 for tokens in a line, 2 for tokens on a grid: rotary positions then rotate half of
            the channels by row and half by column.
        drop_path: stochastic depth in training: probability that a batch entry skips the last
            block's attention, and likewise its MLP. It rises linearly from 0 in the first block.
        rope_base: wavelengths of the rotary positions run from 2 pi to about 2 pi rope_base.
        checkpoint_layers: store only each block's input for backward, which runs the block again.

    Weights and dropped paths are drawn from torch's global generator: call `torch.manual_seed`
    before. New blocks are the identity.

    Raises: ValueError if an argument is invalid.

    Example:
        >>> model = LongNetEncoder(LongNet((64, 256), (1, 4)), width=64, num_heads=4)
        >>> states = model(torch.randn(1, 1000, 64))  # [1, 1001, 64]

    Source: LongNet (arXiv 2307.02486), section 3; stochastic depth (arXiv 1603.09382), section 3.
    """

    _saw_coordinates = False

    def __init__(
        self,
        pattern: Pattern,
        *,
        in_width: int | None = None,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 2,
        mlp_ratio: int = 4,
        class_token: bool = True,
        axes: int = 1,
        drop_path: float = 0.0,
        rope_base: float = 10000.0,
        checkpoint_layers: bool = False,
    ) -> None:
        super().__init__()
        check_pattern(pattern)
        axes = checked_integer("axes", axes, 1, 2)
        sizes = width, num_heads, num_layers, mlp_ratio
        width, num_heads, num_layers, mlp_ratio = checked_sizes(*sizes, axes)
        drop_path = checked_number("drop_path", drop_path, 0, 1)
        if drop_path == 1:
            raise ValueError("drop_path must be at least 0 and below 1, got 1.0; 0.0 drops nothing")
        self.pattern = pattern
        self.attend: Attend = partial(attention, pattern=pattern)
        self.num_heads, self.axes = num_heads, axes
        self.rope_base, self.drop_path = checked_number("rope_base", rope_base, 1), drop_path
        self.checkpoint_layers = checked_flag("checkpoint_layers", checkpoint_layers)
        if in_width is not None:
            in_width = checked_integer("in_width", in_width, 1)
        self.project = None if in_width is None else nn.Linear(in_width, width)
        has_token = checked_flag("class_token", class_token)
        self.class_token = nn.Parameter(torch.randn(width)) if has_token else None
        blocks = (Block(width, num_heads, mlp_ratio * width) for _ in range(num_layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width)

    def forward(
        self,
        x: Tensor,
        coordinates: Tensor | None = None,
        *,
        attend: Attend | Sequence[Attend] | None = None,
        positions: Tensor | None = None,
        all_layer_embed: bool = False,
    ) -> Tensor | list[Tensor]:
        """Encodes a batch of sequences of vectors.

        Args:
            x: [B, N, in_width], floating point; the parameters' dtype is what is computed in.
            coordinates: coordinates of the tokens, [N] or [B, N], with axes=2 [N, 2] or [B, N, 2],
                in steps of the grid, of any dtype; a model warns once if all are multiples of 16 or
                more apart, as pixels are. Scores depend on their differences. With one
                axis the default is the index in the sequence. The class token has coordinate 0.
            attend: maps (query, key, value), each [B, H, N, D], to [B, H, N, D]; one function for
                all blocks or one for each; default: attention over the model's pattern.
            positions: int64 [N], if x is a rank's part of a sequence: each token's index in the
                whole sequence. The class token then replaces x and coordinates at position 0.
            all_layer_embed: also return the states before each block.

        Returns: the normalized residual stream: [B, 1 + N, width] with the class token first, or
            [B, N, width] without a class token or with `positions`. With `all_layer_embed`, a list
            of the states before each block and this result.
        """
        x, place = self._with_class_token(x, coordinates, positions)
        cos, sin = self._rotation(place, x.device)
        attend = attend or self.attend
        attends = [attend] * len(self.blocks) if callable(attend) else attend
        x = F.rms_norm(x, x.shape[-1:])
        states = [x]
        for block, attend, shares in zip(self.blocks, attends, self._shares(x), strict=True):
            if self.checkpoint_layers and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, attend, shares, use_reentrant=False)
            else:
                x = block(x, cos, sin, attend, shares)
            if all_layer_embed:
                states.append(x)
        return [self.norm(state) for state in states] if all_layer_embed else self.norm(x)

    def _with_class_token(
        self, x: Tensor, coordinates: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Projects x, and puts the class token before it or, with `positions`, at position 0.

        Returns: tokens [B, n, width], and their coordinates [n, axes] or [B, n, axes].
        """
        width = self.norm.weight.shape[0] if self.project is None else self.project.in_features
        check_tensor("x", x, f"[B, N, {width}]")
        if x.dim() != 3 or x.shape[2] != width or not x.is_floating_point():
            raise ValueError(
                f"x must be floating point [B, N, {width}], got {x.dtype} {tuple(x.shape)}; "
                + _way_out(x, width)
            )
        B, N, _ = x.shape
        for name, given in (("coordinates", coordinates), ("positions", positions)):
            if given is not None:
                check_tensor(name, given)
        if positions is not None and positions.shape != (N,):
            raise ValueError(
                f"positions must be [{N}], one per token of x, got {tuple(positions.shape)}; with "
                "a class token, x also has a row for that token"
            )
        place = self._checked_coordinates(coordinates, B, N, positions)
        if (first := self.class_token) is None:
            return self._projected(x), place
        if positions is None:
            x = self._projected(x)
            return torch.cat((first.expand(B, 1, -1), x), 1), F.pad(place, (0, 0, 1, 0))
        is_first = (positions.to(x.device) == 0)[:, None]
        x = self._projected(torch.where(is_first, 0.0, x))  # NaN in that row would reach gradients
        return torch.where(is_first, first, x), torch.where(is_first, 0.0, place)

    def _projected(self, x: Tensor) -> Tensor:
        """Maps x [B, N, in_width] to states [B, N, width], in the parameters' dtype.

        Stored features are often in half precision, which float32 parameters can hold exactly.
        """
        x = x.to(self.norm.weight.dtype)
        return x if self.project is None else self.project(x).to(self.norm.weight.dtype)

    def _checked_coordinates(
        self, coordinates: Tensor | None, B: int, N: int, positions: Tensor | None
    ) -> Tensor:
        """Returns coordinates in float32, [N, axes] or [B, N, axes]; by default token indices."""
        if coordinates is None and self.axes == 1:
            if positions is None:
                begin = int(self.class_token is not None)
                positions = torch.arange(begin, begin + N)
            return positions.to(self.norm.weight.device, torch.float32)[:, None]
        dims = () if self.axes == 1 else (2,)
        shapes = ((N, *dims), (B, N, *dims))
        if coordinates is None or coordinates.shape not in shapes:
            got = "None" if coordinates is None else str(tuple(coordinates.shape))
            raise ValueError(
                f"coordinates must be {list(shapes[0])} or {list(shapes[1])} for {self.axes} axes, "
                f"got {got}; for image tiles pass pixel coordinates // tile size"
            )
        place = coordinates if dims else coordinates[..., None]
        if not is_traced(place) and not self._saw_coordinates:
            self._saw_coordinates = True  # only once, because reading a GPU's values waits for it
            _warn_of_pixels(place)
        return place.to(self.norm.weight.device, torch.float32)

    def _rotation(self, place: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of coordinates [N, axes] or [B, N, axes], for `Block.forward`.

        They are [N, D / 2] or [B, 1, N, D / 2]. Each axis rotates an equal part of the channels.
        """
        place = place if place.dim() == 2 else place[:, None]  # [B, 1, N, axes]
        sizes = 0, self.norm.weight.shape[0] // self.num_heads // self.axes, self.rope_base, device
        tables = [rotary_table(*sizes, positions) for positions in place.unbind(-1)]
        cos, sin = (torch.cat(axes, -1) for axes in zip(*tables, strict=True))
        return cos, sin

    def _shares(self, x: Tensor) -> list[Tensor | None]:
        """Draws each block's `shares` [2, B] for `Block.forward`; None if nothing is dropped."""
        depth = len(self.blocks)
        if not self.training or not self.drop_path:
            return [None] * depth
        rate = torch.linspace(0, self.drop_path, depth)[:, None, None]
        # Drawn on the CPU, so that ranks with the same seed drop the same outputs.
        return list(((torch.rand(depth, 2, len(x)) >= rate) / (1 - rate)).to(x.device, x.dtype))


def _way_out(x: Tensor, width: int) -> str:
    """Returns advice, for the error, about an x that is not floating point [B, N, width]."""
    if not x.is_floating_point():
        return "x.float() converts it"
    if x.dim() == 2 and x.shape[1] == width:
        return "x[None] is a batch of one sequence"
    if x.dim() != 3:
        return "pad sequences to one length, and stack them by torch.stack"
    return "construct the encoder with in_width=x.shape[2]"


def _warn_of_pixels(place: Tensor) -> None:
    """Warns if coordinates [.., N, axes] look like pixels: distances share a large divisor."""
    if place.shape[-2] < 8 or place.is_meta:  # a few tokens may share a divisor by chance
        return
    apart = (place.detach().to("cpu", torch.float64) - place[..., :1, :].to("cpu")).unique()
    if not bool((apart == apart.round()).all()):
        return
    divisor = math.gcd(*apart.to(torch.int64).tolist())
    if divisor >= _PIXELS:
        warnings.warn(
            f"all distances of the coordinates are multiples of {divisor}, as those of pixels are; "
            f"rotary positions count steps of the grid: pass coordinates // {divisor}",
            stacklevel=2,
        )
