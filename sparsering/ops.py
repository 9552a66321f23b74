"""The operator boundary: what torch.compile, autograd, torch.func and the FLOP counter see.

A pattern crosses the boundary as its expression (a string) and its tensors, so that a compiled
graph holds no Python objects. On the other side the call becomes a `Problem` over a layout.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .checks import check_batch, check_bias, refuse_forward_mode
from .differentiable import differentiable, refuse_mapped_pattern, transforming
from .dispatch import BACKENDS, block_size_of
from .kernels.problem import Problem
from .kernels.reference import reference_attention
from .layouts.cache import layout_cache
from .layouts.layout import BlockLayout
from .numerics import finite_or_zero, sum_dtype, without_autocast
from .patterns.algebra import Frame, Pattern
from .patterns.expression import parse


def attend(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float,
    q_start: int,
    block_size: int | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked call on a backend that computes its options.

    Where a backward is written out it runs as an operator, to which torch comes back with
    `_forward` and `_backward`; else as plain torch.
    """
    call = {
        "query": query,
        "key": key,
        "value": value,
        "tensors": pattern.tensors,
        "pattern": pattern.expression,
        "scale": scale,
        "q_start": q_start,
        "block_size": block_size,
        "backend": backend,
        **options,
    }
    forward, backward = BACKENDS[backend].forward, BACKENDS[backend].backward
    if backward is not None:
        refuse_forward_mode(*call.values())
        return _attention(**call)
    if forward is not None and transforming():
        raise NotImplementedError(
            f"{backend} does not run under torch.func (grad, vmap); name another backend or none"
        )
    with without_autocast(query):
        return _reference(**call) if forward is None else forward(_problem(**call))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = dict(zip(_NAMES, arguments, strict=True))
    forward = BACKENDS[call["backend"]].forward
    assert forward is not None
    problem = _problem(**call)
    with without_autocast(problem.query):
        return forward(problem)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    *given, out, lse, grad_out, grad_lse = arguments
    call = dict(zip(_NAMES, given, strict=True))
    backward = BACKENDS[call["backend"]].backward
    assert backward is not None
    problem = _problem(**call)
    with without_autocast(problem.query):
        return backward(problem, out, lse, grad_out, grad_lse)


_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? block_bias, Tensor[] tensors, str pattern, "
    "float scale, SymInt q_start, SymInt? block_size, str backend"
)
_NAMES = [argument.split()[-1] for argument in _CALL.split(",")]

_attention = differentiable(
    "attention",
    _CALL,
    _forward,
    _backward,
    refusal="second derivatives exist for backend='reference' alone; pass that to attention",
)


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tensors: Sequence[Tensor],
    pattern: str,
    q_start: int,
    block_size: int | None,
    backend: str,
    **options: Any,
) -> Problem:
    """A call over its layout; its other options are those of a `Problem`."""
    layout = layout_for(pattern, tensors, query, key, q_start, block_size, backend)
    check_bias(options["block_bias"], layout)
    return Problem(layout, query, key, value, **options)


def layout_for(
    pattern: str,
    tensors: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    q_start: int,
    block_size: int | None,
    backend: str,
) -> BlockLayout:
    """The cached layout of a spelt-out pattern on these inputs."""
    frame = Frame(query.shape[2], key.shape[2], query.shape[1], key.shape[1], q_start)
    value = parse(pattern, tensors)
    check_batch(value, query)
    if block_size is None:
        block_size = block_size_of(backend, value, query, frame.kv_len)
    return layout_cache.layout(value, frame, block_size, query.device)


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tensors: Sequence[Tensor],
    pattern: str,
    scale: float,
    q_start: int,
    block_size: int | None,
    backend: str,
    block_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Dense mathematics over the pattern's own definition; layouts tell which block has a bias."""
    if block_bias is None:
        counts = pair_counts_op(query.detach(), key.detach(), tensors, pattern, q_start)
        log_counts = counts.to(sum_dtype(query)).log()
    else:
        layout = layout_for(pattern, tensors, query, key, q_start, block_size, backend)
        check_bias(block_bias, layout)
        log_counts = _log_biased_counts(block_bias.to(sum_dtype(query)), layout, len(query))
    return reference_attention(query, key, value, log_counts, scale)


def _log_biased_counts(block_bias: Tensor, layout: BlockLayout, batch: int) -> Tensor:
    """[B, Hq, Nq, Nk] log of the biased multiplicity of every pair."""
    number = layout.entry_of_pairs(batch).to(block_bias.device)  # [passes, B, Hq, Nq, Nk]
    block_bias = torch.nn.functional.pad(block_bias, (0, 1))  # gather needs one to read
    flat = block_bias[None, :, :, None].expand(len(number), -1, -1, layout.frame.q_len, -1)
    bias = torch.where(number >= 0, flat.gather(-1, number.clamp(min=0)), -torch.inf)
    highest = finite_or_zero(bias.detach().amax(0))
    total = torch.where(number >= 0, (bias - highest).exp(), 0.0).sum(0)
    return torch.where(total > 0, highest + torch.where(total > 0, total, 1.0).log(), -torch.inf)


@torch.library.custom_op("sparsering::pair_counts", mutates_args=())
def pair_counts_op(
    query: Tensor, key: Tensor, tensors: Sequence[Tensor], pattern: str, q_start: int
) -> Tensor:
    """[B, Hq, Nq, Nk] int64 multiplicity of every pair, from the pattern's definition."""
    value = parse(pattern, tensors)
    check_batch(value, query)
    heads = {"num_heads": query.shape[1], "num_kv_heads": key.shape[1]}
    dense = value.to_dense(query.shape[2], key.shape[2], **heads, q_start=q_start)
    dense = dense.to(device=query.device, dtype=torch.int64)
    return dense.expand(*query.shape[:3], key.shape[2]).contiguous()


@pair_counts_op.register_fake
def _(query: Tensor, key: Tensor, *rest: object) -> Tensor:
    return query.new_empty(*query.shape[:3], key.shape[2], dtype=torch.int64)


@pair_counts_op.register_vmap
def _(info: Any, in_dims: Any, query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, None]:
    refuse_mapped_pattern(in_dims[2])
    query, key = (
        x if dim is None else x.select(dim, 0)
        for x, dim in zip((query, key), in_dims, strict=False)
    )
    return pair_counts_op(query, key, *rest), None  # the same for all: no value is read


def _visited_pairs(arguments: Sequence[Any]) -> float:
    call = dict(zip(_NAMES, arguments, strict=False))
    query, key = call["query"], call["key"]
    spelt = (call["pattern"], call["tensors"])
    layout = layout_for(*spelt, query, key, call["q_start"], call["block_size"], call["backend"])
    return query.shape[0] * query.shape[1] * layout.num_pairs


@register_flop_formula(torch.ops.sparsering.attention, get_raw=True)
def _flops(*arguments: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Two matmuls on the pattern's exact pairs."""
    query, _, value, *_ = arguments
    return int(2 * _visited_pairs(arguments) * (query.shape[3] + value.shape[3]))


@register_flop_formula(torch.ops.sparsering.attention_backward, get_raw=True)
def _flops_backward(*arguments: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Five matmuls on the pattern's exact pairs."""
    query, _, value, *_ = arguments
    return int(2 * _visited_pairs(arguments) * (3 * query.shape[3] + 2 * value.shape[3]))
