"""State of the model calls that run in this thread: `using` blocks, and calls that ranks share.

Masks keep the state of the forward pass that built them. So a layer that gradient checkpointing
runs again in a backward pass, outside the block or in another thread, finds it there.
"""

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
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
    # by layer index: (query heads, kv heads, D, Dv, dtype) of its attention in this call
    shapes: dict[int, tuple[int, int, int, int, torch.dtype]] = field(default_factory=dict)


class CallState(NamedTuple):
    """What holds for a forward pass: the masks that it builds keep it."""

    blocks: tuple[UsingBlock, ...]  # open `using` blocks, the innermost last
    shared: SharedCall | None  # set if ranks share the call; masks are of the whole batch
    in_backward: bool  # True in a backward pass that runs the whole model again


PLAIN_CALL = CallState((), None, False)


class _Thread(threading.local):
    """Each thread has its own values of these attributes."""

    blocks: tuple[UsingBlock, ...] = ()
    shared: SharedCall | None = None


thread = _Thread()
shared_calls: WeakKeyDictionary[Any, SharedCall] = WeakKeyDictionary()
"""The last call of each model that ranks share."""
used_modules: WeakSet[Any] = WeakSet()
"""Attention modules that had a pattern from `using`, at any time and in any thread."""


def call_state() -> CallState:
    """Returns what holds for a forward pass that begins now in this thread."""
    backward = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
    return CallState(thread.blocks, thread.shared, backward)


def used_pattern(module: Any, blocks: tuple[UsingBlock, ...]) -> Pattern | None:
    """Returns the pattern that the innermost block of a module's model has for it, or None."""
    for block in reversed(blocks):
        if id(module) in block.modules:
            return block.patterns.get(id(module))
    return None


def runs_layers_again(model: Any) -> bool:
    """Whether gradient checkpointing is on, so that a backward pass runs layers a second time."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
