"""The loss of a call that ranks share: each rank's part of a mean over the whole batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.utils import ModelOutput

from ..call.calls import SharedCall, thread

_CAUSAL_LOSS = LOSS_MAPPING["ForCausalLM"]
_TOKEN_LOSSES = (LOSS_MAPPING["ForMaskedLM"], LOSS_MAPPING["ForTokenClassification"])


def check_loss(model: Any, own: bool, arguments: dict[str, Any]) -> None:
    """Raises NotImplementedError unless a model's loss is a mean over tokens, as ranks need.

    `own` says that the model computes its loss itself, without `loss_function`.
    """
    loss = None if own else _original(model)
    name = type(model).__name__
    by_token = loss is _CAUSAL_LOSS or loss in _TOKEN_LOSSES
    if own:
        by_token = any(x in name for x in ("ForMaskedLM", "ForTokenClassification"))
    if not by_token:
        raise NotImplementedError(
            f"{name} computes a loss that ranks cannot share; leave out labels, and compute the "
            "loss from logits and hf.local_positions(model)"
        )
    if arguments.get("shift_labels") is not None and loss is not _CAUSAL_LOSS:
        raise NotImplementedError(
            f"{name} does not shift labels, so shift_labels has no meaning; pass labels"
        )


def _original(model: Any) -> Any:
    """Returns a model's own loss function, inside the wrapper of `sharded_loss` if any."""
    return getattr(model.loss_function, "original", model.loss_function)


def shifts(model: Any) -> bool:
    """Whether a model's loss compares the logits of a token with the label of the next one."""
    return _original(model) is _CAUSAL_LOSS


def own_labels(shared: SharedCall) -> Tensor:
    """Returns the labels of this rank's tokens; -100 (ignored) if it owns none."""
    assert shared.labels is not None
    labels = shared.labels.index_select(1, shared.tokens)
    return labels if shared.num_tokens else torch.full_like(labels, -100)


def sharded_loss(original: Callable[..., Tensor], scale: float) -> Callable[..., Tensor]:
    """Wraps a loss that is a mean over tokens, for calls that ranks share.

    It then divides the sum over this rank's tokens by the number of labels in the whole batch, and
    multiplies by `scale`.
    """

    def loss_function(
        logits: Tensor, labels: Tensor, *rest: Any, num_items_in_batch: Any = None, **more: Any
    ) -> Tensor:
        if (shared := thread.shared) is None or shared.labels is None:
            more["num_items_in_batch"] = num_items_in_batch
            return original(logits, labels, *rest, **more)
        if num_items_in_batch is None:
            num_items_in_batch = (shared.labels != -100).sum()
        if original is _CAUSAL_LOSS:
            more["shift_labels"] = labels
        loss = original(logits, labels, *rest, num_items_in_batch=num_items_in_batch, **more)
        return loss * scale

    loss_function.original = original  # type: ignore[attr-defined]
    return loss_function


def with_loss(out: Any, shared: SharedCall, scale: float) -> Any:
    """Returns a model's output with this rank's share of the mean loss added.

    It is for models that compute their loss themselves, and so were called without labels.
    """
    assert shared.labels is not None
    logits = out.logits if isinstance(out, ModelOutput) else out[0]
    labels = own_labels(shared).flatten().to(logits.device)
    total = cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    loss = total / (shared.labels != -100).sum() * scale
    return type(out)(**{**out, "loss": loss}) if isinstance(out, ModelOutput) else (loss, *out)
