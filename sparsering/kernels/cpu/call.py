"""Calls of the compiled kernel: layouts and tensors as its operators take them."""

import torch
from torch import Tensor

from ...layouts.layout import BlockLayout, Pass
from ..inputs import dense_rows, positive_scale, signed_gradient
from .build import build_failure, library

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_REPEATED_WORK = 1.4  # seven products of `run_tiles` to the five of `run_heads`


def reasons(*tensors: Tensor) -> list[str]:
    """Why the kernel cannot run on these tensors, or at all."""
    found = []
    if any(x.device.type != "cpu" for x in tensors):
        found.append("it runs on the CPU alone")
    if any(x.dtype not in _DTYPES for x in tensors):
        found.append("it computes in float32; float64 stays with gather")
    return found or build_failure()


def forward(
    layout: BlockLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_bias: Tensor | None,
    scale: float,
    *,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over a layout; see `gather.forward`. lse is float32."""
    query, scale = positive_scale(query, scale)
    out, lse = library().forward(
        dense_rows(query),
        dense_rows(key),
        dense_rows(value),
        None if block_bias is None else block_bias.float().contiguous(),
        _first_entry(layout),
        [x for p in layout.passes for x in _tables(p)],
        [p.step for p in layout.passes],
        layout.block_size,
        scale,
        in_float32,
    )
    return out, lse


def backward(
    layout: BlockLayout,
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and block_bias; see `gather.backward`.

    Bits are the same for one number of threads: with fewer kv heads than threads can share evenly,
    dK and dV are summed in a sweep of their own.
    """
    positive, positive_by = positive_scale(query, scale)
    heads, threads = len(key) * key.shape[1], torch.get_num_threads()
    by_head = -(-heads // threads) * threads <= _MOST_REPEATED_WORK * heads
    dq, dk, dv, dbias = library().backward(
        dense_rows(grad_out),
        grad_lse.contiguous(),
        dense_rows(positive),
        dense_rows(key),
        dense_rows(value),
        None if block_bias is None else block_bias.float().contiguous(),
        dense_rows(out),
        lse.contiguous(),
        _first_entry(layout),
        [x for p in layout.passes for x in _tables(p)],
        [] if by_head else [x.contiguous() for p in layout.passes for x in p.transpose],
        [p.step for p in layout.passes],
        layout.block_size,
        positive_by,
        in_float32,
    )
    dq = signed_gradient(dq, scale)
    return dq, dk, dv, None if block_bias is None else dbias.to(block_bias.dtype)


def _first_entry(layout: BlockLayout) -> Tensor:
    return layout.first_entry.contiguous()


def _tables(p: Pass) -> list[Tensor]:
    tables = (
        p.query_start, p.query_stop, p.key_start, p.key_stop,
        p.row_ptr, p.key_tile, p.mask, p.bitmaps,
    )  # fmt: skip
    return [x.contiguous() for x in tables]
