"""A training step lists the keys of a selection once: autograd saves the lists for backward."""

import pytest
import torch
from oracles.listed import CHOSEN, JOINS, LISTED, TOKENS, WINDOW

import sparsering as sr
from sparsering.layouts import lists

_PAIRS = torch.randint(0, 40, (2, 300), generator=torch.Generator().manual_seed(7)).unique(dim=1)
_HUB = torch.stack((torch.zeros(40, dtype=torch.int64), torch.arange(40)))


def drawn(batch: int = 2, tokens: int = TOKENS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (batch, 4, tokens, 16), (batch, 2, tokens, 16), (batch, 2, tokens, 16)
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def times_listed(monkeypatch, run) -> int:
    made = []

    def list_keys(*arguments):
        made.append(arguments)
        return own(*arguments)

    own = lists._list_keys
    with monkeypatch.context() as patch:
        patch.setattr(lists, "_list_keys", list_keys)
        run()
    return len(made)


def selections(pattern: sr.Pattern) -> int:
    return sum(map(len, lists.split(pattern)[1]))


LARGER = {"a list or a window, in a list"}
"""Joins whose keys take more memory than their indices."""


@pytest.mark.parametrize("backend", ["cpu", "gather"])
@pytest.mark.parametrize("name", JOINS)
def test_backward_lists_nothing(monkeypatch, name, backend):
    inputs, pattern = drawn(), JOINS[name]
    out = sr.attention(*inputs, pattern, backend=backend)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))

    def backward() -> None:
        torch.autograd.grad(out, inputs, grad)

    listed = times_listed(monkeypatch, backward)
    assert listed == (selections(pattern) if name in LARGER else 0)


def test_saved_lists_replace_the_indices():
    saved = []

    def keep(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        sr.attention(*drawn(1), (CHOSEN | WINDOW) & sr.Causal())
    integers = [x for x in saved if not x.is_floating_point()]
    assert [(x.dtype, x.shape) for x in integers] == [(torch.int32, (1, 2, TOKENS, 12))]
    assert integers[0].nbytes < LISTED.nbytes


def test_without_a_gradient_the_call_keeps_its_pattern(monkeypatch):
    inputs = [x.detach() for x in drawn()]
    attend = lambda: sr.attention(*inputs, CHOSEN)  # noqa: E731
    assert times_listed(monkeypatch, attend) == 1
    wide = sr.SelectedBlocks(torch.zeros(2, 3, dtype=torch.int64), 45, 45)
    assert times_listed(monkeypatch, lambda: sr.attention(*drawn(), wide).sum().backward()) == 0


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        (sr.SelectedBlocks(LISTED[:1, : TOKENS // 6], 12, 6), {}),
        (CHOSEN, {"slot_bias": torch.zeros(1, 2, TOKENS, 12)}),
        (JOINS["along a tree"], {"distance_bias": torch.zeros(4, 3)}),
        (sr.SelectedBlocks.from_edges(torch.cat((_PAIRS, _HUB), 1).unique(dim=1), TOKENS), {}),
    ],
    ids=["larger than its indices", "slot bias", "distances in a tree", "a graph"],
)
def test_other_calls_list_twice(monkeypatch, pattern, options):
    run = lambda: sr.attention(*drawn(), pattern, **options).sum().backward()  # noqa: E731
    assert times_listed(monkeypatch, run) >= 2


def test_a_hub_that_rows_repeat_counts_as_often_as_before(monkeypatch):
    """Gradients are those of the call that observes everything, as under a dispatch mode."""

    class Observed(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    inputs, grad = drawn(), None
    found = []
    for mode in (torch.enable_grad(), Observed()):
        with mode:
            out = sr.attention(*inputs, CHOSEN & sr.Causal(), distance_bias=torch.zeros(4, 5))
            grad = torch.ones_like(out) if grad is None else grad
            found.append([out, *torch.autograd.grad(out, inputs, grad)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
