"""Gemma 4: layers that compute the last queries only, and assistants that draft for a model."""

import inspect
from collections.abc import Callable
from typing import Any


def of_last_queries(mask: Any, index: Any) -> Any:
    """Returns the mask of `mask[:, :, -n:, :]`, or None for another index.

    Gemma 4's layers without keys of their own compute only the last n tokens, `logits_to_keep`.
    """
    rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
    if not isinstance(rows, slice) or index != (slice(None), slice(None), rows, slice(None)):
        return None
    begin, end, step = rows.indices(mask.shape[2])
    return mask.of_last(end - begin) if (end, step) == (mask.shape[2], 1) else None


def attends_to_keys_of_another_model(model: Any, _: Any) -> str | None:
    """Returns why ranks cannot share an assistant's calls: its keys are of the model it helps."""
    if "shared_kv_states" in inspect.signature(type(model).forward).parameters:
        return "it attends to keys of another model (shared_kv_states)"
    return None


PARTS_OF_MASKS: tuple[Callable[[Any, Any], Any], ...] = (of_last_queries,)
"""Functions of a mask and an index, None for an index of another family."""

AGAINST_RANKS: tuple[Callable[[Any, Any], str | None], ...] = (attends_to_keys_of_another_model,)
"""Functions of a model and its decoder's config: why ranks cannot share its calls, or None."""
