"""Runs a tiny model of a family over ranks and in one process, and compares the results.

Each rank builds the model once and calls it twice: as one of the ranks that share the call, and
alone, on eager attention. All of it is float64: `InFloat64` undoes the float32 of norms, routers,
softmax and losses, of which a rank would else have other roundings.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.ring_workers import Workers, groups
from parallel_training import checkpoint_layers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers_families import BY_PLACE, NOT_BUILT, layer_types, tiny

from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import sources
from sparsering.integrations.transformers.families import qwen

LENGTH, PADDING, DOCUMENT = 13, 8, 5  # tokens; 2 ranks have 7 and 6, or chunks of 4


class Row(NamedTuple):
    """The result of a family."""

    family: str
    masks: tuple[str, ...]  # what its layers have; of a family that is refused, its types of layers
    result: str  # "runs", "refused", "not tried" or, of a defect, "wrong"
    why: str = ""


class InFloat64(TorchFunctionMode):
    """Leaves float64 tensors float64, wherever a model converts them to float32."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


@contextmanager
def choices_in_float32() -> Iterator[None]:
    """Lets `top_tokens` convert scores to float32, which `InFloat64` would undo."""
    best = qwen.top_tokens

    def in_float32(*args: Any, **options: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return best(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen, "top_tokens", in_float32)
        yield


def share(
    rank: int,
    family: str,
    world: int = 2,
    positions: bool = False,
    kinds: tuple[str, ...] = (),
    checkpoints: bool = False,
    options: dict[str, Any] | None = None,
) -> Row:
    """Compares a family's calls over ranks with those in one process.

    Args:
        kinds: of the batches, as for `batch_of`; default those of `batches(positions)`.
        checkpoints: the backward passes of ranks run layers again.
        options: attributes of the model's config.
    """
    if family in NOT_BUILT:
        return Row(family, (), "not tried", NOT_BUILT[family])
    masks: set[str] = set()
    data = [batch_of(kind) for kind in kinds] or batches(positions)
    with InFloat64(), choices_in_float32(), _recorded(masks):
        model = tiny(family, **(options or {}))
        if checkpoints:
            _run_layers_again(model.train())
        try:
            hf.parallelize(model, groups[world])
            shared = [_over_ranks(model, batch, groups[world]) for batch in data]
        except NotImplementedError as refused:
            return Row(family, layer_types(family), "refused", _in_short(str(refused)))
        hf.parallelize(model, False)
        if checkpoints:
            model.gradient_checkpointing_disable()
        assert model.config._attn_implementation == "eager"
        alone = [_alone(model, batch) for batch in data]
    wrong = [
        _differences(places, got, wanted, batch)
        for batch, (places, *got), wanted in zip(data, shared, alone, strict=True)
    ]
    found = tuple(sorted(masks))
    if any(wrong):
        return Row(family, found, "wrong", "; ".join(x or "nothing differs" for x in wrong))
    return Row(family, found, "runs")


def shared(workers: Workers, family: str) -> str:
    """Returns "runs", the reason why not, or the last line of an error, from two ranks."""
    try:
        rows = workers.run(share, family, world=2)
    except AssertionError as error:
        return str(error).strip().splitlines()[-1]
    assert len({x.result for x in rows}) == 1, rows
    return rows[0].why or rows[0].result


def _in_short(error: str) -> str:
    """Returns an error's reason, without its beginning and without the way out."""
    return (
        error.split(": ", 1)[-1].split("; ")[0] if "ranks cannot" in error else error.split(";")[0]
    )


def batches(positions: bool = False) -> list[dict[str, Tensor]]:
    """Returns a batch with padding on the left of a row, and one of two documents a row.

    With `positions`, both have `position_ids`.
    """
    torch.manual_seed(3)
    ids = torch.randint(4, 61, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, PADDING] = -100  # a token of padding predicts it, and its logits are free
    padded = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if positions:
        padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    restarts = torch.cat([torch.arange(DOCUMENT), torch.arange(LENGTH - DOCUMENT)])
    return [padded, {"input_ids": ids, "labels": ids, "position_ids": restarts.expand(2, -1)}]


def batch_of(kind: str) -> dict[str, Tensor]:
    """Returns a batch with padding on the "left" or the "right", "packed", "whole" or "short".

    A short one has fewer tokens than there are ranks.
    """
    padded, packed = batches()
    whole = {name: packed[name] for name in ("input_ids", "labels")}
    if kind == "short":
        return {name: x[:, :3] for name, x in whole.items()}
    if kind == "right":
        mask = padded["attention_mask"].flip(1)
        labels = whole["labels"].masked_fill(mask == 0, -100)
        return {"input_ids": whole["input_ids"], "attention_mask": mask, "labels": labels}
    return {"left": padded, "packed": packed, "whole": whole}[kind]


def _run_layers_again(model: Any) -> None:
    """Turns on gradient checkpointing; a backward pass has no `InFloat64` of its own."""
    checkpoint_layers(model)
    for module in model.modules():
        if (original := vars(module).get("_gradient_checkpointing_func")) is not None:
            module._gradient_checkpointing_func = partial(_checkpoint_in_float64, original)


def _checkpoint_in_float64(
    original: Callable[..., Any], layer: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        with InFloat64():
            return layer(*args, **options)

    return original(run, *args, **options)


def _over_ranks(model: Any, batch: dict[str, Tensor], group: Any) -> tuple[Tensor, ...]:
    """Returns the rank's positions, logits, and the loss and gradients that all have together."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    grads = _gradients(model)
    loss = out.loss.detach().clone()
    for x in (grads, loss):
        dist.all_reduce(x, group=group)
    world = group.size()
    return hf.local_positions(model), out.logits.detach(), loss / world, grads / world


def _alone(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns the results of one process: of eager, or of ours where eager joins documents."""
    by_place = model.config.model_type in BY_PLACE and "attention_mask" in batch
    ours = by_place or _joins_documents(model, batch)
    model.set_attn_implementation("sparsering" if ours else "eager")
    model.zero_grad()
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), _gradients(model)


def _joins_documents(model: Any, batch: dict[str, Tensor]) -> bool:
    """Whether another token in a row's first document changes what eager says of the last one."""
    if "position_ids" not in batch:
        return False
    model.set_attn_implementation("eager")
    ids = batch["input_ids"].clone()
    ids[:, DOCUMENT - 1] = 4 + ids[:, DOCUMENT - 1] % 50
    inputs = {"position_ids": batch["position_ids"], "use_cache": False}
    with torch.no_grad():
        last = [model(x, **inputs).logits[:, -1] for x in (ids, batch["input_ids"])]
    return not torch.equal(*last)


def _gradients(model: Any) -> Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([x.flatten() for x in grads])


def _differences(
    positions: Tensor, got: Any, wanted: tuple[Tensor, ...], batch: dict[str, Tensor]
) -> str:
    """Says what differs between the ranks and one process by more than 1e-10; "" if nothing."""
    logits, *totals = got
    whole, *whole_totals = wanted
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, positions].bool()
    pairs = {
        "logits": (logits[real], whole[:, positions][real]),
        **dict(zip(("loss", "gradients"), zip(totals, whole_totals, strict=True), strict=True)),
    }
    found = []
    for name, (x, y) in pairs.items():
        if not y.numel():  # a rank without tokens
            assert not x.numel()
            continue
        assert y.abs().max() > 1e-3, f"{name} are all but 0: they could not differ"
        error = float((x - y).abs().max() / y.abs().max())
        if not error <= 1e-10:
            found.append(f"{name} differ by {error:.1e}")
    return ", ".join(found)


@contextmanager
def _recorded(masks: set[str]) -> Iterator[None]:
    """Notes the kinds of masks, sinks and softcaps of attention that ranks share."""
    original, of_lists = sources.attend_shared, sources.attend_lists_shared

    def attend_lists(
        module: Any, inputs: Any, mask: Any, chosen: Any, shared: Any, extras: dict[str, Any]
    ) -> Tensor:
        note(mask, extras)
        masks.add("chosen entries" if chosen.entries else "chosen keys")
        return of_lists(module, inputs, mask, chosen, shared, extras)

    def attend(
        module: Any, inputs: Any, mask: Any, used: Any, shared: Any, extras: dict[str, Any]
    ) -> Tensor:
        note(mask, extras)
        return original(module, inputs, mask, used, shared, extras)

    def note(mask: Any, extras: dict[str, Any]) -> None:
        kind = getattr(mask, "kind", None)  # None of a tensor of all pairs
        if kind is not None:
            name = "causal" if kind.causal else "all keys"
            name = "window" if kind.left is not None else name
            masks.add("chunks" if kind.chunks else name)
        masks.update(x for x in ("sink", "softcap") if extras[x] is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "attend_shared", attend)
        patch.setattr(sources, "attend_lists_shared", attend_lists)
        yield
