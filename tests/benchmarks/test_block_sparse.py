"""cuDNN and FlashInfer as peers. They run on no CPU: stand-ins compute what they are told.

That of FlashInfer has the signature of `flashinfer.BlockSparseAttentionWrapper`.
"""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from oracles.attention_oracle import dense_attention
from torch import Tensor

import sparsering as sr
from benchmarks.gpu import block_sparse, shapes
from sparsering.kernels.backends import BACKENDS

BLOCK, LENGTH, HEADS = 64, 1024, 2
PATTERN = sr.RandomBlocks(0.5, BLOCK, seed=3, per_head=False)
PER_HEAD = sr.RandomBlocks(0.5, BLOCK, per_head=True)


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Dense attention [B, H, N, D] under a mask of blocks [B, H, rows, columns]."""
    mask = blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    return dense_attention(query, key, value, mask)


class BlockSparseAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, *,
        q_data_type="float16", kv_data_type=None, o_data_type="float16",
    ):  # fmt: skip
        assert (M, N, R, C) == (LENGTH, LENGTH, BLOCK, BLOCK) and head_dim == 16
        assert num_qo_heads == num_kv_heads == HEADS and indptr.dtype == indices.dtype
        assert q_data_type == kv_data_type == o_data_type == torch.float32
        self.blocks = torch.zeros(1, 1, M // R, N // C, dtype=torch.bool)
        for row, (begin, end) in enumerate(itertools.pairwise(indptr)):
            self.blocks[0, 0, row, indices[begin:end].long()] = True

    def run(self, q, k, v):
        assert all(x.is_contiguous() and x.shape == (LENGTH, HEADS, 16) for x in (q, k, v))
        own = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attend(*own, self.blocks)[0][0].transpose(0, 1)


@pytest.fixture
def installed(monkeypatch) -> None:
    monkeypatch.setattr(block_sparse, "find_spec", lambda name: True)
    monkeypatch.setitem(BACKENDS, "cudnn", BACKENDS["gather"])  # see tests/kernels/test_cudnn.py
    flashinfer = SimpleNamespace(BlockSparseAttentionWrapper=BlockSparseAttentionWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)


@pytest.fixture
def args() -> list[Tensor]:
    return [torch.randn(1, HEADS, LENGTH, 16) for _ in range(3)]


def exact(args: list[Tensor], pattern: sr.Pattern, grad: Tensor) -> list[Tensor]:
    own = [x.detach().double().requires_grad_() for x in args]
    out = sr.attention(*own, pattern, backend="reference")
    return [out, *torch.autograd.grad(out, own, grad.double())]


@pytest.mark.usefixtures("installed")
def test_flashinfer_is_told_the_blocks_of_the_layout(args):
    layout = PATTERN.layout(LENGTH, num_heads=HEADS, block_size=BLOCK)
    out = block_sparse.FlashInfer(args, BLOCK).call(layout)()
    assert torch.allclose(out, exact(args, PATTERN, args[0])[0].float(), atol=1e-5)
    of_heads = PER_HEAD.layout(LENGTH, num_heads=HEADS, block_size=BLOCK)
    with pytest.raises(NotImplementedError, match="one list of blocks for all heads"):
        block_sparse.sparse_rows(of_heads)


@pytest.fixture
def small(monkeypatch) -> None:
    for name, value in (("MAIN_TOKENS", LENGTH), ("HEADS", HEADS)):
        monkeypatch.setattr(shapes, name, value)
    monkeypatch.setattr(shapes, "taken", lambda calls: {name: {"ms": 2.0} for name in calls})
    monkeypatch.setattr(shapes, "ours", lambda args, pattern, block: lambda: sr.attention(
        *args, pattern, block_size=block, backend="gather"
    ))  # fmt: skip


@pytest.mark.usefixtures("small", "installed")
def test_the_share_of_dense_is_of_our_own_full_attention():
    rows = {(row["backend"], row["case"]): row for row in shapes.share_of_dense(16, BLOCK)}
    for case in ("forward", "forward+backward"):
        assert rows["ours, dense", case]["share_of_dense"] == 1.0
        for name in ("ours", block_sparse.CUDNN):
            row = rows[name, case]  # at equal times, the share is the density
            assert row["share_of_dense"] == pytest.approx(row["density"]) and row["error"] < 1e-5
    peer = rows["flashinfer", "forward"]
    assert peer["share_of_dense"] == pytest.approx(0.125) and peer["error"] < 1e-5
    assert rows["flashinfer", "forward+backward"]["left_out"] == "no backward"


@pytest.mark.usefixtures("small")
def test_a_package_that_is_missing_is_named():
    rows = list(shapes.share_of_dense(16, BLOCK))
    missing = {row["backend"]: row["failed"] for row in rows if "failed" in row}
    said = missing.pop(block_sparse.CUDNN)
    assert said.startswith("NotImplementedError: cudnn: the package nvidia-cudnn-frontend is not")
    assert missing == {
        block_sparse.FLASHINFER: "ImportError: the package flashinfer-python is not installed"
    }


@pytest.mark.usefixtures("small", "installed")
def test_new_masks_are_timed_to_the_launch_of_the_first_tile(monkeypatch):
    turns = []

    def until(start):
        turns.append(start)
        return len(turns), 2.0 * len(turns)

    monkeypatch.setattr(shapes, "_until_launched", until)
    rows = {row["backend"]: row for row in shapes.new_masks(BLOCK)}
    assert list(rows) == [f"ours, {name}" for name in ("indices", "scores", "bool mask")] + [
        "flashinfer, plan"
    ]
    assert rows["ours, indices"]["ms"] == 5.0 and rows["ours, indices"]["first_tile_ms"] == 10.0
    assert rows["flashinfer, plan"]["ms"] > 0 and len(turns) == 18
