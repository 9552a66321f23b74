"""Table of backends, and the choice of the backend that runs a call."""

import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from .call import Inputs
from .commands import install
from .kernels import cpu, flash, gather, reference, sdpa, torch_sparse, triton
from .kernels.problem import Gradients, Problem
from .kernels.triton import configs
from .kernels.triton.configs import KEYS_IN_ORDER
from .layouts.compile import chosen_block_size
from .layouts.layout import BlockLayout
from .layouts.lists import is_only_lists
from .patterns.algebra import Frame, Pattern
from .patterns.arguments import shortened
from .patterns.keywords import with_hints


class Backend(NamedTuple):
    """The functions of a backend, and the calls that they can run."""

    # Lists why the backend cannot run on query, key and value, or, without them, on this machine.
    reasons: Callable[..., list[str]]
    # Computes (out, lse) over a layout, in an operator. None for backends with a `library_call`,
    # and for the reference, which is plain torch.
    forward: Callable[[Problem], tuple[Tensor, Tensor]] | None
    backward: Callable[[Problem, Tensor, Tensor, Tensor, Tensor], Gradients] | None
    extras: frozenset[str]  # options of a call, such as softcap or sink, that it computes
    package: str = ""  # that it needs; the pip extra with the backend's name has it
    # Sums each block's attention weights, times a factor per query: [B, Hq, blocks]. If it is None,
    # callers take these sums from the gradient of a block bias.
    entry_mass: Callable[[Problem, Tensor, Tensor], Tensor] | None = None
    # As `forward`; it first stores new keys and values, from their first rows on, in the problem's.
    forward_after: Callable[..., tuple[Tensor, Tensor]] | None = None
    reads_8_bits: bool = False  # True if it reads keys and values of 8 bits, as caches store them
    # Builds the layout of selected blocks from a pattern, a frame, a block size and a device;
    # returns None for patterns that it does not support.
    selected_layout: Callable[..., BlockLayout | None] | None = None
    runs_lists: bool = False  # True if it computes `Problem.lists`
    # As `reasons`, for a pattern that is nothing but lists of single keys; None: they are the same.
    list_reasons: Callable[..., list[str]] | None = None
    only_named: bool = False  # True if it runs only calls that name it
    # Computes (out, lse) of query, key, value, a pattern, a frame and a scale by a library that
    # reads no layout and differentiates itself.
    library_call: Callable[..., tuple[Tensor, Tensor]] | None = None
    # Lists why `library_call` cannot run ((query, key, value), pattern, frame).
    refuses: Callable[[Inputs, Pattern, Frame], list[str]] | None = None
    returns_lse: bool = True  # False if its lse is an empty tensor
    is_invariant: bool = False  # True if rows have the same bits in any company
    # Name of the backend whose form for `batch_invariant` this is. No call names a form.
    form_of: str = ""
    # Keys that a form adds up in one step: its tiles have as many, or twice as many. 0: any number.
    keys_of_step: int = 0


def _no_float64(*tensors: Tensor) -> list[str]:
    if any(x.device.type == "mps" and x.dtype == torch.float64 for x in tensors):
        return ["MPS has no float64: pass float32, or move the tensors to the CPU"]
    return []


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(
        cpu.reasons, cpu.forward, cpu.backward, cpu.EXTRAS, entry_mass=cpu.entry_mass,
        forward_after=cpu.forward, reads_8_bits=True, runs_lists=True,
    ),
    "cpu_in_order": Backend(
        cpu.reasons, cpu.forward_in_order, cpu.backward_in_order, cpu.EXTRAS,
        entry_mass=cpu.entry_mass, forward_after=cpu.forward_in_order, reads_8_bits=True,
        runs_lists=True, is_invariant=True, form_of="cpu",
    ),
    "triton": Backend(
        triton.reasons, triton.forward, triton.backward, triton.EXTRAS, package="triton",
        selected_layout=triton.selected_layout, runs_lists=True,
        list_reasons=triton.list_reasons,
    ),
    "triton_in_order": Backend(
        triton.reasons, triton.forward_in_order, triton.backward_in_order, triton.EXTRAS,
        package="triton", runs_lists=True, list_reasons=triton.list_reasons,
        is_invariant=True, form_of="triton", keys_of_step=KEYS_IN_ORDER,
    ),
    "gather": Backend(
        _no_float64, gather.forward, gather.backward, gather.EXTRAS, entry_mass=gather.entry_mass,
        runs_lists=True,
    ),
    "reference": Backend(_no_float64, None, None, reference.EXTRAS),
    "torch_sparse": Backend(
        torch_sparse.reasons, torch_sparse.forward, torch_sparse.backward, torch_sparse.EXTRAS,
        only_named=True,
    ),
    "sdpa": Backend(
        _no_float64, None, None, sdpa.EXTRAS, only_named=True, library_call=sdpa.attention,
        refuses=sdpa.refuses, returns_lse=False,
    ),
    "flash": Backend(
        flash.reasons, None, None, flash.EXTRAS, only_named=True, library_call=flash.attention,
        refuses=flash.refuses,
    ),
}  # fmt: skip
"""All backends, in order of preference; those that run only when named are last."""

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
    """Returns the named backend, or the first default one that can run the call.

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
    is_batch_invariant = False


mode = _Mode()
"""What `batch_invariant` has set in this thread; torch.compile guards on it."""


def in_company(name: str) -> str:
    """Returns the form of a backend that the mode of this thread asks for."""
    if not mode.is_batch_invariant:
        return name
    return next((form for form, its in BACKENDS.items() if its.form_of == name), name)


def is_default(name: str) -> bool:
    """True if a backend may be chosen by default; never triton if its interpreter would run."""
    return not BACKENDS[name].only_named and not (name == "triton" and triton.interpreting())


def reasons_against(
    name: str,
    tensors: Sequence[Tensor],
    options: Iterable[str] = (),
    pattern: Pattern | None = None,
) -> list[str]:
    """Returns why a backend cannot run a call, with arguments as in `choose`; [] if it can."""
    backend, options = BACKENDS[name], tuple(options)
    own = backend.reasons
    if backend.list_reasons is not None and pattern is not None and "block_bias" not in options:
        own = backend.list_reasons if is_only_lists(pattern) else own
    reasons = list(own(*tensors))
    for option in options:
        extra = "block_bias" if option == "slot_bias" else option  # kernels get it as a block bias
        if extra not in backend.extras:
            able = [other for other in NAMES if extra in BACKENDS[other].extras]
            reasons.append(f"it has no {option} ({', '.join(able)} have it)")
    return reasons


def block_size_of(backend: str, pattern: Pattern, query: Tensor, frame: Frame) -> int:
    """Returns the block size that `sparsering tune` measured for a pattern, else an estimate.

    If the backend's rows add up keys in steps, it is one or two of those.
    """
    if step := BACKENDS[backend].keys_of_step:
        return step if chosen_block_size(pattern, frame, query.device) < 2 * step else 2 * step
    measured = _MEASURED.get(BACKENDS[backend].form_of or backend)
    size = None if measured is None else measured.block_size(pattern.expression, query)
    return size or chosen_block_size(pattern, frame, query.device)


_MEASURED = {"cpu": cpu.call.measured, "triton": configs.measured}
