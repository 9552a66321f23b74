"""The ring beside what training uses: meshes, FSDP2, DDP, checkpointing, torch.compile."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ring_workers import groups, workers_of
from helpers.thinned import slow_except
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sparsering as sr
from sparsering.distributed import ring_attention, shard, unshard

PATTERN = sr.LongNet((16, 64), (1, 4)) & sr.Causal()
TOKENS, WIDTH, HEADS, BATCH = 60, 16, 2, 2


class Model(nn.Module):
    """Two layers around `attend`, any attention function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH).double() for _ in range(2))

    def forward(self, x: Tensor, attend: Any, recompute: bool = False) -> Tensor:
        for layer in self.layers:
            run = (layer, x, attend)
            x = x + (checkpoint(block, *run, use_reentrant=False) if recompute else block(*run))
        return x


def block(layer: nn.Module, x: Tensor, attend: Any) -> Tensor:
    q, k, v = layer(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return attend(q, k, v).transpose(1, 2).flatten(2)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(  # type: ignore[return-value]
        torch.randn(BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )


def alone() -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one process."""
    model, (x, weight) = Model(), data()
    loss = (model(x, lambda q, k, v: sr.attention(q, k, v, PATTERN)) * weight).sum()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def over_ranks(rank: int, kind: str, sharding: str) -> tuple[Tensor, list[Tensor]]:
    """Summed loss and gradients of four ranks, the sequence sharded over two of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    sp: DeviceMesh = mesh["sp"]
    place = {"mesh": sp, "sharding": sharding}
    model = Model()
    x, weight = (shard(t, dim=1, **place) for t in data())
    x, weight = (t.chunk(2)[mesh["dp"].get_local_rank()] for t in (x, weight))
    if kind == "fsdp":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        run: Any = model
    elif kind == "ddp":
        run = DistributedDataParallel(model)  # over both axes
    else:
        run = model

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, PATTERN, timeout=60, **place)

    if kind.startswith("compiled"):
        backend = "inductor" if kind == "compiled by inductor" else "aot_eager"
        attend = torch.compile(attend, backend=backend, fullgraph=True)
    loss = (run(x, attend, kind == "recomputed") * weight).sum()
    loss.backward()
    grads = []
    for p in model.parameters():
        grad = p.grad
        if kind == "fsdp":
            grad = 2 * grad.full_tensor()  # FSDP divides by the size of its axis
            dist.all_reduce(grad, group=sp.get_group())
        elif kind == "ddp":
            grad = 4 * grad
        else:
            dist.all_reduce(grad)
        grads.append(grad)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total, grads


four = workers_of(4)


KINDS = ["plain", "recomputed", "fsdp", "ddp", "compiled"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("sharding", ("contiguous", "zigzag"))
@pytest.mark.parametrize("kind", slow_except(KINDS, [*KINDS, "compiled by inductor"]))
def test_a_model_over_two_axes_has_the_loss_and_gradients_of_one_process(four, kind, sharding):
    loss, grads = alone()
    for got, of_rank in four.run(over_ranks, kind, sharding):
        torch.testing.assert_close(got, loss, rtol=1e-12, atol=1e-12)
        for a, b in zip(of_rank, grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def in_two_layers(rank: int) -> list[Tensor]:
    """Runs two calls; their backward passes run in order of use, not of creation."""
    torch.manual_seed(3)
    group = groups[4]
    whole = [torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(6)]
    own = [shard(x, group=group).requires_grad_() for x in whole]
    first = ring_attention(*own[:3], sr.Causal(), group=group)
    second = ring_attention(*own[3:], sr.SlidingWindow(12), group=group)
    grads = torch.autograd.grad((second * first.detach()).sum() + first.sum(), own)
    return [unshard(x.detach(), group=group) for x in (first, second, *grads)]


def test_two_layers_in_flight(four):
    torch.manual_seed(3)
    whole = [torch.randn(1, 2, 40, 8, dtype=torch.float64).requires_grad_() for _ in range(6)]
    first = sr.attention(*whole[:3], sr.Causal())
    second = sr.attention(*whole[3:], sr.SlidingWindow(12))
    grads = torch.autograd.grad((second * first.detach()).sum() + first.sum(), whole)
    for results in four.run(in_two_layers):
        for got, wanted in zip(results, (first, second, *grads), strict=True):
            torch.testing.assert_close(got, wanted.detach(), rtol=1e-12, atol=1e-12)


def of_a_batch_of_gradients(rank: int) -> bool:
    torch.manual_seed(4)
    whole, grads = torch.randn(3, 1, 2, 40, 8), torch.randn(3, 1, 2, 40, 8)
    own = [shard(x, group=groups[4]).requires_grad_() for x in whole]
    ring_attention(*own, sr.Causal(), group=groups[4]).add_(1)  # no view: may change in place
    out = unshard(ring_attention(*own, sr.Causal(), group=groups[4]), group=groups[4])
    found = torch.autograd.grad(out, own, grads, is_grads_batched=True, retain_graph=True)
    each = (torch.autograd.grad(out, own, grad, retain_graph=True) for grad in grads)
    expected = map(torch.stack, zip(*each, strict=True))
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


def test_a_batch_of_gradients_over_ranks(four):
    assert all(four.run(of_a_batch_of_gradients))


def with_odd_inputs(rank: int) -> list[bool]:
    """Transposed inputs, local queries without keys, autocast, no batch, no width."""
    found = []
    group = groups[4]
    torch.manual_seed(0)
    pattern = sr.Dilated(32, 4, 1) | sr.GlobalTokens(2)
    for shape, backend in (((2, 40, 2, 8), None), ((2, 40, 2, 8), "gather"), ((0, 40, 2, 8), None),
                           ((1, 40, 2, 0), None), ((1, 40, 0, 8), None)):  # fmt: skip
        whole = [torch.randn(shape).transpose(1, 2) for _ in range(3)]
        own = [shard(x, group=group) for x in whole]
        own = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in own]
        for enabled in (False, True):
            with torch.autocast("cpu", enabled=enabled):
                out = ring_attention(*own, pattern, group=group, backend=backend)
                leaves = [x.clone().requires_grad_() for x in whole]
                wanted = sr.attention(*leaves, pattern, backend=backend)
            grads = torch.autograd.grad(out.sum(), own, materialize_grads=True)
            expected = torch.autograd.grad(wanted.sum(), leaves, materialize_grads=True)
            tolerance = {"rtol": 0.05, "atol": 0.1} if enabled else {"rtol": 1e-4, "atol": 1e-5}
            for got, whole_one in zip((out, *grads), (wanted, *expected), strict=True):
                part = shard(whole_one, group=group)
                found.append(torch.allclose(got, part, **tolerance) and got.dtype == part.dtype)
    return found


def test_odd_inputs(four):
    for found in four.run(with_odd_inputs):
        assert len(found) == 40 and all(found), found


def in_subgroups(rank: int) -> tuple[Tensor, Tensor]:
    """Runs two rings of two ranks at the same time, on different sequences."""
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    number = 0 if rank in (0, 3) else 1
    torch.manual_seed(number)
    whole = [torch.randn(1, 1, 20 + 9 * number, 8, dtype=torch.float64) for _ in range(3)]
    pattern = (sr.Causal(), sr.Full())[number]
    group = pairs[number]
    out = ring_attention(*(shard(x, group=group) for x in whole), pattern, group=group)
    return unshard(out, group=group), sr.attention(*whole, pattern)


def test_subgroups(four):
    for got, wanted in four.run(in_subgroups):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def of_unshard(rank: int) -> list[Any]:
    group = groups[3] if rank < 3 else None
    if group is None:
        return []
    found: list[Any] = []
    for sharding in ("contiguous", "zigzag", "chunks:2,0,0,1"):
        for length in (0, 1, 2, 17, 60):
            whole = torch.randn(3, length, 2, generator=torch.Generator().manual_seed(0))
            place = {"dim": 1, "group": group, "sharding": sharding}
            own = shard(whole, **place).requires_grad_()
            back = unshard(own, **place, length=length)
            (grad,) = torch.autograd.grad((back * whole * (rank + 1)).sum(), own)
            found.append(torch.equal(back, whole))
            found.append(torch.allclose(grad, shard(whole * 6, **place)))
    try:
        unshard(torch.zeros(1, 1, rank + 3, 1), group=group)
    except ValueError as error:
        found.append("shard" in str(error))
    return found


def test_unshard_is_the_inverse_of_shard(four):
    for found in four.run(of_unshard)[:3]:
        assert len(found) == 31 and all(found), found


def test_one_process_needs_no_group():
    whole = [torch.randn(1, 2, 30, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    assert not dist.is_initialized()
    got = ring_attention(*whole, PATTERN, return_lse=True)
    wanted = sr.attention(*whole, PATTERN, return_lse=True)
    assert all(map(torch.equal, got, wanted))
    assert torch.equal(shard(whole[0]), whole[0]) and torch.equal(unshard(whole[0]), whole[0])
    assert ring_attention.last_traffic() == (0, 0, 0, None, 0.0)
