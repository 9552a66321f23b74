"""`pool_blocks`: pools keys or values into means of windows of tokens."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_tensor
from ..ground.arguments import checked_integer
from ..ground.keywords import with_hints
from ..ground.numerics import sum_dtype
from .bounds import Bounds, checked_valid


@with_hints()
def pool_blocks(
    x: Tensor,
    size: int,
    stride: int | None = None,
    *,
    first: Tensor | None = None,
    stop: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Averages windows of tokens; window c covers tokens `c * stride` to `c * stride + size - 1`.

    The last window averages the tokens that remain. If `stride > size` it may lie past the last
    token and is then 0. For causal attention to pooled keys, use `PooledCausal(size, stride)`.

    Args:
        x: [B, H, N, D].
        size: tokens of a window.
        stride: tokens from one window to the next, default `size`.
        first, stop: int64 [B or 1, N]; a window that begins at token n averages only its tokens m
            with first[n] <= m < stop[n], such as those of its document (`DocumentBlocks.bounds`).
            Default: all.
        valid: bool [N] or [B, N], the tokens that exist, such as those that are no padding. The
            others are in no mean and may be anything. A window without tokens is 0. Default: all.

    Returns: [B, H, Np, D] in x's dtype, Np = ceil(max(0, N - size) / stride) + 1; differentiable.

    Raises: ValueError if an argument is invalid.

    Cost: O(N D), twice that if windows overlap; sums are float32 (float64 for float64 inputs). With
        `first`, `stop` or `valid`, O(N D size / stride) time and memory.

    Example:
        >>> coarse = [pool_blocks(x, 32, 16) for x in (key, value)]
        >>> out = attention(query, *coarse, PooledCausal(32, 16), q_start=0)

    Source: NSA (arXiv 2502.11089), equation 7, with a mean in place of the MLP.
    """
    check_tensor("x", x, "[batch, heads, tokens, head dim]")
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(
            "x must be floating point [batch, heads, tokens, head dim], got "
            f"{x.dtype} {tuple(x.shape)}; add a missing dim with unsqueeze()"
        )
    size = checked_integer("size", size, 1)
    stride = size if stride is None else checked_integer("stride", stride, 1)
    length = x.shape[2]
    count = -(-max(0, length - size) // stride) + 1
    bounds = Bounds.of(first, stop, len(x), length, length)
    if valid is not None:
        valid = checked_valid(valid, len(x), x)
    if valid is not None or bounds is not None:
        inside = _inside(valid, bounds, length, count, size, stride, x.device)
        # The cast comes first, so that gradients of overlapping windows are summed in it too.
        whole = pad(x.to(sum_dtype(x)), (0, 0, 0, (count - 1) * stride + size - length))
        windows = whole.unfold(2, size, stride)
        total = torch.where(inside[:, None, :, None], windows, 0.0).sum(4)
        return (total / inside.sum(2).clamp(min=1)[:, None, :, None]).to(x.dtype)
    piece = math.gcd(size, stride)  # every window consists of whole pieces of so many tokens
    places = (count - 1) * stride + size
    whole = pad(x, (0, 0, 0, places - length)).unflatten(2, (places // piece, piece))
    total = whole.sum(3, dtype=sum_dtype(x))  # [B, H, pieces, D]
    if size > piece:
        total = total.unfold(2, size // piece, stride // piece).sum(-1)
    else:
        total = total[:, :, :: stride // piece]
    first = torch.arange(count, device=x.device) * stride
    return (total / (length - first).clamp(1, size)[:, None]).to(x.dtype)


def _inside(
    valid: Tensor | None,
    bounds: Bounds | None,
    length: int,
    count: int,
    size: int,
    stride: int,
    device: torch.device,
) -> Tensor:
    """Returns which tokens count in the mean of each window: bool [B or 1, windows, size]."""
    first = torch.arange(count, device=device)[:, None] * stride
    token = first + torch.arange(size, device=device)
    inside = (token < length)[None]
    missing = (count - 1) * stride + size - length
    if valid is not None:
        inside = inside & pad(valid, (0, missing)).unfold(1, size, stride)
    if bounds is not None:
        low, high = (pad(x, (0, missing)).unfold(1, size, stride)[..., :1] for x in bounds)
        inside = inside & (token >= low) & (token < high)
    return inside
