"""Computes values once, on one thread, and estimates how many bytes they hold.

Small tables take microseconds on one core; with several cores, a busy one would delay all.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _DisableFuncTorch,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .arguments import is_shape_alone

Owner = TypeVar("Owner")
Value = TypeVar("Value")

_PACKAGE = __name__.partition(".")[0] + "."
_TENSOR_BYTES = 640  # bytes of a tensor's C++ and Python objects, besides its data
_NUMBER_BYTES = 24  # an average, because most numbers are small and shared
_PLAIN = {int, float, bool, str, type(None)}
_OBJECT_BYTES = 64  # estimate for a value that `bytes_held` does not look into


def _load_openmp() -> ctypes.CDLL | None:
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    path = Path(torch.__file__).parent / "lib" / f"libtorch_global_deps{suffix}"
    try:
        library = ctypes.CDLL(str(path))
        return library if library.omp_set_num_threads else None
    except (OSError, AttributeError):
        return None


_OPENMP = _load_openmp()


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch operators that this thread runs in the block use one core instead of all."""
    if _OPENMP is None or torch.get_num_threads() == 1:
        yield
        return
    threads = _SPARED.number = _OPENMP.omp_get_max_threads()
    _OPENMP.omp_set_num_threads(1)
    try:
        yield
    finally:
        _OPENMP.omp_set_num_threads(threads)
        _SPARED.number = 1


class _Spared(threading.local):
    number = 1  # threads of torch, of which `one_thread` leaves one


_SPARED = _Spared()


def spared_threads() -> int:
    """Returns how many threads torch had before `one_thread` left it one; 1 outside of its block.

    A kernel inside the block may use so many threads itself.
    """
    return _SPARED.number


@contextmanager
def unseen(*values: object) -> Iterator[None]:
    """Hides the block's operators from tracers, torch modes and vmap, so tables get numbers.

    A value that is cached must hold numbers, because later calls read it without the tracer. If one
    of `values` has a tensor that the tracer made, nothing is hidden.
    """
    traced = _len_torch_dispatch_stack() or _are_functorch_transforms_active()
    in_block = _len_torch_function_stack() > 0  # torch.device("meta") makes meta tensors
    if not (traced or in_block) or _fake(values):
        yield
        return
    with ExitStack() as hidden:
        if traced:
            hidden.enter_context(_disable_current_modes())
            hidden.enter_context(_DisableFuncTorch())
        if in_block:
            hidden.enter_context(torch.device("cpu"))
        yield


@contextmanager
def unseen_beside(x: object) -> Iterator[None]:
    """Lets tables in the block have numbers, even if `x`, the caller's tensor, has a shape alone.

    It is for tables on the host, which need numbers even in such a call.
    """
    if not is_shape_alone(x):
        yield
        return
    with unseen():
        yield


def _fake(value: object, depth: int = 4) -> bool:
    """Whether a value is a FakeTensor, or holds one at most 4 levels deep in it."""
    if isinstance(value, Tensor) or not depth:
        return isinstance(value, FakeTensor)
    if not isinstance(value, tuple | list):
        value = [*getattr(value, "__dict__", {}).values()]  # another thread may add to it
    return any(_fake(part, depth - 1) for part in value)


class once(Generic[Owner, Value]):  # noqa: N801 - used as `property` is
    """A property that is computed on first use, on one thread, and then stored in the instance.

    `functools.cached_property` of Python 3.11 has one lock for all instances. If a process forks
    while another thread holds the lock, nobody releases it in the child.
    """

    def __init__(self, make: Callable[[Owner], Value]) -> None:
        self.make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "once[Owner, Value]": ...
    @overload
    def __get__(self, instance: Owner, owner: type) -> Value: ...
    def __get__(self, instance: Owner | None, owner: type) -> "once[Owner, Value] | Value":
        if instance is None:
            return self
        with one_thread(), unseen(instance):
            value = self.make(instance)
        return vars(instance).setdefault(self.name, value)

    def stored(self, instance: Owner) -> Value | None:
        """Returns the value that the instance stores, or None before its first use."""
        return vars(instance).get(self.name)

    def store(self, instance: Owner, value: Value) -> None:
        """Stores a value that the caller has computed already, so that `make` need not run."""
        vars(instance)[self.name] = value


def bytes_held(value: Any) -> int:
    """Estimates the bytes of a value: tensors, containers, and objects of this package.

    Every object counts once. Other objects, such as compiled kernels, count as 64 bytes; an object
    of this package that holds such objects may say how many bytes they have, as `unseen_bytes`.
    """
    total, waiting, seen = 0, [value], set()
    while waiting:
        x = waiting.pop()
        if (kind := type(x)) in _PLAIN:
            total += sys.getsizeof(x) if kind is str else _NUMBER_BYTES
            continue
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            data = x.untyped_storage()
            total += _TENSOR_BYTES
            if (place := data.data_ptr()) not in seen:
                seen.add(place)
                total += data.nbytes()
        elif isinstance(x, dict):
            total += sys.getsizeof(x)
            waiting += x.keys()
            waiting += x.values()
        elif isinstance(x, tuple | list | set | frozenset):
            total += sys.getsizeof(x)
            if isinstance(x, tuple) and x and type(x[0]) is int:  # such as lengths of documents
                total += _NUMBER_BYTES * len(x)
            else:
                waiting += x
        else:
            total += _OBJECT_BYTES
            if kind.__module__.startswith(_PACKAGE) and hasattr(x, "__dict__"):
                total += 16 * len(vars(x)) + getattr(x, "unseen_bytes", 0)
                waiting += vars(x).values()
    return total
