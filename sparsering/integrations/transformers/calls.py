"""State of the model calls that run in this thread: `using` blocks, and calls that ranks share.

Masks keep the state of the forward pass that built them. So a layer that gradient checkpointing
runs again in a backward pass, outside the block or in another thread, finds it there.
"""

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

from ...patterns.algebra import Pattern


@dataclass(frozen=True, eq=False)
class UsingBlock:
    """The patterns of a `using` block."""

    patterns: dict[int, Pattern]  # by the id of an attention module; only modules with a pattern
    modules: frozenset[int]  # ids of all attention modules of the model


@dataclass(eq=False)
class SharedCall:
    """One call of a model whose tokens the ranks of a group share, as `parallelize` sets up."""

    group: dist.ProcessGroup | None
    sharding: str
    length: int  # tokens of a row of the whole batch
    tokens: Tensor  # indices in the row of the tokens that this rank's model runs
    num_tokens: int  # how many of them are the rank's own: all, or 0 of a single one
    position_ids: Tensor  # [B or 1, length], of the whole batch
    labels: Tensor | None  # [B, length], of the whole batch, shifted as the model's loss does
    checkpoints: bool  # whether the backward pass runs layers again


class _Thread(threading.local):
    """Each thread has its own values of these attributes."""

    blocks: tuple[UsingBlock, ...] = ()
    shared: SharedCall | None = None


thread = _Thread()
used_modules: WeakSet[Any] = WeakSet()
"""Attention modules that had a pattern from `using`, at any time and in any thread."""


def used_pattern(module: Any, blocks: tuple[UsingBlock, ...]) -> Pattern | None:
    """Returns the pattern that the innermost block of a module's model has for it, or None."""
    for block in reversed(blocks):
        if id(module) in block.modules:
            return block.patterns.get(id(module))
    return None


def runs_layers_again(model: Any) -> bool:
    """Whether gradient checkpointing is on, so that a backward pass runs layers a second time."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
