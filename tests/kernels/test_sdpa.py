"""The backend sdpa against the reference in float64: results, gradients, alignment, refusals."""

import pytest
import torch
from oracles.attention_oracle import assert_close
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparsering as sr
from sparsering.call import NO_OPTIONS
from sparsering.distributed.rank import choose_kernels

# number of queries, number of keys, q_start
FRAMES = {
    "square": (40, 40, None),
    "one query": (1, 40, None),
    "the last two queries": (2, 40, None),
    "a chunk at the end": (12, 40, None),
    "a chunk with later keys": (12, 40, 9),
    "from the first key": (12, 40, 0),
    "more queries than keys": (40, 12, 0),
    "after all keys": (12, 40, 60),
    "no keys": (5, 0, 0),
    "no queries": (0, 7, None),
}


def drawn(q_len: int, kv_len: int, width: int = 8, value_dim: int = 8) -> list[Tensor]:
    shapes = (2, 4, q_len, width), (2, 2, kv_len, width), (2, 2, kv_len, value_dim)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def results(backend: str, tensors: list[Tensor], pattern: sr.Pattern, **options) -> list[Tensor]:
    """Out and the gradients of query, key and value, in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = sr.attention(*leaves, pattern, backend=backend, **options)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, grad))]


@pytest.mark.parametrize("pattern", [sr.Full(), sr.Causal()], ids=str)
@pytest.mark.parametrize("name", FRAMES)
def test_it_computes_what_the_reference_computes(name, pattern):
    q_len, kv_len, q_start = FRAMES[name]
    tensors = drawn(q_len, kv_len)
    expected = results("reference", tensors, pattern, q_start=q_start)
    found = results("sdpa", tensors, pattern, q_start=q_start)
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_close(got, wanted, 1e-12, f"float64 {number}")
    single = results("sdpa", [x.float() for x in tensors], pattern, q_start=q_start)
    for number, (got, wanted) in enumerate(zip(single, expected, strict=True)):
        assert_close(got, wanted, 5e-6, f"float32 {number}")


@pytest.mark.parametrize("scale", [0.7, -0.4, 0.0])
@pytest.mark.parametrize(("width", "value_dim"), [(8, 8), (8, 5), (0, 3), (3, 0)])
def test_scales_and_head_dims(scale, width, value_dim):
    tensors = drawn(12, 40, width, value_dim)
    both = [results(x, tensors, sr.Causal(), scale=scale) for x in ("sdpa", "reference")]
    for got, wanted in zip(*both, strict=True):
        assert_close(got, wanted, 1e-12)


def test_torch_gets_grouped_heads_and_no_mask_that_it_does_not_need(monkeypatch):
    calls = []

    def watched(*tensors: Tensor, **options) -> Tensor:
        calls.append((tensors[1].shape[1], options))
        return scaled_dot_product_attention(*tensors, **options)

    monkeypatch.setattr("sparsering.kernels.library.sdpa.scaled_dot_product_attention", watched)
    for q_len, is_causal in ((40, True), (1, False)):
        sr.attention(*drawn(q_len, 40), sr.Causal(), backend="sdpa", scale=0.3)
        heads, options = calls.pop()
        wanted = {"attn_mask": None, "is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
        assert heads == 2 and options == wanted


def test_autocast_and_a_batch_of_gradients():
    tensors = [x.float().requires_grad_() for x in drawn(20, 20)]
    with torch.autocast("cpu", torch.bfloat16):
        out = sr.attention(*tensors, sr.Causal(), backend="sdpa")
    assert out.dtype == torch.bfloat16
    exact = sr.attention(*(x.bfloat16().double() for x in tensors), sr.Causal())
    assert_close(out.double(), exact, 2e-2)
    out = sr.attention(*tensors, sr.Causal(), backend="sdpa")
    grads = torch.randn(3, *out.shape)
    many = torch.autograd.grad(out, tensors, grads, is_grads_batched=True, retain_graph=True)
    for number, grad in enumerate(grads):
        for got, wanted in zip(
            many, torch.autograd.grad(out, tensors, grad, retain_graph=True), strict=True
        ):
            assert_close(got[number], wanted, 1e-6)


@pytest.mark.parametrize("q_len", [20, 12])
def test_compiled_functions_have_one_graph_and_the_same_numbers(q_len):
    def call(*tensors: Tensor) -> Tensor:
        return sr.attention(*tensors, sr.Causal(), backend="sdpa")

    torch._dynamo.reset()
    tensors = [x.requires_grad_() for x in drawn(q_len, 20)]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found, expected = (
        [out, *torch.autograd.grad(out.sum(), tensors)]
        for out in (compiled(*tensors), call(*tensors))
    )
    for got, wanted in zip(found, expected, strict=True):
        assert_close(got, wanted, 1e-12)


def test_second_and_forward_mode_derivatives_are_refused_by_name():
    tensors = [x.requires_grad_() for x in drawn(20, 20)]
    out = sr.attention(*tensors, sr.Causal(), backend="sdpa")
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"another library .* second derivatives"):
        torch.autograd.grad(grad.sum(), tensors)
    tangents = tuple(torch.ones_like(x) for x in tensors)
    with pytest.raises(NotImplementedError, match=r"sdpa has first .* not forward mode"):
        torch.func.jvp(
            lambda *x: sr.attention(*x, sr.Full(), backend="sdpa"), tuple(tensors), tangents
        )


def test_what_it_cannot_run_is_refused_with_a_way_out():
    tensors = drawn(20, 20)
    for pattern, options, told in (
        (sr.SlidingWindow(3), {}, r"it runs Full\(\) and Causal\(\), and no other pattern"),
        (sr.Full() & sr.Causal(), {}, "no other pattern"),
        (sr.Full() + sr.Full(), {}, "no other pattern"),
        (sr.Causal(), {"q_start": -3}, "where q_start is 0, or .*, got q_start=-3 of 20 queries"),
        (sr.Causal(), {"q_start": 3}, "got q_start=3 of 20 queries and 20 keys"),
        (sr.Causal(), {"return_lse": True}, "it has no lse; leave out return_lse, or"),
    ):
        with pytest.raises(NotImplementedError, match=f"sdpa: .*{told}.*leave out backend="):
            sr.attention(*tensors, pattern, backend="sdpa", **options)
    for name, value in (("softcap", 2.0), ("sink", torch.zeros(4)), ("dropout_p", 0.1)):
        with pytest.raises(NotImplementedError, match=f"sdpa: it has no {name} "):
            sr.attention(*tensors, sr.Full(), backend="sdpa", **{name: value})
    cache = sr.KVCache(sr.Causal(), 2, num_kv_heads=2, num_heads=4, head_dim=8, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="sdpa: it runs whole sequences, and no cache"):
        cache.attend(*tensors, backend="sdpa")
    with pytest.raises(NotImplementedError, match="sdpa: a ring needs a backend for all layouts"):
        choose_kernels("sdpa", tensors, NO_OPTIONS, sr.Full())


def test_explain_says_of_each_pattern_whether_it_runs():
    tensors = [x.float() for x in drawn(20, 20)]
    told = sr.explain(*tensors, sr.Causal())
    assert told.startswith("runs: cpu") and "\nsdpa: usable (only when named)" in told
    assert "\nsdpa: it runs Full() and Causal(), and no" in sr.explain(*tensors, sr.BlockCausal(4))
    assert sr.backends()["sdpa"] == []
