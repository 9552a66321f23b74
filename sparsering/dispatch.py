"""The table of backends, and which of them runs a call."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor

from .kernels import cpu, flash, flex, gather, reference, torch_sparse, triton
from .kernels.problem import Gradients, Problem
from .kernels.triton import tuning
from .layouts.compile import default_block_size
from .patterns.algebra import Pattern
from .patterns.arguments import shortened


class Backend(NamedTuple):
    """One way to compute a problem.

    Attributes:
        reasons: why it cannot run on the tensors given, or on this machine where none is; [] if it
            can.
        forward: None for the reference alone, which sees no layout.
        backward: None where forward is plain differentiable torch and needs no operator.
        extras: the options of a call, beside its scale, that it computes.
        entry_mass: the weights of a problem summed over each entry, in the place of its block bias;
            None where the gradient of that bias must do.
        only_named: it is no default choice.
        package, extra: what it needs installed, and the extra that installs it.
    """

    reasons: Callable[..., list[str]]
    forward: Callable[[Problem], tuple[Tensor, Tensor]] | None
    backward: Callable[[Problem, Tensor, Tensor, Tensor, Tensor], Gradients] | None
    extras: frozenset[str]
    only_named: bool = False
    package: str = ""
    extra: str = ""
    entry_mass: Callable[[Problem, Tensor, Tensor], Tensor] | None = None

    @property
    def runs_any_layout(self) -> bool:
        """Whether it computes any pass, forward and backward, as a ring needs."""
        return self.backward is not None and not self.only_named


def _no_reason(*tensors: Tensor) -> list[str]:
    return []


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(
        cpu.reasons, cpu.forward, cpu.backward, cpu.EXTRAS, entry_mass=cpu.entry_mass
    ),
    "triton": Backend(
        triton.reasons, triton.forward, triton.backward, triton.EXTRAS, package="triton",
        extra="triton",
    ),
    "gather": Backend(
        _no_reason, gather.forward, gather.backward, gather.EXTRAS, entry_mass=gather.entry_mass
    ),
    "reference": Backend(_no_reason, None, None, reference.EXTRAS),
    "flex": Backend(flex.reasons, flex.forward, None, flex.EXTRAS, only_named=True),
    "flash": Backend(
        flash.reasons, flash.forward, triton.backward, flash.EXTRAS, only_named=True,
        package="flash_attn", extra="flash",
    ),
    "torch_sparse": Backend(
        torch_sparse.reasons, torch_sparse.forward, None, torch_sparse.EXTRAS, only_named=True
    ),
}  # fmt: skip
"""In order of preference."""


def backends() -> dict[str, list[str]]:
    """Every backend with the reasons why it cannot run on this machine ([] = usable)."""
    return {name: backend.reasons() for name, backend in BACKENDS.items()}


def choose(
    backend: str | None, tensors: Sequence[Tensor], options: Mapping[str, Any] | None = None
) -> str:
    """The named backend, or the first that can run a call.

    Args:
        tensors: query, key and value.
        options: those that only some backends compute, None where it is not in use.

    Raises: NotImplementedError with every reason, ImportError where a named one lacks its package.
    """
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        got = shortened(repr(backend))
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {got}")
    refused = []
    for name in BACKENDS if backend is None else [backend]:
        if backend is None and not is_default(name):
            continue
        if not (reasons := reasons_against(name, tensors, options)):
            return name
        refused.append(f"{name}: {', '.join(reasons)}")
    if backend is not None and (lacking := _missing_package(BACKENDS[backend])):
        raise ImportError(f"backend {backend!r} needs {lacking}")
    raise NotImplementedError("; ".join(refused))


def _missing_package(backend: Backend) -> str:
    if not backend.package or find_spec(backend.package) is not None:
        return ""
    return f"the package {backend.package}: pip install 'sparsering[{backend.extra}]'"


def is_default(name: str) -> bool:
    """Whether a backend may run unnamed; an interpreter of kernels never does."""
    return not BACKENDS[name].only_named and not (name == "triton" and triton.interpreting())


def reasons_against(
    name: str, tensors: Sequence[Tensor], options: Mapping[str, Any] | None = None
) -> list[str]:
    """Why a backend cannot run a call; [] if it can."""
    backend = BACKENDS[name]
    lacks = [
        f"it has no {option} ({', '.join(_computing(option))} have it)"
        for option, given in (options or {}).items()
        if given is not None and _computed_as(option) not in backend.extras
    ]
    return backend.reasons(*tensors) + lacks


def _computing(option: str) -> list[str]:
    return [name for name, backend in BACKENDS.items() if _computed_as(option) in backend.extras]


def _computed_as(option: str) -> str:
    """What kernels are given for an option: to them a slot's bias is that of an entry."""
    return "block_bias" if option == "slot_bias" else option


def block_size_of(backend: str, pattern: Pattern, query: Tensor, kv_len: int) -> int:
    """The block size of a call that names none.

    That is what `sparsering tune` measured for the pattern on this GPU, else `default_block_size`.
    """
    if backend == "triton" and (size := tuning.block_size(pattern.expression, query)) is not None:
        return size
    return default_block_size(pattern, kv_len)
