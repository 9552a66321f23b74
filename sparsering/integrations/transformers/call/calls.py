"""State of the model calls that run in this thread: `using` blocks, and calls that ranks share.

Masks keep it for layers that gradient checkpointing runs again, maybe in another thread.
"""

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ....patterns.algebra import Pattern
from ..name import NAME


@dataclass(frozen=True, eq=False)
class UsingBlock:
    """An open `using` block: the pattern of each attention module that has one."""

    patterns: dict[int, Pattern]  # by the id of an attention module; only modules with a pattern
    modules: frozenset[int]  # ids of all attention modules of the model
    task: int = -1  # id of the backward pass in which the block is open; -1 outside of one


@dataclass(eq=False)
class SharedCall:
    """One call of a model whose tokens the ranks of a group share, as `parallelize` sets up."""

    group: dist.ProcessGroup | None
    place: dist.ProcessGroup | DeviceMesh | None  # the group, or a mesh of heads and tokens
    sharding: str
    length: int  # tokens of a row of the whole batch
    tokens: Tensor  # [n] indices in the row of the tokens that this rank's model runs
    num_tokens: int  # n, or 0 if the rank owns no token: then it runs the row's last one, unused
    position_ids: Tensor  # [B or 1, length], of the whole batch
    valid: Tensor | None  # [B, length], the attention_mask of the whole batch
    labels: Tensor | None  # [B, length], of the whole batch, shifted as the model's loss does
    checkpoints: bool  # whether the backward pass runs layers again
    # by layer index: (query heads, kv heads, D, Dv, dtype) of its attention in this call
    shapes: dict[int, tuple[int, int, int, int, torch.dtype]] = field(default_factory=dict)


class CallState(NamedTuple):
    """State of one forward pass that its layers need; the masks of the call carry it."""

    blocks: tuple[UsingBlock, ...]  # open `using` blocks, the innermost last
    shared: SharedCall | None  # set if ranks share the call; masks are of the whole batch
    in_backward: bool  # True in a backward pass that does not know the blocks of its forward pass


PLAIN_CALL = CallState((), None, False)


class MaskRequest(NamedTuple):
    """Facts about a call that transformers knows but does not pass to `mask_interface`."""

    position_ids: Tensor | None = None
    # position_ids may show documents: no cache or attention_mask hides them, and transformers does
    # not look for them itself
    may_be_packed: bool = False
    is_cross: bool = False  # for cross attention
    # arguments of the call that keep transformers from looking for documents
    hides_documents: tuple[str, ...] = ()
    # each layer's number of keys, new ones included, if these numbers differ between layers
    layer_keys: tuple[int, ...] | None = None
    cache: Cache | None = None  # of self-attention; None inside torch.compile


class _Packing:
    """Position ids of the model calls that run now, for masks of packed documents.

    Each thread has its own, as a part of `_Thread`. Calls that torch.compile traces share a plain
    object instead, because it cannot trace a `threading.local`.
    """

    def __init__(self) -> None:  # attributes first set in a traced call would need a second graph
        self.running: tuple[tuple[Any, Tensor | None], ...] = ()  # (model, ids), innermost last
        self.request: MaskRequest | None = None  # for the next mask


class _Thread(threading.local, _Packing):
    """A thread's running model calls: position ids, open `using` blocks, and a shared call."""

    def __init__(self) -> None:  # torch.compile of torch 2.11 would see defaults of the class alone
        super().__init__()
        self.blocks: tuple[UsingBlock, ...] = ()
        self.shared: SharedCall | None = None
        self.task = -1  # id of the backward pass that runs a layer again in its forward's `blocks`


thread = _Thread()
_traced = _Packing()
shared_calls: WeakKeyDictionary[Any, SharedCall] = WeakKeyDictionary()
"""The last call of each model that ranks share."""
used_modules: WeakSet[Any] = WeakSet()
"""Attention modules that had a pattern from `using`, at any time and in any thread."""


def call_state() -> CallState:
    """Returns the state for a forward pass that begins now: open blocks, and the shared call.

    A backward pass may run layers again. Then only blocks that were opened in that pass count;
    gradient checkpointing opens those of the forward pass in it again.
    """
    if torch.compiler.is_compiling():
        return CallState(thread.blocks, thread.shared, False)
    task = backward_task()
    blocks = tuple(block for block in thread.blocks if block.task == task)
    return CallState(blocks, thread.shared, task not in (-1, thread.task))


def packing() -> _Packing:
    """Returns the record of position ids: this thread's, or torch.compile's while it traces."""
    return _traced if torch.compiler.is_compiling() else thread


def replacement(
    function: Callable[..., Any], changed: Callable[[dict[str, Any]], None]
) -> Callable[..., Any]:
    """Wraps a function of transformers so that `changed` may edit its arguments, by name, first.

    On each call `changed` gets the arguments by name, and may change that dict in place before the
    function runs.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters]
    needed = [x.name for x in parameters if x.default is x.empty]

    @wraps(function)
    def replaced(*arguments: Any, **named: Any) -> Any:
        # `Signature.bind` would break a compiled graph
        given = {**dict(zip(names, arguments, strict=False)), **named}
        is_one_each = len(given) == len(arguments) + len(named)
        if not is_one_each or not all(name in given for name in needed):
            return function(*arguments, **named)  # raises its own TypeError
        changed(given)
        return function(**given)

    setattr(replaced, NAME, True)
    return replaced


def remember_positions(model: Any, watch: Callable[[Any], None]) -> None:
    """Adds hooks to a model that record the position_ids of its calls while these run.

    Masks need them, and many families do not pass them on. `watch` is called with the model before
    each call.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _end not in module._forward_hooks.values():
            names = [*inspect.signature(module.forward).parameters, "position_ids"]
            begin = partial(_begin, names.index("position_ids"), watch)
            module.register_forward_pre_hook(begin, with_kwargs=True)
            module.register_forward_hook(_end, with_kwargs=True, always_call=True)


def _begin(
    place: int,
    watch: Callable[[Any], None],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Records the position_ids of a call; they are argument number `place`, or a keyword."""
    ids = args[place] if place < len(args) else kwargs.get("position_ids")
    watch(model)
    now = packing()
    now.running = (*now.running, (model, ids))


def _end(model: Any, *_: Any) -> None:
    now = packing()
    if now.running and now.running[-1][0] is model:
        now.running = now.running[:-1]


def backward_task() -> int:
    """Returns the id of the backward pass that is running, or -1 outside of one."""
    return torch._C._current_graph_task_id()


def remember_blocks(model: Any) -> None:
    """Wraps a model's gradient checkpointing, so that backward knows the `using` blocks.

    A layer then has the `using` blocks and the ranks' call of its forward pass again. Masks keep
    these too, but some layers get no mask.
    """
    for module in model.modules():
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpoint:
            module._gradient_checkpointing_func = partial(_checkpoint, checkpoint)


def _checkpoint(
    checkpoint: Callable[..., Any], layer: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Checkpoints a layer; when backward runs it again, today's blocks and shared call hold."""
    if not torch.compiler.is_compiling():
        layer = partial(_run_in, call_state().blocks, thread.shared, layer)
    return checkpoint(layer, *args, **options)


def _run_in(
    blocks: tuple[UsingBlock, ...],
    shared: SharedCall | None,
    layer: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """Runs a layer under the blocks and shared call of its forward pass, then restores both."""
    task, outer = backward_task(), (thread.blocks, thread.task, thread.shared)
    thread.blocks, thread.task = tuple(replace(block, task=task) for block in blocks), task
    thread.shared = shared
    try:
        return layer(*args, **options)
    finally:
        thread.blocks, thread.task, thread.shared = outer


def is_in_block(module: Any, blocks: tuple[UsingBlock, ...]) -> bool:
    """Whether an open `using` block is for the model of this attention module.

    The block need not have a pattern for the module.
    """
    return any(id(module) in block.modules for block in blocks)


def used_pattern(module: Any, blocks: tuple[UsingBlock, ...]) -> Pattern | None:
    """Returns the pattern that the innermost open block has for a module, or None."""
    for block in reversed(blocks):
        if id(module) in block.modules:
            return block.patterns.get(id(module))
    return None


def runs_layers_again(model: Any) -> bool:
    """Whether gradient checkpointing is on, so that backward runs layers a second time."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
