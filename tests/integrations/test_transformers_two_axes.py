"""Models of transformers on a mesh of heads and tokens: the loss and gradients of one process."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ring_workers import workers_of
from parallel_training import full_precision
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers_models import DECODERS, ENCODERS, tokens

import sparsering as sr
from sparsering.distributed import RingMismatchError
from sparsering.integrations import transformers as hf

workers = workers_of(4)
_meshes: dict[tuple[int, int], DeviceMesh] = {}


def mesh_of(*shape: int) -> DeviceMesh:
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("heads", "tokens"))
    return _meshes[shape]


def build(family: str) -> Any:
    torch.manual_seed(7)
    return {**DECODERS, **ENCODERS}[family]().double().train()


def batch_of(family: str) -> dict[str, Any]:
    ids = tokens(2, 26)
    mask = torch.ones(2, 26, dtype=torch.int64)
    mask[1, 20:] = 0
    labels = {} if family in ENCODERS else {"labels": ids.masked_fill(mask == 0, -100)}
    return {"input_ids": ids, "attention_mask": mask, **labels}


def gradients(model: Any, family: str) -> list[torch.Tensor]:
    """The loss of a batch, and the gradients of the parameters."""
    with full_precision():
        loss = model(**batch_of(family)).loss
        loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]


def run_model(rank: int, shape: tuple[int, int], family: str, pattern: Any) -> Any:
    """The mean of the ranks' losses, and of their gradients."""
    model = build(family)
    if pattern is not None:
        hf.apply(model, pattern)
    hf.parallelize(model, mesh_of(*shape), loss="mean")
    found = gradients(model, family)
    for x in found:
        dist.all_reduce(x)
    hf.parallelize(model, False)
    return [x / 4 for x in found]


@pytest.mark.parametrize(
    ("family", "pattern", "shape"),
    [
        ("llama", None, (2, 2)),
        pytest.param("gemma3", None, (2, 2), marks=pytest.mark.slow),
        pytest.param("gpt2", None, (4, 1), marks=pytest.mark.slow),
        ("llama", sr.SlidingWindow(5) & sr.Causal(), (4, 1)),
        ("gpt-oss", None, (2, 2)),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(workers, family, pattern, shape):
    parts = workers.run(run_model, shape, family, pattern)
    model = build(family)
    if pattern is not None:
        hf.apply(model, pattern)
    expected = gradients(model, family)
    for found in parts:
        assert len(found) == len(expected)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def run_wrong(rank: int) -> str:
    model = build("llama")  # of 4 heads
    hf.parallelize(model, mesh_of(2, 2))
    with pytest.raises(RingMismatchError, match="must agree on the input_ids") as raised:
        model(input_ids=tokens(2, 26) + (rank == 3))
    assert "prepare" not in str(raised.value)
    with pytest.MonkeyPatch.context() as patch:
        used = SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state={"device": "cpu"}))
        patch.setitem(sys.modules, "accelerate.state", used)
        with pytest.raises(RingMismatchError, match=r"do not pass the loader to Accelerator"):
            model(input_ids=tokens(2, 26) + (rank == 3))
        patch.setitem(sys.modules, "lightning", sys)
        with pytest.raises(RingMismatchError, match="use_distributed_sampler=False"):
            model(input_ids=tokens(2, 26) + (rank == 3))
    model(**batch_of("llama")).loss.backward()
    return "usable"


def test_unlike_batches_are_an_error_on_every_rank(workers):
    assert workers.run(run_wrong) == ["usable"] * 4


def tree_of_answers() -> Any:
    torch.manual_seed(1)
    prompt = torch.randint(30, (20,))
    return sr.pack_tree([torch.cat([prompt, torch.randint(30, (n,))]) for n in (7, 5, 9)])


def log_probabilities(model: Any, tree: Any, places: Any) -> Any:
    """Returns log-probabilities of packed answers [n], their places, and gradients."""
    with full_precision(), hf.using(model, tree.pattern):
        given = {"position_ids": tree.position_ids[None], "use_cache": False}
        logits = model(tree.tokens[None], **given).logits[0]
        own = torch.arange(len(tree.tokens)) if places is None else places(model)
        following = torch.full_like(tree.tokens, -1)
        following[tree.previous[tree.previous >= 0]] = tree.tokens[tree.previous >= 0]
        found = logits.log_softmax(-1).gather(1, following[own].clamp(min=0)[:, None])[:, 0]
        found = torch.where(following[own] >= 0, found, 0)
        found.sum().backward()
    return own, found.detach(), [x.grad for x in model.parameters()]


def run_answers(rank: int, shape: tuple[int, int]) -> Any:
    model = build("llama")
    hf.parallelize(model, mesh_of(*shape), loss="share")
    return log_probabilities(model, tree_of_answers(), hf.local_positions)


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_rewarded_answers_share_their_prompt_on_a_mesh(workers, shape):
    """As in GRPO: one packed tree of answers, whose log-probabilities get gradients."""
    _, expected, of_one = log_probabilities(build("llama"), tree_of_answers(), None)
    parts = workers.run(run_answers, shape)
    whole = torch.zeros_like(expected)
    for places, found, _ in parts:
        whole[places] = found
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)
    for number, wanted in enumerate(of_one):
        got = sum(grads[number] for _, _, grads in parts)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def run_report(rank: int) -> str:
    model = build("llama")
    hf.parallelize(model, mesh_of(2, 2))
    model(**batch_of("llama"))
    return hf.explain(model)


def test_a_report_counts_the_bytes_of_both_axes(workers):
    for text in workers.run(run_report):
        assert "4 ranks" in text and "bytes" in text
