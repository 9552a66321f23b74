"""Stand-ins of cuDNN's sparse attention, which runs on no CPU: its functions by definition.

Names, order and defaults of arguments, results and refusals are those of `cudnn.BSA` of
nvidia-cudnn-frontend 1.33, and of `create_mask_plan` and `flex_attn_func` of 1.32. Rows without
keys are garbage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import Function

from oracles.attention_oracle import dense_attention
from oracles.flash_packages import imported
from sparsering.kernels.backends import BACKENDS
from sparsering.kernels.library import cudnn

GARBAGE = 7.0
CALLS: list[str] = []
"""The functions that were called."""


@contextmanager
def installed(major: int = 9, minor: int = 0, declared: bool = False) -> Iterator[None]:
    """Installs the stand-ins, on a GPU of some compute capability; they take tensors of the CPU.

    Without `declared`, the package has block-sparse attention alone.
    """
    usable = BACKENDS["cudnn"]._replace(reasons=lambda *tensors: [])
    package = SimpleNamespace(BSA=_BSA(major))
    if declared:
        flex = _Flex(10 * major + minor)
        package.create_mask_plan, package.flex_attn_func = flex.create_mask_plan, flex.attend
    kinds = (*(["flex_attention"] if declared else []), "block_sparse_attention")
    with (
        imported({"cudnn": package}),
        mock.patch.dict(BACKENDS, {"cudnn": usable}),
        mock.patch.object(cudnn, "capability_of", lambda device: (major, minor)),
        mock.patch.object(cudnn, "_installed", lambda: kinds),
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


class _MaskPlan:
    """A plan of `create_mask_plan`: its mask as pairs, and the shapes of calls that it serves."""

    def __init__(self, pairs: Tensor, shapes: Any, dtype: torch.dtype, has_backward: bool) -> None:
        self.pairs, self.shapes, self.dtype = pairs, shapes, dtype
        self.has_backward = has_backward


class _Flex:
    """The functions of declared masks on a GPU of one architecture: 90, 100 or 103."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def create_mask_plan(
        self, mask_func, q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, pack_gqa=None, build_backward=None,
    ):  # fmt: skip
        CALLS.append("plan")
        assert self.arch in (90, 100, 103)
        given = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, pack_gqa
        assert all(x is None for x in given) and type(build_backward) is bool
        self._check(q, k, v)
        (batch, q_len, heads, dim), (_, kv_len, kv_heads, value_dim) = q.shape, v.shape
        grouped = heads > kv_heads and dim != value_dim
        too_large = dim in (56, 64) and 104 <= value_dim <= 128
        if build_backward and self.arch == 90 and (grouped or too_large):
            raise NotImplementedError("SM90 arbitrary backward only supports signatures ...")
        assert mask_func.dtype == torch.int32 and mask_func.is_contiguous()
        assert mask_func.shape[0] in (1, heads) and mask_func.shape[1] % 2 == 1
        assert mask_func.shape[2] == batch * q_len
        assert (mask_func.diff(dim=1) >= 0).all() and (mask_func >= 0).all()
        assert (mask_func <= kv_len).all()
        pairs = torch.zeros(*mask_func.shape[::2], kv_len, dtype=torch.bool)
        begin = torch.zeros_like(mask_func[:, 0])
        for number, edge in enumerate(mask_func.unbind(1)):
            if number % 2:
                begin = edge
            else:
                key = torch.arange(kv_len)
                pairs |= (begin[..., None] <= key) & (key < edge[..., None])
        pairs = pairs.unflatten(1, (batch, q_len)).transpose(0, 1).expand(-1, heads, -1, -1)
        return _MaskPlan(pairs, [x.shape for x in (q, k, v)], q.dtype, build_backward)

    def attend(
        self, q, k, v, *, mask_plan, softmax_scale=None, deterministic=False, return_lse=False,
        return_max_logit=False,
    ):  # fmt: skip
        CALLS.append("in order" if deterministic else "forward")
        assert type(deterministic) is bool and return_lse is True and return_max_logit is False
        assert isinstance(mask_plan, _MaskPlan) and softmax_scale > 0
        self._check(q, k, v)
        assert mask_plan.shapes == [x.shape for x in (q, k, v)] and mask_plan.dtype == q.dtype
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        assert mask_plan.has_backward or not learns, "MaskPlan was built without backward payloads"
        return _FlexFunction.apply(q, k, v, mask_plan.pairs, softmax_scale, self.arch)

    def _check(self, *tensors: Tensor) -> None:
        query, key, value = tensors
        dims = query.shape[3], value.shape[3]
        standard = all(8 <= x <= 128 and x % 8 == 0 for x in dims)
        assert standard or dims in ((192, 128), (256, 256))
        assert query.dtype == key.dtype == value.dtype and query.dtype.itemsize == 2
        assert len(query) == len(key) == len(value) and key.shape[:3] == value.shape[:3]
        assert query.shape[2] % key.shape[2] == 0 and query.shape[3] == key.shape[3]
        assert all(is_native(x, 128 if dims == (256, 256) else 16) for x in tensors)


def is_native(x: Tensor, multiple: int) -> bool:
    """Whether a tensor has the layout in memory that the package's kernels take without a copy."""
    steps = [step * x.element_size() for step in x.stride()[:-1]]
    dense = x.stride(-1) == 1 and all(step % multiple == 0 for step in steps)
    return dense and x.data_ptr() % min(multiple, 64) == 0  # memory of the CPU begins at these


class _FlexFunction(Function):
    @staticmethod
    def forward(ctx, query, key, value, pairs, scale, arch):
        ctx.save_for_backward(query, key, value, pairs)
        ctx.scale, ctx.arch = scale, arch
        ctx.set_materialize_grads(False)
        tensors = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = _attend(*tensors, pairs, scale)
        empty = ~pairs.any(3)
        out = torch.where(empty[..., None], GARBAGE, out).to(query.dtype)
        lse = torch.where(empty, GARBAGE, lse).float()
        return out.transpose(1, 2).contiguous(), lse.contiguous()

    @staticmethod
    def backward(ctx, grad, grad_of_lse):
        CALLS.append("backward" if grad_of_lse is None else "backward of lse")
        *tensors, pairs = ctx.saved_tensors
        dims = tensors[0].shape[3], tensors[2].shape[3]
        if grad_of_lse is not None:
            if ctx.arch > 90 and dims == (256, 256):
                raise NotImplementedError("SM100 head-dim 256 backward does not support an LSE ...")
            assert grad_of_lse.stride(-1) == 1
        own = [x.detach().transpose(1, 2).double().requires_grad_() for x in tensors]
        empty = ~pairs.any(3)
        with torch.enable_grad():
            out, lse = _attend(*own, pairs, ctx.scale)
            total = 0 * out.sum()
            if grad is not None:
                assert is_native(grad, 128 if dims == (256, 256) else 16)
                upstream = torch.where(empty[..., None], 0.0, grad.transpose(1, 2).double())
                total = total + (out * upstream).sum()
            if grad_of_lse is not None:
                seen = torch.where(empty, 0.0, lse)
                total = total + (seen * torch.where(empty, 0.0, grad_of_lse.double())).sum()
            grads = torch.autograd.grad(total, own)
        found = [x.transpose(1, 2).to(tensors[0].dtype) for x in grads]
        return *found, None, None, None
