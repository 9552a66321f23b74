"""Wraps a decoding step in a torch operator, so that torch.compile needs one graph for all lengths.

The graph does not contain the cache, only its clock: a tensor [number that identifies the cache,
length of the cache], which each step changes.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ground.namespace import NAMESPACE
from ..ground.once import unseen
from ..ground.streams import OUTSIDE_CUDA_GRAPHS
from ..route.options import ANYWHERE, OPTIONS

_NUMBERS = itertools.count()
_CACHES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_TYPES = {"scale": "float?", "block_size": "SymInt?", "backend": "str?"}
_TYPES |= {"lengths": "Tensor?", "keep": "bool?"}
_TYPES |= {name: OPTIONS[name].schema for name in ANYWHERE}
_SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor(a!) clock, "
_SCHEMA += ", ".join(f"{kind} {name}=None" for name, kind in _TYPES.items()) + ") -> Tensor"


def register(cache: Any) -> Tensor:
    """Registers a cache; returns its `clock` for `attend_op`, int64 [new number, length 0]."""
    number = next(_NUMBERS)
    _CACHES[number] = cache
    with torch.inference_mode(False), unseen():
        return torch.tensor([number, 0])


def operator_options(options: dict[str, Any]) -> dict[str, Any]:
    """Converts ints and lists among options of `attend` to the tensors that the operator takes."""
    tensors = ("dropout_seed", int), ("lengths", Sequence)
    given = {name: options[name] for name, kind in tensors if isinstance(options.get(name), kind)}
    return options | {name: torch.tensor(x) for name, x in given.items()}


@torch.library.custom_op(
    f"{NAMESPACE}::cached_attention",
    mutates_args=["clock"],
    schema=_SCHEMA,
    tags=OUTSIDE_CUDA_GRAPHS,
)
def attend_op(query: Tensor, key: Tensor, value: Tensor, clock: Tensor, *options: Any) -> Tensor:
    """Runs `attend` of the cache that `clock` identifies; torch.compile sees it as one operator."""
    # PyTorch's dispatcher leaves out trailing options that have their defaults.
    in_use = {name: x for name, x in zip(_TYPES, options, strict=False) if x is not None}
    cache = _CACHES[int(clock[0])]
    out: Tensor = cache.attend(query, key, value, **in_use)
    with torch.inference_mode(False):
        clock[1] = cache.length
    return out


@attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
