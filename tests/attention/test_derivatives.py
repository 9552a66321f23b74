"""Tangents, second and mixed derivatives equal the dense reference's, in each of torch's ways.

`docs/derivatives.md` says what there is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from oracles.derivatives_oracle import (
    INDICES,
    OPTIONS,
    PATTERNS,
    WAYS,
    N,
    assert_equal,
    call,
    drawn,
    loss,
    of_gradient,
    second,
    tangent,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

import sparsering as sr

pytestmark = pytest.mark.filterwarnings("ignore:`?torch.jit.script`? is deprecated")

FEW = 100  # numbers of a table, each of which sums the errors of very many pairs
KERNEL = 1e-6  # error of a float32 kernel, relative to the largest number of a result


@pytest.mark.covering(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_with_every_option(name: str, options: str, way: str):
    pattern, given = PATTERNS[name], OPTIONS[options]
    if "distance_bias" in given and name == "per head":
        pytest.skip("a PerHead mixes no distances")
    x, u = drawn(1, given), drawn(2, given)
    found, exact = (WAYS[way](partial(call, pattern, given, b), x, u) for b in (None, "reference"))
    assert_equal(found, exact)


def assert_as_exact_as_dense(
    f: Callable[..., tuple[Tensor, Tensor]],
    way: str,
    x: Sequence[Tensor],
    u: Sequence[Tensor],
    backend: str = "cpu",
) -> None:
    """The error against float64 is at most twice that of eager dense attention.

    In float32 it may also be KERNEL of the largest number, as for the kernels' first derivatives:
    they take each weight from a rounded lse, and their exponential is exact to 3e-7.
    """
    exact = WAYS[way](partial(f, "reference"), [t.double() for t in x], [t.double() for t in u])
    found, dense = (WAYS[way](partial(f, b), x, u) for b in (backend, "reference"))
    dtype = x[0].dtype
    for a, b, c in zip(found, dense, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.isfinite().all()
        error, eager = ((y.double() - c).square().mean().sqrt() for y in (a, b))
        if dtype == torch.float32:
            least = KERNEL * c.abs().max().clamp(min=1.0)
            if c.numel() < FEW:  # eager's own error of such sums differs from run to run
                least *= 4
        else:
            least = torch.finfo(dtype).eps * c.square().mean().sqrt()
        assert error <= 2 * eager + least


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_dropped_weights_and_sinks_move(backend: str, way: str):
    given = {"dropout_p": 0.3, "dropout_seed": 5, "sink": (2, 4, N)}
    x, u = (drawn(seed, given, torch.float32) for seed in (1, 2))
    assert_as_exact_as_dense(partial(call, PATTERNS["window"], given), way, x, u, backend)


@pytest.mark.covering(2)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dim", [1, 8, 40, 64, 128])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_cpu_kernel_with_every_option(name, options, way, dim, num_threads, threads):
    pattern, given = PATTERNS[name], OPTIONS[options]
    if "distance_bias" in given and name == "per head":
        pytest.skip("a PerHead mixes no distances")
    torch.set_num_threads(num_threads)
    x, u = (drawn(seed, given, torch.float32, (dim, max(1, dim - 3))) for seed in (1, 2))
    assert_as_exact_as_dense(partial(call, pattern, given), way, x, u)


LARGE = {  # tiles of 128 tokens, of which bitmaps cut parts away
    "window": (sr.SlidingWindow(150) & sr.Causal(), 300, 300),
    "branches": (sr.LongNet((128, 300), (1, 2)) & sr.Causal(), 300, 300),
    "long rows": (sr.SlidingWindow(4000), 100, 3700),  # more tiles than a thread keeps
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", ["bare", "all"])
@pytest.mark.parametrize("name", LARGE)
def test_large_tiles_of_the_cpu_kernel(name, options, way, num_threads, threads):
    torch.set_num_threads(num_threads)
    pattern, queries, keys = LARGE[name]
    given = {"bare": {}, "all": {**OPTIONS["all"], "distance_bias": (1, 19), "sink": (1,)}}[options]
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 1, queries, 16), (1, 1, keys, 16), (1, 1, keys, 16)]
    shapes += [x for x in given.values() if isinstance(x, tuple)]
    x, u = ([torch.randn(s, generator=generator) for s in shapes] for _ in range(2))
    f = partial(call, pattern, {**given, "block_size": 128})
    assert_as_exact_as_dense(f, way, x, u)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["cpu", "gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["window", "LongNet", "lists"])
def test_lower_precision_has_the_error_of_dense_attention(name, dtype, backend, way):
    pattern, given = PATTERNS[name], {"softcap": 2.0, "sink": (4,)}
    x, u = drawn(1, given, dtype), drawn(2, given, dtype)
    assert_as_exact_as_dense(partial(call, pattern, given), way, x, u, backend)


SLOT_PATTERNS = ["selected blocks", "lists", "lists beside tiles", "edges"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SLOT_PATTERNS)
def test_biases_of_slots(name: str, way: str):
    pattern = PATTERNS[name]
    shape = (1, 4, *pattern.slot_shape[2:]) if name == "edges" else (2, 4, 3, 2)
    shape = (2, 4, *INDICES.shape[1:]) if name.startswith("lists") else shape
    given = {"slot_bias": shape}
    x, u = drawn(1, given), drawn(2, given)
    found, exact = (WAYS[way](partial(call, pattern, given, b), x, u) for b in (None, "reference"))
    assert_equal(found, exact)
    x, u = ([t.float() for t in y] for y in (x, u))
    assert_as_exact_as_dense(partial(call, pattern, given), way, x, u)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["window", "LongNet", "blocks"])
def test_biases_of_blocks(name: str, way: str):
    pattern = PATTERNS[name]
    blocks = pattern.layout(N, num_heads=4, num_kv_heads=2, block_size=16).num_blocks
    given = {"block_bias": (2, 4, blocks), "block_size": 16}
    x, u = drawn(1, given), drawn(2, given)
    x[3][0, 0, 0] = -torch.inf  # pairs that are removed
    found, exact = (WAYS[way](partial(call, pattern, given, b), x, u) for b in (None, "reference"))
    assert_equal(found, exact)
    x, u = ([t.float() for t in y] for y in (x, u))
    assert_as_exact_as_dense(partial(call, pattern, given), way, x, u)


def test_a_tensor_without_a_tangent_moves_nothing():
    x, u = drawn(1, {}), drawn(2, {})
    for number in range(3):
        moving = lambda t, f: f(*x[:number], t, *x[number + 1 :])  # noqa: B023, E731
        found, exact = (
            jvp(
                partial(moving, f=partial(call, PATTERNS["LongNet"], {}, b)),
                (x[number],),
                (u[number],),
            )[1]
            for b in (None, "reference")
        )
        assert_equal(found, exact)


def test_dual_numbers_of_torch():
    x, u = drawn(1, {}), drawn(2, {})
    exact = tangent(partial(call, PATTERNS["window"], {}, "reference"), x, u)
    for backend in ("cpu", None):
        dtype = torch.float32 if backend == "cpu" else torch.float64
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(a.to(dtype), b.to(dtype)) for a, b in zip(x, u, strict=True)
            ]
            out, lse = call(PATTERNS["window"], {}, backend, *duals)
            found = [forward_ad.unpack_dual(t).tangent for t in (out, lse)]
        assert_equal([t.double() for t in found], exact, 1e-5 if backend == "cpu" else 1e-10)


def test_a_gradient_of_dual_numbers():
    x, u = drawn(1, {}), drawn(2, {})
    f = partial(call, PATTERNS["window"], {})
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(a.requires_grad_(), b) for a, b in zip(x, u, strict=True)]
        first = torch.autograd.grad(loss(partial(f, None), *duals), x)
        found = [forward_ad.unpack_dual(t).tangent for t in first]
    assert_equal(found, of_gradient(partial(f, "reference"), [t.detach() for t in x], u))


@pytest.mark.parametrize("way", [hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacrev(f))])
def test_hessians(way):
    x = [t[:1, :, :5] for t in drawn(1, {})]
    pattern = sr.SlidingWindow(2)

    def of_query(backend: str | None, query: Tensor) -> Tensor:
        out, lse = sr.attention(query, *x[1:], pattern, return_lse=True, backend=backend)
        return out.sin().sum() + lse.square().sum()

    found, exact = (way(partial(of_query, b))(x[0]) for b in (None, "reference"))
    assert_equal([found], [exact])


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch's linearize
def test_jacobians_and_linearized_calls():
    x, u = ([t[:1, :, :5] for t in drawn(seed, {})] for seed in (1, 2))
    f = {
        b: lambda q, b=b: sr.attention(q, *x[1:], sr.Causal(), backend=b)
        for b in (None, "reference")
    }
    assert_equal([jacfwd(f[None])(x[0])], [jacfwd(f["reference"])(x[0])])
    assert_equal([jacfwd(f[None])(x[0])], [jacrev(f[None])(x[0])])
    out, move = linearize(f[None], x[0])
    exact = jvp(f["reference"], (x[0],), (u[0],))
    assert_equal([out, move(u[0])], exact)


def test_vjp_of_vjp_and_batches_of_directions():
    x, u = drawn(1, {}), drawn(2, {})
    many = [torch.stack([t, 2 * t, t.flip(2)]) for t in u]
    for way in (tangent, of_gradient):
        found, exact = (
            vmap(lambda *v, f=f: tuple(way(f, x, v)))(*many)  # noqa: B023
            for f in (partial(call, PATTERNS["LongNet"], {}, b) for b in (None, "reference"))
        )
        assert_equal(found, exact)

    def double(backend: str | None) -> Sequence[Tensor]:
        f = partial(loss, partial(call, PATTERNS["window"], {}, backend))

        def first(*y: Tensor) -> tuple[Tensor, ...]:
            return vjp(f, *y)[1](torch.ones((), dtype=torch.float64))

        return vjp(first, *x)[1](tuple(u))

    assert_equal(double(None), double("reference"))


def test_torch_checks_both_orders_itself():
    x = [t[:1, :, :4, :3].clone().requires_grad_() for t in drawn(1, {})]
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    f = lambda q, k, v, s: sr.attention(  # noqa: E731
        q, k, v, sr.LongNet((2, 4), (1, 2)) & sr.Causal(), sink=s, softcap=1.2, return_lse=True
    )
    assert torch.autograd.gradcheck(f, (*x, sink), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (*x, sink), check_fwd_over_rev=True)


def test_inside_activation_checkpointing():
    x, u = drawn(1, {}), drawn(2, {})
    f = partial(call, PATTERNS["window"], {}, None)
    kept = lambda *y: checkpoint(f, *y, use_reentrant=False)  # noqa: E731
    for found, exact in zip(second(kept, x, u), second(f, x, u), strict=True):
        assert torch.equal(found, exact)


def test_documents_end_to_end():
    query, key, value = (t[0].transpose(0, 1) for t in drawn(1, {}))
    starts = torch.tensor([0, 10, 11, 30, N])
    moves = [t[0].transpose(0, 1) for t in drawn(2, {})]
    f = lambda q, k, v: sr.attention_varlen(q, k, v, starts, starts, pattern=sr.Causal())  # noqa: E731
    dense = partial(call, PATTERNS["documents"], {}, "reference")
    found = jvp(f, (query, key, value), tuple(moves))[1]
    exact = jvp(
        lambda *y: dense(*(t.transpose(0, 1)[None] for t in y))[0][0].transpose(0, 1),
        (query, key, value),
        tuple(moves),
    )[1]
    assert_equal([found], [exact])


def test_the_bits_of_a_call_do_not_change_beside_its_tangent():
    x, u = drawn(1, {}, torch.float32), drawn(2, {}, torch.float32)
    plain = sr.attention(*x, PATTERNS["LongNet"], backend="cpu")
    moved = jvp(lambda *y: sr.attention(*y, PATTERNS["LongNet"], backend="cpu"), tuple(x), tuple(u))
    assert torch.equal(moved[0], plain)


def test_what_there_is_not_is_refused_by_name():
    x, u = drawn(1, {}), drawn(2, {})
    f = partial(call, PATTERNS["window"], {}, None)
    with pytest.raises(NotImplementedError, match=r"third derivatives.*backend='reference'"):
        tangent(lambda *y: tuple(tangent(f, y, u)), x, u)
    leaves = [t.requires_grad_() for t in x]
    first = torch.autograd.grad(loss(f, *leaves), leaves, create_graph=True)
    again = torch.autograd.grad(first[0].square().sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"third derivatives.*backend='reference'"):
        torch.autograd.grad(again[0].sum(), leaves)
    sparse = partial(call, PATTERNS["window"], {}, "torch_sparse")
    for way in WAYS.values():
        with pytest.raises(NotImplementedError, match=r"torch_sparse has first derivatives in rev"):
            way(sparse, [t.detach() for t in x], u)
    x = [t.detach() for t in x]

    def scored(backend: str):
        return lambda *y: sr.attention(
            *y, WINDOW, score_mod=lambda s, *_: s.sin(), return_lse=True, backend=backend
        )

    for way in (tangent, second):
        with pytest.raises(
            NotImplementedError, match="score_mod on a backend other than reference"
        ):
            way(scored("gather"), x, u)
        assert all(t.isfinite().all() for t in way(scored("reference"), x, u))
    cache = sr.KVCache(PATTERNS["window"], 2, 2, 8, num_heads=4, value_dim=6)
    with forward_ad.dual_level(), torch.no_grad():
        duals = [forward_ad.make_dual(a.detach(), b) for a, b in zip(x, u, strict=True)]
        with pytest.raises(NotImplementedError, match="attend has first derivatives in reverse"):
            cache.attend(*duals)
    assert cache.length == 0
    with pytest.raises(RuntimeError, match="forward gradient"):
        jvp(f, tuple(t.detach() for t in x), (u[1], *u[1:]))


WINDOW = sr.SlidingWindow(7)
COMPILED = {
    "jvp": lambda f, q, t: jvp(f, (q,), (t,)),
    "jvp of grad": lambda f, q, t: jvp(grad(lambda x: f(x).sin().sum()), (q,), (t,)),
    "grad of jvp": lambda f, q, t: grad(lambda x: jvp(f, (x,), (t,))[1].square().sum())(q),
    "vmap of jvp": lambda f, q, t: vmap(lambda u: jvp(f, (q,), (u,))[1])(torch.stack([t, 2 * t])),
    "grad of grad": lambda f, q, t: grad(
        lambda x: grad(lambda y: f(y).sin().sum())(x).square().sum()
    )(q),
    "jacfwd": lambda f, q, t: jacfwd(lambda x: f(x[None, None].expand(t.shape)).sum((0, 1)))(
        q[0, 0, :, :]
    ),
}


@pytest.mark.parametrize("way", COMPILED)
def test_under_torch_compile(way: str):
    query, key, value, direction = torch.randn(4, 1, 2, 12, 4)

    def run(query: Tensor, key: Tensor, value: Tensor, direction: Tensor) -> Any:
        return COMPILED[way](lambda q: sr.attention(q, key, value, WINDOW), query, direction)

    torch._dynamo.reset()
    x = query, key, value, direction
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(*x)
    exact = COMPILED[way](
        lambda q: sr.attention(q, key.double(), value.double(), WINDOW, backend="reference"),
        query.double(),
        direction.double(),
    )
    found, exact = (y if isinstance(y, tuple) else (y,) for y in (found, exact))
    assert_equal([y.double() for y in found], exact, 1e-5)


def test_a_step_of_training_through_a_jvp_under_torch_compile():
    query, key, value, direction = torch.randn(4, 1, 2, 12, 4)
    weight = torch.ones(4, requires_grad=True)

    def loss(weight: Tensor, query: Tensor, direction: Tensor) -> Tensor:
        call = lambda x: sr.attention(x * weight, key, value, WINDOW)  # noqa: E731
        out, move = jvp(call, (query,), (direction,))
        return (out - move).square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found, exact = (
        torch.autograd.grad(f(weight, query, direction), weight) for f in (compiled, loss)
    )
    assert_equal(found, exact, 1e-6)


def test_the_flop_counter_counts_products_of_pairs():
    from torch.utils.flop_counter import FlopCounterMode

    x, u = drawn(1, {}), drawn(2, {})
    with FlopCounterMode(display=False) as plain:
        call(WINDOW, {}, "gather", *x)
    with FlopCounterMode(display=False) as moved:
        tangent(partial(call, WINDOW, {}, "gather"), x, u)
    pairs = plain.get_total_flops() // (8 + 6)  # 2 products: of D 8 and of Dv 6
    assert moved.get_total_flops() == pairs * (8 + 6) + pairs * (3 * 8 + 2 * 6)
