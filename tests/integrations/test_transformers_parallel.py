"""`parallelize`: ranks compute together what one process computes, to 1e-10 in float64."""

import warnings

import pytest
import torch
from helpers.forked import run
from helpers.ring_workers import workers_of
from helpers.thinned import thinned
from parallel_cases import BUILDERS, PLANTS, Case, alone, batch, check, pairs, share, traffic
from torch import Tensor
from transformers_models import tokens

import sparsering as sr
from sparsering.integrations import transformers as hf

eight = workers_of(8)

SHARDINGS = ("contiguous", "zigzag", "balanced", "auto", "chunks:1,0,3,2,0,3")


def of_head(family: str, inputs: dict) -> dict:
    """Makes labels fit the head: there are only 5 classes of tokens."""
    if not family.endswith("-tokens"):
        return inputs
    labels = inputs["labels"]
    return {**inputs, "labels": torch.where(labels < 0, labels, labels % 5)}


BATCHES = {
    "whole": batch(23),
    "padded": batch(23, left=(4, 0), right=(2, 5)),
    "shorter-than-ranks": batch(3),
}


@pytest.mark.parametrize(("family", "name"), thinned(9, BUILDERS, BATCHES))
def test_loss_logits_and_gradients_are_those_of_one_process(four, family, name):
    check(four, Case(family, of_head(family, BATCHES[name])), 4)


@pytest.mark.parametrize(
    ("world", "length", "loss"), thinned(6, [1, 2, 3], [1, 2, 16, 23], ["mean", "share"])
)
def test_lengths_that_ranks_do_not_divide(four, world, length, loss):
    inputs = batch(length)
    inputs["labels"] = None if length == 1 else inputs["input_ids"]
    check(four, Case("mistral", inputs, loss=loss), world)


def test_ranks_are_forked_from_a_process_that_has_imported_the_models():
    found = run("import sys; print('parallel_cases' in sys.modules, 'transformers' in sys.modules)")
    assert found.stdout == "True True\n", "each rank imports transformers, for seconds"


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILDERS)
def test_eight_ranks(eight, family):
    for length, padding in ((41, {}), (41, {"left": (9, 0), "right": (0, 30)}), (5, {})):
        check(eight, Case(family, of_head(family, batch(length, **padding))), 8)


@pytest.mark.parametrize(
    "family", thinned(5, ["llama", "gemma2", "gpt-oss", "llama4", "modernbert-mlm"])
)
def test_float32(four, family):
    case = Case(family, batch(23, left=(4, 0), right=(2, 5)), dtype=torch.float32)
    check(four, case, 4)


PADDING = {
    "left": {"left": (7, 0)},
    "right": {"right": (0, 7)},
    "both": {"left": (12, 3), "right": (6, 0)},
    "first-rank-has-padding-only": {"left": (6, 6)},
    "last-ranks-have-padding-only": {"right": (18, 18)},
}


@pytest.mark.parametrize(("name", "family"), thinned(6, PADDING, ["gemma3", "llama4", "bert-mlm"]))
def test_padding(four, family, name):
    inputs = batch(24, **PADDING[name])
    check(four, Case(family, inputs, sharding="contiguous"), 4)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    if family != "bert-mlm":
        check(four, Case(family, {**inputs, "position_ids": positions}), 4)


def test_a_label_that_padding_predicts(four):
    inputs = batch(23, left=(6, 0))
    inputs["labels"] = inputs["input_ids"]
    check(four, Case("llama", inputs, implementation="sparsering"), 4)


def warnings_of(rank: int, case: Case, world: int) -> list[str]:
    """Returns the warnings of packed documents; of one process, if world is 0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        share(rank, case, world) if world else alone(case)
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if text.startswith("position_ids restart")]


def restarting(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize(
    ("family", "sharding"), thinned(8, ["mistral", "gemma2", "gpt2", "llama4"], SHARDINGS)
)
def test_packed_documents_by_position_ids(four, family, sharding):
    for positions in (restarting(9, 1, 10, 5), torch.cat((restarting(12, 13), restarting(20, 5)))):
        inputs = {**batch(25), "position_ids": positions}
        check(four, Case(family, inputs, sharding=sharding), 4)


def test_packed_documents_by_cu_seq_lens(four):
    inputs = batch(25, rows=1)
    ends = torch.tensor([0, 9, 10, 20, 25], dtype=torch.int32)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([9, 1, 10, 5]))
    mask = (ids[:, None] == ids) & torch.ones(25, 25, dtype=torch.bool).tril()
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 10, "max_length_k": 10}
    for more in ({}, {"position_ids": restarting(9, 1, 10, 5)}):
        wanted = {**inputs, **more, "attention_mask": pairs(mask)}
        given |= {"seq_idx": ids[None]} if more else {}  # as trl passes them
        check(four, Case("llama", {**inputs, **more, **given}, wanted), 4)


@pytest.mark.parametrize(
    "family", thinned(4, ["llama", "modernbert-mlm", "modernbert-sparse", "bert-tokens"])
)
def test_labels_that_do_not_count(four, family):
    inputs = of_head(family, batch(24))
    labels = inputs["labels"].clone()
    labels[:, 6:13] = -100  # of rank 1 all, also after the shift
    results = check(four, Case(family, {**inputs, "labels": labels}, sharding="contiguous"), 4)
    assert results[1]["own loss"] == 0 and results[0]["own loss"] > 0
    if family == "modernbert-sparse":
        counts = [len(result["logits"]) for result in results]
        assert counts == [int((labels[:, i : i + 6] >= 0).sum()) for i in (0, 6, 12, 18)]


COUNTS = {"int": 11, "tensor": torch.tensor(11), "float": torch.tensor(50.0)}


@pytest.mark.parametrize(
    ("family", "count", "loss"),
    thinned(7, ["llama", "bert-mlm", "modernbert-mlm", "gpt2-tokens"], COUNTS, ["mean", "share"]),
)
def test_num_items_in_batch(four, family, count, loss):
    inputs = {**of_head(family, batch(23)), "num_items_in_batch": COUNTS[count]}
    check(four, Case(family, inputs, loss=loss), 4)


def test_sparse_prediction_that_ignores_another_label_is_refused():
    model = BUILDERS["modernbert-sparse"](sparse_pred_ignore_index=-1)
    with pytest.raises(NotImplementedError, match="sparse_pred_ignore_index other than -100"):
        hf.parallelize(model)


def test_shift_labels(four):
    inputs = batch(23)
    shifted = tokens(2, 23, seed=3)
    shifted[0, 4:9] = -100
    for implementation in ("eager", "sparsering"):
        given = {**inputs, "shift_labels": shifted}
        check(four, Case("llama", given, implementation=implementation), 4)
        del given["labels"]  # without them, a model computes no loss
        check(four, Case("llama", given, implementation=implementation), 4)


@pytest.mark.parametrize("family", thinned(3, ["llama", "modernbert-mlm", "gpt2-tokens"]))
def test_another_label_that_does_not_count(four, family):
    for length in (23, 3):
        inputs = of_head(family, batch(length))
        inputs["labels"] = inputs["labels"].clamp(min=0)
        check(four, Case(family, {**inputs, "ignore_index": 0}), 4)


def test_inputs_embeds_and_their_gradient(four):
    for family, length in (("llama", 23), ("gemma3", 23), ("bert-mlm", 23), ("llama", 3)):
        inputs = batch(length)
        del inputs["input_ids"]
        embeds = torch.randn(2, length, 32, dtype=torch.float64)
        results = check(four, Case(family, {**inputs, "inputs_embeds": embeds}), 4)
        assert results[0]["gradients"]["inputs_embeds"].any(-1)[:, : length - 1].all()


@pytest.mark.parametrize("family", thinned(3, ["bert-mlm", "bert-tokens", "gpt2"]))
def test_token_type_ids(four, family):
    kinds = torch.arange(23).expand(2, -1) // 7 % 2
    check(four, Case(family, {**of_head(family, batch(23)), "token_type_ids": kinds}), 4)


def counts(pattern: sr.Pattern, length: int = 24) -> Tensor:
    return pattern.to_dense(length, num_heads=4, num_kv_heads=2)


PATTERNS = {
    "window": sr.SlidingWindow(3),
    "window-and-sinks": sr.SlidingWindow(3) | sr.GlobalTokens(2, rows=False),
    "longnet": sr.LongNet((4, 8), (1, 2)),
    "blocks": sr.BlockWindow(1, 3),
    "documents": sr.Documents((10, 9, 5)),
}


@pytest.mark.parametrize(("name", "sharding"), thinned(7, PATTERNS, SHARDINGS))
def test_patterns_of_apply(four, name, sharding):
    pattern, inputs = PATTERNS[name], batch(24)
    wanted = {**inputs, "attention_mask": pairs(counts(pattern & sr.Causal()))}
    check(four, Case("llama", inputs, wanted, apply=pattern, sharding=sharding), 4)


@pytest.mark.parametrize(
    ("name", "family"),
    thinned(5, [name for name in PATTERNS if name != "documents"], ["llama", "gemma3"]),
)
def test_patterns_of_apply_within_padding_and_documents(four, name, family):
    for inputs in (
        batch(24, left=(5, 0), right=(0, 3)),
        {**batch(24), "position_ids": restarting(9, 1, 10, 4)},
    ):
        case = Case(family, inputs, apply=PATTERNS[name], implementation="sparsering")
        check(four, case, 4)


USED = {
    **PATTERNS,
    "causal-documents": sr.Causal() & sr.Documents((10, 9, 5)),
    "everything": sr.Full(),
    "per-batch": sr.Causal() & sr.KeyMask(torch.arange(24) % torch.tensor([[5], [7]]) != 3),
    "lengths": sr.Causal() & sr.KeyPadding((24, 17)),
    "per-head": sr.Causal()
    & sr.Blocks(torch.rand(4, 6, 6).round().bool() | torch.eye(6).bool(), 4),
}


@pytest.mark.parametrize(("name", "sharding"), thinned(10, USED, SHARDINGS))
def test_patterns_of_using(four, name, sharding):
    pattern, inputs = USED[name], batch(24)
    visible = pairs(counts(pattern))
    if visible.shape[1] == 2:
        visible = visible.repeat_interleave(2, 1)
    case = Case("llama", inputs, {**inputs, "attention_mask": visible}, sharding=sharding)
    case.using = pattern
    check(four, case, 4)


def test_using_replaces_padding_and_documents_in_layers_that_it_names(four):
    full = {"full_attention": sr.SlidingWindow(3, 2)}
    padded = {**batch(24), "attention_mask": batch(24, left=(5, 0))["attention_mask"]}
    packed = {**batch(24), "position_ids": restarting(9, 15)}
    for inputs, pattern in ((padded, full), (packed, full), (packed, {1: sr.Full(), **full})):
        check(four, Case("gemma2", inputs, using=pattern, implementation="sparsering"), 4)


@pytest.mark.parametrize("family", ["gpt-oss", "modernbert-mlm"])
def test_documents_of_a_family_that_ignores_them(four, family):
    inputs = {**batch(25), "position_ids": restarting(9, 1, 10, 5)}
    check(four, Case(family, inputs, {**inputs}, implementation="sparsering"), 4)


def test_packing_that_is_lost_causes_the_warning_of_one_process(four):
    inputs = {**batch(24), "position_ids": restarting(9, 15)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    case = Case("gpt-oss", inputs, implementation="sparsering")
    wanted = warnings_of(0, case, 0)
    assert wanted
    assert four.run(warnings_of, case, 4, world=4) == [wanted] * 4
    case.using = sr.Causal() & sr.Documents((9, 15))
    assert four.run(warnings_of, case, 4, world=4) == [[]] * 4


@pytest.mark.parametrize(
    ("family", "sharding"), thinned(7, ["gemma3", "llama4", "gpt2", "modernbert-mlm"], SHARDINGS)
)
def test_shardings(four, family, sharding):
    check(four, Case(family, batch(26, left=(3, 0)), sharding=sharding), 4)


@pytest.mark.parametrize(
    ("family", "length"),
    thinned(5, ["llama", "bert-mlm", "gpt-oss", "modernbert-mlm", "gpt2-tokens"], [23, 3]),
)
def test_tuples_and_hidden_states(four, family, length):
    inputs = of_head(family, batch(length))
    results = check(four, Case(family, {**inputs, "output_hidden_states": True}), 4)
    assert len(results[0]["hidden"]) == 3
    for more in ({}, {"output_hidden_states": True}):
        check(four, Case(family, {**inputs, **more, "return_dict": False}), 4)


@pytest.mark.parametrize(
    ("family", "length"), thinned(3, ["mistral", "llama4", "bert-mlm"], [23, 3])
)
def test_without_gradients_and_without_labels(four, family, length):
    inputs = batch(length)
    check(four, Case(family, inputs, train=False, gradients=False), 4)
    del inputs["labels"]
    check(four, Case(family, inputs, train=False), 4)


@pytest.mark.parametrize(
    ("family", "loss"), thinned(4, ["gemma3", "gpt-oss", "bert-mlm"], ["mean", "share"])
)
def test_five_steps_of_an_optimizer(four, family, loss):
    inputs = batch(23, left=(4, 0), right=(0, 3))
    results = check(four, Case(family, inputs, steps=5, loss=loss), 4)
    losses = results[0]["loss"]
    assert len({*map(float, losses)}) == 5 and losses[4] < losses[0]


WATCHED = {
    "window": Case("mistral", batch(59)),
    "float32": Case("mistral", batch(59), dtype=torch.float32),
    "window-zigzag": Case("mistral", batch(59), sharding="zigzag"),
    "two-kinds": Case("gemma3", batch(59)),
    "chunks": Case("llama4", batch(59)),
    "padded": Case("gemma3", batch(59, left=(20, 0), right=(0, 31))),
    "packed": Case("llama", {**batch(59), "position_ids": restarting(20, 1, 38)}),
    "encoder": Case("modernbert-mlm", batch(59)),
    "latent": Case("deepseek-v3", batch(59)),
    "longnet": Case("llama", batch(59), apply=sr.LongNet((4, 8), (1, 2)), sharding="contiguous"),
    "per-batch": Case("llama", batch(24), using=USED["per-batch"]),
    "per-head": Case("llama", batch(24), using=USED["per-head"], sharding="balanced"),
}


@pytest.mark.parametrize("name", thinned(4, WATCHED))
def test_each_layer_receives_the_bytes_of_its_plan(four, name):
    some = 0
    for layers, _ in four.run(traffic, WATCHED[name], 4, world=4):
        assert len(layers) == 2
        for pattern, received, planned, counted in layers:
            assert received == planned == counted, pattern
            some += received
    assert some > 0


def test_a_window_moves_its_halo_whatever_the_length(four):
    for length in (32, 61, 240):
        case = Case("mistral", batch(length), sharding="contiguous")
        results = four.run(traffic, case, 4, world=4)
        halo = 4 * 2 * (8 + 8) * 8  # tokens, kv heads, numbers of a key and a value, bytes
        for rank, (layers, text) in enumerate(results):
            assert [x[1] for x in layers] == [2 * halo * (rank > 0)] * 2  # 2 rows
            for line in text.splitlines():
                assert f"4 ranks, contiguous: {halo:,} bytes, halo 4 tokens of {length}" in line


CAUGHT = {
    "labels are not shifted": (Case("llama", batch(23)), "loss"),
    "each rank shifts its own labels": (Case("llama", batch(23)), "loss"),
    "a window sees a rank's own keys only": (
        Case("gemma3", batch(23), sharding="contiguous"),
        "logits of rank 1",
    ),
    "padding is that of the first rank's tokens": (
        Case("gemma3", batch(24, left=(7, 0), right=(0, 2)), sharding="contiguous"),
        "logits",
    ),
    "positions count from 0 on each rank": (
        Case("gpt2", batch(23), sharding="contiguous"),
        "logits of rank 1",
    ),
    "documents are lost": (
        Case("llama", {**batch(23), "position_ids": restarting(9, 14)}),
        "logits",
    ),
    "the loss is a mean over a rank's own labels": (Case("llama", batch(23)), "loss"),
    "the loss is not scaled": (Case("llama", batch(23)), "loss"),
    "the loss of BERT is not scaled": (Case("bert-mlm", batch(23)), "loss"),
    "tokens are in another order": (Case("llama", batch(23), sharding="zigzag"), "logits"),
    "Llama 4 scales queries by local positions": (
        Case("llama4", batch(23), config={"floor_scale": 4}, sharding="contiguous"),
        "logits of rank",
    ),
}


@pytest.mark.parametrize("plant", thinned(5, PLANTS))
def test_a_planted_fault_is_caught(four, plant):
    case, where = CAUGHT[plant]
    check(four, case, 4)
    with pytest.raises(AssertionError, match=f"^{where}"):
        check(four, case, 4, plant)
