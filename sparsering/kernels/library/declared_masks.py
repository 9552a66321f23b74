"""cuDNN's attention by declared masks: `create_mask_plan`, `flex_attn_func` of its package.

A mask is declared as intervals of keys for each query (`layouts/intervals.py`), from which the
package makes a plan for its kernels. A plan serves all calls of equal shapes and dtype, so the
cache of layouts keeps it. What is refused is that of nvidia-cudnn-frontend 1.30 to 1.32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...ground.streams import Built, capturing
from ...layouts.cache import layout_cache
from ...layouts.intervals import endpoints
from ...patterns.algebra import Frame, Pattern
from .blocks import without_rows
from .derivatives import without_gradient

CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities of the GPUs that it runs on."""

_MOST_INTERVALS = 16  # of a query; bounds the work of a plan, and has not been tuned
_LARGER_HEAD_DIMS = ((192, 128), (256, 256))  # (queries and keys, values)
_HOPPER = 9


def head_dim_fault(dim: int, value_dim: int) -> str:
    """Returns why it cannot run head dims of queries and of values, or "" if it can."""
    if (dim, value_dim) in _LARGER_HEAD_DIMS:
        return ""
    if all(8 <= x <= 128 and x % 8 == 0 for x in (dim, value_dim)):
        return ""
    return (
        "it runs head dims that are multiples of 8 up to 128, 192 with values of 128, and 256, got "
        f"{dim} and {value_dim}"
    )


def intervals(pattern: Pattern, frame: Frame) -> Tensor | str:
    """Returns the pattern's `endpoints`, or why it has none. The cache of layouts keeps both."""
    if any(x.device.type != "cpu" for x in pattern.tensors):
        return "a mask is declared on the CPU, and the pattern has tensors on a GPU"

    def build() -> Tensor | str:
        return endpoints(pattern, frame, _MOST_INTERVALS)

    return layout_cache.keep((pattern, frame, "intervals"), build)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    frame: Frame,
    scale: float,
    capability: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a pattern that has `intervals`; lse is float32.

    Raises: NotImplementedError for gradients that the package lacks.
    """
    from cudnn import flex_attn_func

    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    dims = query.shape[3], value.shape[3]
    if learns and capability[0] == _HOPPER and (fault := _gradient_fault(query, key, value)):
        raise NotImplementedError(
            f"cudnn: on Hopper it has no gradients for {fault}; call it under torch.no_grad(), or "
            "leave out backend="
        )
    multiple = 128 if dims == (256, 256) else 16
    tensors = [aligned(x.transpose(1, 2), multiple) for x in (query, key, value)]  # [B, N, H, D]
    plan = _plan(tensors, pattern, frame, learns)
    out, lse = flex_attn_func(
        *tensors,
        mask_plan=plan.made,
        softmax_scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        return_lse=True,
    )
    if learns:
        out, lse = _AlignedGradient.apply(out, multiple), _AlignedGradient.apply(lse, 4)
        if dims == (256, 256) and capability[0] > _HOPPER:
            lse = without_gradient(lse, _NO_LSE_GRADIENT)
    out = out.transpose(1, 2)  # [B, Hq, Nq, Dv]
    return (out, lse) if plan.empty is None else without_rows(out, lse, plan.empty)


def _gradient_fault(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Returns for which of a call's head dims Hopper has no gradients, or "" if it has them."""
    dim, value_dim = query.shape[3], value.shape[3]
    if dim != value_dim and query.shape[1] > key.shape[1]:
        return f"grouped heads of head dims {dim} and {value_dim}"
    if dim in (56, 64) and 104 <= value_dim <= 128:  # the tiles exceed its shared memory
        return f"head dims {dim} and {value_dim}"
    return ""


_NO_LSE_GRADIENT = (
    "cudnn: on Blackwell it has no gradient of lse for head dim 256; detach it, or leave out "
    "backend="
)


def aligned(x: Tensor, multiple: int) -> Tensor:
    """Returns a tensor or a copy whose rows are dense and begin at multiples of so many bytes."""
    steps = (step * x.element_size() for step in x.stride()[:-1])
    is_aligned = x.stride(-1) == 1 and all(step % multiple == 0 for step in steps)
    if is_aligned and x.data_ptr() % multiple == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _AlignedGradient(Function):
    """The identity, whose gradient has the layout in memory that the package's backward needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiple: int) -> Tensor:
        ctx.multiple = multiple
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return aligned(grad, ctx.multiple), None


@dataclass(frozen=True, eq=False)
class _DeclaredPlan:
    """A plan of the package for calls of one shape, and which queries see no key."""

    made: Any  # the package's MaskPlan
    empty: Tensor | None  # bool [B or 1, H or 1, Nq]; None if every query sees a key
    built: Built | None
    unseen_bytes: int  # what the plan holds on the GPU


def _plan(tensors: list[Tensor], pattern: Pattern, frame: Frame, learns: bool) -> _DeclaredPlan:
    """Returns the plan of a call of `tensors` [B, N, H, D], from the cache of layouts or new."""
    query, _, value = tensors
    device = query.device
    call = len(query), query.shape[3], value.shape[3], query.dtype, learns, device

    def build() -> _DeclaredPlan:
        from cudnn import create_mask_plan

        if capturing(device):
            raise RuntimeError(
                "a CUDA graph cannot capture the plan of a declared mask; make the same call once "
                "before the capture, so that its plan is cached"
            )
        found = intervals(pattern, frame)
        assert isinstance(found, Tensor)
        edges = found.to(device).expand(len(query), -1, -1, -1)
        is_empty = (found[:, :, ::2] == _begins(found)).all(2)
        before = _allocated(device)
        made = create_mask_plan(
            edges.permute(1, 2, 0, 3).flatten(2).contiguous(), *tensors, build_backward=learns
        )
        return _DeclaredPlan(
            made=made,
            empty=is_empty.to(device) if bool(is_empty.any()) else None,
            built=Built.now(device),
            unseen_bytes=max(0, _allocated(device) - before),
        )

    plan = layout_cache.keep((pattern, frame, "declared mask", *call), build)
    if plan.built is not None:
        plan.built.wait(() if plan.empty is None else (plan.empty,))
    return plan


def _begins(found: Tensor) -> Tensor:
    """Returns where the intervals of `endpoints` begin."""
    return torch.cat((torch.zeros_like(found[:, :, :1]), found[:, :, 1::2]), 2)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
