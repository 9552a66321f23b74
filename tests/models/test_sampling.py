"""Drawing a token: top_k and top_p against their definitions, one token and one sum at a time."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsering.models.next_token import Sampling

SCORES = st.lists(st.integers(-12, 12), min_size=1, max_size=6)  # ties among them


def exponentials(scores, temperature):
    return [math.exp((score - max(scores)) / temperature) for score in scores]


def kept_by_k(scores, k):
    """The k largest, the lower token of equal ones."""
    return set(sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:k])


def by_definition(scores, temperature, k, p):
    """Chances by trying all sets of tokens, the smallest and likeliest first."""
    kept = kept_by_k(scores, k or len(scores))
    mass = [e if i in kept else 0.0 for i, e in enumerate(exponentials(scores, temperature))]
    chances = [m / sum(mass) for m in mass]
    if p is not None and p < 1:
        for size in range(1, len(scores) + 1):
            best = max(
                itertools.combinations(sorted(kept), size),
                key=lambda tokens: (sum(scores[t] for t in tokens), [-t for t in tokens]),
            )
            if size == len(kept) or sum(chances[t] for t in best) >= p:
                break
        chances = [c if t in best else 0.0 for t, c in enumerate(chances)]
    return [c / sum(chances) for c in chances]


@given(
    scores=SCORES,
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    k=st.none() | st.integers(1, 8),
    p=st.none() | st.sampled_from([1e-9, 0.11, 0.301, 0.499, 0.77, 0.951, 1.0]),
)
def test_chances_are_those_of_the_definition(scores, temperature, k, p):
    logits = torch.tensor([scores, scores[::-1]]).double()
    got = Sampling(temperature, k, p).chances(logits)
    for row, of_row in zip(got, (scores, scores[::-1]), strict=True):
        expected = by_definition(of_row, temperature, k, p)
        assert [c > 0 for c in row.tolist()] == [c > 0 for c in expected]
        assert row.tolist() == pytest.approx(expected, abs=1e-12)


@given(scores=SCORES)
def test_greedy_is_the_first_of_the_largest(scores):
    logits = torch.tensor([scores], dtype=torch.float32)
    largest = scores.index(max(scores))
    for sampling in (Sampling(0), Sampling(0, 3, 0.5), Sampling(2.0, 1), Sampling(2.0, None, 1e-9)):
        assert sampling.draw(logits).tolist() == [largest]


def test_a_tiny_temperature_is_greedy_and_not_infinite():
    logits = torch.tensor([[1.0, 80.0, -90.0]]).double()
    for temperature in (1e-3, 1e-300, 5e-324):
        assert Sampling(temperature).chances(logits).tolist() == [[0, 1, 0]]


def test_draws_come_as_often_as_their_chances():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(40000, 4)
    generator = torch.Generator().manual_seed(0)
    for sampling in (Sampling(1.0), Sampling(2.0, 3), Sampling(1.0, None, 0.8)):
        drawn = sampling.draw(logits, generator)
        often = torch.bincount(drawn, minlength=4) / len(drawn)
        chances = sampling.chances(logits[:1])[0].float()
        assert ((often > 0) == (chances > 0)).all()
        torch.testing.assert_close(often, chances, rtol=0, atol=0.01)


def test_greedy_draws_nothing_from_the_generator():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    Sampling(0).draw(torch.zeros(2, 5), generator)
    assert torch.equal(generator.get_state(), before)
    Sampling(1).draw(torch.zeros(2, 5), generator)
    assert not torch.equal(generator.get_state(), before)
