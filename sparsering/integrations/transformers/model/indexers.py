"""Replaces methods of a model's indexers and compressors by functions of families/.

transformers' indexers score all pairs, and some families then build a mask of all pairs. Under
"sparsering" the replacements score some queries at a time, and give lists of keys, not masks.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..call.calls import thread
from ..call.chosen import Chosen, Unchosen
from ..families import LEFT_BY, WRAPPED
from ..families.wrapped import Wrapped
from ..name import NAME

_watched: WeakSet[Any] = WeakSet()


def chosen_keys(
    module: Any, mask: Any, indices: Tensor | None, block_indices: Tensor | Unchosen | None
) -> Chosen | Unchosen | None:
    """Returns the keys that a layer's own indexer or compressor chose in this call, or None.

    The choice may come as the mask, as the keyword `indices` [B, N, k] or `block_indices`, or from
    a module of the layer that has stored it, such as a compressor.
    """
    if isinstance(mask, Chosen):
        return mask
    for name, listed in (("indices", indices), ("block_indices", block_indices)):
        if listed is not None and not hasattr(module, "indexer"):
            raise NotImplementedError(
                f'"sparsering" attention takes {name} from a layer with an indexer, got them for '
                f"{type(module).__name__}, which has none; write them as a pattern for hf.using, "
                "such as SelectedBlocks(indices, block_size)"
            )
    if indices is not None:
        return Chosen(indices[:, None])  # [B, N, k] -> [B, 1, N, k]
    if isinstance(block_indices, Unchosen):
        return block_indices
    if block_indices is not None:
        if (
            getattr(mask, "valid_keys", None) is not None
            or getattr(mask, "documents", None) is not None
        ):
            raise NotImplementedError(
                f"{type(module).__name__} inside torch.compile counts blocks from a row's first "
                "place, got a mask with padding or documents; leave attention_mask and "
                "position_ids out where nothing is padded, or call the model without compile"
            )
        return Chosen(block_indices, int(module.indexer.block_size))
    for name, taken in LEFT_BY.items():
        if getattr(module, name, None) is not None:
            # It ran outside of compiled graphs, which cannot trace a `threading.local`.
            return _uncompiled(taken) if torch.compiler.is_compiling() else taken()
    return None


def watch(model: Any) -> None:
    """Replaces methods of a model's indexers, once per model, by those of families/.

    It is called when a model is built, because torch.compile may trace its first call, and before
    each call, for models that were built earlier.
    """
    if torch.compiler.is_compiling() or model in _watched:
        return
    _watched.add(model)
    for part in model.modules():  # inner models come last, so an indexer keeps the innermost config
        for module in part.modules() if isinstance(part, PreTrainedModel) else ():
            for wrapped in _wrapped_of(module):
                module._sparsering_config = part.config  # names the attention that runs
                own = getattr(type(module), wrapped.method)
                if not hasattr(own, NAME):
                    setattr(type(module), wrapped.method, _under_our_name(own, wrapped))


def _under_our_name(own: Callable[..., Any], wrapped: Wrapped) -> Callable[..., Any]:
    """Returns a method that runs the replacement only if the model runs "sparsering".

    Otherwise it runs the family's own method.
    """

    @wraps(own)
    def method(module: Any, *args: Any, **options: Any) -> Any:
        config = getattr(module, "_sparsering_config", None)
        if getattr(config, "_attn_implementation", "") != NAME:
            return own(module, *args, **options)
        if not torch.compiler.is_compiling():
            return wrapped.runs(own, module, *args, **options)
        if wrapped.own_in_graphs and thread.shared is None:
            return own(module, *args, **options)
        return _uncompiled(wrapped.runs, own, module, *args, **options)

    setattr(method, NAME, True)
    return method


@torch.compiler.disable
def _uncompiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a function outside of a compiled graph, which breaks there.

    It is for functions that send messages to other ranks, or whose results have sizes that depend
    on values.
    """
    return function(*args, **options)


def lists_keys(model: Any) -> bool:
    """Whether some layers choose keys for each query, by an indexer or a compressor."""
    return any(_wrapped_of(module) for module in model.modules())


def is_other_indexer(module: Any) -> bool:
    """Whether a module chooses keys in a way that cannot reach the keys of other ranks."""
    if wrapped := _wrapped_of(module):
        return not all(each.finds_keys_of_ranks for each in wrapped)
    return type(module).__name__.endswith(("Indexer", "Compressor"))


def _wrapped_of(module: Any) -> tuple[Wrapped, ...]:
    """Returns which methods of a module's class, or its base class, are replaced."""
    names = (kind.__name__ for kind in type(module).__mro__)
    return next((WRAPPED[name] for name in names if name in WRAPPED), ())
