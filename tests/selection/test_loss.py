"""`selection_loss` against its formula, slot by slot, in float64; and what must not reach it."""

import pytest
import torch
from oracles import blocks_oracle
from torch import Tensor

from sparsering.selection import selection_loss

B, H, G, R, NB, K = 2, 3, 2, 5, 7, 4


def drawn(slots: int = NB, heads: int = H) -> tuple[Tensor, Tensor]:
    scores = torch.randn(B, H, R, NB, dtype=torch.float64)
    return scores, torch.rand(B, heads, R, slots, dtype=torch.float64)


def check(scores: Tensor, mass: Tensor, *rest: Tensor, **options: Tensor) -> None:
    exact = scores.clone().requires_grad_()
    expected = blocks_oracle.selection_loss(exact, mass, *rest, **options)
    expected.backward()
    scores = scores.clone().requires_grad_()
    mass = mass.clone().requires_grad_()
    loss = selection_loss(scores, mass, *rest, **options)
    loss.backward()
    assert loss.dtype == torch.float64 and loss.shape == ()
    assert abs(loss - expected) < 1e-13
    assert (scores.grad - exact.grad).abs().max() < 1e-14
    assert mass.grad is None


def test_every_visible_block():
    scores, mass = drawn()
    check(scores, mass)


def test_the_heads_of_a_group_are_summed_not_averaged_as_shares():
    scores, mass = drawn(heads=H * G)
    mass[:, ::G] *= 50  # an average of shares would weigh both heads alike
    check(scores, mass)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_heads_of_a_group_are_summed_in_float32(dtype):
    scores, mass = (x.to(dtype) for x in drawn(heads=H * 8))
    expected = blocks_oracle.selection_loss(scores.double(), mass.double())
    assert abs(selection_loss(scores, mass) - expected) < 1e-6


def test_blocks_that_a_row_does_not_see():
    scores, mass = drawn()
    scores = scores.masked_fill(torch.ones(R, NB, dtype=torch.bool).triu(2), -torch.inf)
    check(scores, mass)  # whose mass, if any, is left out
    scores[0, 0] = -torch.inf
    check(scores, mass)


def test_rows_without_mass_have_no_weight():
    scores, mass = drawn()
    mass[0, 1, 2] = mass[1, 0, :3] = 0
    mass[1, 1, 1, 3:] = 0
    check(scores, mass)


@pytest.mark.parametrize("shape", [(R, K), (1, R, K), (H, R, K), (1, H, R, K), (B, H, R, K)])
def test_selected_blocks(shape):
    scores, mass = drawn(K, H * G)
    indices = torch.randint(-1, NB + 1, shape)  # repeated, none, and past the end
    scores[0, 0, 0, :4] = -torch.inf
    check(scores, mass, indices)


def test_repeated_slots_count_once_with_the_first_ones_mass():
    scores, mass = drawn(3)
    indices = torch.tensor([4, 4, 1]).expand(R, 3)
    check(scores, mass, indices)
    apart = torch.tensor([4, -1, 1]).expand(R, 3)
    a, b = (selection_loss(scores, mass, x) for x in (indices, apart))
    assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(R,), (H, 1), (B, 1, R), (B, H, R)])
def test_weights_of_rows(shape):
    scores, mass = drawn()
    weight = torch.rand(shape, dtype=torch.float64)
    weight[0] = 0
    check(scores, mass, row_weight=weight)


def test_gradcheck():
    scores, mass = drawn(K)
    scores[0, 0, 0, :3] = -torch.inf
    mass[1, 1, 1] = 0
    indices = torch.randint(-1, NB, (B, H, R, K))
    visible = scores > -torch.inf

    def loss(x):
        return selection_loss(torch.where(visible, x, -torch.inf), mass, indices)

    x = torch.where(visible, scores, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(loss, x)


def test_scores_that_are_the_log_mass_lose_nothing():
    scores, mass = drawn()
    exact = mass.log() + 3.0
    exact.requires_grad_()
    loss = selection_loss(exact, mass)
    loss.backward()
    assert abs(loss.item()) < 1e-15 and exact.grad.abs().max() < 1e-15
    assert selection_loss(scores, mass) > 0.1


@pytest.mark.parametrize("indices", [None, torch.full((R, NB), -1), torch.arange(NB).expand(R, NB)])
def test_nothing_to_learn_from_gives_zero_and_zero_gradients(indices):
    scores, mass = drawn()
    scores = scores.fill_(-torch.inf).requires_grad_()
    loss = selection_loss(scores, mass, indices)
    loss.backward()
    assert loss.item() == 0 and (scores.grad == 0).all()
    scores = torch.randn(B, H, R, NB, requires_grad=True)
    loss = 0.0 * selection_loss(scores, torch.zeros(B, H, R, NB), indices)
    loss.backward()
    assert loss.item() == 0 and (scores.grad == 0).all()  # zeros, not None


def test_far_scores_stay_finite_in_half_precision():
    scores, mass = drawn()
    for dtype in (torch.float16, torch.bfloat16):
        far = (scores * 2e4).to(dtype).requires_grad_()
        loss = selection_loss(far, mass.to(dtype))
        loss.backward()
        assert loss.dtype == torch.float32 and loss.isfinite() and far.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.zeros(R, NB), torch.zeros(B, H, R, NB)), r"\[B, H, R, Nb\]"),
        ((torch.zeros(B, H, R, NB), torch.zeros(B, H + 1, R, NB)), "multiple of 3 heads"),
        ((torch.zeros(B, H, R, NB), torch.zeros(B, H, R + 1, NB)), "5 rows"),
        ((torch.zeros(B, H, R, NB), torch.zeros(B, H, R, K)), "pass their indices"),
        ((torch.zeros(B, H, R, NB), torch.zeros(1, H, R, NB)), "2 batch entries"),
        (
            (torch.zeros(B, H, R, NB), torch.zeros(B, H, R, K), torch.zeros(R, K)),
            "int64 that broadcast",
        ),
        (
            (torch.zeros(B, H, R, NB), torch.zeros(B, H, R, K), torch.zeros(R, NB).long()),
            "the shape of mass",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        selection_loss(*arguments)


def test_weights_that_do_not_fit_are_refused():
    scores, mass = drawn()
    with pytest.raises(ValueError, match="one for each row"):
        selection_loss(scores, mass, row_weight=torch.ones(R + 1))
