"""Exact softmax attention over a declared pattern of (query, key) pairs, at the cost of the
pattern.
"""

from .dispatch import backends
from .functional import attention, explain
from .kernels.gather.call import set_workspace
from .layouts.cache import layout_cache
from .layouts.layout import BlockLayout
from .numerics import merge_attention
from .patterns.algebra import Mask, Mixture, Pattern
from .patterns.blocks import (
    BlockDilated,
    Blocks,
    BlockWindow,
    Dense,
    Hierarchical,
    RandomBlocks,
    SelectedBlocks,
)
from .patterns.expression import parse
from .patterns.positions import (
    Causal,
    Dilated,
    Documents,
    Full,
    GlobalTokens,
    KeyPadding,
    LongNet,
    Packed,
    SlidingWindow,
)
from .weights import BlockWeights, attention_weights

__version__ = "0.1.0"

__all__ = [
    "BlockDilated",
    "BlockLayout",
    "BlockWeights",
    "BlockWindow",
    "Blocks",
    "Causal",
    "Dense",
    "Dilated",
    "Documents",
    "Full",
    "GlobalTokens",
    "Hierarchical",
    "KeyPadding",
    "LongNet",
    "Mask",
    "Mixture",
    "Packed",
    "Pattern",
    "RandomBlocks",
    "SelectedBlocks",
    "SlidingWindow",
    "attention",
    "attention_weights",
    "backends",
    "explain",
    "layout_cache",
    "merge_attention",
    "parse",
    "set_workspace",
]
