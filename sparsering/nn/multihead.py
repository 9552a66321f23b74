"""`MultiheadAttention`: torch's module, limited to the query-key pairs that a pattern allows.

    attention = MultiheadAttention(512, 8, batch_first=True, pattern=SlidingWindow(255, 255))
    convert(model, pattern)  # replaces torch's modules inside a model, and keeps their parameters

Parameters and initial values equal torch's. Results equal torch's for a mask of the same pairs.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import checks
from ..functional import attention
from ..ground import arguments
from ..ground.keywords import class_with_hints, with_hints
from ..ground.numerics import autocasting, merge_attention, sum_dtype
from ..kernels.dense.formula import dense_softmax
from ..patterns.algebra import Pattern
from ..patterns.blocks import Dense
from ..patterns.keys import KeyMask, KeyPadding
from ..patterns.positions import Causal, Full
from .over_ranks import CallRanks, OverRanks, refusal
from .transformer import checked_heads

MOST_WEIGHTS = 1 << 26


@class_with_hints
class MultiheadAttention(OverRanks, nn.MultiheadAttention):
    """A `torch.nn.MultiheadAttention` whose queries attend only to keys that a pattern allows.

    Args:
        pattern: the pairs that attend, by token index; the first query and the first key both have
            index 0. Default: all pairs.
        scale: factor of the scores, default head_dim ** -0.5.
        embed_dim, num_heads: channels of the query, and number of heads that divide them.
        dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first: as in torch's module.
        device, dtype: of the parameters.
        group, sharding: a process group or a `DeviceMesh` of one axis, or of two (heads, tokens);
            and which rank has which tokens.

    The parameters have torch's names, order and initial values, so a state_dict of one module loads
    strictly into the other.

    Differences: a pair attends only if the masks and the pattern allow it. The output of a query
    that sees no key is the bias of `out_proj`; torch gives NaN or another number, depending on its
    code path. `is_causal` adds `& Causal()`, with a mask or without. No fused path of torch
    bypasses the pattern: `TransformerEncoderLayer` calls this module in eval mode too.

    Over ranks: with `group`, a call takes this rank's tokens, as `shard` cuts them, and returns
    this rank's rows. Keys may be of another length than queries; the fewer of the two then move to
    the owners of equal positions, and outputs of queries back. Gradients of parameters are each
    rank's part; their sum is one process's. Keys, values and dropout are those of `ring_attention`.
    `key_padding_mask` is of the rank's own keys; a byte per key tells the others. `attn_mask`,
    `need_weights=True`, nested tensors, `add_bias_kv`, `add_zero_attn`, and floats other than 0 and
    -inf in masks are refused. A copied or unpickled module needs `module.group` to be set.

    Raises: ValueError or TypeError for invalid sizes, flags, scale, pattern, group or sharding;
        ValueError if embed_dim is no multiple of num_heads; RingMismatchError if ranks differ.

    Cost: the projections, and `attention` at the cost of the pattern, also with bool masks and with
    float masks of 0 and -inf. Other float masks and `need_weights=True` take O(N^2) memory, up to
    2^26 weights. Second derivatives exist with `need_weights=True` alone.

    Example:
        >>> layer = MultiheadAttention(64, 4, batch_first=True, pattern=SlidingWindow(127))
        >>> out, _ = layer(x, x, x, need_weights=False)  # x [B, N, 64]
    """

    pattern: Pattern
    scale: float | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        pattern: Pattern | None = None,
        scale: float | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        sharding: str = "contiguous",
    ) -> None:
        super().__init__(
            *checked_heads(embed_dim, num_heads),
            arguments.checked_number("dropout", dropout, 0, 1),
            arguments.checked_flag("bias", bias),
            arguments.checked_flag("add_bias_kv", add_bias_kv),
            arguments.checked_flag("add_zero_attn", add_zero_attn),
            None if kdim is None else arguments.checked_integer("kdim", kdim, 0),
            None if vdim is None else arguments.checked_integer("vdim", vdim, 0),
            arguments.checked_flag("batch_first", batch_first),
            checks.checked_device(device),
            arguments.checked_dtype("dtype", dtype),
        )
        self._set_pattern(Full() if pattern is None else pattern, scale)
        self.sharding, self.group = sharding, group

    def _set_pattern(self, pattern: Pattern, scale: float | None) -> None:
        """Sets what torch's module does not have, for the constructor and for `convert`."""
        checks.check_pattern(pattern)
        self.pattern = pattern
        self.scale = None if scale is None else checks.checked_scale(scale, torch.empty(1))
        self.register_forward_pre_hook(_called)  # makes torch's fused layers call this module

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, pattern={self.pattern}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Projects the inputs, attends, and projects the result.

        Args:
            query: [B, L, E] if batch_first, else [L, B, E]; or [L, E] without a batch; or a nested
                tensor of [L_b, E].
            key, value: [B, S, kdim] and [B, S, vdim], with the dims in the same order as the query.
            key_padding_mask: [B, S] (or [S]), True for keys that no query sees, or floats that are
                added to the scores.
            attn_mask: [L, S] or [B * num_heads, L, S], True for pairs that do not attend, or floats
                that are added to the scores.
            is_causal: hides keys whose index is above the query's.
            need_weights, average_attn_weights: as in torch's module.

        Returns: the output, shaped as the query, and the weights after dropout: [B, L, S], or [B,
            num_heads, L, S] if not averaged, without B for inputs without a batch. `add_bias_kv`
            and `add_zero_attn` each add a column. Without `need_weights` the weights are None.

        Raises: ValueError for invalid shapes or masks, or more than 2^26 weights.
        """
        nested = all(isinstance(x, Tensor) and x.is_nested for x in (query, key, value))
        ranks = self._ranks(
            query,
            need_weights=need_weights is not False,
            attn_mask=attn_mask is not None,
            NestedTensor=nested,
            add_bias_kv=self.bias_k is not None,
            add_zero_attn=self.add_zero_attn,
        )
        flags = need_weights, average_attn_weights, is_causal, nested
        with ranks or contextlib.nullcontext():
            return self._forward(query, key, value, key_padding_mask, attn_mask, *flags, ranks)

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        need_weights: bool,
        average_attn_weights: bool,
        is_causal: bool,
        nested: bool,
        ranks: CallRanks | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Implements `forward`: pads `nested` inputs; `ranks` share the call if not None."""
        if not nested:
            for name, x in (("query", query), ("key", key), ("value", value)):
                checks.check_tensor(name, x, "[batch, tokens, width]")
        need_weights = arguments.checked_flag("need_weights", need_weights)
        average_attn_weights = arguments.checked_flag("average_attn_weights", average_attn_weights)
        is_causal = arguments.checked_flag("is_causal", is_causal)
        pattern, original, batched = self.pattern, query, nested or query.dim() == 3
        if nested:
            if attn_mask is not None or key_padding_mask is not None or not self.batch_first:
                raise ValueError(
                    "nested tensors need batch_first=True and no masks, because their lengths say "
                    "which tokens exist; to pass masks, pad them with .to_padded_tensor(0.0)"
                )
            pattern = pattern & KeyPadding(tuple(len(x) for x in key.unbind()))
            query, key, value = _each(lambda x: x.to_padded_tensor(0.0), query, key, value)
        elif not batched:
            query, key, value = _each(lambda x: x[None], query, key, value)
            if key_padding_mask is not None:
                checks.check_tensor("key_padding_mask", key_padding_mask, "[keys]")
                key_padding_mask = key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = _each(lambda x: x.transpose(0, 1), query, key, value)
        self._check(query, key, value)
        if is_causal:
            pattern = pattern & Causal()
        sizes = *query.shape[:2], key.shape[1]
        inputs = query, key, value
        masked, bias = self._masked(pattern, sizes, key_padding_mask, attn_mask)
        if ranks is None:
            out, weights = self._attend(inputs, masked, bias, need_weights)
        elif bias is None:
            valid = None if key_padding_mask is None else _allowed(key_padding_mask)
            options = dict(zip(("scale", "dropout_p"), self._scale_and_dropout, strict=True))
            rows = ranks.attend(*self._projected(*inputs), pattern=pattern, valid=valid, **options)
            out, weights = self.out_proj(rows.transpose(1, 2).flatten(2)), None
        else:
            raise refusal("key_padding_mask of floats other than 0 and -inf")
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if nested:
            return _nested_like(original, out), weights
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend(
        self, inputs: Sequence[Tensor], pattern: Pattern, bias: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Projects [B, N, width] to heads, attends, and projects back: (output, weights or None).

        `bias` is added to the scores; it broadcasts to [B, H, L, S]. Returns the output [B, L, E]
        and, with `need_weights`, the weights [B, H, L, S + extra keys].
        """
        q, k, v = self._projected(*inputs)
        scale, dropout = self._scale_and_dropout
        weights = None
        extra: list[tuple[Tensor, Tensor]] = []  # keys and values that every query sees
        if self.bias_k is not None and self.bias_v is not None:
            bias_key, bias_value = (
                x.view(1, self.num_heads, 1, self.head_dim).to(k.dtype).expand(len(k), -1, -1, -1)
                for x in (self.bias_k, self.bias_v)
            )
            extra.append((bias_key, bias_value))
        if need_weights or bias is not None:
            if self.add_zero_attn:
                extra.append((torch.zeros_like(k[:, :, :1]), torch.zeros_like(v[:, :, :1])))
            k, v = (torch.cat(rows, 2) for rows in zip((k, v), *extra, strict=True))
            out, weights = self._attend_densely(
                q, k, v, pattern=pattern, bias=bias, extra_keys=len(extra)
            )
        else:
            sink = q.new_zeros(self.num_heads) if self.add_zero_attn else None
            options: Any = {"scale": scale, "q_start": 0, "sink": sink, "dropout_p": dropout}
            if not extra:
                out = attention(q, k, v, pattern, **options)
            else:
                out, lse = attention(q, k, v, pattern, return_lse=True, **options)
                bias_lse = scale * (q * bias_key).sum(-1).to(lse.dtype)
                bias_out = bias_value.expand_as(out)
                if dropout:
                    bias_out = bias_out * F.dropout(torch.ones_like(bias_lse), dropout)[..., None]
                out, _ = merge_attention((out, bias_out.to(out.dtype)), (lse, bias_lse))
        joined = out.transpose(1, 2).flatten(2)  # [B, L, E]
        return self.out_proj(joined), weights if need_weights else None

    @property
    def _scale_and_dropout(self) -> tuple[float, float]:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return scale, self.dropout if self.training else 0.0

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises ValueError unless query is [B, N, E], key [B, M, kdim] and value [B, M, vdim]."""
        fits = query.dim() == key.dim() == value.dim() == 3 and len(query) == len(key) == len(value)
        widths = tuple(x.shape[-1] if fits else 0 for x in (query, key, value))
        E, kdim, vdim = self.embed_dim, self.kdim, self.vdim
        if not fits or widths != (E, kdim, vdim) or key.shape[1] != value.shape[1]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(
                f"query, key and value must be [batch, tokens, {E}], [batch, keys, {kdim}] and "
                f"[batch, keys, {vdim}], got {shapes} (after "
                f"moving the batch first); this module has batch_first={self.batch_first}"
            )
        own = self.out_proj.weight.dtype
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dtype not in checks.DTYPES or not (x.dtype == own or autocasting(x)):
                raise ValueError(f"{name} must be of {own}, got {x.dtype}; cast with .to()")

    def _attend_densely(
        self, *inputs: Tensor, pattern: Pattern, bias: Tensor | None, extra_keys: int
    ) -> tuple[Tensor, Tensor]:
        """Computes attention over all pairs: (out [B, H, Nq, D], weights [B, H, Nq, Nk]).

        All queries see the last `extra_keys` of the Nk keys. The pattern and the bias, which
        broadcasts to [B, H, Nq, Nk - extra_keys], are about the keys before them.
        """
        query, key, value = inputs
        scale, dropout = self._scale_and_dropout
        shape = *query.shape[:3], key.shape[2]
        if query.shape[:3].numel() * key.shape[2] > MOST_WEIGHTS:
            raise ValueError(
                "need_weights=True, or a float mask of numbers other than 0 and -inf, stores a "
                f"weight for each pair, at most 2^26, got {' x '.join(map(str, shape))}; pass bool "
                "masks and need_weights=False, or call sparsering.attention_weights for visited "
                "blocks alone"
            )
        heads, inner = query.shape[1], key.shape[2] - extra_keys
        counts = pattern.to_dense(query.shape[2], inner, num_heads=heads, q_start=0)
        dtype = sum_dtype(query)
        log_counts = counts.to(query.device, dtype).log()
        visible = F.pad(log_counts > -torch.inf, (0, extra_keys), value=True)
        bias = log_counts if bias is None else log_counts + bias.to(dtype)
        in_use = visible.any(-2)[..., None]  # a key that no query sees may hold NaN
        key, value = torch.where(in_use, key, 0.0), torch.where(in_use, value, 0.0)
        score = scale * (query @ key.mT).to(dtype) + F.pad(bias, (0, extra_keys))
        score = torch.where(visible, score, -torch.inf)
        weight, total, _ = dense_softmax(score)
        weights = F.dropout((weight / total).to(query.dtype), dropout)
        return weights @ value, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Projects query, key and value, [B, N, width] each, to [B, H, N, D]."""
        bias = self.in_proj_bias
        weights: list[Tensor]
        if not self._qkv_same_embed_dim:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        elif query is key and key is value:
            x = F.linear(query, self.in_proj_weight, bias)
            qkv = x.unflatten(-1, (3, self.num_heads, self.head_dim))  # [B, N, 3, H, D]
            return list(qkv.permute(2, 0, 3, 1, 4).unbind())
        else:
            weights = list(self.in_proj_weight.chunk(3))
        biases = [None] * 3 if bias is None else bias.chunk(3)
        projected = (
            F.linear(x, weight, b)
            for x, weight, b in zip((query, key, value), weights, biases, strict=True)
        )
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected]

    def _masked(
        self, pattern: Pattern, sizes: Sequence[int], padding: Tensor | None, mask: Tensor | None
    ) -> tuple[Pattern, Tensor | None]:
        """Adds bool-like masks to the pattern; other float masks become a bias of the scores.

        Args:
            sizes: batch, queries, keys.
            padding: [B, keys], bool or float.
            mask: [queries, keys] or [B * heads, queries, keys], bool or float.

        Returns: the pattern within the masks, and the sum of the other masks or None. A float mask
            of 0 and -inf only hides pairs, unless it is learned.
        """
        (batch, length, keys), heads = sizes, self.num_heads
        biases: list[Tensor] = []
        if padding is not None:
            _check_mask("key_padding_mask", padding, [(batch, keys)])
            if (allowed := _allowed(padding)) is None:
                biases.append(padding[:, None, None])
            else:
                pattern = pattern & KeyMask(allowed)
        if mask is not None:
            _check_mask("attn_mask", mask, [(length, keys), (batch * heads, length, keys)])
            if mask.dim() == 3:
                mask = mask.view(batch, heads, length, keys)
            if (allowed := _allowed(mask)) is None:
                biases.append(mask)
            elif allowed.dim() == 2 and bool((allowed == torch.ones_like(allowed).tril()).all()):
                pattern = pattern & Causal()
            else:
                pattern = pattern & Dense(allowed)
        return pattern, sum(biases[1:], biases[0]) if biases else None


@with_hints()
def convert(module: nn.Module, pattern: Pattern) -> list[str]:
    """Replaces each torch `MultiheadAttention` below a module by one that follows a pattern.

    New modules share the parameters, hooks and modes of the old ones. A module that is registered
    in several places stays one module. Modules of other classes do not change, nor do modules that
    are already converted.

    Returns: the names of the submodules that were replaced.

    Raises: ValueError if `module` is itself a torch `MultiheadAttention`; TypeError if `pattern` is
        not a pattern.

    Example:
        >>> convert(model, SlidingWindow(255, 255) | GlobalTokens(1))
    """
    checks.check_pattern(pattern)
    checks.check_module("module", module)
    if type(module) is nn.MultiheadAttention:
        raise ValueError(
            "convert replaces modules below its argument, got a MultiheadAttention itself; "
            "make sparsering.nn.MultiheadAttention and load its state_dict"
        )
    converted: dict[int, MultiheadAttention] = {}
    names = []
    for parent_name, parent in list(module.named_modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is not nn.MultiheadAttention:
                continue
            if id(child) not in converted:
                converted[id(child)] = _converted(child, pattern)
            setattr(parent, name, converted[id(child)])
            names.append(f"{parent_name}.{name}" if parent_name else name)
    return names


def _converted(module: nn.MultiheadAttention, pattern: Pattern) -> MultiheadAttention:
    """Returns a module of this class with the same parameters and hooks as torch's module."""
    converted = MultiheadAttention.__new__(MultiheadAttention)
    for name, x in vars(module).items():
        vars(converted)[name] = copy.copy(x) if isinstance(x, dict | set) else x
    converted._set_pattern(pattern, None)
    return converted


def _called(module: nn.Module, inputs: Any) -> None:  # do not rename: pickled modules refer to it
    """Does nothing: torch's fused layers skip our forward unless the module has a hook."""


def _nested_like(query: Tensor, out: Tensor) -> Tensor:
    """Converts a padded result [B, N, E] to a nested tensor with the lengths of `query`."""
    rows = [x[: len(entry)] for x, entry in zip(out, query.unbind(), strict=True)]
    if query.layout is torch.jagged:
        offsets = cast(Any, query).offsets()
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)
    return torch.nested.as_nested_tensor(rows)


def _each(change: Callable[[Tensor], Tensor], *tensors: Tensor) -> list[Tensor]:
    """Applies `change` to each tensor, but once only if query, key and value are one tensor."""
    changed = {id(x): change(x) for x in tensors}
    return [changed[id(x)] for x in tensors]


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """Raises ValueError unless a mask has one of the shapes and is bool or floating point."""
    checks.check_tensor(name, mask, "of bools, or floats that are added to scores")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{name} must be bool, True where a pair does not attend, or floats that are added to "
            f"scores, got {mask.dtype}; .bool() converts it"
        )
    checks.refuse_meta(mask, named=name)
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"{name} must have shape {' or '.join(map(str, shapes))} here, got "
            f"{arguments.shortened(str(tuple(mask.shape)))}; expand it"
        )


def _allowed(mask: Tensor) -> Tensor | None:
    """Returns a mask as bool, True for pairs that attend; None if it adds numbers to scores."""
    if mask.dtype == torch.bool:
        return ~mask
    blocked = mask == -torch.inf
    learns = mask.requires_grad and torch.is_grad_enabled()
    return None if learns or not bool((blocked | (mask == 0)).all()) else ~blocked
