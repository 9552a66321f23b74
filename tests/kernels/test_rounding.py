"""A cache with `store`: results are exactly those of the rounded keys and values."""

import copy
import pickle

import pytest
import torch

import sparsering as sr
from sparsering.kernels import rounding
from sparsering.kernels.rounding import from_store, to_store

STREAMING = sr.Causal() & (sr.SlidingWindow(15) | sr.GlobalTokens(4, rows=False))
PATTERNS = {
    "causal": sr.Causal(),
    "window and sinks": STREAMING,
    "longnet": sr.LongNet((16, 64), (1, 2)) & sr.Causal(),
    "unlike heads": sr.PerHead((sr.Causal(), STREAMING)),
}
STORES = pytest.mark.parametrize("store", ["int8", "fp8"])
NAMES = pytest.mark.parametrize("name", PATTERNS)
N = 200
MOST = {"int8": 127.0, "fp8": 448.0}


def rounded_by_hand(x, store):
    """Each row's numbers times its scale, from the definition, in float64."""
    scale = (x.float().abs().amax(-1, keepdim=True) / MOST[store]).double()
    numbers = torch.where(scale > 0, x.double() / scale, 0.0)
    if store == "int8":
        return numbers.float().round().double() * scale
    return numbers.float().to(torch.float8_e4m3fn).double() * scale


def inputs(dtype=torch.float32, batch=2, n=N, dim=16, seed=0):
    torch.manual_seed(seed)
    q, k, v = torch.randn(batch, 4, n, dim), *torch.randn(2, batch, 2, n, dim)
    return [x.to(dtype) for x in (q, k * torch.logspace(-2, 0, n)[:, None].flip(0), v)]


def part(tensors, begin, end):
    return [x[:, :, begin:end] for x in tensors]


def expected(tensors, pattern, store, **options):
    q, k, v = tensors
    k, v = rounded_by_hand(k, store), rounded_by_hand(v, store)
    return sr.attention(q.double(), k, v, pattern, backend="reference", **options).float()


def made(name, store, batch=2, dim=16, **options):
    options = {"num_heads": 4, "page_size": 16, "store": store, **options}
    return sr.KVCache(PATTERNS[name], batch, 2, dim, **options)


def assert_close(actual, wanted, atol=5e-6):
    torch.testing.assert_close(actual.float(), wanted, rtol=0, atol=atol)


@STORES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_is_its_numbers_and_their_scale(store, dtype, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(rounding, "kernel_operators", lambda: None)
    x = torch.randn(2, 3, 60, 40) * torch.logspace(-6, 4, 60)[:, None]
    x[0, 0, 0] = 0
    x = x.to(dtype)
    rows = to_store(x, store)
    assert rows.shape == (2, 3, 60, 44)
    assert rows.dtype == (torch.int8 if store == "int8" else torch.uint8)
    wanted = rounded_by_hand(x, store)
    # float32 rounds x / scale once before the number is rounded: a tie may go the other way
    off = (from_store(rows, torch.float32).double() - wanted).abs() > 1e-6 * wanted.abs() + 1e-12
    assert off.double().mean() < 2e-4
    largest = x.double().abs().amax(-1, keepdim=True)
    bound = largest / 254 if store == "int8" else largest / 28
    error = (from_store(rows, torch.float32).double() - x.double()).abs()
    assert bool((error <= bound * (1 + 1e-5) + 1e-12).all())


@STORES
@pytest.mark.parametrize("width", [0, 1, 5, 6])
def test_scales_may_begin_at_any_byte(store, width):
    x = torch.randn(1, 1, 1, width)
    wanted = rounded_by_hand(x, store).float() if width else x
    torch.testing.assert_close(from_store(to_store(x, store), torch.float32), wanted)


@STORES
def test_a_row_with_nan_or_infinity_is_nan_and_no_other_row(store):
    x = torch.randn(1, 1, 4, 16)
    x[0, 0, 1, 3], x[0, 0, 2, 5] = torch.nan, torch.inf
    found = from_store(to_store(x, store), torch.float32)
    assert found.isnan().all(-1).tolist() == [[[False, True, True, False]]]


@pytest.mark.covering(
    2, keep=[{"store": "int8", "name": "causal", "sizes": (1,), "backend": "cpu"}]
)
@STORES
@NAMES
@pytest.mark.parametrize("sizes", [(1,), (16,), (5, 1, 40), (N,)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_results_are_those_of_the_rounded_keys_and_values(store, name, sizes, backend):
    tensors, cache, done, turn = inputs(), made(name, store), 0, 0
    wanted = expected(tensors, PATTERNS[name], store)
    while done < N:
        end = min(N, done + sizes[turn % len(sizes)])
        out = cache.attend(*part(tensors, done, end), backend=backend)
        assert_close(out, wanted[:, :, done:end])
        done, turn = end, turn + 1


@STORES
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_other_backends(store, backend):
    tensors, cache = inputs(n=44), made("window and sinks", store)
    wanted = expected(tensors, STREAMING, store)
    cache.attend(*part(tensors, 0, 40), backend=backend)
    for i in range(40, 44):
        out = cache.attend(*part(tensors, i, i + 1), backend=backend)
        assert_close(out, wanted[:, :, i : i + 1])


@pytest.mark.covering(1)
@STORES
@NAMES
def test_triton_gets_a_draft_and_a_page_of_rounded_rows(store, name):
    """Its kernels read floats: rows of 8 bits are multiplied by their scales before each step."""
    tensors, cache = inputs(n=48), made(name, store)
    wanted = expected(tensors, PATTERNS[name], store)
    for begin, end in ((0, 40), (40, 41), (41, 44)):
        out = cache.attend(*part(tensors, begin, end), backend="triton")
        assert_close(out, wanted[:, :, begin:end])
    out = cache.attend(*part(tensors, 44, 46), tree=(-1, 0), backend="triton")
    assert_close(out, wanted[:, :, 44:46])
    cache.keep([0, 1])
    out = cache.attend(*part(tensors, 46, 48), backend="triton")
    assert_close(out, wanted[:, :, 46:48])


@STORES
@pytest.mark.parametrize("dim", [1, 3, 16, 40, 64, 128, 200])
@pytest.mark.parametrize("group", [1, 4])
def test_head_dims_and_groups(store, dim, group):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2 * group, 70, dim), *torch.randn(2, 1, 2, 70, dim)
    cache = sr.KVCache(sr.Causal(), 1, 2, dim, num_heads=2 * group, store=store)
    wanted = expected((q, k, v), sr.Causal(), store)
    out = [cache.attend(*part((q, k, v), 0, 60))]
    out += [cache.attend(*part((q, k, v), i, i + 2)) for i in range(60, 70, 2)]
    assert_close(torch.cat(out, 2), wanted)


@STORES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(store, dtype):
    tensors, cache = inputs(dtype), made("longnet", store)
    wanted = expected(tensors, PATTERNS["longnet"], store)
    out = [cache.attend(*part(tensors, 0, 150))]
    out += [cache.attend(*part(tensors, i, i + 1)) for i in range(150, N)]
    assert out[0].dtype == dtype
    assert_close(torch.cat(out, 2), wanted, 2e-2)


@STORES
def test_options_apply(store):
    tensors, cache = inputs(), made("causal", store)
    options = {
        "softcap": 5.0,
        "sink": torch.tensor([0.5, -1.0, 2.0, -torch.inf]),
        "distance_bias": torch.randn(4, 31),
        "scale": 0.2,
    }
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    wanted = expected(tensors, sr.Causal(), store, **wide)
    cache.attend(*part(tensors, 0, 150), **options)
    for i in range(150, 170):
        assert_close(cache.attend(*part(tensors, i, i + 1), **options), wanted[:, :, i : i + 1])
    in_pages = {name: x for name, x in options.items() if name != "distance_bias"}
    wanted = expected(tensors, sr.Causal(), store, **{n: wide[n] for n in in_pages})
    for i in range(170, 190):
        assert_close(cache.attend(*part(tensors, i, i + 1), **in_pages), wanted[:, :, i : i + 1])


@STORES
@NAMES
def test_every_change_of_a_cache(store, name):
    """Crop, reorder, repeat, select, join, copies, pickles, drafts and calls that are not kept."""
    tensors, cache = inputs(), made(name, store, rollback=20)
    wanted = expected(tensors, PATTERNS[name], store)

    def step(cache, begin, end, index=(0, 1), **options):
        rows = [x[list(index), :, begin:end] for x in tensors]
        assert_close(cache.attend(*rows, **options), wanted[list(index), :, begin:end])

    step(cache, 0, 120)
    step(cache, 120, 125, keep=False)
    for i in range(120, 135):
        step(cache, i, i + 1)
    cache.crop(122)
    step(cache, 122, 124)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        step(other, 124, 140)
    step(cache, 124, 127, tree=(-1, 0, 1))
    cache.keep([0, 1])
    second = made(name, store, rollback=20)
    step(second, 0, 90)
    second.select([1])
    cache.join(second)
    rows = [torch.cat((x[:, :, 126:127], x[1:, :, 90:91])) for x in tensors]
    out = cache.attend(*rows)
    assert_close(out[:2], wanted[:, :, 126:127])
    assert_close(out[2:], wanted[1:, :, 90:91])
    cache.select([1, 0])
    cache.reorder([1, 1])
    cache.repeat(2)
    step(cache, 127, 128, (0, 0, 0, 0))


@STORES
def test_loaded_keys_are_rounded_too(store):
    tensors, cache = inputs(), made("causal", store)
    wanted = expected(tensors, sr.Causal(), store)
    cache.load(*part(tensors, 0, 150)[1:])
    assert_close(cache.attend(*part(tensors, 150, 151)), wanted[:, :, 150:151])
    with pytest.raises(ValueError, match=r"holds torch.float32, got keys of torch.float64"):
        cache.attend(*(x.double() for x in part(tensors, 151, 152)))


@STORES
def test_bytes_are_a_quarter_of_float32_and_a_scale(store):
    exact, rounded = (sr.KVCache(sr.Causal(), 1, 2, 128, store=x) for x in (None, store))
    for cache in (exact, rounded):
        cache.attend(*torch.randn(3, 1, 2, 1000, 128))
    assert rounded._state.keys.rows.nbytes * 4 * 128 == exact._state.keys.rows.nbytes * (128 + 4)
    assert rounded.nbytes < 0.27 * exact.nbytes
    assert f"1000 of 1000 tokens in {store}" in repr(rounded)


def test_what_is_no_store_is_refused():
    for other in ("int4", 8, torch.int8):
        with pytest.raises(ValueError, match='store must be "int8", "fp8" or None, got'):
            sr.KVCache(sr.Causal(), 1, 2, 16, store=other)
    one, two = (sr.KVCache(sr.Causal(), 1, 2, 16, store=x) for x in ("int8", "fp8"))
    with pytest.raises(ValueError, match="join needs caches made with the same arguments"):
        one.join(two)
