"""NLLB-MoE and Pegasus-X: a decoder's self-attention and cross attention have equal attributes."""

from collections.abc import Callable
from typing import Any


def may_be_either(module: Any) -> bool:
    """Whether a module does not say if it is a decoder's self-attention or its cross attention."""
    return bool(getattr(module, "is_decoder", False)) and (
        getattr(module, "is_causal", None) is False
    )


MAY_BE_EITHER: tuple[Callable[[Any], bool], ...] = (may_be_either,)
"""Functions of an attention module."""
