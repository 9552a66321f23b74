"""A batch of output gradients at once gives what a loop over them gives (`is_grads_batched`)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.functional import jacobian

import sparsering as sr
from sparsering.distributed import simulate_ring
from sparsering.models import LongNetLM
from sparsering.nn import MultiheadAttention, SelectedAttention

BACKENDS = ("cpu", "gather", "reference")
SELECTED = sr.SelectedBlocks(torch.tensor([[[0, -1], [1, 0], [0, 2]]] * 2), 16)
PATTERNS = {
    "mixture": sr.LongNet((8, 16), (1, 2)) & sr.Causal(),
    "of each batch entry": sr.KeyPadding((30, 20)),
    "selected": SELECTED & sr.Causal(),
}


def inputs(batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(batch, h, 40, 8, dtype=dtype, requires_grad=True) for h in (4, 2, 2)]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def check(
    outs: Tensor | tuple[Tensor, ...],
    leaves: list[Tensor],
    error: float = 1e-5,
    by_vmap: bool = True,
) -> None:
    """Compares a batch of gradients, by autograd and by vmap, with one gradient at a time."""
    outs = outs if isinstance(outs, tuple) else (outs,)
    many = [torch.randn(3, *out.shape, dtype=out.dtype) for out in outs]
    many[0] = many[0][:1].expand_as(many[0])  # one gradient three times, without strides

    def vjp(*grads: Tensor, **options: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outs, leaves, grads, retain_graph=True, **options)

    expected = [torch.stack(g) for g in zip(*map(vjp, *many), strict=True)]
    ways = [lambda: vjp(*many, is_grads_batched=True), lambda: torch.vmap(vjp)(*many)]
    for found in (way() for way in ways[: 1 + by_vmap]):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=error, atol=error)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_of_out_and_lse(name: str, backend: str):
    leaves = inputs()
    check(sr.attention(*leaves, PATTERNS[name], return_lse=True, backend=backend), leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_every_extra(backend: str):
    args, bias = inputs(), {"distance_bias": leaf(4, 9), "sink": leaf(4)}
    options = {"softcap": 2.0, "dropout_p": 0.3, "dropout_seed": 5, "backend": backend}
    check(sr.attention(*args, sr.Causal(), **bias, **options), [*args, *bias.values()])
    slots = leaf(2, 4, 3, 2)
    check(sr.attention(*args, SELECTED, slot_bias=slots, backend=backend), [*args, slots])
    blocks = leaf(1, 1, sr.Causal().layout(40, num_heads=4, block_size=16).num_blocks)
    options = {"block_size": 16, "block_bias": blocks, "backend": backend}
    check(sr.attention(*args, sr.Causal(), **options), [*args, blocks])
    args[1].requires_grad_(False)
    check(sr.attention(*args, sr.Causal(), backend=backend), args[::2])


def test_of_other_calls():
    args, cu = inputs(1), torch.tensor([0, 10, 25, 40])
    flat = [x[0].transpose(0, 1) for x in args]
    check(sr.attention_varlen(*flat, cu, cu, sr.Causal(), return_lse=True), args)
    check(sr.attention_weights(*args[:2], sr.Causal()).values, args[:2])
    half = inputs(dtype=torch.bfloat16)
    check(sr.attention(*half, sr.Causal()), half, 2e-2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: sr.attention(*x, sr.Causal()), backend="aot_eager")
    check(compiled(*args), args, by_vmap=False)  # torch has no vmap of a compiled backward
    check(simulate_ring(*args, sr.Causal(), world_size=2, return_lse=True), args)


def test_of_modules():
    x = torch.randn(2, 64, 16)
    model = LongNetLM(sr.LongNet((8, 16), (1, 2)), width=32, num_layers=2, num_heads=2)
    modules = {
        MultiheadAttention(16, 4, pattern=sr.Causal(), batch_first=True): (x, x, x),
        SelectedAttention(16, 4, block_size=16, k=2, window=8): (x,),
        model: (torch.randint(0, 256, (2, 20)),),
    }
    for module, args in modules.items():
        leaves = list(module.parameters())
        for parameter in leaves:
            torch.nn.init.normal_(parameter, std=0.2)
        out = module(*args)
        check(out[0] if isinstance(out, tuple) else out, leaves, 1e-4)


@pytest.mark.parametrize("backend", [None, "gather", "reference"])
def test_of_torchs_own_tools(backend: str | None):
    args = [x[:, :2, :4, :3].detach().requires_grad_() for x in inputs(1, torch.float64)]

    def f(*args: Tensor) -> tuple[Tensor, Tensor]:
        return sr.attention(*args, sr.Causal(), return_lse=True, backend=backend)

    assert gradcheck(f, args, check_batched_grad=True)
    for fast, slow in zip(
        jacobian(f, (*args,), vectorize=True), jacobian(f, (*args,)), strict=True
    ):
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of its own operators
@pytest.mark.parametrize("outer", [torch.vmap, torch._vmap_internals._vmap])
@pytest.mark.parametrize("pattern", [sr.Causal(), sr.KeyPadding((30, 20))])
def test_batches_of_batches(pattern: sr.Pattern, outer: Callable[..., Callable[..., Tensor]]):
    args = inputs()
    out, lse = sr.attention(*args, pattern, return_lse=True)

    def vjps(*grads: Tensor, batched: bool = True) -> Tensor:
        options = {"retain_graph": True, "is_grads_batched": batched}
        return torch.autograd.grad((out, lse), args[1], grads, **options)[0]

    grads, lse_grads = torch.randn(2, 3, *out.shape), torch.randn(2, 3, *lse.shape)
    expected = [
        torch.stack([vjps(g, x, batched=False) for g, x in zip(*pair, strict=True)])
        for pair in zip(grads, lse_grads, strict=True)
    ]
    torch.testing.assert_close(outer(vjps)(grads, lse_grads), torch.stack(expected))
    inner = outer(lambda x: vjps(grads[0], x))(lse_grads)  # one gradient in both, one in the inner
    torch.testing.assert_close(inner[0], expected[0])
