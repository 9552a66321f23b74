"""The operator boundary: what torch.compile, autograd and the FLOP counter see, and which backend
runs.

A pattern crosses the boundary as its expression (a string) and its tensors, so that a compiled
graph holds no Python objects. Backends stand in order of preference; each says why it cannot run,
or runs.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .kernels import cpu, flash, flex, gather, torch_sparse, triton
from .kernels.triton import tuning as triton_tuning
from .layouts.cache import layout_cache
from .layouts.compile import default_block_size
from .layouts.layout import BlockLayout
from .numerics import sum_dtype
from .patterns.algebra import Frame, Pattern
from .patterns.expression import parse

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _no_reason(*shapes: object) -> list[str]:
    return []


BACKENDS: dict[str, Callable[..., list[str]]] = {
    "cpu": cpu.reasons,
    "triton": triton.reasons,
    "gather": _no_reason,
    "reference": _no_reason,
    "flex": flex.reasons,
    "flash": flash.reasons,
    "torch_sparse": torch_sparse.reasons,
}
"""Names in order of preference, and for each the reasons why it cannot run on (query, key, value),
[] if it can. Those of `ONLY_NAMED` are never a default choice, nor is an interpreter of kernels.
"""

ONLY_NAMED = ("flex", "flash", "torch_sparse")

ADAPTERS = {"flex": flex.attention, "torch_sparse": torch_sparse.attention}
"""Backends in plain differentiable torch, which need no operator of their own."""

FORWARD: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "cpu": cpu.forward,
    "triton": triton.forward,
    "gather": gather.forward,
    "flash": flash.forward,
}
BACKWARD = {
    "cpu": cpu.backward,
    "triton": triton.backward,
    "gather": gather.backward,
    "flash": triton.backward,
}
_PACKAGES = {"triton": ("triton", "triton"), "flash": ("flash_attn", "flash")}  # and their extras


def backends() -> dict[str, list[str]]:
    """Every backend with the reasons why it cannot run on this machine ([] = usable)."""
    return {name: reasons() for name, reasons in BACKENDS.items()}


def choose(backend: str | None, query: Tensor, key: Tensor, value: Tensor) -> str:
    """The named backend, or the first that can run.

    Raises NotImplementedError with every reason, ImportError where a named one lacks its package.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")
    defaults = [name for name in BACKENDS if name not in ONLY_NAMED]
    if triton.interpreting():
        defaults.remove("triton")
    names = defaults if backend is None else [backend]
    for name in names:
        if not BACKENDS[name](query, key, value):
            return name
    if backend in _PACKAGES and find_spec(_PACKAGES[backend][0]) is None:
        package, extra = _PACKAGES[backend]
        raise ImportError(
            f"backend {backend!r} needs the package {package}: pip install 'sparsering[{extra}]'"
        )
    raise NotImplementedError(
        "; ".join(f"{name}: {', '.join(BACKENDS[name](query, key, value))}" for name in names)
    )


def layout_for(
    pattern: str,
    tensors: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    q_start: int,
    block_size: int | None,
    backend: str | None = None,
) -> BlockLayout:
    """The cached layout of a spelt-out pattern on these inputs.

    Where no block size is named it is the one that `sparsering tune` measured for the pattern on
    this GPU, else `default_block_size`.
    """
    frame = Frame.build(query.shape[2], key.shape[2], query.shape[1], key.shape[1], q_start)
    value = parse(pattern, tensors)
    if block_size is None and backend == "triton":
        block_size = triton_tuning.block_size(pattern, query)
    size = default_block_size(value, frame.kv_len) if block_size is None else block_size
    check_batch(value, query)
    return layout_cache.layout(value, frame, size, query.device)


def check_batch(pattern: Pattern, query: Tensor) -> None:
    """Raises ValueError where the pattern is for another number of batch entries."""
    if (batch := pattern.num_batches()) not in (None, query.shape[0]):
        raise ValueError(
            f"the pattern is for {batch} batch entries, got a query of {query.shape[0]}; "
            "give one length or table per entry"
        )


def check_bias(block_bias: Tensor | None, layout: BlockLayout) -> None:
    """Raises ValueError where there is a bias and it does not have one number per block."""
    if block_bias is not None and block_bias.shape[-1] != layout.num_blocks:
        raise ValueError(
            f"block_bias must be [B or 1, H or 1, {layout.num_blocks}], one per visited "
            "block of the layout, got "
            f"{block_bias.shape[-1]} in the last dim; see pattern.layout(...).num_blocks"
        )


@torch.library.custom_op("sparsering::attention", mutates_args=())
def attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_bias: Tensor | None,
    tensors: Sequence[Tensor],
    pattern: str,
    scale: float,
    q_start: int,
    block_size: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Forward: (out, lse)."""
    layout = layout_for(pattern, tensors, query, key, q_start, block_size, backend)
    check_bias(block_bias, layout)
    with torch.autocast(query.device.type, enabled=False):  # it would round scores
        return FORWARD[backend](layout, query, key, value, block_bias, scale)


@torch.library.custom_op("sparsering::attention_backward", mutates_args=())
def attention_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    pattern: str,
    scale: float,
    q_start: int,
    block_size: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and block_bias (empty without one)."""
    layout = layout_for(pattern, tensors, query, key, q_start, block_size, backend)
    with torch.autocast(query.device.type, enabled=False):
        dq, dk, dv, dbias = BACKWARD[backend](
            layout, grad_out, grad_lse, query, key, value, block_bias, out, lse, scale
        )
    return dq, dk, dv, query.new_empty(0) if dbias is None else dbias


@attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=sum_dtype(query))


@attention_backward_op.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_bias: Tensor | None,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = query.new_empty(0) if block_bias is None else block_bias.new_empty(block_bias.shape)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        dbias,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, block_bias, tensors, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, block_bias, *output, *tensors)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, block_bias, out, lse, *tensors = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    dq, dk, dv, dbias = attention_backward_op(
        grad_out, grad_lse, query, key, value, block_bias, out, lse, tensors, *ctx.options
    )
    return (
        dq,
        dk,
        dv,
        None if block_bias is None else dbias,
        [None] * len(tensors),
        *(None for _ in ctx.options),
    )


attention_op.register_autograd(_differentiate, setup_context=_save)


def _refuse_second_derivatives(ctx: Any, *grads: object) -> None:
    raise NotImplementedError(
        "second derivatives exist for backend='reference' alone; pass that to attention"
    )


attention_backward_op.register_autograd(_refuse_second_derivatives)


@torch.library.custom_op("sparsering::pair_counts", mutates_args=())
def pair_counts_op(
    query: Tensor, key: Tensor, tensors: Sequence[Tensor], pattern: str, q_start: int
) -> Tensor:
    """[B, Hq, Nq, Nk] int64 multiplicity of every pair: what the reference backend needs of a
    pattern.
    """
    value = parse(pattern, tensors)
    dense = value.to_dense(
        query.shape[2],
        key.shape[2],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        q_start=q_start,
    ).to(device=query.device, dtype=torch.int64)
    if dense.dim() == 4 and len(dense) != len(query):
        raise ValueError(
            f"the pattern is for {len(dense)} batch entries, got a query of {len(query)}"
        )
    return dense.expand(*query.shape[:3], key.shape[2]).contiguous()


@pair_counts_op.register_fake
def _(query: Tensor, key: Tensor, *rest: object) -> Tensor:
    return query.new_empty(*query.shape[:3], key.shape[2], dtype=torch.int64)


def _visited_pairs(args: tuple[Any, ...]) -> float:
    query, key, _, _, tensors, pattern, _, q_start, block_size, _ = args
    return (
        query.shape[0]
        * query.shape[1]
        * layout_for(pattern, tensors, query, key, q_start, block_size).num_pairs
    )


@register_flop_formula(torch.ops.sparsering.attention, get_raw=True)
def _flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Two matmuls on the pattern's exact pairs."""
    return int(2 * _visited_pairs(args) * (args[0].shape[3] + args[2].shape[3]))


@register_flop_formula(torch.ops.sparsering.attention_backward, get_raw=True)
def _flops_backward(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Five matmuls on the pattern's exact pairs."""
    _, _, query, key, value, bias, _, _, *rest = args
    return int(
        2
        * _visited_pairs((query, key, value, bias, *rest))
        * (3 * query.shape[3] + 2 * value.shape[3])
    )
