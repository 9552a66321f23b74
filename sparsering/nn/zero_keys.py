"""Zero keys of torchscale's dilated attention, which weights that were trained there expect.

torchscale fills the last segment of each branch with zeros. Each of them is a key of logit 0 and
value 0. So z zero keys have the effect of one sink with logit log z.
"""

import torch
from torch import Tensor

from ..ground.arguments import shortened
from ..ground.numerics import sum_dtype
from ..patterns.algebra import Pattern
from ..patterns.positions import Dilated

ZERO_PADDINGS = ("exact", "torchscale")


def checked_padding(zero_padding: str) -> str:
    """Returns `zero_padding`; ValueError unless it is "exact" or "torchscale"."""
    if zero_padding not in ZERO_PADDINGS:
        raise ValueError(
            f'zero_padding must be "exact" or "torchscale", got {shortened(repr(zero_padding))}; '
            '"torchscale" is for weights trained with torchscale'
        )
    return zero_padding


def zero_sink(pattern: Pattern, num_heads: int, length: int, like: Tensor) -> Tensor | None:
    """Returns the zero keys of each query as a sink, log of their number [1, H, N]; None if none.

    torchscale pads the last segment to full length, and each segment to a multiple of the rate. A
    query sees those zero keys of its segment whose index has the same remainder modulo the rate.
    """
    count = torch.zeros(1, num_heads, length, dtype=sum_dtype(like), device=like.device)
    has_zeros = False
    for branch in pattern.branches if length else ():
        segment, start, rate = _last_segment(branch, length)
        for head in range(num_heads):
            residue = branch.offset_of(head, num_heads)  # type: ignore[attr-defined]
            zeros = -(-segment // rate) - len(range(residue, length - start, rate))
            if zeros and start + residue < length:
                count[0, head, start + residue :: rate] += zeros
                has_zeros = True
    return count.log() if has_zeros else None


def _last_segment(branch: Pattern, length: int) -> tuple[int, int, int]:
    """Returns (segment length, start of the last segment, dilation rate) of one LongNet branch."""
    assert isinstance(branch, Dilated)
    segment = min(branch.segment_length, length)
    return segment, (length - 1) // segment * segment, branch.dilation_rate


def check_reproducible(
    pattern: Pattern, first: int, length: int, is_causal: bool, key_padding_mask: Tensor | None
) -> None:
    """Raises ValueError if torchscale's own result is wrong, or depends on later tokens.

    `first` is the number of earlier tokens in an incremental step; `length` counts these too.
    """
    way_out = 'or zero_padding="exact"'
    for branch in pattern.branches if length else ():
        segment, start, rate = _last_segment(branch, length)
        if start and segment % rate:
            raise ValueError(
                "torchscale misplaces rows if a rate does not divide its segment length and there "
                f"are several segments, got rate {rate}, segments of {segment} and {length} "
                f"tokens; pass at most {segment} tokens, {way_out}"
            )
    if key_padding_mask is not None and bool(key_padding_mask.any()):
        raise ValueError(
            'expected no padding in key_padding_mask with zero_padding="torchscale", because '
            f"torchscale ignores it; pass sequences without padding one by one, {way_out}"
        )
    if first and not is_causal:
        raise ValueError(
            'expected is_causal in incremental steps with zero_padding="torchscale", because its '
            f"zero keys change with every token; pass is_causal=True, {way_out}"
        )
