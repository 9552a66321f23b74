"""Calls of tiny models by several ranks, and the same calls in one process, to compare them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ring_workers import Workers, groups
from parallel_training import full_precision, reduce_together
from torch import Tensor
from transformers import (
    BertForMaskedLM,
    BertForTokenClassification,
    GPT2ForTokenClassification,
    LlamaForTokenClassification,
    ModernBertForMaskedLM,
    ModernBertForTokenClassification,
)
from transformers_models import DECODERS, ENCODERS, tokens

import sparsering as sr
from sparsering.distributed import RingPlan
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import masks, override
from sparsering.integrations.transformers.ranks import parallel, shared_arguments


def _with_head(family: str, head: Any, **options: Any) -> Callable[..., Any]:
    """Returns a function that builds a family's tiny model with another head."""

    def build(**more: Any) -> Any:
        return head({**DECODERS, **ENCODERS}[family](**options, **more).config)

    return build


_LABELS = {"num_labels": 5}
BUILDERS: dict[str, Callable[..., Any]] = {
    **DECODERS,
    "bert-mlm": _with_head("bert", BertForMaskedLM),
    "modernbert-mlm": _with_head("modernbert", ModernBertForMaskedLM),
    "modernbert-sparse": _with_head("modernbert", ModernBertForMaskedLM, sparse_prediction=True),
    "bert-tokens": _with_head("bert", BertForTokenClassification, **_LABELS),
    "modernbert-tokens": _with_head("modernbert", ModernBertForTokenClassification, **_LABELS),
    "llama-tokens": _with_head(
        "llama", LlamaForTokenClassification, classifier_dropout=0.0, **_LABELS
    ),
    "gpt2-tokens": _with_head(
        "gpt2", GPT2ForTokenClassification, classifier_dropout=0.0, **_LABELS
    ),
}


@dataclass
class Case:
    """One batch of one model, and how ranks share it. Every rank makes its own model."""

    family: str = "llama"
    inputs: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, Any] | None = None  # inputs of one process, if they differ
    config: dict[str, Any] = field(default_factory=dict)
    apply: Any = None  # a pattern for `hf.apply`
    using: Any = None  # a pattern for `hf.using`
    sharding: str = "auto"
    loss: str = "mean"
    dtype: torch.dtype = torch.float64
    implementation: str = "eager"  # of one process
    train: bool = True
    gradients: bool = True
    steps: int = 0  # of an optimizer, instead of one backward pass


def build(case: Case) -> Any:
    """Builds the model of a case: the same weights in every process."""
    torch.manual_seed(7)
    model = BUILDERS[case.family](**case.config).to(case.dtype).train(case.train)
    with torch.no_grad():  # with the first weights, scores are all but equal
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(4 if case.dtype == torch.float64 else 2)
    return model


def leaves_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copies inputs, so that embeddings get a gradient of their own."""
    inputs = dict(inputs)
    if "inputs_embeds" in inputs:
        inputs["inputs_embeds"] = inputs["inputs_embeds"].detach().clone().requires_grad_()
    return inputs


def run_model(
    case: Case,
    model: Any,
    inputs: dict[str, Any],
    mean: Callable[[Tensor], Tensor],
    gradients: Callable[[dict[str, Tensor]], dict[str, Tensor | None]],
) -> Any:
    """Runs a case: (output of the last call, losses, gradients by name).

    Args:
        mean: returns the mean of a loss over ranks.
        gradients: returns by name the means over ranks of tensors' gradients.
    """
    inputs = leaves_of(inputs)
    if case.steps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(case.steps):
            optimizer.zero_grad()
            out = model(**inputs)
            out.loss.backward()
            found = gradients(dict(model.named_parameters()))
            for name, parameter in model.named_parameters():
                parameter.grad = found[name]
            optimizer.step()
            losses.append(mean(out.loss.detach()))
        return out, losses, {}
    with nullcontext() if case.gradients else torch.no_grad():
        out = model(**inputs)
    loss = out[0] if isinstance(out, tuple) else out.get("loss")
    if loss is None:
        return out, None, {}
    if not case.gradients:
        assert not loss.requires_grad
        return out, mean(loss), {}
    loss.backward()
    named = dict(model.named_parameters())
    if "inputs_embeds" in inputs:
        named["inputs_embeds"] = inputs["inputs_embeds"]
    return out, mean(loss.detach()), gradients(named)


def own_loss(loss: Tensor) -> Tensor:
    return loss


def own_gradients(named: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {name: x.grad for name, x in named.items()}


def alone(case: Case) -> tuple[Any, Any, Any]:
    """Runs a case in one process."""
    with full_precision() if case.dtype == torch.float64 else nullcontext():
        model = build(case)
        model.set_attn_implementation(case.implementation)
        if case.implementation == "sparsering" and case.apply is not None:
            hf.apply(model, case.apply)
        used = case.implementation == "sparsering" and case.using is not None
        inputs = {"use_cache": False, **(case.inputs if case.alone is None else case.alone)}
        if case.family.startswith(("bert", "modernbert")):
            del inputs["use_cache"]
        with hf.using(model, case.using) if used else nullcontext():
            return run_model(case, model, inputs, own_loss, own_gradients)


def share(rank: int, case: Case, world: int, plant: str | None = None) -> dict[str, Any]:
    """Runs a case as one rank of `world`, with a fault planted in the library or none."""
    group = groups[world]
    divisor = world if case.loss == "mean" else 1

    def mean(loss: Tensor) -> Tensor:
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total / divisor

    def gradients_of_all(named: dict[str, Tensor]) -> dict[str, Tensor | None]:
        found = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in named.items()}
        reduce_together([*found.values()], group, divisor)
        return {**found}

    precision = full_precision() if case.dtype == torch.float64 else nullcontext()
    with precision, pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            PLANTS[plant](patch)
        model = build(case)
        if case.apply is not None:
            hf.apply(model, case.apply)
        hf.parallelize(model, group, sharding=case.sharding, loss=case.loss)
        with nullcontext() if case.using is None else hf.using(model, case.using):
            out, loss, gradients = run_model(case, model, case.inputs, mean, gradients_of_all)
        positions = hf.local_positions(model)
    tuples = isinstance(out, tuple)
    hidden = None if tuples else out.get("hidden_states")
    return {
        "class": type(out).__name__,
        "length": len(out),
        "loss": loss,
        "own loss": None if loss is None else (out[0] if tuples else out.loss).detach(),
        "logits": (out[int(loss is not None)] if tuples else out.logits).detach(),
        "hidden": None if hidden is None else [x.detach() for x in hidden],
        "positions": positions,
        "gradients": gradients if rank == 0 else {},
    }


def _relative(got: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """Returns the norm of the error over the norm of `wanted`, or over `least` if that is more."""
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    assert got.dtype == wanted.dtype
    norm = max(wanted.double().norm().item(), least)
    error = (got.double() - wanted.double()).norm().item()
    return error / norm if norm else error


def check(workers: Workers, case: Case, world: int, plant: str | None = None) -> list[Any]:
    """Compares what ranks compute with one process: losses, logits, hidden states, gradients."""
    results = workers.run(partial(share, plant=plant), case, world, world=world)
    bound = 1e-10 if case.dtype == torch.float64 else 2e-5
    out, loss, gradients = alone(case)
    tuples = isinstance(out, tuple)
    logits = (out[int(loss is not None)] if tuples else out.logits).detach()
    length = next(v for k, v in case.inputs.items() if k in ("input_ids", "inputs_embeds")).shape[1]
    mask = case.inputs.get("attention_mask")
    tokens_of_ranks = torch.cat([result["positions"] for result in results])
    assert sorted(tokens_of_ranks.tolist()) == list(range(length)), "each token has one rank"
    for rank, result in enumerate(results):
        assert (result["class"], result["length"]) == (type(out).__name__, len(out))
        where = result["positions"]
        real = torch.ones(len(logits), len(where)) if mask is None else mask[:, where]
        if case.family != "modernbert-sparse":  # there, logits are of tokens with labels
            got, wanted = result["logits"], logits[:, where]
            assert got.shape == wanted.shape, f"rank {rank}: {got.shape}, not {wanted.shape}"
            error = _relative(got[real.bool()], wanted[real.bool()])
            assert error <= bound, f"logits of rank {rank}: {error}"
        if result["hidden"] is not None:
            for got, whole in zip(result["hidden"], out.hidden_states, strict=True):
                assert got.shape == (*whole[:, where].shape,)
                error = _relative(got[real.bool()], whole.detach()[:, where][real.bool()])
                assert error <= bound, f"hidden states of rank {rank}: {error}"
    assert logits.abs().max() > 1e-3
    if loss is None:
        assert all(result["loss"] is None for result in results)
        return results
    for result in results:
        losses = result["loss"] if case.steps else [result["loss"]]
        for got, wanted in zip(losses, loss if case.steps else [loss], strict=True):
            assert _relative(got, wanted) <= bound, f"loss {got}, not {wanted}"
    if case.gradients and not case.steps:
        _check_gradients(results[0]["gradients"], gradients, bound)
    return results


def _check_gradients(got: dict[str, Tensor], wanted: dict[str, Any], bound: float) -> None:
    assert list(got) == list(wanted)
    known = {name: x for name, x in wanted.items() if x is not None}
    most = max(x.norm().item() for x in known.values())
    assert most > 1e-3
    for name, x in got.items():
        if wanted[name] is None:
            assert not x.any(), f"{name} has a gradient, and none in one process"
            continue
        # the gradient of a key's bias is 0 up to rounding, if the model has no rotary positions
        error = _relative(x, wanted[name], 1e-4 * most)
        assert error <= bound, f"gradient of {name}: {error}"


def batch(
    length: int, rows: int = 2, left: tuple[int, ...] = (), right: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Tokens, labels, and with padding a mask; no label for a token after the padding.

    Such a label would be predicted from padding, of which eager makes something else.
    """
    ids = tokens(rows, length)
    labels = ids.clone()
    labels[0, 1 : length // 3] = -100
    if not left and not right:
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    for row, count in enumerate(left):
        mask[row, :count] = 0
        labels[row, : count + 1] = -100
    for row, count in enumerate(right):
        mask[row, length - count :] = 0
        labels[row, length - count :] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def pairs(visible: Tensor) -> Tensor:
    """Returns counts [.., N, N] of a pattern as a mask that eager adds to scores: [1, H, N, N]."""
    while visible.dim() < 4:
        visible = visible[None]
    return visible.double().log().clamp(min=torch.finfo(torch.float64).min)


def traffic(rank: int, case: Case, world: int) -> tuple[list[Any], str]:
    """Runs a forward pass: for each layer (pattern, bytes received, planned, counted), and explain.

    Bytes are counted from the pattern as a matrix: keys and values of other ranks' tokens that one
    of this rank's queries sees.
    """
    layers = []
    ring = override.ring_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, pattern: Any, **options: Any) -> Any:
        out = ring(query, key, value, pattern, **options)
        heads = {"num_heads": query.shape[1], "num_kv_heads": key.shape[1]}
        length, rows = case.inputs["input_ids"].shape[1], len(query)
        plan = RingPlan.build(pattern, length, world, sharding=options["sharding"], **heads)
        widths = key.shape[3], value.shape[3]
        planned = plan.bytes_received(rank, head_dim=widths, dtype=query.dtype) * rows
        own = hf.local_positions(model)
        visible = pattern.to_dense(length, **heads)[..., own, :] > 0
        visible = visible.reshape((1,) * (4 - visible.dim()) + visible.shape)
        visible = visible.expand(rows, -1, -1, -1)
        if visible.shape[1] != key.shape[1]:  # one for all heads, or one for each query head
            visible = visible.expand(-1, query.shape[1], -1, -1)
        needed = visible.any(2).unflatten(1, (key.shape[1], -1)).any(2)
        needed[..., own] = False
        counted = int(needed.sum()) * sum(widths) * query.element_size()
        received = ring.last_traffic().received_bytes  # type: ignore[attr-defined]
        layers.append((str(pattern), received, planned, counted))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(override, "ring_attention", watched)
        model = build(case)
        if case.apply is not None:
            hf.apply(model, case.apply)
        hf.parallelize(model, groups[world], sharding=case.sharding)
        with nullcontext() if case.using is None else hf.using(model, case.using):
            model(**case.inputs)
        return layers, hf.explain(model)


def _no_shift(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_arguments, "shifts", lambda model: False)


def _local_shift(patch: pytest.MonkeyPatch) -> None:
    _no_shift(patch)
    own_labels = shared_arguments.own_labels
    patch.setattr(
        shared_arguments,
        "own_labels",
        lambda shared: torch.nn.functional.pad(own_labels(shared)[:, 1:], (0, 1), value=-100),
    )


def _local_window(patch: pytest.MonkeyPatch) -> None:
    ring = override.ring_attention

    def local(query: Tensor, key: Tensor, value: Tensor, pattern: Any, **options: Any) -> Any:
        if isinstance(pattern, sr.SlidingWindow):
            return sr.attention(query, key, value, pattern, scale=options["scale"])
        return ring(query, key, value, pattern, **options)

    patch.setattr(override, "ring_attention", local)


def _local_padding(patch: pytest.MonkeyPatch) -> None:
    valid = masks.ModelMask.valid

    def of_first_rank(mask: Any, length: int) -> Tensor | None:
        whole = valid(mask, length)
        return None if whole is None else whole[:, torch.arange(length) % -(-length // 4)]

    patch.setattr(masks.ModelMask, "valid", of_first_rank)


def _local_positions(patch: pytest.MonkeyPatch) -> None:
    cut = parallel._cut

    def from_zero(*arguments: Any) -> Any:
        local, shared = cut(*arguments)
        return {**local, "position_ids": torch.arange(len(shared.tokens))[None]}, shared

    patch.setattr(parallel, "_cut", from_zero)


def _local_documents(patch: pytest.MonkeyPatch) -> None:
    cut = parallel._cut

    def of_one_row(*arguments: Any) -> Any:
        local, shared = cut(*arguments)
        shared.position_ids = torch.arange(shared.length)[None]
        return local, shared

    patch.setattr(parallel, "_cut", of_one_row)


def _local_mean(patch: pytest.MonkeyPatch) -> None:
    def local_mean(original: Any, scale: float) -> Any:
        def loss(logits: Tensor, labels: Tensor, **more: Any) -> Tensor:
            return original(logits, labels, shift_labels=labels, **more)

        loss.original = original  # type: ignore[attr-defined]
        return loss

    patch.setattr(parallel, "sharded_loss", local_mean)


def _no_scale(patch: pytest.MonkeyPatch) -> None:
    sharded_loss = parallel.sharded_loss
    patch.setattr(parallel, "sharded_loss", lambda original, scale: sharded_loss(original, 1.0))


def _no_scale_of_own_loss(patch: pytest.MonkeyPatch) -> None:
    with_loss = parallel.with_loss
    patch.setattr(parallel, "with_loss", lambda out, shared, scale: with_loss(out, shared, 1.0))


def _other_order(patch: pytest.MonkeyPatch) -> None:
    positions = hf.local_positions
    patch.setattr(hf, "local_positions", lambda model: positions(model).flip(0))


def _local_temperature(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(override, "QUERIES_BY_INDEX", ())


PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "labels are not shifted": _no_shift,
    "each rank shifts its own labels": _local_shift,
    "a window sees a rank's own keys only": _local_window,
    "padding is that of the first rank's tokens": _local_padding,
    "positions count from 0 on each rank": _local_positions,
    "documents are lost": _local_documents,
    "the loss is a mean over a rank's own labels": _local_mean,
    "the loss is not scaled": _no_scale,
    "the loss of BERT is not scaled": _no_scale_of_own_loss,
    "tokens are in another order": _other_order,
    "Llama 4 scales queries by local positions": _local_temperature,
}
"""Faults that a test plants in the library, by their names."""
