"""Knowledge of families of transformers: a file for each family, and a table for each kind.

All other modules name no family: they read the tables of this file. A file of a family imports no
module that reads a table.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..call.calls import SharedCall
from ..call.chosen import Chosen
from . import bert, chronos, deepseek, gemma, glm, llama4, longformer, minimax, nllb_moe, qwen, t5
from .wrapped import Converted, Wrapped

WRAPPED: dict[str, tuple[Wrapped, ...]] = {
    **deepseek.WRAPPED,
    **glm.WRAPPED,
    **minimax.WRAPPED,
    **qwen.WRAPPED,
}
"""What runs in the place of methods, by the name of their class."""

LEFT_BY: dict[str, Callable[[], Chosen | None]] = {**deepseek.LEFT_BY}
"""What takes the choice that a module of a layer has left, by the layer's attribute for it."""

CONVERTED: dict[str, Converted] = {**longformer.CONVERTED, **chronos.CONVERTED}
"""What `convert` puts in the place of a class, by its name."""

CONVERTED_NAMES = ", ".join(dict.fromkeys(row.family for row in CONVERTED.values()))
"""Families that `convert` knows, for errors."""

MASK_BUILDERS: dict[str, Callable[..., Any]] = {**chronos.MASK_BUILDERS}
"""What `convert` puts in the place of a method that builds a mask, by its name."""

PARTS_OF_MASKS: tuple[Callable[[Any, Any], Any], ...] = (
    *deepseek.PARTS_OF_MASKS,
    *gemma.PARTS_OF_MASKS,
)
"""What a model's own code takes of its mask: functions of a mask and an index, or None."""

LEARN_DISTANCES: tuple[Callable[[Any], bool], ...] = (*t5.LEARN_DISTANCES,)
"""Whether the learnt bias of an attention module depends on distances alone."""

MAY_BE_EITHER: tuple[Callable[[Any], bool], ...] = (*nllb_moe.MAY_BE_EITHER,)
"""Whether an attention module does not say if its keys are of another sequence."""

LAYER_TYPES: tuple[str, ...] = (*deepseek.LAYER_TYPES, *minimax.LAYER_TYPES)
"""Types of layers that attend within one of the model's masks, so that ranks can share them."""

AGAINST_RANKS: tuple[Callable[[Any, Any], str | None], ...] = (
    *bert.AGAINST_RANKS,
    *gemma.AGAINST_RANKS,
)
"""Why ranks cannot share a model's calls, by the model and its decoder's config, or None."""

QUERIES_OF_RANKS: tuple[Callable[[Any, Tensor, SharedCall], Tensor], ...] = (
    *llama4.QUERIES_OF_RANKS,
)
"""Corrections of a layer's queries [B, H, n, D], which are of one rank's tokens."""

PREPARES_RANKS: tuple[Callable[[], None], ...] = (*llama4.PREPARES_RANKS,)
"""What is set up before ranks share a first call."""
