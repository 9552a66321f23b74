"""Tests the refusals of `hf.parallelize`, and ranks that differ, raise, die or stall."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.ring_workers import Workers, groups, workers_of
from helpers.thinned import slow_except
from transformers_families import tiny
from transformers_models import GROUPED, SIZES, made, tokens

from sparsering.distributed import fetching
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call.calls import thread

WORLD = 3
TIMEOUT, LONG = 2.0, 30.0  # seconds of a group; and far less than the 60 of other groups
LENGTH = 13


lasting = workers_of(WORLD)  # workers of tests after which they are as before


@pytest.fixture
def mortal():
    """Workers of this test alone, whose model has a group with a timeout of 2 seconds."""
    workers = Workers(WORLD)
    workers.run(prepare)
    yield workers
    workers.close()


def prepare(rank: int) -> None:
    """Runs a step, so that nothing is imported or built within the short timeout."""
    call(rank)
    group = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=TIMEOUT))
    hf.parallelize(model_of_worker(), group)


class CalledError(Exception):
    """A model began to compute."""


def shared(family: str = "llama", **options: Any) -> Any:
    """A model that one process shares with nobody; an error if it begins to compute."""
    model = made(family, **options)
    hf.parallelize(model)

    def fail(*_: Any) -> None:
        raise CalledError

    model.get_input_embeddings().register_forward_pre_hook(fail)
    model.get_decoder().register_forward_pre_hook(fail)
    return model


IDS = tokens(2, LENGTH)
ONES = torch.ones(2, LENGTH, dtype=torch.int64)
CACHE = transformers.DynamicCache()
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "use_cache": ({"use_cache": True}, r"does not support use_cache \(a cache\), got True"),
    "a cache": ({"past_key_values": CACHE}, r"does not support past_key_values \(a cache\)"),
    "a cache's place": (
        {"cache_position": torch.arange(LENGTH)},
        "does not support cache_position",
    ),
    "weights": ({"output_attentions": True}, "does not support output_attentions"),
    "routers": ({"output_router_logits": True}, "does not support output_router_logits"),
    "logits": ({"logits_to_keep": 1}, r"does not support logits_to_keep \(logits of some tokens\)"),
    "some logits": ({"logits_to_keep": torch.arange(3)}, "does not support logits_to_keep"),
    "mask of pairs": (
        {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)},
        r"needs attention_mask \[batch, tokens\], got \(2, 1, 13, 13\); write .* for hf.using",
    ),
    "masks by type": ({"attention_mask": {"full_attention": None}}, "attention_mask .*got dict"),
    "positions of 3 axes": ({"position_ids": ONES[None]}, r"position_ids .*got \(1, 2, 13\)"),
    "tensor": ({"pixel_values": torch.ones(2, 3)}, "how to cut the tensor pixel_values"),
    "tensors": ({"deepstack": [torch.ones(2, 3)]}, "how to cut the tensor deepstack"),
    "tensors by name": ({"extra": {"a": (torch.ones(2), 1)}}, "how to cut the tensor extra"),
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"input_ids": None}, "needs input_ids .* got 0 of them"),
    "two inputs": ({"inputs_embeds": torch.ones(2, LENGTH, 32)}, "got 2 of them"),
    "embeddings": (
        {"input_ids": None, "inputs_embeds": torch.ones(2, LENGTH)},
        r"inputs_embeds must be a tensor \[batch, tokens, channels\], got \(2, 13\)",
    ),
    "one row": (
        {"input_ids": IDS[0]},
        r"input_ids must be a tensor \[batch, tokens\], got \(13,\)",
    ),
    "nothing": ({"input_ids": IDS[:, :0]}, "needs at least 1 token"),
    "shorter mask": ({"attention_mask": ONES[:, 1:]}, r"attention_mask must be .*got \(2, 12\)"),
    "fewer masks": ({"attention_mask": ONES[:1]}, r"attention_mask must be .*got \(1, 13\)"),
    "other labels": ({"labels": IDS[:, 1:]}, r"labels must be of the whole batch, 2 x 13 tokens"),
    "other positions": ({"position_ids": ONES[:, 1:]}, "position_ids must be of the whole batch"),
    "more positions": ({"position_ids": ONES[[0, 0, 0]]}, "position_ids must be of the whole"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_ranks_cannot_share_is_refused_before_anything_runs(name):
    arguments, text = ARGUMENTS[name]
    with pytest.raises(NotImplementedError, match=text):
        shared()(input_ids=IDS, **arguments)
    assert thread.shared is None


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_of_wrong_shapes_is_refused_before_anything_runs(name):
    arguments, text = WRONG[name]
    with pytest.raises(ValueError, match=text):
        shared()(**{"input_ids": IDS, **arguments})
    assert thread.shared is None


def test_what_is_refused_came_to_the_model_and_the_rest_does_run():
    model = shared()
    for more in ({}, {"use_cache": False, "past_key_values": None, "logits_to_keep": 0}):
        with pytest.raises(CalledError):
            model(IDS, **more)
    assert thread.shared is None


def test_a_call_by_position_and_an_unknown_keyword():
    model = made("gpt2")
    wanted = model(IDS, labels=IDS, use_cache=False)
    hf.parallelize(model)
    out = model(IDS, None, labels=IDS)
    torch.testing.assert_close(out.logits, wanted.logits, rtol=0, atol=1e-6)
    first = model(IDS, labels=IDS, return_dict=False)
    assert isinstance(first, tuple) and torch.equal(first[0], out.loss)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation_is_refused(family, options):
    model = made(family)
    hf.parallelize(model)
    with pytest.raises(
        NotImplementedError, match=r"does not support \w+ \(.*leave it out, or call"
    ):
        model.generate(IDS, max_new_tokens=2, do_sample=False, **options)
    hf.parallelize(model, False)
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, LENGTH + 2)


def test_options_of_a_config_are_refused():
    model = made("llama")
    model.config.output_attentions = True
    hf.parallelize(model)
    with pytest.raises(NotImplementedError, match=r"output_attentions .*set config\.output_att"):
        model(IDS)
    model = shared("mistral")
    model.config.output_router_logits = True  # after parallelize, which looks at it too
    with pytest.raises(NotImplementedError, match=r"output_router_logits \(an auxiliary loss"):
        model(IDS)


def _rope(kind: str) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope |= {"original_max_position_embeddings": 64}
    return rope


def _llama_with(head: str) -> Any:
    return getattr(transformers, head)(transformers.LlamaConfig(**GROUPED))


def _bert_with(head: str) -> Any:
    return getattr(transformers, head)(transformers.BertConfig(**SIZES))


def _qwen3_next() -> Any:
    options = {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    options |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2}
    options |= {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
    options |= {"shared_expert_intermediate_size": 16}
    options |= {"layer_types": ["linear_attention", "full_attention"]}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**{**GROUPED, **options}))


def _mamba() -> Any:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def _mixtral() -> Any:
    options = {"num_local_experts": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**GROUPED, **options}))


def _bart() -> Any:
    sizes = {"vocab_size": 61, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "dynamic positions": (
        lambda: made("llama", rope_parameters=_rope("dynamic")),
        r"its positions \(dynamic\) depend on the length",
    ),
    "longrope": (
        lambda: made("llama", rope_parameters=_rope("longrope")),
        r"its positions \(longrope\) depend on the length",
    ),
    "linear attention": (_qwen3_next, "linear_attention are not attention over"),
    "state space": (_mamba, "Mamba"),
    "routers": (_mixtral, "its config sets output_router_logits"),
    "encoder-decoder": (_bart, "encoder-decoder"),
    "cross attention": (
        lambda: made("gpt2", add_cross_attention=True),
        "it has cross attention",
    ),
    "one label": (lambda: _llama_with("LlamaForSequenceClassification"), "head pools over tokens"),
    "answers": (lambda: _llama_with("LlamaForQuestionAnswering"), "head pools over tokens"),
    "choice": (lambda: _bert_with("BertForMultipleChoice"), "head pools over tokens"),
    "pooler": (lambda: _bert_with("BertModel"), "head pools over tokens"),
    "image": (lambda: made("vit"), "ViTModel"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_tokens_meet_elsewhere_is_refused_and_left_as_it_was(name):
    build, text = MODELS[name]
    model = build()
    implementation = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=text) as caught:
        hf.parallelize(model)
    assert type(model).__name__ in str(caught.value)
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert model.config._attn_implementation == implementation


def test_arguments_of_parallelize():
    model = made("llama")
    with pytest.raises(ValueError, match=r"sharding must be one of .*, got 'zigzig'"):
        hf.parallelize(model, sharding="zigzig")
    with pytest.raises(ValueError, match=r"rank \(below 1\)"):
        hf.parallelize(model, sharding="chunks:0,1")
    with pytest.raises(ValueError, match='loss must be "mean" or "share", got \'sum\''):
        hf.parallelize(model, loss="sum")
    for group in (True, "cp", 4, object()):
        with pytest.raises((ValueError, TypeError), match="group"):
            hf.parallelize(model, group)
    with pytest.raises((ValueError, TypeError), match="model"):
        hf.parallelize("llama")
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("loss", ["a function", "labels of a sequence"])
def test_labels_of_a_loss_that_is_not_by_token_are_refused(loss):
    model = shared("gpt2")
    if loss == "a function":
        hf.parallelize(model, False)
        model.loss_function = lambda logits, labels, **_: logits.square().mean()
        hf.parallelize(model)
    else:
        model = made("bert")
        model = transformers.BertLMHeadModel(model.config)
        model.loss_type = "ForSequenceClassification"
        hf.parallelize(model)
    with pytest.raises(NotImplementedError, match="computes a loss that ranks cannot share"):
        model(IDS, labels=IDS)
    assert thread.shared is None


# Several ranks.


def outcome(rank: int, function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """(type names, text, rank, peer, step, seconds) of the error that a call raised."""
    began = time.monotonic()
    kinds, text, about = [None], "", [None] * 3
    try:
        function(rank, *args)
    except Exception as error:
        kinds, text = [kind.__name__ for kind in type(error).__mro__], str(error)
        about = [getattr(error, name, None) for name in ("rank", "peer", "step")]
    return (kinds, text, *about, time.monotonic() - began)


_models: dict[str, Any] = {}
"""In a worker: the model whose calls the ranks share, and which the tests use again."""


def model_of_worker() -> Any:
    if not _models:
        _models["llama"] = made("llama")
        hf.parallelize(_models["llama"], groups[WORLD])
    return _models["llama"]


def batch() -> dict[str, Any]:
    embeds = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(5)).double()
    positions = torch.arange(LENGTH).expand(2, -1).clone()
    counts = {"num_items_in_batch": torch.tensor(24)}
    rest = {"attention_mask": ONES.clone(), "position_ids": positions, "labels": IDS.clone()}
    return {"input_ids": IDS.clone(), "inputs_embeds": embeds, **rest, **counts}


def call(rank: int, **different: Any) -> float:
    """One step with the same batch on every rank, up to some values; returns the summed loss."""
    inputs = {**batch(), "inputs_embeds": None, **different}
    if different.get("inputs_embeds") is not None:
        inputs["input_ids"] = None
    loss = model_of_worker()(**inputs).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=groups[WORLD])
    return total.item()


def with_difference(rank: int, name: str) -> None:
    """Rank 1 calls with another value of one tensor."""
    value = batch()[name]
    if name == "inputs_embeds":
        value = value + (rank == 1) * 1e-12
    elif name == "num_items_in_batch":
        value = value + (rank == 1)
    elif rank == 1:
        value[1, 12] = 0
    call(rank, **{name: value})


COMPARED = (
    *("input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch"),
    "inputs_embeds",
)


def wanted_loss() -> float:
    model = made("llama")
    inputs = {**batch(), "inputs_embeds": None}
    return 3 * model(**inputs, use_cache=False).loss.item()


def assert_usable(workers: Workers) -> None:
    """The group and the model compute what one process does."""
    for loss in workers.run(call):
        assert loss == pytest.approx(wanted_loss(), rel=1e-6)


@pytest.mark.parametrize("name", COMPARED)
def test_batches_that_differ_in_a_tensor_name_it_on_every_rank(lasting, name):
    outcomes = lasting.run(outcome, with_difference, name)
    for expected, (kinds, text, rank, peer, step, _) in enumerate(outcomes):
        assert kinds[0] == "RingMismatchError" and "ValueError" in kinds, text
        assert (rank, peer, step) == (expected, 1, "agreement")
        assert f"must agree on the {name}, but rank 0 and rank 1 differ" in text
    assert_usable(lasting)


def with_other(rank: int, name: str) -> None:
    """Rank 1 calls with something else than a tensor's value."""
    odd = rank == 1
    options: dict[str, dict[str, Any]] = {
        "labels": {"labels": None if odd else IDS},
        "attention_mask": {"attention_mask": ONES.bool() if odd else ONES},
        "input_ids": {"input_ids": IDS[:1] if odd else IDS[:2], "labels": None}
        | dict.fromkeys(("attention_mask", "position_ids")),
        "other arguments": {"output_hidden_states": odd},
    }
    call(rank, **options[name])


@pytest.mark.parametrize("name", ["labels", "attention_mask", "input_ids", "other arguments"])
def test_batches_that_differ_otherwise(lasting, name):
    for kinds, text, *_ in lasting.run(outcome, with_other, name):
        assert kinds[0] == "RingMismatchError" and f"agree on the {name}, but rank 0" in text
    assert_usable(lasting)


def set_up_differently(rank: int, name: str) -> None:
    """Rank 1 has called parallelize with another argument."""
    odd = rank == 1
    options = {"sharding": ("contiguous", "zigzag"), "loss": ("mean", "share")}[name]
    model = made("llama")
    hf.parallelize(model, groups[WORLD], **{name: options[odd]})
    model(IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize("name", ["sharding", "loss"])
def test_ranks_that_called_parallelize_with_other_arguments(lasting, name):
    for kinds, text, *_ in lasting.run(outcome, set_up_differently, name):
        assert kinds[0] == "RingMismatchError", text
        assert f"{name} of parallelize" in text and "rank 0 and rank 1 differ" in text
    assert_usable(lasting)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "use_cache": ({"use_cache": True}, "NotImplementedError"),
    "shape": ({"labels": IDS[:, 1:]}, "ValueError"),
    "kind": ({"attention_mask": "causal"}, "NotImplementedError"),
    "numpy": ({"input_ids": IDS.numpy()}, "ValueError"),
    "nothing": ({"input_ids": None}, "ValueError"),
    "meta": ({"labels": IDS.to("meta")}, "NotImplementedError"),
}


def with_own_error(rank: int, name: str) -> None:
    call(rank, **(REFUSED[name][0] if rank == 2 else {}))


def with_unknown_argument(rank: int, how: str) -> None:
    """Rank 2 calls a forward method without **kwargs, with a keyword that it does not take."""
    model = made("llama")
    model.__class__ = Strict
    hf.parallelize(model, groups[WORLD])
    if how == "keyword":
        model(IDS, **({"inputs": IDS} if rank == 2 else {}))
    else:
        model(*([IDS, None, None, 1, 2] if rank == 2 else [IDS]))


class Strict(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None):  # type: ignore[no-untyped-def]
        return super().forward(input_ids, attention_mask, position_ids)


@pytest.mark.parametrize("name", [*REFUSED, "keyword", "position"])
def test_what_one_rank_gets_wrong_is_its_own_error_and_a_mismatch_elsewhere(lasting, name):
    if name in REFUSED:
        function, kind = with_own_error, REFUSED[name][1]
    else:
        function, kind = with_unknown_argument, "TypeError"
    outcomes = lasting.run(outcome, function, name)
    assert outcomes[2][0][0] == kind, outcomes[2]
    for kinds, text, _, peer, step, _ in outcomes[:2]:
        assert kinds[0] == "RingMismatchError", text
        assert (peer, step) == (2, "agreement") and "rank 2 refused its batch" in text
    assert_usable(lasting)


def raise_inside(rank: int) -> list[Any]:
    """Every rank raises in its second layer; then each calls another model alone."""
    model = model_of_worker()

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    found = outcome(rank, call)[0][0]
    hook.remove()
    state = thread.shared
    return [found, state, made("mistral", "sparsering")(IDS).logits.detach()]


def test_an_error_inside_a_model_leaves_nothing_in_the_thread(lasting):
    wanted = made("mistral")(IDS).logits
    for found, state, logits in lasting.run(raise_inside):
        assert found == "MemoryError" and state is None
        torch.testing.assert_close(logits, wanted, rtol=0, atol=5e-6)
    assert_usable(lasting)


def raise_on_one(rank: int) -> None:
    """Rank 1 raises in its second layer; the others wait for it there."""
    model = model_of_worker()

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    if rank == 1:
        model.model.layers[1].register_forward_pre_hook(fail)
    try:
        call(rank)
    finally:
        assert thread.shared is None
        wanted = made("mistral")(IDS).logits
        other = made("mistral", "sparsering")(IDS).logits
        torch.testing.assert_close(other, wanted, rtol=0, atol=5e-6)


@pytest.mark.slow
def test_an_error_on_one_rank_alone(mortal):
    outcomes = mortal.run(outcome, raise_on_one)
    assert outcomes[1][0][0] == "MemoryError"
    for kinds, text, _, peer, _, seconds in (outcomes[0], outcomes[2]):
        assert kinds[0] == "RingError" and peer == 1, text
        assert seconds < LONG


def leave(rank: int, how: str, where: str) -> None:
    """Rank 1 dies or stalls before its call, in the second layer, or in the backward pass."""
    model = model_of_worker()

    def go(*_: Any) -> None:
        if how == "stalls":
            time.sleep(TIMEOUT + 2)
        os._exit(3)

    if rank == 1 and where == "before":
        go()
    if rank == 1 and where == "layer":
        model.model.layers[1].register_forward_pre_hook(go)
    if rank == 1 and where == "backward":
        model.model.layers[0].register_full_backward_pre_hook(go)
    call(rank)


@pytest.mark.parametrize(
    ("how", "where"),
    slow_except(
        [],
        ["dies", "stalls"],
        ["before", "layer", "backward"],
    ),
)
def test_a_rank_that_dies_or_stalls_is_named_within_the_timeout_of_the_group(mortal, how, where):
    for pipe in mortal.pipes:
        pipe.send((outcome, (leave, how, where)))
    survivors = [mortal.pipes[0], mortal.pipes[2]]
    for expected, result in zip((0, 2), mortal.results(survivors), strict=True):
        kinds, text, rank, peer, step, seconds = result
        assert kinds[0] == "RingError", text
        assert (rank, peer) == (expected, 1) and step, text
        assert seconds < LONG
    mortal.processes[1].join(20)
    assert mortal.processes[1].exitcode == 3
    for pipe in survivors:
        pipe.send((without_the_group, ()))
    for logits in mortal.results(survivors):
        torch.testing.assert_close(logits, made("llama")(IDS).logits, rtol=0, atol=1e-6)


def without_the_group(rank: int) -> torch.Tensor:
    """The model of a worker after `parallelize(model, False)`."""
    model = model_of_worker()
    hf.parallelize(model, False)
    with torch.no_grad():
        return model(IDS).logits


def prepare_indexed(rank: int, family: str) -> None:
    """Makes a model that chooses keys, and runs a step of it in a group with a short timeout."""
    group = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=LONG))
    _models[family] = tiny(family)
    hf.parallelize(_models[family], group)
    step_of(rank, family)
    group = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=TIMEOUT))
    hf.parallelize(_models[family], group)


def step_of(rank: int, family: str) -> None:
    _models[family](input_ids=IDS, labels=IDS).loss.backward()


def die_at(rank: int, family: str, where: str) -> None:
    """Rank 1 dies when it is to send the rows of that name, and the others wait for them."""
    exchange = fetching._exchange

    def watched(group: Any, like: Any, step: str, *messages: Any) -> None:
        if rank == 1 and step == where:
            os._exit(3)
        exchange(group, like, step, *messages)

    fetching._exchange = watched
    try:
        step_of(rank, family)
    finally:
        fetching._exchange = exchange


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("deepseek_v32", "index keys"),
        ("deepseek_v4", "gradients of closed entries"),
        pytest.param("deepseek_v4", "closed entries", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_while_others_wait_for_what_it_chose_or_compressed(family, where):
    workers = Workers(WORLD)
    try:
        workers.run(prepare_indexed, family)
        for pipe in workers.pipes:
            pipe.send((outcome, (die_at, family, where)))
        survivors = [workers.pipes[0], workers.pipes[2]]
        outcomes = workers.results(survivors)
        workers.processes[1].join(20)
        assert workers.processes[1].exitcode == 3
        for expected, (kinds, text, rank, peer, step, seconds) in zip(
            (0, 2), outcomes, strict=True
        ):
            assert kinds[0] == "RingError", text
            assert rank == expected and seconds < LONG
            assert peer == 1 and step == where, (peer, step, text)
        for pipe in survivors:
            pipe.send((outcome, (step_of, family)))
        for kinds, text, *_ in workers.results(survivors):
            assert kinds[0] == "RingError" and "make a new group" in text
    finally:
        workers.close()
