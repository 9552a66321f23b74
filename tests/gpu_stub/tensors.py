"""Tensors of the stub's devices: their memory is the host's, and the CPU runs their operators.

`install` registers a fallback for all operators of the dispatch key CUDA, below autograd.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .counts import note_memory, note_operator, note_sync, note_transfer

_CPU_KEY = torch._C.DispatchKey.CPU
_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_WAITS = (
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "equal", "is_nonzero",
)  # fmt: skip
_ALLOCATES = (
    "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "resize_", "set_",
)  # fmt: skip
_INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")

_strided = torch.ops.aten.as_strided.default
_set_memory = torch.ops.aten.set_.source_Storage_storage_offset
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

Libraries = tuple[torch.library.Library, torch.library.Library]


def install(current_device: Callable[[], int]) -> Libraries:
    """Registers the operators; they live as long as what this returns."""

    def run(op: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(current_device, op, args, kwargs)

    every = torch.library.Library("_", "IMPL")
    every.fallback(run, "CUDA")
    of_aten = torch.library.Library("aten", "IMPL")
    of_aten.impl("copy_", _copy, "CUDA")
    of_aten.impl("_to_copy", _to_copy, "CUDA")
    return every, of_aten


def _seen_as(x: Tensor, kind: int, index: int) -> Tensor:
    """A tensor's memory as a tensor of another device, with the same size and strides."""
    x = x.detach()
    numbers = x.untyped_storage().nbytes() // x.itemsize
    capsule = torch._C._to_dlpack(_strided._op_dk(_CPU_KEY, x, [numbers], [1], 0))
    device = ctypes.cast(_pointer_of(capsule, b"dltensor") + 8, ctypes.POINTER(ctypes.c_int32))
    device[0], device[1] = kind, index
    flat = torch._C._from_dlpack(capsule)
    return _strided._op_dk(_CPU_KEY, flat, x.size(), x.stride(), x.storage_offset())


def _on_host(x: Tensor) -> Tensor:
    if not x.untyped_storage().nbytes():  # such as an `out` that is yet to be sized
        return torch.empty_like(x, device="cpu")
    return _seen_as(x, _DLPACK_CPU, 0)


def _on_device(x: Tensor, index: int) -> Tensor:
    x = _seen_as(x, _DLPACK_CUDA, index)
    note_memory(x)
    return x


def _note_strangers(op: Any, name: str) -> None:
    """Notes the transfer of indices of the host; RuntimeError for other tensors of the host."""
    if name not in _INDEXES:
        raise RuntimeError(f"Expected all tensors to be on the same device ({op})")
    note_transfer(f"{name} with indices of the host", waits=True)


def _run(current_device: Callable[[], int], op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the CPU: its results are tensors of the device of its inputs."""
    name = op._schema.name.removeprefix("aten::")
    if _returns_view(op):
        return op._op_dk(_CPU_KEY, *args, **kwargs)  # the same for all devices
    if name == "_fused_sdp_choice":
        return 0
    device = kwargs.get("device")
    on_host: dict[int, tuple[Tensor, Tensor]] = {}
    strangers = []

    def host(x: Tensor) -> Tensor:
        nonlocal device
        if x.device.type == "cpu":
            if x.dim():
                strangers.append(x)
            return x
        device = device or x.device
        if id(x) not in on_host:
            on_host[id(x)] = x, _on_host(x)
        return on_host[id(x)][1]

    numbers = zip(args, _tensor_arguments(op), strict=False)
    args = [_number_as_tensor(x) if of_tensor else x for x, of_tensor in numbers]
    args = [_each(x, host) for x in args]
    kwargs = {name: _each(x, host) for name, x in kwargs.items()}
    kwargs.pop("pin_memory", None)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if strangers and on_host:
        _note_strangers(op, name)
    without_size = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in _WAITS or (without_size and len(args) < 2) or _has_mask(name, args):
        note_sync(name)
    with torch._C._AutoDispatchBelowAutograd():
        results = op(*args, **kwargs)
        if name.startswith(("empty", "new_empty")):
            results.zero_()
    index = torch.device(device).index if device is not None else None
    index = current_device() if index is None else index
    originals = {id(copy): x for x, copy in on_host.values()}

    def back(x: Tensor) -> Tensor:
        if id(x) not in originals:
            return _on_device(x, index)
        to = originals[id(x)]
        if to.shape != x.shape or (to.numel() == 0 and x.numel()):
            x = _on_device(x, index)
            place = x.untyped_storage(), x.storage_offset(), x.size(), x.stride()
            _set_memory._op_dk(_CPU_KEY, to, *place)
        return to

    made = _each(results, back)
    several = results if isinstance(results, list | tuple) else [results]
    empty = all(isinstance(x, Tensor) and not x.numel() for x in several)
    if name not in (*_ALLOCATES, "_local_scalar_dense", "is_same_size") and not empty:
        note_operator(name)
    return made


@functools.cache
def _returns_view(op: Any) -> bool:
    aliases = [x.alias_info for x in op._schema.returns]
    return any(x is not None and not x.is_write for x in aliases)


@functools.cache
def _tensor_arguments(op: Any) -> tuple[bool, ...]:
    return tuple(str(x.type) in ("Tensor", "Optional[Tensor]") for x in op._schema.arguments)


def _number_as_tensor(x: Any) -> Any:
    """A number in the place of a tensor, as torch hands it to a fallback, as a tensor again."""
    return torch.tensor(x, device="cpu") if isinstance(x, bool | int | float) else x


def _has_mask(name: str, args: Any) -> bool:
    """Whether an operator indexes by a mask: the host waits for the number of its True values."""
    masks = args[1] if name in _INDEXES else ()
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in masks)


def _each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(x, Tensor):
        return change(x)
    return type(x)(_each(one, change) for one in x) if isinstance(x, list | tuple) else x


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not to.numel():
        return to
    if not (to.is_cuda and source.is_cuda):
        what, host = ("copy to the device", source) if to.is_cuda else ("copy to the host", to)
        waits = not (non_blocking and is_pinned(host))
        note_transfer(what, waits=waits)
    note_operator("copy_")
    to_host, from_host = (_on_host(x) if x.is_cuda else x.detach() for x in (to, source))
    with torch._C._AutoDispatchBelowAutograd():
        to_host.copy_(from_host)
    return to


def _to_copy(x: Tensor, **options: Any) -> Tensor:
    dtype, device = options.get("dtype"), options.get("device")
    device = x.device if device is None else torch.device(device)
    memory_format = options.get("memory_format") or torch.preserve_format
    to = torch.empty_like(x, dtype=dtype, device=device, memory_format=memory_format)
    non_blocking = bool(options.get("non_blocking"))
    if non_blocking and device.type == "cpu":
        pin(to)
    return _copy(to, x, non_blocking)


_pinned: dict[int, StorageWeakRef] = {}


def pin(x: Tensor) -> Tensor:
    """Marks a tensor's memory as pinned."""
    _pinned[x.untyped_storage().data_ptr()] = StorageWeakRef(x.untyped_storage())
    return x


def is_pinned(x: Tensor, device: Any = None) -> bool:
    memory = _pinned.get(x.untyped_storage().data_ptr())
    return memory is not None and not memory.expired()
