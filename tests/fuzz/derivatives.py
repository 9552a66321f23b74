"""Tangents, second and mixed derivatives of random calls, beside torch's own of the dense formula.

The oracle is `backend="reference"` in float64: plain differentiable torch, whose results the kind
`calls` compares with an oracle that shares no code. Lower precision may have a few times the error
that the same derivative of that formula has in the same dtype: a row of one key has no rounding in
the formula, and tests/attention/test_derivatives.py holds rows of several keys to twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product

import hypothesis.strategies as st
import torch
from torch import Tensor
from torch.func import grad, jvp

from . import calls, specs
from .attack import Cell, Refused

WAYS = ("tangent", "second", "tangent of a gradient", "gradient of a tangent")
BACKENDS = ("default", "cpu", "gather", "torch_sparse")
CELLS = [Cell(*cell) for cell in product(WAYS, specs.CLASSES, BACKENDS, calls.DTYPES)]
CELLS += [Cell(way, specs.LISTED, *rest) for way, *rest in product(WAYS, BACKENDS, calls.DTYPES)]

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Moved(calls.Call):
    """A call, one of whose derivatives is taken."""

    way: str = WAYS[0]

    def cells(self) -> list[Cell]:
        return [Cell(self.way, c, self.backend, self.dtype) for c in specs.classes_of(self.spec)]

    def check(self) -> None:
        # forward mode refuses tensors that share memory within themselves
        tensors = {name: x.detach() for name, x in self.tensors().items()}
        if self.arrange == "one head expanded":
            tensors = {name: x.clone() for name, x in tensors.items()}
        generator = torch.Generator().manual_seed(self.seed + 1)
        moves = [
            torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
            for x in tensors.values()
        ]
        try:
            found = self.derivative(tensors, moves)
        except (NotImplementedError, ImportError) as refusal:
            assert self.backend != "default" or self.slot_bias is not None, refusal
            raise Refused(str(refusal)) from None
        dense = replace(self, backend="reference")
        exact = dense.derivative({k: x.double() for k, x in tensors.items()}, doubles(moves))
        dtype = self.precision()
        eager = exact if dtype == torch.float64 else dense.derivative(tensors, moves)
        # where terms cancel, rounding is that of the terms
        size = max(1.0, *(x.abs().max().item() for x in exact if x.numel()), 0.0)
        for number, (a, b, c) in enumerate(zip(found, exact, eager, strict=True)):
            what = f"derivative {number} of {self.way}"
            assert a.shape == b.shape, what
            assert a.isfinite().all() or not b.isfinite().all(), f"{what} is not finite"
            if dtype == torch.float64:
                bound = 1e-10 * self.magnitude * max(1.0, b.abs().max()) if b.numel() else 0.0
                assert not b.numel() or (a - b).abs().max() <= bound, what
                continue
            if not b.numel():
                continue
            error, allowed = ((x.double() - b).square().mean().sqrt() for x in (a, c))
            # a number of a distance table sums over all rows, which cancel to 0 for a single number
            rows = self.scene.q_len if [*tensors][number : number + 1] == ["distance_bias"] else 1
            assert not error > 4 * allowed + 32 * torch.finfo(dtype).eps * size * rows**0.5, (
                f"{what}: error {error:.2e}, of dense attention {allowed:.2e}, size {size:.2e}"
            )

    def derivative(self, tensors: dict[str, Tensor], moves: Sequence[Tensor]) -> list[Tensor]:
        """Returns the derivatives of the call's way at some tensors."""

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            out, *lse = self.attend(dict(zip(tensors, given, strict=True)))
            return out, *(torch.where(x == -torch.inf, 0.0, x) for x in lse)

        return DERIVATIVES[self.way](run, list(tensors.values()), moves)


def doubles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() for x in tensors]


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def loss(run: Function, *x: Tensor) -> Tensor:
    return sum(
        y.float().sin().sum() if y.dtype != torch.float64 else y.sin().sum() for y in run(*x)
    )


def tangent(run: Function, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    return [*jvp(run, tuple(x), tuple(u))[1]]


def second(run: Function, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    x = leaves(x)
    results = run(*x)
    grads = leaves([torch.ones_like(y) for y in results])
    first = torch.autograd.grad(results, x, grads, create_graph=True, materialize_grads=True)
    penalty = sum((g * v).sum() for g, v in zip(first, u, strict=True))
    return [*torch.autograd.grad(penalty, [*x, *grads], materialize_grads=True)]


def of_gradient(run: Function, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    gradients = grad(partial(loss, run), tuple(range(len(x))))
    return [*jvp(gradients, tuple(x), tuple(u))[1]]


def through_tangent(run: Function, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    x, u = leaves(x), leaves(u)
    moved = jvp(run, tuple(x), tuple(u))[1]
    total = sum(y.sum() for y in moved)
    return [*torch.autograd.grad(total, [*x, *u], materialize_grads=True)]


DERIVATIVES = dict(zip(WAYS, (tangent, second, of_gradient, through_tangent), strict=True))


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Moved:
    """Draws calls with any options, whose derivatives are taken in a cell's way."""
    option = draw(st.sampled_from(("none", *calls.OPTIONS)))
    if option in calls.HALF_ALONE:
        option = "none"
    call = draw(calls.cases(cell._replace(option=option)))
    given = {field.name: getattr(call, field.name) for field in fields(call)}
    given |= {"autocast": False, "half_tables": False}
    if cell.dtype != "float64":
        given["magnitude"] = 1.0  # scores of hundreds leave second derivatives no digits
    return Moved(**given, way=cell.option)
