"""Exact softmax attention over a declared pattern of (query, key) pairs, at the cost of the
pattern.
"""

from .algebra import Mask, Mixture, Pattern
from .block_patterns import (
    BlockDilated,
    Blocks,
    BlockWindow,
    Dense,
    Hierarchical,
    RandomBlocks,
    SelectedBlocks,
)
from .cache import layout_cache
from .expression import parse
from .functional import BlockWeights, attention, attention_weights, explain
from .kernels.gather import set_workspace
from .layout import BlockLayout
from .merge import merge_attention
from .ops import backends
from .patterns import (
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
