"""FlashAttention-4 as a peer of our kernels. It runs on no CPU, so a stand-in computes its call."""

import torch
from oracles.attention_oracle import assert_close
from oracles.flash_packages import LAST_CALL, installed

import sparsering as sr
from benchmarks.gpu import peers


def test_flash_is_a_peer_on_whole_blocks_where_it_is_installed():
    args = [torch.randn(1, heads, 384, 8) for heads in (2, 1, 1)]
    pattern = sr.RandomBlocks(0.5, 128)
    assert "flash-attn-4" not in peers.sparse(args, pattern, 128, {})
    with installed(4):
        assert "flash-attn-4" not in peers.sparse(args, sr.RandomBlocks(0.5, 64), 128, {})
        run = peers.sparse([x.requires_grad_() for x in args], pattern, 128, {})["flash-attn-4"]
        assert_close(run(), sr.attention(*args, pattern), 1e-6)
        assert LAST_CALL["block_sparse_tensors"] is not None
