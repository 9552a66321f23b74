"""Functions of a selection name the argument that does not fit."""

import math
import warnings

import pytest
import torch

import sparsering as sr
from sparsering.decoding import SelectedCache
from sparsering.nn import SelectedAttention
from sparsering.selection import (
    BlockScorer,
    BlockSummaries,
    GatedSchedule,
    PatternRefiner,
    Schedule,
    block_scores,
    select_blocks,
    selection_loss,
    selection_report,
)

QUERY = torch.zeros(1, 2, 32, 8)
SCORES = torch.zeros(1, 2, 32, 2)
INDICES = torch.zeros(1, 2, 32, 2, dtype=torch.int64)
CHOSEN = sr.SelectedBlocks(INDICES, 16, 1)
REFINER = PatternRefiner(2, 32, 2, 2)
SEVERAL = torch.zeros(2, 3)
with warnings.catch_warnings(action="ignore"):  # nested tensors are in prototype stage
    NESTED = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)])


def scorer(**options):
    return BlockScorer(8, 2, 16, **options)


def attention_layer(embed_dim=16, num_heads=2, **options):
    return SelectedAttention(embed_dim, num_heads, block_size=16, **{"k": 2, **options})


def selected_cache(**options):
    return SelectedCache(1, 2, 8, block_size=16, **{"k": 2, **options})


def again(keys):
    summaries = BlockSummaries(16)
    summaries.scores(QUERY, QUERY)
    summaries.scores(keys, keys)


def summaries_of(index):
    summaries = BlockSummaries(16)
    summaries.scores(QUERY, QUERY)
    summaries.select(index)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_scores(QUERY, QUERY, 16, causal=SEVERAL), "causal must be True or False"),
        (lambda: block_scores(QUERY, QUERY, NESTED), "block_size must be an int"),
        (lambda: select_blocks(SCORES, 2, block_size=16, causal=None), "causal must be True or"),
        (lambda: again(QUERY[:, :1]), r"heads and head dim .*, \(1, 2, 8\), got \(1, 1, 8\)"),
        (lambda: again(QUERY[..., :4]), r"heads and head dim .*, \(1, 2, 8\), got \(1, 2, 4\)"),
        (lambda: again(QUERY.expand(2, -1, -1, -1)), r"\(1, 2, 8\), got \(2, 2, 8\); other keys"),
        (lambda: scorer(causal=SEVERAL), "causal must be True or False"),
        (lambda: scorer(detach=0), "detach must be True or False, got 0"),
        (lambda: scorer()(QUERY, QUERY, q_start=SEVERAL), "q_start must be an int or None"),
        (lambda: scorer()(QUERY, QUERY, q_start=10**30), "q_start must lie within"),
        (lambda: selection_report(QUERY, QUERY, QUERY, CHOSEN, seed="0"), "seed must be an int"),
        (lambda: selection_report(QUERY, QUERY, QUERY, CHOSEN, seed=2**64), "seed must be at most"),
        (lambda: PatternRefiner(2, 4, 8, 3, seed=None), "seed must be an int, got None"),
        (lambda: PatternRefiner(2, 4, 8, 3, ema=SEVERAL), "ema must be at least 0"),
        (lambda: PatternRefiner(2, 4, 8, 3, ema="1"), "ema must be at least 0 .* got '1'"),
        (lambda: PatternRefiner(2, 4, 8, 3, margin=math.nan), "margin finite .* got 0.9 and nan"),
        (lambda: REFINER.observe(NESTED, INDICES), "mass must be a dense tensor, got a nested"),
        (lambda: REFINER.observe(SCORES.to_sparse(), INDICES), "mass must be a dense tensor"),
        (lambda: REFINER.observe(SCORES, [[0, 1]]), r"indices must be a tensor .*, got a list"),
        (lambda: REFINER.load_state_dict(SEVERAL), "expected the state_dict of a PatternRefiner"),
        (lambda: Schedule(((0, 10**400),)), "each point must be a .step, value. of finite numbers"),
        (lambda: GatedSchedule(Schedule(((0, 1),)), 10**400), "bar must be a finite number"),
        (lambda: GatedSchedule(Schedule(((0, 1),)), 1).load_state_dict(SEVERAL), "'clock', got"),
        (lambda: selection_loss(NESTED, SCORES), "scores must be a dense tensor, got a nested"),
        (lambda: selection_loss(SCORES, SCORES.to_sparse()), "mass must be a dense tensor"),
        (lambda: selection_loss(SCORES, None), r"mass must be a tensor .* got None"),
        (lambda: selection_loss(SCORES, SCORES, row_weight=2.0), "row_weight must be a tensor"),
        (lambda: selection_loss(SCORES, SCORES.to("meta")),
         "mass must be on the device of the scores, cpu, got meta"),
        (lambda: summaries_of([1]), "select needs integers .n. from 0 to 0, got .1."),
        (lambda: summaries_of(None), "select must be a sequence of ints, got None"),
        (lambda: summaries_of(SEVERAL), "select needs integers"),
        (lambda: selected_cache(sink=-1), "sink must be at least 0, got -1"),
        (lambda: selected_cache(local=SEVERAL), "local must be an int"),
        (lambda: selected_cache(sink=2**53), "at most k=2, got 9007199254740992"),
        (lambda: attention_layer(embed_dim=SEVERAL), "embed_dim must be an int"),
        (lambda: attention_layer(num_heads=1.0), "num_heads must be an int, got 1.0"),
        (lambda: attention_layer(num_kv_heads=0), "num_kv_heads must be at least 1, got 0"),
        (lambda: attention_layer(causal=SEVERAL), "causal must be True or False"),
        (lambda: attention_layer(dense_below=SEVERAL), "dense_below must be an int or None"),
        (lambda: attention_layer()(None), r"x must be a tensor \[batch, tokens, 16\], got None"),
        (lambda: attention_layer()(NESTED), "x must be a dense tensor, got a nested one"),
    ],
)  # fmt: skip
def test_an_argument_that_does_not_fit_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_cache_that_forces_no_block_cuts_by_share():
    """Against the same choice and attention on the whole sequence."""
    query, key, value = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    cache = SelectedCache(1, 2, 8, k=2, block_size=16, top_p=0.6, sink=0, local=0)
    parts = [cache.attend(*(x[:, :, i:j] for x in (query, key, value)))
             for i, j in ((0, 17), (17, 18), (18, 40))]  # fmt: skip
    scores = block_scores(query, key, 16)
    indices = select_blocks(scores, 2, block_size=16, top_p=0.6, sink=0, local=0)
    chosen = sr.SelectedBlocks(indices, 16, 1) & sr.Causal()
    expected = sr.attention(query, key, value, chosen, backend="reference")
    torch.testing.assert_close(torch.cat(parts, 2), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("slots", [None, 0, 3])
def test_a_loss_of_no_heads_rows_or_slots_is_0(slots):
    for batch, heads, rows, blocks in ((1, 0, 4, 5), (0, 2, 4, 5), (1, 2, 0, 5), (1, 2, 4, 0)):
        scores = torch.randn(batch, heads, rows, blocks, requires_grad=True)
        wide = blocks if slots is None else slots
        indices = None if slots is None else torch.zeros(rows, slots, dtype=torch.int64)
        mass = torch.rand(batch, heads, rows, wide)
        loss = selection_loss(scores, mass, indices)
        loss.backward()
        assert loss == 0
        if not scores.numel() or slots == 0:
            assert not scores.grad.any()
