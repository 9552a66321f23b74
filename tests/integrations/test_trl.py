"""Rows of prompts and answers as one tree, as trl's trainers hand them over.

`beside_trl.py` runs the trainers themselves.
"""

import sys

import pytest
import torch
from parallel_training import full_precision
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from sparsering.integrations import transformers as hf
from sparsering.integrations import trl

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def model_of(family: str):
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=types)
    return Gemma3ForCausalLM(config).double()


def padded(prompts: list[Tensor], answers: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left and answers on the right, and their mask: [B, N]."""
    left, right = max(map(len, prompts)), max(map(len, answers))
    ids = torch.zeros(len(prompts), left + right, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        row = slice(left - len(prompt), left + len(answer))
        ids[i, row], mask[i, row] = torch.cat((prompt, answer)), 1
    return ids, mask


def groups() -> tuple[list[Tensor], list[Tensor]]:
    """Two groups of three answers, whose rows are mixed; prompts that begin alike; one token."""
    a, b = torch.randint(1, 61, (9,)), torch.randint(1, 61, (7,))
    b[:4] = a[:4]
    prompts = [a, b, a, torch.tensor([5]), b, a, b]
    answers = [torch.randint(1, 61, (n,)) for n in (3, 6, 5, 2, 0, 1, 6)]
    answers[5] = answers[2][:1].clone()  # begins as another answer does
    return prompts, answers


@pytest.mark.parametrize("family", ["llama", "gemma"])
@full_precision()
def test_log_probabilities_and_gradients_are_those_of_rows_alone(family):
    prompts, answers = groups()
    ids, mask = padded(prompts, answers)
    rows, model = trl.labelled_tree(ids, mask.bool(), 6), model_of(family)
    # a, what b has besides, then a copy of a prompt's last token with each answer
    assert len(rows.tokens) == 8 + 2 + 7 + sum(map(len, answers))
    with hf.using(model, rows.tree):
        logits = model(
            rows.tokens[None], position_ids=rows.tree.position_ids[None], use_cache=False
        ).logits[0]
    found = logits.log_softmax(-1)[rows.places, rows.labels[rows.places]]
    alone = []
    for prompt, answer in zip(prompts, answers, strict=True):
        scores = model(torch.cat((prompt, answer))[None], use_cache=False).logits[0]
        scores = scores.log_softmax(-1)[len(prompt) - 1 : -1]
        alone.append(scores[torch.arange(len(answer)), answer])
    right = torch.cat(alone)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    assert int((rows.labels != trl.IGNORED).sum()) == len(right)
    direction = torch.randn_like(right)
    weights = list(model.parameters())
    ours, expected = (torch.autograd.grad(x, weights, direction) for x in (found, right))
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def test_a_row_without_a_prompt_is_refused():
    ids, mask = padded([torch.tensor([3]), torch.tensor([4])], [torch.tensor([5, 6])] * 2)
    mask[1, 0] = 0
    with pytest.raises(ValueError, match="prompts of at least one token, got a row without any"):
        trl.labelled_tree(ids, mask.bool(), 2)


def test_without_the_package_an_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"needs trl 1\.16 or newer; .*pip install trl"):
        trl.share_prompts(object())
