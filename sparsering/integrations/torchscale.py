"""Dilated attention with torchscale's interface, for LongNet, LongViT and Prov-GigaPath.

    from sparsering.integrations import torchscale
    names = torchscale.convert(slide_encoder)     # replaces the attention inside a model
    layer = torchscale.DilatedAttention(args, 768, 16, self_attention=True, subln=True)

It runs on any device, without torchscale, flash-attn, einops or fairscale. torchscale pads segments
with zero keys, which are part of its softmax, so models trained with it expect them.
`zero_padding="torchscale"` adds them as a sink; `"exact"` computes LongNet's formula without them.
Gradients are exact; torchscale leaves out the gradient of the branch weights.
"""

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import attention
from ..ground.arguments import shortened
from ..ground.keywords import class_with_hints, with_hints
from ..ground.numerics import sum_dtype
from ..nn.transformer import checked_heads
from ..nn.zero_keys import check_reproducible, checked_padding, zero_sink
from ..patterns.algebra import Pattern
from ..patterns.keys import KeyMask
from ..patterns.positions import Causal, LongNet

__all__ = ["DilatedAttention", "convert"]


@class_with_hints
class DilatedAttention(nn.Module):
    """LongNet's attention with projections; arguments, results and state_dict match torchscale's.

    Each head sees every rate-th token of a segment, beginning at the token that torchscale chooses
    for this head: `Dilated(..., offset="block")`.

    Args:
        args: an object with the attributes `segment_length` and `dilated_ratio` (sequences of ints,
            or text such as "[1024, 4096]"), and optionally `multiway`, `layernorm_eps`,
            `xpos_rel_pos`, `xpos_scale_base` and `seq_parallel`. Later changes of args are ignored.
        embed_dim: number of channels, a multiple of num_heads.
        num_heads: number of attention heads.
        dropout: probability of dropping an attention weight, in training (torchscale: always).
        self_attention, encoder_decoder_attention: one is True. Only the first has a norm or xPos.
        subln: adds a LayerNorm before the last projection.
        zero_padding: "exact", or "torchscale" for weights that were trained with torchscale.

    Raises: ValueError for invalid arguments; NotImplementedError for `args.seq_parallel` with
        zero_padding="exact".

    Example:
        >>> args = SimpleNamespace(segment_length="[1024, 4096]", dilated_ratio="[1, 4]")
        >>> layer = DilatedAttention(args, 768, 16, self_attention=True, subln=True)
        >>> out, _ = layer(x, x, x)  # [B, N, 768], any N

    Source: LongNet (arXiv 2307.02486), section 3; xPos (arXiv 2212.10554), algorithm 1.
    """

    def __init__(
        self,
        args: Any,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        subln: bool = False,
        *,
        zero_padding: str = "exact",
    ) -> None:
        super().__init__()
        if bool(self_attention) == bool(encoder_decoder_attention):
            raise ValueError(
                "expected one of self_attention and encoder_decoder_attention to be True, got "
                f"{self_attention} and {encoder_decoder_attention}; pass self_attention=True"
            )
        self.embed_dim, self.num_heads = checked_heads(embed_dim, num_heads)
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.pattern = checked_pattern(args, zero_padding)
        self.args, self.zero_padding = args, zero_padding
        # The order of creation is torchscale's, so that a seed gives the same initial weights.
        projections = (_multiway(args, nn.Linear(embed_dim, embed_dim)) for _ in range(4))
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = projections
        eps = getattr(args, "layernorm_eps", 1e-5)
        has_norm = subln and self_attention
        self.inner_attn_ln = _multiway(args, nn.LayerNorm(embed_dim, eps=eps)) if has_norm else None
        has_xpos = getattr(args, "xpos_rel_pos", False) and self_attention
        self.xpos = XPos(self.head_dim, getattr(args, "xpos_scale_base", 512)) if has_xpos else None

    def reset_parameters(self) -> None:
        """Draws new weights for the projections, as torchscale's method of this name does."""
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            gain = 1.0 if name == "out_proj" else 1 / math.sqrt(2)
            proj = getattr(self, name)
            for linear in (proj.A, proj.B) if hasattr(proj, "split_position") else (proj,):
                nn.init.xavier_uniform_(linear.weight, gain=gain)
                if name == "out_proj":
                    nn.init.zeros_(linear.bias)

    def extra_repr(self) -> str:
        """Returns the text that `print` shows for the module."""
        return f'{self.num_heads} heads, {self.pattern}, zero_padding="{self.zero_padding}"'

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: dict[str, Tensor] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Computes dilated attention over the segments of a sequence.

        Args:
            query, key, value: [B, N, E], of equal lengths.
            incremental_state: keys and values [B, H, n, D] of n earlier tokens, as "prev_key" and
                "prev_value"; the call appends the new tokens' keys and values.
            key_padding_mask: [B, n + N], nonzero for keys to mask out. torchscale ignores it;
                with zero_padding="torchscale" it must be all zero.
            attn_mask: None, or the causal triangle [N, N], which has the effect of `is_causal`.
            rel_pos: must be None.
            is_first_step: ignored.
            is_causal: whether queries see no later keys.

        Returns: out [B, N, E] and None.

        Raises: ValueError for invalid shapes, and if torchscale's results cannot be reproduced;
            NotImplementedError for `rel_pos` and for another `attn_mask`.
        """
        _check_shapes(query, key, value, self.embed_dim)
        B, N, E = query.shape
        is_causal = bool(is_causal) if attn_mask is None else _check_triangle(attn_mask, N)
        if rel_pos is not None:
            raise NotImplementedError(
                "rel_pos is not supported, as in torchscale's dilated attention; pass None, or "
                "call sparsering.attention(..., distance_bias=...)"
            )
        state = {} if incremental_state is None else incremental_state
        first = state["prev_key"].shape[2] if "prev_key" in state else 0
        pattern = self.pattern & Causal() if is_causal else self.pattern
        sink = None
        if checked_padding(self.zero_padding) == "torchscale":
            check_reproducible(self.pattern, first, first + N, is_causal, key_padding_mask)
            sink = None if is_causal else zero_sink(self.pattern, self.num_heads, N, query)
        elif key_padding_mask is not None:
            if key_padding_mask.shape != (B, first + N):
                raise ValueError(
                    f"key_padding_mask must be [{B}, {first + N}], a number per key, got "
                    f"{tuple(key_padding_mask.shape)}; include the keys of earlier steps"
                )
            if (padding := key_padding_mask.to(torch.bool)).any():
                pattern = pattern & KeyMask(~padding)
        shape = B, N, self.num_heads, self.head_dim
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (x.view(shape).transpose(1, 2) for x in projected)  # [B, H, N, D]
        if first:
            k, v = torch.cat((state["prev_key"], k), 2), torch.cat((state["prev_value"], v), 2)
        state["prev_key"], state["prev_value"] = k, v
        if self.xpos is not None:
            q = apply_xpos(q, self.xpos, first, first + N)
            k = apply_xpos(k, self.xpos, 0, first + N, downscale=True)
        dropout = float(self.dropout) if self.training else 0.0
        out = attention(q, k, v, pattern, q_start=first, sink=sink, dropout_p=dropout)
        out = out.transpose(1, 2).reshape(B, N, E)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        return self.out_proj(out), None


@with_hints()
def convert(model: nn.Module, *, zero_padding: str = "torchscale") -> list[str]:
    """Converts every torchscale `DilatedAttention` inside a model to this library's, in place.

    The modules stay the same objects, with their parameters and hooks; only their class changes.
    torchscale is not imported: class name and attributes identify its modules. Subclasses with
    another name do not change, because they may compute something else.

    Args:
        model: a model of torchscale, or of a copy of it such as Prov-GigaPath's.
        zero_padding: "torchscale", as pretrained weights expect, or "exact".

    Returns: the names of the modules that were converted now, "" for the model itself.

    Raises: ValueError or NotImplementedError if a module cannot be converted; nothing changes then.

    Example:
        >>> convert(slide_encoder)
        ['encoder.layers.0.self_attn', 'encoder.layers.1.self_attn', ...]
    """
    checked_padding(zero_padding)
    modules = {name: module for name, module in model.named_modules() if _is_torchscales(module)}
    patterns = [checked_pattern(module.args, zero_padding) for module in modules.values()]
    for name, module in modules.items():
        if "forward" in vars(module):
            raise ValueError(
                f"expected {name or 'the model'} to use its class's forward, got a forward set on "
                "the instance, as checkpoint wrappers do; convert before wrapping"
            )
    for module, pattern in zip(modules.values(), patterns, strict=True):
        module.__class__ = DilatedAttention
        module.pattern, module.zero_padding = pattern, zero_padding
    return list(modules)


def _is_torchscales(module: nn.Module) -> bool:
    """Whether a module is torchscale's `DilatedAttention`, by its class name and attributes."""
    if type(module).__name__ != "DilatedAttention" or type(module) is DilatedAttention:
        return False
    needed = "args embed_dim num_heads head_dim dropout q_proj k_proj v_proj out_proj inner_attn_ln"
    return all(hasattr(module, name) for name in [*needed.split(), "xpos"])


def checked_pattern(args: Any, zero_padding: str) -> Pattern:
    """Builds the `LongNet` pattern of torchscale's `args`.

    Raises: ValueError for bad values, and for seq_parallel with `zero_padding="torchscale"`;
        NotImplementedError for seq_parallel with `zero_padding="exact"`.
    """
    checked_padding(zero_padding)
    if getattr(args, "seq_parallel", False):
        kind = ValueError if zero_padding == "torchscale" else NotImplementedError
        raise kind(
            "expected args.seq_parallel=False, got True, which is not supported (and wrong in "
            "torchscale if causal); set it to False, or train a sparsering.models.LongNetEncoder "
            "with attend=ring_attention"
        )
    names = "segment_length", "dilated_ratio"
    lengths, rates = (integers(getattr(args, name, None), name) for name in names)
    return LongNet(lengths, rates, offset="block")


_INTEGER = r"(?:\d+|(?:np\.|numpy\.)?u?int\d{0,2}\(\s*\d+\s*\))"
_LIST = rf"\s*{_INTEGER}(?:\s*,\s*{_INTEGER})*\s*,?\s*"
_INTEGERS = re.compile(rf"\s*(?:\[{_LIST}\]|\({_LIST}\)|{_LIST})\s*")


def integers(sizes: object, name: str) -> tuple[int, ...]:
    """Reads ints from a sequence, an array, or text such as "[1024, 5792]".

    Text is not executed.
    """
    if isinstance(sizes, str) and len(sizes) <= 1000 and _INTEGERS.fullmatch(sizes):
        return tuple(int(x) for x in re.findall(r"(?<![\w.])\d+", sizes))
    sizes = sizes.tolist() if hasattr(sizes, "tolist") else sizes
    if isinstance(sizes, int):
        return (sizes,)
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise ValueError(
            f"args.{name} must be ints, or text of ints between brackets, got "
            f"{shortened(repr(sizes))}; for example [1024, 4096]"
        )
    return tuple(sizes)


class XPos(nn.Module):
    """Buffers of xPos, rotary positions whose scores decay, named as in torchscale."""

    scale: Tensor  # [D / 2], the decay of each pair of channels over `scale_base` positions

    def __init__(self, head_dim: int, scale_base: float = 512) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(
                f"xpos_rel_pos needs an even head dim, got {head_dim}; change num_heads"
            )
        self.head_dim, self.scale_base = head_dim, scale_base
        base = (torch.arange(0, head_dim, 2) + 0.4 * head_dim) / (1.4 * head_dim)
        self.register_buffer("scale", base)


def apply_xpos(
    x: Tensor, xpos: nn.Module, first: int, length: int, *, downscale: bool = False
) -> Tensor:
    """Rotates channels (2i, 2i + 1) of x [B, H, n, D] by position, and scales them as xPos does.

    x begins at position `first` of `length` tokens. Keys are scaled down (`downscale`) by the
    factors by which queries are scaled up.
    """
    scale, dtype = xpos.scale, sum_dtype(x)
    assert isinstance(scale, Tensor)
    position = torch.arange(first, first + x.shape[2], device=x.device, dtype=dtype)[:, None]
    channel = torch.arange(len(scale), device=x.device, dtype=dtype) / len(scale)
    angle = position * 10000.0**-channel  # [n, D / 2]
    exponent = (position + -length // 2) / xpos.scale_base  # type: ignore[operator]
    decay = scale.to(x.device, dtype) ** (-exponent if downscale else exponent)
    cos, sin = angle.cos() * decay, angle.sin() * decay
    even, odd = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class Multiway(nn.Module):
    """Applies module A to the tokens before `split_position`, and module B to those after it.

    With `split_position` -1 A gets all tokens, with 0 B does.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.A = module
        self.B = copy.deepcopy(module)
        self.B.reset_parameters()  # type: ignore[operator]
        self.split_position = -1

    def forward(self, x: Tensor) -> Tensor:
        if self.split_position in (-1, 0):
            return self.B(x) if self.split_position == 0 else self.A(x)
        before, after = x.tensor_split((self.split_position,), dim=1)
        return torch.cat((self.A(before), self.B(after)), dim=1)


def _multiway(args: Any, module: nn.Module) -> nn.Module:
    """Wraps a module in `Multiway` if torchscale's `args` ask for it."""
    return Multiway(module) if getattr(args, "multiway", False) else module


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, embed_dim: int) -> None:
    """Raises ValueError unless query, key and value have one shape [B, N, embed_dim]."""
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if any(len(shape) != 3 or shape[2] != embed_dim for shape in shapes):
        raise ValueError(
            f"query, key and value must be [batch, tokens, {embed_dim}], got {shapes}; transpose "
            "inputs that have tokens first"
        )
    if len(set(shapes)) > 1:
        raise ValueError(
            f"query, key and value must have one shape, got {shapes}; for cross attention use "
            "sparsering.nn or sparsering.attention"
        )


def _check_triangle(attn_mask: Tensor, length: int) -> bool:
    """Returns True if the mask is the causal triangle; NotImplementedError for another one."""
    later = torch.ones(length, length, dtype=torch.bool, device=attn_mask.device).triu(1)
    blocked = attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    triangle = attn_mask.shape == later.shape and torch.equal(blocked, later)
    if not triangle or (attn_mask.dtype != torch.bool and bool(attn_mask[~later].any())):
        raise NotImplementedError(
            "attn_mask must be the causal triangle (-inf above the diagonal, else 0), got another "
            f"of shape {tuple(attn_mask.shape)}; pass None and is_causal, or call "
            "sparsering.attention with a pattern"
        )
    return True
