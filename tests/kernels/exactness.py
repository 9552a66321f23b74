"""The CPU kernel against the reference in float64, on the same numbers."""

import torch
from oracles.attention_oracle import Case, assert_close, gradients, inputs
from torch import Tensor

import sparsering as sr

FORWARD = 3e-6  # float32 sums of up to some hundred terms; a wrong pair is off by 1e-3 at least
BACKWARD = 2e-5
SWEEPS = ("by head", "by tile")  # how dK and dV are summed


def assert_is_exact(
    pattern: sr.Pattern,
    case: Case,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    args: tuple[Tensor, ...] | None = None,
    **options,
) -> None:
    """Compares out, lse and every gradient; options that are tensors are learnt, too.

    `args` may take the place of drawn inputs; the reference reads 0 for a NaN in them.
    """
    args = inputs(case, dtype) if args is None else args
    options |= {"q_start": case.q_start, "block_size": case.block_size, "return_lse": True}
    tables = options if bias is None else options | {"block_bias": bias}
    tables = {name: x for name, x in tables.items() if isinstance(x, Tensor)}

    def attend(args: list[Tensor], backend: str, dtype: torch.dtype) -> tuple[list, list]:
        given = {name: x.detach().to(dtype).requires_grad_() for name, x in tables.items()}
        results = sr.attention(*args, pattern, backend=backend, **(options | given))
        return list(results), gradients(results, [*args, *given.values()])

    exact_args = [x.detach().double().nan_to_num().requires_grad_() for x in args]
    got, grads = attend(list(args), "cpu", torch.float32)
    exact, exact_grads = attend(exact_args, "reference", torch.float64)
    eps = torch.finfo(dtype).eps
    forward, backward = (FORWARD, BACKWARD) if dtype == torch.float32 else (2 * eps, 8 * eps)
    for name, a, b in zip(("out", "lse"), got, exact, strict=True):
        assert_close(a.detach().double(), b.detach(), forward, name)
    for name, a, b in zip(("query", "key", "value", *tables), grads, exact_grads, strict=True):
        assert_close(a.double(), b, backward, f"gradient of {name}")
