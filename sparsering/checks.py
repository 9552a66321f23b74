"""Checks of the arguments of a call, and their default values."""

import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_functionaltensor as _is_functional
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .ground.arguments import (
    MOST_TOKENS,
    as_float,
    checked_integers,
    index_of,
    not_a_pattern,
    shortened,
    way_to_tensor,
)
from .ground.numerics import autocasting, sum_dtype
from .layouts.cache import place_of
from .layouts.layout import BlockLayout
from .patterns.algebra import Pattern

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN, _STRIDED = (Tensor, Parameter), torch.strided
MOST_SCALE = torch.finfo(torch.float64).max


def check_inputs(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> None:
    """Raises ValueError if shapes, dtypes or devices do not match; TypeError without a Pattern."""
    check_pattern(pattern)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, "[batch, heads, tokens, head dim]")
        check_local(name, x)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            "query, key and value must be [batch, heads, tokens, head dim], got "
            f"{_shapes(query, key, value)}; add a missing dim with unsqueeze()"
        )
    sizes = (
        ("batches of query and key", query.shape[0], key.shape[0]),
        ("head dims of query and key", query.shape[3], key.shape[3]),
        ("batches of key and value", key.shape[0], value.shape[0]),
        ("heads of key and value", key.shape[1], value.shape[1]),
        ("tokens of key and value", key.shape[2], value.shape[2]),
    )
    if differences := [f"{name} ({a}, {b})" for name, a, b in sizes if a != b]:
        raise ValueError(
            "query [B, Hq, Nq, D], key [B, Hkv, Nk, D] and value [B, Hkv, Nk, Dv] must agree, got "
            f"{_shapes(query, key, value)}: {' and '.join(differences)} differ; if tokens come "
            "before heads, transpose(1, 2)"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % max(1, kv_heads) or (heads and not kv_heads):
        way_out = "are query and key swapped, or tokens before heads?"
        if kv_heads < heads:
            way_out = "repeat_interleave(..., dim=1) keys and values up to a divisor, or drop heads"
        raise ValueError(
            f"query heads must be a multiple of key/value heads, got {heads} and {kv_heads} in "
            f"{_shapes(query, key, value)}; {way_out}"
        )
    if heads > max(256, 4 * query.shape[2]) and not torch.compiler.is_compiling():
        got = f"got {heads} heads of {query.shape[2]} tokens"
        warnings.warn(f"{got}; if tokens come before heads, transpose(1, 2)", stacklevel=5)
    dtypes = (query.dtype, key.dtype, value.dtype)
    if query.dtype not in DTYPES or not (len(set(dtypes)) == 1 or autocasting(query)):
        raise ValueError(
            "query, key and value must share a dtype out of float64, float32, bfloat16, "
            f"float16, got {dtypes}; cast with .to()"
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value must be on one device, got {query.device}, {key.device}, "
            f"{value.device}; move with .to()"
        )


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def check_pattern(pattern: object) -> None:
    """Raises TypeError, with a suggested fix, if the argument is not a Pattern."""
    if not isinstance(pattern, Pattern):
        got = not_a_pattern(pattern)
        if isinstance(pattern, BlockLayout):
            got = "got a BlockLayout; pass its pattern, since the library caches layouts itself"
        raise TypeError(f"pattern must be a sparsering pattern such as Causal(), {got}")


def check_group(group: object) -> None:
    """Raises TypeError if the argument is neither a process group nor None."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup or None, got {shortened(repr(group))}; "
            "torch.distributed.new_group makes one"
        )


def check_module(name: str, module: object) -> None:
    """Raises TypeError if the argument is not a torch.nn.Module."""
    if not isinstance(module, torch.nn.Module):
        got = shortened(repr(module))
        raise TypeError(f"{name} must be a torch.nn.Module, got {got}; pass the model itself")


def check_tensor(name: str, x: object, dims: str = "of numbers") -> None:
    """Raises ValueError if the argument is not a dense, strided tensor, as kernels need."""
    if not isinstance(x, Tensor):
        got = "None" if x is None else f"a {type(x).__name__}"
        raise ValueError(f"{name} must be a tensor {dims}, got {got}; {way_to_tensor(x)}")
    if x.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one; pad it with .to_padded_tensor(0.0) "
            "and use KeyPadding, or lay the documents end to end and use Packed"
        )
    if x.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {x.layout}; convert by .to_dense()")


def check_local(name: str, x: Tensor) -> None:
    """Raises ValueError for subclasses of Tensor, such as DTensor, that operators cannot take."""
    for method, way_out in _WRAPPERS.items():
        if type(x) is not Tensor and hasattr(x, method):
            kind = type(x).__name__
            raise ValueError(f"{name} must be an ordinary tensor, got a {kind}; {way_out}")


_WRAPPERS = {
    "to_local": "pass .to_local(), or call this inside torch.distributed.tensor.experimental."
    "local_map, on shards of the batch or the heads",
    "get_mask": "pass .get_data(), and the mask of keys as KeyMask(valid)",
}
"""Methods by which `check_local` tells subclasses of Tensor, and what to do instead with each."""


def checked_scale(scale: object, query: Tensor) -> float:
    """Returns the scale, by default D ** -0.5; raises ValueError if it is no finite number."""
    if scale is None:
        return query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    if isinstance(scale, Tensor):
        shape = "nested" if scale.is_nested else tuple(scale.shape)
        raise ValueError(
            f"scale must be a number or None, got a tensor {shape}; multiply the "
            "query by it and pass scale=1.0, so that it gets a gradient"
        )
    if isinstance(scale, torch.SymFloat):
        return float(scale)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        got = shortened(repr(scale))
        raise ValueError(f"scale must be a number or None, got {got}; wrap it in float()")
    number: Any = scale
    number = number if type(number) is float else as_float(number)  # numpy's float32 would warn
    if not abs(number) <= MOST_SCALE:
        got = shortened(repr(scale))
        raise ValueError(f"scale must be a finite float, got {got}; None means D ** -0.5")
    return float(scale)


def checked_device(device: torch.device | str | None) -> torch.device | None:
    """Returns the device with its index, or None; raises ValueError if it does not exist."""
    return None if device is None else place_of(device)


def checked_integer_or_none(name: str, number: Any) -> Any:
    """Returns None, or an int up to 2 ** 53 in magnitude; raises ValueError for anything else."""
    if number is None or isinstance(number, torch.SymInt):
        return number
    if (whole := index_of(number)) is None:
        got = shortened(repr(number))
        raise ValueError(f"{name} must be an int or None, got {got}; wrap it in int()")
    if abs(whole) > MOST_TOKENS:
        got = shortened(repr(number))
        raise ValueError(f"{name} must lie within 2 ** 53 of 0, got {got}; None is the default")
    return whole


def check_batch(pattern: Pattern, size: int, name: str = "a query of ") -> None:
    """Raises ValueError if the pattern is for one batch size only, which is not `size`."""
    if (batch := pattern.num_batches()) not in (None, size):
        raise ValueError(
            f"the pattern is for {batch} batch entries, got {name}{size}; give one length or "
            f"table per batch entry, in {shortened(str(pattern))}"
        )


def checked_index(name: str, index: Tensor | Sequence[int], entries: int) -> Tensor:
    """Returns indices as int64 [n]; raises ValueError unless all are from 0 to `entries` - 1."""
    if not isinstance(index, Tensor):
        index = torch.tensor(checked_integers(name, index, None), dtype=torch.int64)
    check_tensor(name, index, "[n] of integers")
    if index.is_meta:
        raise ValueError(
            f"{name} needs a tensor with data, got one on the meta device; pass a list of ints"
        )
    index = in_memory(index).cpu()
    if index.shape == (0,):  # torch.tensor([]) is float32, but an empty index is valid
        return index.long()
    is_list = index.dtype in (torch.int32, torch.int64) and index.dim() == 1
    if not is_list or not 0 <= int(index.min()) <= int(index.max()) < entries:
        raise ValueError(
            f"{name} needs integers [n] from 0 to {entries - 1}, got "
            f"{shortened(str(index.tolist()))}; a boolean mask gives them by .nonzero()[:, 0]"
        )
    return index.long()


def check_bias(blocks: int, layout: BlockLayout) -> None:
    """Raises ValueError if a bias of so many blocks does not fit the layout."""
    if blocks != layout.num_blocks:
        raise ValueError(
            f"block_bias must be [B or 1, H or 1, {layout.num_blocks}], one per visited "
            f"block of the layout, got {blocks} in the last dim; see "
            "pattern.layout(...).num_blocks"
        )


def checked_rows(name: str, x: Tensor, query: Tensor, broadcasts: bool = True) -> Tensor:
    """Detaches x [B, H, Nq] and casts it to the dtype of lse; raises ValueError if it is unfit."""
    shape, one = query.shape[:3], " or 1" * broadcasts
    check_tensor(name, x)
    fits = x.dim() == 3 and x.shape[2] == shape[2] and x.is_floating_point()
    for size, expected in zip(x.shape[:2], shape[:2], strict=False):
        fits = fits and (size == expected or (broadcasts and size == 1))
    if not fits or x.device != query.device:
        raise ValueError(
            f"{name} must be floating point [{shape[0]}{one}, {shape[1]}{one}, {shape[2]}] on "
            f"{query.device}, got {x.dtype} {tuple(x.shape)} on {x.device}; add a missing dim with "
            "unsqueeze()"
        )
    return in_memory(x.detach()).to(sum_dtype(query))


def refuse_meta(*tensors: Tensor, named: str = "tensors") -> None:
    """Raises ValueError if a tensor is on the meta device, where it has no numbers."""
    if any(x.is_meta for x in tensors):
        raise ValueError(
            f"expected {named} with numbers, got some on the meta device; attention and KVCache "
            "take meta tensors, to compute shapes"
        )


def refuse_tracers(*tensors: Tensor) -> None:
    """Raises ValueError if a tensor has no numbers: on the meta device, or of a tracer."""
    refuse_meta(*tensors)
    traced = not torch.compiler.is_compiling() and any(map(_is_functional, tensors))
    if traced or any(isinstance(x, FakeTensor) for x in tensors):
        raise ValueError(
            "expected tensors with numbers, got some of a tracer such as torch.export or "
            "functionalize; call this outside of it, or use attention, which it can trace"
        )


def refuse_mapped_pattern(in_dims: Sequence[int | None]) -> None:
    """Raises NotImplementedError if vmap maps over a tensor of the pattern."""
    if any(dim is not None for dim in in_dims):
        raise NotImplementedError(
            "vmap cannot map over the tensors of a pattern, since layouts depend on their values; "
            "give the pattern a batch dim ([B, H, ...]) and call attention without vmap"
        )


def refuse_forward_mode(name: str, *values: object) -> None:
    """Raises NotImplementedError for the function `name` if a tensor has a forward-mode tangent."""
    if has_tangent(*values):
        raise NotImplementedError(reverse_mode_alone(name))


def reverse_mode_alone(name: str) -> str:
    """Returns the error text for a function `name` with first, reverse-mode derivatives only."""
    return (
        f"{name} has first derivatives in reverse mode alone, not forward mode (jvp) or second "
        "derivatives; attention has both on the backends cpu, triton, gather and reference"
    )


def has_tangent(*values: object) -> bool:
    """True if a tensor has a forward-mode tangent; False while a compiler traces."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    tensors = (x for x in values if isinstance(x, Tensor))
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def autocast_inputs(*tensors: Tensor) -> list[Tensor]:
    """Casts tensors as autocast casts the inputs of a matmul; float64 stays float64."""
    if not autocasting(tensors[0]) or tensors[0].dtype == torch.float64:
        return list(map(in_memory, tensors))
    return [in_memory(x).to(torch.get_autocast_dtype(x.device.type)) for x in tensors]


def in_memory(x: Tensor) -> Tensor:
    """Resolves a lazy negation: kernels read memory and would miss the sign."""
    return x if torch.compiler.is_compiling() or not x.is_neg() else x.resolve_neg()


def needs_operator(*tensors: Tensor) -> bool:
    """True if a call must go through a torch operator, because kernels alone are not enough.

    That is so if autograd records a tensor, if a tensor has a tangent, or if `observed(*tensors)`.
    """
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    moves = forward_ad._current_level >= 0 and has_tangent(*tensors)
    return recorded or moves or observed(*tensors)


def observed(*values: object) -> bool:
    """True if a compiler, tracer or mode must see the call, or kernels cannot read a tensor.

    They cannot read subclasses, meta tensors, and tensors that torch negates or zeroes lazily.
    """
    return _is_observed_call() or not all(_is_plain(x) for x in values if isinstance(x, Tensor))


def kind_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...] | None:
    """Returns shapes, dtype and device of a call, and whether autograd records it.

    A call needs no checks if an earlier one with an equal result passed them. Returns None for a
    call that always needs checks: under autocast, forward-mode autograd, a compiler, profiler, mode
    or transform of torch, and for tensors that are not plain dense ones of one dtype and device.
    """
    if _is_observed_call() or forward_ad._current_level >= 0 or _is_any_autocast_enabled():
        return None
    for x in (query, key, value):
        if not _is_plain(x) or x.is_nested or x.layout is not _STRIDED:
            return None
    dtype, device = query.dtype, query.device
    if not (dtype is key.dtype is value.dtype and device == key.device == value.device):
        return None
    learns = query.requires_grad or key.requires_grad or value.requires_grad
    learns = learns and torch.is_grad_enabled()
    return query.shape, key.shape, value.shape, dtype, device, learns


def _is_plain(x: Tensor) -> bool:
    """True for a Tensor or Parameter with values in memory as they are, not negated lazily."""
    return type(x) in _PLAIN and not (x.is_meta or x.is_neg() or x._is_zerotensor())


def _is_observed_call() -> bool:
    """True if a compiler, tracer, profiler, mode or transform observes all calls at this moment."""
    return bool(
        torch.compiler.is_compiling()
        or _are_functorch_transforms_active()
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _get_tracing_state() is not None
        or _profiler_enabled()
    )
