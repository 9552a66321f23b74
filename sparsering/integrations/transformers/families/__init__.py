"""Code for single families of transformers: a file for each family, joined to tables here.

No other module names a family. They read these tables. A family's file must not import a module
that reads a table, because the import would be circular.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..call.chosen import Chosen
from . import (
    bert,
    chronos,
    deepseek,
    dinat,
    gemma,
    glm,
    llama4,
    longformer,
    minimax,
    nllb_moe,
    qwen,
    t5,
)
from .dinat import without_natten as without_natten
from .wrapped import Converted, Wrapped

WRAPPED: dict[str, tuple[Wrapped, ...]] = {
    **deepseek.WRAPPED,
    **glm.WRAPPED,
    **minimax.WRAPPED,
    **qwen.WRAPPED,
}
"""Methods that are replaced, by the name of their class."""

LEFT_BY: dict[str, Callable[[], Chosen | None]] = {**deepseek.LEFT_BY}
"""Functions that return the keys which a module of a layer has chosen for the layer's attention,
by the name of the attribute that holds this module."""

CONVERTED: dict[str, Converted] = {
    **longformer.CONVERTED,
    **chronos.CONVERTED,
    **dinat.CONVERTED,
}
"""Classes that `convert` gives to modules, by the name of the module's original class."""

CONVERTED_NAMES = ", ".join(dict.fromkeys(row.family for row in CONVERTED.values()))
"""Families that `convert` knows, for errors."""

MASK_BUILDERS: dict[str, Callable[..., Any]] = {**chronos.MASK_BUILDERS}
"""Functions that `convert` puts in place of a method that builds a mask, by the method's name."""

PARTS_OF_MASKS: tuple[Callable[[Any, Any], Any], ...] = (
    *deepseek.PARTS_OF_MASKS,
    *gemma.PARTS_OF_MASKS,
)
"""Functions of a mask and an index, for families whose own code indexes the mask. Each returns the
part of the mask for an index that its family uses, else None."""

LEARN_DISTANCES: tuple[Callable[[Any], bool], ...] = (*t5.LEARN_DISTANCES,)
"""Functions that say whether the learned bias of an attention module depends on distances alone."""

MAY_BE_EITHER: tuple[Callable[[Any], bool], ...] = (*nllb_moe.MAY_BE_EITHER,)
"""Functions that say whether an attention module may be self-attention or cross attention, and only
its calls show which."""

LAYER_TYPES: tuple[str, ...] = (*deepseek.LAYER_TYPES, *minimax.LAYER_TYPES)
"""Types of layers that attend within one of the model's masks, so that ranks can share them."""

AGAINST_RANKS: tuple[Callable[[Any, Any], str | None], ...] = (
    *bert.AGAINST_RANKS,
    *gemma.AGAINST_RANKS,
)
"""Functions of a model and its decoder's config that return why ranks cannot share its calls, or
None."""

QUERIES_BY_INDEX: tuple[Callable[[Any, Tensor, Callable[[], Tensor]], Tensor], ...] = (
    *llama4.QUERIES_BY_INDEX,
)
"""Functions of a module, queries [B, H, n, D] and a function that returns their positions. They
correct queries where the layer took the index in the call for the position: over ranks, and where
requests are served together."""

PREPARES_RANKS: tuple[Callable[[], None], ...] = (*llama4.PREPARES_RANKS,)
"""Functions that run before ranks share a first call."""
