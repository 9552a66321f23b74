"""Exact softmax attention over a declared pattern of pairs, at the cost of the pattern.

    import sparsering as sr

    pattern = sr.LongNet((2048, 4096), (1, 2)) & sr.Causal()    # which pairs attend: a value
    out, lse = sr.attention(query, key, value, pattern, return_lse=True)     # [B, H, N, D], any N
    print(sr.explain(query, key, value, pattern))               # which backend runs, and why
    print(pattern.layout(8192))                                 # visited tiles, and the density

`sparsering.distributed` shares a sequence among ranks. docs/architecture.md maps the files.
"""

import warnings
from importlib.util import find_spec

if find_spec("numpy") is None:  # which torch says on its import; nothing here needs it
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

from . import export as export
from .coordinates import coordinate_bias, relative_bias_2d
from .decoding import KVCache, SelectedCache
from .functional import attention, batch_invariant, explain
from .ground.dropout import dropout_kept
from .ground.numerics import merge_attention
from .kernels.backends import backends
from .kernels.gather import set_workspace
from .layouts.cache import layout_cache
from .layouts.layout import BlockLayout
from .patterns import *  # noqa: F403
from .patterns import __all__ as _patterns
from .planning.comparison import Comparison, compare
from .planning.estimate import Estimate, Figure, estimate
from .planning.fit import choose_batch_size, longest_sequence
from .route.options import alibi
from .varlen import attention_varlen
from .weights import BlockWeights, attention_weights, key_mass

__version__ = "0.2.0"

__all__ = [
    *_patterns, "BlockLayout", "BlockWeights", "Comparison", "Estimate", "Figure", "KVCache",
    "SelectedCache", "alibi", "attention", "attention_varlen", "attention_weights", "backends",
    "batch_invariant", "choose_batch_size", "compare", "coordinate_bias", "dropout_kept",
    "estimate", "explain", "key_mass", "layout_cache", "longest_sequence", "merge_attention",
    "relative_bias_2d", "set_workspace",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
