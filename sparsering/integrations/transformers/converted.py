"""`convert`: sparse attention for families that do not ask transformers' attention interface."""

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ...checks import check_module
from ...functional import attention
from ...ground.arguments import is_shape_alone
from ...ground.keywords import with_hints
from ...patterns.algebra import Mask, Pattern
from ...patterns.keys import KeyMask
from ...patterns.positions import Documents, Full, SlidingWindow
from .once import once
from .shapes import is_true


@with_hints()
def convert(model: Any) -> list[str]:
    """Lets Longformer, LED's encoder or Chronos-2 attend at the cost of their patterns, in place.

    Results and gradients are the originals'. Modules stay the same objects, with their parameters
    and hooks; only their class changes. Longformer's and LED's global tokens come with each call as
    ever (`global_attention_mask`), and so do Chronos-2's groups (`group_ids`). Rows of padding, and
    series at times without values, may differ. In training, other attention weights are dropped.

    Args:
        model: a model of transformers, or a `Chronos2Model` (package chronos-forecasting).

    Returns: names of the modules that were converted now; [] if all were before.

    Raises: ValueError for a model of another family.

    Example:
        >>> convert(AutoModel.from_pretrained("allenai/longformer-base-4096"))
    """
    check_module("model", model)
    modules = dict(model.named_modules())
    found = {name: cls for name, x in modules.items() if (cls := _OURS.get(type(x).__name__))}
    if not found and not any(isinstance(x, tuple(_OURS.values())) for x in modules.values()):
        raise ValueError(
            "expected a Longformer, an LED or a Chronos-2 model, got "
            f"{type(model).__name__}; most other families take hf.register() or hf.apply"
        )
    for name, cls in found.items():
        modules[name].__class__ = cls
    for module in modules.values():
        if hasattr(module, "_construct_and_invert_group_time_mask"):
            module._construct_and_invert_group_time_mask = Groups.of
    return list(found)


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
        """Attends; global tokens have projections of their own, and see all keys.

        Args:
            hidden_states: [B, N, E].
            attention_mask: [B, N], 0 for tokens that are not global; one tensor for all layers.
            is_index_masked, is_index_global_attn: bool [B, N], padding and global tokens.
            is_global_attn: whether there are global tokens.
        """
        if output_attentions:
            _refuse_weights()
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
    """Returns the patterns of all tokens and of global ones."""
    local: Mask = SlidingWindow(size, size)
    everywhere: Mask = Full()
    if is_true(masked.any(), False):
        valid = KeyMask(~masked)
        local, everywhere = local & valid, valid
    return (local | KeyMask(is_global) if is_true(is_global.any(), False) else local), everywhere


def _global_rows(is_global: Tensor) -> Tensor:
    """Returns places [B, most] of global tokens; a row with fewer has others at its end.

    In a call for shapes alone all tokens count as global, because no shape depends on them.
    """
    order = is_global.byte().argsort(dim=1, descending=True, stable=True)
    return order if is_shape_alone(order) else order[:, : int(is_global.sum(1).max())]


class Groups(NamedTuple):
    """Chronos-2's groups of series, in place of a mask of all pairs of series at each time."""

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
            _refuse_weights()
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


_OURS: dict[str, type[nn.Module]] = {
    "LongformerSelfAttention": LocalAndGlobalAttention,
    "LEDEncoderSelfAttention": LocalAndGlobalAttention,
    "GroupSelfAttention": GroupAttention,
}


def _refuse_weights() -> NoReturn:
    raise NotImplementedError(
        "a converted model gives no attention weights, got output_attentions=True; leave it out"
    )
