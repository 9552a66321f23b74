"""torch.func: grad and vmap of the fast backends are exact; what they cannot do is said."""

import pytest
import torch
from oracles.kinds import random_table
from torch import Tensor
from torch.func import functional_call, functionalize, grad, jacrev, jvp, vmap

import sparsering as sr
from sparsering.models import LongNetLM

BACKENDS = ("cpu", "gather", "reference")
PATTERNS = {
    "causal": sr.Causal(),
    "mixture": sr.LongNet((8, 16), (1, 2)) & sr.Causal(),
    "of each batch entry": sr.KeyPadding((30, 20)),
    "a table for each head": sr.Blocks(random_table(4, 3, 3), 16),
    "tables for batch and heads": sr.Blocks(random_table(2, 4, 3, 3), 16),
}


def tensors(*mapped: int) -> list[Tensor]:
    return [torch.randn(*mapped, 2, heads, 40, 8) for heads in (4, 2, 2)]


def total(pattern: sr.Pattern, backend: str):
    def of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = sr.attention(query, key, value, pattern, return_lse=True, backend=backend)
        return out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()

    return of


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_grad_is_that_of_autograd(name, backend):
    f, args = total(PATTERNS[name], backend), tensors()
    leaves = [x.clone().requires_grad_() for x in args]
    expected = torch.autograd.grad(f(*leaves), leaves)
    for a, b in zip(grad(f, (0, 1, 2))(*args), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_vmap_is_a_loop(name, backend):
    """Over all inputs, over some, and along any dim; the batch of the pattern is the inner one."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return sr.attention(query, key, value, PATTERNS[name], return_lse=True, backend=backend)

    query, key, value = tensors(3)
    cases = (
        ((query, key, value), (0, 0, 0)),
        ((query, key[0], value[0]), (0, None, None)),
        ((query.movedim(0, 2), key.movedim(0, 4), value[1]), (2, 4, None)),
    )
    for args, in_dims in cases:
        out, lse = vmap(attend, in_dims=in_dims)(*args)
        for i in range(3):
            own = [x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)]
            for a, b in zip((out[i], lse[i]), attend(*own), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_of_each_sample(name, backend):
    f, (query, key, value) = total(PATTERNS[name], backend), tensors(3)
    found = vmap(grad(f, (0, 1, 2)), in_dims=(0, None, 0))(query, key[0], value)
    for i in range(3):
        expected = grad(f, (0, 1, 2))(query[i], key[0], value[i])
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grad_of_what_is_mapped(backend):
    f, (query, key, value) = total(sr.Causal(), backend), tensors(3)
    found = grad(lambda k: vmap(f, in_dims=(0, None, 0))(query, k, value).sum())(key[0])
    expected = sum(grad(f, 1)(query[i], key[0], value[i]) for i in range(3))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_block_bias_is_mapped_and_differentiated():
    query, key, value = tensors()
    layout = sr.Causal().layout(40, num_heads=4, num_kv_heads=2, block_size=16)
    bias = torch.randn(3, 1, 4, layout.num_blocks)

    def f(b: Tensor) -> Tensor:
        options = {"block_size": 16, "block_bias": b}
        return sr.attention(query, key, value, sr.Causal(), **options).square().sum()

    found = vmap(grad(f))(bias)
    for i in range(3):
        leaf = bias[i].clone().requires_grad_()
        (expected,) = torch.autograd.grad(f(leaf), leaf)
        torch.testing.assert_close(found[i], expected, rtol=1e-6, atol=1e-6)


def test_a_model_by_functional_call():
    torch.manual_seed(0)
    model = LongNetLM(sr.LongNet((8, 16), (1, 2)), width=32, num_layers=2, num_heads=2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, 256, (3, 1, 21))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], window: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (window[:, :-1],))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, tokens)
    for i in range(3):
        own = torch.autograd.grad(
            loss(dict(model.named_parameters()), tokens[i]), list(model.parameters())
        )
        for name, expected in zip(parameters, own, strict=True):
            torch.testing.assert_close(found[name][i], expected, rtol=1e-4, atol=1e-6)


def test_jacrev_is_rows_of_gradients():
    query, key, value = (x[:1, :1, :5].double() for x in tensors())
    f = lambda q: sr.attention(q, key, value, sr.Causal())  # noqa: E731
    found = jacrev(f)(query)
    exact = jacrev(lambda q: sr.attention(q, key, value, sr.Causal(), backend="reference"))(query)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp uses it
def test_what_the_fast_backends_cannot_do_names_the_way_out():
    query, key, value = tensors()

    def f(q: Tensor) -> Tensor:
        return sr.attention(q, key, value, sr.Causal()).sum()

    def move(q: Tensor) -> Tensor:
        return jvp(f, (q,), (query,))[1]

    with pytest.raises(NotImplementedError, match=r"forward mode over.*backend='reference'"):
        jvp(move, (query,), (query,))
    with pytest.raises(NotImplementedError, match=r"third derivatives.*backend='reference'"):
        grad(lambda q: grad(lambda t: grad(f)(t).sum())(q).sum())(query)
    indices = torch.zeros(3, 2, 1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"tensors of a pattern.*\[B, H, ...\]"):
        vmap(lambda i: sr.attention(query, key, value, sr.SelectedBlocks(i, 32)))(indices)
    masks = torch.rand(3, 2, query.shape[2], query.shape[2]) > 0.5  # of one head, or of both?
    with pytest.raises(NotImplementedError, match=r"tensors of a pattern.*\[B, H, ...\]"):
        vmap(lambda m: sr.attention(query, key, value, sr.Dense(m), backend="reference"))(masks)
    with pytest.raises(NotImplementedError, match="of at least 1, got 0"):
        vmap(f)(query[None][:0])


def test_functionalized_calls_are_calls():
    query, key, value = tensors()
    found = functionalize(lambda q: sr.attention(q, key, value, sr.Causal()))(query)
    assert torch.equal(found, sr.attention(query, key, value, sr.Causal()))


def test_the_reference_has_second_derivatives_under_transforms():
    query, key, value = (x[:1, :, :6].double() for x in tensors())

    def f(q: Tensor) -> Tensor:
        return sr.attention(q, key, value, sr.Causal(), backend="reference").square().sum()

    leaf = query.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), leaf)
    found = grad(lambda q: grad(f)(q).square().sum())(query)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_vmap_under_torch_compile():
    args = tensors(3)
    f = vmap(lambda q, k, v: sr.attention(q, k, v, sr.Causal()))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(*args), f(*args))
