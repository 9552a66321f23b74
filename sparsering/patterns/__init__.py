"""Which (query position, key position) pairs attend. Values, not tensors.

    pattern = LongNet((2048, 4096), (1, 2)) & Causal()
    pattern.to_dense(16)      # what it means, by definition; for small inputs
    pattern.layout(1 << 20)   # what kernels run, at the cost of the pattern

`algebra` says what a mask and a mixture are and how they combine; `positions`, `blocks` and `keys`
hold the masks, `expression` reads them back from text, `custom` and `mask_mod` take a user's own.
"""

from .algebra import Mask, Mixture, Pattern
from .blocks import (
    BlockDilated,
    Blocks,
    BlockWindow,
    Dense,
    Hierarchical,
    RandomBlocks,
)
from .custom import register_pattern
from .expression import parse
from .keys import KeyMask, KeyPadding
from .mask_mod import from_mask_mod
from .positions import (
    Causal,
    Dilated,
    Documents,
    Full,
    GlobalTokens,
    LongNet,
    Packed,
    PooledCausal,
    SlidingWindow,
)
from .selected import SelectedBlocks

__all__ = [
    "BlockDilated",
    "BlockWindow",
    "Blocks",
    "Causal",
    "Dense",
    "Dilated",
    "Documents",
    "Full",
    "GlobalTokens",
    "Hierarchical",
    "KeyMask",
    "KeyPadding",
    "LongNet",
    "Mask",
    "Mixture",
    "Packed",
    "Pattern",
    "PooledCausal",
    "RandomBlocks",
    "SelectedBlocks",
    "SlidingWindow",
    "from_mask_mod",
    "parse",
    "register_pattern",
]
