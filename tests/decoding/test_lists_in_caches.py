"""Lists of single keys in a `KVCache`: as in one pass, and chunks lay no list in tiles."""

from itertools import pairwise

import pytest
import torch
from oracles.attention_oracle import assert_close
from oracles.listed import JOINS, TOKENS, WITHOUT_DISTANCES

import sparsering as sr
from sparsering.layouts.compile import build_layout, compile_passes
from sparsering.patterns.selected import has_lists

CUTS = (0, 37, 38, 39, 60, 61, TOKENS)


@pytest.mark.parametrize("backend", ["cpu", "gather"])
@pytest.mark.parametrize("name", JOINS)
def test_calls_of_a_cache_are_one_pass(monkeypatch, name, backend):
    pattern, laid = JOINS[name] & sr.Causal(), []
    monkeypatch.setattr(
        "sparsering.layouts.cache.build_layout",
        lambda pattern, *rest: laid.append(pattern) or build_layout(pattern, *rest),
    )
    monkeypatch.setattr(
        "sparsering.decoding.steps.compile_passes",
        lambda pattern, *rest, **more: (
            laid.append(pattern) or compile_passes(pattern, *rest, **more)
        ),
    )
    sr.layout_cache.clear()
    batch = pattern.num_batches() or 1
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(batch, heads, TOKENS, 16, generator=generator) for heads in (4, 2, 2)]
    cache = sr.KVCache(pattern, batch, 2, 16, num_heads=4, max_length=TOKENS)
    options = {"softcap": 4.0, "backend": backend}
    if name not in WITHOUT_DISTANCES and not name.startswith("along"):
        options["distance_bias"] = torch.randn(4, 21, generator=generator)
    parts = [cache.attend(*(y[:, :, a:b] for y in x), **options) for a, b in pairwise(CUTS)]
    exact = {n: y.double() if isinstance(y, torch.Tensor) else y for n, y in options.items()}
    exact["backend"] = "reference"
    expected = sr.attention(*(y.double() for y in x), pattern, **exact)
    assert_close(torch.cat(parts, 2).double(), expected, 3e-6)
    assert not any(map(has_lists, laid))
