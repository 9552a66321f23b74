"""Plans a training step of a model of transformers: what fits on a device, and how fast it can be.

    python examples/plan_training_step.py --model config.json --tokens 128K --gpu H200 --ranks 4

The model's own code runs on the meta device, where tensors have no numbers, and autograd tells what
it saves for the backward pass. Its attention is replaced by one that saves what `attention` saves.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from sparsering import Causal, parse
from sparsering.integrations.transformers.config import heads_of, layer_patterns
from sparsering.patterns import Pattern
from sparsering.planning.estimate import Scenario, estimate_of
from sparsering.planning.fit import memory_of, usable
from sparsering.planning.machines import described, machine_of
from sparsering.planning.proposals import default_dtype
from sparsering.planning.seconds import timed
from sparsering.planning.sizes import parse_tokens, show_bytes, show_seconds

_NAME = "sparsering-planned"


class Saved(NamedTuple):
    """Bytes of a model's weights, and of what a forward pass keeps for its backward pass."""

    weights: int
    kept: int  # with the logits, and the loss's float32 copy of them
    layers: int  # of `kept`, what all layers need
    layer: int  # what running the largest layer again needs, with two gradients of its largest part
    inputs: int  # of the layers, which gradient checkpointing keeps
    logits: int  # of a float32 copy of the logits
    products: int  # numbers of the weight matrices that a token is multiplied with

    def peak(self, checkpointing: bool) -> int:
        """Most bytes beside weights, gradients and the optimizer: where the loss goes backward.

        With checkpointing perhaps where the last layer runs again.
        """
        if not checkpointing:
            return self.kept + 2 * self.logits
        kept = self.kept - self.layers + self.inputs
        return max(kept + 2 * self.logits, kept - self.logits + self.layer)


class _Attention(torch.autograd.Function):
    """Saves what `attention` saves, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out


def saved_by(config: Any, batch_size: int, tokens: int, dtype: torch.dtype) -> Saved:
    """Runs a model of a config on the meta device, with a loss: no memory, a second or two.

    Raises: NotImplementedError if the model's code does not run without numbers.
    """

    def planned(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
        return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, planned)
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=_NAME, dtype=dtype)
        ids = torch.zeros(batch_size, tokens, dtype=torch.int64)
    weights = {_memory(x)[0] for x in model.parameters()}
    found: dict[int, int] = {}  # bytes by memory, whose name is an address:
    alive: list[Tensor] = []  # so no tensor may go
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

    for layer in max((x for x in model.modules() if isinstance(x, nn.ModuleList)), key=len):
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave)
    try:
        with saved_tensors_hooks(keep, lambda x: x):
            out = model(input_ids=ids, attention_mask=ids + 1, labels=ids, use_cache=False)
    except RuntimeError as error:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be planned in {dtype}: its code does not run on the "
            f"meta device ({str(error).splitlines()[0]}); `sparsering try` measures its layers"
        ) from error
    keep(out.logits)
    tables = {_memory(x.weight)[0] for x in model.modules() if isinstance(x, nn.Embedding)}
    products = sum(x.numel() for x in model.parameters() if _memory(x)[0] not in tables)
    head = model.get_output_embeddings()
    if head is not None and _memory(head.weight)[0] in tables:
        products += head.weight.numel()
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", 1)
    for x in model.parameters():
        products -= int(x.numel() * (1 - chosen / len(x))) if x.dim() == 3 else 0
    sizes = [sum(x) for x in of_layers]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return Saved(
        sum(x.nbytes for x in model.parameters()), sum(found.values()), sum(sizes),
        sizes[largest] + 2 * max(of_layers[largest]), sum(inputs), 4 * out.logits.numel(), products,
    )  # fmt: skip


def _memory(x: Tensor) -> tuple[int, int]:
    """Returns what names a tensor's memory, and its bytes."""
    return x.untyped_storage()._cdata, x.untyped_storage().nbytes()


def step_screen(
    saved: Saved,
    patterns: Sequence[Pattern],
    scenario: Scenario,
    limit: int,
    *,
    replicas: int = 1,
    sharded: bool = False,
) -> str:
    """Returns the plan of a training step as text of at most 100 columns.

    Args:
        saved: of the model, for the tokens of one rank.
        patterns: one per layer.
        scenario: the attention call of a layer: tokens, heads, dtype, machine, and the ranks that
            share a row. Its batch is that of each group of ranks.
        limit: bytes of a device.
        replicas: groups of ranks, each with rows of its own.
        sharded: whether weights, gradients and states lie in parts on all devices (FSDP).
    """
    devices = scenario.ranks * replicas
    calls = {p: estimate_of(replace(scenario, pattern=p, backward=True)) for p in set(patterns)}
    call = max(calls.values(), key=lambda x: x.memory.workspace + x.memory.layout).memory
    weights = -(-saved.weights // devices) if sharded else saved.weights
    at_work = call.workspace + call.layout
    peaks = [3 * weights + max(saved.peak(x) + at_work, weights) for x in (False, True)]
    attention = sum(calls[p].seconds.value * n for p, n in Counter(patterns).items())
    tokens = scenario.batch_size * scenario.tokens
    rate = _rate(scenario)
    products = 6 * saved.products * tokens / scenario.ranks / rate
    seconds = attention + products
    on = "this machine" if scenario.machine is None else scenario.machine.name
    about, at_most = ("about", "about") if scenario.machine is None else ("at least", "at most")
    inputs = saved.kept - saved.layers + saved.inputs
    parts = {"weights, gradients and AdamW's states": 4 * weights, "activations": saved.kept}
    parts |= {"gradients of the logits": 2 * saved.logits, "attention at work": at_work}
    lines = [
        f"{len(patterns)} layers, {saved.weights // scenario.dtype.itemsize:,} parameters, "
        f"{str(scenario.dtype).removeprefix('torch.')}; a training step of {tokens * replicas:,} "
        f"tokens on {devices} x {on}, {scenario.ranks} to a row of {scenario.tokens:,}",
        "",
        f"weights     {show_bytes(weights)} a device, gradients as much, AdamW's states twice",
        f"activations {show_bytes(saved.kept)}, or {show_bytes(inputs)} with checkpointing",
        f"logits      {show_bytes(2 * saved.logits)} more, for two gradients in the loss",
        f"attention   {show_bytes(at_work)} at work, beside what it saves",
        f"mostly      {max(parts, key=parts.__getitem__)}",
    ]
    for name, peak in zip(("", " with checkpointing"), peaks, strict=True):
        fits = "fits" if peak <= usable(limit) else "does not fit"
        lines.append(f"peak        {show_bytes(peak)} of {show_bytes(limit)}{name}: {fits}")
    lines += [
        f"time        {about} {show_seconds(seconds)} a step, {attention / seconds:.0%} attention; "
        "checkpointing adds a third of the rest",
        f"speed       {at_most} {tokens * replicas / seconds:,.0f} tokens a second on all devices",
    ]
    return "\n".join(line for text in lines for line in wrap(text, 100) or [""])


def _rate(scenario: Scenario) -> float:
    """Returns FLOP/s of products: a named machine's peak, or what this one attains."""
    if scenario.machine is not None:
        return scenario.machine.peak(str(scenario.dtype).removeprefix("torch."))
    width = scenario.num_heads * scenario.head_dim
    x, weight = torch.randn(1024, width), torch.randn(width, width)
    x, weight = x.to(scenario.dtype), weight.to(scenario.dtype)
    seconds = min(timed(lambda: x @ weight, x.device) for _ in range(5))
    return 2 * x.numel() * width / seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan of a step; returns 0, or 2 after a line that says what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("pattern", nargs="?", help="of all layers, within causality (default: the model's own)")
    add("--model", required=True, help="a causal language model: its folder, config.json, or name")
    add("--tokens", required=True, help="tokens of a row, such as 65536, 64K or 1M")
    add("--batch-size", type=int, default=1, help="rows of each group of ranks")
    add("--ranks", type=int, default=1, help="devices that share a row")
    add("--replicas", type=int, default=1, help="groups of ranks, each with rows of its own")
    add("--fsdp", action="store_true", help="each device has a part of weights and states")
    add("--gpu", help="such as H200 (default: this machine)")
    add("--tflops", type=float, help="of another GPU: dense products, with --bandwidth, --memory")
    add("--bandwidth", type=float, metavar="GB/S", help="of its memory")
    add("--memory", help="of a device, such as 24GB")
    add("--dtype", choices=("float32", "bfloat16"), help="of weights, gradients and states")
    try:
        print(plan(parser.parse_args(argv)))
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"plan_training_step: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def plan(arguments: argparse.Namespace) -> str:
    """Returns the plan that the arguments ask for."""
    machine = machine_of(arguments.gpu)
    if arguments.tflops or arguments.bandwidth:
        machine = described(machine, arguments.tflops, arguments.bandwidth, arguments.memory)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else default_dtype(machine)
    config, tokens = AutoConfig.from_pretrained(arguments.model), parse_tokens(arguments.tokens)
    text = config.get_text_config(decoder=True)
    patterns = [Causal() if own is None else own for own in layer_patterns(text)]
    if arguments.pattern:
        patterns = [parse(arguments.pattern) & Causal()] * len(patterns)
    scenario = Scenario(
        patterns[0], tokens, *heads_of(text), dtype, arguments.batch_size, True, machine,
        arguments.ranks, "auto", None, None,
    )  # fmt: skip
    saved = saved_by(config, arguments.batch_size, -(-tokens // arguments.ranks), dtype)
    limit = memory_of(machine, arguments.memory)
    shares = {"replicas": arguments.replicas, "sharded": arguments.fsdp}
    return step_screen(saved, patterns, scenario, limit, **shares)


if __name__ == "__main__":
    sys.exit(main())
