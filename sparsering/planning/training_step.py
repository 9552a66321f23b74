"""Plans a training step of a whole model: what fits on a device, and how fast it can be.

    planned = ModelOutline("LongNetEncoder", patterns, heads, kv_heads, head_dim, saved)
    print(step_screen(planned, scenario, limit))

The model's own code runs on the meta device, where tensors have no numbers, and autograd tells what
it saves for the backward pass. Its attention is replaced by one that saves what `attention` saves.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from textwrap import wrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..ground.commands import sparsering
from ..ground.turns import timed
from ..patterns.algebra import Pattern
from .estimate import Scenario, estimate_of
from .fit import about_largest, usable
from .sizes import show_bytes, show_seconds

MOST_SEARCHED = 1 << 22
"""Most tokens of a row that are planned in a search; longer rows are extrapolated."""


class ModelBytes(NamedTuple):
    """Bytes of a model's weights, and of what a forward pass keeps for its backward pass."""

    weights: int
    kept: int  # all that is kept, with the model's result and the loss's copy of the logits
    layers: int  # the part of `kept` that is kept inside layers
    layer: int  # the part of `layers` that belongs to the largest layer
    gradients: int  # twice the largest tensor that this layer keeps, for two gradients at once
    inputs: int  # the inputs of all layers, which gradient checkpointing keeps instead of `layers`
    logits: int  # a float32 copy of the logits that exist at once; 0 without logits
    products: int  # not bytes: how many numbers of weight matrices each token is multiplied with

    def peak(self, checkpointing: bool) -> int:
        """Most bytes beside weights, their gradients and the optimizer's states.

        The peak is in the backward pass of the loss, or in that of the last layer, which with
        checkpointing runs again first.
        """
        kept = self.stored(checkpointing)
        again = self.layer if checkpointing else 0
        return max(kept + 2 * self.logits, kept - self.logits + again + self.gradients)

    def stored(self, checkpointing: bool) -> int:
        """Bytes of activations that the forward pass stores for the backward pass."""
        return self.kept - self.layers + self.inputs if checkpointing else self.kept


class ModelOutline(NamedTuple):
    """A model as planning sees it: its patterns, its heads, and the bytes that autograd saves."""

    name: str
    patterns: Sequence[Pattern]  # one per layer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # maps (batch size, tokens, dtype) to the bytes of the model and of what a step saves
    saved: Callable[[int, int, torch.dtype], ModelBytes]


class _Attention(torch.autograd.Function):
    """Stands in for attention on the meta device: saves the same tensors but computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out


def planned_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Stands in for `attention` on the meta device: same shapes, same saved tensors, no values."""
    out: Tensor = _Attention.apply(query, key, value)
    return out


def saved_by(
    model: nn.Module,
    layers: nn.ModuleList,
    run: Callable[[], Tensor],
    *,
    logits: int = 0,
    products: int | None = None,
) -> ModelBytes:
    """Runs a model on the meta device once, and counts the bytes that autograd saves.

    Args:
        model: a model on the meta device, whose attention is `planned_attention`.
        layers: its transformer layers.
        run: runs the model with its loss; returns a tensor that lives until backward, such as the
            logits.
        logits: bytes of a float32 copy of the logits that exist at once.
        products: numbers of weight matrices that a token is multiplied with; default all.

    Raises: NotImplementedError if the model's code does not run without numbers.
    """
    weights = {_memory(x)[0] for x in model.parameters()}
    found: dict[int, int] = {}  # bytes of each memory, by its address
    alive: list[Tensor] = []  # holds the tensors, so that no address is used a second time
    before: list[int] = []
    of_layers: list[list[int]] = []
    inputs: list[int] = []

    def keep(x: Tensor) -> Tensor:
        memory, size = _memory(x)
        if memory not in weights:
            found.setdefault(memory, size)
            alive.append(x)
        return x

    def enter(_: Any, given: Any, named: Any) -> None:
        inputs.append((given[0] if given else named["hidden_states"]).nbytes)
        before.append(len(found))

    def leave(*_: Any) -> None:
        of_layers.append(list(found.values())[before[-1] :])

    for layer in layers:
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave)
    try:
        with saved_tensors_hooks(keep, lambda x: x):
            keep(run())
    except RuntimeError as error:
        dtype = next(model.parameters()).dtype
        raise NotImplementedError(
            f"{type(model).__name__} cannot be planned in {dtype}: its code does not run on the "
            f"meta device ({str(error).splitlines()[0]}); {sparsering('try')} measures its layers"
        ) from error
    sizes = [sum(x) for x in of_layers]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return ModelBytes(
        weights=sum(x.nbytes for x in model.parameters()),
        kept=sum(found.values()),
        layers=sum(sizes),
        layer=sizes[largest],
        gradients=2 * max(of_layers[largest]),
        inputs=sum(inputs),
        logits=logits,
        products=sum(x.numel() for x in model.parameters()) if products is None else products,
    )


def _memory(x: Tensor) -> tuple[int, int]:
    """Returns an id of the memory that a tensor uses (views share it), and the memory's bytes."""
    return x.untyped_storage()._cdata, x.untyped_storage().nbytes()


def step_screen(
    planned: ModelOutline,
    scenario: Scenario,
    limit: int,
    *,
    replicas: int = 1,
    sharded: bool = False,
) -> str:
    """Returns a plan of one training step as text: memory by purpose, time and tokens per second.

    Args:
        planned: the model.
        scenario: the attention call of a layer: tokens, heads, dtype, machine, and the ranks that
            share a row. Its batch size is that of each group of ranks.
        limit: bytes of a device.
        replicas: groups of ranks, each with rows of its own.
        sharded: whether weights, gradients and states lie in parts on all devices (FSDP).
    """
    devices = scenario.ranks * replicas
    step = _step_of(planned, scenario, devices if sharded else 1)
    saved, weights, patterns = step.saved, step.weights, planned.patterns
    attention = sum(step.seconds[p] * n for p, n in Counter(patterns).items())
    tokens = scenario.batch_size * scenario.tokens
    seconds = attention + 6 * saved.products * tokens / scenario.ranks / _rate(scenario)
    about, at_most = ("about", "about") if scenario.machine is None else ("at least", "at most")
    parts = {"weights, gradients and AdamW's states": 4 * weights, "activations": saved.kept}
    parts |= {"gradients of the logits": 2 * saved.logits, "attention at work": step.at_work}
    lines = [
        f"{_model_text(planned, saved, scenario)}; a training step of {tokens * replicas:,} "
        f"tokens on {_devices(scenario, devices)}, {scenario.ranks} to a row of "
        f"{scenario.tokens:,}",
        "",
        f"weights     {show_bytes(weights)} a device, gradients as much, AdamW's states twice",
        f"activations {show_bytes(saved.stored(False))}, or {show_bytes(saved.stored(True))} with "
        "checkpointing",
        f"logits      {show_bytes(2 * saved.logits)} more, for two gradients in the loss",
        f"attention   {show_bytes(step.at_work)} at work, beside what it saves",
        f"mostly      {max(parts, key=parts.__getitem__)}",
    ]
    for name, checkpointing in (("", False), (" with checkpointing", True)):
        peak = step.peak(checkpointing)
        fits = "fits" if peak <= usable(limit) else "does not fit"
        lines.append(f"peak        {show_bytes(peak)} of {show_bytes(limit)}{name}: {fits}")
    lines += [
        f"time        {about} {show_seconds(seconds)} a step, {attention / seconds:.0%} attention; "
        "checkpointing adds a third of the rest",
        f"speed       {at_most} {tokens * replicas / seconds:,.0f} tokens a second on all devices",
    ]
    return _in_columns(lines)


def longest_row_screen(
    planned: ModelOutline,
    scenario: Scenario,
    limit: int,
    *,
    replicas: int = 1,
    sharded: bool = False,
) -> str:
    """Returns how many tokens a row can have in training, with and without checkpointing, as text.

    The arguments are those of `step_screen`; the tokens of `scenario` are not used.
    """
    devices = scenario.ranks * replicas
    most = [
        longest_row(planned, scenario, limit, checkpointing=x, parts=devices if sharded else 1)
        for x in (False, True)
    ]
    saved = planned.saved(scenario.batch_size, 128, scenario.dtype)
    weights = -(-saved.weights // devices) if sharded else saved.weights
    said = [f"about {x:,} tokens" if x else "none: weights and states alone fill it" for x in most]
    return _in_columns(
        [
            f"{_model_text(planned, saved, scenario)}; the longest row that trains in "
            f"{show_bytes(limit)} a device, on {_devices(scenario, devices)}, {scenario.ranks} to "
            f"a row, batch {scenario.batch_size}",
            "",
            f"weights     {show_bytes(weights)} a device, gradients as much, AdamW's states twice",
            f"longest     {said[0]}",
            f"            {said[1]}, with checkpointing",
            "",
            "with --tokens: bytes by part, and bounds of the time",
        ]
    )


def longest_row(
    planned: ModelOutline,
    scenario: Scenario,
    limit: int,
    *,
    checkpointing: bool,
    parts: int = 1,
) -> int:
    """Returns about how many tokens a row may have so that training fits in `limit` bytes a device.

    The result has two digits, rounded down. `parts` devices share the weights and states.
    """
    # the choice among shardings takes far longer than a plan, and changes the peak little
    sharding = "contiguous" if scenario.sharding == "auto" else scenario.sharding

    @cache
    def peak(tokens: int) -> int:
        one = replace(scenario, tokens=tokens, sharding=sharding)
        return _step_of(planned, one, parts).peak(checkpointing)

    room = usable(limit)
    found = about_largest(peak, room, 4096 * scenario.ranks, MOST_SEARCHED)
    unit = 10 ** max(0, len(str(found)) - 2)
    found = found // unit * unit
    while 0 < found <= MOST_SEARCHED and peak(found) > room:  # the search is exact to 3%
        found -= unit
    return max(0, found)


class _Step(NamedTuple):
    """Bytes that one device needs for a training step, and the seconds of its attention."""

    saved: ModelBytes
    weights: int  # bytes of weights on a device
    at_work: int  # bytes of workspace and layout of the attention call that has most
    seconds: dict[Pattern, float]  # by pattern, the time of one layer's attention

    def peak(self, checkpointing: bool) -> int:
        """Most bytes of a device: weights, AdamW's two states, and what the busiest moment adds.

        Gradients of weights appear while activations are freed. There are none when the backward
        pass begins; all of them exist when it ends in the first layer.
        """
        first = self.saved.peak(checkpointing) + self.at_work
        last = self.weights + self.saved.layer + self.saved.gradients + self.at_work
        return 3 * self.weights + max(first, last)


def _step_of(planned: ModelOutline, scenario: Scenario, parts: int) -> _Step:
    """Plans a step on one device; weights, gradients and states are split over `parts` devices."""
    saved = planned.saved(
        scenario.batch_size, -(-scenario.tokens // scenario.ranks), scenario.dtype
    )
    calls = {
        p: estimate_of(replace(scenario, pattern=p, backward=True)) for p in set(planned.patterns)
    }
    return _Step(
        saved=saved,
        weights=-(-saved.weights // parts),
        at_work=max(x.memory.workspace + x.memory.layout for x in calls.values()),
        seconds={p: x.seconds.value for p, x in calls.items()},
    )


def _model_text(planned: ModelOutline, saved: ModelBytes, scenario: Scenario) -> str:
    """Describes a model in a line: its name, layers, number of parameters and dtype."""
    return (
        f"{planned.name}, {len(planned.patterns)} layers, "
        f"{saved.weights // scenario.dtype.itemsize:,} parameters, "
        f"{str(scenario.dtype).removeprefix('torch.')}"
    )


def _devices(scenario: Scenario, number: int) -> str:
    return f"{number} x {'this machine' if scenario.machine is None else scenario.machine.name}"


def _in_columns(lines: list[str]) -> str:
    return "\n".join(
        line for text in lines for line in wrap(text, 100, replace_whitespace=False) or [""]
    )


def _rate(scenario: Scenario) -> float:
    """Returns the FLOP/s of matrix products: a named machine's peak, or measured on this one."""
    if scenario.machine is not None:
        return scenario.machine.peak(str(scenario.dtype).removeprefix("torch."))
    width = scenario.num_heads * scenario.head_dim
    x, weight = torch.randn(1024, width), torch.randn(width, width)
    x, weight = x.to(scenario.dtype), weight.to(scenario.dtype)
    seconds = min(timed(lambda: x @ weight, x.device) for _ in range(5))
    return 2 * x.numel() * width / seconds
