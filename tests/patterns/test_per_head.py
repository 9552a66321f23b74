"""`PerHead`: what it means stands in drawings and strategies; here are its laws and its errors."""

import pickle

import pytest
import torch

import sparsering as sr
from sparsering.layouts.layout import BlockLayout

STREAMING = sr.Causal() & (sr.SlidingWindow(15) | sr.GlobalTokens(4, rows=False))
HALVES = (sr.Causal(), sr.Causal(), STREAMING, STREAMING)


def test_it_is_written_and_read_as_text():
    pattern = sr.PerHead(HALVES)
    assert sr.parse(pattern.expression) == pattern
    assert sr.parse(repr(pattern)) == pattern
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert pattern == sr.PerHead(list(HALVES))
    assert pattern != sr.PerHead(HALVES[::-1])


def test_tensors_of_its_patterns_are_numbered_through():
    one, two = torch.rand(2, 3, 8, 8) < 0.5
    pattern = sr.PerHead((sr.Dense(one[0]), sr.Causal(), sr.Dense(two[0])))
    assert len(pattern.tensors) == 2
    assert sr.parse(pattern.expression, pattern.tensors) == pattern
    dense = pattern.to_dense(8, num_heads=3)
    assert torch.equal(dense[0], one[0])
    assert torch.equal(dense[2], two[0])


def test_equal_patterns_are_compiled_once(monkeypatch):
    from sparsering.layouts import compile as compiling

    compiled = []
    table_of = compiling.compile_table

    def counted(ground, mask, *rest):
        compiled.append(mask)
        return table_of(ground, mask, *rest)

    monkeypatch.setattr(compiling, "compile_table", counted)
    layout = sr.PerHead(HALVES).layout(321, num_heads=8, num_kv_heads=4, block_size=16)
    assert isinstance(layout, BlockLayout)
    assert set(compiled) == {sr.Causal(), STREAMING}
    assert len(compiled) == 2


def test_heads_with_other_tiles_have_passes_of_their_own():
    """Head 1 alone is dilated: the tiles of rate 4 hold no pair of head 0."""
    layout = sr.PerHead((sr.Causal(), sr.Dilated(64, 4))).layout(256, num_heads=2, block_size=16)
    entries = {p.step: p.num_entries.tolist() for p in layout.passes}
    assert entries == {1: [[136, 0]], 4: [[0, 4]]}


@pytest.mark.parametrize("split", [True, False])
def test_one_pattern_for_all_heads_is_that_pattern(split):
    q, k, v = torch.randn(3, 1, 4, 200, 16)
    window = sr.Causal() & sr.SlidingWindow(20)
    patterns = (window,) * 4 if split else [window] * 4
    assert torch.equal(sr.attention(q, k, v, sr.PerHead(patterns)), sr.attention(q, k, v, window))
    layout = sr.PerHead(patterns).layout(200, num_heads=4)
    assert layout.passes[0].row_ptr.shape[1] == 1


def test_it_combines_with_other_patterns():
    whole = sr.PerHead((sr.Full(), sr.SlidingWindow(3)))
    joined = sr.Packed((10, 20), whole & sr.Causal()) | sr.GlobalTokens(1, rows=False)
    dense = joined.to_dense(30, num_heads=2)
    for head, part in enumerate((sr.Full(), sr.SlidingWindow(3))):
        one = sr.Packed((10, 20), part & sr.Causal()) | sr.GlobalTokens(1, rows=False)
        assert torch.equal(dense[head], one.to_dense(30)[0])
    removed = sr.Causal() - whole
    assert removed.to_dense(30, num_heads=2)[0].sum() == 0


def test_its_live_keys_are_those_of_each_head():
    pattern = sr.PerHead((sr.Causal(), STREAMING))
    of_all, of_near = pattern.live_keys(100, num_heads=4, num_kv_heads=2)
    assert of_all.tolist() == [*range(100)]
    assert of_near.tolist() == [0, 1, 2, 3, *range(85, 100)]
    assert sr.PerHead((STREAMING, STREAMING)).cache_bound(num_heads=2) == 19


@pytest.mark.parametrize(
    ("patterns", "error", "text"),
    [
        ((), ValueError, "needs a sequence with a pattern for each kv head, got ()"),
        (sr.Causal(), ValueError, "needs a sequence with a pattern for each kv head, got Causal()"),
        ("Causal()", ValueError, "needs a sequence"),
        ((sr.Causal(), sr.Full), TypeError, "got the class Full; call it with its arguments"),
        ((sr.Causal(), None), TypeError, "needs a pattern for each kv head"),
        (
            (sr.SelectedBlocks(torch.zeros(1, 1, dtype=torch.int64), 16), sr.Causal()),
            ValueError,
            "PerHead takes no SelectedBlocks",
        ),
    ],
)
def test_what_is_no_pattern_per_head_is_refused(patterns, error, text):
    with pytest.raises(error) as caught:
        sr.PerHead(patterns)
    assert text in str(caught.value)


def test_another_number_of_heads_is_refused_in_a_call():
    q, k, v = torch.randn(1, 6, 8, 4), *torch.randn(2, 1, 3, 8, 4)
    with pytest.raises(ValueError, match="a pattern for each of the 3 kv heads, got 4"):
        sr.attention(q, k, v, sr.PerHead(HALVES))
    with pytest.raises(ValueError, match="a pattern for each of the 2 kv heads, got 4"):
        sr.KVCache(sr.PerHead(HALVES), 1, 2, 16)
