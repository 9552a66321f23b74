"""Ring attention: ranks share a sequence, and each receives only the keys that its queries visit.

    out = ring_attention(query, key, value, LongNet((2048, 32768), (1, 8)) & Causal())

It runs under `torchrun`, on gloo or NCCL. `simulate_ring` computes the same in one process.
"""

from .exchange import RingError, RingMismatchError, Traffic
from .mesh_plan import MeshPlan
from .plan import RingPlan
from .ring import last_traffic, ring_attention
from .shards import shard, unshard
from .simulate import simulate_ring

__all__ = [
    "MeshPlan", "RingError", "RingMismatchError", "RingPlan", "Traffic", "last_traffic",
    "ring_attention", "shard", "simulate_ring", "unshard",
]  # fmt: skip
