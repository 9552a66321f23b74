"""Stand-ins of FlashAttention-3 and -4, which run on no CPU: their functions by definition.

The names, order and defaults of arguments, the shapes of results and the alignment of queries are
those of flash_attn_interface 3.0 and flash_attn.cute 4.0 (August 2026). The stand-ins refuse what
this library has no reason to pass. Rows without keys are garbage: the packages promise nothing
about them, or not the same.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from oracles.attention_oracle import dense_attention
from sparsering.kernels.backends import BACKENDS
from sparsering.kernels.library import flash

GARBAGE = 7.0
LAST_CALL: dict[str, Any] = {}
"""Name and arguments of the last call of a stand-in, by keyword."""


class BlockSparseTensorsTorch(NamedTuple):
    """As in flash_attn.cute.block_sparsity."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


@contextmanager
def installed(*versions: int, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Installs the stand-ins of FlashAttention-3, -4 or both, on a GPU of some compute capability.

    The backend then takes tensors of the CPU, and of any dtype.
    """
    usable = BACKENDS["flash"]._replace(reasons=lambda *tensors: [])
    with (
        imported(modules(versions, capability)),
        mock.patch.dict(BACKENDS, {"flash": usable}),
        mock.patch.object(flash, "_installed", lambda: versions),
        mock.patch.object(flash, "capability_of", lambda device: capability),
    ):
        LAST_CALL.clear()
        yield


@contextmanager
def imported(stand_ins: dict[str, Any]) -> Iterator[None]:
    """Puts modules among the imported ones; leaves alone what else is imported meanwhile."""
    before = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(before)


def modules(versions: tuple[int, ...], capability: tuple[int, int]) -> dict[str, Any]:
    """Returns modules by name; None for those whose import must fail."""
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    names += ("flash_attn.cute.block_sparsity", "flash_attn_interface")
    found: dict[str, Any] = {name: ModuleType(name) for name in names}
    fourth = _FourthFlashAttention(capability)
    found["flash_attn.cute"].interface = found["flash_attn.cute.interface"]
    for name in ("flash_attn.cute", "flash_attn.cute.interface"):
        found[name].flash_attn_func = fourth.flash_attn_func
        found[name].flash_attn_varlen_func = fourth.flash_attn_varlen_func
    found["flash_attn.cute.block_sparsity"].BlockSparseTensorsTorch = BlockSparseTensorsTorch
    found["flash_attn_interface"].flash_attn_func = third_flash_attn_func
    found["flash_attn_interface"].flash_attn_varlen_func = third_flash_attn_varlen_func
    if 3 not in versions:
        found["flash_attn_interface"] = None
    if 4 not in versions:
        found = {name: None if "cute" in name else module for name, module in found.items()}
    return found


# FlashAttention-3


def third_flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_interface.flash_attn_func: [B, N, H, D] -> (out, lse [B, H, N])."""
    _note("3 dense", locals())
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk, softcap, sm_margin)
    assert num_splits == 1 and return_attn_probs, "without return_attn_probs it returns out alone"
    out, lse = _dense(q, k, v, softmax_scale, _third_pairs(q, k, causal, window_size))
    return out, _WithoutGradient.apply(lse, out)


def third_flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """flash_attn_interface.flash_attn_varlen_func: [T, H, D] -> (out, lse [H, T])."""
    _note("3 varlen", locals())
    _refuse(seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, attention_chunk, softcap)
    assert num_splits == 1 and return_attn_probs, "without return_attn_probs it returns out alone"
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = _varlen(
        q, k, v, *bounds, softmax_scale, lambda a, b: _third_pairs(a, b, causal, window_size)
    )
    return out, _WithoutGradient.apply(lse, out)


class _WithoutGradient(torch.autograd.Function):
    """Lse as FlashAttention-3 returns it: it says that it has a gradient, and drops it."""

    @staticmethod
    def forward(ctx, lse: Tensor, out: Tensor) -> Tensor:
        return lse.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(grad), None


def _third_pairs(q: Tensor, k: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    """Bool [Nq, Nk]; a bound below 0 is none."""
    left, right = (None if bound < 0 else bound for bound in window)
    return _pairs(q, k, left, 0 if causal else right)


# FlashAttention-4


class _FourthFlashAttention:
    """The functions of flash_attn.cute.interface on a GPU of some compute capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.is_blackwell = capability[0] > 9

    def flash_attn_func(
        self, q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
        aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None,
        return_lse=False,
    ):  # fmt: skip
        """[B, N, H, D] -> (out, lse [B, H, N])."""
        _note("4 dense", locals())
        _refuse(qv, gather_kv_indices, learnable_sink, softcap, score_mod, score_mod_bwd, mask_mod)
        _refuse(aux_tensors, aux_scalars)
        assert num_splits == 1 and return_lse, "without return_lse, lse may be None"
        pairs = _fourth_pairs(q, k, causal, window_size)
        if block_sparse_tensors is not None:
            assert not causal and window_size == (None, None) and pack_gqa is False
            visits = self._visits(block_sparse_tensors, q, k)
            learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            assert learns == (block_sparse_tensors_bwd is not None), "dense gradients without it"
            if learns:
                turned = self._visits(block_sparse_tensors_bwd, q, k, backward=True)
                assert torch.equal(turned.mT, visits)
            pairs = visits.repeat_interleave(self._rows(q), 2).repeat_interleave(128, 3)
            pairs = pairs[:, :, : q.shape[1]]
        return _dense(q, k, v, softmax_scale, pairs)

    def flash_attn_varlen_func(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
        gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
        block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,
        scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    ):  # fmt: skip
        """[T, H, D] -> (out, lse [H, T])."""
        _note("4 varlen", locals())
        _refuse(qv, min_seqlen_k, seqused_q, seqused_k, gather_kv_indices, page_table, softcap)
        _refuse(learnable_sink, score_mod, score_mod_bwd, mask_mod, block_sparse_tensors)
        assert num_splits == 1 and return_lse, "without return_lse, lse may be None"
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return _varlen(
            q, k, v, *bounds, softmax_scale, lambda a, b: _fourth_pairs(a, b, causal, window_size)
        )

    def _rows(self, q: Tensor) -> int:
        """Queries of a block: on Blackwell a program has two tiles of 128, if there are two."""
        return 256 if self.is_blackwell and q.shape[1] > 128 else 128

    def _visits(
        self, told: BlockSparseTensorsTorch, q: Tensor, k: Tensor, backward: bool = False
    ) -> Tensor:
        """Bool [B, H, rows, columns], of the backward's tensors [B, H, columns, rows]."""
        assert isinstance(told, BlockSparseTensorsTorch)
        assert told.block_size == (self._rows(q), 128) and not told.mask_block_cnt.any()
        outer = len(q), q.shape[2]
        sizes = -(-q.shape[1] // self._rows(q)), k.shape[1] // 128
        visits = torch.zeros(*outer, *(sizes[::-1] if backward else sizes), dtype=torch.bool)
        for counts, index in (told[:2], told[2:4]):
            assert counts.dtype == index.dtype == torch.int32 and index.shape[:3] == counts.shape
            assert index.shape[2:] == visits.shape[2:] and q.shape[1] % 128 == 0 == k.shape[1] % 128
            assert index.shape[0] in (1, outer[0]) and index.shape[1] in (1, outer[1])
        counts = told.full_block_cnt.expand(visits.shape[:3])
        index = told.full_block_idx.expand(visits.shape)
        for place in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
            listed = index[tuple(place)][: counts[tuple(place)]].long()
            assert len(listed.unique()) == len(listed)
            visits[tuple(place)][listed] = True
        return visits


def _fourth_pairs(q: Tensor, k: Tensor, causal: bool, window: tuple) -> Tensor:
    """Bool [Nq, Nk]; a bound of None is none."""
    left, right = window
    assert all(bound is None or bound >= 0 for bound in window)
    return _pairs(q, k, left, 0 if causal else right)


# Both


def _note(name: str, arguments: dict[str, Any]) -> None:
    LAST_CALL.clear()
    LAST_CALL.update(name=name, **arguments)


def _refuse(*values: object) -> None:
    assert all(value is None or value == 0 for value in values), values


def _pairs(q: Tensor, k: Tensor, left: int | None, right: int | None) -> Tensor:
    """Bool [Nq, Nk]; the last query is at the last key."""
    q_len, kv_len = q.shape[-3], k.shape[-3]
    distance = torch.arange(kv_len) - (torch.arange(q_len)[:, None] + kv_len - q_len)
    pairs = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left is not None:
        pairs &= distance >= -left
    return pairs if right is None else pairs & (distance <= right)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, Nq, H, Dv], lse [B, H, Nq]) of tensors [B, N, H, D]."""
    assert type(scale) is float and scale > 0 and q.shape[2] % k.shape[2] == 0
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32  # of sums
    tensors = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    out, lse = dense_attention(*tensors, pairs, scale=scale)
    seen = pairs.any(-1).expand(lse.shape)
    lse = torch.where(seen, lse, GARBAGE)
    out = torch.where(seen[..., None], out, GARBAGE)
    return out.transpose(1, 2).to(q.dtype), lse


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int,
    scale: float, pairs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [T, H, Dv], lse [H, T]) of tensors [T, H, D]."""
    for cu, most, x in ((cu_q, most_q, q), (cu_k, most_k, k)):
        assert cu.dtype == torch.int32 and cu.is_contiguous() and x.dim() == 3
        assert cu[0] == 0 and cu[-1] == len(x) and cu.diff().min() >= 0
        assert type(most) is int and cu.diff().max() <= most
    assert len(cu_q) == len(cu_k)
    outs, lses = [], []
    for document in range(len(cu_q) - 1):
        own = [
            x[cu[document] : cu[document + 1]][None] for cu, x in ((cu_q, q), (cu_k, k), (cu_k, v))
        ]
        if not own[1].shape[1]:
            rows = own[0].shape[1]
            outs.append(q.new_full((rows, q.shape[1], v.shape[2]), GARBAGE))
            lses.append(q.new_full((q.shape[1], rows), GARBAGE, dtype=torch.float32))
            continue
        out, lse = _dense(*own, scale, pairs(own[0], own[1]))
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)
