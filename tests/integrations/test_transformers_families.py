"""Families of transformers run over ranks as in one process, or are refused by name.

Some families with their masks, and refusals in full. test_families_page.py runs every type.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.ring_workers import Workers
from helpers.thinned import slow_except
from sharing_families import InFloat64, Row, batches, share
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers_families import tiny

from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import masks, override
from sparsering.integrations.transformers.ranks import shared_arguments
from sparsering.patterns.positions import SlidingWindow

FAST = {
    "gemma2": ("causal", "softcap", "window"),
    "gpt_oss": ("causal", "sink", "window"),
    "llama4_text": ("causal", "chunks"),
    "gemma4_text": ("causal", "window"),  # its last layers take keys of others, and slice the mask
    "granitemoe_swa": ("causal", "sink", "window"),  # passes use_cache on by **kwargs
    "deepseek_v3": ("causal",),
    "modernbert (masked LM)": ("all keys", "window"),
}
REFUSED = {
    "jamba": "its layers of type linear_attention are not attention over one of its masks",
    "lfm3": "its layers of type conv are not attention over one of its masks",
}


def same_on_all(workers: Workers, family: str) -> Row:
    first, *others = workers.run(share, family, world=2)
    assert {x.result for x in others} == {first.result}, (first, others)
    return first


@pytest.mark.parametrize("family", slow_except(["gemma4_text", "llama4_text"], FAST))
def test_a_family_runs_as_in_one_process(four, family):
    assert same_on_all(four, family) == Row(family, FAST[family], "runs")


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_mixes_tokens_otherwise_is_refused(four, family):
    row = same_on_all(four, family)
    assert (row.result, row.why) == ("refused", REFUSED[family])


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("opt", "OPTDecoder derives positions from attention_mask, of which ranks have a part"),
        (
            "doge",
            "this model uses its attention mask as a tensor (device) inside its own attention",
        ),
        ("blt", "its config does not say how many layers it has"),
        ("mobilebert (masked LM)", "its embeddings join neighbouring tokens (trigram_input)"),
        ("layoutlm (masked LM)", "a model that ranks share needs masks of causality"),
        ("bloom", "it mixes tokens in its own classes, and does not use the attention interface"),
    ],
)
def test_what_ranks_cannot_share_is_refused(four, family, why):
    row = same_on_all(four, family)
    assert row.result == "refused"
    assert row.why.startswith(why)


def test_opt_runs_with_position_ids(four):
    row = four.run(share, "opt", 2, True, world=2)[0]
    assert row == Row("opt", ("causal",), "runs")


class Drafting(LlamaForCausalLM):
    """Has the argument of Gemma 4's assistants, for keys of the model that they draft for."""

    def forward(self, input_ids=None, position_ids=None, shared_kv_states=None, **more):
        raise AssertionError("nothing should be computed")


def test_a_model_that_takes_keys_of_another_is_refused():
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    model = Drafting(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    with pytest.raises(NotImplementedError, match="keys of another model"):
        hf.parallelize(model)


def last_logits(rank: int, keep: int) -> tuple[Tensor, Tensor]:
    """Returns Gemma 4's logits of the last tokens that are real: on eager, and on sparsering."""
    with InFloat64(), torch.no_grad():
        model = tiny("gemma4_text")
        batch = {k: x for k, x in batches()[0].items() if k != "labels"}
        real = batch["attention_mask"][:, -keep:].bool()
        wanted = model(**batch, logits_to_keep=keep, use_cache=False).logits[real]
        hf.register()
        model.set_attn_implementation("sparsering")
        return wanted, model(**batch, logits_to_keep=keep, use_cache=False).logits[real]


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_layers_that_slice_the_mask_to_the_last_queries(four, keep):
    """Gemma 4's layers without keys of their own compute only the tokens of `logits_to_keep`."""
    ((wanted, got),) = four.run(last_logits, keep, world=1)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    assert wanted.std() > 1e-2


@contextmanager
def planted(defect: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if defect == "temperatures by local index":
            patch.setattr(override, "QUERIES_BY_INDEX", ())
        elif defect == "padding is seen":
            patch.setattr(masks.ModelMask, "valid", lambda self, kv_len: None)
        elif defect == "the window is wider by one":
            patch.setattr(masks, "_of_distances", lambda kind: SlidingWindow(kind.left + 1))
        elif defect == "labels are not shifted":
            patch.setattr(shared_arguments, "shifts", lambda model: False)
        yield


def share_with(rank: int, family: str, defect: str) -> Row:
    with planted(defect):
        return share(rank, family)


@pytest.mark.parametrize(
    ("family", "defect"),
    [
        ("llama4_text", "temperatures by local index"),
        ("mistral", "padding is seen"),
        ("mistral", "the window is wider by one"),
        ("mistral", "labels are not shifted"),
    ],
)
def test_a_planted_defect_is_found(four, family, defect):
    rows = four.run(share_with, family, defect, world=2)
    assert [x.result for x in rows] == ["wrong", "wrong"], rows
