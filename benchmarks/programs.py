"""Measures where the time of whole programs goes: attention, other products, the rest, Python.

    python -m benchmarks.programs --out benchmarks/records
    python -m benchmarks.programs --out benchmarks/records --only packed

`programs.json` has a row for each program and each way to run it, in turns: ours, and what a user
would run instead. Programs: a training step of the demo's model; fine-tuning of a small Qwen3 over
windows; a slide encoder of width 768, forward and a step that stores block inputs alone; decoding
with a window and with a LongNet, beside one query over a fixed number of keys; a model whose
indexer chooses keys, its prompt and its tokens; training over packed documents, other ones in each
step.

`ms` is a median of up to three rounds. The shares come from one more run under torch's profiler:
operators by name, each without those that it calls. `layouts` are operators that compile patterns.
`python` is the time in which no operator runs: Python, autograd, and what the profiler adds.
`peak_bytes` are of the first run, beyond the memory before it. `error` is of logits, or of the
gradient of the first matrix, beside the peer's, where both compute the same. With `--before`,
`before_ms` is the time in another record, such as one of an earlier commit on the same machine.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparsering as sr
from sparsering.models import LongNetEncoder, LongNetLM

from .measure import (
    Row,
    give_back_freed,
    interleaved_times,
    memory,
    restart_peak,
    spread_of,
    write_record,
)

Calls = Mapping[str, Callable[[], Any]]  # by the name of the way
OURS = "sparsering"
_LAYOUTS = ("tiles", "table", "page", "transposed", "lay", "pieces")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "convolution")
SECONDS = 30.0  # about the most for the timed rounds of a program; one round always runs
KINDS = ("attention", "products", "elementwise", "layouts", "python")


def kind_of(operator: str) -> str:
    """Returns the part of a program that an operator of the profiler's list belongs to."""
    space, _, name = operator.rpartition("::")
    if space.endswith("sparsering_cpu") and name in _LAYOUTS:
        return "layouts"
    if "sparsering" in space or "scaled_dot_product" in name or "flash_attention" in name:
        return "attention"
    if name in _PRODUCTS or name.startswith("mkldnn"):
        return "products"
    return "elementwise"


def shares(call: Callable[[], Any]) -> dict[str, float]:
    """Runs a call under the profiler; returns the share of each kind in its wall time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        begin = time.perf_counter()
        call()
        whole = (time.perf_counter() - begin) * 1e6
    spent: Counter[str] = Counter()
    for event in profile.key_averages():
        if "::" in event.key:
            spent[kind_of(event.key)] += event.self_cpu_time_total
    spent["python"] = max(0.0, whole - sum(spent.values()))
    total = sum(spent.values())
    return {kind: spent[kind] / total for kind in KINDS}


def trained(model: Any, loss_of: Callable[[], Tensor]) -> Tensor:
    """Runs a training step without an update; returns the gradient of the first matrix.

    The loss alone often agrees to its last bit, whatever attention gave.
    """
    model.zero_grad(set_to_none=True)
    loss_of().backward()
    found: Tensor = next(x.grad for x in model.parameters() if x.dim() > 1)
    return found


def with_drawn_weights(model: Any) -> Any:
    """Draws all matrices anew: new blocks are the identity, and would hide what attention gives."""
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model


def demo(quick: bool) -> Iterator[tuple[str, Calls]]:
    """Yields the demo's training step: bytes, a causal LongNet; peer: dense causal attention."""
    length = 256 if quick else 8192
    torch.manual_seed(0)
    pattern = sr.LongNet((length // 16, length // 4, length), (1, 4, 16)) & sr.Causal()
    model = with_drawn_weights(LongNetLM(pattern, width=128, num_heads=2, num_layers=2))
    tokens = torch.randint(0, 256, (1, length))
    dense = partial(scaled_dot_product_attention, is_causal=True)

    def loss(attend: Any) -> Tensor:
        logits = model(tokens[:, :-1], attend=attend)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[0, 1:])

    yield (
        f"demo step, {length} bytes",
        {
            OURS: lambda: trained(model, lambda: loss(None)),
            "dense SDPA": lambda: trained(model, lambda: loss(dense)),
        },
    )


def qwen3(quick: bool) -> Iterator[tuple[str, Calls]]:
    """Yields fine-tuning of a small Qwen3 whose layers see a window; peer: transformers' sdpa."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sparsering.integrations import transformers as hf

    hf.register()
    length, layers = (256, 1) if quick else (16_384, 1)
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1024,
        use_sliding_window=True,
        sliding_window=length // 16,
        layer_types=["sliding_attention"] * layers,
    )
    tokens = torch.randint(0, 1024, (1, length))
    calls = {}
    for name in (OURS, "sdpa"):
        torch.manual_seed(0)
        # a model writes the name to its config, so each has a copy
        model = Qwen3ForCausalLM._from_config(deepcopy(config), attn_implementation=name).train()
        loss = lambda model=model: model(tokens, labels=tokens, use_cache=False).loss  # noqa: E731
        calls[name] = partial(trained, model, loss)
    yield f"Qwen3 step, windows of {length // 16}, {length} tokens", calls


def slides(quick: bool) -> Iterator[tuple[str, Calls]]:
    """Yields a slide encoder, 2 of its 12 blocks, forward and a step; peer: dense SDPA at 10K."""
    counts = (200,) if quick else (10_240, 45_056)
    width, heads = (64, 4) if quick else (768, 12)
    torch.manual_seed(0)
    pattern = sr.LongNet((1024, 5792, 32_768), (1, 4, 8))
    for count in counts:
        model = with_drawn_weights(
            LongNetEncoder(
                pattern, width=width, num_heads=heads, num_layers=2, checkpoint_layers=True
            )
        )
        tiles = torch.randn(1, count, width)

        def forward(attend: Any, model: Any = model, tiles: Tensor = tiles) -> Tensor:
            with torch.no_grad():
                return model(tiles, attend=attend)

        def step(attend: Any, model: Any = model, tiles: Tensor = tiles) -> Tensor:
            return trained(model, lambda: model(tiles, attend=attend).square().mean())

        ways = {OURS: None} | ({} if count > 20_000 else {"dense SDPA": dense_attention})
        yield f"slide of {count} tiles, forward", {x: partial(forward, a) for x, a in ways.items()}
        yield f"slide of {count} tiles, step", {x: partial(step, a) for x, a in ways.items()}


def dense_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends over all pairs."""
    return scaled_dot_product_attention(query, key, value)


def decoding(quick: bool) -> Iterator[tuple[str, Calls]]:
    """Yields tokens of a growing cache; peer: one query over a fixed number of keys, repeated."""
    length, count = (300, 16) if quick else (32_768, 256)
    window = length // 16
    patterns = {
        f"a window of {window}": sr.Causal() & sr.SlidingWindow(window - 1),
        "LongNet": sr.LongNet((window, window * 4, window * 16), (1, 4, 16)) & sr.Causal(),
    }
    for name, pattern in patterns.items():
        torch.manual_seed(0)
        key, value = torch.randn(2, 1, 8, length, 64)
        cache = sr.KVCache(pattern, 1, num_kv_heads=8, head_dim=64)
        cache.load(key, value)
        new = torch.randn(3, 1, 8, 1, 64).unbind()

        def grow(cache: Any = cache, new: Any = new) -> None:
            for _ in range(count):
                cache.attend(*new)

        def repeat(pattern: Any = pattern, keys: Any = (key, value), query: Any = new[0]) -> None:
            for _ in range(count):
                sr.attention(query, *keys, pattern)

        calls = {OURS: grow, "one length, repeated": repeat}
        yield f"{count} tokens behind {length}, {name}", calls


def indexed(quick: bool) -> Iterator[tuple[str, Calls]]:
    """Yields a small DeepSeek-V3.2, whose indexer chooses keys; peer: eager attention."""
    from transformers import DynamicCache

    from .comparisons.transformers import model_of

    length, count = (128, 4) if quick else (4096, 32)
    tokens = torch.randint(0, 200, (1, length))
    models = {x: model_of("deepseek_v32", x, length + count) for x in (OURS, "eager")}

    def prompt(model: Any) -> Tensor:
        with torch.no_grad():
            return model(
                tokens, past_key_values=DynamicCache(config=model.config), logits_to_keep=1
            ).logits

    yield f"DSA prompt of {length}", {x: partial(prompt, model) for x, model in models.items()}

    def decode(model: Any, cache: Any) -> Tensor:
        outs = []
        with torch.no_grad():
            for i in range(count):
                outs.append(model(tokens[:, i : i + 1], past_key_values=cache).logits)
        cache.crop(-count)
        return torch.cat(outs, 1)

    calls = {}
    for name, model in models.items():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens, past_key_values=cache, logits_to_keep=1)
        calls[name] = partial(decode, model, cache)
    yield f"DSA, {count} tokens behind {length}", calls


def packed(quick: bool) -> Iterator[tuple[str, Calls]]:
    """Yields steps over packed documents, new in each; peer: SDPA with a mask of all pairs."""
    length = 256 if quick else 4096
    torch.manual_seed(0)
    model = with_drawn_weights(LongNetLM(sr.Causal(), width=128, num_heads=2, num_layers=2))
    tokens = torch.randint(0, 256, (1, length))
    turns = {OURS: 0, "SDPA with a mask": 0}

    def ends_of(turn: int) -> Tensor:
        generator = torch.Generator().manual_seed(turn)
        cuts = torch.randint(1, length, (9,), generator=generator).unique()
        return torch.cat((cuts, torch.tensor([length])))

    def step(way: str) -> Tensor:
        ends = ends_of(turns[way])
        turns[way] += 1
        if way == OURS:
            lengths = tuple(torch.diff(ends, prepend=torch.tensor([0])).tolist())
            attend = partial(sr.attention, pattern=sr.Packed(lengths, sr.Causal()))
        else:
            number = torch.searchsorted(ends, torch.arange(length), right=True)
            mask = (number[:, None] == number) & torch.ones(length, length).tril().bool()
            attend = partial(scaled_dot_product_attention, attn_mask=mask)

        def loss() -> Tensor:
            logits = model(tokens, attend=attend)
            return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])

        return trained(model, loss)

    calls = {way: partial(step, way) for way in turns}
    yield f"packed step, {length} tokens, other documents in each", calls


PROGRAMS = {
    "demo": demo,
    "qwen3": qwen3,
    "slides": slides,
    "decoding": decoding,
    "indexed": indexed,
    "packed": packed,
}


def distance(result: Any, other: Any) -> float | None:
    """Largest difference of two results, relative to the largest number; None without any."""
    if result is None or other is None:
        return None
    one, two = (torch.as_tensor(x).double() for x in (result, other))
    return float((one - two).abs().max() / two.abs().max().clamp(min=1e-30))


def first_runs(calls: Calls) -> tuple[dict[str, Any], dict[str, int]]:
    """Runs each call once; returns the results, and the peak memory of each run."""
    results: dict[str, Any] = {}
    peaks = {}
    for way, call in calls.items():
        give_back_freed()
        before = restart_peak()
        results[way] = call()
        peaks[way] = memory("VmHWM") - before
    return results, peaks


def rows(name: str, quick: bool, rounds: int) -> list[Row]:
    """Measures one group of programs."""
    found: list[Row] = []
    for title, calls in PROGRAMS[name](quick):
        results, peaks = first_runs(calls)
        times = interleaved_times(calls, 1 if quick else rounds, warm=True, seconds=SECONDS)
        peer = next((way for way in calls if way != OURS), None)
        for way, call in calls.items():
            row: Row = {"program": title, "way": way, **spread_of(times[way])}
            row |= {"peak_bytes": peaks[way], **shares(call)}
            same = peer is not None and way == OURS and name in ("qwen3", "indexed", "packed")
            row["error"] = distance(results[OURS], results[peer]) if same and peer else None
            found.append(row)
    return found


def add_before(found: list[Row], path: Path) -> None:
    """Adds the times of a record of an earlier commit, which ran on the same machine."""
    before = json.loads(path.read_text())
    times = {(row["program"], row["way"]): row["ms"] for row in before["rows"]}
    for row in found:
        row["before_ms"] = times.get((row["program"], row["way"]))
        row["before_commit"] = before["environment"]["commit"]


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--only", choices=PROGRAMS, help="one group of programs")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try it out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--before", type=Path, help="programs.json of an earlier commit on this machine"
    )
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(PROGRAMS)
    results: list[Row] = []
    for name in names:
        results += rows(name, arguments.quick, arguments.rounds)
        if arguments.before:
            add_before(results, arguments.before)
        write_record(arguments.out, "programs", results)  # what ran stays if a later group fails


if __name__ == "__main__":
    main()
