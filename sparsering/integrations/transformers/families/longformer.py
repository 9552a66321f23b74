"""Longformer and LED's encoder: a window, and global tokens with projections of their own.

They do not ask transformers' attention interface. Global tokens come with each call
(`global_attention_mask`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from ....functional import attention
from ....ground.arguments import is_shape_alone
from ....patterns.algebra import Mask, Pattern
from ....patterns.keys import KeyMask
from ....patterns.positions import Full, SlidingWindow
from ..call.once import once
from ..call.shapes import is_true
from .wrapped import Converted, refuse_weights


class LocalAndGlobalAttention(nn.Module):
    """Attention of Longformer and of LED's encoder: a window, and global tokens."""

    def forward(
        self: Any,  # the attributes are those of the original class
        hidden_states: Tensor,
        attention_mask: Tensor,
        is_index_masked: Tensor,
        is_index_global_attn: Tensor,
        is_global_attn: bool,
        output_attentions: bool = False,
    ) -> tuple[Tensor]:
        """Attends over the window and the global tokens. Global tokens see all keys.

        They have projections of their own as queries.

        Args:
            hidden_states: [B, N, E].
            attention_mask: [B, N], 0 for tokens that are not global; one tensor for all layers.
            is_index_masked, is_index_global_attn: bool [B, N], padding and global tokens.
            is_global_attn: whether there are global tokens.
        """
        if output_attentions:
            refuse_weights()
        size = self.one_sided_attn_window_size
        local, everywhere = once(
            attention_mask,
            ("patterns", size),
            lambda: _patterns(size, is_index_masked, is_index_global_attn),
        )
        dropout = self.dropout if self.training else 0.0
        query, key, value = (
            layer(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        out = attention(query, key, value, local, q_start=0, dropout_p=dropout)
        out = out.transpose(1, 2).flatten(2)
        if is_global_attn:
            rows = once(attention_mask, "rows", lambda: _global_rows(is_index_global_attn))
            entry = torch.arange(len(rows), device=rows.device)[:, None]
            query = self.query_global(hidden_states[entry, rows])
            query, key, value = (
                x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                for x in (query, self.key_global(hidden_states), self.value_global(hidden_states))
            )
            of_rows = attention(query, key, value, everywhere, q_start=0, dropout_p=dropout)
            is_global = is_index_global_attn[entry, rows][..., None]
            of_rows = torch.where(is_global, of_rows.transpose(1, 2).flatten(2), out[entry, rows])
            out = out.index_put((entry, rows), of_rows)
        return (out.masked_fill(is_index_masked[..., None], 0.0),)


def _patterns(size: int, masked: Tensor, is_global: Tensor) -> tuple[Pattern, Pattern]:
    """Returns two patterns: for all tokens' queries, and for the global tokens' own projections."""
    local: Mask = SlidingWindow(size, size)
    everywhere: Mask = Full()
    if is_true(masked.any(), False):
        valid = KeyMask(~masked)
        local, everywhere = local & valid, valid
    return (local | KeyMask(is_global) if is_true(is_global.any(), False) else local), everywhere


def _global_rows(is_global: Tensor) -> Tensor:
    """Returns the indices of global tokens in each row [B, most], filled up with other tokens.

    In a call for shapes alone all tokens count as global, because no shape depends on them.
    """
    order = is_global.byte().argsort(dim=1, descending=True, stable=True)
    return order if is_shape_alone(order) else order[:, : int(is_global.sum(1).max())]


CONVERTED: dict[str, Converted] = {
    "LongformerSelfAttention": Converted("Longformer", LocalAndGlobalAttention),
    "LEDEncoderSelfAttention": Converted("LED", LocalAndGlobalAttention),
}
"""By the name of a class of transformers."""
