"""`BlockScorer` against its formula, query by query; causality; what trains it."""

import math

import pytest
import torch
from torch import Tensor

from sparsering.selection import BlockScorer, selection_loss

B, HKV, D, SIZE = 2, 2, 6, 4


def made(**options) -> BlockScorer:
    scorer = BlockScorer(D, HKV, SIZE, index_dim=5, **options).double()
    with torch.no_grad():
        scorer.pool.normal_()  # which begins at 0
    return scorer


def drawn(q_len: int, kv_len: int, group: int = 1) -> tuple[Tensor, Tensor]:
    query = torch.randn(B, HKV * group, q_len, D, dtype=torch.float64)
    return query, torch.randn(B, HKV, kv_len, D, dtype=torch.float64)


def by_formula(scorer: BlockScorer, query: Tensor, key: Tensor, first: int) -> Tensor:
    """[B, Hkv, R, Nb]: each query's softmax over the blocks it sees, summed over rows; its log."""
    group, kv_len = query.shape[1] // HKV, key.shape[2]
    blocks, step = -(-kv_len // SIZE), scorer.query_block
    base = first // step
    rows = (first + query.shape[2] - 1) // step - base + 1
    sums = torch.zeros(B, HKV, rows, blocks, dtype=torch.float64)
    for b in range(B):
        for head in range(query.shape[1]):
            h = head // group
            for i in range(query.shape[2]):
                p = first + i
                asked = scorer.project_query[h] @ query[b, head, i]
                score = []
                for block in range(blocks):
                    end = min((block + 1) * SIZE, kv_len)
                    end = min(end, p + 1) if scorer.causal else end
                    seen = key[b, h, block * SIZE : end]
                    if len(seen):
                        pooled = (seen @ scorer.pool[h]).softmax(0) @ seen
                        score.append(asked @ scorer.project_key[h] @ pooled / math.sqrt(5))
                    else:
                        score.append(torch.tensor(-math.inf, dtype=torch.float64))
                sums[b, h, p // step - base] += torch.stack(score).softmax(0).detach()
    return sums.log()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "first", "query_block", "causal"),
    [
        (13, 13, None, 1, True),
        (13, 13, None, 2, True),
        (13, 13, None, 4, True),
        (1, 13, None, 1, True),  # a step of decoding
        (3, 13, 5, 2, True),  # keys after the last query
        (5, 6, 3, 4, True),  # queries after the last key
        (2, 6, 20, 1, True),
        (13, 13, None, 1, False),
        (7, 10, 0, 4, False),
        (7, 10, 5, 2, False),
        (1, 1, None, 1, True),
        (3, 3, None, 4, True),
    ],
)
def test_scores(q_len, kv_len, first, query_block, causal, group):
    scorer = made(query_block=query_block, causal=causal)
    query, key = drawn(q_len, kv_len, group)
    got = scorer(query, key, q_start=first)
    expected = by_formula(scorer, query, key, kv_len - q_len if first is None else first)
    assert got.shape == expected.shape and got.dtype == torch.float64
    assert torch.equal(got == -torch.inf, expected == -torch.inf)
    assert (got - expected)[expected > -torch.inf].abs().max() < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("query_block", [1, 4])
def test_parts_of_long_inputs_are_the_whole(query_block, causal, monkeypatch):
    scorer = made(query_block=query_block, causal=causal)
    query, key = drawn(30, 33, 2)

    def computed() -> tuple[Tensor, ...]:
        scores = scorer(query, key)
        mass = torch.arange(scores.numel(), dtype=torch.float64).view(scores.shape)
        return scores.detach(), *torch.autograd.grad(
            selection_loss(scores, mass), [*scorer.parameters()]
        )

    whole = computed()
    monkeypatch.setattr("sparsering.selection.scorer._AT_A_TIME", 200)
    for one, other in zip(whole, computed(), strict=True):
        seen = one > -torch.inf
        assert one.shape == other.shape and torch.allclose(one[seen], other[seen], atol=1e-12)
        assert (other[~seen] == -torch.inf).all()


@pytest.mark.parametrize("query_block", [1, 4])
def test_no_score_knows_a_later_token(query_block):
    """A row's scores are the same bits whatever comes after its last query."""
    scorer = made(query_block=query_block)
    query, key = drawn(16, 16, 2)
    scores = scorer(query, key)
    for p in range(15):
        changed, later = query.clone(), key.clone()
        changed[:, :, p + 1 :] = 1e3 * torch.randn_like(changed[:, :, p + 1 :])
        later[:, :, p + 1 :] = 1e3 * torch.randn_like(later[:, :, p + 1 :])
        whole = (p + 1) // query_block  # rows that end by p
        got = scorer(changed, later)[:, :, :whole]
        assert torch.allclose(got, scores[:, :, :whole], rtol=0, atol=1e-13)
        assert (got[:, :, :, p // SIZE + 1 :] == -torch.inf).all()


def test_a_step_of_decoding_has_the_scores_of_the_whole():
    scorer = made()
    query, key = drawn(19, 19, 2)
    whole = scorer(query, key)
    for n in range(1, 20):
        step = scorer(query[:, :, n - 1 : n], key[:, :, :n])
        assert (
            step[:, :, 0] - whole[:, :, n - 1, : step.shape[3]]
        ).abs().nan_to_num().max() < 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_reach_every_weight_and_nothing_else(causal):
    scorer = made(causal=causal, query_block=2)
    query, key = (x.requires_grad_() for x in drawn(11, 11, 2))
    scores = scorer(query, key)
    mass = torch.rand(scores.shape, dtype=torch.float64)
    selection_loss(scores, mass).backward()
    for name, weight in scorer.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert (weight.grad != 0).flatten(1).any(1).all(), name  # of each kv head
    assert query.grad is None and key.grad is None
    attached = made(causal=causal, detach=False)
    selection_loss(attached(query, key), torch.rand(B, HKV, 11, 3)).backward()
    choosing = slice(SIZE if causal else 0, None)  # queries that see more than one block
    assert (query.grad != 0).any(-1)[:, :, choosing].all() and (key.grad != 0).any()


def test_gradients_are_those_of_the_formula():
    scorer = made(query_block=2)
    query, key = drawn(7, 7, 2)
    names = [name for name, _ in scorer.named_parameters()]

    def finite(*weights):
        scores = torch.func.functional_call(
            scorer, dict(zip(names, weights, strict=True)), (query, key)
        )
        return torch.where(scores > -torch.inf, scores, 0.0)

    weights = tuple(w.detach().clone().requires_grad_() for w in scorer.parameters())
    assert torch.autograd.gradcheck(finite, weights)


def test_scores_far_apart_keep_finite_gradients():
    scorer = made(query_block=2)
    query, key = drawn(12, 12, 2)
    scores = scorer(1e3 * query, 1e3 * key)
    seen = scores > -torch.inf
    loss = selection_loss(scores, torch.ones(scores.shape))
    loss.backward()
    assert scores[seen].isfinite().all() and loss.isfinite()
    assert all(weight.grad.isfinite().all() for weight in scorer.parameters())


def test_it_learns_which_blocks_attention_looks_at():
    """Keys of a block are told by one direction among noise; a mean is not enough, it is."""
    torch.manual_seed(1)
    scorer = BlockScorer(16, 1, 8, index_dim=8, causal=False)
    mark = torch.nn.functional.normalize(torch.randn(16), dim=0)
    optimizer = torch.optim.Adam(scorer.parameters(), 3e-2)

    def example() -> tuple[Tensor, Tensor, Tensor]:
        key = torch.randn(4, 1, 16 * 8, 16)
        facts = key.unflatten(2, (16, 8))  # one marked key in each block, and what a query asks
        place = torch.randint(8, (4, 1, 16, 1, 1)).expand(-1, -1, -1, -1, 16)
        fact = facts.gather(3, place)[:, :, :, 0]
        fact = fact - (fact @ mark)[..., None] * mark
        facts.scatter_(3, place, (fact + 6 * mark)[:, :, :, None])
        query = 2 * fact
        return query, key, torch.eye(16).expand(4, 1, 16, 16)

    def recall() -> float:
        query, key, mass = example()
        return (scorer(query, key).argmax(3) == mass.argmax(3)).double().mean().item()

    frozen = sum(recall() for _ in range(8)) / 8
    for _ in range(200):
        query, key, mass = example()
        loss = selection_loss(scorer(query, key), mass)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    learned = sum(recall() for _ in range(8)) / 8
    assert frozen < 0.3 and learned > 0.8, (frozen, learned)


def test_half_precision_and_autocast_keep_scores_in_float32():
    scorer = BlockScorer(D, HKV, SIZE)
    query, key = (x.float() for x in drawn(9, 9))
    plain = scorer(query, key)
    assert plain.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scorer(query, key), plain)
    half = scorer.to(torch.bfloat16)(query.bfloat16(), key.bfloat16())
    assert half.dtype == torch.float32


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="query_block must divide"):
        BlockScorer(D, HKV, SIZE, query_block=3)
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        BlockScorer(0, HKV, SIZE)
    query, key = drawn(5, 5)
    with pytest.raises(ValueError, match=r"keys \[B, 3, Nk, 6\]"):
        BlockScorer(D, 3, SIZE)(query, key)
    with pytest.raises(ValueError, match="q_start=-2"):
        made()(query, key[:, :, :3])
    assert made()(query[:, :, :0], key).shape == (B, HKV, 0, 2)
    assert made(causal=False)(query, key[:, :, :0]).shape == (B, HKV, 5, 0)
