"""Scores and choices of queries that see only the keys in their bounds, `first` and `stop`."""

import pytest
import torch
from oracles import blocks_oracle

import sparsering as sr
from sparsering.selection import BlockScorer, block_scores, bounds, pool_blocks, select_blocks

METHODS = ("mean", "sub", "gauss", "bounds", "antidiagonal", "exact")


def close(found, expected, tolerance=3e-6):
    there = ~expected.isneginf()
    same = torch.equal(found.isneginf(), expected.isneginf())
    return same and bool(((found - expected)[there].abs() <= tolerance).all())


def document(start, length, tokens):
    """Bounds [1, N] of queries: those of one document see its keys, the others all."""
    first, stop = torch.zeros(1, tokens).long(), torch.full((1, tokens), tokens)
    first[:, start : start + length], stop[:, start : start + length] = start, start + length
    return {"first": first, "stop": stop}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_document_from_a_block_on_gives_what_it_gives_alone(method, causal):
    query, key = torch.randn(2, 4, 40, 6).double(), torch.randn(2, 2, 40, 6).double()
    options = {"query_block": 4, "method": method, "causal": causal}
    found = block_scores(query, key, 8, **options, **document(16, 24, 40))
    alone = block_scores(query[:, :, 16:], key[:, :, 16:], 8, **options)
    assert close(found[:, :, 4:, 2:], alone)
    assert found[:, :, 4:, :2].isneginf().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_bounds_by_definition(method, causal, monkeypatch):
    query, key = torch.randn(2, 4, 25, 6).double(), torch.randn(2, 2, 37, 6).double()
    first = torch.randint(0, 20, (2, 25))
    first, stop = first - 3, first + torch.randint(-2, 30, (2, 25))
    options = {"query_block": 4, "method": method, "parts": 2, "causal": causal, "scale": 0.7}
    options |= {"q_start": 10, "first": first, "stop": stop}
    expected = blocks_oracle.block_scores(query, key, 8, **options)
    assert close(block_scores(query, key, 8, **options).double(), expected)
    monkeypatch.setattr(bounds, "_AT_A_TIME", 1)  # a row at a time
    assert close(block_scores(query, key, 8, **options).double(), expected)
    leaves = [x.clone().requires_grad_() for x in (query, key)]
    grads = [
        torch.autograd.grad(f(*leaves, 8, **options).where(expected.isfinite(), 0).sum(), leaves)
        for f in (block_scores, blocks_oracle.block_scores)
    ]
    for found, right in zip(*grads, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_chosen_blocks_by_definition(causal):
    scores = torch.randn(2, 3, 7, 6)
    first = torch.randint(0, 20, (2, 25))
    stop = first + torch.randint(-2, 40, (2, 25))
    options = {"block_size": 8, "query_block": 4, "sink": 1, "local": 2, "causal": causal}
    options |= {"q_start": 10, "first": first, "stop": stop}
    for given in (options, options | {"top_p": 0.7}, options | {"stop": None}):
        found = select_blocks(scores, 4, **given)
        assert torch.equal(found, blocks_oracle.select_blocks(scores, 4, **given))


def test_a_left_padded_row_chooses_among_its_own_tokens():
    query, key, value = torch.randn(3, 1, 2, 96, 8)
    padded = [torch.cat((torch.full((1, 2, 32, 8), 9.0), x), 2) for x in (query, key, value)]
    given = {"first": torch.full((1, 128), 32)}
    chosen = select_blocks(block_scores(*padded[:2], 16, **given), 3, block_size=16, **given)
    alone = select_blocks(block_scores(query, key, 16), 3, block_size=16)
    assert torch.equal(chosen[:, :, 32:], torch.where(alone < 0, -1, alone + 2))
    pattern = sr.SelectedBlocks(chosen, 16, 1) & sr.Causal()
    out = sr.attention(*padded, pattern)[:, :, 32:]
    pattern = sr.SelectedBlocks(alone, 16, 1) & sr.Causal()
    torch.testing.assert_close(out, sr.attention(query, key, value, pattern), rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_padded_row_gives_what_its_tokens_give_alone(method, causal):
    query, key = torch.randn(2, 4, 48, 6).double(), torch.randn(2, 2, 48, 6).double()
    options = {"query_block": 4, "method": method, "parts": 2, "causal": causal}
    valid = torch.ones(2, 48, dtype=torch.bool)
    valid[0, 27:], valid[1, :16] = False, False  # to the right, and whole blocks to the left
    padded = key.masked_fill(~valid[:, None, :, None], torch.nan)
    queries = query.masked_fill(~valid[:, None, :, None], torch.nan)
    found = block_scores(queries, padded, 8, valid=valid, **options)
    alone = block_scores(query[:1, :, :27], key[:1, :, :27], 8, **options)
    assert close(found[:1, :, :7, :4], alone)
    assert found[0, :, 7:].isneginf().all() and found[0, ..., 4:].isneginf().all()
    alone = block_scores(query[1:, :, 16:], key[1:, :, 16:], 8, **options)
    assert close(found[1:, :, 4:, 2:], alone)
    assert found[1, :, :4].isneginf().all() and found[1, ..., :2].isneginf().all()


@pytest.mark.parametrize("method", ["mean", "gauss", "bounds", "exact"])
def test_holes_in_a_block_do_not_count(method):
    query, key = torch.randn(1, 2, 24, 6).double(), torch.randn(1, 1, 24, 6).double()
    valid = torch.rand(24) < 0.6
    valid[8:16] = False
    valid[[1, 17]] = True
    found = block_scores(query, key, 8, method=method, causal=False, scale=0.7, valid=valid)
    blocks = [x[:, :, v] for x, v in zip(key.split(8, 2), valid.split(8), strict=True)]
    logit = [
        blocks_oracle.log_masses(query, blocks[b], method, 1, 0.7).flatten(0, 1) for b in (0, 2)
    ]
    expected = torch.stack(logit, -1).log_softmax(-1).logsumexp(0)
    assert close(found[0, 0, valid][:, [0, 2]].double(), expected[valid])
    assert found[..., 1].isneginf().all() and found[:, :, ~valid].isneginf().all()


@pytest.mark.parametrize("causal", [True, False])
def test_a_padded_row_chooses_what_its_tokens_choose_alone(causal):
    """Padding by `valid` alone: forced blocks are the first and last that have tokens."""
    scores, valid = torch.randn(2, 3, 6, 6), torch.ones(2, 48, dtype=torch.bool)
    valid[0, 29:], valid[1, :16] = False, False
    options = {"block_size": 8, "query_block": 8, "sink": 1, "local": 2, "causal": causal}
    for more in ({}, {"top_p": 0.7}):
        found = select_blocks(scores, 4, valid=valid, **options, **more)
        alone = select_blocks(scores[:1, :, :4, :4], 4, **options, **more)
        assert torch.equal(found[:1, :, :4], alone)
        alone = select_blocks(scores[1:, :, 2:, 2:], 4, **options, **more)
        assert torch.equal(found[1:, :, 2:], torch.where(alone < 0, -1, alone + 2))
        if causal:
            assert (found[1, :, :2] == -1).all()  # its queries see no token


@pytest.mark.parametrize(("causal", "query_block"), [(True, 1), (True, 4), (False, 4)])
def test_a_learned_scorer_counts_no_padding(causal, query_block):
    scorer = BlockScorer(6, 2, 8, index_dim=5, query_block=query_block, causal=causal).double()
    torch.nn.init.normal_(scorer.pool)
    query, key = torch.randn(2, 4, 48, 6).double(), torch.randn(2, 2, 48, 6).double()
    valid = torch.ones(2, 48, dtype=torch.bool)
    valid[0, 27:], valid[1, :16] = False, False
    hidden = ~valid[:, None, :, None]
    q, k = query.masked_fill(hidden, torch.nan), key.masked_fill(hidden, torch.nan)
    found = scorer(q, k, valid=valid)
    for entry, (first, stop) in enumerate(((0, 27), (16, 48))):
        own, x = slice(first, stop), slice(entry, entry + 1)
        alone = scorer(query[x, :, own], key[x, :, own])
        rows, columns = alone.shape[2:]
        here = found[x, :, first // query_block :][:, :, :rows]
        assert close(here[..., first // 8 :][..., :columns], alone, 1e-12)
        assert here.isfinite().sum() == alone.isfinite().sum()


@pytest.mark.parametrize("learned", [True, False])
def test_keys_of_which_none_exists(learned):
    query = torch.randn(1, 1, 9, 4)
    score = BlockScorer(4, 1, 8) if learned else lambda *x, **rest: block_scores(*x, 8, **rest)
    assert score(query, query, valid=torch.zeros(9).bool()).isneginf().all()
    none = query[:, :, :0]
    assert score(none, none, valid=torch.zeros(0).bool()).shape == (1, 1, 0, 0)


@pytest.mark.parametrize("wrong", [torch.ones(2, 9).bool(), torch.ones(9), [True] * 9])
def test_valid_of_another_shape(wrong):
    query = torch.randn(1, 1, 9, 4)
    for call in (
        lambda: block_scores(query, query, 8, valid=wrong),
        lambda: select_blocks(query[:, :, :, :2], 2, block_size=8, valid=wrong),
        lambda: pool_blocks(query, 8, valid=wrong),
        lambda: BlockScorer(4, 1, 8)(query, query, valid=wrong),
    ):
        with pytest.raises(ValueError, match="valid"):
            call()


@pytest.mark.parametrize("wrong", [torch.zeros(1, 9), torch.zeros(2, 8).long(), [0] * 9])
def test_bounds_of_another_shape(wrong):
    query, scores = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 2)
    with pytest.raises(ValueError, match="first"):
        block_scores(query, query, 8, first=wrong)
    with pytest.raises(ValueError, match="first"):
        select_blocks(scores, 2, block_size=8, first=wrong)


@pytest.mark.parametrize("q_start", [0, 1, 5])
def test_without_queries_there_are_no_rows(q_start):
    none = torch.zeros(1, 0, dtype=torch.int64)
    found = sr.selection.select_blocks(
        torch.zeros(2, 3, 0, 4), k=2, block_size=4, q_start=q_start, first=none, stop=none
    )
    assert found.shape[:3] == (2, 3, 0)
