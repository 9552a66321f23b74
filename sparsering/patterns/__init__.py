"""Patterns: which (query position, key position) pairs attend, as values instead of tensors.

    pattern = LongNet((2048, 4096), (1, 2)) & Causal()
    pattern.to_dense(16)      # what it means, by definition; for small inputs
    pattern.layout(1 << 20)   # what kernels run, at the cost of the pattern

`algebra` defines masks and mixtures and how they combine; `positions`, `blocks`, `keys` and
`selected` define the library's masks; `expression` reads patterns from text; `custom` and
`mask_mod` make patterns of a user's classes and functions.
"""

from .algebra import Mask, Mixture, Pattern
from .blocks import (
    BlockCausal,
    BlockDiffusion,
    BlockDilated,
    Blocks,
    BlockWindow,
    Dense,
    Hierarchical,
    RandomBlocks,
)
from .custom import register_pattern
from .expression import parse
from .grid import GridTiles
from .keys import KeyMask, KeyPadding
from .mask_mod import from_mask_mod
from .neighbourhood import Neighbourhood
from .packed_tree import PackedTree, pack_tree
from .per_head import PerHead
from .positions import (
    Causal,
    ChunkedCausal,
    Dilated,
    Documents,
    Full,
    GlobalTokens,
    LongNet,
    Packed,
    PooledCausal,
    SlidingWindow,
)
from .rearranged import Rearranged
from .selected import SelectedBlocks
from .tree import Tree

__all__ = [
    "BlockCausal", "BlockDiffusion", "BlockDilated", "BlockWindow", "Blocks", "Causal",
    "ChunkedCausal", "Dense", "Dilated", "Documents", "Full", "GlobalTokens", "GridTiles",
    "Hierarchical", "KeyMask", "KeyPadding", "LongNet", "Mask", "Mixture", "Neighbourhood",
    "Packed", "PackedTree", "Pattern", "PerHead", "PooledCausal", "RandomBlocks", "Rearranged",
    "SelectedBlocks", "SlidingWindow", "Tree", "from_mask_mod", "pack_tree", "parse",
    "register_pattern",
]  # fmt: skip
