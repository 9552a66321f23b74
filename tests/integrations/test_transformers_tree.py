"""A group of answers as one packed tree: the loss and gradients of its unpacked rows."""

import pytest
import torch
from parallel_training import full_precision
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import sparsering as sr
from sparsering.integrations import transformers as hf

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def rows() -> list[Tensor]:
    """Three answers to a prompt, and a second end of the third: a tree of three levels."""
    torch.manual_seed(1)
    prompt = torch.randint(97, (20,))
    answers = [torch.cat([prompt, torch.randint(97, (n,))]) for n in (7, 5, 9)]
    return [*answers, torch.cat([answers[2][:24], torch.randint(97, (6,))])]


def gradients(model: torch.nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("family", ["llama", "gemma 3"])
def test_loss_and_gradients_are_those_of_unpacked_rows(family):
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **WINDOWS)).double()
    tree = sr.pack_tree(rows())
    window = sr.Tree(tree.lengths, tree.parents, sr.SlidingWindow(7, 0))
    layers = {"sliding_attention": window, "full_attention": tree.pattern}
    with full_precision():
        alone = torch.zeros((), dtype=torch.float64)
        for row in rows():
            scores = model(row[None]).logits[0].log_softmax(-1)
            alone = alone - scores[:-1].gather(1, row[1:, None]).sum()
        with hf.using(model, tree.pattern if family == "llama" else layers):
            given = {"position_ids": tree.position_ids[None], "use_cache": False}
            logits = model(tree.tokens[None], **given).logits[0]
        nll = -logits.log_softmax(-1)[tree.previous, tree.tokens]
        packed = (tree.counts * nll)[tree.previous >= 0].sum()
        wanted, got = gradients(model, alone), gradients(model, packed)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=0)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * float(b.abs().max()))


@pytest.mark.parametrize("fault", ["siblings", "window by index", "depth", "counts"])
def test_a_planted_fault_changes_the_loss(fault):
    """Planted faults, each of which the equality above notices."""
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **WINDOWS)).double()
    tree = sr.pack_tree(rows())

    def loss(fault: str) -> Tensor:
        whole, window = tree.pattern, sr.Tree(tree.lengths, tree.parents, sr.SlidingWindow(7, 0))
        positions, counts = tree.position_ids, tree.counts
        if fault == "siblings":
            whole = sr.Causal()
        if fault == "window by index":
            window = whole & sr.SlidingWindow(7, 0)
        if fault == "depth":
            positions = positions + (tree.previous >= 19).long()
        if fault == "counts":
            counts = torch.ones_like(counts)
        with hf.using(model, {"sliding_attention": window, "full_attention": whole}):
            given = {"position_ids": positions[None], "use_cache": False}
            logits = model(tree.tokens[None], **given).logits[0]
        nll = -logits.log_softmax(-1)[tree.previous, tree.tokens]
        return (counts * nll)[tree.previous >= 0].sum()

    with torch.no_grad():
        assert abs(loss(fault) / loss("") - 1) > 1e-6
