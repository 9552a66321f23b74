"""Copies to a GPU and tensors that streams share, on a machine without a GPU.

A function mode plays the GPU: it refuses copies from memory that is not pinned, or that the host
would wait for. The meta device plays it where kernels are launched: asking for a value raises.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparsering as sr
from sparsering.distributed import rank_layouts
from sparsering.ground import streams as module
from sparsering.kernels.triton.walk import Walk, walk
from sparsering.layouts.compile import build_layout
from sparsering.layouts.layout import BlockLayout
from sparsering.patterns.algebra import Frame
from sparsering.patterns.keys import key_mask

CPU, META, GPU = torch.device("cpu"), torch.device("meta"), torch.device("cuda")
W = sr.SlidingWindow


class _Gpu(TorchFunctionMode):
    """Takes copies to a GPU that are pinned and not waited for; their results are on META."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []
        self.copies: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if function is Tensor.pin_memory:
            assert args[0].is_contiguous()  # torch cannot pin an expanded tensor
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if function is Tensor.to and GPU in args:
            assert kwargs.get("non_blocking"), "the host would wait"
            assert any(args[0] is x for x in self.pinned), "the copy is not from pinned memory"
            self.copies.append(args[0])
            return function(args[0], META)
        return function(*args, **kwargs)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(module, "capturing", lambda device: False)
    return _Gpu()


ALIKE = torch.tensor([[0, 2], [1, 0], [2, 1]]).expand(2, 1, 3, 2)  # of both batch entries

PATTERNS = {
    "sinks": sr.Causal() & (W(20) | sr.GlobalTokens(5, rows=False)),
    "two passes": W(6) | W(40, 40, 4),
    "causal longnet": sr.LongNet((48, 128), (2, 5), "block") & sr.Causal(),
    "documents": sr.Packed((20, 28), sr.Causal()),
    "selected": sr.SelectedBlocks(ALIKE, 16) & sr.Causal(),
    "selected, by the compiler": sr.SelectedBlocks(ALIKE, 16) & W(30),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_layouts_are_copied_to_a_gpu_pinned_and_not_waited_for(gpu, name):
    frame = Frame(48, 48, 4, 4, 0)
    here = build_layout(PATTERNS[name], frame, 16, CPU)
    with gpu:
        there = build_layout(PATTERNS[name], frame, 16, GPU)
    tables = [x for p in here.passes for x in p.tensors()]
    assert len(gpu.copies) == len(tables) > 0
    assert all(torch.equal(a, b) for a, b in zip(gpu.copies, tables, strict=True))
    assert all(x.is_meta for p in there.passes for x in p.tensors())


def test_masks_of_keys_are_copied_to_a_gpu_pinned_and_not_waited_for(gpu):
    valid = torch.arange(40) < 30
    with gpu:
        key_mask((sr.KeyMask(valid),), 40, GPU)
    assert torch.equal(gpu.copies[0], valid[None])


def test_tables_of_a_ring_are_copied_pinned_and_wait_for_their_stream(gpu, monkeypatch):
    events: list[torch.device] = []
    monkeypatch.setattr(module.Built, "now", lambda device: events.append(device))
    plan = sr.distributed.RingPlan.build(sr.Causal() & W(40), 256, 4, block_size=16)
    sr.layout_cache.clear()
    with gpu:
        rank_layouts.local_step(plan, 1, GPU)
        arriving = rank_layouts.round_step(plan, 1, 0, 1, GPU)
    assert len(gpu.copies) > 15 and events == [GPU, GPU]
    assert arriving.work.layout is not None and "first_entry" in vars(arriving.work.layout)
    sr.layout_cache.clear()


def test_a_graph_that_is_captured_cannot_copy_a_layout_and_says_so(gpu, monkeypatch):
    monkeypatch.setattr(module, "capturing", lambda device: device.type == "cuda")
    with gpu, pytest.raises(RuntimeError, match="once before the capture"):
        build_layout(W(5), Frame(48, 48, 1, 1, 0), 16, GPU)
    assert not gpu.copies


class _Watch(TorchDispatchMode):
    """Refuses what reads a value of the meta device, or moves one to or from it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = function(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        devices = {x.device.type for x in (*given, *made)}
        if "meta" in devices:
            name = function.overloadpacket.__name__
            self.calls += 1
            refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
            assert devices == {"meta"}, f"{name} of {devices}"
            assert not any(word in name for word in refused), name
            assert name != "index" or all(x.dtype != torch.bool for x in given), name
        return out


@pytest.mark.parametrize("name", PATTERNS)
def test_a_walk_reads_nothing_from_the_device(name):
    layout = build_layout(PATTERNS[name], Frame(48, 48, 4, 4, 0), 16, META)
    with _Watch() as watch:
        for number in range(len(layout.passes)):
            for by_key in (False, True):
                walk(layout, number, by_key=by_key, programs=2, processors=100)
    assert watch.calls > 50


def test_the_watch_sees_a_value_that_is_read_and_one_that_is_copied():
    there = torch.ones(3, device=META)
    for work in (lambda: there.nonzero(), lambda: there.sum().item(), lambda: there.cpu()):
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), _Watch():
            work()
    with pytest.raises(AssertionError), _Watch():
        torch.ones(3).to(META)


class _Stream:
    """Stands in for a CUDA stream, and writes down who waits for what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, CPU

    def record_event(self) -> str:
        self.log.append(f"{self.name} done")
        return self.name

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def streams(monkeypatch):
    """Streams of a machine whose GPU is the meta device; (log, use another, capture)."""
    log: list[str] = []
    state = {"stream": _Stream("first", log), "capturing": False}

    class Cuda:
        Stream = Event = object
        current_stream = staticmethod(lambda device=None: state["stream"])
        is_current_stream_capturing = staticmethod(lambda: state["capturing"])

    class Torch:
        cuda = Cuda
        device = torch.device

    monkeypatch.setattr(module, "torch", Torch)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: log.append("held"))

    class Device:
        """The meta device, by the name of a GPU."""

        type = "cuda"

    now = module.Built.now
    monkeypatch.setattr(module.Built, "now", lambda device: now(Device()))
    monkeypatch.setattr(sr.layouts.cache, "capturing", lambda device: state["capturing"])
    monkeypatch.setattr(sr.kernels.triton.walk, "capturing", lambda device: state["capturing"])

    def use(name: str | None = None, capturing: bool = False) -> None:
        state["stream"] = _Stream(name, log) if name else state["stream"]
        state["capturing"] = capturing
        log.clear()

    sr.layout_cache.clear()
    yield log, use
    sr.layout_cache.clear()


VISITED: list[Walk] = []  # kept, so that no later walk has the address of an earlier one


def visit(layout: BlockLayout) -> list[int]:
    """Returns the walks that a launch gets."""
    with _Watch():  # no synchronise either: the meta device has none
        walks = [walk(layout, 0, by_key=b, programs=2, processors=9) for b in (False, True)]
    VISITED.extend(walks)
    return [id(x) for x in walks]


def test_other_streams_wait_for_a_layout_and_its_walks_and_the_host_for_nothing(streams):
    log, use = streams
    layout = W(100).layout(300, block_size=16, device=META)
    walks = visit(layout)
    assert log == ["first done"] * 3
    use()
    assert W(100).layout(300, block_size=16, device=META) is layout
    assert visit(layout) == walks and log == []
    use("second")
    assert W(100).layout(300, block_size=16, device=META) is layout
    assert log[0] == "second waits for first" and "held" in log
    use("second")
    assert visit(layout) == walks
    assert [x for x in log if x != "held"] == ["second waits for first"] * 2
    assert len(log) > 10


def test_other_streams_wait_for_the_tables_of_a_ring(streams):
    log, use = streams
    plan = sr.distributed.RingPlan.build(sr.Causal() & W(40), 256, 4, block_size=16)
    step = rank_layouts.local_step(plan, 1, META)
    assert log == ["first done"]
    use()
    assert rank_layouts.local_step(plan, 1, META) is step and log == []
    use("second")
    assert rank_layouts.local_step(plan, 1, META) is step
    assert log[0] == "second waits for first" and log.count("held") > 8


def test_what_is_made_while_a_graph_is_captured_is_the_graphs_alone(streams):
    log, use = streams
    use("graph", capturing=True)
    first = W(50).layout(300, block_size=16, device=META)
    assert W(50).layout(300, block_size=16, device=META) is not first
    walks = visit(first)
    assert visit(first) != walks and log == []
    use("later")
    kept = W(50).layout(300, block_size=16, device=META)
    assert kept is not first
    outside = visit(kept)
    use("graph", capturing=True)  # made before: read as it is, waited for by whoever captures
    assert W(50).layout(300, block_size=16, device=META) is kept
    assert visit(kept) == outside and log == []


def test_a_moved_layout_keeps_its_counts(streams):
    layout = sr.LongNet((32, 64), (1, 2)).layout(200, block_size=16, device=META)
    assert "first_entry" in vars(layout) and layout.built is not None
    assert replace(layout).built is layout.built
