"""Oracles of `hf.using`: eager attention under masks of all pairs, in float64 throughout.

transformers computes RMS norms in float32, which turns a difference of 1e-16 into one of 1e-7.
`norms_in_full` computes them in the type of their input.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import made, result, tokens

import sparsering as sr
from sparsering.integrations.transformers.model.config import attention_modules

LEAST = torch.finfo(torch.float64).min


def _norm(self: Any, x: Tensor) -> Tensor:
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * (1 + self.weight if "Gemma" in type(self).__name__ else self.weight)


@contextmanager
def norms_in_full(*models: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in [x for model in models for x in model.modules()]:
            if type(module).__name__.endswith("RMSNorm"):
                patch.setattr(type(module), "forward", _norm)
        yield


def log_counts(pattern: sr.Pattern, model: Any, length: int = 13, batch: int = 2) -> Tensor:
    """[B, H, N, N]: 0 for a pair that attends, the log of its count in a mixture, else -1e308."""
    config = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    counts = pattern.to_dense(length, num_heads=heads, num_kv_heads=kv_heads).double()
    counts = counts if counts.dim() == 4 else counts[None]
    return counts.log().clamp(min=LEAST).expand(batch, heads, length, length)


def eager_result(family: str, pattern: Any, grads: bool = False, **inputs: Any) -> Any:
    """Results of eager attention over {layer: pattern}, or over one pattern in all layers.

    A hook gives each layer's attention its mask, so `inputs` may have the masks of users.
    """
    more = inputs.pop("more", {})
    model = made(family, **more)
    for layer, module in enumerate(attention_modules(model)):
        part = pattern.get(layer) if isinstance(pattern, dict) else pattern
        if part is not None:
            mask = log_counts(part, model)
            module.register_forward_pre_hook(_with_mask(mask), with_kwargs=True)
    return outcome(model, grads, **inputs)


def _with_mask(mask: Tensor) -> Any:
    return lambda module, args, kwargs: (args, {**kwargs, "attention_mask": mask})


def outcome(model: Any, grads: bool = False, **inputs: Any) -> Any:
    """The logits, and with `grads` also every parameter's gradient of a weighted sum of them."""
    inputs = {"input_ids": tokens(), **inputs}
    with norms_in_full(model), torch.set_grad_enabled(grads):
        out = result(model, **inputs)
        if not grads:
            return out
        objective(out).backward()
    return out.detach(), gradients(model)


def objective(out: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return (out * weight.roll(3)).sum() + out.square().sum() / 100


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: Tensor, wanted: Tensor, what: str = "") -> None:
    """Equal to 1e-10 of the largest value, which is not tiny."""
    largest = wanted.abs().max()
    assert largest > 1e-6, f"{what}: nothing to compare"
    assert (got - wanted).abs().max() <= 1e-10 * largest, (
        f"{what}: {(got - wanted).abs().max()} of {largest}"
    )


def assert_all_close(got: Any, wanted: Any) -> None:
    """Logits and every gradient; a gradient of zeros (unused experts) must be zeros."""
    assert_close(got[0], wanted[0], "logits")
    assert got[1].keys() == wanted[1].keys() and len(wanted[1]) > 10
    top = max(gradient.abs().max() for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        difference = (got[1][name] - gradient).abs().max()
        bound = 1e-10 * max(gradient.abs().max(), 1e-3 * top)
        assert difference <= bound, f"{name}: {difference} > {bound}"
