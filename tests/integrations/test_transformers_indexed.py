"""Models whose indexers choose keys for each query: exact under "sparsering", as under eager."""

import warnings

import pytest
import torch
from helpers.tensor_bytes import measure
from sharing_families import InFloat64
from torch import Tensor
from transformers_families import tiny

import sparsering as sr
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers import indexers
from sparsering.integrations.transformers.attention import attention_function
from sparsering.integrations.transformers.masks import mask_interface

BY_TOKEN = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
BY_ENTRY = ("deepseek_v4", "glm5_next", "qwen4_exp_text")
FAMILIES = (*BY_TOKEN, *BY_ENTRY, "minimax_m3_vl_text")
TOKENS = 24
PADDED = {
    "no padding": slice(0, 0),
    "left padding": slice(0, 7),
    "right padding": slice(TOKENS - 5, TOKENS),
}


def batch(padding: str = "no padding") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 61, (2, TOKENS), generator=generator)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, PADDED[padding]] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.fixture(autouse=True)
def choices_in_float32(monkeypatch):
    """Lets `top_tokens` convert scores to float32, which `InFloat64` would undo."""
    best = indexers.top_tokens

    def in_float32(*args, **options):
        with torch._C.DisableTorchFunction():
            return best(*args, **options)

    monkeypatch.setattr(indexers, "top_tokens", in_float32)


@pytest.fixture
def chosen(monkeypatch) -> list[tuple]:
    """Returns the arguments of each `SelectedBlocks` that is made, as they come."""
    found, listed = [], indexers.SelectedBlocks
    monkeypatch.setattr(
        indexers, "SelectedBlocks", lambda *args: found.append(args) or listed(*args)
    )
    return found


def run(model, implementation: str, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns the logits of real tokens, and the gradients of their sum of squares."""
    hf.register()
    model.set_attn_implementation(implementation)
    logits = model(**inputs, use_cache=False).logits
    if "attention_mask" in inputs:
        logits = logits[inputs["attention_mask"].bool()]
    used = [x for x in model.parameters() if x.requires_grad]
    grads = torch.autograd.grad(logits.square().sum(), used, allow_unused=True)
    return logits.detach(), [torch.zeros(()) if x is None else x for x in grads]


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_eager(family, padding, chosen):
    with InFloat64():
        model = tiny(family).train(False)
        inputs = batch(padding)
        wanted, by_eager = run(model, "eager", inputs)
        got, grads = run(model, "sparsering", inputs)
        assert chosen and all(x[0].shape[-1] * x[1] < TOKENS for x in chosen)  # the indexer chose
        assert wanted.std() > 1e-3
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
        for a, b in zip(grads, by_eager, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", (*BY_TOKEN, *BY_ENTRY))  # MiniMax-M3: as with left padding
def test_packed_documents_are_those_of_eager(family):
    with InFloat64():
        model = tiny(family)
        ids = torch.cat((torch.arange(9), torch.arange(15))).expand(2, TOKENS)
        inputs = {"input_ids": batch()["input_ids"], "position_ids": ids}
        wanted, by_eager = run(model, "eager", inputs)
        got, grads = run(model, "sparsering", inputs)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
        for a, b in zip(grads, by_eager, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family):
    model = tiny(family).train()
    wanted, grads = run(model, "sparsering", batch())
    model.activation_checkpointing_enable({"use_reentrant": False})
    got, again = run(model, "sparsering", batch())
    assert torch.equal(got, wanted)
    for a, b in zip(again, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_some_queries_at_a_time_choose_the_same_keys(family, monkeypatch):
    parts = []
    make = indexers.Rows.__init__
    monkeypatch.setattr(
        indexers.Rows, "__init__", lambda self, *args: parts.append(args) or make(self, *args)
    )
    monkeypatch.setattr(indexers, "_AT_A_TIME", 150)
    with InFloat64():
        model = tiny(family).train(False)
        inputs = batch("left padding")
        wanted, _ = run(model, "eager", inputs)
        assert not parts  # eager attention has the model's own code
        got, _ = run(model, "sparsering", inputs)
        assert parts or family in ("minimax_m3_vl_text", "qwen4_exp_text")
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", BY_TOKEN)
def test_memory_grows_with_the_tokens_not_with_their_pairs(family, monkeypatch):
    monkeypatch.setattr(indexers, "_AT_A_TIME", 1 << 14)
    model = tiny(family)
    hf.register()
    growth = {}
    for implementation in ("eager", "sparsering"):
        model.set_attn_implementation(implementation)
        short, long = (
            measure(lambda tokens=tokens: forward(model, tokens)).peak for tokens in (512, 1024)
        )
        growth[implementation] = long / short
    assert growth["eager"] > 3.5 and growth["sparsering"] < 2.2, growth


@torch.no_grad()
def forward(model, tokens: int) -> Tensor:
    return model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_the_family_s_own_cache(family):
    # MiniMax-M3 compares positions, which skip padding, with places of keys: a query behind padding
    # may choose padding alone, and eager then averages all keys
    padding = "left padding" if family in BY_TOKEN else "no padding"
    with InFloat64(), torch.no_grad():
        model = tiny(family).eval()
        tokens = {}
        for implementation in ("eager", "sparsering"):
            hf.register()
            model.set_attn_implementation(implementation)
            inputs = batch(padding)
            tokens[implementation] = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert torch.equal(*tokens.values())


def test_what_a_choice_of_keys_does_not_go_with_is_refused():
    with InFloat64(), torch.no_grad():
        model = tiny("deepseek_v32").eval()
        hf.register()
        model.set_attn_implementation("sparsering")
        with (
            hf.using(model, sr.Causal()),
            pytest.raises(NotImplementedError, match="indexer chooses keys needs the model's own"),
        ):
            model(**batch(), use_cache=False)


def test_the_text_model_of_glm5_next_gives_no_warning_of_input_ids():
    with InFloat64(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny("glm5_next").eval()
        hf.register()
        model.set_attn_implementation("sparsering")
        model.model.language_model(batch()["input_ids"])


@pytest.mark.parametrize(
    ("name", "shape"), [("indices", (2, 8, 2)), ("block_indices", (2, 1, 8, 2))]
)
def test_lists_for_a_layer_without_an_indexer_are_refused_by_name(name, shape):
    layer = tiny("llama").model.layers[0].self_attn
    states = torch.randn(2, 4, 8, 8)
    mask = mask_interface(2, 8, 8)
    given = {name: torch.zeros(shape, dtype=torch.int64)}
    with pytest.raises(NotImplementedError, match=f"takes {name} from a layer with an indexer"):
        attention_function(layer, states, states, states, mask, **given)


def test_lists_for_another_number_of_rows_are_refused():
    layer = tiny("deepseek_v32").model.layers[0].self_attn
    states = torch.randn(2, 4, 8, 8)
    lists = torch.zeros(3, 8, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="pattern is for 3 batch entries, got a query of 2"):
        attention_function(layer, states, states, states, mask_interface(2, 8, 8), indices=lists)
