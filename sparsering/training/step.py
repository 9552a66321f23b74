"""A training step: forward, backward and update by AdamW, with warm-up, cosine and autocast.

optimizer = adamw(model, recipe)
loss, norm, rate = training_step(model, optimizer, recipe, step, text.train, ranks)
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..models.longnet import LongNetLM
from ..nn.transformer import Attend
from .data import training_window
from .micro_batches import make_moments
from .ranks import ALONE, Ranks
from .recipe import DTYPES, Recipe


def training_step(
    model: LongNetLM,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    step: int,
    train: Tensor,
    ranks: Ranks = ALONE,
    *,
    attend: Attend | Sequence[Attend] | None = None,
    micro_batch: int | None = None,
) -> tuple[float, float, float]:
    """Trains one step on windows of the training bytes; returns (loss, gradient norm, rate).

    `micro_batch` windows are computed at a time, default all of them.

    Returns: loss (nats per byte) and gradient norm before clipping, over all ranks' windows; and
        the learning rate.
    """
    rate = recipe.learning_rate_at(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    size = micro_batch or recipe.batch_size
    loss = gradients(model, recipe, step, train, ranks, size, recipe.batch_size // size, attend)
    make_moments(optimizer)
    norm = ranks.clip_gradients(model, recipe.clip_norm)
    optimizer.step()
    return ranks.total(loss), norm, rate


def gradients(
    model: LongNetLM,
    recipe: Recipe,
    step: int,
    train: Tensor,
    ranks: Ranks,
    size: int,
    parts: int,
    attend: Attend | Sequence[Attend] | None = None,
) -> Tensor:
    """Adds the gradients of the first `parts` micro-batches of a step; returns their loss.

    Returns: this rank's part of their loss, as a share of the step's mean.
    """
    tokens, targets = training_window(
        train, context=recipe.context, batch_size=recipe.batch_size, seed=recipe.seed, step=step
    )
    total = torch.zeros((), device=ranks.device)
    for one in range(parts):
        window = slice(one * size, (one + 1) * size)
        with autocast(recipe.dtype, ranks.device.type):
            loss = ranks.loss(model, tokens[window], targets[window], attend, targets.numel())
        loss.backward()
        total += loss.detach()
    return total


def adamw(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Builds AdamW; only parameters with two or more dims have weight decay."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def autocast(dtype: str, device_type: str = "cpu") -> AbstractContextManager[Any]:
    """Returns a context that autocasts to bfloat16, or does nothing for float32."""
    return torch.autocast(device_type, DTYPES["bfloat16"], enabled=dtype == "bfloat16")
