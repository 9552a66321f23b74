"""Lists of single keys (`SelectedBlocks` of blocks below 16): no layout, bounded memory, threads.

Their values and gradients against an oracle are in test_selected_blocks.py.
"""

from collections.abc import Iterator

import pytest
import torch
from helpers.tensor_bytes import measure
from oracles.attention_oracle import assert_close
from oracles.listed import CHOSEN, INNER, JOINS, LISTED, WINDOW, WITHOUT_DISTANCES

import sparsering as sr
from sparsering.kernels.backends import is_default
from sparsering.layouts.compile import build_layout
from sparsering.layouts.lists import is_only_lists, lists_of, split
from sparsering.patterns.algebra import Frame
from sparsering.patterns.selected import has_lists
from sparsering.selection import block_mass

SINK = torch.zeros(4, requires_grad=True)


def drawn(kv_heads=2, tokens=90, width=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 4, tokens, width), *[(1, kv_heads, tokens, width)] * 2]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_the_layout_has_only_what_is_beside_the_lists(monkeypatch, backend):
    built = []

    def build(pattern, *rest):
        built.append(pattern)
        return build_layout(pattern, *rest)

    monkeypatch.setattr("sparsering.layouts.cache.build_layout", build)
    sr.layout_cache.clear()
    for pattern in (CHOSEN & sr.Causal(), (CHOSEN | WINDOW) & sr.Causal(), CHOSEN + WINDOW):
        out = sr.attention(*drawn(), pattern, backend=backend)
        out.sum().backward()
    assert built and not any(pattern.tensors for pattern in built)


def test_a_list_beside_a_mask_has_none_of_its_pairs():
    frame = Frame.build(90, None, 4, 2, None)
    rest, (lists,) = lists_of(*split((CHOSEN | WINDOW) & sr.Causal()), frame)
    assert rest == WINDOW & sr.Causal()
    key, query = lists.keys.long(), torch.arange(90)[:, None]
    assert lists.keys.shape == (1, 2, 90, 12) and lists.branch == 0
    listed = torch.where((key >= 0) & (key < 90), query - key, 0)
    assert not ((key >= 0) & ((listed < 0) | (listed <= 7))).any()
    ordered = LISTED.sort().values
    kept = (ordered >= 0) & (query >= ordered) & ((query - ordered) > 7)
    assert torch.equal(key[0], torch.where(kept, ordered, -1))


@pytest.mark.parametrize(
    "pattern",
    [
        CHOSEN | sr.SelectedBlocks(LISTED.flip(0), 1),
        CHOSEN & sr.SelectedBlocks(LISTED.flip(0), 1),
        CHOSEN & sr.Packed((40, 50), sr.Full()),
        sr.Packed((40, 50), sr.Causal()) | CHOSEN,
        sr.Causal() - WINDOW,
    ],
)
def test_other_joins_stay_exact(pattern):
    x = drawn()
    for options in ({}, {"dropout_p": 0.3, "dropout_seed": 4}):
        exact = sr.attention(*(y.double() for y in x), pattern, backend="reference", **options)
        for backend in ("cpu", "gather"):
            out = sr.attention(*x, pattern, backend=backend, **options)
            assert_close(out.double(), exact, 3e-6)


@pytest.mark.parametrize("width", [16, 64, 128, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_of_heads_width_and_dtype(width, dtype):
    for kv_heads in (1, 4):
        x = drawn(kv_heads, width=width, dtype=dtype)
        exact = [y.detach().double().requires_grad_() for y in x]
        pattern = sr.SelectedBlocks(LISTED[0], 1) & sr.Causal()
        out = sr.attention(*x, pattern, backend="cpu")
        expected = sr.attention(*exact, pattern, backend="reference")
        sent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        got = [out, *torch.autograd.grad(out, x, sent.to(dtype))]
        wanted = [expected, *torch.autograd.grad(expected, exact, sent.to(dtype).double())]
        for a, b in zip(got, wanted, strict=True):
            bound = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
            assert_close(a.double(), b, bound * max(1, b.abs().max().item()))


@pytest.fixture
def any_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("any_threads")
def test_threads_share_the_queries_of_one_kv_head():
    x, grads = drawn(1), []
    for number in (1, 2, 3, 2):
        torch.set_num_threads(number)
        out = sr.attention(*x, sr.SelectedBlocks(LISTED[0], 1), backend="cpu", sink=SINK)
        grads.append([out, *torch.autograd.grad(out.square().sum(), [*x, SINK])])
    for again in grads[1:]:
        assert torch.equal(again[0], grads[0][0])  # forward: the same bits with any number
        for a, b in zip(again, grads[0], strict=True):
            assert_close(a, b, 2e-5)
    assert all(map(torch.equal, grads[1], grads[3]))


@pytest.mark.parametrize("backend", ["cpu", "gather"])
@pytest.mark.parametrize("beside", [None, sr.SlidingWindow(31, 0)])
def test_memory_is_that_of_the_lists(backend, beside):
    tokens, slots = 16384, 4
    x = drawn(2, tokens, 16)
    listed = torch.randint(0, tokens, (tokens, slots), generator=torch.Generator().manual_seed(3))
    pattern = sr.SelectedBlocks(listed, 1) & sr.Causal()
    pattern = pattern if beside is None else pattern | beside

    def step() -> list[torch.Tensor]:
        out = sr.attention(*x, pattern, backend=backend)
        return list(torch.autograd.grad(out.sum(), x))

    whole = 8 * sum(y.numel() * y.element_size() for y in x)  # results, gradients, sums
    peak = measure(step).peak
    assert peak < whole + (40 << 20) < tokens * tokens, peak


def test_two_sets_of_keys_share_a_softmax():
    """Tokens in a window, and summaries of windows that have ended, listed behind the tokens."""
    tokens, size, left = 90, 10, 12
    query, key, value = (y.detach().double() for y in drawn(4, tokens))
    coarse = [y.unflatten(2, (-1, size)).mean(3) for y in (key, value)]
    keys, values = (torch.cat(pair, 2) for pair in zip((key, value), coarse, strict=True))
    entry, position = torch.arange(tokens // size), torch.arange(tokens)[:, None]
    listed = torch.where((entry + 1) * size <= position + 1, tokens + entry, -1)
    pattern = sr.SlidingWindow(left) | sr.SelectedBlocks(listed, 1)
    out = sr.attention(query, keys, values, pattern, q_start=0, sink=SINK.detach().double())
    for p in range(tokens):
        seen = [*range(max(0, p - left), p + 1)]
        seen += [tokens + c for c in range(tokens // size) if (c + 1) * size - 1 <= p]
        score = torch.einsum("bhd,bhkd->bhk", query[:, :, p], keys[:, :, seen]) / 4
        weight = torch.cat((score, torch.zeros(1, 4, 1)), -1).softmax(-1)[..., :-1]
        exact = torch.einsum("bhk,bhkd->bhd", weight, values[:, :, seen])
        assert (out[:, :, p] - exact).abs().max() <= 1e-13


@pytest.mark.parametrize(
    "sizes", [(1, 5, 7, 0, 4), (1, 5, 7, 4, 0), (0, 5, 7, 4, 4), (1, 5, 0, 4, 4)]
)
def test_sizes_of_zero(sizes):
    """No head dim, no value, no batch entry, no key: as the reference has it."""
    batch, tokens, keys, width, value_width = sizes
    x = [
        torch.randn(batch, 2, n, w)
        for n, w in ((tokens, width), (keys, width), (keys, value_width))
    ]
    pattern = sr.SelectedBlocks(torch.randint(-1, max(1, keys), (tokens, 3)), 1)
    expected = sr.attention(*x, pattern, q_start=0, backend="reference")
    for backend in ("cpu", "gather"):
        out = sr.attention(*x, pattern, q_start=0, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_heads_as_wide_as_latents():
    """D 576 and Dv 512, as a model that caches latents attends."""
    generator = torch.Generator().manual_seed(4)
    query, key = (torch.randn(1, h, 40, 576, generator=generator) for h in (4, 1))
    leaves = [query.requires_grad_(), key.requires_grad_()]
    pattern = sr.SelectedBlocks(LISTED[0, :40] % 40, 1) & sr.Causal()
    for dtype, backend in ((torch.float32, "cpu"), (torch.float64, "reference")):
        x, y = (z.to(dtype) for z in leaves)
        found = sr.attention(x, y, y[..., :512], pattern, backend=backend)
        grads = torch.autograd.grad(found.square().sum(), leaves)
        if dtype == torch.float32:
            got = [found, *grads]
    for a, b in zip(got, [found, *grads], strict=True):
        assert_close(a.double(), b.double(), 2e-5 * max(1, b.abs().max().item()))


def test_lists_run_by_default_where_tiles_do():
    assert not is_default("torch_sparse") and all(map(is_default, ("gather", "cpu")))
    told = sr.explain(*(y.detach() for y in drawn()), CHOSEN)
    assert told.startswith("runs: cpu, blocks of 128 and lists of keys; batch 1, 4 heads")


def test_lists_alone_run_in_triton_with_heads_as_wide_as_latents():
    """Under the interpreter here. Tiles beside the lists hold 512 numbers of a head."""
    query, key = (torch.randn(1, h, 20, 576) for h in (4, 1))
    alone = sr.SelectedBlocks(LISTED[0, :20] % 20, 1) & sr.Causal()
    beside = sr.SelectedBlocks(LISTED[0, :20] % 20, 1) | sr.SlidingWindow(3)
    for pattern, refused in ((alone, False), (beside, True), (alone, False), (sr.Causal(), True)):
        call = (query, key, key[..., :512], pattern)
        if refused:
            with pytest.raises(
                NotImplementedError, match=r"up to 512 \(up to 576 of query and key"
            ):
                sr.attention(*call, backend="triton")
            continue
        out = sr.attention(*call, backend="triton")
        exact = sr.attention(*(y.double() for y in call[:3]), pattern, backend="reference")
        assert_close(out.double(), exact, 5e-6)


@pytest.mark.parametrize("name", JOINS)
def test_joins_that_are_only_lists_leave_nothing_for_tiles(name):
    branches = split(JOINS[name])[0].branches
    assert is_only_lists(JOINS[name]) == all(branch == sr.GlobalTokens(0) for branch in branches)


def listed(batch: int) -> sr.SelectedBlocks:
    return sr.SelectedBlocks(torch.zeros(batch, 1, 8, 2, dtype=torch.int64), 1)


@pytest.mark.parametrize("backend", [None, "cpu", "gather", "reference"])
@pytest.mark.parametrize(
    ("pattern", "batch"),
    [
        (listed(3), 2),
        (listed(2), 1),
        (listed(3) & sr.Causal(), 2),
        (listed(3) | sr.SlidingWindow(2), 2),
        (listed(2) + listed(3), 2),
        (listed(3) & sr.KeyMask(torch.ones(2, 8, dtype=torch.bool)), 2),
        (listed(2) & sr.KeyMask(torch.ones(3, 8, dtype=torch.bool)), 2),
    ],
)
def test_lists_for_another_number_of_batch_entries_are_refused(pattern, batch, backend):
    query = torch.randn(batch, 2, 8, 16)
    for call in (sr.attention, torch.compile(sr.attention, backend="eager")):
        with pytest.raises(ValueError, match=r"batch (entries|size), got"):
            call(query, query, query, pattern, q_start=0, backend=backend)


_SIZES = {1: 90, 4: 23, 16: 6, 32: 3}  # blocks of 90 keys, by their size
_FORMS = {
    "alone": lambda chosen: chosen & sr.Causal(),
    "beside a window": lambda chosen: (chosen | WINDOW) & sr.Causal(),
    "beside a mixture": lambda chosen: chosen + WINDOW,
}


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_order_of_slots_changes_no_bit(form, size, backend, biased):
    """Lists that repeat keys and have empty slots; the bias of a slot moves along with it."""
    generator = torch.Generator().manual_seed(size)
    blocks = _SIZES[size]
    listed = torch.randint(-1, blocks + 1, (2, 90, min(12, blocks)), generator=generator)
    order = torch.rand(listed.shape, generator=generator).argsort(-1)
    if biased:  # a stable order of repeated blocks: the first slot's bias counts
        keyed = torch.rand(1, 1, blocks + 2, generator=generator).expand(2, 90, -1)
        order = keyed.gather(-1, listed + 1).sort(stable=True).indices
    orders = torch.arange(listed.shape[-1]).expand_as(order), order
    results = []
    for of_slots in orders:
        query, key, value = drawn()
        given = {}
        if biased:
            bias = torch.randn(1, 4, *listed.shape[1:], generator=torch.Generator().manual_seed(3))
            of_heads = of_slots.repeat_interleave(2, 0)[None]
            given["slot_bias"] = bias.gather(-1, of_heads).requires_grad_()
        pattern = _FORMS[form](sr.SelectedBlocks(listed.gather(-1, of_slots), size, 1))
        out, lse = sr.attention(
            query, key, value, pattern, backend=backend, return_lse=True, block_size=16, **given
        )
        wanted = [query, key, value, *given.values()]
        grads = torch.autograd.grad(out.pow(2).sum() + lse.clamp(min=-9).sum(), wanted)
        if biased:
            grads = (*grads[:3], torch.empty_like(grads[3]).scatter_(-1, of_heads, grads[3]))
        results.append((out, lse, *grads))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mass_of_slots_in_any_order(dtype):
    """`block_mass` keeps the caller's order of slots."""
    query, key, _ = (x.detach() for x in drawn(dtype=dtype))
    listed = torch.stack([torch.randperm(90)[:12] for _ in range(90)])[None].expand(2, -1, -1)
    order = torch.rand(listed.shape).argsort(-1)
    masses = []
    for table in (listed, listed.gather(-1, order)):
        pattern = sr.SelectedBlocks(table, 1) & sr.Causal()
        masses.append(block_mass(query, key, pattern))
    moved = masses[0].gather(-1, order.repeat_interleave(2, 0)[None])
    assert torch.equal(moved, masses[1]) and moved.any()


@pytest.mark.parametrize("backend", ["cpu", "gather"])
@pytest.mark.parametrize("name", JOINS)
def test_every_join_with_a_list_is_exact_and_lays_no_list_in_tiles(monkeypatch, name, backend):
    pattern, built = JOINS[name], []
    monkeypatch.setattr(
        "sparsering.layouts.cache.build_layout",
        lambda pattern, *rest: built.append(pattern) or build_layout(pattern, *rest),
    )
    batch = pattern.num_batches() or 1
    x = [y.detach().repeat(batch, 1, 1, 1).requires_grad_() for y in drawn()]
    table = torch.randn(4, 21, generator=torch.Generator().manual_seed(5), requires_grad=True)
    options = {"distance_bias": table, "dropout_p": 0.3, "dropout_seed": 4}
    if name in WITHOUT_DISTANCES:
        del options["distance_bias"]
    for used in ({}, options):
        sr.layout_cache.clear()
        built.clear()
        out, lse = sr.attention(*x, pattern, backend=backend, return_lse=True, **used)
        leaves = [*x, *([table] if "distance_bias" in used else [])]
        sent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        got = [out, lse, *torch.autograd.grad((out * sent).sum() + lse[lse > -1e9].sum(), leaves)]
        assert not any(map(has_lists, built))
        exact = [y.detach().double().requires_grad_() for y in leaves]
        more = {**used, **({"distance_bias": exact[3]} if "distance_bias" in used else {})}
        out, lse = sr.attention(*exact[:3], pattern, backend="reference", return_lse=True, **more)
        grads = torch.autograd.grad((out * sent).sum() + lse[lse > -1e9].sum(), exact)
        for a, b in zip(got, (out, lse, *grads), strict=True):
            hidden = b.isinf()
            assert torch.equal(a.isinf(), hidden)
            assert_close(a[~hidden].double(), b[~hidden], 2e-5)


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_lists_in_documents_end_to_end_count_from_each_document(backend):
    q_lengths, kv_lengths = (20, 0, 31), (35, 10, 45)
    cu = [[0, *torch.tensor(x).cumsum(0).tolist()] for x in (q_lengths, kv_lengths)]
    generator = torch.Generator().manual_seed(6)
    x = [torch.randn(n, h, 16, generator=generator) for n, h in ((51, 4), (90, 2), (90, 2))]
    table = torch.randn(1, 9, generator=generator)
    pattern = ((INNER | sr.SlidingWindow(3)) & sr.Causal()) + INNER
    options = {"distance_bias": table, "dropout_p": 0.3, "dropout_seed": 4, "softcap": 3.0}
    out = sr.attention_varlen(*x, *cu, pattern, backend=backend, **options)
    exact = [y.double() for y in x]
    options["distance_bias"] = table.double()
    expected = sr.attention_varlen(*exact, *cu, pattern, backend="reference", **options)
    assert_close(out.double(), expected, 5e-6)
