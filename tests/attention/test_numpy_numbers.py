"""numpy's integers and floats are taken wherever Python's are, with the same result."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsering as sr
from sparsering import models, selection
from sparsering.distributed import RingPlan, shard, simulate_ring
from sparsering.nn import SelectedAttention
from sparsering.planning.sizes import parse_tokens

QUERY, KEY, VALUE = torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
INPUTS = (QUERY, KEY, VALUE, sr.Causal())
FLAT = [x[0].transpose(0, 1) for x in INPUTS[:3]]
MODEL = models.LongNetLM(sr.Causal(), width=16, num_layers=1, vocab_size=11)


def cached(n: Callable[[int], Any]) -> Tensor:
    cache = sr.KVCache(sr.Causal(), n(1), n(2), n(8), page_size=n(32), rollback=n(20))
    cache.attend(*INPUTS[:3], lengths=[n(30)])
    cache.crop(n(25))
    cache.repeat(n(2))
    cache.select([n(0)])
    return cache.attend(*INPUTS[:3])


CALLS: dict[str, Callable[[Callable[[int], Any], Callable[[float], Any]], Any]] = {
    "attention": lambda n, x: sr.attention(
        *INPUTS, q_start=n(0), block_size=n(16), scale=x(0.5), softcap=x(2.0), dropout_p=x(0.25),
        dropout_seed=n(3), backend="gather",
    ),
    "scale of an integer": lambda n, x: sr.attention(*INPUTS, scale=n(1)),
    "weights": lambda n, x: sr.attention_weights(
        QUERY, KEY, sr.Causal(), block_size=n(16), q_start=n(0)
    ).values,
    "varlen": lambda n, x: sr.attention_varlen(*FLAT, [n(0), n(9), n(40)], [n(0), n(9), n(40)]),
    "layout": lambda n, x: str(sr.Causal().layout(n(40), num_heads=n(2), block_size=n(16))),
    "random blocks": lambda n, x: str(sr.RandomBlocks(x(0.5), n(16), seed=n(2))),
    "live keys": lambda n, x: sr.SlidingWindow(n(3)).live_keys(n(40), num_heads=n(2))[0],
    "cache": lambda n, x: cached(n),
    "kept": lambda n, x: sr.dropout_kept(n(3), x(0.5), n(0), n(1), n(2), n(1)),
    "alibi": lambda n, x: sr.alibi(torch.ones(2), n(3)),
    "ring": lambda n, x: simulate_ring(*INPUTS, world_size=n(2)),
    "plan": lambda n, x: str(RingPlan.build(sr.Causal(), n(64), n(2), block_size=n(16))),
    "shard": lambda n, x: shard(QUERY, dim=n(-2)),
    "scores": lambda n, x: selection.block_scores(QUERY, KEY, n(16), q_start=n(0)),
    "selected": lambda n, x: SelectedAttention(
        n(16), n(4), block_size=n(16), k=n(2), dense_below=n(3)
    ).dense_below,
    "generate": lambda n, x: list(
        MODEL.generate(torch.ones(1, 5, dtype=torch.int64), n(3), top_k=n(1))
    ),
    "tokens": lambda n, x: parse_tokens(n(5)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_numpys_numbers_are_pythons(name: str):
    expected = CALLS[name](int, float)
    for integer, real in ((np.int64, np.float64), (np.int32, np.float32)):
        found = CALLS[name](integer, real)
        same = torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
        assert same, (found, expected)


def test_a_truth_value_of_numpy_is_no_integer():
    with pytest.raises(ValueError, match="q_start must be an int or None"):
        sr.attention(*INPUTS, q_start=np.True_)
    with pytest.raises(ValueError, match="block_size must be a multiple of 16"):
        sr.Causal().layout(40, block_size=np.array([16, 16]))
