"""Table of backends, and the choice of the backend that runs a call."""

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from ..checks import reverse_mode_alone
from ..ground.arguments import shortened
from ..ground.commands import install
from ..ground.keywords import with_hints
from ..layouts.compile import chosen_block_size
from ..layouts.lists import is_only_lists
from ..patterns.algebra import Frame, Pattern
from ..patterns.selected import has_lists
from . import cpu, dense, gather, torch_sparse, triton
from .backend import Backend as Backend
from .backend import over_layouts
from .library import cudnn, flash, sdpa
from .library.whole import run_whole
from .second_order import SecondOrder, of_sums, over_tiles_and_lists
from .triton import configs
from .triton.configs import KEYS_IN_ORDER


def _no_float64(*tensors: Tensor) -> list[str]:
    if any(x.device.type == "mps" and x.dtype == torch.float64 for x in tensors):
        return ["MPS has no float64: pass float32, or move the tensors to the CPU"]
    return []


_PORTABLE = of_sums(gather.tangent_sums, gather.tangent_of_gradient_sums)
_COMPILED = SecondOrder(
    tangent=cpu.tangent,
    tangent_of_gradients=cpu.tangent_of_gradients,
    tangent_sums=cpu.tangent_sums,
    tangent_of_gradient_sums=cpu.tangent_of_gradient_sums,
)

BACKENDS: dict[str, Backend] = {
    "cpu": over_layouts(
        cpu.reasons,
        cpu.forward,
        cpu.backward,
        cpu.EXTRAS,
        entry_mass=cpu.entry_mass,
        forward_after=cpu.forward,
        runs_lists=True,
        second_order=over_tiles_and_lists(_COMPILED, _PORTABLE),
    ),
    "cpu_in_order": over_layouts(
        cpu.reasons,
        cpu.forward_in_order,
        cpu.backward_in_order,
        cpu.EXTRAS,
        entry_mass=cpu.entry_mass,
        forward_after=cpu.forward_in_order,
        runs_lists=True,
        is_invariant=True,
        form_of="cpu",
        second_order=_PORTABLE,
    ),
    "triton": over_layouts(
        triton.reasons,
        triton.forward,
        triton.backward,
        triton.EXTRAS,
        package="triton",
        selected_layout=triton.selected_layout,
        runs_lists=True,
        list_keys=triton.list_keys,
        ready_lists=triton.ready_lists,
        list_reasons=triton.list_reasons,
        lacks_over_lists=frozenset(("coordinate_bias",)),
        second_order=_PORTABLE,
    ),
    "triton_in_order": over_layouts(
        triton.reasons,
        triton.forward_in_order,
        triton.backward_in_order,
        triton.EXTRAS,
        package="triton",
        runs_lists=True,
        list_keys=triton.list_keys,
        ready_lists=triton.ready_lists,
        list_reasons=triton.list_reasons,
        lacks_over_lists=frozenset(("coordinate_bias",)),
        is_invariant=True,
        form_of="triton",
        keys_of_step=KEYS_IN_ORDER,
        second_order=_PORTABLE,
    ),
    "gather": over_layouts(
        _no_float64,
        gather.forward,
        gather.backward,
        gather.EXTRAS,
        entry_mass=gather.entry_mass,
        runs_lists=True,
        second_order=_PORTABLE,
    ),
    "reference": Backend(reasons=_no_float64, run=dense.run, extras=dense.EXTRAS),
    "torch_sparse": over_layouts(
        torch_sparse.reasons,
        torch_sparse.forward,
        torch_sparse.backward,
        torch_sparse.EXTRAS,
        only_named=True,
    ),
    "sdpa": Backend(
        reasons=_no_float64,
        run=partial(run_whole, "sdpa", sdpa.refuses, sdpa.attention),
        extras=sdpa.EXTRAS,
        only_named=True,
        refuses=sdpa.refuses,
        returns_lse=False,
    ),
    "flash": Backend(
        reasons=flash.reasons,
        run=partial(run_whole, "flash", flash.refuses, flash.attention),
        extras=flash.EXTRAS,
        only_named=True,
        refuses=flash.refuses,
    ),
    "cudnn": Backend(
        reasons=cudnn.reasons,
        run=partial(run_whole, "cudnn", cudnn.refuses, cudnn.attention),
        extras=cudnn.EXTRAS,
        only_named=True,
        refuses=cudnn.refuses,
    ),
}
"""All backends, in order of preference; the last ones run only if a call names them."""

NAMES = tuple(name for name, backend in BACKENDS.items() if not backend.form_of)
"""Backends that a call may name."""


@with_hints()
def backends() -> dict[str, list[str]]:
    """Returns every backend, with the reasons why it cannot run on this machine ([] = usable)."""
    return {name: BACKENDS[name].reasons() for name in NAMES}


def choose(
    backend: str | None,
    tensors: Sequence[Tensor],
    options: Iterable[str] = (),
    pattern: Pattern | None = None,
) -> str:
    """Returns the name of the backend that runs a call: the named one, or the first that can.

    Args:
        tensors: query, key and value.
        options: names of the extras that the call uses.
        pattern: of the call, if known: lists of single keys alone may run where tiles cannot.

    Raises: ValueError for an unknown name, ImportError if the named backend's package is missing,
        NotImplementedError with every reason otherwise.
    """
    if backend is not None and (not isinstance(backend, str) or backend not in NAMES):
        got = shortened(repr(backend))
        raise ValueError(f"backend must be one of {', '.join(NAMES)} or None, got {got}")
    refused = []
    defaults = [name for name in NAMES if is_default(name)]
    for name in defaults if backend is None else [backend]:
        if not (reasons := reasons_against(name, tensors, options, pattern)):
            return name
        refused.append(f"{name}: {', '.join(reasons)}")
    if backend is not None and (package := BACKENDS[backend].package) and not find_spec(package):
        raise ImportError(f"backend {backend!r} needs the package {package}: {install(backend)}")
    raise NotImplementedError("; ".join(refused))


class _Mode(threading.local):
    """Whether this thread is inside `batch_invariant`."""

    is_batch_invariant = False


mode = _Mode()
"""What `batch_invariant` has set in this thread; torch.compile guards on it."""


def form_for_mode(name: str) -> str:
    """Returns the backend, or its batch-invariant form if this thread is in that mode."""
    if not mode.is_batch_invariant:
        return name
    return next((form for form, its in BACKENDS.items() if its.form_of == name), name)


def is_default(name: str) -> bool:
    """Whether a call may choose this backend by itself.

    Not triton while it would be interpreted.
    """
    return not BACKENDS[name].only_named and not (name == "triton" and triton.interpreting())


def reasons_against(
    name: str,
    tensors: Sequence[Tensor],
    options: Iterable[str] = (),
    pattern: Pattern | None = None,
) -> list[str]:
    """Returns why a backend cannot run a call, [] if it can.

    The arguments are those of `choose`.
    """
    backend, options = BACKENDS[name], tuple(options)
    own = backend.reasons
    if backend.list_reasons is not None and pattern is not None and "block_bias" not in options:
        own = backend.list_reasons if is_only_lists(pattern) else own
    reasons = list(own(*tensors))
    for option in options:
        extra = "block_bias" if option == "slot_bias" else option  # kernels get a block bias
        if extra not in backend.extras:
            able = [other for other in NAMES if extra in BACKENDS[other].extras]
            reasons.append(f"it has no {option} ({', '.join(able)} have it)")
        elif extra in backend.lacks_over_lists and pattern is not None and has_lists(pattern):
            reasons.append(f"it has no {option} over lists of single keys")
    return reasons


def block_size_of(backend: str, pattern: Pattern, query: Tensor, frame: Frame) -> int:
    """Returns the block size for a call: what `sparsering tune` measured, else an estimate.

    A backend that adds up keys in steps (`keys_of_step`) gets one or two steps instead.
    """
    if step := BACKENDS[backend].keys_of_step:
        return step if chosen_block_size(pattern, frame, query.device) < 2 * step else 2 * step
    measured = _MEASURED.get(BACKENDS[backend].form_of or backend)
    size = None if measured is None else measured.block_size(pattern.expression, query)
    return size or chosen_block_size(pattern, frame, query.device)


_MEASURED = {"cpu": cpu.call.measured, "triton": configs.measured}


def second_order(backend: str) -> SecondOrder:
    """Returns a backend's functions of second order; NotImplementedError if it has none."""
    found = BACKENDS[backend].second_order
    if found is None:
        raise NotImplementedError(reverse_mode_alone(backend))
    return found
