"""Window attention for anemoi's transformer processors and mappers, at the cost of their windows.

    from sparsering.integrations import anemoi
    anemoi.use(model)           # a model of anemoi-models, or one of its processors
    anemoi.use(model, False)    # as before

anemoi's own attention takes flash-attn on a GPU, or sdpa with a mask of all pairs of nodes. Here
the same windows are a `SlidingWindow`, forward and backward, on any device.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..functional import attention
from ..ground.keywords import with_hints
from ..patterns.positions import SlidingWindow

__all__ = ["use"]

Model = TypeVar("Model", bound=nn.Module)


@with_hints()
def use(model: Model, on: bool = True) -> Model:
    """Lets the multi-head attention of an anemoi model run in this library, in place.

    It computes what the module's `attention_implementation` would: the window of `window_size`, or
    all nodes, and the options that sdpa refuses (softcap, ALiBi). Weights, the names of
    `state_dict`, and graph transformers stay as they are.

    Args:
        model: a model with `MultiHeadSelfAttention` or `MultiHeadCrossAttention` modules of
            anemoi-models, such as a `TransformerProcessor`. Where flash-attn is not installed,
            anemoi makes one with attention_implementation="scaled_dot_product_attention".
        on: False gives each module the attention back that it had before.

    Returns: the model.

    Raises: ValueError if the model has no such module, or one with flash-attn's rotary embeddings.

    Cost: a call takes time in proportion to the pairs of the windows, and memory in proportion to
        the nodes. No mask is built.

    Example:
        >>> processor = TransformerProcessor(window_size=512, ...)
        >>> processor = use(processor)
    """
    try:
        from anemoi.models.layers.attention import FlashAttentionWrapper, MultiHeadSelfAttention
    except ImportError as error:
        raise ImportError(
            "sparsering.integrations.anemoi needs anemoi-models 0.19; see docs/adapters.md for how "
            "to install it beside torch 2.11 or newer"
        ) from error
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found: list[Any] = [x for x in modules if isinstance(x, MultiHeadSelfAttention)]
    if not found:
        raise ValueError(
            "expected a model with MultiHeadSelfAttention modules of anemoi-models, got "
            f"{type(model).__name__}, which has none; pass a TransformerProcessor or a "
            "transformer mapper, or a model that has one"
        )
    for module in found:
        if getattr(module.attention, "use_rotary_embeddings", False):
            raise ValueError(
                "expected attention without rotary embeddings, got use_rotary_embeddings=True with "
                'attention_implementation="flash_attention", whose rotations flash-attn computes; '
                "leave this model on flash-attn"
            )
    for module in found:
        own = isinstance(module.attention, NodeAttention)
        if on and not own:
            aligned_ends = isinstance(module.attention, FlashAttentionWrapper)
            chosen = module.attention, module._attention_backend_applied
            module.attention = NodeAttention(chosen, aligned_ends)
            # anemoi would else put the backend of an environment variable here, at the first call.
            module._attention_backend_applied = True
        elif own and not on:
            module.attention, module._attention_backend_applied = module.attention.replaced
    return model


class NodeAttention(nn.Module):
    """Computes the attention of anemoi's `SDPAAttentionWrapper` or `FlashAttentionWrapper`.

    `replaced` is a tuple of what `use(model, False)` puts back, so it is no module of this one.
    Between sets of unlike sizes, flash-attn aligns the last nodes (`aligned_ends`), a mask of sdpa
    the first ones.
    """

    def __init__(self, replaced: tuple[nn.Module, bool], aligned_ends: bool) -> None:
        super().__init__()
        self.replaced, self.aligned_ends = replaced, aligned_ends

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_size: int,
        causal: bool = False,
        window_size: int | tuple[int, int] | None = None,
        dropout_p: float = 0.0,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention of [B, H, N, D] within the window; anemoi never passes `causal`."""
        sides = window_size if isinstance(window_size, tuple) else (window_size, window_size)
        left, right = (None if size == -1 else size for size in sides)  # -1: no bound
        bias = None
        if alibi_slopes is not None:
            radius = max(query.shape[2], key.shape[2])
            distance = torch.arange(-radius, radius + 1, device=query.device).abs()
            bias = -alibi_slopes.to(query.device)[:, None] * distance
        return attention(
            query,
            key,
            value,
            SlidingWindow(left, right),
            q_start=None if self.aligned_ends else 0,
            softcap=softcap or None,  # anemoi's configurations write 0 for none
            distance_bias=bias,
            dropout_p=dropout_p,
        )
