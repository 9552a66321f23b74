"""Adapter to cuDNN's sparse attention, of the package nvidia-cudnn-frontend.

A mask with few intervals of keys for each query runs as a declared mask (`declared_masks.py`), on
Hopper and Blackwell. Other patterns must consist of whole blocks, which `BSA` runs without a mask:
blocks of 64 tokens on Hopper and on RTX Blackwell (compute capabilities 9 and 12), of 128 on
Blackwell (10 and 11). NVIDIA calls both interfaces experimental. What `BSA` refuses is that of
version 1.33 (November 2026).
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...call import Call
from ...layouts.cache import layout_cache
from ...patterns.algebra import Frame, Pattern
from . import declared_masks
from .blocks import listed, whole_blocks, without_rows
from .derivatives import (
    with_first_derivatives,
    with_positive_scale,
    without_gradient,
    without_keys,
)
from .on_gpu import capability_of, faults_on_gpu

EXTRAS: frozenset[str] = frozenset()
"""Options of a call, other than its scale, that this backend computes."""

_BLOCKS = {9: 64, 10: 128, 11: 128, 12: 64}  # by the major number of a compute capability
# Head dims of queries and keys; values have the same, but on Hopper any of them.
_HEAD_DIMS = {9: (64, 96, 128), 10: (64, 96, 128), 11: (64, 96, 128), 12: (128,)}
_HEAD_DIMS_LEARNT = {9: (128,), 10: (64, 128), 11: (64, 128), 12: ()}  # that have gradients
_HOPPER = 9
_PACKAGE = "nvidia-cudnn-frontend"
_DECLARED, _BLOCK_SPARSE = "flex_attention", "block_sparse_attention"  # folders of the package
_NO_LSE_GRADIENT = "cudnn: it has no gradient of lse; detach it, or leave out backend="


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why it cannot run on these tensors or on this machine; [] if it can."""
    missing = f"the package {_PACKAGE} is not installed, or has no sparse attention"
    faults = [] if _installed() else [missing]

    def fault_of(device: torch.device) -> str:
        major, minor = capability_of(device)
        if major not in _BLOCKS:
            return f"it needs a GPU of compute capability 9 to 12, got {major}"
        if _installed() == (_DECLARED,) and not _has_declared(device):
            return f"it has no block-sparse attention, got compute capability {major}.{minor}"
        return _head_dim_fault(device, *tensors) if tensors else ""

    return faults + faults_on_gpu(tensors, fault_of)


# Its kernels are compiled in Python; see the same decorator in flash.py.
@torch._disable_dynamo
def refuses(call: Call) -> list[str]:
    """Returns why it cannot run a call of a pattern; [] if it can.

    It lists the intervals of keys that each query sees, and may build the layout.
    """
    found = _form(call)
    return [found] if isinstance(found, str) else []


@torch._disable_dynamo
def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call that `refuses` accepts; lse is float32.

    Raises: NotImplementedError for gradients that the package lacks.
    """
    query, key, value = with_first_derivatives(*call.inputs)
    if not query.numel() or not key.numel():
        return without_keys(query, key, value)
    query, scale = with_positive_scale(query, call.scale)
    found = _form(call)
    assert not isinstance(found, str)
    if isinstance(found, Tensor):
        capability = capability_of(query.device)
        return declared_masks.attend(query, key, value, call.pattern, call.frame, scale, capability)
    return _block_sparse(query, key, value, found, scale)


def _form(call: Call) -> Tensor | tuple[Tensor, Tensor] | str:
    """Returns a call's mask as `declared_masks.intervals` or as `_blocks`, or why it has neither.

    A declared mask goes first: it has gradients in float16, for grouped heads and of lse, too.
    """
    pattern, frame, query, value = call.pattern, call.frame, call.query, call.value
    told = []
    if _has_declared(query.device):
        declared = declared_masks.intervals(pattern, frame)
        if isinstance(declared, Tensor):
            return declared
        told.append(f"as a declared mask: {declared}")
    if _BLOCK_SPARSE in _installed():
        fault = _blocks_fault(query.device, query, value)
        blocks = fault or _blocks(pattern, frame, query)
        if not isinstance(blocks, str):
            return blocks
        told.append(f"as whole blocks: {blocks}" if told else blocks)
    return "; ".join(told)


def _block_sparse(
    query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) over `blocks`, as `_blocks` lists them."""
    counts, index = blocks
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if learns:
        if faults := _gradient_faults(query, value):
            raise NotImplementedError(
                f"cudnn: {'; '.join(faults)}; call it under torch.no_grad(), or leave out backend="
            )
        group = query.shape[1] // key.shape[1]  # its gradients are of as many heads
        key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    size = len(query), query.shape[1]
    counts, index = (x.expand(*size, *x.shape[2:]).contiguous() for x in (counts, index))
    block = _BLOCKS[capability_of(query.device)[0]]
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    out, lse = _BlockSparse.apply(*tensors, counts, index, block, scale)
    lse = without_gradient(lse, _NO_LSE_GRADIENT, out)
    empty = (counts == 0).repeat_interleave(block, 2)
    return without_rows(out, lse, empty)


class _BlockSparse(Function):
    """The package's forward and backward, two functions, as one of torch's."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        counts: Tensor,
        index: Tensor,
        block: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        from cudnn import BSA

        ctx.options = {"sparse_block_size": block, "softmax_scale": scale}
        found = BSA.block_sparse_attention_forward(
            query,
            key,
            value,
            index,
            q2k_block_nums=counts,
            allow_empty_block_nums=True,
            pack_gqa=False,  # a list of blocks for each query head
            **ctx.options,
        )
        out, lse = found["o_tensor"], found["lse_tensor"]
        ctx.save_for_backward(query, key, value, out, lse, counts, index)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        from cudnn import BSA

        *tensors, counts, index = ctx.saved_tensors
        found = BSA.block_sparse_attention_backward(
            grad.contiguous(), *tensors, index, q2k_block_nums=counts, **ctx.options
        )
        grads = (found[f"d{name}_tensor"] for name in "qkv")
        return *grads, None, None, None, None


@cache
def _installed() -> tuple[str, ...]:
    """Returns which kinds of attention the package has, without importing it."""
    package = find_spec("cudnn")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    kinds = _DECLARED, _BLOCK_SPARSE
    return tuple(kind for kind in kinds if any((Path(x) / kind).is_dir() for x in folders))


def _head_dim_fault(device: torch.device, query: Tensor, key: Tensor, value: Tensor) -> str:
    """Returns why it cannot run a call's head dims, or "" if it can."""
    if _has_declared(device):  # which runs all head dims of whole blocks, and more
        return declared_masks.head_dim_fault(query.shape[-1], value.shape[-1])
    return _blocks_fault(device, query, value)


def _has_declared(device: torch.device) -> bool:
    return _DECLARED in _installed() and capability_of(device) in declared_masks.CAPABILITIES


def _blocks_fault(device: torch.device, query: Tensor, value: Tensor) -> str:
    """Returns why whole blocks cannot run with a call's head dims, or "" if they can."""
    major, dim, value_dim = capability_of(device)[0], query.shape[-1], value.shape[-1]
    dims = _HEAD_DIMS[major]
    if {dim, value_dim} <= set(dims) and (dim == value_dim or major == _HOPPER):
        return ""
    return (
        f"on compute capability {major} it runs head dims {', '.join(map(str, dims))}, "
        f"got {dim} and {value_dim}"
    )


def _gradient_faults(query: Tensor, value: Tensor) -> list[str]:
    """Returns why a call has no gradients; [] if it has."""
    faults, dims = [], _HEAD_DIMS_LEARNT[capability_of(query.device)[0]]
    if query.dtype != torch.bfloat16:
        faults.append("it has gradients in bfloat16 alone")
    if query.shape[3] != value.shape[3] or query.shape[3] not in dims:
        faults.append(
            f"on this GPU it has gradients for head dims {', '.join(map(str, dims)) or 'of none'}, "
            f"got {query.shape[3]} and {value.shape[3]}"
        )
    if torch.are_deterministic_algorithms_enabled():
        faults.append("it does not say that its gradients are deterministic")
    return faults


def _blocks(pattern: Pattern, frame: Frame, query: Tensor) -> tuple[Tensor, Tensor] | str:
    """Lists the blocks that a pattern visits: counts and indices, as `blocks.listed`.

    Returns a text that says why not if the pattern has others. The layout keeps the result, because
    reading its tables waits for a GPU.
    """
    block = _BLOCKS[capability_of(query.device)[0]]
    if frame.q_len % block or frame.kv_len % block:
        return (
            f"it needs lengths that are multiples of {block}, got {frame.q_len} queries and "
            f"{frame.kv_len} keys"
        )
    layout = layout_cache.layout(pattern, frame, block, query.device)
    if len(layout.passes) > 1:
        return f"it runs whole blocks; a layout of this pattern has {len(layout.passes)} passes"
    if not layout.passes or not frame.q_len or not frame.kv_len:
        size = 1, 1, frame.q_len // block, frame.kv_len // block
        return listed(torch.zeros(size, dtype=torch.bool, device=query.device))
    (p,) = layout.passes
    if (found := p.memo.get("cudnn")) is None:
        visits = whole_blocks(p, frame, block)
        if isinstance(visits, Tensor):
            if (tables := visits.shape[1]) > 1:
                visits = visits.repeat_interleave(query.shape[1] // tables, 1)
            counts, index = listed(visits)
            found = counts, index[..., : max(1, int(counts.max()))]
        else:
            found = visits
        p.memo["cudnn"] = found
    blocks: tuple[Tensor, Tensor] | str = found
    return blocks
