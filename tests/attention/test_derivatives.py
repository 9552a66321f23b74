"""Tangents, second and mixed derivatives equal the dense reference's, in each of torch's ways.

`docs/derivatives.md` says what there is. The oracle is `backend="reference"` in float64, whose
derivatives torch itself makes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

import sparsering as sr

pytestmark = pytest.mark.filterwarnings("ignore:`?torch.jit.script`? is deprecated")

N = 36
TREE = sr.Tree((12, 8, 8, 8), (-1, 0, 0, 1))
INDICES = torch.tensor([[[(7 * q + 5 * j * j) % N for j in range(6)] for q in range(N)]])
EDGES = torch.stack((INDICES[0, :, :4].flatten(), torch.arange(N).repeat_interleave(4)))
PATTERNS = {
    "window": sr.SlidingWindow(7) & sr.Causal(),
    "strided window and global": sr.SlidingWindow(6, 6, 3) | sr.GlobalTokens(3),
    "LongNet": sr.LongNet((8, 16), (1, 2)) & sr.Causal(),
    "one branch twice": sr.Causal() + sr.SlidingWindow(4),
    "documents": sr.Packed((10, 1, 19, 6), sr.Causal()),
    "padding": sr.KeyPadding((20, N)) & sr.SlidingWindow(9),
    "rows without keys": sr.KeyMask(torch.arange(N) > 20) & sr.Causal(),
    "tree": TREE,
    "grid": sr.Neighbourhood((6, 6), 1),
    "per head": sr.PerHead((sr.Causal(), sr.SlidingWindow(3))),
    "blocks": sr.BlockWindow(1, 8),
    "selected blocks": sr.SelectedBlocks(torch.tensor([[[0, -1], [1, 0], [0, 2]]] * 2), 16),
    "lists": sr.SelectedBlocks(INDICES, 1) & sr.Causal(),
    "edges": sr.SelectedBlocks.from_edges(EDGES, N),
    "lists beside tiles": sr.SelectedBlocks(INDICES, 1) | sr.SlidingWindow(5),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.4},
    "distances": {"distance_bias": (4, 2 * 9 + 1)},
    "sink of a head": {"sink": (4,)},
    "sink of a query": {"sink": (2, 4, N)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "all": {
        "softcap": 1.5,
        "distance_bias": (4, 2 * 9 + 1),
        "sink": (4,),
        "dropout_p": 0.3,
        "dropout_seed": 5,
    },
}


def drawn(seed: int, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value, then a tensor for each option that is given by its shape."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, N, 8), (2, 2, N, 8), (2, 2, N, 6)]
    shapes += [x for x in options.values() if isinstance(x, tuple)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def call(
    pattern: sr.Pattern, options: dict[str, Any], backend: str | None, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) of tensors as `drawn` returns them; lse is 0 in rows without keys."""
    learned = iter(tensors[3:])
    given = {k: next(learned) if isinstance(x, tuple) else x for k, x in options.items()}
    found = sr.attention(*tensors[:3], pattern, return_lse=True, backend=backend, **given)
    out, lse = found
    return out, torch.where(lse == -torch.inf, 0.0, lse)


Call = Callable[..., tuple[Tensor, Tensor]]


def loss(f: Call, *x: Tensor) -> Tensor:
    out, lse = f(*x)
    return out.sin().sum() + lse.cos().sum()


def tangent(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    return [*jvp(f, tuple(x), tuple(u))[1]]


def second(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a penalty on gradients, also by the gradients of out and lse."""
    x = [t.detach().clone().requires_grad_() for t in x]
    out, lse = f(*x)
    of_out, of_lse = (torch.ones_like(t).requires_grad_() for t in (out, lse))
    first = torch.autograd.grad((out, lse), x, (of_out, of_lse), create_graph=True)
    penalty = sum((g * v).sum() + g.square().sum() for g, v in zip(first, u, strict=True))
    return [*torch.autograd.grad(penalty, [*x, of_out, of_lse])]


def of_gradient(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    """A product with the Hessian: the tangent of a gradient."""
    return [*jvp(grad(partial(loss, f), tuple(range(len(x)))), tuple(x), tuple(u))[1]]


def through_tangent(f: Call, x: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a loss of tangents, by the tensors and by their directions."""
    x, u = ([t.detach().clone().requires_grad_() for t in y] for y in (x, u))
    results, moves = jvp(f, tuple(x), tuple(u))
    total = sum(t.sin().sum() for t in moves) + results[0].square().sum()
    return [*torch.autograd.grad(total, [*x, *u])]


WAYS = {"tangent": tangent, "second": second, "HVP": of_gradient, "through": through_tangent}


def assert_equal(found: Sequence[Tensor], exact: Sequence[Tensor], error: float = 1e-10) -> None:
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.isfinite().all()
        assert (a - b).abs().max() <= error * max(1.0, b.abs().max())


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["cpu", "gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["window", "LongNet", "lists"])
def test_lower_precision_has_the_error_of_dense_attention(name, dtype, backend, way):
    pattern, given = PATTERNS[name], {"softcap": 2.0, "sink": (4,)}
    x, u = drawn(1, given, dtype), drawn(2, given, dtype)
    exact = WAYS[way](
        partial(call, pattern, given, "reference"),
        [t.double() for t in x],
        [t.double() for t in u],
    )
    found, dense = (
        WAYS[way](partial(call, pattern, given, b), x, u) for b in (backend, "reference")
    )
    for a, b, c in zip(found, dense, exact, strict=True):
        error, eager = ((y.double() - c).square().mean().sqrt() for y in (a, b))
        assert error <= 2 * eager + torch.finfo(dtype).eps * c.square().mean().sqrt()


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
