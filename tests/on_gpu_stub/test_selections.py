"""A step over selected blocks: four launches from scores to the tables of all three kernels."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from calls import functions_of, learnt, rows, steady
from gpu_stub import Counts, capturing, counted, gpu
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import sparsering as sr
from sparsering.kernels.triton import launch, selected
from sparsering.nn import SelectedAttention
from sparsering.selection import block_scores, select_blocks

TABLES = Counter(rank_kernel=1, rows_kernel=1, place_kernel=1, keys_kernel=1)
SIZES = {"rows of a token": 1, "rows of a block": 64}


def of_tables(counts: Counts) -> Counter[str]:
    return Counter(x.kernel for x in counts.launches if x.kernel in TABLES)


def step(query_block: int, k: int = 4, tokens: int = 512) -> Counts:
    """Counts a step from scores to gradients, after others like it."""
    query, key, value = inputs = learnt(rows(4, tokens), rows(2, tokens), rows(2, tokens))
    scores = torch.randn(1, 2, tokens // query_block, tokens // 64, device="cuda")
    grad = torch.zeros_like(query)

    def call() -> None:
        indices = select_blocks(scores, k, block_size=64, query_block=query_block)
        pattern = sr.SelectedBlocks(indices, 64, query_block) & sr.Causal()
        torch.autograd.grad(sr.attention(query, key, value, pattern), inputs, grad)

    return steady(call, triton=10, torch=8)


def assert_few(counts: Counts) -> None:
    """Four launches of tables, and no operator but a copy of the indices and sums of gradients."""
    assert of_tables(counts) == TABLES, counts
    for name, place in counts.operators:
        of_gradients = "kernels/triton/call.py" in place or (name, place) == ("zero_", "?")
        assert of_gradients or (name, place.split(":")[0]) == (
            "copy_",
            "sparsering/patterns/blocks.py",
        )


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    "query_block",
    [
        pytest.param(x, id=name, marks=[pytest.mark.slow] * (i > 0))
        for i, (name, x) in enumerate(SIZES.items())
    ],
)
def test_a_step_from_scores_to_gradients(capability, query_block):
    with gpu(capability):
        assert_few(step(query_block))


def test_a_layer_does_not_even_copy_its_choice(hopper, monkeypatch):
    layer = SelectedAttention(256, 4, num_kv_heads=2, k=4).to("cuda", torch.bfloat16)
    scores = torch.randn(1, 2, 512, 8, device="cuda")
    monkeypatch.setattr(SelectedAttention, "scores", lambda *rest: scores)
    x = rows(1, 512, 256)[0]
    counts = steady(lambda: layer(x).sum().backward(), triton=10, torch=60)
    assert of_tables(counts) == TABLES, counts
    copied = [
        place for name, place in counts.operators if "patterns/" in place or "choose" in place
    ]
    assert not copied, copied


def test_without_gradients_nothing_is_written_for_the_walk_by_key(hopper):
    query, indices = rows(), torch.zeros(1, 2, 8, 2, dtype=torch.int64, device="cuda")
    pattern = sr.SelectedBlocks(indices, 64) & sr.Causal()

    def call() -> Tensor:
        return sr.attention(query, query, query, pattern)

    counts = steady(call, triton=1, torch=0)  # the tables live as long as the pattern
    assert not of_tables(counts), counts
    pattern.masks[0].indices.add_(1)
    with counted() as counts:
        call()
    assert of_tables(counts) == Counter(rows_kernel=1, place_kernel=1), counts


def test_tables_that_are_not_kept_for_the_backward_are_seen(hopper, monkeypatch):
    monkeypatch.setattr(selected._kept, "setdefault", lambda *rest: None)
    with pytest.raises(AssertionError, match="rows_kernel"):
        assert_few(step(1))


def test_a_captured_step_keeps_nothing(hopper):
    query, key, value = inputs = learnt(rows(), rows(), rows())
    scores = torch.randn(1, 2, 512, 8, device="cuda")

    def call() -> None:
        indices = select_blocks(scores, 4, block_size=64, query_block=1)
        pattern = sr.SelectedBlocks(indices, 64, 1) & sr.Causal()
        out = sr.attention(query, key, value, pattern)
        torch.autograd.grad(out, inputs, torch.zeros_like(out))

    call()
    with capturing() as counts:
        call()
    assert of_tables(counts)["keys_kernel"] == 1, counts
    assert not counts.surviving(), counts.surviving()


def test_another_stream_waits_for_the_tables(hopper, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: waits.append(self))
    query, indices = rows(), torch.zeros(1, 2, 8, 2, dtype=torch.int64, device="cuda")
    pattern = sr.SelectedBlocks(indices, 64) & sr.Causal()
    sr.attention(query, query, query, pattern)
    assert not waits
    with torch.cuda.stream(torch.cuda.Stream()):
        sr.attention(query, query, query, pattern)
    assert len(waits) >= 2  # for the layout, and for its walk


def test_a_short_sequence_cuts_its_query_tiles_in_launches_of_their_own(hopper):
    query, key, value = inputs = learnt(*(rows(2, 1024) for _ in range(3)))
    indices = torch.zeros(1, 2, 16, 16, dtype=torch.int64, device="cuda")

    def call() -> None:
        pattern = sr.SelectedBlocks(indices, 64) & sr.Causal()
        out = sr.attention(query, key, value, pattern)
        torch.autograd.grad(out, inputs, torch.zeros_like(out))

    counts = steady(call, triton=14, torch=10)
    names = Counter(x.kernel for x in counts.launches)
    assert names["merge_kernel"] and 1 <= names["units_kernel"] <= 2, counts


@pytest.mark.parametrize("method", ["mean", "gauss", "bounds"])
@pytest.mark.parametrize("tokens", [512, 500])
def test_scores_of_blocks_wait_for_nothing(hopper, method, tokens):
    query, key = rows(4, tokens), rows(2, tokens)
    for _ in range(2):
        block_scores(query, key, 64, method=method)
    with counted() as counts:
        block_scores(query, key, 64, method=method)
    assert not counts.syncs and not counts.transfers and not counts.compiles, counts
    with capturing():
        block_scores(query, key, 64, method=method)


def test_antidiagonals_that_begin_within_a_stride_wait_for_nothing(hopper):
    query, key = rows(4, 777), rows(2, 1000)
    counts = steady_without_triton(
        lambda: block_scores(query, key, 64, method="antidiagonal", query_block=4, q_start=223)
    )
    assert not counts.transfers


def test_launches_of_a_choice_are_shared_by_the_tokens_of_a_cache(hopper):
    launch._launches.clear()
    sizes = []
    for tokens in range(500, 520):
        scores = torch.randn(1, 2, 1, -(-tokens // 64), device="cuda")
        select_blocks(scores, 4, block_size=64, query_block=1, q_start=tokens - 1)
        sizes.append(len(launch._launches))
    assert sizes == [1] * len(sizes)


def test_a_layer_with_its_own_scores_waits_for_nothing(hopper):
    layer = SelectedAttention(256, 4, num_kv_heads=2, k=4).to("cuda", torch.bfloat16)
    x = rows(1, 512, 256)[0]
    steady(lambda: layer(x).sum().backward(), triton=10, torch=150)


def selected_of(indices: Tensor) -> sr.Pattern:
    return sr.SelectedBlocks(indices.clone(), 64) & sr.Causal()


def test_a_new_selection_enters_few_functions(hopper):
    """A cached one enters 112, and 318 with gradients: a new one is made and checked too."""
    query, key, value = inputs = learnt(rows(4), rows(2), rows(2))
    indices = torch.zeros(1, 2, 8, 4, dtype=torch.int64, device="cuda")

    def trained(pattern: sr.Pattern) -> None:
        out = sr.attention(*inputs, pattern)
        torch.autograd.grad(out, inputs, torch.zeros_like(out))

    with torch.no_grad():
        assert functions_of(lambda: sr.attention(query, key, value, selected_of(indices))) <= 330
    assert functions_of(lambda: trained(selected_of(indices))) <= 475


def test_launches_are_shared_by_selections_of_equal_shapes_only(hopper, monkeypatch):
    """Each launch has the arguments that a process without any cache would give it."""
    given: list[list[object]] = []
    arguments = launch.Launch.arguments
    monkeypatch.setattr(
        launch.Launch,
        "arguments",
        lambda self, of_call: given.append(arguments(self, of_call)) or given[-1],
    )

    def described(x: object) -> object:
        if isinstance(x, Tensor):
            return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
        if isinstance(x, TensorDescriptor):
            return described(x.base), x.shape, x.strides, x.block_shape
        return x

    def call(heads=4, tokens=512, slots=4, dtype=torch.bfloat16, causal=True, **options) -> list:
        query, key = rows(heads, tokens, dtype=dtype), rows(2, tokens, dtype=dtype)
        indices = torch.zeros(1, 2, -(-tokens // 64), slots, dtype=torch.int64, device="cuda")
        pattern = sr.SelectedBlocks(indices, 64)
        inputs = learnt(query, key, key)
        given.clear()
        out = sr.attention(*inputs, pattern & sr.Causal() if causal else pattern, **options)
        torch.autograd.grad(out, inputs, torch.zeros_like(out))
        tensors = {id(x) for x in inputs}
        assert any(id(x) in tensors for one in given for x in one)
        return [[described(x) for x in one] for one in given]

    kinds = (
        {}, {"heads": 2}, {"tokens": 500}, {"slots": 8}, {"dtype": torch.float16}, {"scale": 0.5},
        {"causal": False}, {"softcap": 5.0}, {"dropout_p": 0.1, "dropout_seed": 3},
        {"tokens": 1024, "slots": 16},
    )  # fmt: skip
    shared = [call(**kind) for kind in (*kinds, *kinds)]
    with gpu(80):
        other = [call(), call()]
    launch._launches.clear()
    for kind, first, second in zip(kinds, shared, shared[len(kinds) :], strict=False):
        launch._launches.clear()
        assert first == second == call(**kind), kind
    with gpu(80):
        assert other == [call(), call()]


def test_one_block_of_many_is_chosen(hopper):
    scores = torch.rand(1, 2, 8, 600, device="cuda")
    every = {"causal": False, "sink": 0, "local": 0}
    chosen = select_blocks(scores, 1, block_size=64, query_block=64, **every)
    assert chosen.shape == (1, 2, 8, 1)


def test_a_growing_cache_compiles_its_choice_twice_at_most(hopper):
    ranks_compiled = []
    for tokens in range(300, 9000, 600):
        scores = torch.randn(1, 2, 1, -(-tokens // 64), device="cuda")
        with counted() as counts:
            select_blocks(scores, 4, block_size=64, query_block=1, q_start=tokens - 1)
        ranks_compiled += [x for x in counts.compiles if "rank" in str(x)]
    assert len(ranks_compiled) <= 2, ranks_compiled


def test_a_choice_by_top_p_waits_for_nothing(hopper):
    scores = torch.randn(1, 2, 512, 8, device="cuda")
    counts = steady_without_triton(lambda: select_blocks(scores, 4, block_size=64, top_p=0.9))
    assert not counts.transfers


def test_launches_of_block_scores_do_not_grow_with_the_square_of_the_length(hopper):
    counts = []
    for tokens in (1024, 4096):
        query, key = rows(8, tokens), rows(2, tokens)
        counts.append(steady_without_triton(lambda q=query, k=key: block_scores(q, k, 64)))
    assert counts[1].torch == counts[0].torch <= 120


def steady_without_triton(call: Callable[[], object]) -> Counts:
    """Counts a call that launches operators of torch alone, after one like it."""
    call()
    with counted() as counts:
        call()
    assert not counts.syncs, counts
    return counts


def test_the_oldest_launches_are_dropped_and_no_others(hopper, monkeypatch):
    monkeypatch.setattr(launch, "_MOST_KINDS", 3)
    kept: dict[str, list[str]] = {}
    for kind in "abcd":
        launch.kept(kind, lambda kind=kind: [kind], hopper, kept)
    assert list(kept) == ["b", "c", "d"]
