"""The GRPO loss of `examples/train_answers.py` is that of unpacked rows, with its gradients."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_training import full_precision
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import sparsering as sr

FILE = Path(__file__).resolve().parents[2] / "examples" / "train_answers.py"
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"]
CLIP, BETA = 0.2, 0.04


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_answers", FILE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(family: str, seed: int) -> Any:
    torch.manual_seed(seed)
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=TYPES))
    return model.double()


def models_of(family: str) -> tuple[Any, Any, Any]:
    """The model, the one that sampled, and the reference: near, so that some ratios are clipped."""
    models = model_of(family, 0), model_of(family, 0), model_of(family, 0)
    generator = torch.Generator().manual_seed(1)
    for model, size in zip(models[1:], (0.03, 0.1), strict=True):
        for x in model.parameters():
            x.data += size * torch.randn(x.shape, generator=generator)
    return models


def groups() -> list[dict[str, Tensor]]:
    """Two prompts; the answers to the first are two reasonings of 9 tokens with three ends each.

    Ends have several lengths. One answer ends in its reasoning, and two are equal.
    """
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(2, 97, shape, generator=generator)

    reasonings = drawn(2, 9).repeat_interleave(3, 0)
    deep = torch.cat([reasonings, drawn(6, 7)], 1)
    deep[1] = deep[0]
    flat = drawn(3, 5)
    sizes = torch.tensor([14, 14, 16, 12, 4, 10]), torch.tensor([5, 1, 3])
    rewards = torch.tensor([1.0, 0.5, 0.0, 0.2, 0.9, 0.4]), torch.tensor([0.0, 1.0, 0.0])
    return [
        {
            "prompt_ids": drawn(n), "completion_ids": x.masked_fill(~real, 0),
            "completion_mask": real.long(), "rewards": r.double(),
        }
        for n, x, size, r in zip((20, 11), (deep, flat), sizes, rewards, strict=True)
        if (real := torch.arange(x.shape[1]) < size[:, None]).any()
    ]  # fmt: skip


def log_probs(model: Any, prompt: Tensor, answer: Tensor) -> Tensor:
    """Log-probabilities of an answer's tokens, from a row of its own and the model's own masks."""
    row = torch.cat([prompt, answer])
    scores = model(row[None], use_cache=False).logits[0].log_softmax(-1)
    return torch.stack([scores[t - 1, row[t]] for t in range(len(prompt), len(row))])


def unpacked_loss(models: tuple[Any, Any, Any], clipped: list[bool]) -> Tensor:
    """The loss token by token; notes in `clipped` which tokens' ratios are clipped."""
    of_answers = []
    for group in groups():
        rewards = group["rewards"].tolist()
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for i, reward in enumerate(rewards):
            answer = group["completion_ids"][i, : int(group["completion_mask"][i].sum())]
            new, old, reference = (log_probs(x, group["prompt_ids"], answer) for x in models)
            old, reference = old.detach(), reference.detach()
            advantage = (reward - mean) / (deviation + 1e-4)
            losses = []
            for t in range(len(answer)):
                ratio = torch.exp(new[t] - old[t])
                bounded = min(max(ratio, 1 - CLIP), 1 + CLIP)
                gain = min(ratio * advantage, bounded * advantage)
                clipped.append(bool(gain != ratio * advantage))
                log_ratio = reference[t] - new[t]
                losses.append(BETA * (torch.exp(log_ratio) - log_ratio - 1) - gain)
            of_answers.append(sum(losses) / len(losses))
    return sum(of_answers) / len(of_answers)


def packed_loss(example: Any, models: tuple[Any, Any, Any], batch: dict[str, Any]) -> Tensor:
    new = example.answer_log_probs(models[0], batch)
    with torch.no_grad():
        old, reference = (example.answer_log_probs(x, batch) for x in models[1:])
    return example.grpo_loss(new, old, reference, batch, CLIP, BETA)


@pytest.mark.parametrize("family", ["llama", "gemma 3", "mistral"])
def test_loss_and_gradients_are_those_of_unpacked_rows(example, family):
    models, clipped = models_of(family), list[bool]()
    batch = example.collate(groups())
    tree = batch["tree"]
    assert max(depths(tree)) == 3  # levels
    assert len(tree.tokens) < 0.5 * sum(map(len, tree.paths))
    with full_precision():
        wanted, got = unpacked_loss(models, clipped), packed_loss(example, models, batch)
        parameters = list(models[0].parameters())
        of_wanted, of_got = (torch.autograd.grad(x, parameters) for x in (wanted, got))
    assert 5 < sum(clipped) < len(clipped) - 5
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=0)
    for a, b in zip(of_got, of_wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * float(b.abs().max()))


def depths(tree: sr.PackedTree) -> list[int]:
    """The level of each node, 1 for a root."""
    levels: list[int] = []
    for parent in tree.parents:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    return levels


FAULTS = ["windows lost", "window of one more", "siblings", "prompt's loss", "padding's loss"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_the_loss(example, monkeypatch, fault):
    models, batch = models_of("gemma 3"), example.collate(groups())
    with torch.no_grad(), full_precision():
        right = packed_loss(example, models, batch)
        if fault == "windows lost":
            using = example.hf.using
            monkeypatch.setattr(example.hf, "using", lambda model, tree: using(model, tree.pattern))
        if fault == "window of one more":
            for model in models:
                model.config.sliding_window += 1
        if fault == "siblings":
            chain = tuple(range(-1, len(batch["tree"].parents) - 1))
            batch["tree"] = batch["tree"]._replace(parents=chain)
        if fault == "prompt's loss":
            whole = torch.nn.utils.rnn.pad_sequence(batch["tree"].paths, True, padding_value=-1)
            batch["places"], batch["real"] = whole.clamp(min=0), whole >= 0
        if fault == "padding's loss":
            batch["real"] = torch.ones_like(batch["real"])
        wrong = packed_loss(example, models, batch)
    assert abs(wrong - right) > 1e-6 * abs(right)
