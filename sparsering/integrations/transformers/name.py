"""Names by which transformers knows this library's attention."""

NAME = "sparsering"
"""Name of the attn_implementation, and of the config attribute that holds patterns."""

PAGED = "sparsering_paged"
"""Name of the attn_implementation inside `continuous_batching`."""

PAGED_IN_ORDER = "sparsering_paged_in_order"
"""The same in a block that was opened inside `batch_invariant`."""
