"""Knowledge of families of transformers: a file for each family, and a table for each kind.

All other modules name no family: they read the tables of this file. A file of a family imports
`calls`, `chosen` and what stands below them, never a module that reads a table.
"""

from collections.abc import Callable
from typing import Any

from ..chosen import Chosen
from . import chronos, deepseek, glm, longformer, minimax, qwen
from .wrapped import Converted, Wrapped

WRAPPED: dict[str, Wrapped] = {
    **deepseek.WRAPPED,
    **glm.WRAPPED,
    **minimax.WRAPPED,
    **qwen.WRAPPED,
}
"""What runs in the place of a method, by the name of its class."""

LEFT_BY: dict[str, Callable[[], Chosen | None]] = {**deepseek.LEFT_BY}
"""What takes the choice that a module of a layer has left, by the layer's attribute for it."""

CONVERTED: dict[str, Converted] = {**longformer.CONVERTED, **chronos.CONVERTED}
"""What `convert` puts in the place of a class, by its name."""

CONVERTED_NAMES = ", ".join(dict.fromkeys(row.family for row in CONVERTED.values()))
"""Families that `convert` knows, for errors."""

MASK_BUILDERS: dict[str, Callable[..., Any]] = {**chronos.MASK_BUILDERS}
"""What `convert` puts in the place of a method that builds a mask, by its name."""
