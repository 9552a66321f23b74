"""Layouts of selected blocks: exact, and built without ever asking the device for a value."""

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

import sparsering as sr
from sparsering.layouts.compile import build_layout, default_block_size
from sparsering.patterns.algebra import Frame

BLOCK = 16


def chosen(*shape, blocks=9):
    return torch.randint(-1, blocks + 2, shape)  # with repeats, and numbers that list nothing


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("indices", "q_len", "kv_len", "q_start"),
    [
        (chosen(9, 4), 144, 144, None),
        (chosen(4, 9, 3), 137, 137, None),
        (chosen(2, 2, 9, 5), 130, 130, None),
        (chosen(9, 2), 20, 130, 96),
        (chosen(3, 2, blocks=5), 40, 75, 0),
        (chosen(9, 3), 30, 130, None),  # q_start within a block: the general compiler
    ],
)
def test_layout_of_selected_blocks_equals_the_definition(indices, q_len, kv_len, q_start, causal):
    pattern = sr.SelectedBlocks(indices, BLOCK)
    pattern = pattern & sr.Causal() if causal else pattern
    options = {"num_heads": 4, "num_kv_heads": 2, "q_start": q_start}
    layout = pattern.layout(q_len, kv_len, block_size=BLOCK, **options)
    dense = pattern.to_dense(q_len, kv_len, **options).long()
    rebuilt = layout.to_dense()
    shape = torch.broadcast_shapes(dense.shape, rebuilt.shape)
    assert torch.equal(rebuilt.expand(shape), dense.expand(shape))
    assert layout.num_pairs == dense.sum((-2, -1)).double().mean()

    q_len_kv = [(4, q_len), (2, kv_len), (2, kv_len)]
    batch = 2 if indices.dim() == 4 else 1
    inputs = [torch.randn(batch, h, n, 8, dtype=torch.float64) for h, n in q_len_kv]
    out = sr.attention(*inputs, pattern, block_size=BLOCK, q_start=q_start)
    expected = sr.attention(*inputs, pattern, q_start=q_start, backend="reference")
    assert (out - expected).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_building_never_reads_a_value_from_the_device(causal):
    with FakeTensorMode():  # raises on any read: .item(), nonzero, a bool of a tensor
        pattern = sr.SelectedBlocks(torch.randint(0, 9, (2, 4, 9, 3)), BLOCK)
        pattern = pattern & sr.Causal() if causal else pattern
        frame = Frame.build(144, 144, 4, 4, None)
        layout = build_layout(pattern, frame, BLOCK, torch.device("cpu"))
    assert layout.passes[0].key_tile.shape == (2, 4, 27)
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        build_layout(sr.Blocks(torch.ones(9, 9) > 0, BLOCK), frame, BLOCK, torch.device("cpu"))


def test_query_blocks_must_be_covered():
    pattern = sr.SelectedBlocks(torch.zeros(3, 1, dtype=torch.int64), BLOCK)
    with pytest.raises(ValueError, match=r"cover 4 query blocks of 16.*\(3, 1\)"):
        pattern.layout(64, block_size=BLOCK)


def test_indices_must_be_integers():
    with pytest.raises(
        TypeError, match=r"SelectedBlocks needs a torch.int64 tensor, got torch.float32"
    ):
        sr.SelectedBlocks(torch.zeros(3, 1), BLOCK)


def test_default_block_size_is_the_patterns_own():
    assert default_block_size(sr.BlockWindow(1, 64) & sr.Causal(), 4096) == 64
    assert default_block_size(sr.BlockWindow(1, 512), 4096) == 128
    assert default_block_size(sr.Causal(), 4096) == 128


@pytest.mark.parametrize("backend", ["gather", "cpu", "triton"])
def test_what_lists_nothing_visits_nothing(backend):
    """Room that is not used must not let NaN of some block into rows that do not list it."""
    indices = torch.tensor([[0, -1, -1], [0, 1, 99], [2, 2, 2]])
    pattern = sr.SelectedBlocks(indices, BLOCK) & sr.Causal()
    assert pattern.layout(48, block_size=BLOCK).num_blocks == 4
    query, key, value = (torch.randn(1, 1, 48, 16) for _ in range(3))
    value[:, :, 32:] = torch.nan
    out = sr.attention(query, key, value, pattern, block_size=BLOCK, backend=backend)
    assert out[:, :, :32].isfinite().all() and out[:, :, 32:].isnan().all()


def test_a_selection_on_the_host_is_laid_out_on_the_device_of_the_inputs():
    pattern = sr.SelectedBlocks(torch.zeros(4, 1, dtype=torch.int64), BLOCK)
    layout = pattern.layout(64, block_size=BLOCK, device="meta")
    assert all(x.device.type == "meta" for x in layout.passes[0].tensors())
