"""Chronos-2: attention among the series of a group (`group_ids`), at each time.

Its package chronos-forecasting builds a mask of all pairs of series at each time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....functional import attention
from ....ground.arguments import is_shape_alone
from ....patterns.algebra import Pattern
from ....patterns.keys import KeyMask
from ....patterns.positions import Documents, Full
from ..call.shapes import is_true
from .wrapped import Converted, refuse_weights


class Groups(NamedTuple):
    """Numbers the groups of a Chronos-2 batch's series, in place of a mask of all pairs."""

    order: Tensor  # [B] series sorted by group
    place: Tensor  # [B] the place of each series in this order
    pattern: Pattern

    @staticmethod
    def of(group_ids: Tensor, attention_mask: Tensor, _: torch.dtype) -> "Groups":
        """Sorts series by group; attention_mask [B, T] is 0 where a series has no value."""
        ids, order = group_ids.sort(stable=True)
        pattern: Pattern = Full()  # of a single group, as in a call for shapes alone
        if not is_shape_alone(ids):
            pattern = Documents(ids.unique_consecutive(return_counts=True)[1])
        if not is_true((valid := attention_mask > 0).all(), True):
            pattern = pattern & KeyMask(valid[order].T)
        return Groups(order, order.argsort(), pattern)


class GroupAttention(nn.Module):
    """Attention of Chronos-2 among the series of a group, at each time."""

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Groups, output_attentions: bool = False
    ) -> Any:
        """Attends; hidden_states [B, T, E], a series in each batch entry."""
        if output_attentions:
            refuse_weights()
        own, groups = self.self_attention, attention_mask
        states = self.layer_norm(hidden_states[groups.order].transpose(0, 1))
        query, key, value = (
            layer(states).unflatten(-1, (own.n_heads, -1)).transpose(1, 2)
            for layer in (own.q, own.k, own.v)
        )
        dropout = own.dropout if self.training else 0.0
        out = attention(query, key, value, groups.pattern, scale=1.0, q_start=0, dropout_p=dropout)
        out = own.o(out.transpose(1, 2).flatten(2)).transpose(0, 1)[groups.place]
        return _Attended(hidden_states + self.dropout(out), None)


class _Attended(NamedTuple):
    hidden_states: Tensor
    attn_weights: None


CONVERTED: dict[str, Converted] = {"GroupSelfAttention": Converted("Chronos-2", GroupAttention)}
"""By the name of a class of chronos-forecasting."""

MASK_BUILDERS: dict[str, Callable[..., Any]] = {
    "_construct_and_invert_group_time_mask": Groups.of,
}
"""By the name of a method of its encoder, which builds the mask that `GroupAttention` gets."""
