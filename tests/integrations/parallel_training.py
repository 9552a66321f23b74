"""Optimizer steps of a tiny model: in one process, and by ranks that share its calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers_models import made, padded, tokens

LENGTH = 22  # 4 ranks do not divide the length


@contextmanager
def full_precision() -> Iterator[None]:
    """Computes norms, softmax and losses of float64 tensors in float64, not in float32."""
    softmax, to = torch.nn.functional.softmax, Tensor.to

    def softmax_of(x: Tensor, dim: int | None = None, dtype: Any = None, **more: Any) -> Tensor:
        return softmax(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype, **more)

    def cast(x: Tensor, *args: Any, **more: Any) -> Tensor:
        lowers = torch.float32 in args or more.get("dtype") is torch.float32
        return x if x.dtype == torch.float64 and lowers else to(x, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", softmax_of)
        patch.setattr(Tensor, "to", cast)
        patch.setattr(Tensor, "float", lambda x, **_: cast(x, torch.float32))
        yield


def model_of(family: str = "qwen2", dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A tiny model in training mode, without dropout; the same weights in every process."""
    return made(family, **more).to(dtype).train()


def checkpoint_layers(model: Any, reentrant: bool = False) -> None:
    """Lets the backward pass run layers again; older versions have another name for it."""
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": reentrant})


def batches(step: int = 0, packed: bool = False) -> list[dict[str, Tensor]]:
    """Two batches of a step: rows padded on the left, or rows of packed documents.

    Counts of padding tokens and lengths of documents differ between rows and steps.
    """
    found = []
    for half in range(2):
        ids = tokens(2, LENGTH, seed=10 * step + half)
        mask = padded("left", LENGTH, (LENGTH, 15 + half - step))
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :13] = -100  # ranks count different numbers; padding predicts no label
        batch = {"input_ids": ids, "labels": labels}
        if packed:
            lengths = [(4 + step, 7, 11 - step), (13 + step, 9 - step)]
            rows = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
            batch |= {"labels": ids, "position_ids": torch.stack(rows)}
        else:
            batch["attention_mask"] = mask
        found.append(batch)
    return found


class Training:
    """Losses and gradients of each step, and the parameters after the last one."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: dict[str, Tensor] = {}


def train(
    model: Any,
    step: Callable[[int], Tensor],
    mean_gradients: Callable[[list[Tensor]], None] = lambda x: None,
    mean: Callable[[Tensor], Tensor] = lambda x: x,
    steps: int = 3,
) -> Training:
    """Runs optimizer steps of a model.

    Args:
        step: runs forward and backward of the step with this number; returns the loss.
        mean_gradients: takes the means of gradients over ranks, in place.
        mean: the mean of a loss over ranks.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    result = Training()
    for number in range(steps):
        optimizer.zero_grad()
        loss = step(number)
        mean_gradients([x.grad for x in model.parameters()])
        result.losses.append(mean(loss.detach()).item())
        result.gradients.append(_whole(model, lambda x: x.grad))
        optimizer.step()
    result.parameters = _whole(model, lambda x: x)
    return result


def _whole(model: Any, of: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """Collects whole tensors by the names of a model that is not wrapped."""
    found = {}
    for name, parameter in model.named_parameters():
        value = of(parameter).detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name.removeprefix("module.").removeprefix("_orig_mod.")] = value.clone()
    return found


def alone(model: Any, num_batches: int = 1, packed: bool = False, steps: int = 3) -> Training:
    """Trains in one process; with two batches their losses have equal weight, as over ranks."""

    def step(number: int) -> Tensor:
        chosen = batches(number, packed)[:num_batches]
        loss = torch.stack([model(**batch, use_cache=False).loss for batch in chosen]).mean()
        loss.backward()
        return loss

    return train(model, step, steps=steps)


def mean_over(group: dist.ProcessGroup | None) -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """Returns what takes the means of gradients in place, and of a loss, over a group."""

    def mean_gradients(gradients: list[Any]) -> None:
        local = [x.to_local() if hasattr(x, "to_local") else x for x in gradients]
        reduce_together(local, group, dist.get_world_size(group))

    def mean(loss: Tensor) -> Tensor:
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    return mean_gradients, mean


def reduce_together(tensors: list[Tensor], group: dist.ProcessGroup | None, divisor: int) -> None:
    """Sums tensors over a group and divides, in place: in one message, for each takes 5 ms."""
    total = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(total, group=group)
    for x, part in zip(tensors, total.split([x.numel() for x in tensors]), strict=True):
        x.copy_(part.view_as(x) / divisor)


def assert_same_training(got: Training, wanted: Training, bound: float = 1e-10) -> None:
    """Equal up to a relative error: every loss, gradient and parameter."""
    assert len({round(x, 6) for x in wanted.losses}) == len(wanted.losses)
    for a, b in zip(got.losses, wanted.losses, strict=True):
        assert abs(a - b) <= bound * abs(b), (got.losses, wanted.losses)
    states = [*got.gradients, got.parameters], [*wanted.gradients, wanted.parameters]
    for tensors, expected in zip(*states, strict=True):
        assert list(tensors) == list(expected)
        largest = max(x.norm() for x in expected.values())
        assert largest > 1e-3
        for name, x in expected.items():
            error = (tensors[name] - x).norm() / max(x.norm(), 1e-3 * largest)
            assert error <= bound, f"{name}: relative error {error:.1e}"
