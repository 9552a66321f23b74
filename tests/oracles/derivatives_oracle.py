"""Patterns, options and ways of torch to take tangents, second and mixed derivatives.

The oracle is `backend="reference"` in float64, whose derivatives torch itself makes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp

import sparsering as sr

N = 36
TREE = sr.Tree((12, 8, 8, 8), (-1, 0, 0, 1))
INDICES = torch.tensor([[[(7 * q + 5 * j * j) % N for j in range(6)] for q in range(N)]])
EDGES = torch.stack((INDICES[0, :, :4].flatten(), torch.arange(N).repeat_interleave(4)))
PATTERNS = {
    "window": sr.SlidingWindow(7) & sr.Causal(),
    "strided window and global": sr.SlidingWindow(6, 6, 3) | sr.GlobalTokens(3),
    "LongNet": sr.LongNet((8, 16), (1, 2)) & sr.Causal(),
    "one branch twice": sr.Causal() + sr.SlidingWindow(4),
    "documents": sr.Packed((10, 1, 19, 6), sr.Causal()),
    "padding": sr.KeyPadding((20, N)) & sr.SlidingWindow(9),
    "rows without keys": sr.KeyMask(torch.arange(N) > 20) & sr.Causal(),
    "tree": TREE,
    "grid": sr.Neighbourhood((6, 6), 1),
    "per head": sr.PerHead((sr.Causal(), sr.SlidingWindow(3))),
    "blocks": sr.BlockWindow(1, 8),
    "selected blocks": sr.SelectedBlocks(torch.tensor([[[0, -1], [1, 0], [0, 2]]] * 2), 16),
    "lists": sr.SelectedBlocks(INDICES, 1) & sr.Causal(),
    "edges": sr.SelectedBlocks.from_edges(EDGES, N),
    "lists beside tiles": sr.SelectedBlocks(INDICES, 1) | sr.SlidingWindow(5),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.4},
    "distances": {"distance_bias": (4, 2 * 9 + 1)},
    "sink of a head": {"sink": (4,)},
    "sink of a query": {"sink": (2, 4, N)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "all": {
        "softcap": 1.5,
        "distance_bias": (4, 2 * 9 + 1),
        "sink": (4,),
        "dropout_p": 0.3,
        "dropout_seed": 5,
    },
}


def drawn(
    seed: int,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    dims: tuple[int, int] = (8, 6),
) -> list[Tensor]:
    """Query, key and value, then a tensor for each option that is given by its shape."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, N, dims[0]), (2, 2, N, dims[0]), (2, 2, N, dims[1])]
    shapes += [x for x in options.values() if isinstance(x, tuple)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def call(
    pattern: sr.Pattern, options: dict[str, Any], backend: str | None, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) of tensors as `drawn` returns them; lse is 0 in rows without keys."""
    learned = iter(tensors[3:])
    given = {k: next(learned) if isinstance(x, tuple) else x for k, x in options.items()}
    found = sr.attention(*tensors[:3], pattern, return_lse=True, backend=backend, **given)
    out, lse = found
    return out, torch.where(lse == -torch.inf, 0.0, lse)


Call = Callable[..., tuple[Tensor, Tensor]]


def loss(f: Call, *x: Tensor) -> Tensor:
    out, lse = f(*x)
    return out.sin().sum() + lse.cos().sum()


def tangent(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    return [*jvp(f, tuple(x), tuple(u))[1]]


def second(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a penalty on gradients, also by the gradients of out and lse."""
    x = [t.detach().clone().requires_grad_() for t in x]
    out, lse = f(*x)
    of_out, of_lse = (torch.ones_like(t).requires_grad_() for t in (out, lse))
    first = torch.autograd.grad((out, lse), x, (of_out, of_lse), create_graph=True)
    penalty = sum((g * v).sum() + g.square().sum() for g, v in zip(first, u, strict=True))
    return [*torch.autograd.grad(penalty, [*x, of_out, of_lse])]


def of_gradient(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    """A product with the Hessian: the tangent of a gradient."""
    return [*jvp(grad(partial(loss, f), tuple(range(len(x)))), tuple(x), tuple(u))[1]]


def through_tangent(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a loss of tangents, by the tensors and by their directions."""
    x, u = ([t.detach().clone().requires_grad_() for t in y] for y in (x, u))
    results, moves = jvp(f, tuple(x), tuple(u))
    total = sum(t.sin().sum() for t in moves) + results[0].square().sum()
    return [*torch.autograd.grad(total, [*x, *u])]


WAYS = {"tangent": tangent, "second": second, "HVP": of_gradient, "through": through_tangent}


def assert_equal(found: Sequence[Tensor], exact: Sequence[Tensor], error: float = 1e-10) -> None:
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.isfinite().all()
        assert (a - b).abs().max() <= error * max(1.0, b.abs().max())
