"""Time by density, length and block size: ours against FlexAttention and dense SDPA."""

import torch

from sparsering.patterns.blocks import RandomBlocks
from sparsering.patterns.positions import Causal, SlidingWindow

from ..flex import flex_call, flex_window_call
from ..measure import Row, inputs_of
from .cases import BLOCK, compare, dense, ours


def sweeps(quick: bool) -> list[Row]:
    """Sweeps density, block size and length; forward float32, H4 D64.

    Random blocks of 1% to 100% density and of 16 to 256 tokens; a causal window of 2048 from 1K to
    1M tokens.
    """
    length = 2048 if quick else 8192
    rows: list[Row] = []
    inputs = inputs_of(4, length, 64, torch.float32)
    for density in (0.01, 0.03, 0.1, 0.3, 1.0):
        rows += _random_blocks("density", inputs, RandomBlocks(density, BLOCK), BLOCK, quick)
    for block in (16, 32, 64, 128, 256):
        rows += _random_blocks("block size", inputs, RandomBlocks(0.1, block), block, quick)
    pattern = Causal() & SlidingWindow(2048)
    for exponent in range(10, 14 if quick else 21, 2):
        inputs = inputs_of(4, 1 << exponent, 64, torch.float32)
        calls = {"cpu": ours(inputs, pattern)}
        if exponent <= 14:
            calls["dense"] = dense(inputs)
            calls["flex"] = flex_window_call(inputs, 2048)
        rows += _of("length", compare(calls, inputs, pattern, BLOCK, quick))
    return rows


def _random_blocks(
    sweep: str, inputs: list[torch.Tensor], pattern: RandomBlocks, block: int, quick: bool
) -> list[Row]:
    calls = {
        "cpu": ours(inputs, pattern, block),
        "dense": dense(inputs),
    }
    if block >= 32:
        calls["flex"] = flex_call(inputs, pattern, block)
    return _of(sweep, compare(calls, inputs, pattern, block, quick))


def _of(sweep: str, rows: list[Row]) -> list[Row]:
    return [{"sweep": sweep, **row} for row in rows]
