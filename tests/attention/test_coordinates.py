"""`coordinate_bias` against dense attention with all distances: results and all gradients."""

import pytest
import torch
from helpers.tensor_bytes import measure
from oracles.attention_oracle import assert_close
from oracles.scored_oracle import (
    ABLE,
    BATCH,
    HEADS,
    KEYS,
    KV_HEADS,
    QUERIES,
    assert_equal,
    dense,
    drawn,
    table,
)

import sparsering as sr


def placed(*shape, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 40).requires_grad_()


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("entries", [BATCH, 1])
def test_a_bias_by_coordinates_is_exact(backend, dims, entries):
    x, pattern = drawn(), sr.LongNet((32, 128), (1, 2))
    coords, own = placed(entries, KEYS, dims), placed(entries, QUERIES, dims, seed=6)
    slopes = table(HEADS)
    bias = sr.coordinate_bias(coords, slopes, query_coords=own)
    out = sr.attention(*x, pattern, score_mod=bias, backend=backend)
    apart = (own[:, :, None] - coords[:, None]).square().sum(-1).sqrt()  # [B or 1, Nq, Nk]
    counts = pattern.to_dense(QUERIES, KEYS, num_heads=HEADS, num_kv_heads=KV_HEADS)
    expected = dense(*x, counts, lambda s: s - slopes[:, None, None] * apart[:, None])
    assert_equal(out, expected, [*x, slopes, coords, own])


def test_tokens_at_one_place_have_finite_gradients():
    x = [y[:, :, :70] for y in drawn()]
    coords, slopes = placed(70, 2), table(HEADS)
    out = sr.attention(*x, sr.Full(), score_mod=sr.coordinate_bias(coords, slopes))
    grads = torch.autograd.grad(out.sum(), [coords, slopes])
    assert all(y.isfinite().all() and y.any() for y in grads)
    pixels = (coords.detach() * 256).long()
    whole = sr.attention(*x, sr.Full(), score_mod=sr.coordinate_bias(pixels, slopes / 256))
    assert_close(whole, out, 5e-2)


def test_no_tensor_of_all_pairs_is_made():
    tokens = 8192
    x = [torch.randn(1, 2, tokens, 16, requires_grad=True) for _ in range(3)]
    coords, slopes = torch.rand(tokens, 2) * 100, torch.tensor([0.5, 0.1], requires_grad=True)
    pattern = sr.SlidingWindow(64, 64)

    def step():
        out = sr.attention(*x, pattern, score_mod=sr.coordinate_bias(coords, slopes))
        return list(torch.autograd.grad(out.sum(), [*x, slopes]))

    assert measure(step).peak < 2 * tokens * tokens  # of 2 heads, 8 times that in float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((placed(3, KEYS, 2), table(HEADS)), r"coords must be \[2 or 1, 70, dims\].*\(3, 90, 2\)"),
        ((placed(QUERIES, 2), table(HEADS)), r" coords must be \[2 or 1, 90, dims\].*\(1, 70, 2\)"),
        ((placed(KEYS, 2), table(HEADS)), r"query_coords must be \[2 or 1, 70, dims\]"),
        ((placed(KEYS), table(HEADS)), r"numbers \[B, tokens, dims\]"),
        ((placed(KEYS, 2) > 1, table(HEADS)), r"numbers \[B, tokens, dims\].*bool"),
        ((placed(KEYS, 2), table(HEADS, 1)), r"floating point tensor \[heads\]"),
    ],
)
def test_coordinates_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sr.attention(*drawn(), sr.Full(), score_mod=sr.coordinate_bias(*arguments))


CASES = {  # dims, batch entries of coordinates, dtype of coordinates, other options
    "plain": (2, 1, torch.float32, {}),
    "one head's tables": (3, BATCH, torch.float64, {"softcap": 2.0, "tables": True}),
    "dropped": (1, BATCH, torch.float32, {"dropout_p": 0.3, "dropout_seed": 3, "scale": -0.3}),
    "a scale near zero": (5, 1, torch.float64, {"scale": 1e-25, "block_size": 16}),
    "a scale of zero": (2, 1, torch.float32, {"scale": 0.0}),
    "few queries": (3, BATCH, torch.float32, {"queries": 3, "softcap": 2.0}),
    "few queries of whole heads": (2, 1, torch.float64, {"queries": 2, "tables": True}),
}


def chosen(rows, slots, block_size, query_block):
    generator = torch.Generator().manual_seed(4)
    indices = torch.randint(
        -1, -(-KEYS // block_size), (KV_HEADS, rows, slots), generator=generator
    )
    return sr.SelectedBlocks(indices, block_size, query_block)


PATTERNS = {
    "causal": sr.Causal(),
    "window": sr.SlidingWindow(9, 3),
    "longnet": sr.LongNet((32, 128), (1, 2)),
    "key mask": sr.Causal() & sr.KeyMask(torch.arange(2 * KEYS).view(2, KEYS) % 7 > 2),
    "empty rows": sr.SlidingWindow(4, 4) & sr.Dilated(16, 2, 0),
    "lists": chosen(KEYS, 6, 4, 1),
    "lists beside a window": chosen(KEYS, 3, 1, 1) | sr.SlidingWindow(5, 0),
    "selected tiles": chosen(6, 2, 16, 16),
}


def scored(x, places, own, slopes, pattern, backend, options):
    bias = sr.coordinate_bias(places, slopes, query_coords=own)
    out, lse = sr.attention(
        *x, pattern, score_mod=bias, backend=backend, return_lse=True, **options
    )
    leaves = [
        *x,
        slopes,
        places,
        own,
        *(y for y in options.values() if isinstance(y, torch.Tensor)),
    ]
    generator = torch.Generator().manual_seed(9)
    sent = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    loss = (out.double() * sent).sum() + torch.where(lse.isfinite(), lse, 0.0).double().sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


def compare(name, case, dtype, backend, *, bound, of_gradients):
    """Holds a backend to the reference in float64 on the same numbers, with all gradients."""
    dims, entries, of_places, options = CASES[case]
    options, pattern = dict(options), PATTERNS[name]
    queries = options.pop("queries", QUERIES)
    x = [drawn(dtype)[0][:, :, -queries:], *drawn(dtype)[1:]]
    places, own = placed(entries, KEYS, dims), placed(entries, queries, dims, seed=6)
    with torch.no_grad():
        places[:, -8:] = places[:, -9:-8]  # some tokens are where others are
        own[:, -2:] = places[:, -2:]
    slopes = table(HEADS).abs()
    if options.pop("tables", False):
        options |= {"distance_bias": table(HEADS, 31), "sink": table(HEADS)}
    single = torch.float32 if dtype.itemsize < 8 else dtype

    def results(to, backend):
        def leaf(y, own_dtype):
            return y.detach().to(own_dtype).to(to or own_dtype).requires_grad_()

        tables = {
            n: leaf(y, single) if isinstance(y, torch.Tensor) else y for n, y in options.items()
        }
        each = leaf(places, of_places), leaf(own, of_places), leaf(slopes, single)
        return scored([leaf(y, dtype) for y in x], *each, pattern, backend, tables)

    found, exact = results(None, backend), results(torch.float64, "reference")
    for number, (a, b) in enumerate(zip(found, exact, strict=True)):
        limit = (bound, min(bound, 4e-3))[number] if number < 2 else of_gradients
        assert_close(a.detach().double(), b.detach(), limit, f"result {number}")


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cpu_kernel_is_as_exact_as_eager_mathematics(name, case, dtype):
    unit = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    compare(name, case, dtype, "cpu", bound=unit, of_gradients=4 * unit)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("invariant", [False, True])
def test_gradients_by_head_and_by_tile_are_exact(name, case, number, invariant, threads):
    torch.set_num_threads(number)
    with sr.batch_invariant(invariant):
        compare(name, case, torch.float32, "cpu", bound=2e-6, of_gradients=8e-6)


FAST = {("window", "one head's tables"), ("selected tiles", "few queries")}  # interpreted
TILES = [
    pytest.param(name, case, marks=() if (name, case) in FAST else pytest.mark.slow)
    for name in PATTERNS
    for case in CASES
    if "list" not in name and case != "few queries of whole heads"
]


@pytest.mark.parametrize(("name", "case"), TILES)
def test_the_triton_kernels_are_as_exact_as_eager_mathematics(name, case):
    is_half = case == "few queries"
    dtype, unit = (torch.float16, 4e-3) if is_half else (torch.float32, 4e-6)
    compare(name, case, dtype, "triton", bound=unit, of_gradients=4 * unit)


def test_pieces_of_tiles_and_heads_in_turn_add_up_in_triton():
    """A query tile of many key tiles is cut, and so is a key tile of many query tiles."""
    torch.manual_seed(0)
    shapes = (1, 2, 320, 8), *[(1, 1, 320, 8)] * 2
    x = [torch.randn(s, requires_grad=True) for s in shapes]
    coords = placed(320, 2).detach().float().requires_grad_()
    slopes = torch.tensor([0.1, 0.3], requires_grad=True)
    pattern = sr.SlidingWindow(4, 4) | sr.GlobalTokens(2)

    def grads(backend):
        bias = sr.coordinate_bias(coords, slopes)
        out = sr.attention(*x, pattern, score_mod=bias, block_size=16, backend=backend)
        return torch.autograd.grad(out.square().sum(), [*x, coords, slopes])

    for a, b in zip(grads("triton"), grads("reference"), strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("name", ["lists", "lists beside a window"])
def test_triton_refuses_lists_by_name(name):
    with pytest.raises(NotImplementedError, match="no coordinate_bias over lists of single keys"):
        compare(name, "plain", torch.float32, "triton", bound=1, of_gradients=1)


def test_key_tiles_of_many_queries_are_not_shared_by_threads(threads):
    """Each thread adds to the coordinates of its own tokens, of a tile that all queries see."""
    torch.set_num_threads(3)
    torch.manual_seed(0)
    x = [torch.randn(1, 1, 600, 8, requires_grad=True) for _ in range(3)]
    coords, slopes = placed(600, 2).detach().float().requires_grad_(), torch.tensor([0.1])
    pattern = sr.SlidingWindow(4, 0) | sr.GlobalTokens(2)

    def grads(backend):
        bias = sr.coordinate_bias(coords, slopes)
        out = sr.attention(*x, pattern, score_mod=bias, block_size=16, backend=backend)
        return torch.autograd.grad(out.square().sum(), [*x, coords])

    for a, b in zip(grads("cpu"), grads("reference"), strict=True):
        assert_close(a, b, 1e-5)


def test_small_distances_of_large_coordinates_are_exact():
    """float64 coordinates keep their precision beside float32 queries."""
    x = [y.float() for y in drawn()]
    coords, slopes = placed(KEYS, 2).detach() / 40, table(HEADS).detach().abs().float()
    near = sr.coordinate_bias(coords, slopes, query_coords=coords[:QUERIES])
    far = sr.coordinate_bias(coords + 2.0**24, slopes, query_coords=coords[:QUERIES] + 2.0**24)
    found = [sr.attention(*x, sr.Causal(), score_mod=bias, backend="cpu") for bias in (near, far)]
    assert_close(found[1], found[0], 1e-5)
    exact = sr.attention(*x, sr.Causal(), score_mod=near, backend="reference")
    assert_close(found[0], exact, 2e-6)


def test_coordinates_of_hidden_keys_may_be_nan():
    x = [y.detach().float().requires_grad_() for y in drawn()]
    coords, own, slopes = placed(KEYS, 2), placed(QUERIES, 2, seed=6), table(HEADS).float()
    coords, slopes = coords.detach(), slopes.detach().requires_grad_()
    pattern = sr.KeyMask(torch.arange(KEYS) < 80)

    def run(coords):
        bias = sr.coordinate_bias(coords, slopes, query_coords=own)
        out = sr.attention(*x, pattern, score_mod=bias, backend="cpu")
        return out, *torch.autograd.grad(out.square().sum(), [*x, slopes, own])

    expected = run(coords)
    coords[80:] = torch.nan
    for a, b in zip(run(coords), expected, strict=True):
        assert torch.equal(a, b)


def test_a_call_takes_the_first_backend_that_has_it():
    x = [y.float() for y in drawn()]
    bias = sr.coordinate_bias(placed(KEYS, 2), table(HEADS), query_coords=placed(QUERIES, 2))
    functions = [bias, lambda score, *_: score, bias]  # a decision is for one of both
    for function, name in zip(functions, ("cpu", "gather", "cpu"), strict=True):
        said = sr.explain(*x, sr.Causal(), score_mod=function)
        assert said.startswith(f"runs: {name},")
        out = sr.attention(*x, sr.Causal(), score_mod=function)
        assert torch.equal(out, sr.attention(*x, sr.Causal(), score_mod=function, backend=name))
    assert "torch_sparse: it has no coordinate_bias (cpu, " in sr.explain(
        *x, sr.Causal(), score_mod=bias
    )
    with pytest.raises(NotImplementedError, match="torch_sparse: it has no coordinate_bias"):
        sr.attention(*x, sr.Causal(), score_mod=bias, backend="torch_sparse")


def test_a_second_derivative_is_refused_by_name():
    x = [y.detach().float().requires_grad_() for y in drawn()]
    coords = placed(KEYS, 2)
    bias = sr.coordinate_bias(coords, table(HEADS), query_coords=placed(QUERIES, 2, seed=6))
    out = sr.attention(*x, sr.Causal(), score_mod=bias, backend="cpu")
    (grad,) = torch.autograd.grad(out.sum(), coords, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"score_mod.*reference"):
        grad.sum().backward()
