"""`block_scores` against its definition in float64."""

import math

import pytest
import torch
from helpers.thinned import slow_except
from oracles import blocks_oracle
from torch import Tensor

import sparsering as sr
from sparsering.kernels import cpu
from sparsering.selection import block_scores, scores, select_blocks

METHODS = ("mean", "sub", "gauss", "bounds", "antidiagonal", "exact")
# Nq, Nk, block size, query block, parts, q_start
SHAPES = [
    (37, 37, 8, 1, 4, None),  # a ragged last block
    (37, 37, 8, 4, 2, None),  # and a short last row
    (40, 40, 8, 8, 4, None),
    (5, 37, 8, 4, 4, None),  # a short first row
    (1, 33, 8, 8, 2, None),
    (9, 20, 8, 2, 2, 3),
    (30, 12, 8, 4, 4, 0),  # queries past the keys
    (20, 13, 8, 4, 2, None),  # and before them
    (1, 1, 8, 1, 4, None),
    (12, 40, 16, 4, 4, 7),
]


def defined(
    query: Tensor, key: Tensor, shape: tuple, method: str, causal: bool, scale: float
) -> Tensor:
    _, _, size, row, parts, start = shape
    options = {"query_block": row, "parts": parts, "causal": causal, "q_start": start}
    return blocks_oracle.block_scores(query, key, size, method=method, scale=scale, **options)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Equal where no number is, near elsewhere."""
    same = torch.equal(found.isneginf(), expected.isneginf())
    there = ~expected.isneginf()
    return same and bool(((found - expected)[there].abs() <= tolerance).all())


def drawn(shape: tuple, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    q_len, kv_len = shape[:2]
    return 2 * torch.randn(2, 4, q_len, 6, dtype=dtype), torch.randn(2, 2, kv_len, 6, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "method", "causal"),
    [
        pytest.param(shape, method, causal, marks=() if fast else pytest.mark.slow)
        for i, shape in enumerate(SHAPES)
        for j, method in enumerate(METHODS)
        for causal in (True, False)
        for fast in [(i + j + causal) % 4 == 1]
        if method != "antidiagonal" or shape[3] % shape[4] == 0  # strides of a row
    ],
    ids=str,
)
def test_scores_are_the_log_of_summed_shares(shape, method, causal):
    _, _, size, row, parts, start = shape
    query, key = drawn(shape)
    expected = defined(query, key, shape, method, causal, 0.7)
    options = {"query_block": row, "method": method, "parts": parts, "causal": causal}
    for inputs in ((query, key), (query.clone().requires_grad_(), key)):  # two ways to compute
        found = block_scores(*inputs, size, scale=0.7, q_start=start, **options)
        assert found.dtype == torch.float32
        assert close(found.detach().double(), expected, 2e-6), shape
    halved = block_scores(query.float(), key.float(), size, scale=0.7, q_start=start, **options)
    assert close(halved.double(), expected, 2e-5)  # by the kernel


@pytest.mark.parametrize("lengths", [(0, 20), (9, 0), (0, 0)])
def test_scores_of_no_tokens_are_part_of_the_graph(lengths):
    inputs = [x.requires_grad_() for x in drawn(lengths)]
    grads = torch.autograd.grad(block_scores(*inputs, 8).sum(), inputs)
    assert all(
        torch.equal(grad, torch.zeros_like(x)) for x, grad in zip(inputs, grads, strict=True)
    )


@pytest.mark.parametrize("learns", [False, True])
def test_float64_inside(learns):
    query, key = drawn(SHAPES[0])
    estimate = scores.BlockEstimate.build(key, 8, "sub", 2)
    found = scores.scores_of(query.requires_grad_(learns), estimate, 1, True, 0.7, 0).detach()
    assert close(found, defined(query.detach(), key, SHAPES[0], "sub", True, 0.7), 1e-13)


@pytest.mark.parametrize("budget", [1, 500, 5000])
@pytest.mark.parametrize("method", ["sub", "exact", "antidiagonal"])
def test_parts_of_any_size_give_the_same(method, budget, monkeypatch):
    query, key = drawn((150, 150))
    options = {"query_block": 4, "method": method}
    whole = block_scores(query, key, 8, **options)
    learnt = block_scores(query.clone().requires_grad_(), key, 8, **options).detach()
    monkeypatch.setattr(scores, "_AT_A_TIME", budget)
    assert close(block_scores(query, key, 8, **options), whole, 2e-6)
    query.requires_grad_()
    assert close(block_scores(query, key, 8, **options).detach(), learnt, 2e-6)


def test_exact_scores_are_the_blocks_masses():
    query, key = drawn((48, 48))
    found = block_scores(query, key, 8, query_block=8, method="exact", scale=1.0).double()
    one_hot = torch.eye(6, dtype=torch.float64).repeat_interleave(8, 0).expand(2, 2, -1, -1)
    mass = sr.attention(query, key, one_hot, sr.Causal(), scale=1.0)  # [B, Hq, N, Nb]
    expected = mass.unflatten(1, (2, 2)).sum(2).unflatten(2, (6, 8)).sum(3).log()
    assert close(found, expected, 2e-6)


def test_bounds_enclose_the_mass():
    query, key = drawn((1, 64))
    query, key = query[:, :1], key[:, :1]
    options = {"scale": 1.0, "causal": False}
    mass = (query @ key.mT).unflatten(-1, (8, 8)).logsumexp(-1)
    keys = key.unflatten(2, (8, 8))
    for method, sign in (("mean", 1), ("bounds", -1)):
        each = [blocks_oracle.log_masses(query, k, method, 8, 1.0) for k in keys.unbind(2)]
        found = torch.stack(each, 3).view(2, 8)
        assert (sign * (mass[:, 0, 0] - found) >= 0).all()
        shares = block_scores(query, key, 8, method=method, **options)[:, 0, 0].double()
        assert close(shares, found.log_softmax(-1), 2e-6)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_too_small_for_a_number_are_told_apart(learns, dtype):
    """A score is -inf where a block is not visible, and nowhere else."""
    query, key = drawn((40, 40))
    query = (200 * query).requires_grad_(learns)
    found = block_scores(query.to(dtype), key.to(dtype), 8, query_block=2)
    expected = torch.full_like(found, -torch.inf, dtype=torch.float64)
    logit = (query.detach() @ key.repeat_interleave(2, 1).mT) * 6**-0.5
    past = key.unflatten(2, (20, 2)).mean(3).repeat_interleave(2, 1)
    parts = (query.detach() @ past.mT * 6**-0.5 + math.log(2)).unflatten(-1, (5, 4)).logsumexp(-1)
    for i in range(40):
        own = logit[:, :, i, i // 8 * 8 : i + 1].logsumexp(-1)
        mass = torch.cat((parts[:, :, i, : i // 8], own[..., None]), -1).log_softmax(-1)
        row = expected[:, :, i // 2, : i // 8 + 1]
        row.copy_(torch.logaddexp(row, mass.unflatten(1, (2, 2)).logsumexp(2)))
    assert close(found.detach().double(), expected, 1e-2)  # of numbers to 5000
    assert float(expected[~expected.isneginf()].min()) < -500


@pytest.mark.parametrize("method", ["mean", "sub"])
def test_tiny_shares_are_as_exact_as_large_ones(method):
    """The kernel's exponential is off by 2^-126, which is much of e^-85."""
    logits = torch.zeros(64)
    logits[-4:] = -82.0
    key = torch.nn.functional.pad(logits[:, None], (0, 15))
    query = torch.eye(16)[:1].expand(64, 16)
    scores = block_scores(
        query[None, None], key[None, None], 4, scale=1.0, method=method, causal=False
    )
    expected = logits.double().unflatten(0, (16, 4)).logsumexp(-1).log_softmax(-1)
    assert close(scores[0, 0].double(), expected.expand(64, 16), 1e-5)


@pytest.mark.parametrize("logit", [-20.0, -100.0, 100.0])
def test_parts_without_keys_never_weigh(logit):
    """The summary of a part past the last key is 0, a logit above all others here."""
    key = torch.nn.functional.pad(logit + torch.arange(9.0)[:, None], (0, 15))
    query = torch.eye(16)[:1].expand(64, 16)
    scores = block_scores(
        query[None, None], key[None, None], 4, scale=1.0, method="sub", parts=4, causal=False
    )
    logits = torch.nn.functional.pad(key[:, 0].double(), (0, 3), value=-torch.inf)
    expected = logits.unflatten(0, (3, 4)).logsumexp(-1).log_softmax(-1)
    assert close(scores[0, 0].double(), expected.expand(64, 3), 1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_the_definition(method):
    shape = (13, 13, 4, 4, 2, None)
    query, key = (x.requires_grad_() for x in drawn(shape))
    found = block_scores(query, key, 4, query_block=4, method=method, parts=2, scale=0.7)
    expected = defined(query, key, shape, method, True, 0.7)
    weight = torch.randn(found.shape, dtype=torch.float64)
    grads = []
    for x in (found.double(), expected):
        grads.append(
            torch.autograd.grad(torch.where(x.isneginf(), 0.0, x * weight).sum(), (query, key))
        )
    for a, b in zip(*grads, strict=True):
        assert ((a - b).abs() <= 1e-5).all()  # the scores' gradient is float32
    assert all(g.isfinite().all() for g in grads[0])


def test_a_gradient_through_few_blocks_of_many_rows(monkeypatch):
    monkeypatch.setattr(scores, "_AT_A_TIME", 1000)
    query, key = (x.requires_grad_() for x in drawn((64, 64)))
    weight = torch.randn(2, 2, 64, 8)

    def gradients() -> tuple[Tensor, ...]:
        found = block_scores(query, key, 8)
        return torch.autograd.grad(found.maximum(found.new_tensor(-99.0)), (query, key), weight)

    in_parts = gradients()
    monkeypatch.setattr(scores, "_AT_A_TIME", 1 << 26)
    for a, b in zip(in_parts, gradients(), strict=True):
        assert ((a - b).abs() <= 1e-12).all()


def test_no_query_tells_of_keys_past_it():
    """With rows of one query: what is chosen is causal, so is the score of every block."""
    query, key = drawn((32, 32))
    found = block_scores(query, key, 8)
    for cut in (1, 9, 16, 31):
        changed = key.clone()
        changed[:, :, cut:] += torch.randn_like(changed[:, :, cut:])
        again = block_scores(query, changed, 8)
        assert torch.equal(again[:, :, :cut], found[:, :, :cut])
        assert cut < 8 or not torch.equal(again[:, :, cut], found[:, :, cut])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_halves_are_summed_in_float32(dtype):
    query, key = drawn((40, 40), torch.float32)
    query, key = query.to(dtype), key.to(dtype)
    found = block_scores(query, key, 8, query_block=4)
    exact = block_scores(query.double(), key.double(), 8, query_block=4)
    assert close(found, exact, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block_scores(query.float(), key.float(), 8, query_block=4), found)


def test_any_strides():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # the last two by the kernel
        query, key = (x.to(dtype) for x in drawn((40, 40)))
        found = block_scores(query, key, 8)
        across = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key)]
        assert close(block_scores(*across, 8), found, 1e-6)
        turned = [x.mT.contiguous().mT for x in (query, key)]
        assert close(block_scores(*turned, 8), found, 1e-6)


@pytest.mark.parametrize("method", ["sub", "gauss", "bounds"])
@pytest.mark.parametrize("width", [6, 40])
def test_more_blocks_than_a_product_has_columns(method, width):
    """150 blocks, more than 128; a block of 260 keys, 2 products; widths beside a vector's."""
    query, key = torch.randn(1, 6, 300, width), torch.randn(1, 2, 300, width)
    for size, row in ((2, 1), (260, 20)):
        options = {"query_block": row, "method": method, "parts": 2}
        found = block_scores(query, key, size, **options)
        expected = block_scores(query.double(), key.double(), size, **options)
        assert close(found, expected.double(), 1e-5)


def test_the_kernel_reads_nothing_that_is_not_there():
    query, key = torch.randn(2, 4, 64, 16), torch.randn(2, 2, 64, 16)
    estimate = scores.BlockEstimate.build(key, 8, "sub", 2)
    feature, keys = (x.flatten(0, 1) for x in (estimate.feature, estimate.keys))
    right = {
        "query": query, "feature": feature, "key": keys, "last": None,
        "out": torch.empty(4, 16, 8), "features": "sub", "scale": 0.25, "log_part": math.log(2),
        "blocks": 8, "length": 64, "first_own": 0, "first_query": 0, "first": 0, "offset": 0,
        "count": 8, "width": 8, "row": 4, "causal": True,
    }  # fmt: skip
    assert not cpu.block_shares(**right)
    assert close(right["out"], block_scores(query, key, 8, query_block=4).flatten(0, 1), 1e-5)
    wrong = [
        {"query": query[:, :3]}, {"query": query[..., :8]}, {"query": query.double()},
        {"query": query[:, :, :63]}, {"feature": feature[:, :, :6]}, {"feature": feature[:3]},
        {"feature": feature.double()}, {"features": "gauss"}, {"key": keys[:, :7]},
        {"key": keys[:3]}, {"key": keys[..., :15]}, {"key": keys[:, :, :4]},
        {"last": torch.ones(3)}, {"out": torch.empty(4, 15, 8)}, {"out": torch.empty(4, 16, 9)},
        {"out": torch.empty(4, 8, 16).mT}, {"blocks": 9}, {"length": 72}, {"first_own": 1},
        {"first_query": 1}, {"first_query": -1}, {"offset": 1}, {"count": 9},
        {"width": 7}, {"row": 3}, {"row": 0},
    ]  # fmt: skip
    for changed in wrong:
        with pytest.raises(RuntimeError, match="sparsering cpu: shares"):
            cpu.block_shares(**{**right, **changed})


@pytest.mark.parametrize(("method", "learns"), slow_except([("sub", True)], METHODS, [False, True]))
def test_one_graph(method, learns):
    query, key = drawn((40, 40), torch.float32)

    def both(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        found = block_scores(query, key, 8, query_block=4, method=method)
        return found, select_blocks(found, 3, block_size=8, query_block=4, top_p=0.9)

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    query.requires_grad_(learns)
    (found, chosen), (expected, by_them) = compiled(query, key), both(query, key)
    assert close(found.detach(), expected.detach(), 1e-5)
    assert torch.equal(chosen, by_them)


def test_nothing_to_score():
    for heads, kv_heads, q_len, kv_len, dim in (
        (4, 2, 0, 8, 6), (4, 2, 8, 0, 6), (0, 2, 8, 8, 6), (0, 0, 8, 8, 6),
    ):  # fmt: skip
        query, key = torch.ones(1, heads, q_len, dim), torch.ones(1, kv_heads, kv_len, dim)
        found = block_scores(query, key, 4, query_block=2, q_start=0)
        assert found.shape == (1, kv_heads, q_len // 2, kv_len // 4)
        assert found.isneginf().all()
    found = block_scores(torch.ones(1, 1, 8, 0), torch.ones(1, 1, 8, 0), 4)
    assert close(
        found[0, 0, 4:],
        torch.tensor([[4 / (5 + i), (1 + i) / (5 + i)] for i in range(4)]).log(),
        1e-6,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "median"}, "one of mean, sub"),
        ({"parts": 3}, r"must divide block_size \(8\)"),
        ({"parts": 0}, "parts must be at least 1"),
        ({"method": "antidiagonal"}, r"block_size and query_block \(8 and 1\)"),
        ({"query_block": 3}, "query_block must divide block_size, 8, got 3"),
        ({"query_block": 16}, "query_block must divide block_size, 8, got 16"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"q_start": 1.5}, "q_start must be an int"),
        ({"scale": torch.ones(())}, "scale must be a number"),
        ({"key": torch.ones(1, 2, 8, 5)}, "head dims"),
    ],
)
def test_what_does_not_fit_is_said(options, message):
    given = {"query": torch.ones(1, 4, 8, 4), "key": torch.ones(1, 2, 8, 4), "block_size": 8}
    with pytest.raises(ValueError, match=message):
        block_scores(**{**given, **options})
