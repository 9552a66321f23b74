"""Adapter to FlashAttention-4's block sparsity (the package flash-attn-4; Hopper, Blackwell).

It computes the forward only, because the package's block-sparse backward was wrong on Hopper for
some head dims (flash-attention #2623, #2896). Layouts must have whole blocks of 128: the package
takes masks inside a block as CuTe programs only.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from sparsering.kernels.problem import Problem

_BLOCK = 128
_HEAD_DIMS = (64, 128)


@cache
def _is_installed() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why FlashAttention-4 cannot run on these tensors or on this machine; [] if it can."""
    faults = [] if _is_installed() else ["the package flash-attn-4 is missing"]
    gpus: set[int | None] = {x.device.index for x in tensors if x.is_cuda} or {None}
    capability = torch.cuda.get_device_capability
    if not torch.cuda.is_available() or any(capability(x)[0] not in (9, 10) for x in gpus):
        faults.append("it needs a Hopper or Blackwell GPU")
    if any(x.device.type != "cuda" for x in tensors):
        faults.append("it runs on cuda tensors")
    if any(x.dtype not in (torch.bfloat16, torch.float16) for x in tensors):
        faults.append("it computes in bfloat16 and float16")
    if any(x.dim() and x.shape[-1] not in _HEAD_DIMS for x in tensors):
        faults.append(f"it is tested for head dims {' and '.join(map(str, _HEAD_DIMS))} only")
    return faults


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Computes attention over a layout of whole blocks; lse is float32.

    Raises: NotImplementedError for any other layout; the message has the reasons.
    """
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import flash_attn_func

    layout, frame, faults = problem.layout, problem.layout.frame, []
    if layout.block_size != _BLOCK or frame.q_len % _BLOCK or frame.kv_len % _BLOCK:
        faults.append(f"it needs blocks of {_BLOCK}, and lengths that are multiples of {_BLOCK}")
    if len(layout.passes) != 1:
        faults.append(f"it runs one pass, this layout has {len(layout.passes)}")
    elif not (layout.passes[0].step == 1 and all(layout.passes[0].covers)):
        faults.append("it needs tiles of adjacent tokens, this layout has strided ones")
    if any(len(p.bitmaps) for p in layout.passes):
        faults.append("it needs blocks with all pairs, this layout has masks inside some")
    if faults:
        raise NotImplementedError(f"flash: {'; '.join(faults)}; pass another backend, or None")
    _, query, key, value, scale, *_ = problem.with_positive_scale().with_dense_rows()
    p = layout.passes[0]
    if not p.key_tile.shape[2]:
        lse = torch.full(query.shape[:3], -torch.inf, device=query.device)
        return query.new_zeros(*query.shape[:3], value.shape[3]), lse
    rows, columns = p.query_start.shape[1], p.key_start.shape[1]
    counts = p.row_ptr.diff().int()
    heads = 1 if counts.shape[1] == 1 else query.shape[1]
    slot = torch.arange(columns, device=counts.device)
    place = p.row_ptr[..., :-1, None].long() + slot  # index in `key_tile` of each slot
    place = place.clamp(max=p.key_tile.shape[2] - 1).flatten(2)
    index = p.key_tile.gather(2, place).unflatten(2, (rows, columns))
    index = torch.where(slot < counts[..., None], index, 0)
    counts, index = (x.repeat_interleave(heads // x.shape[1], 1) for x in (counts, index))
    blocks = BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(counts),
        mask_block_idx=torch.zeros_like(index),
        full_block_cnt=counts.contiguous(),
        full_block_idx=index.int().contiguous(),
        block_size=(_BLOCK, _BLOCK),
    )
    out, lse = flash_attn_func(
        *(x.transpose(1, 2) for x in (query, key, value)),
        softmax_scale=scale,
        block_sparse_tensors=blocks,
        return_lse=True,
    )
    empty = (counts == 0).repeat_interleave(_BLOCK, -1).expand(*query.shape[:3])
    out = torch.where(empty[..., None], 0.0, out.transpose(1, 2)).contiguous()
    return out, torch.where(empty, -torch.inf, lse)
