"""A stand-in of cuDNN's block-sparse attention, which runs on no CPU: its functions by definition.

Names, order and defaults of arguments, results and refusals are those of `cudnn.BSA` of
nvidia-cudnn-frontend 1.33. Rows that visit no block are garbage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from oracles.attention_oracle import dense_attention
from oracles.flash_packages import imported
from sparsering.kernels.backends import BACKENDS
from sparsering.kernels.library import cudnn

GARBAGE = 7.0
CALLS: list[str] = []
"""The functions that were called."""


@contextmanager
def installed(major: int = 9) -> Iterator[None]:
    """Installs the stand-in, on a GPU of some compute capability; it takes tensors of the CPU."""
    usable = BACKENDS["cudnn"]._replace(reasons=lambda *tensors: [])
    with (
        imported({"cudnn": SimpleNamespace(BSA=_BSA(major))}),
        mock.patch.dict(BACKENDS, {"cudnn": usable}),
        mock.patch.object(cudnn, "_major", lambda device: major),
    ):
        CALLS.clear()
        yield


class _BSA:
    """`cudnn.BSA` of one GPU."""

    def __init__(self, major: int) -> None:
        self.block = 64 if major in (9, 12) else 128
        self.major = major

    def block_sparse_attention_forward(
        self, q_tensor, k_tensor, v_tensor, q2k_block_index, block_sparse_num=None,
        block_sizes=None, q2k_block_nums=None, *, sparse_block_size=None,
        allow_empty_block_nums=False, softmax_scale=None, pack_gqa=None, layout="bhsd",
        kv_splits=1, use_clc=None, token_mask_bounds=None, token_mask_flags=None, out=None,
        lse=None, q_stage=1,
    ):  # fmt: skip
        assert pack_gqa is False and layout == "bhsd"
        CALLS.append("forward")
        self._check(q_tensor, k_tensor, v_tensor, sparse_block_size, softmax_scale)
        visits = _visits(q2k_block_index, q2k_block_nums, q_tensor, k_tensor, self.block)
        assert allow_empty_block_nums or (q2k_block_nums > 0).all()
        out, lse = _attend(q_tensor, k_tensor, v_tensor, visits, softmax_scale)
        empty = ~visits.any(3)
        out = torch.where(empty[..., None], GARBAGE, out).to(q_tensor.dtype)
        return {"o_tensor": out, "lse_tensor": torch.where(empty, GARBAGE, lse).float()}

    def block_sparse_attention_backward(
        self, do_tensor, q_tensor, k_tensor, v_tensor, o_tensor, lse_tensor, q2k_block_index,
        block_sparse_num=None, block_sizes=None, q2k_block_nums=None, *, softmax_scale=None,
        dq_tensor=None, dk_tensor=None, dv_tensor=None, bucket_size_blocks=None,
        sparse_block_size=None, layout="bhsd", bucketed_k2q_offsets=None,
        bucketed_k2q_indices=None, token_mask_bounds=None, token_mask_flags=None,
    ):  # fmt: skip
        CALLS.append("backward")
        self._check(q_tensor, k_tensor, v_tensor, sparse_block_size, softmax_scale)
        dims = {9: (128,), 10: (64, 128)}[self.major]
        assert q_tensor.dtype == torch.bfloat16 and q_tensor.shape[3] in dims
        assert q_tensor.shape[1] == k_tensor.shape[1] and q_tensor.shape[3] == v_tensor.shape[3]
        assert do_tensor.shape == o_tensor.shape == q_tensor.shape
        assert lse_tensor.shape == q_tensor.shape[:3] and lse_tensor.dtype == torch.float32
        visits = _visits(q2k_block_index, q2k_block_nums, q_tensor, k_tensor, self.block)
        own = [x.detach().double().requires_grad_() for x in (q_tensor, k_tensor, v_tensor)]
        with torch.enable_grad():
            out, _ = _attend(*own, visits, softmax_scale)
            # rows without blocks have no gradients, whatever comes in
            upstream = torch.where(visits.any(3)[..., None], do_tensor, 0.0).to(out.dtype)
            grads = torch.autograd.grad(out, own, upstream)
        names = ("dq_tensor", "dk_tensor", "dv_tensor")
        return {name: x.to(q_tensor.dtype) for name, x in zip(names, grads, strict=True)}

    def _check(self, query: Tensor, key: Tensor, value: Tensor, block: int, scale: float) -> None:
        assert query.dtype == key.dtype == value.dtype and query.dtype.itemsize == 2
        assert block == self.block and scale > 0
        assert not query.shape[2] % block and not key.shape[2] % block
        assert query.shape[3] in (64, 96, 128) and value.shape[3] in (64, 96, 128)
        assert all(x.stride(-1) == 1 and x.numel() for x in (query, key, value))


def _visits(index: Tensor, counts: Tensor, query: Tensor, key: Tensor, block: int) -> Tensor:
    """Reads lists of blocks as a mask of pairs [B, H, Nq, Nk]."""
    rows, columns = query.shape[2] // block, key.shape[2] // block
    assert index.dtype == counts.dtype == torch.int32 and index.shape[-1]
    assert index.shape[:3] == counts.shape == (*query.shape[:2], rows)
    assert index.is_contiguous() and counts.is_contiguous()
    blocks = torch.zeros(*counts.shape, columns, dtype=torch.int64)
    used = torch.arange(index.shape[-1]) < counts[..., None]
    blocks.scatter_add_(3, index.long(), used.long())
    assert blocks.max() <= 1, "a block twice"
    return blocks.bool().repeat_interleave(block, 2).repeat_interleave(block, 3)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, visits: Tensor, scale: float
) -> tuple[Any, Any]:
    own = (x.double() for x in (scale * query.double() * query.shape[3] ** 0.5, key, value))
    return dense_attention(*own, visits)
