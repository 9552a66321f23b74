"""FlashAttention-4 as a peer. It runs on no CPU: what is tested is what it would be told."""

import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from oracles.attention_oracle import Case, assert_close, attend_by_rows, inputs
from torch import Tensor

import sparsering as sr
from benchmarks.gpu import block_sparse
from sparsering.kernels.problem import Problem


class BlockSparseTensorsTorch(NamedTuple):
    """As in flash_attn.cute.block_sparsity of 4.0.0b36."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def stand_in(query, key, value, *, softmax_scale, block_sparse_tensors, return_lse):
    """flash_attn_func on [B, N, H, D] by definition, over the blocks that it is told."""
    told = block_sparse_tensors
    assert told.block_size == (128, 128) and not told.mask_block_cnt.any() and return_lse
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    visited = torch.zeros(len(q), q.shape[1], q.shape[2] // 128, k.shape[2] // 128)
    shape = told.full_block_idx.shape
    assert told.full_block_cnt.dtype == told.full_block_idx.dtype == torch.int32
    assert shape[:3] == told.full_block_cnt.shape and shape[3] == visited.shape[3]
    assert shape[0] in (1, len(q)) and shape[1] in (1, q.shape[1])
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in visited.shape[:3])).tolist():
        own = (b % shape[0], h if shape[1] > 1 else 0, i)
        listed = told.full_block_idx[own][: told.full_block_cnt[own]].long()
        assert len(listed.unique()) == len(listed)
        visited[b, h, i, listed] = 1
    counts = visited.repeat_interleave(128, 2).repeat_interleave(128, 3)
    empty = counts.sum(-1) == 0
    counts[..., 0] += empty  # it promises nothing about such rows
    out, lse = attend_by_rows(q.double(), k.double(), v.double(), counts, softmax_scale)
    return out.to(query.dtype).transpose(1, 2), lse.float()


@pytest.fixture
def flash_attn(monkeypatch) -> None:
    package = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    sparsity = SimpleNamespace(BlockSparseTensorsTorch=BlockSparseTensorsTorch)
    interface = SimpleNamespace(flash_attn_func=stand_in)
    for name, module in zip(("flash_attn", "flash_attn.cute"), package, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", sparsity)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    "pattern",
    [
        sr.RandomBlocks(0.5, 128),
        sr.Blocks(
            torch.tensor([[True, False, True], [False, False, False], [True, True, True]]), 128
        ),
        sr.Blocks(torch.zeros(3, 3, dtype=torch.bool), 128),
        sr.BlockWindow(1, 128),
    ],
    ids=["of each head", "an empty row", "nothing", "window"],
)
@pytest.mark.parametrize("scale", [0.1, -0.1])
def test_flash_is_told_the_blocks_of_the_layout(pattern, scale):
    case = Case(1, 2, 1, 384, 384, 4, 4, 128)
    args = inputs(case, torch.float32, requires_grad=False)
    layout = pattern.layout(**case.heads, block_size=128)
    out, lse = block_sparse.flash_forward(Problem(layout, *args, scale))
    exact = sr.attention(
        *args, pattern, scale=scale, block_size=128, backend="reference", return_lse=True
    )
    assert out.is_contiguous()
    assert_close(out, exact[0], 1e-6)
    assert_close(lse, exact[1], 1e-6)


@pytest.mark.usefixtures("flash_attn")
def test_flash_refuses_what_it_cannot_do_and_says_why():
    args = inputs(Case(1, 2, 1, 200, 200, 4, 4), torch.float32, requires_grad=False)
    for pattern, size, told in (
        (sr.Causal(), 128, "masks inside"),
        (sr.Full(), 64, "blocks of 128"),
        (sr.Full(), 128, "multiples"),
        (sr.Full() + sr.Full(), 128, "one pass, this layout has 2"),
        (sr.Dilated(400, 2), 128, "strided"),
    ):
        layout = pattern.layout(200, num_heads=2, num_kv_heads=1, block_size=size)
        with pytest.raises(NotImplementedError, match=f"flash: .*{told}.*pass another backend"):
            block_sparse.flash_forward(Problem(layout, *args, 1.0))
