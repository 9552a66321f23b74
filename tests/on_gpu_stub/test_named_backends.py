"""Backends that run only when they are named, by what they say of the tensors of a GPU."""

import pytest
import torch
from gpu_stub import gpu

import sparsering as sr
from sparsering.kernels.library import flash


@pytest.mark.parametrize(
    ("capability", "versions", "told"),
    [
        (90, (), "neither FlashAttention-4 (package flash-attn-4) nor FlashAttention-3"),
        (80, (4,), "it needs a GPU of compute capability 9 (Hopper), or 10 or 11 (Blackwell), got"),
        (100, (3,), "FlashAttention-3 is for Hopper; Blackwell needs the package flash-attn-4"),
        (90, (3,), ""),
        (100, (3, 4), ""),
    ],
)
def test_flash_says_of_each_gpu_whether_it_can_run(capability, versions, told, monkeypatch):
    monkeypatch.setattr(flash, "_installed", lambda: versions)
    with gpu(capability) as device:
        x = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16, device=device)
        for reasons in (sr.backends()["flash"], flash.reasons(x, x, x)):
            assert len(reasons) == bool(told) and "".join(reasons).startswith(told)
        (line,) = [
            line
            for line in sr.explain(x, x, x, sr.Causal()).split("\n")
            if line.startswith("flash")
        ]
        assert line.startswith(f"flash: {told or 'usable (only when named)'}")
        wide = x[..., :1].expand(-1, -1, -1, 192)
        if versions == (3, 4):
            assert flash.reasons(wide, wide, wide) == [
                "on Blackwell it runs head dims up to 128, and 256, got 192"
            ]
