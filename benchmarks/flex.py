"""Compiled FlexAttention as a peer: on a pattern's own blocks, or on a causal window."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsering.patterns.algebra import Pattern

BLOCK = 128


def flex_call(inputs: Sequence[Tensor], pattern: Pattern, block: int) -> Callable[[], Tensor]:
    """Compiles FlexAttention on a pattern's own blocks, all of them full."""
    mask = block_mask(inputs[0], pattern, block)
    return _compiled(inputs, mask, kernel_options(block, inputs[0].device.type))


def flex_window_call(inputs: Sequence[Tensor], window: int) -> Callable[[], Tensor]:
    """Compiles FlexAttention on a causal window; its mask costs O(N^2) to build."""
    return _compiled(inputs, window_mask(window, inputs[0].shape[2]))


def block_mask(query: Tensor, pattern: Pattern, block: int) -> Any:
    """Builds FlexAttention's BlockMask of a pattern of whole blocks and one pass."""
    from torch.nn.attention.flex_attention import BlockMask

    heads, length = query.shape[1:3]
    p = pattern.layout(length, num_heads=heads, block_size=block).passes[0]
    count = torch.diff(p.row_ptr)  # [1, H, rows]
    blocks = torch.zeros(*count.shape, -(-length // block), dtype=torch.int32)
    listed = torch.arange(blocks.shape[-1]) < count[..., None]
    used = torch.arange(p.key_tile.shape[-1]) < p.num_entries[..., None]
    blocks[listed] = p.key_tile[used]
    nothing = torch.zeros_like(count)
    mask = BlockMask.from_kv_blocks(
        nothing,
        torch.zeros_like(blocks),
        count,
        blocks,
        BLOCK_SIZE=block,
        seq_lengths=(length, length),
    )
    return mask.to(query.device)


def kernel_options(block: int, device: str) -> dict[str, Any] | None:
    """Returns options for kernel blocks that divide `block`; None if the default ones do."""
    divisor = block & -block
    if device == "cpu" or divisor >= BLOCK:
        return None
    return {"BLOCK_M": divisor, "BLOCK_N": divisor}


def window_mask(window: int, length: int) -> Any:
    """Builds a causal window with FlexAttention's own `create_block_mask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    inside = causal_window(window)
    return create_block_mask(inside, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)


def causal_window(window: int) -> Callable[..., Tensor]:
    """Builds a mask_mod: a query sees itself and the `window` keys before it."""

    def inside(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k >= 0) & (q - k <= window)

    return inside


def _compiled(inputs: Sequence[Tensor], mask: Any, options: Any = None) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # dynamo stops compiling after a number of cases
    compiled = torch.compile(flex_attention)
    query, key, value = inputs
    return lambda: compiled(query, key, value, block_mask=mask, kernel_options=options)
