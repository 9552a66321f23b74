"""A call over lists of single keys: two launches for the forward, three or four for the backward.

The host never waits.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from calls import learnt, rows, steady
from gpu_stub import CAPABILITIES, capturing, counted, gpu
from torch import Tensor

import sparsering as sr
from sparsering.kernels.triton import lists
from sparsering.kernels.triton.key_lists import list_keys
from sparsering.layouts.lists import ListedPairs
from sparsering.patterns.algebra import Frame
from sparsering.patterns.blocks import Owned

SLOW = pytest.mark.slow
FORWARD = Counter(list_rows_kernel=1, list_forward_kernel=1)
BACKWARD = Counter(prepare_kernel=1, list_query_kernel=1, list_key_kernel=1)
BY_ITEM = Counter(prepare_kernel=1, list_query_kernel=1, list_item_kernel=1, list_sum_kernel=1)


def indices(tokens: int = 512, slots: int = 96, tables: int = 2) -> Tensor:
    return torch.randint(-1, tokens, (1, tables, tokens, slots), device="cuda")


def call_of(
    tokens: int = 512, *, heads: int = 4, backward: bool = True, width: int = 64, **options: object
) -> Callable[[], Tensor]:
    """A layer's call, with indices as an indexer has just chosen them."""
    inputs = learnt(*(rows(h, tokens, width) for h in (heads, 2, 2)))
    chosen, grad = indices(tokens), torch.zeros_like(inputs[0])

    def call() -> Tensor:
        out = sr.attention(*inputs, sr.SelectedBlocks(chosen.clone(), 1) & sr.Causal(), **options)
        return torch.autograd.grad(out, inputs, grad)[0] if backward else out

    return call


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_launches_from_indices_to_gradients(capability):
    with gpu(capability):
        counts = steady(call_of(backward=False), triton=2, torch=6)
        assert Counter(x.kernel for x in counts.launches) == FORWARD
        counts = steady(call_of(), triton=5, torch=10)
        assert Counter(x.kernel for x in counts.launches) == FORWARD + BACKWARD


def test_launches_do_not_grow_with_the_queries(hopper):
    few, many = (steady(call_of(n), triton=5, torch=10) for n in (256, 2048))
    assert few.torch == many.torch and few.triton == many.triton


def test_a_window_beside_a_list_waits_for_nothing(hopper):
    inputs, chosen = learnt(rows(4), rows(), rows()), indices()
    grad, table = torch.zeros_like(inputs[0]), torch.zeros(4, 65, device="cuda").requires_grad_()
    sink = torch.zeros(4, device="cuda").requires_grad_()

    def call() -> None:
        chosen_or_near = sr.SelectedBlocks(chosen.clone(), 1) | sr.SlidingWindow(31)
        out = sr.attention(*inputs, chosen_or_near & sr.Causal(), distance_bias=table, sink=sink)
        torch.autograd.grad(out, [*inputs, table, sink], grad)

    counts = steady(call, triton=14, torch=60)
    used = Counter(x.kernel for x in counts.launches)
    assert used["list_forward_kernel"] == used["list_key_kernel"] == 1
    assert used["list_distance_kernel"] == 1


@pytest.mark.parametrize(("heads", "launches"), [(4, 5), (16, 6)])
def test_another_number_of_queries_keys_or_slots_compiles_nothing(hopper, heads, launches):
    call_of(512, heads=heads)()
    with counted() as counts:
        for tokens in (300, 700):
            call_of(tokens, heads=heads)()
    assert counts.triton == 2 * launches and not counts.compiles and not counts.syncs, counts


def test_indices_of_another_alignment_have_a_kernel_of_their_own(hopper):
    table, valid = indices(65, 33, 1), torch.ones(1, 65, dtype=torch.bool, device="cuda")
    frame = Frame.build(64, 64, 4, 2, None)

    def launched(first: int, last: int) -> None:
        selection = sr.SelectedBlocks(Owned(table[:, :, first : first + 64]), 1)
        assert list_keys(ListedPairs(selection), frame, valid[:, last : last + 64], 0) is not None

    launched(0, 0)
    with counted() as counts:
        launched(0, 0)
        assert not counts.compiles
        launched(1, 0)
        launched(0, 1)
    assert counts.compiles == 2 * ["list_rows_kernel"], counts


def test_queries_in_parts_launch_two_kernels_more_for_each(hopper, monkeypatch):
    apiece = 4 * 2 * 96 * (64 + 64)  # bytes of dK and dV of the keys that a query lists
    monkeypatch.setattr(lists, "_BYTES_OF_ITEMS", 150 * apiece)
    call = call_of(heads=16)
    counts = steady(call, triton=12, torch=30)
    in_parts = Counter(list_item_kernel=4, list_sum_kernel=4)  # of 128 queries each
    assert Counter(x.kernel for x in counts.launches) == FORWARD + (BY_ITEM | in_parts)
    with capturing() as capture:
        call()
    assert not capture.surviving()


def test_heads_as_wide_as_latents(hopper):
    query, key = learnt(rows(16, 128, 576), rows(1, 128, 576))
    chosen, grad = indices(128, 64, 1), torch.zeros(1, 16, 128, 512, device="cuda").bfloat16()

    def call() -> None:
        pattern = sr.SelectedBlocks(chosen.clone(), 1) & sr.Causal()
        torch.autograd.grad(sr.attention(query, key, key[..., :512], pattern), [query, key], grad)

    counts = steady(call, triton=6, torch=12)
    assert Counter(x.kernel for x in counts.launches) == FORWARD + BY_ITEM


@pytest.mark.parametrize(
    "capability",
    [pytest.param(x, marks=() if x == 90 else pytest.mark.slow, id=f"sm{x}") for x in CAPABILITIES],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)])
def test_one_query_over_a_long_list_keeps_the_processors_busy(capability, dtype):
    with gpu(capability):
        query, key = rows(128, 1, 576).to(dtype), rows(1, 4096, 576).to(dtype)
        chosen = indices(1, 2048, 1) * 8

        def call() -> None:
            pattern = sr.SelectedBlocks(chosen, 1, first_row=4095) & sr.Causal()
            sr.attention(query, key, key[..., :512], pattern)

        counts = steady(call, triton=3, torch=8)
        processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert Counter(x.kernel for x in counts.launches) == FORWARD + Counter(list_merge_kernel=1)
    (forward,) = (x for x in counts.launches if x.kernel == "list_forward_kernel")
    assert forward.programs > processors / 2  # 4 or 8 parts of the heads, times a power of two


def test_a_call_can_be_captured(hopper):
    call = call_of()
    call()
    with capturing() as capture:
        call()
    assert not capture.surviving()
