"""`hf.parallelize` beside what training uses: checkpoints, autocast, compilers, FSDP2 and DDP."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ring_workers import groups
from helpers.thinned import slow_except, thinned
from parallel_training import (
    LENGTH,
    Training,
    alone,
    assert_same_training,
    batches,
    checkpoint_layers,
    full_precision,
    mean_over,
    model_of,
    train,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sparsering as sr
from sparsering.integrations import transformers as hf


def checkpointed(rank: int, kind: str) -> Training:
    """Trains over four ranks; the backward pass runs layers, or the whole model, again."""
    model = model_of()
    if kind.startswith("layers"):
        checkpoint_layers(model, kind == "layers, reentrant")
    hf.parallelize(model, groups[4])
    mean_gradients, mean = mean_over(groups[4])

    def step(number: int) -> Tensor:
        batch = batches(number)[0]
        if kind.startswith("layers") or kind == "nothing":
            loss = model(**batch).loss
        else:
            reentrant = kind == "model, reentrant"
            embeds = model.get_input_embeddings()(batch.pop("input_ids"))
            loss = checkpoint(
                lambda x: model(inputs_embeds=x, **batch).loss, embeds, use_reentrant=reentrant
            )
        loss.backward()
        return loss

    with full_precision():
        return train(model, step, mean_gradients, mean)


@pytest.mark.parametrize(
    "kind",
    slow_except(
        ["layers"], ["nothing", "layers", "layers, reentrant", "model", "model, reentrant"]
    ),
)
def test_gradient_checkpointing(four, kind):
    with full_precision():
        wanted = alone(model_of())
    for got in four.run(checkpointed, kind):
        assert_same_training(got, wanted)


def wrapped(rank: int, kind: str) -> Training:
    """Trains over four ranks with FSDP2 or DDP, over the same axis or over others."""
    wrapper, axes, order = kind.split(", ")
    model = model_of()
    if axes == "same":
        cp = mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        half = 0
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        cp, half = both["cp"], both["dp"].get_local_rank()
        mesh = {"outer": both["dp"], "both": None, "hybrid": both}[axes]
    if order == "before":
        hf.parallelize(model, cp)
    if wrapper == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    else:
        run = DistributedDataParallel(model, process_group=mesh and mesh.get_group())
    if order == "after":
        hf.parallelize(model, cp)

    def step(number: int) -> Tensor:
        loss = run(**batches(number)[half]).loss
        loss.backward()
        return loss

    mean_gradients = mean_over(cp.get_group())[0] if axes == "outer" else lambda x: None
    with full_precision():
        return train(model, step, mean_gradients, mean_over(groups[4])[1])


WRAPPED = [
    *("fsdp, same, before", "fsdp, same, after", "fsdp, outer, before", "fsdp, outer, after"),
    *("fsdp, hybrid, after", "fsdp, both, before"),
    *("ddp, same, before", "ddp, outer, before", "ddp, both, before"),
]


@pytest.mark.parametrize("kind", slow_except(WRAPPED[1:2] + WRAPPED[7:8], WRAPPED))
def test_fsdp_and_ddp(four, kind):
    with full_precision():
        wanted = alone(model_of(), 1 if "same" in kind else 2)
    for got in four.run(wrapped, kind):
        assert_same_training(got, wanted)


def compiled(rank: int, kind: str, packed: bool) -> tuple[Training, list[int], list[Tensor]]:
    """Trains over two ranks; returns also how many graphs there were after each step.

    Then the call is undone; logits of the compiled model and of the model itself.
    """
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = model_of()
    if kind == "checkpointed layers":
        checkpoint_layers(model)
    run = torch.compile(model, backend=counter) if kind == "before" else model
    hf.parallelize(model, groups[2])
    if kind == "in place":
        model.compile(backend=counter)
    elif kind != "before":
        run = torch.compile(model, backend=counter)
    graphs = []

    def step(number: int) -> Tensor:
        loss = run(**batches(number, packed)[0]).loss
        loss.backward()
        graphs.append(counter.frame_count)
        return loss

    result = train(model, step, *mean_over(groups[2]), steps=5)
    hf.parallelize(model, False)
    with torch.no_grad():
        plain = [run(**batches(2, True)[1], use_cache=False).logits]
        torch.compiler.reset()
        plain.append(copy.deepcopy(model)(**batches(2, True)[1], use_cache=False).logits)
    return result, graphs, plain


KINDS = ["after", "before", "in place", "checkpointed layers"]


@pytest.mark.parametrize(("kind", "packed"), slow_except([], KINDS, [False, True]))
def test_compiled(four, kind, packed):
    wanted = alone(model_of(), packed=packed, steps=5)
    for got, graphs, plain in four.run(compiled, kind, packed, world=2):
        assert_same_training(got, wanted, 2e-6)  # norms and losses are in float32
        assert graphs[0] > 0 and len(set(graphs)) == 1, f"compiled again: {graphs}"
        assert plain[0].shape == plain[1].shape and (plain[0] - plain[1]).abs().max() < 1e-5


def in_bfloat16(rank: int, world: int) -> tuple[float, dict[str, Tensor]]:
    """Runs a step under autocast, as one of some ranks, or with world 0 in one process."""
    model = model_of(dtype=torch.float32)
    if world:
        hf.parallelize(model, groups[world])
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batches()[0], use_cache=False).loss
    loss.backward()
    mean_gradients, mean = mean_over(groups[world]) if world else (lambda x: None, lambda x: x)
    mean_gradients([x.grad for x in model.parameters()])
    return mean(loss.detach()).item(), {n: p.grad for n, p in model.named_parameters()}


def test_autocast(four):
    with full_precision():
        exact = alone(model_of(), steps=1)
    eager_loss, eager = in_bfloat16(0, 0)
    for loss, gradients in four.run(in_bfloat16, 4):
        wanted = exact.losses[0]
        assert abs(loss - wanted) <= 2 * abs(eager_loss - wanted) + 2e-3 * wanted
        for name, x in exact.gradients[0].items():
            error, usual = ((y[name] - x).norm() / x.norm() for y in (gradients, eager))
            assert error <= 2 * usual + 2e-3, f"{name}: {error:.1e}, eager {usual:.1e}"
            assert error > 1e-6, "autocast had no effect"


PATTERN = {"full_attention": sr.LongNet((4, 16), (1, 2)) & sr.Causal()}


def with_pattern(rank: int, kind: str) -> Training:
    """Trains over four ranks in a block of `using`; backward runs behind it."""
    model = model_of()
    if kind == "checkpointed layers":
        checkpoint_layers(model)
    hf.parallelize(model, groups[4])

    def step(number: int) -> Tensor:
        with hf.using(model, PATTERN):
            loss = model(**batches(number, packed=True)[0]).loss
        loss.backward()
        return loss

    with full_precision():
        return train(model, step, *mean_over(groups[4]))


@pytest.mark.parametrize("kind", thinned(2, ["checkpointed layers", "plain"]))
def test_using(four, kind):
    model = model_of()
    model.set_attn_implementation("sparsering")
    with full_precision():
        own = alone(model_of(), packed=True)
        with hf.using(model, PATTERN):
            wanted = alone(model, packed=True)
    assert abs(own.losses[0] - wanted.losses[0]) > 1e-3, "the pattern changes nothing"
    for got in four.run(with_pattern, kind):
        assert_same_training(got, wanted)


def distilled(rank: int) -> list[Any]:
    """A step of two students over four and two ranks, with a teacher that no ranks share."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shared = {"qwen2": groups[4], "gemma2": pairs[rank // 2]}
    teacher, students = model_of("llama"), {name: model_of(name) for name in shared}
    batch = batches()[0]
    found = []
    with full_precision():
        for name, group in shared.items():
            hf.parallelize(students[name], group)
        for name, student in students.items():
            out = student(**batch)
            own = hf.local_positions(student)
            with torch.no_grad():
                guide = teacher(**batch, use_cache=False).logits
            found.append((name, out, guide, own))
        total = sum(
            out.loss + distance(out.logits, guide[:, own], batch, own) * shared[name].size()
            for name, out, guide, own in found
        )
        total.backward()
    results = []
    for name, out, guide, own in found:
        mean_gradients, mean = mean_over(shared[name])
        gradients = {n: p.grad for n, p in students[name].named_parameters()}
        mean_gradients([*gradients.values()])
        results.append((name, mean(out.loss.detach()).item(), gradients, guide, own))
    return results


def distance(logits: Tensor, guide: Tensor, batch: dict[str, Tensor], own: Any) -> Tensor:
    """A loss of our own: summed over real tokens, so that the sum over ranks is the whole."""
    real = batch["attention_mask"][:, own].bool()
    return (logits - guide)[real].square().sum() / 1000


def test_two_students_and_a_teacher(four):
    batch, whole = batches()[0], slice(None)
    results = four.run(distilled)
    with full_precision():
        with torch.no_grad():
            guide = model_of("llama")(**batch, use_cache=False).logits
        for index, name in enumerate(("qwen2", "gemma2")):
            model = model_of(name)
            out = model(**batch, use_cache=False)
            (out.loss + distance(out.logits, guide, batch, whole)).backward()
            for rank, result in enumerate(results):
                got, loss, gradients, teacher, own = result[index]
                assert got == name and loss == pytest.approx(out.loss.item(), rel=1e-10)
                assert torch.equal(teacher, guide), "the teacher's call is not a normal one"
                assert 0 < len(own) < LENGTH
                for key, parameter in model.named_parameters():
                    error = (gradients[key] - parameter.grad).norm() / parameter.grad.norm()
                    assert error <= 1e-10, f"{name}, {key}: {error:.1e}, rank {rank}"


def copied(rank: int) -> dict[str, Any]:
    """Trains a copy of a model that ranks share, then its original; and undoes the copy."""
    model = model_of()
    hf.parallelize(model, groups[4], sharding="zigzag")
    with full_precision():
        other = copy.deepcopy(model)
        found: dict[str, Any] = {"copy": train_over(other, groups[4])}
        found["tokens"] = hf.local_positions(other)
        again = copy.deepcopy(model)
        hf.parallelize(again, False)
        found["undone"] = alone(again)
        found["original"] = train_over(model, groups[4])
    found["implementation"] = again.config._attn_implementation
    return found


def train_over(model: Any, group: dist.ProcessGroup) -> Training:
    def step(number: int) -> Tensor:
        loss = model(**batches(number)[0]).loss
        loss.backward()
        return loss

    return train(model, step, *mean_over(group))


@pytest.mark.slow
def test_copies_are_shared_and_undone_by_themselves(four):
    with full_precision():
        wanted = alone(model_of())
    results = four.run(copied)
    for got in results:
        for name in ("copy", "undone", "original"):
            assert_same_training(got[name], wanted)
        assert got["implementation"] == "eager"
    tokens_of_ranks = torch.cat([got["tokens"] for got in results])
    assert sorted(tokens_of_ranks.tolist()) == list(range(LENGTH))


def saved(rank: int, folder: str) -> list[Any]:
    """Loads a model that was saved while ranks shared its calls: as it is, then shared again."""
    model = model_of()
    hf.parallelize(model, groups[4])
    model(**batches()[0])
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier(group=groups[4])
    with full_precision():
        plain, shared = (type(model).from_pretrained(folder).train() for _ in range(2))
        implementation = plain.config._attn_implementation
        plain.set_attn_implementation("eager")
        hf.parallelize(shared, groups[4])
        return [implementation, alone(plain), train_over(shared, groups[4])]


@pytest.mark.slow
def test_a_saved_model_is_a_plain_one(four, tmp_path):
    with full_precision():
        wanted = alone(model_of())
    for implementation, plain, shared in four.run(saved, str(tmp_path)):
        assert implementation != "sparsering"
        assert_same_training(plain, wanted, 1e-6)  # its rotary tables are in float32
        assert_same_training(shared, plain)
    assert "sparsering" not in (tmp_path / "config.json").read_text()


def again_and_undone(rank: int) -> list[Any]:
    """Calls parallelize twice, undoes it, and calls it again over fewer ranks."""
    model = model_of()
    for name in ("sparsering", "sdpa"):  # the hooks of "sparsering" attention stay
        model.set_attn_implementation(name)
    before = state_of(model)
    hf.parallelize(model, groups[4], sharding="zigzag", loss="share")
    one = state_of(model)
    hf.parallelize(model, groups[2] if rank < 2 else groups[1 + rank], sharding="contiguous")
    two = state_of(model)
    if rank >= 2:
        return [before, one, two]
    with full_precision():
        found = train_over(model, groups[2])
        hf.parallelize(model, False)
        hf.parallelize(model, False)
        return [before, one, two, found, state_of(model)]


def state_of(model: Any) -> tuple[Any, ...]:
    hooks = [len(getattr(model, name)) for name in vars(model) if name.endswith("_hooks")]
    flags = [len(x) for name, x in vars(model).items() if "_hooks_" in name]
    loss = vars(model).get("_loss_function")
    return model.config._attn_implementation, getattr(loss, "__name__", None), hooks, flags


def test_called_twice_and_undone(four):
    results = four.run(again_and_undone)
    with full_precision():
        wanted = alone(model_of())
    for before, one, two, *rest in results:
        assert before[:2] == ("sdpa", None) and sum(before[2]) == 2
        assert one == two and one[0] == "sparsering" and sum(one[2]) == 4
        if rest:
            assert_same_training(rest[0], wanted)
            assert rest[1] == before


def test_undone_the_loss_function_is_the_callers_own():
    model = model_of()
    original = model.loss_function

    def halved(*arguments: Any, **more: Any) -> Tensor:
        return original(*arguments, **more) / 2

    batch = batches()[0]
    wanted = model(**batch)
    model.loss_function = halved
    hf.parallelize(model)
    with pytest.raises(NotImplementedError, match="computes a loss that ranks cannot share"):
        model(**batch)
    hf.parallelize(model, False)
    assert model.loss_function is halved
    out = model(**batch)
    assert torch.equal(out.logits, wanted.logits) and torch.equal(out.loss, wanted.loss / 2)
    assert out.past_key_values is not None
    with pytest.raises(ValueError, match="is not parallelized"):
        hf.local_positions(model)


def of_group(rank: int, kind: str) -> Training:
    """Trains over four ranks, given as nothing, as a group or as a mesh; or over one alone."""
    alone_here = [dist.new_group([other]) for other in range(4)][rank]
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "cp"))
    group = {"none": None, "group": groups[4], "mesh": mesh["cp"], "one rank": alone_here}[kind]
    model = model_of()
    hf.parallelize(model, group)
    with full_precision():
        return train_over(model, alone_here if kind == "one rank" else groups[4])


@pytest.mark.parametrize("kind", thinned(4, ["mesh", "group", "none", "one rank"]))
def test_forms_of_a_group(four, kind):
    with full_precision():
        wanted = alone(model_of())
    for got in four.run(of_group, kind):
        assert_same_training(got, wanted)


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    with full_precision():
        wanted = alone(model_of())
        for options in ({}, {"loss": "share", "sharding": "zigzag"}):
            model = model_of()
            hf.parallelize(model, **options)
            assert_same_training(alone(model), wanted)
            assert hf.local_positions(model).tolist() == list(range(LENGTH))
