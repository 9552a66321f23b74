"""A `ModelMask` says the pairs that transformers' own mask of all pairs has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import masking_utils as theirs

from sparsering.integrations.transformers.call import mask_kind, sources
from sparsering.integrations.transformers.call.attention import attention_function
from sparsering.integrations.transformers.call.masks import mask_interface

ROWS = 2


@st.composite
def asked(draw):
    """Draws the requests of transformers to a mask interface: kind, offsets, lengths, padding."""
    q_length = draw(st.integers(1, 9))
    seen = draw(st.integers(0, 12))
    kv_offset = draw(st.integers(0, seen))
    unwritten = draw(st.integers(0, 4)) if kv_offset == 0 else 0
    kv_length = seen - kv_offset + q_length + unwritten
    total = seen + q_length
    size = draw(st.integers(1, 8))
    first = torch.tensor(draw(st.lists(st.integers(0, total), min_size=ROWS, max_size=ROWS)))
    kind = draw(st.sampled_from(["causal", "window", "chunk", "full", "both ways", "packed"]))
    if kind == "packed":
        q_length = kv_length = total
        seen = kv_offset = 0
    position_ids = torch.randint(0, 3, (ROWS, kv_length)).clamp(max=1).cumsum(1)
    ids = theirs.find_packed_sequence_indices(position_ids)
    ids = torch.zeros_like(position_ids) if ids is None else ids
    inner = draw(
        st.sampled_from(
            [
                theirs.causal_mask_function,
                theirs.sliding_window_causal_mask_function(size),
                theirs.chunked_causal_mask_function(size, torch.zeros(ROWS, dtype=torch.int64)),
            ]
        )
    )
    functions = {
        "causal": theirs.causal_mask_function,
        "window": theirs.sliding_window_causal_mask_function(size),
        "chunk": theirs.chunked_causal_mask_function(size, first),
        "full": theirs.bidirectional_mask_function,
        "both ways": theirs.sliding_window_bidirectional_mask_function(size),
        "packed": theirs.and_masks(
            theirs.packed_sequence_mask_function(ids),
            theirs.remap_positions_for_packed_sequence(inner, position_ids),
        ),
    }
    attention_mask = None
    if kind != "packed" and draw(st.booleans()):
        length = draw(st.integers(max(1, total - 2), total))  # what is missing is padding
        attention_mask = torch.rand(ROWS, length) < draw(st.sampled_from([0.5, 0.9, 1.0]))
    return {
        "batch_size": ROWS,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": seen if not unwritten else torch.tensor(seen),
        "kv_offset": kv_offset,
        "mask_function": functions[kind],
        "attention_mask": attention_mask,
    }


@given(asked())
def test_it_says_the_pairs_of_a_dense_mask(call):
    dense = theirs.sdpa_mask(**call, allow_is_causal_skip=False)
    mask = mask_interface(**call)
    if isinstance(call["q_offset"], torch.Tensor):
        call["q_offset"].add_(call["q_length"])  # as a static cache does before its layer attends
    q_start, kv_len = int(mask.q_start), call["kv_length"]
    got = mask.pattern(q_start, kv_len).to_dense(call["q_length"], kv_len, q_start=q_start)
    got = got.expand(ROWS, 1, *got.shape[-2:]) if got.dim() == 3 else got
    assert torch.equal(got, dense)
    assert torch.equal(mask.dense(), dense)
    assert mask.shape == tuple(dense.shape)


@pytest.mark.parametrize("join", [theirs.or_masks, theirs.and_masks])
def test_a_function_that_is_not_known_is_asked_for_pairs(join):
    def odd(batch, head, query, key):
        return (query + key) % 3 > 0

    call = {"batch_size": 1, "q_length": 5, "kv_length": 7, "q_offset": 2}
    mask = mask_interface(**call, mask_function=join(theirs.causal_mask_function, odd))
    assert mask.kind is None
    pairs = torch.arange(2, 7)[:, None], torch.arange(7)
    causal, other = pairs[1] <= pairs[0], (pairs[0] + pairs[1]) % 3 > 0
    wanted = causal | other if join is theirs.or_masks else causal & other
    assert torch.equal(mask.dense()[0, 0], wanted)


def test_keys_that_a_static_cache_has_not_written_are_not_visited(monkeypatch):
    visited = []
    attention = sources.attention

    def counted(query, key, value, pattern, **options):
        visited.append(key.shape[2])
        return attention(query, key, value, pattern, **options)

    monkeypatch.setattr(sources, "attention", counted)
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 500, 8)
    mask = mask_interface(batch_size=1, q_length=3, kv_length=500, q_offset=torch.tensor(4))
    attention_function(torch.nn.Module(), query, key, key, mask)
    assert visited == [7]


def test_blocks_of_images_change_no_mask_where_there_is_no_image():
    blocks = torch.full((2, 9), -1)
    causal = theirs.causal_mask_function
    inner = theirs.or_masks(causal, theirs.blockwise_overlay(blocks))
    function = theirs.and_masks(theirs.sliding_window_overlay(4), inner)
    kind = mask_kind.recognise(function)
    assert kind is not None and (kind.causal, kind.left, kind.right) == (True, 3, None)
    blocks[0, 3:5] = 0
    assert mask_kind.recognise(function) is None
    assert mask_kind.recognise(theirs.or_masks(causal, causal)) is None
