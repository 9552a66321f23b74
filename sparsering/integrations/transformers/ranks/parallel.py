"""`parallelize`: the ranks of a process group compute each call of a model together.

Each rank calls the model with the same whole batch. A hook before the call cuts the batch to the
rank's tokens. Masks are built for the whole batch, and layers attend by `ring_attention`. A hook
after the call removes a token that is not the rank's own, and adds the loss of some families.
"""

import inspect
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from ....distributed.agreement import agree_on_batch, digests_of
from ....distributed.exchange import Exchange, RingMismatchError
from ....distributed.heads import has_two_axes, world_of
from ....distributed.plan import RingPlan
from ....distributed.ring import resolve_group
from ....distributed.sharding import check_sharding, num_tokens, owned_ranges, positions
from ....ground.arguments import shortened
from ....ground.keywords import with_hints
from ....patterns.algebra import Pattern
from ....patterns.positions import Causal, Full
from ..call.calls import SharedCall, remember_blocks, runs_layers_again, shared_calls, thread
from ..families import PREPARES_RANKS
from ..model.apply import is_causal, patterns_of, register
from ..model.config import (
    Hold,
    attention_modules,
    decoder_config,
    hold,
    model_inside,
    release,
)
from ..model.indexers import lists_keys
from . import shared_arguments
from .shared_loss import sharded_loss, with_loss


@dataclass(eq=False)
class Parallel:
    """How ranks share a model's calls, and what `parallelize(model, False)` must restore."""

    group: dist.ProcessGroup | None
    place: dist.ProcessGroup | DeviceMesh | None  # the group, or a mesh of two axes
    sharding: str
    scale: float  # factor of the loss
    signature: inspect.Signature
    own_loss: bool  # the model computes its loss itself, without `loss_function`
    implementation: str  # the model's attention implementation before `parallelize`
    loss_function: Any = None  # the model's own, or None for that of its family

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()


_held: WeakKeyDictionary[Any, list[Hold]] = WeakKeyDictionary()


def parallel_of(model: Any) -> Parallel | None:
    """Returns the `Parallel` of a model, which its hooks hold, or None."""
    hooks = model._forward_pre_hooks.values()
    return next((hook.parallel for hook in hooks if hasattr(hook, "parallel")), None)


@with_hints()
def parallelize(
    model: Any,
    group: dist.ProcessGroup | DeviceMesh | bool | None = None,
    *,
    sharding: str = "auto",
    loss: str = "mean",
) -> None:
    """Lets the ranks of a group compute every later call of a model together.

    Each rank calls the model with the same whole batch, and computes its own tokens of it: logits
    and hidden states are of these tokens, whose indices `local_positions` returns. Attention is
    `ring_attention` over the masks of the whole batch: the model's own, the pattern of `apply`, or
    that of a `using` block. A rank holds activations of its own tokens only, and receives only the
    keys that they see, as `RingPlan` counts them.

    Labels are shifted before they are cut, so `out.loss` of the ranks is that of one process. A
    loss that you compute from logits is not scaled. Every rank calls backward, also a rank without
    tokens. Call it before or after `fully_shard`, and before `DistributedDataParallel`.

    Args:
        model: a model of transformers whose layers mix tokens by attention only.
        group: a process group, or a `DeviceMesh` of one axis or of two (heads, tokens); default all
            ranks. False undoes an earlier call; another call replaces it.
        sharding: which rank has which tokens, as for `RingPlan`. "auto" chooses by the model's
            masks for the length of each batch.
        loss: "mean": the mean of `out.loss` over ranks is the loss of one process, and the mean of
            gradients its gradient, as FSDP and DDP compute. "share": the same for sums.

    Raises:
        NotImplementedError: the model has layers, positions or heads that need other ranks' tokens
            in another way; or its layers choose keys, and the mesh has two axes; or, when it is
            called, an argument needs them (`use_cache=True`).
        ValueError: an argument is invalid.
        RingMismatchError: when the model is called, on all ranks: the ranks' batches differ. The
            group stays usable.

    Example:
        >>> parallelize(model, mesh["cp"])
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    model = model_inside(model)
    if group is False:
        _undo(model)
        return
    modules = list(attention_modules(model))
    mesh = group if isinstance(group, DeviceMesh) else None
    resolved = resolve_group(None if mesh is not None else group, mesh)  # type: ignore[arg-type]
    ranks = 1 if resolved is None else resolved.size()
    check_sharding(sharding, ranks)
    if loss not in ("mean", "share"):
        raise ValueError(
            f'loss must be "mean" or "share", got {shortened(repr(loss))}; with FSDP or DDP, which '
            'take the mean of gradients, use "mean"'
        )
    if reason := shared_arguments.reason_against(model, modules):
        raise NotImplementedError(
            f"ranks cannot share calls of {type(model).__name__}: {reason}; run it on one rank"
        )
    if lists_keys(model) and sharding not in ("auto", "contiguous"):
        raise NotImplementedError(
            f"ranks share calls of {type(model).__name__}, whose layers choose keys, contiguously, "
            f'got sharding={shortened(repr(sharding))}; pass sharding="auto"'
        )
    place = mesh if has_two_axes(mesh) else resolved
    if lists_keys(model) and has_two_axes(mesh):
        raise NotImplementedError(
            f"ranks share calls of {type(model).__name__}, whose layers choose keys, over one axis "
            'of tokens, got a mesh of two axes; pass one axis of it, as in mesh["tokens"]'
        )
    _undo(model)
    for prepare in PREPARES_RANKS:
        prepare()
    forward = type(model).forward
    parallel = Parallel(
        group=resolved,
        place=place,
        sharding=sharding,
        scale=float(ranks) if loss == "mean" else 1.0,
        signature=inspect.signature(forward),
        own_loss="loss_function" not in inspect.unwrap(forward).__code__.co_names,
        implementation=model.config._attn_implementation,
        loss_function=vars(model).get("_loss_function"),
    )
    register()
    _held[model] = hold(model, modules, "parallelize")
    if not parallel.own_loss:
        model.loss_function = sharded_loss(model.loss_function, parallel.scale)
    _hook(model, parallel)


@with_hints()
def local_positions(model: Any) -> Tensor:
    """Returns the indices, int64 [n], of the tokens of the last call that this rank computed.

    They are in the order of the rank's logits; `position_ids` may give other rotary positions.

    Raises: ValueError if the model is not parallelized, or was not called since.
    """
    model = model_inside(model)
    if (shared := shared_calls.get(model)) is None:
        state = "was not called since" if parallel_of(model) else "is not parallelized"
        raise ValueError(
            f"local_positions needs a model after a call that ranks share; this {state}; call "
            "parallelize(model), then model(...)"
        )
    return shared.tokens[: shared.num_tokens]


def _undo(model: Any) -> None:
    """Removes the hooks of `parallelize`, and restores the model's loss and attention."""
    shared_calls.pop(model, None)
    if (parallel := parallel_of(model)) is None:
        return
    tables = model._forward_pre_hooks, model._forward_hooks
    keys = [key for x in tables for key, hook in x.items() if hasattr(hook, "parallel")]
    for name, table in vars(model).items():
        if name.startswith(("_forward_pre_hooks", "_forward_hooks")):
            for key in keys:
                table.pop(key, None)
    if parallel.loss_function is not None:
        model.loss_function = parallel.loss_function
    else:
        vars(model).pop("_loss_function", None)
    if model in _held:
        release(_held.pop(model))
    else:  # a copy of a model that ranks share
        model.set_attn_implementation(parallel.implementation)


def _hook(model: Any, parallel: Parallel) -> None:
    """Adds the hooks that cut each call's arguments and finish its result."""

    @torch.compiler.disable
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local, thread.shared = _cut(module, parallel, args, kwargs)
        shared_calls[module] = thread.shared
        return (), local

    @torch.compiler.disable
    def after(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        shared, thread.shared = thread.shared, None
        if out is None or shared is None:  # the call raised
            return None
        if parallel.own_loss and shared.labels is not None:
            out = with_loss(out, shared, parallel.scale)
        if shared.num_tokens:
            return out
        # This rank owns no token, so the single token that it ran is removed from [B, 1, ...].
        return tree_map(lambda x: x[:, :0] if isinstance(x, Tensor) and x.dim() > 2 else x, out)

    before.parallel = after.parallel = parallel
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=True)


def _cut(
    model: Any, parallel: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], SharedCall]:
    """Returns this rank's own arguments, and the `SharedCall` that its layers read."""
    arguments, length, device = _agreed(model, parallel, args, kwargs)
    sharding = _sharding(model, parallel, length)
    ranges = owned_ranges(sharding, length, parallel.ranks)
    own = ranges[0 if parallel.group is None else parallel.group.rank()]
    count = num_tokens(own)
    tokens = (positions(own) if count else torch.tensor([length - 1])).to(device)
    if (ids := arguments.get("position_ids")) is None:
        ids = torch.arange(length, device=device)[None]
    labels = shared_arguments.whole_labels(model, arguments, parallel.own_loss)
    if again := runs_layers_again(model):
        remember_blocks(model)
    shared = SharedCall(
        group=parallel.group,
        place=parallel.place,
        sharding=sharding,
        length=length,
        tokens=tokens,
        num_tokens=count,
        position_ids=ids,
        valid=arguments.get("attention_mask"),
        labels=labels,
        checkpoints=again,
    )
    arguments["position_ids"] = ids
    local = shared_arguments.cut(arguments, shared, parallel.own_loss)
    passes_on = any(x.kind is x.VAR_KEYWORD for x in parallel.signature.parameters.values())
    if "use_cache" in parallel.signature.parameters or (
        passes_on and getattr(decoder_config(model), "use_cache", False)
    ):
        local["use_cache"] = False  # with a cache, transformers would not look for documents
    return local, shared


def _agreed(
    model: Any, parallel: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], int, torch.device]:
    """Checks a call's arguments on all ranks: (arguments, length, device), or all raise."""
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    error: Exception | None = None
    digests = None
    try:
        arguments = shared_arguments.bound(model, parallel.signature, args, kwargs)
        length = shared_arguments.check(model, arguments, parallel.own_loss)
        if parallel.ranks > 1:
            options = {"sharding": parallel.sharding, "loss": parallel.scale}
            digests = digests_of(shared_arguments.compared(arguments, options))
    except Exception as raised:  # the other ranks must know, whatever it is
        error = raised
    if parallel.ranks > 1:
        assert parallel.group is not None
        exchange = Exchange(parallel.group, None, None if first is None else first.device)
        try:
            with exchange.break_on_error():
                agree_on_batch(exchange, "a model that ranks share", digests)
        except RingMismatchError as mismatch:
            if error is None and (way_out := _rows_of_engine()):
                text = f"{mismatch.message}; {way_out}"
                raise RingMismatchError(text, mismatch.rank, mismatch.peer, mismatch.step) from None
            raise
    if error is not None:
        raise error
    assert first is not None
    return arguments, length, first.device


_ENGINES = {  # by the module that is loaded: how each rank gets the same rows
    "lightning": "with Lightning, pass use_distributed_sampler=False to its Trainer",
    "pytorch_lightning": "with Lightning, pass use_distributed_sampler=False to its Trainer",
    "transformers.trainer": "with transformers.Trainer, return a plain DataLoader from its "
    "get_train_dataloader",
}


def _rows_of_engine() -> str:
    """Says how the engine in use gives each rank the same rows; "" for none."""
    loaded = next((way for name, way in _ENGINES.items() if name in sys.modules), "")
    if loaded or (state := sys.modules.get("accelerate.state")) is None:
        return loaded
    in_use = state.AcceleratorState._shared_state  # transformers loads accelerate in any case
    return "with accelerate, do not pass the loader to Accelerator.prepare" if in_use else ""


def _sharding(model: Any, parallel: Parallel, length: int) -> str:
    """Returns how ranks divide a call; "auto" means the way with the least predicted cost."""
    if parallel.ranks == 1 or lists_keys(model):
        return "contiguous"
    if parallel.sharding not in ("auto", "balanced"):
        return parallel.sharding
    unknown = Causal() if is_causal(model) else Full()
    layers = Counter(unknown if x is None else x for x in patterns_of(model))
    config = decoder_config(model)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    counts = {"num_heads": heads, "num_kv_heads": kv_heads}

    def plan(pattern: Pattern, sharding: str) -> Any:
        return RingPlan.build(
            pattern, length, world_of(parallel.place), sharding=sharding, **counts
        )

    choices = {plan(pattern, parallel.sharding).sharding for pattern in layers}
    if len(choices) == 1:
        return choices.pop()
    return min(sorted(choices), key=lambda x: sum(n * plan(p, x).cost for p, n in layers.items()))
