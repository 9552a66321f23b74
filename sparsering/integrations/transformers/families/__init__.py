"""Families of transformers that choose keys for each query: a file for each, with what it wraps."""

from . import deepseek, glm, minimax, qwen
from .wrapped import Wrapped

WRAPPED: dict[str, Wrapped] = {
    **deepseek.WRAPPED,
    **glm.WRAPPED,
    **minimax.WRAPPED,
    **qwen.WRAPPED,
}
"""What runs in the place of a method, by the name of its class."""
