"""Layouts by arithmetic: those of the general compiler, without a value read from their device.

The general compiler and `to_dense` are the oracles: same entries in the same order, same bits of
each, same tiles. What the device does runs here on CPU tensors, on the meta device, where whatever
asks for a value raises, and traced by torch.compile.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from patterns_oracle import build
from strategies import cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparsering as sr
from sparsering.kernels.triton.walk import walk
from sparsering.layouts.bitmaps import unpack
from sparsering.layouts.compile import build_layout
from sparsering.layouts.device import plan as plan_module
from sparsering.layouts.device import sample as sample_module
from sparsering.layouts.device.build import arithmetic_layout, make_pass
from sparsering.layouts.device.plan import plan
from sparsering.layouts.layout import BlockLayout, Pass, slots_of, stretched
from sparsering.patterns.algebra import Frame

CPU, META = torch.device("cpu"), torch.device("meta")
W = sr.SlidingWindow

PATTERNS = {
    "full": sr.Full(),
    "causal": sr.Causal(),
    "pooled": sr.PooledCausal(8, 3),
    "window": sr.Causal() & W(40, 40),
    "dilated window": W(30, 12, 3),
    "open dilated window": W(None, 0, 2),
    "sinks": sr.Causal() & (W(20) | sr.GlobalTokens(5, rows=False)),
    "global tokens": W(6, 6) | sr.GlobalTokens(20),
    "two passes": W(6) | W(40, 40, 4),
    "longnet": sr.LongNet((32, 64, 200), (1, 3, 7)),
    "causal longnet": sr.LongNet((48, 128), (2, 5), "block") & sr.Causal(),
    "heads of their own": sr.LongNet((50, 100), (3, 7), (0, 5, 1, 3)) & W(60),
    "short segments": sr.Dilated(7, 3) | sr.Dilated(11, 1),
    "two dilations": sr.Dilated(64, 2) & W(50, 50, 3),
    "block window": sr.BlockWindow(2, 24) & sr.Causal(),
    "block dilated": sr.BlockDilated((1, 3), 16),
    "hierarchical": sr.Hierarchical(((1, 32), (64, 128), (128, None)), 16) & sr.Causal(),
}

FRAMES = [  # q_len, kv_len, query heads, kv heads, q_start
    Frame(257, 257, 4, 4, 0),
    Frame(130, 160, 8, 4, 30),
    Frame(96, 50, 4, 4, 20),
    Frame(40, 33, 4, 4, -5),
    Frame(1, 200, 4, 4, 199),
    Frame(1, 1, 4, 4, 0),
]
SIZES = (16, 48, 64, 256)


def cells(layout: BlockLayout, p: Pass, head: int) -> Tensor:
    """[entries, b, b] which pairs of real positions are in, of one head's entries."""
    row, key, bitmap, axis = layout.table(p, 0, head)
    _, query = slots_of(p.query_start, p.query_stop, p.step, layout.block_size)
    _, keys = slots_of(p.key_start, p.key_stop, p.step, layout.block_size)
    real = query[axis][row][:, :, None] & keys[axis][key][:, None, :]
    held = real.clone()
    held[bitmap >= 0] &= unpack(p.bitmaps[bitmap[bitmap >= 0]], layout.block_size)
    return held


def assert_is_the_compiled_one(made: BlockLayout, compiled: BlockLayout) -> None:
    assert len(made.passes) == len(compiled.passes)
    for a, b in zip(made.passes, compiled.passes, strict=True):
        assert (a.step, a.covers, a.branch) == (b.step, b.covers, b.branch)
        for name in ("query_start", "query_stop", "key_start", "key_stop"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype and torch.equal(x, y), name
        assert a.longest >= b.longest and a.row_ptr.dtype == a.key_tile.dtype == torch.int32
        heads = max(a.row_ptr.shape[1], b.row_ptr.shape[1])
        ends = [stretched(x.row_ptr, 1, heads) for x in (a, b)]
        assert torch.equal(*ends)
        for head in range(heads):
            n, tables = int(ends[0][0, head, -1]), []
            for p in (a, b):
                at = p.table_of(head, heads)
                tables.append((p.key_tile[0, at, :n], p.bitmap[0, at, :n] < 0))
            assert all(torch.equal(x, y) for x, y in zip(*tables, strict=True))
        for head in range(made.frame.num_heads):
            assert torch.equal(cells(made, a, head), cells(compiled, b, head))
    assert float(made.pairs) == pytest.approx(float(compiled.pairs), rel=1e-12)


def assert_has_a_closed_form(pattern: sr.Pattern, frame: Frame, block_size: int) -> None:
    made = arithmetic_layout(pattern, frame, block_size, CPU)
    assert made is not None
    assert_is_the_compiled_one(made, build_layout(pattern, frame, block_size, CPU))


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_is_laid_out_as_the_compiler_does(name):
    number = list(PATTERNS).index(name)
    for i in (number, number + 1):
        frame = FRAMES[i % len(FRAMES)]
        assert_has_a_closed_form(PATTERNS[name], frame, SIZES[(i // 2) % len(SIZES)])


@pytest.mark.slow
@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_at_every_block_size(name, block_size):
    for frame in [*FRAMES, Frame(700, 700, 4, 2, 0), Frame(300, 900, 4, 1, 500)]:
        if name != "heads of their own" or frame.num_kv_heads == 4:
            assert_has_a_closed_form(PATTERNS[name], frame, block_size)


def assert_any_is_the_compiled_one(case, block_size) -> None:
    spec, scene = case
    pattern = build(spec)
    frame = Frame.build(**scene.arguments)
    made = arithmetic_layout(pattern, frame, block_size, CPU)
    assume(made is not None)
    assert_is_the_compiled_one(made, build_layout(pattern, frame, block_size, CPU))


@settings(max_examples=8)
@given(cases(), st.sampled_from((16, 32, 48)))
def test_any_expression_that_has_a_closed_form(case, block_size):
    assert_any_is_the_compiled_one(case, block_size)


@pytest.mark.slow
@settings(max_examples=1500)
@given(cases(max_length=300), st.sampled_from((16, 32, 48, 64, 128)))
def test_very_many_expressions(case, block_size):
    assert_any_is_the_compiled_one(case, block_size)


def test_positions_beyond_32_bits_are_laid_out():
    for q_start in (1 << 31, 1 << 36):
        frame = Frame(70, 100, 1, 1, q_start)
        pooled = sr.PooledCausal(4, min(q_start // 60, 1 << 31))
        for pattern in (pooled, W(q_start - 20), sr.Dilated(q_start, 3)):
            assert_has_a_closed_form(pattern, frame, 16)


@pytest.mark.parametrize(
    "pattern",
    [
        sr.RandomBlocks(0.5, 16),
        sr.Causal() & sr.Documents((40, 24)),
        sr.Packed((40, 24), sr.Causal()),
        sr.Blocks(torch.ones(4, 4) > 0, 16),
        W(3) | sr.Dense(torch.ones(64, 64) > 0),
        sr.KeyPadding((60,)),
    ],
)
def test_patterns_of_data_have_none(pattern):
    assert arithmetic_layout(pattern, Frame.build(64, 64, 1, 1, None), 16, CPU) is None


def test_heads_whose_tiles_lie_alike_share_a_table():
    """Where the compiler does; 16 heads of LongNet with 12 offsets."""
    pattern, frame = sr.LongNet((256, 1024), (1, 12)) & sr.Causal(), Frame(4096, 4096, 16, 16, 0)
    made = arithmetic_layout(pattern, frame, 64, CPU)
    assert [p.row_ptr.shape[1] for p in made.passes] == [1, 1]
    assert_is_the_compiled_one(made, build_layout(pattern, frame, 64, CPU))


def test_tables_have_no_room_to_spare_where_tiles_tell():
    made = arithmetic_layout(sr.Causal() & W(512), Frame(4096, 4096, 1, 1, 0), 128, CPU)
    compiled = build_layout(sr.Causal() & W(512), Frame(4096, 4096, 1, 1, 0), 128, CPU)
    (a,), (b,) = made.passes, compiled.passes
    assert (a.longest, a.key_tile.shape) == (b.longest, b.key_tile.shape)
    assert len(a.bitmaps) == len(b.bitmaps)


def assert_some_rows_tell_of_all(pattern: sr.Pattern, frame: Frame, block_size: int) -> int:
    """How many tables were planned by some of their rows."""
    sampled, samples = plan_module.sampled, []

    def note(*asked):
        samples.append(sampled(*asked))
        return samples[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_module, "_LEAST_ROWS", 8)
        patch.setattr(plan_module, "sampled", note)
        by_some = plan(pattern, frame, block_size)
        patch.setattr(plan_module, "sampled", lambda *asked: None)
        by_all = plan(pattern, frame, block_size)
    assert (by_some is None) == (by_all is None)
    for a, b in zip(by_some or (), by_all or (), strict=True):
        for x, y in zip(a.tables, b.tables, strict=True):
            assert (x.entries, x.varying, x.kinds) == (y.entries, y.varying, y.kinds)
            assert x.slots == y.slots and x.longest[0] == y.longest[0]
            assert x.longest[1] >= y.longest[1]
    return sum(x is not None for x in samples)


@pytest.mark.parametrize(
    ("pattern", "slack"),
    [
        (sr.Full(), 0),
        (sr.Causal(), 0),
        (sr.Causal() & W(500), 0),
        (W(100, 300) & sr.Dilated(96, 1), 3),
        (sr.Causal() & (W(200) | sr.GlobalTokens(300)), None),
        (sr.Dilated(128, 2, 1) & W(500), None),
        (sr.Causal() & (sr.Dilated(128, 1) | W(900, 0, 2)), None),
    ],
)
def test_some_rows_tell_how_much_room_all_need(pattern, slack):
    for frame in (Frame(4000, 4000, 1, 1, 0), Frame(3000, 4500, 1, 1, 1500)):
        assert assert_some_rows_tell_of_all(pattern, frame, 16) > 0
        (made, *_), (compiled, *_) = (
            lay(pattern, frame, 16, CPU).passes for lay in (arithmetic_layout, build_layout)
        )
        assert slack is None or made.longest[1] <= compiled.longest[1] + slack + 14


@pytest.mark.slow
@settings(max_examples=1500)
@given(cases(max_length=900, max_heads=2), st.sampled_from((16, 32)))
def test_some_rows_of_very_many_expressions_tell_of_all(case, block_size):
    spec, scene = case
    assert_some_rows_tell_of_all(build(spec), Frame.build(**scene.arguments), block_size)


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


QUICK = ("sinks", "two passes", "causal longnet", "block dilated")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in PATTERNS]
)
def test_nothing_is_read_from_the_device_or_copied_to_it(name):
    frame = FRAMES[1]
    with _Watch() as watch:
        layout = arithmetic_layout(PATTERNS[name], frame, 16, META)
        for number in range(len(layout.passes)):
            for by_key in (False, True):
                walk(layout, number, by_key=by_key, programs=2, processors=100)
    assert watch.calls > 50
    here = arithmetic_layout(PATTERNS[name], frame, 16, CPU)
    for a, b in zip(layout.passes, here.passes, strict=True):
        assert a.longest == b.longest and a.covers == b.covers
        for name in ("query_start", "key_stop", "row_ptr", "key_tile", "bitmap", "bitmaps"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.is_meta and (x.shape, x.dtype) == (y.shape, y.dtype), name


def test_the_watch_sees_a_value_that_is_read_and_one_that_is_copied():
    there = torch.ones(3, device=META)
    for work in (lambda: there.nonzero(), lambda: there.sum().item(), lambda: there.cpu()):
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), _Watch():
            work()
    with pytest.raises(AssertionError), _Watch():
        torch.ones(3).to(META)


def test_a_device_that_is_not_the_host_makes_its_own_layouts():
    pattern = sr.Causal() & W(100)
    frame = Frame(300, 300, 1, 1, 0)
    assert isinstance(build_layout(pattern, frame, 16, META).pairs, Tensor)
    assert not isinstance(build_layout(pattern, frame, 16, CPU).pairs, Tensor)
    documents = sr.Documents((100, 200)) & pattern  # laid out on the host, and moved
    assert build_layout(documents, frame, 16, META).pairs == documents.layout(300).num_pairs


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_what_the_device_does_compiles_whole(name):
    for planned in plan(PATTERNS[name], FRAMES[1], 16):

        def tables(planned=planned) -> list[Tensor]:
            made, pairs = make_pass(planned, FRAMES[1], 16, CPU)
            return [*made.tensors(), pairs]

        torch._dynamo.reset()
        compiled = torch.compile(tables, fullgraph=True, backend="aot_eager")()
        assert all(torch.equal(a, b) for a, b in zip(compiled, tables(), strict=True))


class _Stream:
    """What the library asks of a CUDA stream, writing down who waits for what."""

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
    from sparsering.layouts.device import streams as module

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


def visit(layout: BlockLayout) -> list[int]:
    """Which walks a launch is given."""
    return [id(walk(layout, 0, by_key=b, programs=2, processors=9)) for b in (False, True)]


def test_other_streams_wait_for_a_layout_and_its_walks_and_the_host_for_nothing(streams):
    log, use = streams
    with _Watch():  # no synchronise either: the meta device has none
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
