"""The public functions: `attention`, `attention_weights`, `explain`, and what is checked of their
inputs.
"""

import itertools
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .kernels.reference import reference_attention
from .layouts.layout import BlockLayout
from .numerics import finite_or_zero, sum_dtype
from .ops import (
    ADAPTERS,
    BACKENDS,
    DTYPES,
    attention_op,
    check_bias,
    choose,
    layout_for,
    pair_counts_op,
)
from .patterns.algebra import Pattern


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = ...,
    q_start: int | None = ...,
    block_size: int | None = ...,
    block_bias: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = ...,
    q_start: int | None = ...,
    block_size: int | None = ...,
    block_bias: Tensor | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    q_start: int | None = None,
    block_size: int | None = None,
    block_bias: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention over the pairs of a pattern, at the cost of the pattern.

    `out_q = sum_k m(q, k) e^{s_k} v_k / sum_k m(q, k) e^{s_k}`, `s_k = scale * q.k (+ bias)`, m
    the multiplicity of the pair. A query without keys has out = 0, lse = -inf and zero gradients.

    Args:
        query: [B, Hq, Nq, D], any strides.
        key: [B, Hkv, Nk, D], Hq a multiple of Hkv.
        value: [B, Hkv, Nk, Dv].
        pattern: a mask or a mixture.
        scale: of the scores, default D ** -0.5.
        q_start: position of the first query, default Nk - Nq (the last query is aligned with the
            last key).
        block_size: tokens to a tile, a multiple of 16 from 16 to 256; default the backend's choice.
        block_bias: [B or 1, H or 1, num_blocks], added to every score of a visited block, in the
            order of `layout.entries`; differentiable. Needs an explicit block_size.
        return_lse: also return the natural log of each row's softmax denominator.
        backend: a name from `backends()`, which then runs or raises; default the first that can
            run.

    Returns:
        out [B, Hq, Nq, Dv] in the query's dtype (the autocast dtype under autocast), and with
        `return_lse` lse [B, Hq, Nq] in float32 (float64 for float64 inputs), through which
        gradients flow too.

    Raises:
        ValueError: shapes, dtypes or pattern do not fit. NotImplementedError: the named backend
            cannot run, with reasons.

    Cost: O(pairs in visited blocks) time, O(N) memory beside a bounded workspace, forward and
    backward.

    Example:
        >>> out = attention(query, key, value, LongNet((2048, 4096), (1, 2)) & Causal())
    """
    check_inputs(query, key, value, pattern)
    for name, number in (("q_start", q_start), ("block_size", block_size)):
        if not (number is None or isinstance(number, int | torch.SymInt)):
            raise ValueError(f"{name} must be an int or None, got {number!r}; wrap it in int()")
    query, key, value = autocast_inputs(query, key, value)
    if scale is None:
        scale = default_scale(query)
    if q_start is None:
        q_start = key.shape[2] - query.shape[2]
    if block_bias is not None:
        block_bias = _checked_bias(block_bias, query, block_size)
    name = choose(backend, query, key, value)
    if name == "reference":
        log_counts = _log_counts(query, key, pattern, q_start, block_size, block_bias)
        with torch.autocast(query.device.type, enabled=False):
            out, lse = reference_attention(query, key, value, log_counts, scale)
    elif name in ADAPTERS:
        layout = layout_for(pattern.expression, pattern.tensors, query, key, q_start, block_size)
        check_bias(block_bias, layout)
        with torch.autocast(query.device.type, enabled=False):
            out, lse = ADAPTERS[name](layout, query, key, value, block_bias, scale)
    else:
        refuse_forward_mode(query, key, value)
        out, lse = attention_op(
            query,
            key,
            value,
            block_bias,
            pattern.tensors,
            pattern.expression,
            scale,
            q_start,
            block_size,
            name,
        )
    return (out, lse) if return_lse else out


def explain(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> str:
    """One line per backend, its name first, then "usable" or the reasons why it cannot run on
    these inputs.
    """
    check_inputs(query, key, value, pattern)
    lines = []
    for name, reasons in BACKENDS.items():
        found = reasons(query, key, value)
        lines.append(f"{name}: {'; '.join(found) if found else 'usable'}")
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """Attention weights on the visited blocks alone.

    Attributes:
        values: [B, H, num_blocks, block, block] in the order of `layout.entries`, zero where there
            is no pair.
        layout: the blocks.
    """

    values: Tensor
    layout: BlockLayout

    def to_dense(self) -> Tensor:
        """[B, H, Nq, Nk]; rows sum to 1, or 0 where there is no key. A pair in several branches
        has its parts added.
        """
        frame = self.layout.frame
        batch, heads = self.values.shape[:2]
        tables = []
        for b, h in itertools.product(range(batch), range(heads)):
            dense = self.values.new_zeros(frame.q_len + 1, frame.kv_len + 1)  # with a margin
            for number, p in enumerate(self.layout.passes):
                q, k, _ = self.layout.cells(p, b, h)
                first = self.layout.first_entry_of(number, b, h)
                part = self.values[b, h, first : first + len(q)]
                dense = dense + torch.zeros_like(dense).index_put((q[:, :, None], k[:, None]), part)
            tables.append(dense[:-1, :-1])
        empty = self.values.new_zeros(batch, heads, frame.q_len, frame.kv_len)
        return torch.stack(tables).view(empty.shape) if tables else empty


def attention_weights(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    q_start: int | None = None,
    block_size: int | None = None,
    block_bias: Tensor | None = None,
) -> BlockWeights:
    """The softmax weights of `attention`, on the visited blocks; differentiable.

    Args: as `attention`; block_size defaults to its choice.

    Returns: `BlockWeights` in float32 (float64 for float64 inputs).

    Cost: memory O(B H num_blocks block_size^2); for looking at, not for training.
    """
    check_inputs(query, key, key, pattern)
    query, key = autocast_inputs(query, key)
    with torch.autocast(query.device.type, enabled=False):
        scale = default_scale(query) if scale is None else scale
        q_start = key.shape[2] - query.shape[2] if q_start is None else q_start
        _, lse = attention(
            query,
            key,
            key,
            pattern,
            scale=scale,
            q_start=q_start,
            block_size=block_size,
            block_bias=block_bias,
            return_lse=True,
        )
        layout = layout_for(pattern.expression, pattern.tensors, query, key, q_start, block_size)
        group = query.shape[1] // max(1, key.shape[1])
        # a margin for what is not real
        q, k = (torch.nn.functional.pad(x.to(lse.dtype), (0, 0, 0, 1)) for x in (query, key))
        lse = torch.nn.functional.pad(finite_or_zero(lse), (0, 1))
        batch, heads, blocks, size = *query.shape[:2], layout.num_blocks, layout.block_size
        if block_bias is not None:
            block_bias = block_bias.expand(batch, heads, blocks)
        tables = []
        for b, h in itertools.product(range(batch), range(heads)):
            weights = [lse.new_zeros(0, size, size)]
            for number, p in enumerate(layout.passes):
                rows, columns, cells = layout.cells(p, b, h)
                score = scale * (q[b, h, rows] @ k[b, h // group, columns].mT)
                if block_bias is not None:
                    first = layout.first_entry_of(number, b, h)
                    score = score + block_bias[b, h, first : first + len(rows), None, None]
                shifted = torch.where(cells, score - lse[b, h, rows][..., None], -torch.inf)
                weights.append(shifted.exp())
            visited = torch.cat(weights)
            missing = lse.new_zeros(blocks - len(visited), size, size)
            tables.append(torch.cat((visited, missing)))
        empty = lse.new_zeros(batch, heads, blocks, size, size)
        return BlockWeights(torch.stack(tables).view(empty.shape) if tables else empty, layout)


def default_scale(query: Tensor) -> float:
    """D ** -0.5."""
    return query.shape[-1] ** -0.5 if query.shape[-1] else 1.0


def check_inputs(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> None:
    """Raises TypeError or ValueError where they do not fit together."""
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"pattern must be a sparsering pattern such as Causal(), got {type(pattern).__name__}"
        )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            f"query, key and value must be [batch, heads, tokens, head dim], got {shapes}; "
            "unsqueeze what lacks"
        )
    batch, heads, _, width = query.shape
    if key.shape[0] != batch or value.shape[:3] != key.shape[:3] or key.shape[3] != width:
        raise ValueError(
            "query [B, Hq, Nq, D], key [B, Hkv, Nk, D] and value [B, Hkv, Nk, Dv] must "
            f"agree, got {shapes}; "
            "tokens come third: transpose(1, 2) turns [B, N, H, D] into it"
        )
    if heads % max(1, key.shape[1]) or (heads and not key.shape[1]):
        raise ValueError(
            f"query heads must be a multiple of key/value heads, got {heads} and "
            f"{key.shape[1]} in {shapes}"
        )
    dtypes = (query.dtype, key.dtype, value.dtype)
    if query.dtype not in DTYPES or (
        len(set(dtypes)) > 1 and not torch.is_autocast_enabled(query.device.type)
    ):
        raise ValueError(
            "query, key and value must share a dtype out of float64, float32, bfloat16, "
            f"float16, got {dtypes}; cast with .to()"
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value must be on one device, got {query.device}, {key.device}, "
            f"{value.device}; move with .to()"
        )


def autocast_inputs(*tensors: Tensor) -> list[Tensor]:
    """What autocast does to a matmul's inputs: float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raises where forward-mode derivatives are asked for: the op would silently call them zero."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "forward-mode derivatives (jvp) exist for backend='reference' alone; pass that, or use "
            "reverse mode"
        )


def _checked_bias(block_bias: Tensor, query: Tensor, block_size: int | None) -> Tensor:
    batch, heads = query.shape[:2]
    if block_size is None:
        raise ValueError(
            "block_bias needs an explicit block_size, for its blocks are those of "
            "pattern.layout(block_size=...)"
        )
    if (
        block_bias.dim() != 3
        or block_bias.shape[0] not in (1, batch)
        or block_bias.shape[1] not in (1, heads)
    ):
        raise ValueError(
            f"block_bias must be [{batch} or 1, {heads} or 1, num_blocks], got "
            f"{tuple(block_bias.shape)}"
        )
    if not block_bias.is_floating_point() or block_bias.device != query.device:
        raise ValueError(
            f"block_bias must hold floating point numbers on {query.device}, got "
            f"{block_bias.dtype} on {block_bias.device}; cast or move it with .to()"
        )
    return block_bias.expand(batch, heads, -1)


def _log_counts(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    q_start: int,
    block_size: int | None,
    block_bias: Tensor | None,
) -> Tensor:
    """[B, Hq, Nq, Nk] log of the (biased) multiplicity of every pair."""
    dtype = sum_dtype(query)
    if block_bias is None:
        return (
            pair_counts_op(query, key, pattern.tensors, pattern.expression, q_start).to(dtype).log()
        )
    layout = layout_for(pattern.expression, pattern.tensors, query, key, q_start, block_size)
    check_bias(block_bias, layout)
    number = layout.entry_of_pairs(query.shape[0]).to(query.device)  # [passes, B, Hq, Nq, Nk]
    block_bias = torch.nn.functional.pad(block_bias.to(dtype), (0, 1))  # gather needs one to read
    flat = block_bias[None, :, :, None].expand(len(number), -1, -1, query.shape[2], -1)
    bias = torch.where(number >= 0, flat.gather(-1, number.clamp(min=0)), -torch.inf)
    highest = torch.where(bias.detach().amax(0) == -torch.inf, 0.0, bias.detach().amax(0))
    total = torch.where(number >= 0, (bias - highest).exp(), 0.0).sum(0)
    return torch.where(total > 0, highest + torch.where(total > 0, total, 1.0).log(), -torch.inf)
