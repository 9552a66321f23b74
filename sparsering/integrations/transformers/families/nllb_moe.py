"""NLLB-MoE and Pegasus-X: both attentions of a decoder are made alike."""

from collections.abc import Callable
from typing import Any


def may_be_either(module: Any) -> bool:
    """Whether a module does not say if it is a decoder's self-attention or its cross attention."""
    return bool(getattr(module, "is_decoder", False)) and (
        getattr(module, "is_causal", None) is False
    )


MAY_BE_EITHER: tuple[Callable[[Any], bool], ...] = (may_be_either,)
"""Functions of an attention module."""
