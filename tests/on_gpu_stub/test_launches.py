"""Steady calls launch few kernels; tests notice a call that asks more of a device."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from calls import LONGNET, WINDOW, functions_of, learnt, rows, steady
from gpu_stub import capturing, counted, gpu
from triton.tools.tensor_descriptor import TensorDescriptor

import sparsering as sr
from sparsering.decoding.steps import page_layout
from sparsering.distributed import exchange
from sparsering.distributed.agreement import report_failure
from sparsering.kernels.problem import Problem
from sparsering.kernels.triton import call as backend
from sparsering.kernels.triton import launch as triton_launch
from sparsering.kernels.triton import operands
from sparsering.kernels.triton.configs import Config, candidates, default
from sparsering.kernels.triton.walk import walk
from sparsering.layouts.last_query import last_query_layout
from sparsering.patterns.algebra import Frame

EITHER = [
    pytest.param(WINDOW, id="window"),
    pytest.param(LONGNET, id="two branches", marks=pytest.mark.slow),
]
THREE = sr.LongNet((256, 512, 1024), (1, 2, 4)) & sr.Causal()


@pytest.mark.parametrize("pattern", EITHER)
def test_a_forward(hopper, pattern):
    query, key, value = rows(), rows(), rows()
    steady(lambda: sr.attention(query, key, value, pattern), triton=3, torch=3)


def test_a_forward_and_a_backward(hopper):
    inputs = learnt(rows(), rows(), rows())
    grad = rows()
    steady(
        lambda: torch.autograd.grad(sr.attention(*inputs, WINDOW), inputs, grad), triton=5, torch=3
    )


def test_a_steady_call_runs_few_functions(hopper):
    """The time of the host, as a number that no other work on the machine changes."""
    query, token = rows(), rows(tokens=1)
    cache = sr.KVCache(WINDOW, 1, 2, 64, num_heads=2, dtype=torch.bfloat16)
    with torch.no_grad():
        cache.attend(query, query, query)
        assert functions_of(lambda: sr.attention(query, query, query, WINDOW)) <= 85
        assert functions_of(lambda: cache.attend(token, token, token)) <= 92


def test_a_call_like_an_earlier_one_reads_its_own_tensors(hopper, monkeypatch):
    """Also where the first had one tensor for all three; other kinds are prepared apart."""
    given: list[tuple[object, ...]] = []
    arguments = triton_launch.Launch.arguments
    monkeypatch.setattr(
        triton_launch.Launch,
        "arguments",
        lambda self, of_call: given.append((self, arguments(self, of_call))) or given[-1][1],
    )
    same, query, key, value = (rows() for _ in range(4))
    moved = torch.zeros(2 * 512 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:]
    for args in ((same,) * 3, (query, key, value), (query, key, moved.view(key.shape))):
        sr.attention(*args, WINDOW)
    first, second, third = ((x, y) for x, y in given if x.kernel.fn.__name__ == "forward_kernel")
    assert first[0] is second[0] is not third[0]
    names = first[0].kernel.arg_names
    for name, x in (("query", query), ("key", key), ("value", value)):
        assert second[1][names.index(name)] is x
    assert second[1][names.index("key_tiles")].base is key
    assert not any(x is same for x in (*first[0].fixed, *third[1]))


def test_lengths_batches_and_heads_are_not_compiled_for(hopper):
    sr.attention(rows(), rows(), rows(), WINDOW)
    with counted() as counts:
        for heads, tokens in ((2, 511), (4, 700), (1, 1024)):
            sr.attention(*(rows(heads, tokens) for _ in range(3)), WINDOW)
    assert counts.triton >= 3 and not counts.compiles, counts.compiles


def test_numbers_of_new_tokens_are_compiled_for_in_three_forms(hopper):
    """A service meets all of them, in drafts and at the ends of prompts."""
    keys = rows(2, 700)
    query = rows(8, 128)

    def call(tokens: int) -> None:
        sr.attention(query[:, :, :tokens], keys, keys, WINDOW)

    with torch.no_grad():
        for tokens in (1, 16, 128):
            call(tokens)
        with counted() as counts:
            for tokens in range(2, 65):
                call(tokens)
    assert counts.triton >= 63 and not counts.compiles, counts.compiles


def test_lengths_of_a_compiled_call_are_data_and_nobody_waits(hopper):
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def call(query: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pattern = sr.Causal() & sr.Documents(lengths)
        return sr.attention(query, query, query, pattern, backend="triton")

    compiled, (query,) = torch.compile(call, backend=backend, fullgraph=True), learnt(rows())
    compiled(query, torch.tensor([100, 412])).sum().backward()
    with counted() as counts:
        compiled(query, torch.tensor([200, 312])).sum().backward()
    assert counts.triton == 4
    assert len(graphs) == 1
    assert not counts.syncs and not counts.compiles, counts


def test_a_kernel_that_no_cache_has_is_compiled(hopper, tmp_path):
    """Nothing that makes Triton's interpreter quick in tests stands in the way of its compiler."""

    @triton.jit
    def counting(x, first):
        tl.store(x + tl.arange(0, 16), first + tl.arange(0, 16))

    with triton.knobs.cache.scope(), counted() as counts:
        triton.knobs.cache.dir = str(tmp_path)
        counting[(1,)](torch.zeros(16, dtype=torch.int32, device="cuda"), 7)
    assert counts.compiles and any(tmp_path.iterdir())


# ---- Planted defects: the stub and the bounds see each of them. ------------


def test_a_parameter_with_a_reserved_name_is_seen(hopper):
    @triton.jit
    def with_stream(x, stream: tl.int64):
        tl.store(x, stream)

    x = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(AssertionError, match="stream option"):
        with_stream[(1,)](x=x, stream=1)


def test_an_oversized_tile_is_seen(monkeypatch):
    monkeypatch.setattr(backend, "config_for", lambda *rest: Config(128, 64, 8, 4))
    with gpu(86), pytest.raises(Exception, match=r"out of resource|shared memory"):
        sr.attention(*(rows(width=128) for _ in range(3)), WINDOW)


def test_a_misaligned_tensor_map_is_seen(hopper, monkeypatch):
    flat = torch.randn(2 * 512 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:]
    query = rows()
    sr.attention(query, flat.view(1, 2, 512, 64), query, WINDOW)  # by pointers

    class Moved:
        """A tensor whose address looks aligned to the code that makes descriptors."""

        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def __getattr__(self, name: str) -> object:
            return getattr(self.x, name)

        def data_ptr(self) -> int:
            return self.x.data_ptr() // 16 * 16

    def described(x: torch.Tensor, tokens: int) -> object:
        found = matrix(Moved(x), tokens)
        found.tiles.base = x
        return found

    matrix = operands.matrix
    monkeypatch.setattr(operands, "matrix", described)
    monkeypatch.setattr(TensorDescriptor, "__post_init__", lambda self: None)  # asks base too
    triton_launch._launches.clear()
    sr.layout_cache.clear()
    with pytest.raises(RuntimeError, match="not aligned to 16 bytes"):
        sr.attention(query, flat.view(1, 2, 512, 64), query, WINDOW)


def test_a_wait_a_second_compile_and_a_hundredth_launch_are_seen(hopper):
    query = rows()

    def call() -> torch.Tensor:
        return sr.attention(query, query, query, WINDOW)

    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        steady(lambda: call().sum().item(), triton=3, torch=9)
    with pytest.raises(AssertionError, match="nonzero"):
        steady(lambda: call()[call() > 0], triton=3, torch=9)
    with pytest.raises(AssertionError, match="copy to the device"):
        steady(lambda: call() + torch.ones(64).to("cuda"), triton=3, torch=9)
    with pytest.raises(AssertionError, match="Launch"):
        steady(lambda: [call() for _ in range(4)], triton=3, torch=9)
    with pytest.raises(AssertionError, match="operators"):
        steady(lambda: [call().add_(1) for _ in range(100)], triton=100, torch=99)
    query = rows(width=32)
    with pytest.raises(AssertionError, match="forward_kernel"):
        steady(call, triton=3, torch=3, warm=0)


def test_memory_of_the_host_and_of_another_device_is_refused(hopper):
    query = rows()
    with pytest.raises(RuntimeError, match="same device"):
        query + torch.ones(64, dtype=torch.bfloat16)
    with gpu(80):
        elsewhere = rows()
    assert elsewhere.device != query.device
    tensors = {"x": query, "y": elsewhere}

    @triton.jit
    def of_two(x, y):
        tl.store(x, tl.load(y))

    with pytest.raises(AssertionError, match="on device"):
        triton_launch.Launch(of_two, 1, None, {}).run(tensors)


# ---- Decoding. -------------------------------------------------------------


@pytest.mark.parametrize("pattern", EITHER)
def test_a_decoded_token_of_a_cache(hopper, pattern):
    cache = sr.KVCache(pattern, 1, 2, 64, num_heads=2, dtype=torch.bfloat16)
    prompt, token = rows(tokens=100), rows(tokens=1)
    with torch.no_grad():
        cache.attend(prompt, prompt, prompt)
        steady(lambda: cache.attend(token, token, token), triton=2, torch=5)


@pytest.mark.parametrize("store", ["int8", "fp8"])
def test_a_decoded_token_of_a_cache_in_8_bits(hopper, store):
    """Few operators turn all the cache's rows to floats, for kernels that read no 8 bits."""
    cache = sr.KVCache(WINDOW, 1, 2, 64, num_heads=2, dtype=torch.bfloat16, store=store)
    prompt, token = rows(tokens=100), rows(tokens=1)
    with torch.no_grad():
        cache.attend(prompt, prompt, prompt)
        steady(lambda: cache.attend(token, token, token), triton=2, torch=40)


@pytest.mark.parametrize("pattern", EITHER)
def test_one_query_behind_a_growing_sequence(hopper, pattern):
    keys, query = rows(tokens=600), rows(tokens=1)
    lengths = iter(range(400, 500))

    def step() -> None:
        length = next(lengths)
        for _ in range(2):  # layers of a model
            sr.attention(query, keys[:, :, :length], keys[:, :, :length], pattern)

    with torch.no_grad():
        steady(step, triton=6, torch=8)


@pytest.mark.parametrize("pattern", [*EITHER, pytest.param(THREE, marks=pytest.mark.slow)])
def test_the_first_tokens_of_pages_of_a_cache(hopper, pattern):
    """Neither the eviction, nor the layout of the next page, nor its walks wait or launch much."""
    cache = sr.KVCache(pattern, 1, 8, 64, num_heads=8, dtype=torch.bfloat16)
    prompt, token = rows(8, tokens=600), rows(8, tokens=1)
    with torch.no_grad():
        cache.attend(prompt, prompt, prompt)
        launched = []
        for _ in range(130):
            with counted() as counts:
                cache.attend(token, token, token)
            assert not counts.syncs and counts.triton == len(pattern.branches), counts
            launched.append(counts.torch)
    usual = 2 if len(pattern.branches) == 1 else 5
    assert set(launched[1:127]) == {usual} and launched[129] == usual
    first = usual + 1 + len(pattern.branches)  # of a page
    assert launched[0] == launched[128] == first
    assert launched[127] == usual + 4  # evicts the first rows


def test_an_eviction_of_heads_that_keep_unequal_numbers_of_keys(hopper):
    cache = sr.KVCache(sr.Dilated(512, 3) & sr.Causal(), 1, 8, 64, dtype=torch.bfloat16)
    prompt, token = rows(8, tokens=728), rows(8, tokens=1)
    with torch.no_grad():
        cache.attend(prompt, prompt, prompt)
        for _ in range(126):
            cache.attend(token, token, token)
        launched = []
        for _ in range(3):
            with counted() as counts:
                cache.attend(token, token, token)
            assert not counts.syncs, counts
            launched.append(counts.torch)
    missing = cache._state.histories[0].positions < 0
    assert len(set(missing.sum(1).tolist())) > 1
    # the heads of the new page lie one after the other: two more launches write a token, and two
    # at first say where
    assert launched == [launched[0], launched[0] + 8, launched[0] + 6]


BOTH = pytest.mark.parametrize("pattern", [WINDOW, LONGNET], ids=["window", "two branches"])


def assert_same_tables(of_host: sr.BlockLayout, copied: sr.BlockLayout) -> None:
    """Operators of torch compute on the stub, so that tables and walks can be compared."""
    assert len(of_host.passes) == len(copied.passes)
    for number, (p, other) in enumerate(zip(of_host.passes, copied.passes, strict=True)):
        values = {x.name: (getattr(p, x.name), getattr(other, x.name)) for x in fields(p)}
        del values["memo"]
        for limits in ((1, 1), (1_000_000, 1)):  # without pieces, and in many
            walks = [
                walk(x, number, by_key=False, programs=limits[0], processors=limits[1])
                for x in (of_host, copied)
            ]
            assert "host" in other.walked_as.memo
            pairs = [*values.values(), *zip(*walks, strict=True)]
            for one, two in pairs:
                if isinstance(one, torch.Tensor):
                    assert two.device.type == "cuda" and two.dtype == one.dtype
                    assert torch.equal(one, two.cpu())


@BOTH
def test_tables_of_a_page_are_those_of_the_host(hopper, pattern):
    for query in (1024, 1100, 1200, 2000):
        frame = Frame(1, query + 1, 8, 8, query)
        (of_host, slots), (copied, others) = (
            last_query_layout(pattern, frame, 128, x) for x in (torch.device("cpu"), hopper)
        )
        assert slots == others
        assert_same_tables(of_host, copied)


@BOTH
def test_an_eviction_keeps_what_it_keeps_on_the_host(hopper, pattern):
    keys = rows(8, tokens=700, dtype=torch.float32)
    caches = [sr.KVCache(pattern, 1, 8, 64, num_heads=8, device=x) for x in ("cpu", hopper)]
    for cache, device in zip(caches, ("cpu", hopper), strict=True):
        with torch.no_grad():
            cache.attend(*(keys.to(device),) * 3)
    of_host, copied = (x._state for x in caches)
    assert torch.equal(of_host.keys.rows, copied.keys.rows.cpu())
    assert torch.equal(of_host.values.rows, copied.values.rows.cpu())
    for queries in (1, 7):
        assert_same_tables(page_layout(of_host, queries), page_layout(copied, queries))


@pytest.mark.parametrize("pattern", EITHER)
def test_the_first_query_of_a_page_behind_a_growing_sequence(hopper, pattern):
    keys, query = rows(tokens=1300), rows(tokens=1)

    def step(length: int) -> None:
        sr.attention(query, keys[:, :, :length], keys[:, :, :length], pattern)

    with torch.no_grad():
        for length in (1010, 1018):
            step(length)
        usual = steady(lambda: step(1022), triton=2, torch=5, warm=0).torch
        for first, more in ((1025, 4), (1153, 2)):  # of a page, and of its second query tile
            steady(lambda n=first: step(n), triton=2, torch=usual + more, warm=0, transfers=4)
        steady(lambda: step(1154), triton=2, torch=5, warm=0)


# ---- No call waits for the device. -----------------------------------------


@pytest.mark.parametrize("seed", ["int", "tensor", "drawn"])
def test_dropout_waits_for_nothing_and_can_be_captured(hopper, seed):
    query, of_device = rows(), torch.tensor(7, device="cuda")
    given = {"int": 7, "tensor": of_device, "drawn": None}[seed]

    def call() -> torch.Tensor:
        return sr.attention(query, query, query, WINDOW, dropout_p=0.1, dropout_seed=given)

    counts = steady(call, triton=3, torch=14 if seed == "int" else 30)
    assert seed != "int" or not any(name.startswith("f") for name, _ in counts.operators)  # filled
    with capturing():
        call()


class Group:
    """A process group of two ranks on GPUs alone."""

    _device_types = (torch.device("cuda"),)


@pytest.fixture
def sent(monkeypatch) -> list[dict[int, torch.Tensor]]:
    """Returns the messages of rank 1 of 2, by peer; nothing arrives."""
    messages: list[dict[int, torch.Tensor]] = []
    monkeypatch.setattr(exchange.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda group: 2)
    start = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(
        exchange.Exchange, "start", lambda self, step, out, back: messages.append(out) or start
    )
    return messages


def test_ranks_agree_on_the_device_of_the_query(hopper, sent):
    with gpu(80) as elsewhere:
        key = rows()
    exchange.Exchange(Group(), None, key.device).agree([3, 4])
    report_failure(Group(), None, key)
    assert [x[0].device for x in sent] == [elsewhere, elsewhere] != [hopper, hopper]


def test_a_graph_cannot_capture_what_ranks_agree_on(hopper, sent):
    with capturing(), pytest.raises(RuntimeError, match="cannot capture a call over several ranks"):
        exchange.Exchange(Group(), None, hopper)
    with capturing():
        report_failure(Group(), None, rows())  # hides no error of this rank
    assert not sent


def test_each_gpu_is_judged_by_its_own_capability(hopper, monkeypatch):
    capability = torch.cuda.get_device_capability
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device=None: (7, 5) if capability(device) == (8, 0) else capability(device),
    )
    with gpu(80):
        old = rows()
        assert not backend.reasons(query := rows().to(hopper))
        assert is_old(backend.reasons())
    assert is_old(backend.reasons(old))
    assert is_old(backend.reasons(query, old)) and not is_old(backend.reasons())


def is_old(reasons: list[str]) -> bool:
    return any("capability 8.0" in x for x in reasons)


# ---- Layouts and pages that calls, streams and graphs share. ---------------


def test_a_layout_too_large_to_be_kept_is_warned_of_once(hopper, monkeypatch):
    monkeypatch.setattr(sr.layout_cache, "_warned", False)
    monkeypatch.setattr(sr.layout_cache, "_limit", 100)
    query = rows()
    with pytest.warns(UserWarning, match="layout_cache.set_limit"):
        sr.attention(query, query, query, WINDOW)
    sr.attention(query, query, query, WINDOW)  # a second warning would be an error


def test_a_layout_that_grows_too_large_is_warned_of(hopper, monkeypatch):
    """Its transposes, for the backward, do not fit."""
    monkeypatch.setattr(sr.layout_cache, "_warned", False)
    inputs = learnt(rows(), rows(), rows())
    limit = WINDOW.layout(512, num_heads=2, device=hopper).nbytes + 100
    monkeypatch.setattr(sr.layout_cache, "_limit", limit)
    out = sr.attention(*inputs, WINDOW)
    torch.autograd.grad(out, inputs, rows())
    with pytest.warns(UserWarning, match="layout_cache.set_limit"):
        sr.layout_cache.info()


def test_a_capture_keeps_nothing_that_only_its_replay_fills(hopper):
    keys, query = rows(tokens=600), rows(tokens=1)

    def step(length: int) -> torch.Tensor:
        return sr.attention(query, keys[:, :, :length], keys[:, :, :length], WINDOW)

    with torch.no_grad():
        step(400)
        with capturing() as counts:
            step(401)
            step(402)
        assert not counts.surviving(), counts.surviving()
        steady(lambda: step(402), triton=2, torch=2)  # its own cut of the keys


def test_a_capture_of_more_tokens_of_a_page_keeps_nothing_that_only_its_replay_fills(hopper):
    """An eager step before the first replay reads complete tables, those of the page."""
    cache = sr.KVCache(WINDOW, 1, 2, 64, num_heads=2, dtype=torch.bfloat16)
    prompt, one, four = (rows(tokens=n) for n in (100, 1, 4))
    with torch.no_grad():
        cache.attend(prompt, prompt, prompt)
        for _ in range(2):
            cache.attend(one, one, one)
        with capturing() as counts:
            cache.attend(four, four, four)
        assert not counts.surviving(), counts.surviving()
        assert counts.torch <= 10, counts
        steady(lambda: cache.attend(four, four, four), triton=2, torch=5)


def test_a_step_of_a_draft(hopper):
    """Tables of a draft are built on the host, and travel as few blocks."""
    cache = sr.KVCache(WINDOW, 1, 2, 64, num_heads=2, dtype=torch.bfloat16)
    prompt, six = rows(tokens=100), rows(tokens=6)

    def step() -> None:
        cache.attend(six, six, six, tree=(-1, 0, 0, 1, 1, 2))
        cache.keep([0, 1])

    with torch.no_grad():
        cache.attend(prompt, prompt, prompt)
        steady(step, triton=2, torch=38, transfers=5)


def test_other_streams_wait_for_a_page_that_is_shared(hopper, monkeypatch):
    keys, query, waits = rows(tokens=600), rows(tokens=1), []
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: waits.append(self))

    def step() -> None:
        sr.attention(query, keys, keys, WINDOW)

    def token() -> None:
        cache = sr.KVCache(WINDOW, 1, 2, 64, num_heads=2, dtype=torch.bfloat16)
        cache.attend(keys[:, :, :100], keys[:, :, :100], keys[:, :, :100])
        cache.attend(query, query, query)

    with torch.no_grad():
        for call in (step, token):
            call()
            assert not waits
            with torch.cuda.stream(torch.cuda.Stream()):
                call()
            assert len(waits) >= 2  # for the page, and for its walk
            waits.clear()


TABLES = {"units", "start", "tokens", "bitmap", "entry", "words", "cuts", "tile_start", "tile_stop"}


@pytest.mark.parametrize("pattern", EITHER)
def test_another_stream_waits_before_it_launches_what_reads_shared_tables(
    hopper, monkeypatch, pattern
):
    """Each launch of its forward and backward reads tables that are complete and not freed."""
    events, log, held, read = {}, [], set(), []

    def record(stream: torch.cuda.Stream) -> torch.cuda.Event:
        events[event := torch.cuda.Event()] = stream
        return event

    def note(launch: triton_launch.Launch, of_call: dict, run=triton_launch.Launch.run) -> None:
        named = zip(launch.kernel.arg_names, launch.arguments(of_call), strict=True)
        used = {x.untyped_storage()._cdata: x for name, x in named if name in TABLES}
        log.append(launch.kernel.fn.__name__)
        read.append([x.untyped_storage().data_ptr() for x in used.values()])
        run(launch, of_call)

    monkeypatch.setattr(torch.cuda.Stream, "record_event", record)
    monkeypatch.setattr(
        torch.cuda.Stream, "wait_event", lambda self, event: log.append((self, events[event]))
    )
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda x, stream: held.add((stream, x.untyped_storage().data_ptr())),
    )
    monkeypatch.setattr(triton_launch.Launch, "run", note)
    query, key, value = (rows() for _ in range(3))

    def call() -> None:
        layout = pattern.layout(512, num_heads=2, device=hopper)
        problem = Problem(layout, query, key, value, 0.1)
        out, lse = backend.forward(problem)
        backend.backward(problem, out, lse, query, torch.zeros_like(lse))

    first = torch.cuda.current_stream()
    call()
    assert all(isinstance(x, str) for x in log) and not held
    kernels, built = list(log), {x for of_launch in read for x in of_launch}
    log.clear()
    read.clear()
    with torch.cuda.stream(second := torch.cuda.Stream()):
        call()
    assert [x for x in log if isinstance(x, str)] == kernels
    waits = [i for i, x in enumerate(log) if not isinstance(x, str)]
    assert {log[i] for i in waits} == {(second, first)}
    # for the layout and the walk over query tiles, then for the walk over key tiles
    assert waits[:2] == [0, 1] and log.index("key_kernel") - 1 in waits
    assert {x for of_launch in read for x in of_launch} == built
    assert {(second, x) for x in built} <= held


def test_three_stages_of_the_main_forward_fit(hopper):
    query = rows(width=128)
    config = default("forward", query.dtype, query.device, 128, 128)
    assert (config.rows, config.streamed, config.warps, config.stages) == (128, 128, 8, 3)
    assert any(x.stages == 2 for x in candidates("forward", rows(width=128), 128, 128))
    with counted() as counts:
        sr.attention(*(rows(width=128) for _ in range(3)), sr.BlockWindow(1, 128), block_size=128)
    (launch,) = counts.launches
    assert launch.shared == 229_400 <= 232_448
