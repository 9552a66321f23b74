"""An indexer's scores and choice: few launches, however many tokens, and no wait for the GPU."""

import pytest
import torch
from gpu_stub import capturing, counted
from torch import Tensor

from sparsering import selection

HEADS, WIDTH, K = 8, 64, 64


def drawn(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(1, HEADS, tokens, WIDTH, device="cuda").bfloat16()
    key = torch.randn(1, tokens, WIDTH, device="cuda").bfloat16()
    return query, key, torch.randn(1, tokens, HEADS, device="cuda").bfloat16()


def chosen(tokens: int) -> Tensor:
    return selection.top_tokens(*drawn(tokens), K)


@pytest.mark.parametrize(("tokens", "most"), [(1024, 40), (4096, 60)])
def test_a_choice_launches_little_and_waits_for_nothing(hopper, tokens, most):
    inputs = drawn(tokens)
    with counted() as counts:
        selection.top_tokens(*inputs, K)
    assert 0 < counts.torch <= most and not counts.syncs and not counts.transfers, counts


def test_scores_of_chosen_keys_wait_for_nothing_with_their_gradient(hopper):
    inputs = [x.requires_grad_() for x in drawn(1024)]
    indices = torch.randint(-1, 1024, (1, 1, 1024, K), device="cuda")
    with counted() as counts:
        scores = selection.index_scores(*inputs, indices)
        torch.autograd.grad(scores, inputs, torch.zeros_like(scores))
    assert 0 < counts.torch <= 120 and not counts.syncs and not counts.transfers, counts


def test_a_choice_can_be_captured(hopper):
    inputs = drawn(512)
    selection.top_tokens(*inputs, K)
    with capturing() as capture:
        selection.top_tokens(*inputs, K)
    assert not capture.surviving()
