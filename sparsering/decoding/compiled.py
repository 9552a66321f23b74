"""A decoding step as a torch operator, so that one compiled graph serves all lengths.

The graph holds none of the cache's state, only its clock: a tensor that each step changes.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_NUMBERS = itertools.count()
_CACHES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_OPTIONS = {
    "scale", "block_size", "softcap", "distance_bias", "sink", "dropout_p", "dropout_seed",
    "backend",
}  # fmt: skip


def register(cache: Any) -> Tensor:
    """Returns the clock of a `KVCache`, int64: its number, and its length, which steps change."""
    number = next(_NUMBERS)
    _CACHES[number] = cache
    return torch.tensor([number, 0])


def spelt(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a call in the types of the operator; TypeError for an unknown option."""
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"attend has no option {', '.join(sorted(unknown))}")
    seed = options.get("dropout_seed")
    return {**options, "dropout_seed": torch.tensor(seed)} if isinstance(seed, int) else options


@torch.library.custom_op("sparsering::cached_attention", mutates_args=("clock",))
def attend_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clock: Tensor,
    scale: float | None = None,
    block_size: int | None = None,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Runs a step of the cache that the clock belongs to; traces as one opaque operator."""
    options = {
        "scale": scale,
        "block_size": block_size,
        "softcap": softcap,
        "distance_bias": distance_bias,
        "sink": sink,
        "dropout_p": dropout_p or None,
        "dropout_seed": dropout_seed,
        "backend": backend,
    }
    given = {name: x for name, x in options.items() if x is not None}
    cache = _CACHES[int(clock[0])]
    out: Tensor = cache.attend(query, key, value, **given)
    with torch.inference_mode(False):
        clock[1] = cache.length
    return out


@attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
