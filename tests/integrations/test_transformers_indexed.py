"""Models whose indexers choose keys for each query: exact under "sparsering", as under eager."""

import re
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from helpers.tensor_bytes import measure
from helpers.thinned import slow_except
from indexed_caches import (
    BY_ENTRY,
    BY_TOKEN,
    FAMILIES,
    MINIMAX,
    TOKENS,
    choices_in_float32,
)
from sharing_families import InFloat64
from torch import Tensor
from transformers_families import tiny

import sparsering as sr
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers import families
from sparsering.integrations.transformers.call import chosen as module
from sparsering.integrations.transformers.call import rows
from sparsering.integrations.transformers.call.attention import attention_function
from sparsering.integrations.transformers.call.masks import mask_interface

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
def _choices_in_float32():
    with choices_in_float32():
        yield


@pytest.fixture
def chosen(monkeypatch) -> list[tuple]:
    """Returns the arguments of each `SelectedBlocks` that is made, as they come."""
    found, listed = [], module.SelectedBlocks
    monkeypatch.setattr(module, "SelectedBlocks", lambda *args: found.append(args) or listed(*args))
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


AS_EAGER = set(product(FAMILIES, PADDED)) - {(MINIMAX, "left padding")}  # see `assert_rows_alone`
SOME = {  # each family once; all with the longest padding have other tests of logits
    *(("axk2", "left padding"), ("deepseek_v32", "right padding"), ("deepseek_v4", "left padding")),
    *(("dots3_note_text", "no padding"), ("glm5_next", "left padding")),
    *(("glm_moe_dsa", "right padding"), ("hy_v4", "left padding"), (MINIMAX, "right padding")),
    *(("qwen4_exp_text", "right padding"), ("deepseek_v4", "right padding")),
}


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        pytest.param(*case, marks=() if case in SOME else pytest.mark.slow)
        for case in sorted(AS_EAGER)
    ],
)
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


@pytest.mark.parametrize("family", (*BY_TOKEN, *BY_ENTRY))  # MiniMax-M3: see below
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
    make = rows.Rows.__init__
    monkeypatch.setattr(
        rows.Rows, "__init__", lambda self, *args: parts.append(args) or make(self, *args)
    )
    monkeypatch.setattr(rows, "AT_A_TIME", 150)
    with InFloat64():
        model = tiny(family).train(False)
        inputs = batch("no padding" if family == MINIMAX else "left padding")
        wanted, _ = run(model, "eager", inputs)
        assert not parts  # eager attention has the model's own code
        got, _ = run(model, "sparsering", inputs)
        assert parts or family in (MINIMAX, "qwen4_exp_text")
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_other_products_inside_an_indexer_are_its_own(monkeypatch):
    """Only the keys that an indexer scores are in parts, whatever the shape of other products."""
    monkeypatch.setattr(rows, "AT_A_TIME", 1)
    model, products = tiny("deepseek_v32"), []
    query, key = torch.randn(2, 5, 3, 4), torch.randn(2, 1, 4, 6)

    def multiply(*_: object) -> None:
        products.append(torch.matmul(query, key))

    model.model.layers[0].self_attn.indexer.weights_proj.register_forward_hook(multiply)
    wanted = query @ key
    run(model, "sparsering", batch())
    assert products and all(type(x) is Tensor and torch.equal(x, wanted) for x in products)


def test_a_product_with_keys_in_parts_is_that_of_tensors(monkeypatch):
    query, key = torch.randn(2, 5, 3, 4).double(), torch.randn(2, 6, 4).double()
    keys = rows.KeysInParts(key.float()).transpose(-1, -2).double().unsqueeze(1)
    wanted = query @ key.float().double().mT[:, None]
    assert keys.shape == (2, 1, 4, 6) and keys.dtype == torch.float64 and keys.size(dim=3) == 6
    assert torch.equal(torch.matmul(query, keys), wanted)  # small: one tensor
    monkeypatch.setattr(rows, "AT_A_TIME", 2 * 3 * 6)  # a query at a time
    product = torch.matmul(query, keys)
    assert isinstance(product, rows.Rows) and len(product.parts()) == 5
    best, places = product.topk(2, dim=-1)
    for got, right in zip((best, places), wanted.topk(2, dim=-1), strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-12)
    one = torch.matmul(query[:, :1], keys)
    assert type(one) is Tensor and torch.allclose(one, wanted[:, :1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "family", slow_except(["deepseek_v32", "dots3_note_text", "hy_v4"], BY_TOKEN)
)
def test_memory_grows_with_the_tokens_not_with_their_pairs(family, monkeypatch):
    monkeypatch.setattr(rows, "AT_A_TIME", 1 << 12)
    model = tiny(family)
    hf.register()
    growth = {}
    for implementation in ("eager", "sparsering"):
        model.set_attn_implementation(implementation)
        short, long = (
            measure(lambda tokens=tokens: forward(model, tokens)).peak for tokens in (256, 512)
        )
        growth[implementation] = long / short
    assert growth["eager"] > 3.5 and growth["sparsering"] < 2.2, growth


@torch.no_grad()
def forward(model, tokens: int) -> Tensor:
    return model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_the_family_s_own_cache(family):
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


def rows_alone(model, rows: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns eager's logits of each row alone, and the sum of the gradients of `run`."""
    outcomes = [run(model, "eager", {"input_ids": row[None]}) for row in rows]
    grads = [sum(parts) for parts in zip(*(x[1] for x in outcomes), strict=True)]
    return [logits[0] for logits, _ in outcomes], grads


def assert_rows_alone(model, inputs: dict[str, Tensor], rows: list[Tensor]) -> None:
    """Compares with eager's rows alone: MiniMax-M3's blocks are places of a row under eager."""
    wanted, by_eager = rows_alone(model, rows)
    got, grads = run(model, "sparsering", inputs)
    got = got.flatten(0, -2)
    torch.testing.assert_close(got, torch.cat(wanted), rtol=0, atol=1e-10)
    for a, b in zip(grads, by_eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.covering(2)
@pytest.mark.parametrize("at_a_time", [1 << 22, 150])
@pytest.mark.parametrize("positions", ["places", "skip padding"])
@pytest.mark.parametrize("padding", [1, 4, 7, 15])  # blocks are of 4 tokens
def test_minimax_behind_padding_is_the_row_alone(padding, positions, at_a_time, monkeypatch):
    monkeypatch.setattr(rows, "AT_A_TIME", at_a_time)
    with InFloat64():
        model = tiny(MINIMAX).train(False)
        assert model.model.layers[0].self_attn.indexer.block_size == 4
        inputs = batch()
        inputs["attention_mask"][1, :padding] = 0
        if positions == "skip padding":
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        first, second = inputs["input_ids"]
        assert_rows_alone(model, inputs, [first, second[padding:]])


def test_minimax_with_a_hole_in_a_row_is_the_row_without_it():
    with InFloat64():
        model = tiny(MINIMAX).train(False)
        inputs = batch()
        mask = inputs["attention_mask"]
        mask[0, 6:9] = mask[1, 20:] = 0
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        rows = [
            tokens[real.bool()] for tokens, real in zip(*list(inputs.values())[:2], strict=True)
        ]
        assert_rows_alone(model, inputs, rows)


@pytest.mark.parametrize("lengths", [(9, 15), (4, 20), (5, 1, 11, 7)])
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_minimax_of_packed_documents_is_each_document_alone(lengths, by):
    with InFloat64():
        model = tiny(MINIMAX).train(False)
        row = batch()["input_ids"][:1]
        ids = torch.cat([torch.arange(n) for n in lengths])[None]
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        inputs = {"input_ids": row, "position_ids": ids}
        if by == "cu_seq_lens":  # the mask of transformers does not know them
            inputs |= {"attention_mask": torch.ones_like(row)}
            inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        assert_rows_alone(model, inputs, list(row[0].split(lengths)))


@pytest.mark.parametrize("family", ("deepseek_v32", "glm_moe_dsa"))
def test_documents_that_an_indexer_does_not_know_are_refused(family):
    with InFloat64(), torch.no_grad():
        model = tiny(family).eval()
        hf.register()
        model.set_attn_implementation("sparsering")
        ends = torch.tensor([0, 9, TOKENS]).int()
        inputs = {
            "input_ids": batch()["input_ids"][:1],
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
        }
        with pytest.raises(NotImplementedError, match="needs position_ids that restart in each"):
            model(**inputs, use_cache=False)
        ids = torch.cat((torch.arange(9), torch.arange(TOKENS - 9)))[None]
        alone = model(input_ids=inputs["input_ids"], position_ids=ids, use_cache=False).logits
        both = model(**inputs, position_ids=ids, use_cache=False).logits
        torch.testing.assert_close(both, alone, rtol=0, atol=1e-12)


def test_minimax_in_a_graph_refuses_padding(monkeypatch):
    layer = tiny(MINIMAX).model.layers[0].self_attn
    states = torch.randn(1, 4, 8, 8)
    real = torch.ones(1, 8, dtype=torch.int64)
    real[:, :3] = 0
    lists = torch.zeros(1, 2, 8, 2, dtype=torch.int64)  # as the model's own indexer makes
    with pytest.raises(NotImplementedError, match="counts blocks from a row's first place"):
        attention_function(
            layer, states, states[:, :2], states[:, :2],
            mask_interface(1, 8, 8, attention_mask=real), block_indices=lists,
        )  # fmt: skip


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


def test_every_class_of_transformers_that_chooses_keys_is_in_the_table():
    folder = Path(transformers.__file__).parent / "models"
    wanted = set()
    for file in folder.glob("*/modeling_*.py"):
        for part in re.split(r"^class ", file.read_text(), flags=re.MULTILINE)[1:]:
            name = re.match(r"\w+", part)[0]
            chooses = name.endswith(("Indexer", "IndexerScorer", "CSACompressor", "HCACompressor"))
            if chooses or "def build_attention_mask_from_topk" in part:
                wanted.add(name)
    assert len(wanted) > 10 and wanted == set(families.WRAPPED)
