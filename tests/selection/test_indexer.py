"""Scores of single keys and each query's best keys, against the formula and a stable sort."""

import pytest
import torch
from helpers.tensor_bytes import measure

import sparsering as sr
from sparsering.selection import block_mass, index_scores, indexer, selection_loss, top_tokens


def drawn(batch=2, heads=3, tokens=23, keys=41, width=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, heads, tokens, width), (batch, keys, width), (batch, tokens, heads)
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def by_formula(query, key, weight, scale=1.0):
    """Sums over heads one by one: [B, N, Nk]."""
    total = 0
    for head in range(query.shape[1]):
        product = torch.einsum("bnd,bmd->bnm", query[:, head], key) * scale
        total = total + weight[:, :, head, None] * product.clamp(min=0)
    return total


def by_sorting(scores, k, *, causal, start, lengths):
    """Sorts each row by score, then by position; NaN below all numbers."""
    batch, tokens, keys = scores.shape
    found = torch.full((batch, 1, tokens, k), -1)
    for b in range(batch):
        for n in range(tokens):
            seen = [
                m
                for m in range(keys)
                if not (causal and m > start + n) and not (lengths is not None and m >= lengths[b])
            ]
            numbers = scores[b, n].tolist()
            seen.sort(key=lambda m: (numbers[m] != numbers[m], -numbers[m], m))
            best = torch.tensor(seen[:k], dtype=torch.int64)
            found[b, 0, n, : len(best)] = best
    return found


@pytest.fixture(params=["whole", "small tiles"])
def _tiles(request, monkeypatch):
    if request.param == "small tiles":
        monkeypatch.setattr(indexer, "_AT_A_TIME", 100)
        monkeypatch.setattr(indexer, "_TILE", 7)


@pytest.mark.usefixtures("_tiles")
def test_scores_and_their_gradients_are_those_of_the_formula():
    inputs = drawn()
    listed = torch.randint(-1, 41, (2, 1, 23, 6), generator=torch.Generator().manual_seed(1))
    expected = by_formula(*inputs, 0.3)
    sent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    wanted = torch.autograd.grad((expected * sent).sum(), inputs, retain_graph=True)
    found = index_scores(*inputs, scale=0.3)
    assert found.shape == (2, 1, 23, 41) and (found[:, 0] - expected).abs().max() <= 1e-12
    for a, b in zip(torch.autograd.grad((found[:, 0] * sent).sum(), inputs), wanted, strict=True):
        assert (a - b).abs().max() <= 1e-11
    for indices in (listed, listed[:1]):
        at = indices.expand(2, -1, -1, -1)[:, 0]
        chosen = expected.gather(2, at.clamp(min=0))
        found = index_scores(*inputs, indices, scale=0.3)[:, 0]
        assert torch.equal(found == -torch.inf, at < 0)
        assert (found - chosen)[at >= 0].abs().max() <= 1e-12
        pair = (
            (found[at >= 0] * sent[..., :6][at >= 0]).sum(),
            (chosen[at >= 0] * sent[..., :6][at >= 0]).sum(),
        )
        grads = [torch.autograd.grad(x, inputs, retain_graph=True) for x in pair]
        for a, b in zip(*grads, strict=True):
            assert (a - b).abs().max() <= 1e-11


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("start", [None, 0, 5, -3])
@pytest.mark.parametrize("lengths", [None, (41, 9), (0, 30)])
def test_the_best_keys_are_those_of_a_sort(causal, start, lengths):
    query, key, weight = (x.detach().float() for x in drawn())
    key = key.round()  # equal scores are many: whole numbers, and zeros of both signs
    query, weight = query.round(), weight.round()
    weight[0, 3], query[1, :, 7] = torch.nan, torch.inf
    scores = by_formula(query, key, weight)
    told = None if lengths is None else torch.tensor(lengths)
    rule = {"causal": causal, "start": 41 - 23 if start is None else start, "lengths": lengths}
    for k in (1, 6, 50):
        found = top_tokens(query, key, weight, k, causal=causal, q_start=start, lengths=told)
        assert torch.equal(found, by_sorting(scores, k, **rule))


@pytest.mark.usefixtures("_tiles")
def test_each_query_sees_keys_between_its_bounds():
    query, key, weight = (x.detach() for x in drawn())
    batch, _, tokens, _ = query.shape
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(-3, 30, (batch, tokens), generator=generator)
    stop = first + torch.randint(0, 20, (batch, tokens), generator=generator)
    listed = top_tokens(query, key, weight, 6, causal=False, first=first, stop=stop)
    here = torch.arange(key.shape[1])
    seen = (here >= first[..., None]) & (here < stop[..., None])
    scores = by_formula(query, key, weight).float().masked_fill(~seen, -torch.inf)
    best = scores.sort(dim=2, descending=True, stable=True)
    wanted = torch.where(best.values == -torch.inf, -1, best.indices)[..., :6]
    assert torch.equal(listed[:, 0], wanted) and (wanted < 0).any() and (wanted >= 0).any()
    causal = top_tokens(query, key, weight, 6, first=first[:1], q_start=18)
    position = 18 + torch.arange(tokens)[None]
    by_stop = {"causal": False, "first": first[:1], "stop": position + 1}
    assert torch.equal(causal, top_tokens(query, key, weight, 6, **by_stop))


def test_no_tensor_of_all_pairs_is_made():
    query, key, weight = (x.detach() for x in drawn(1, 4, 4096, 8192, 16, torch.float32))
    peak = measure(lambda: top_tokens(query, key, weight, 16)).peak
    assert peak < 100 << 20 < 4 * 4096 * 8192, peak


def test_an_indexer_learns_where_attention_looks():
    """Scores of listed tokens against the exact mass of each, in O(N k)."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 64, 16)
    inputs = drawn(1, 2, 64, 64, 16, torch.float32)
    optimizer, losses = torch.optim.Adam(inputs, 0.05), []
    for _ in range(30):
        listed = top_tokens(*inputs, 8)
        pattern = sr.SelectedBlocks(listed, 1) & sr.Causal()
        mass = block_mass(query, key, pattern)
        loss = selection_loss(index_scores(*inputs, listed), mass)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert sr.attention(query, key, value, pattern).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(2, 3, 23)}, r"weight \[B, N, Hi\] must be floating point and agree"),
        ({"key": torch.ones(2, 1, 41, 5)}, "the index key has no heads"),
        ({"k": 0}, "k must be at least 1"),
        ({"causal": 1}, "causal must be True or False"),
        ({"lengths": torch.ones(2)}, r"lengths must be int64 \[2\]"),
        ({"first": torch.zeros(2, 5, dtype=torch.int64)}, r"first must be int64 \[2 or 1, "),
        ({"stop": torch.ones(2, 23)}, r"stop must be int64 \[2 or 1, 23\], got torch.float32"),
        ({"scale": "1"}, "scale must be a number"),
        ({"q_start": 1.5}, "q_start must be an int or None"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    call = dict(zip(("query", "key", "weight"), drawn(), strict=True)) | {"k": 3}
    with pytest.raises((ValueError, TypeError), match=message):
        top_tokens(**call | change)


def test_a_list_past_the_keys_is_refused_before_anything_runs():
    inputs = drawn()
    for indices in (
        torch.full((2, 1, 23, 2), 41),
        torch.zeros(2, 2, 23, 2).long(),
        torch.ones(2, 1, 23, 2),
    ):
        with pytest.raises(ValueError, match=r"indices must be int64 \[2 or 1, 1, 23, k\]"):
            index_scores(*inputs, indices)
