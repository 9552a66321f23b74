"""Block sizes where none is named: by how many pairs tiles hold for nothing."""

import pytest
import torch

import sparsering as sr
from sparsering.layouts import compile as compiler
from sparsering.layouts.compile import chosen_block_size, default_block_size
from sparsering.layouts.terms import typical
from sparsering.patterns.algebra import Frame

CPU = torch.device("cpu")


def chosen(pattern: sr.Pattern, length: int, heads: int = 2) -> int:
    return chosen_block_size(pattern, Frame.build(length, length, heads, heads, None), CPU)


PATTERNS = (
    sr.Full(),
    sr.Causal(),
    sr.SlidingWindow(15, 16),
    sr.SlidingWindow(127),
    sr.SlidingWindow(300),
    sr.SlidingWindow(1000),
    sr.LongNet((256, 1024), (1, 4)) & sr.Causal(),
    sr.Dilated(512, 4),
    sr.Causal() & (sr.SlidingWindow(31) | sr.GlobalTokens(4)),
    sr.Documents((300,) * 4),
)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_smaller_size_is_taken_where_its_tiles_hold_fewer_pairs(pattern):
    """By whole layouts, where the choice looks at a sample."""
    length = 1200
    held = {}
    for size in (32, 64, 128):
        layout = pattern.layout(length, num_heads=2, block_size=size)
        counts = torch.cat([layout.entries(0, head)[:, 2:] for head in range(2)])
        held[size] = int(((counts + 15) // 16 * 16).prod(1).sum())
    expected = 128
    if held[64] <= 0.92 * held[128]:
        expected = 32 if held[32] <= 0.6 * held[64] else 64
    assert chosen(pattern, length) == expected
    assert pattern.layout(length, num_heads=2).block_size == expected


def test_wide_patterns_keep_128_and_narrow_ones_do_not():
    assert chosen(sr.Full(), 8192) == chosen(sr.Causal(), 8192) == 128
    assert chosen(sr.SlidingWindow(15), 8192) == 32
    assert chosen(sr.SlidingWindow(127), 8192) == 64
    assert chosen(sr.SlidingWindow(4095), 8192) == 128
    assert chosen(sr.LongNet((256, 65536), (1, 256)) & sr.Causal(), 1 << 17) in (64, 128)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        (sr.BlockCausal(16), 128),
        (sr.BlockCausal(32) & sr.SlidingWindow(900), 64),
        (sr.BlockDiffusion(2048, 32), 64),
        (sr.BlockWindow(4, 16) & sr.Causal(), 32),
        (sr.BlockWindow(0, 16), 16),
        (sr.RandomBlocks(0.1, 16), 16),
        (sr.RandomBlocks(0.6, 32), 32),
        (sr.RandomBlocks(0.9, 16), 128),
        (sr.RandomBlocks(0.1, 64), 64),
        (sr.BlockCausal(48), 48),  # 128 is no multiple of 48
        (sr.BlockWindow(4, 16) & sr.KeyPadding((3000, 4096)), 32),
    ],
    ids=str,
)
def test_small_blocks_are_taken_together_where_their_tiles_hold_few_other_pairs(pattern, size):
    """By whole layouts: a pair of tiles of 16, 32, 64 costs 2.06, 1.24, 1.05 of one of 128."""
    assert chosen(pattern, 4096) == size
    assert pattern.layout(4096, num_heads=2).block_size == size
    own = default_block_size(pattern, 4096)
    cost = {128: 1.0, 64: 1 / 0.95, 32: 1 / 0.95 / 0.85, 16: 1 / 0.95 / 0.85 / 0.6}
    if own < 64 and own in cost:
        costs = {
            x: y * pattern.layout(4096, num_heads=2, block_size=x).density
            for x, y in cost.items()
            if x >= own
        }
        assert costs[size] <= 1.05 * min(costs.values())


def test_own_blocks_few_keys_single_queries_and_gpus_stay_as_they_were():
    named = sr.BlockWindow(1, 128) & sr.Causal()
    assert chosen(named, 4096) == default_block_size(named, 4096) == 128
    assert chosen(sr.SlidingWindow(3), 100) == 128
    window = sr.SlidingWindow(15)
    assert chosen_block_size(window, Frame.build(1, 4096, 2, 2, None), CPU) == 128
    frame = Frame.build(4096, 4096, 2, 2, None)
    assert chosen_block_size(window, frame, torch.device("cuda")) == 128
    assert chosen_block_size(window, frame._replace(num_heads=0, num_kv_heads=0), CPU) == 128


def test_masks_of_keys_change_no_block_size():
    window = sr.SlidingWindow(15) & sr.KeyPadding((3000, 4096))
    assert chosen(window, 4096) == chosen(sr.SlidingWindow(15), 4096) == 32


def test_what_does_not_fit_is_refused_as_by_a_call():
    with pytest.raises(ValueError, match="Documents"):
        chosen(sr.Documents((100, 200)), 400)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_runs_is_the_size_that_layout_and_explain_tell(dtype):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 300, 16, dtype=dtype) for _ in range(3))
    for pattern, size in ((sr.SlidingWindow(9), 32), (sr.Causal(), 64), (sr.Full(), 128)):
        assert pattern.layout(300, num_heads=2).block_size == size
        assert f"cpu, blocks of {size}" in sr.explain(query, key, value, pattern)
        out = sr.attention(query, key, value, pattern)
        assert torch.equal(out, sr.attention(query, key, value, pattern, block_size=size))
        exact = sr.attention(*(x.double() for x in (query, key, value)), pattern)
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        assert float((out.double() - exact).abs().max()) <= bound * float(exact.abs().max())


def kind(pattern, length):
    return typical(pattern, Frame.build(length, length, 1, 1, None))


def test_a_choice_holds_for_a_kind_of_pattern():
    """Other documents and windows of a step need no new choice; other kinds do."""
    kinds = [
        [sr.SlidingWindow(1000), sr.SlidingWindow(1020)],
        [sr.SlidingWindow(500) | sr.GlobalTokens(4)],
        [sr.SlidingWindow(500) | sr.GlobalTokens(16)],
        [sr.Documents(x) & sr.Causal() for x in ((1000, 40, 3000, 960), (5, 5, 4000, 990))],
        [sr.Documents((100,) * 50) & sr.Causal()],
        [sr.Packed((4000, 1000), sr.SlidingWindow(x)) for x in (60, 66)],
        [sr.Packed((4000, 1000), sr.SlidingWindow(20))],
        [sr.Tree((2000, 3000 - x, x, *(0,) * 5), (-1,) + (0,) * 7) for x in (900, 1500)],
        [sr.Tree((2000, 1000, 2000, *(0,) * 5), (-1, *range(7)))],
        [sr.SlidingWindow(900, 0, 2)],
    ]
    found = [{kind(pattern, 5000) for pattern in alike} for alike in kinds]
    assert all(len(alike) == 1 for alike in found)
    assert len(set.union(*found)) == len(kinds)
    assert kind(sr.SlidingWindow(1000), 9000) != kind(sr.SlidingWindow(1000), 5000)
    own = sr.SlidingWindow(768) | sr.Dilated(1024, 2)
    assert kind(own, 4096)[0] == own  # sizes that are round already


def test_a_choice_of_another_kind_is_noticed(monkeypatch):
    """Planted: one remembered size for all patterns."""
    right = [chosen(sr.SlidingWindow(x), 4096) for x in (9, 2000)]
    assert right[0] != right[1]
    frame = Frame.build(4096, 4096, 1, 1, None)
    monkeypatch.setattr(compiler, "typical", lambda *_: (sr.SlidingWindow(9), frame))
    assert [chosen(sr.SlidingWindow(x), 4096) for x in (9, 2000)] != right


_DRAFT = ((150, 1, 1), (-1, 0, 0))
_NODES = ((600, 300, 0, 400), (-1, 0, 0, 2))
_TREES = {
    "documents": sr.Tree(*_DRAFT, sr.Documents((100, 60)) & sr.Causal(), length=160),
    "tensor lengths": sr.Tree(*_DRAFT, sr.Documents(torch.tensor([100, 60])), length=160),
    "key mask": sr.Tree(*_DRAFT, sr.KeyMask(torch.arange(160) % 3 > 0), length=160),
    "packed": sr.Tree(*_NODES, sr.Packed((900, 500), sr.SlidingWindow(15)), length=1400),
    "random blocks": sr.Tree(*_NODES, sr.RandomBlocks(0.2, 16), length=1200),
    "tree in a tree": sr.Tree(*_NODES, sr.Tree((500, 500, 400), (-1, 0, 1)), length=1400),
    "window": sr.Tree(*_NODES, sr.SlidingWindow(15), length=1400),
    "documents in documents": sr.Packed((650, 650), sr.Documents((50, 600))),
    "tree in documents": sr.Packed((650, 650), sr.Tree((50, 600), (-1, 0))),
    "joined": sr.Tree(*_NODES) & sr.Tree(*_NODES, sr.Documents((900, 500)), length=1400),
}


@pytest.mark.parametrize("name", _TREES)
def test_patterns_bound_to_a_length_have_a_default_block_size(name):
    """Trees of such patterns raised, since the rounded tree was built without its length."""
    pattern = _TREES[name]
    length = pattern.own_length
    size = chosen(pattern, length)
    assert size in (32, 64, 128)
    assert pattern.layout(length, num_heads=2).block_size == size
    query, key, value = torch.randn(3, 1, 2, length, 8, dtype=torch.float64)
    dense = sr.attention(query, key, value, pattern, backend="reference")
    out = sr.attention(query, key, value, pattern)
    assert (out - dense).abs().max() < 1e-12
    out = sr.attention(*(x.float() for x in (query, key, value)), pattern)
    assert (out - dense).abs().max() < 1e-5


@pytest.mark.parametrize("name", [name for name in _TREES if name.startswith(("doc", "pack", "w"))])
def test_typical_patterns_fit_their_length(name):
    pattern, length = _TREES[name], _TREES[name].own_length
    alike, frame = typical(pattern, Frame.build(length, length, 1, 1, None))
    alike.check(frame)
    if name == "documents":
        assert alike.length == 192 and alike.pattern.masks[0].lengths == (48, 144)
