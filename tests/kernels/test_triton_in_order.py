"""Under `batch_invariant` a row of the Triton kernels has its bits in any company."""

import threading

import numpy
import pytest
import torch
from helpers.thinned import slow_except
from triton.runtime import interpreter

import sparsering as sr
from sparsering.kernels import backends as dispatch

N, BEFORE, DIM = 110, 77, 16
EXTRAS = {
    "plain": {},
    "softcap, sink and distances": {
        "softcap": 5.0,
        "sink": torch.tensor([0.3, -1.0, 0.0, 2.0]),
        "distance_bias": torch.sin(torch.arange(4 * 41.0)).view(4, 41),
    },
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
}
PATTERNS = {
    "causal": sr.Causal(),
    "a window": sr.Causal() & sr.SlidingWindow(80),
    "two-sided": sr.SlidingWindow(50, 30),
    "LongNet": sr.LongNet((64, 256), (1, 4)) & sr.Causal(),
    "blocks": sr.Causal() & (sr.BlockDilated((1, 2), 32) | sr.GlobalTokens(3, rows=False)),
}
CHUNKS = [(0, 1), (N - 1, N), (30, 73)]


def product_in_a_tree(self, a, b, d, *_):
    """A product whose sums depend on a number's place in its row alone, as on tensor cores.

    NumPy's product gives a row other bits in another place of a tile.
    """
    del self
    pairs = (a.data[:, :, None] * b.data[None]).astype(d.data.dtype)
    while pairs.shape[1] > 1:
        pairs = pairs[:, 0::2] + pairs[:, 1::2]
    return interpreter.TensorHandle(pairs[:, 0] + d.data, d.dtype.scalar)


@pytest.fixture(autouse=True)
def _ordered_products(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product_in_a_tree)


def drawn(batch=2, heads=4, seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, n, DIM, generator=generator)
    return query, *torch.randn(2, batch, heads // 2, n, DIM, generator=generator)


def results(tensors, pattern, **options):
    """Out, lse, and gradients of query, key and value; a row's weights do not know its place."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, lse = sr.attention(*tensors, pattern, backend="triton", return_lse=True, **options)
    weight = torch.sin(1.3 * torch.arange(DIM))
    sums = (weight * out * out).sum() + (0.3 * lse.where(lse > -torch.inf, 0)).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(sums, tensors)


def of_heads(extras, heads):
    return {name: x[heads] if isinstance(x, torch.Tensor) else x for name, x in extras.items()}


FAST = [("causal", "plain"), ("a window", "softcap, sink and distances")]


@pytest.mark.parametrize(("name", "extras"), slow_except(FAST, PATTERNS, EXTRAS))
def test_a_row_has_its_bits_in_any_company(name, extras):
    pattern, options, tensors = PATTERNS[name], EXTRAS[extras], drawn()
    with sr.batch_invariant():
        whole = results(tensors, pattern, **options)
        alone = results([x[1:] for x in tensors], pattern, **options)
        if "dropout_p" not in options:  # dropout draws by batch entry and head
            for x, y in zip(alone, whole, strict=True):
                assert torch.equal(x, y[1:])
            head = results(
                [x[:, : max(1, x.shape[1] // 4)] for x in tensors],
                pattern,
                **of_heads(options, slice(1)),
            )
            for x, y in zip(head[:3], whole, strict=False):
                assert torch.equal(x, y[:, :1])
        for begin, end in CHUNKS:
            if name == "two-sided":
                continue  # a chunk has the keys up to its end alone
            part = tensors[0][:, :, begin:end], *(x[:, :, :end] for x in tensors[1:])
            chunk = results(part, pattern, q_start=begin, **options)
            for x, y in zip(chunk[:3], whole, strict=False):
                assert torch.equal(x, y[:, :, begin:end]), (begin, end)


LISTED = torch.randint(-1, 40, (40, 36), generator=torch.Generator().manual_seed(2))
CHOSEN = sr.SelectedBlocks(LISTED, 1)
LISTS = {"lists": CHOSEN, "lists beside a window": CHOSEN | sr.SlidingWindow(9)}


@pytest.mark.parametrize("by_item", [False, True], ids=["by key", "by item"])
@pytest.mark.parametrize("name", slow_except(["lists"], LISTS))
def test_a_row_over_a_list_has_its_bits_in_any_company(name, by_item, monkeypatch):
    """A step of a kernel has 32 of the 36 slots, whatever the number of queries."""
    monkeypatch.setattr("sparsering.kernels.triton.lists._BYTES_OF_GROUP", 1 if by_item else 999)
    pattern, (query, key, value) = LISTS[name] & sr.Causal(), drawn(n=40)
    with sr.batch_invariant():
        whole = results((query, key, value), pattern)
        parts = [((1, 2), (0, 40)), ((0, 2), (37, 40)), ((0, 2), (3, 4))]
        for (first, last), (begin, end) in parts:
            part = query[first:last, :, begin:end], *(x[first:last, :, :end] for x in (key, value))
            found = results(part, pattern, q_start=begin)
            for x, y in zip(found[:3], whole, strict=False):
                assert torch.equal(x, y[first:last, :, begin:end]), (begin, end)
            if (begin, end) == (0, 40):
                for x, y in zip(found[3:], whole[3:], strict=True):
                    assert torch.equal(x, y[first:last])


@pytest.mark.parametrize("name", slow_except(["a window"], PATTERNS))
def test_a_document_has_the_bits_of_itself_alone(name):
    pattern, own, other = PATTERNS[name], drawn(1), drawn(1, seed=1, n=BEFORE)
    with sr.batch_invariant():
        alone = results(own, pattern)
        both = [torch.cat(x, 2) for x in zip(other, own, strict=True)]
        packed = results(both, sr.Packed((BEFORE, N), pattern))
    for x, y in zip(packed, alone, strict=True):
        assert torch.equal(x[:, :, BEFORE:], y)


def test_a_cache_that_keeps_all_keys_gives_the_bits_of_whole_rows():
    query, key, value = drawn(1, n=140)
    with sr.batch_invariant():
        whole = sr.attention(query, key, value, sr.Causal(), backend="triton")
        cache, rows, begin = sr.KVCache(sr.Causal(), 1, 2, DIM, num_heads=4, page_size=16), [], 0
        for end in (100, 101, 102, 109, 140):
            part = (x[:, :, begin:end] for x in (query, key, value))
            rows.append(cache.attend(*part, backend="triton"))
            begin = end
    assert torch.equal(torch.cat(rows, 2), whole)


@pytest.mark.parametrize("pattern", [sr.Causal(), sr.Causal() - sr.SlidingWindow(63)], ids=str)
def test_a_long_row_is_one_sum_whatever_the_batch(pattern, monkeypatch):
    """Outside the mode a row is cut into more pieces where fewer rows would leave a card idle."""
    monkeypatch.setattr("sparsering.kernels.triton.call.processors", lambda _: 1)
    query, key, value = drawn(4, 2, n=2200)
    inputs, found = (query[:, :, -2:], key, value), {}
    for is_invariant in (True, False):
        with sr.batch_invariant(is_invariant):
            both = [
                sr.attention(*(x[:n] for x in inputs), pattern, backend="triton", block_size=128)
                for n in (4, 1)
            ]
        found[is_invariant] = torch.equal(both[0][:1], both[1])
    assert found == {True: True, False: False}


def test_tiles_are_taken_in_the_order_of_positions():
    """The row's first tile needs a mask in a whole row alone, and comes late there otherwise."""
    (query, key, value), pattern = drawn(1, 2, n=330), sr.Causal() & sr.SlidingWindow(200)
    token = 264  # which sees all keys from 64 on, the first of a tile
    options = {"backend": "triton", "block_size": 64}
    found = {}
    for is_invariant in (True, False):
        with sr.batch_invariant(is_invariant):
            whole = sr.attention(query, key, value, pattern, **options)[:, :, token : token + 1]
            row = query[:, :, token : token + 1]
            row = sr.attention(row, key, value, pattern, q_start=token, **options)
        found[is_invariant] = torch.equal(row, whole)
    assert found == {True: True, False: False}


def test_results_are_exact_and_outside_the_mode_bits_may_differ():
    tensors, pattern = drawn(1, n=200), sr.Causal() & sr.SlidingWindow(100)
    doubles = [x.double() for x in tensors]
    wanted = sr.attention(*doubles, pattern, backend="reference")
    outside = sr.attention(*tensors, pattern, backend="triton")
    with sr.batch_invariant():
        inside = sr.attention(*tensors, pattern, backend="triton")
        with sr.batch_invariant(False):
            assert torch.equal(sr.attention(*tensors, pattern, backend="triton"), outside)
    for out in (inside, outside):
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6)
    assert not torch.equal(inside, outside)  # else this file would test nothing


def test_a_backward_has_the_mode_of_its_forward():
    tensors, pattern = drawn(1), PATTERNS["a window"]
    with sr.batch_invariant():
        wanted = results(tensors, pattern)
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = sr.attention(*leaves, pattern, backend="triton", return_lse=True)
    sums = (torch.sin(1.3 * torch.arange(DIM)) * out * out).sum() + 0.3 * lse.sum()
    for x, y in zip(torch.autograd.grad(sums, leaves), wanted[2:], strict=True):
        assert torch.equal(x, y)


def test_the_mode_is_of_a_thread_nests_and_is_guarded_on():
    seen = []
    work = torch.compile(
        lambda x: x + (dispatch.form_for_mode("triton") == "triton_in_order"),
        backend="eager",
        fullgraph=True,
    )

    def both():
        seen.append((dispatch.form_for_mode("triton"), work(torch.zeros(()))))

    both()
    with sr.batch_invariant():
        both()
        thread = threading.Thread(target=both)
        thread.start()
        thread.join()
        with sr.batch_invariant(False):
            both()
        both()
    both()
    on = [name == "triton_in_order" for name, _ in seen]
    assert on == [False, True, False, False, True, False]
    assert [bool(x) for _, x in seen] == on
    with pytest.raises(ValueError, match="backend must be one of"):
        sr.attention(*drawn(1), sr.Causal(), backend="triton_in_order")
    assert "triton_in_order" not in sr.backends()


def test_numpy_alone_would_not_prove_it():
    """The product above is what the proof rests on: NumPy's depends on a row's place."""
    generator = numpy.random.default_rng(0)
    a, b = (generator.standard_normal((64, 64), dtype=numpy.float32) for _ in range(2))
    moved = numpy.roll(a, 7, 0)
    handle = lambda x: interpreter.TensorHandle(x, interpreter.tl.float32)  # noqa: E731
    zeros = handle(numpy.zeros((64, 64), numpy.float32))
    one, two = (product_in_a_tree(None, handle(x), handle(b), zeros).data for x in (a, moved))
    assert numpy.array_equal(numpy.roll(one, 7, 0), two)
    assert numpy.abs(one - a.astype(float) @ b).max() < 1e-4


def listed_keys(columns: int) -> torch.Tensor:
    """20 of 50 keys for each of 12 queries, in drawn slots of `columns`; -1 in the others."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.rand(12, 50, generator=generator).argsort(1)[:, :20]
    padded = torch.full((12, columns), -1)
    padded[:, :20] = keys
    padded[:, 20:22] = keys[:, :2]  # repeats, which count once
    return padded.gather(1, torch.rand(12, columns, generator=generator).argsort(1))[None, None]


@pytest.mark.parametrize("extras", slow_except(["dropout"], EXTRAS))
def test_bits_over_lists_do_not_depend_on_their_slots(extras):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 12, DIM, generator=generator)
    key, value = torch.randn(2, 1, 1, 50, DIM, generator=generator)
    options = {**EXTRAS[extras], "q_start": 0}
    found = []
    for columns in (22, 40, 70):
        pattern = sr.SelectedBlocks(listed_keys(columns), 1, query_block=1)
        with sr.batch_invariant():
            found.append(results((query, key, value), pattern, **options))
    exact = sr.attention(query, key, value, pattern, backend="reference", **options)
    assert (found[0][0] - exact).abs().max() < 1e-5
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)
