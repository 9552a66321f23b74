"""Tracers and wrappers of tensors: what cannot run says so in a sentence, and leaves no trace."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import sparsering as sr
from sparsering.distributed import simulate_ring

INPUTS = tuple(torch.randn(3, 1, 2, 48, 8, generator=torch.Generator().manual_seed(0)))
EDGES = torch.tensor([0, 20, 48])


class Layer(torch.nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.call(query, key, value)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return sr.attention(query, key, value, sr.SlidingWindow(9))


def attend_as_leaf(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value)


torch.fx.wrap("attend_as_leaf")

CALLS: dict[str, Callable[..., Tensor]] = {
    "attention": attend,
    "varlen": lambda q, k, v: sr.attention_varlen(
        *(x[0].transpose(0, 1) for x in (q, k, v)), [0, 20, 48], [0, 20, 48]
    ),
    "weights": lambda q, k, v: sr.attention_weights(q, k, sr.SlidingWindow(9)).values,
    "merge": lambda q, k, v: sr.merge_attention([q, k], [v[..., 0], v[..., 1]])[0],
    "ring": lambda q, k, v: simulate_ring(q, k, v, sr.SlidingWindow(9), world_size=2),
    "cache": lambda q, k, v: sr.KVCache(sr.SlidingWindow(9), 1, 2, 8).attend(q, k, v),
}


@pytest.mark.parametrize("name", CALLS)
def test_symbolic_trace_names_export_and_wrap(name: str):
    with pytest.raises(ValueError, match=r"got .*Proxy; .* torch\.export, or torch\.fx\.wrap"):
        torch.fx.symbolic_trace(Layer(CALLS[name]))


def test_the_ways_out_of_symbolic_trace_work():
    expected = attend(*INPUTS)
    traced = torch.fx.symbolic_trace(Layer(lambda q, k, v: attend_as_leaf(q, k, v)))
    exported = torch.export.export(Layer(attend), INPUTS).module()
    assert torch.equal(traced(*INPUTS), expected) and torch.equal(exported(*INPUTS), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, edges: sr.attention_varlen(*[q[0].transpose(0, 1)] * 3, edges, edges),
        lambda q, edges: sr.attention(q, q, q, sr.Packed(edges.diff(), sr.Full())),
    ],
)
def test_exported_lengths_are_data(call: Callable[..., Tensor]):
    layer = Layer(lambda q, edges, _: call(q, edges))
    exported = torch.export.export(layer, (INPUTS[0], EDGES, EDGES + 0)).module()
    others = torch.cat((EDGES[:1], EDGES[1:-1] - 1, EDGES[-1:]))
    expected = call(INPUTS[0], others)
    assert torch.equal(exported(INPUTS[0], others, EDGES), expected)
    assert not torch.equal(expected, call(INPUTS[0], EDGES))


def faked(call: Callable[..., Tensor]) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return call(*map(mode.from_tensor, INPUTS))


TRACERS: dict[str, Callable[[Callable[..., Tensor]], object]] = {
    "fake tensors": faked,
    "export": lambda call: torch.export.export(Layer(call), INPUTS),
    "make_fx": lambda call: make_fx(call)(*INPUTS),
    "functionalize": lambda call: functionalize(call)(*INPUTS),
}


@pytest.mark.parametrize(
    ("name", "tracer"),
    [  # a cache computes shapes of fake tensors
        *itertools.product(["weights", "ring"], ["fake tensors", "functionalize"]),
        ("cache", "functionalize"),
    ],
)
def test_calls_that_need_numbers_say_so(name: str, tracer: str):
    with pytest.raises(ValueError, match=r"numbers, got some of a tracer .* or use attention"):
        TRACERS[tracer](CALLS[name])


@pytest.mark.filterwarnings("ignore")  # of tracers
@pytest.mark.parametrize("tracer", ["fake tensors", "make_fx", "functionalize"])
def test_later_calls_read_no_tables_of_a_tracer(tracer: str):
    pattern = sr.SlidingWindow(11, {"fake tensors": 1, "make_fx": 2, "functionalize": 3}[tracer])
    expected = sr.attention(*INPUTS, pattern, backend="reference")

    def call(*args: Tensor) -> Tensor:
        pattern.layout(48).num_blocks  # noqa: B018 - computes tables
        return sr.attention(*args, pattern)

    TRACERS[tracer](call)
    leaves = [x.clone().requires_grad_() for x in INPUTS]
    out = sr.attention(*leaves, pattern)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    weights = sr.attention_weights(*leaves[:2], pattern).to_dense()
    torch.testing.assert_close(weights @ INPUTS[2], expected)


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensors_go_through_local_map(mesh: dist.DeviceMesh):
    args = [distribute_tensor(x, mesh, [Shard(1)]) for x in INPUTS]
    for name in ("attention", "varlen", "weights", "ring", "cache"):
        with pytest.raises(ValueError, match=r"got a DTensor; pass \.to_local\(\), or .*local_map"):
            CALLS[name](*args)
    by_head = local_map(attend, out_placements=[Shard(1)], in_placements=([Shard(1)],) * 3)
    assert torch.equal(by_head(*args).full_tensor(), attend(*INPUTS))
    with pytest.raises(ValueError, match=r"sink must be an ordinary tensor, got a DTensor"):
        sink = distribute_tensor(torch.zeros(2), mesh, [Shard(0)])
        sr.attention(*INPUTS, sr.Causal(), sink=sink)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors_name_key_mask():
    masked = torch.masked.masked_tensor(INPUTS[0], INPUTS[0] > 0)
    with pytest.raises(ValueError, match=r"got a MaskedTensor; pass \.get_data\(\).*KeyMask"):
        attend(masked, *INPUTS[1:])
