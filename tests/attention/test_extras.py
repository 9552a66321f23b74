"""Extras of a call against their formulas: forward, every gradient, alone and all together."""

from typing import Any

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    assert_same_attention,
    dense_attention,
    gradients,
    inputs,
)
from oracles.extras_oracle import ALL, expected_of, extras_of
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import sparsering as sr
from sparsering.patterns.varlen_mask import Varlen

CASE = Case(num_heads=4, num_kv_heads=2, q_len=75, kv_len=91, head_dim=12, value_dim=20)
SOME = [
    *("causal", "two-sided window", "dilated window", "global tokens", "longnet", "packed longnet"),
    *("blocks of each batch entry", "union of steps", "mixture with overlap"),
    *("mixture under masks", "key padding", "nothing"),
]


EXTRAS = [
    *("softcap", "distance_bias", "far_distance_bias", "sink", "sink_of_rows", "sink_of_entries"),
    *("dropout", ALL),
]


@pytest.mark.parametrize(
    ("name", "extras", "backend"),
    [
        pytest.param(name, extras, backend, marks=() if fast else pytest.mark.slow)
        for i, name in enumerate(SOME)
        for j, extras in enumerate(EXTRAS)
        for k, backend in enumerate(("gather", "reference"))
        for fast in [(i + j) % 8 == 4 * k or (extras == ALL and backend == "gather")]
    ],
)
def test_float64_equals_the_formulas(name: str, extras: str, backend: str):
    case, pattern = CASE, PATTERNS[name](CASE)
    x, options = inputs(case), extras_of(case, extras)
    leaves = [*x, *(t for t in options.values() if isinstance(t, Tensor))]
    expected = expected_of(pattern, case, x, options)
    got = sr.attention(*x, pattern, block_size=16, backend=backend, return_lse=True, **options)
    assert_same_attention(got, expected, leaves)


@pytest.mark.parametrize(
    ("name", "extras", "dtype", "threads_of_call"),
    [
        pytest.param(name, extras, dtype, n, marks=() if fast else pytest.mark.slow)
        for i, name in enumerate(("causal", "longnet", "mixture under masks", "dilated window"))
        for j, extras in enumerate(EXTRAS)
        for k, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
        for n in (1, 3)
        for fast in [(i + j + k + n) % 4 == 0 or extras == ALL]
    ],
)
def test_the_cpu_kernel_is_as_exact_as_eager_mathematics(
    name: str, extras: str, dtype: torch.dtype, threads_of_call: int, threads: None
):
    """Its error is at most what the same formulas give in the inputs' own dtype, and a bit."""
    torch.set_num_threads(threads_of_call)  # 1: gradients by head, 3: by tile
    case, pattern = CASE, PATTERNS[name](CASE)
    x, options = inputs(case, dtype), extras_of(case, extras, torch.float32)
    leaves = [*x, *(t for t in options.values() if isinstance(t, Tensor))]
    expected = expected_of(pattern, case, x, options)
    got = sr.attention(*x, pattern, block_size=16, backend="cpu", return_lse=True, **options)
    unit = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    assert_close(got[0].detach().double(), expected[0].detach(), unit, "out")
    assert_close(got[1].detach().double(), expected[1].detach(), min(unit, 4e-3), "lse")
    if threads_of_call == 3 and dtype == torch.float16:
        return
    grads = zip(gradients(got, leaves), gradients(expected, leaves), strict=True)
    for number, (a, b) in enumerate(grads):
        assert a.dtype == leaves[number].dtype
        assert_close(a.double(), b.double(), 4 * unit, f"gradient {number}")


# One pass, in which some query has no tile: its rows begin at 0, with the sink as their lse.
PART_OF_THE_QUERIES = {
    "dilated": lambda case: sr.Dilated(8, 2, 0),
    "one branch": lambda case: sr.LongNet((16,), (4,)),
    "walked": lambda case: sr.Dilated(8, 2, 0),
    "fewer keys": lambda case: sr.Packed((11, 20), sr.Causal()),
    "few queries": lambda case: sr.Dilated(8, 2, 0),
}


@pytest.mark.parametrize(
    ("name", "extras", "dtype"),
    thinned(
        2,
        PART_OF_THE_QUERIES,
        ["sink", "sink_of_rows", "sink_of_entries"],
        [torch.bfloat16, torch.float16],
    ),
)
def test_a_sink_where_some_queries_have_no_tile(
    name: str, extras: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    if name == "walked":
        monkeypatch.setattr("sparsering.kernels.cpu.call._is_walked", lambda layout, p: 1)
        sr.layout_cache.clear()  # each layout keeps the arguments of its calls
    q_len, kv_len = {"fewer keys": (75, 31), "few queries": (2, 31)}.get(name, (75, 75))
    case = Case(2, 4, 2, q_len, kv_len, 32, 32)
    pattern = PART_OF_THE_QUERIES[name](case)
    (only,) = pattern.layout(**case.heads, block_size=16).passes
    assert not only.covers[0]
    x, options = inputs(case, dtype), extras_of(case, extras, torch.float32)
    with torch.no_grad():
        options["sink"].flatten()[1::3] = -torch.inf
    leaves = [*x, *options.values()]
    expected = expected_of(pattern, case, x, options)
    call = {"block_size": 16, "backend": "cpu", "return_lse": True, **options}
    freed = [torch.full((4 * x[0].numel(),), torch.nan, dtype=dtype) for _ in range(8)]
    del freed  # what is read past the end of `out` is likely to be NaN
    got = sr.attention(*x, pattern, **call)
    unit = torch.finfo(dtype).eps
    assert_close(got[0].detach().double(), expected[0].detach(), unit, "out")
    assert_close(got[1].detach().double(), expected[1].detach(), 2e-6, "lse")
    grads = zip(gradients(got, leaves), gradients(expected, leaves), strict=True)
    for number, (a, b) in enumerate(grads):
        assert_close(a.double(), b.double(), 4 * unit, f"gradient {number}")


def bias_of_pairs(bias: Tensor, pattern: sr.Pattern, layout: Any, case: Case) -> Tensor:
    """[branches, B, H, Nq, Nk] the block bias of every pair of every branch."""
    number = layout.entry_of_pairs(case.batch)  # [passes, B, H, Nq, Nk]
    flat = bias[None, :, :, None].expand(len(number), -1, -1, case.q_len, -1)
    of_pass = torch.where(number >= 0, flat.gather(-1, number.clamp(min=0)), 0.0)
    branches = [p.branch for p in layout.passes]
    of_branch = [
        sum(b for b, of in zip(of_pass, branches, strict=True) if of == i)
        for i in range(len(pattern.branches))
    ]
    return torch.stack(of_branch)


@pytest.mark.parametrize("backend", ["reference", "gather"])
@pytest.mark.parametrize("name", ["causal", "mixture with overlap", "union of steps"])
def test_block_bias_joins_the_others(name: str, backend: str):
    case, pattern = CASE, PATTERNS[name](CASE)
    x, options = inputs(case), extras_of(case, ALL)
    layout = pattern.layout(**case.heads, block_size=16)
    bias = torch.randn(case.batch, 4, layout.num_blocks, dtype=torch.float64, requires_grad=True)
    of_pairs = bias_of_pairs(bias, pattern, layout, case)
    expected = expected_of(pattern, case, x, options, bias=of_pairs)
    got = sr.attention(
        *x, pattern, block_size=16, block_bias=bias, backend=backend, return_lse=True, **options
    )
    leaves = [*x, bias, *(t for t in options.values() if isinstance(t, Tensor))]
    assert_same_attention(got, expected, leaves)


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_block_bias_and_extras_on_kernels_equal_the_reference(backend: str):
    case, pattern = CASE, PATTERNS["mixture under masks"](CASE)
    x, options = inputs(case, torch.float32), extras_of(case, ALL, torch.float32)
    blocks = pattern.layout(**case.heads, block_size=16).num_blocks
    bias = torch.randn(1, 4, blocks, requires_grad=True)
    call = {"block_size": 16, "block_bias": bias, "return_lse": True, **options}
    leaves = [*x, bias, *(t for t in options.values() if isinstance(t, Tensor))]
    got = sr.attention(*x, pattern, backend=backend, **call)
    expected = sr.attention(*x, pattern, backend="reference", **call)
    assert_same_attention(got, expected, leaves, forward=2e-6, backward=1e-5)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("extras", ["", *EXTRAS])
def test_a_few_queries_of_a_long_sequence(extras: str, queries: int):
    """Decoding, whose keys are read where they lie; some of them masked."""
    case = Case(1, 4, 2, queries, 1500, 16, 24)
    valid = torch.rand(1500) < 0.7
    pattern = (sr.SlidingWindow(1200) + sr.SlidingWindow(None, 0, 5)) & sr.KeyMask(valid)
    x, options = inputs(case, torch.float32), extras_of(case, extras, torch.float32)
    expected = expected_of(pattern, case, x, options)
    hidden = [t.detach().masked_fill(~valid[:, None], torch.nan) for t in x[1:]]
    got = sr.attention(x[0], *hidden, pattern, backend="cpu", return_lse=True, **options)
    for name, a, b in zip(("out", "lse"), got, expected, strict=True):
        assert_close(a.detach().double(), b.detach(), 2e-6, name)


# Scores that are no finite number

NOT_FINITE = {
    "block_bias": 40,
    "block_bias, one query": 1,
    "distance_bias": 40,
    "distance_bias, one query": 1,
    "slot_bias": 50,
    "slot_bias, rows of one query": 50,
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets Triton
@pytest.mark.parametrize(
    ("name", "backend", "value"),
    [
        pytest.param(name, backend, value, marks=pytest.mark.slow if long else ())
        for name in NOT_FINITE
        for backend in ("reference", "gather", "cpu", "triton")
        for value in (torch.inf, torch.nan, -torch.inf)
        for long in [
            backend == "triton"
            and (name, value)
            not in (("block_bias, one query", torch.nan), ("distance_bias, one query", -torch.inf))
        ]
        if (backend, name) != ("triton", "slot_bias, rows of one query")  # slow in its interpreter
    ],
)
def test_a_score_of_minus_inf_is_no_pair_and_one_of_inf_or_nan_makes_a_row_nan(
    name: str, value: float, backend: str
):
    """A softmax of such scores does the same; gradients of other heads do not change."""
    case = Case(1, 2, 2, NOT_FINITE[name], 50)
    pattern = sr.Causal() + sr.SlidingWindow(6, 2)
    if name.startswith("slot"):
        tokens = 1 if name.endswith("query") else 16
        rows = -(-50 // tokens)
        indices = (torch.arange(rows)[:, None] + torch.arange(2)) % 4
        pattern = sr.SelectedBlocks(indices, 16, query_block=tokens)
    x, call, bias = inputs(case, torch.float32), {"block_size": 16}, None
    if name.startswith("distance"):
        table = torch.randn(2, 9)
        table[0, 2:4] = value
        table[0, 0] = -torch.inf
        call["distance_bias"] = table
    elif name.startswith("slot"):
        slots = torch.randn(1, 2, rows, 2)
        slots[0, 0, rows // 2 :, 1] = value
        call["slot_bias"] = slots
        of_blocks = torch.zeros(1, 2, rows, 4).scatter(3, indices.expand(1, 2, rows, 2), slots)
        of_queries = of_blocks.repeat_interleave(tokens, 2)[:, :, :50]
        bias = of_queries.repeat_interleave(16, 3)[None, ..., :50]
    else:
        layout = pattern.layout(**case.heads, block_size=16)
        blocks = torch.randn(1, 2, layout.num_blocks)
        blocks[0, 0, 2:4] = blocks[0, 0, -1] = value
        call["block_bias"], bias = blocks, bias_of_pairs(blocks, pattern, layout, case)
    options = {k: v for k, v in call.items() if k == "distance_bias"}
    expected = expected_of(pattern, case, x, options, bias=bias)
    nan = expected[1] if value == -torch.inf else expected[0].sum(-1)  # torch has an lse of inf
    expected = expected[0], torch.where(nan.isnan(), torch.nan, expected[1])
    got = sr.attention(*x, pattern, backend=backend, return_lse=True, **call)
    assert nan[0, 0].isnan().any() == (value != -torch.inf) and not nan[0, 1].isnan().any()
    for what, a, b in zip(("out", "lse"), got, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan()), what
        assert_close(a.double().nan_to_num(7.0, -9.0), b.nan_to_num(7.0, -9.0), 3e-6, what)
    for a, b in zip(gradients(got, x), gradients(expected, x), strict=True):
        assert_close(a[:, 1], b[:, 1], 1e-5)
        if value == -torch.inf:
            assert_close(a, b, 1e-5)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu", "triton"])
def test_a_row_whose_scores_are_all_minus_inf_has_no_keys(backend: str):
    """Out and gradients of such a row are 0; its lse is -inf, or the row's sink."""
    case = Case(1, 2, 1, 40, 40)
    x, table = inputs(case, torch.float32), torch.zeros(2, 9, requires_grad=True)
    with torch.no_grad():
        table[0] = -torch.inf
    leaves = [*x, table]
    for sink in (None, torch.tensor([0.5, -0.5])):
        options = {"distance_bias": table, "sink": sink}
        got = sr.attention(
            *x, sr.Causal(), block_size=16, backend=backend, return_lse=True, **options
        )
        expected = expected_of(sr.Causal(), case, x, options)
        assert_same_attention([t.double() for t in got], expected, leaves, None, 3e-6, 1e-5)
        assert not got[0][:, 0].any()


def test_rows_that_are_cut_in_pieces_have_their_sink_once():
    case = Case(1, 2, 1, 900, 900, 16, 16)
    x, options = inputs(case, torch.float32), extras_of(case, ALL, torch.float32)
    pattern = sr.SlidingWindow(20) | sr.GlobalTokens(3)
    expected = expected_of(pattern, case, x, options)
    got = sr.attention(*x, pattern, block_size=16, backend="cpu", return_lse=True, **options)
    for name, a, b in zip(("out", "lse"), got, expected, strict=True):
        assert_close(a.detach().double(), b.detach(), 3e-6, name)


# Bits, bounds and refusals


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
def test_scores_of_any_size_stay_under_the_cap(size: float, backend: str):
    query, key, value = (x.detach() for x in inputs(CASE, torch.float32))
    out, lse = sr.attention(
        query * size, key, value, sr.Causal(), softcap=30.0, backend=backend, return_lse=True
    )
    assert out.isfinite().all() and lse.isfinite().all()
    doubles = query.double() * size, key.double(), value.double()
    expected = dense_attention(*doubles, sr.Causal().to_dense(75, 91), softcap=30.0)
    assert_close(lse.double(), expected[1], 2e-6)


def test_the_cap_is_as_exact_as_float32():
    """Scores of one key, read off lse: within a few units of the last place of the exact cap."""
    x = torch.cat((torch.logspace(-6, 3, 4000), -torch.logspace(-6, 3, 4000)))
    lse = sr.attention(
        x[None, None, :, None], torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), sr.Full(),
        scale=1.0, softcap=50.0, backend="cpu", return_lse=True,
    )[1][0, 0]  # fmt: skip
    exact = 50 * (x.double() / 50).tanh()
    # beside the rounding of the cap, that of lse near 0
    assert ((lse - exact).abs() - 5e-7 * exact.abs()).max() < 1.5e-7


REFUSED = {
    "softcap must be": [{"softcap": x} for x in (0.0, -1.0, float("inf"), float("nan"), True, "5")],
    "softcap must be a finite": [{"softcap": torch.tensor(5.0)}, {"softcap": 10**400}],
    "distance_bias must be": [
        {"distance_bias": x}
        for x in (torch.randn(4, 8), torch.randn(3, 9), torch.randn(9), 1.0, torch.ones(4, 9).int())
    ],
    "sink must be": [
        {"sink": x}
        for x in (torch.randn(3), torch.randn(1), torch.randn(3, 4, 75), torch.randn(2, 4, 74), 0.5,
                  torch.randn(4).to("meta"), [1.0, 2.0, 3.0, 4.0])
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "number"), [(m, i) for m, several in REFUSED.items() for i in range(len(several))]
)
def test_what_does_not_fit_is_told_everywhere(message: str, number: int):
    from sparsering.distributed import ring_attention, simulate_ring

    options = REFUSED[message][number]
    x = inputs(CASE, torch.float32, requires_grad=False)
    square = (x[0], x[1][:, :, :75], x[2][:, :, :75])
    for call in (
        lambda: sr.attention(*x, sr.Causal(), **options),
        lambda: sr.attention(*x, sr.Causal(), backend="reference", **options),
        lambda: sr.explain(*x, sr.Causal(), **options),
        lambda: sr.attention_weights(*x[:2], sr.Causal(), **options),
        lambda: simulate_ring(*square, sr.Causal(), world_size=2, **options),
        lambda: ring_attention(*square, sr.Causal(), **options),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_weights_know_the_extras():
    x = inputs(CASE)
    pattern = sr.LongNet((16, 91), (1, 3)) & sr.Causal()
    options = extras_of(CASE, "softcap distance_bias sink_of_rows")
    weights = sr.attention_weights(*x[:2], pattern, **options).to_dense()
    out, lse = expected_of(pattern, CASE, x, options)
    assert_close(weights @ x[2].repeat_interleave(2, 1), out, 1e-12)
    rest = (options["sink"] - lse).exp()
    assert_close(weights.sum(-1) + rest, torch.ones_like(lse), 1e-12)


def test_weights_count_distances_within_each_document():
    q_lengths, kv_lengths = (30, 0, 45), (20, 11, 60)
    x = inputs(CASE)
    options = extras_of(CASE, "softcap distance_bias")
    documents = Varlen(q_lengths, kv_lengths, sr.Causal())
    weights = sr.attention_weights(*x[:2], documents, q_start=0, **options).to_dense()
    heads = x[2].repeat_interleave(2, 1)
    expected = sr.attention(*x, documents, q_start=0, backend="reference", **options)
    assert_close(weights @ heads, expected, 1e-12)
    parts = x[0].split(q_lengths, 2), *(y.split(kv_lengths, 2) for y in x[1:])
    alone = [sr.attention(*one, sr.Causal(), **options) for one in zip(*parts, strict=True)]
    assert_close(weights @ heads, torch.cat(alone, 2), 1e-12)


def test_alibi_is_the_slope_times_the_distance():
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    table = sr.alibi(slopes, 3)
    expected = -torch.tensor([[3, 2, 1, 0, 1, 2, 3]]) * slopes[:, None]
    assert table.dtype == torch.float32 and torch.equal(table, expected)
    table.sum().backward()
    assert torch.equal(slopes.grad, torch.tensor([-12.0, -12.0]))
    # what transformers' BLOOM has for these numbers of heads
    for heads in (1, 6, 8, 12):
        found = -sr.alibi(heads, 1)[:, 0]
        expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    for bad in (torch.ones(2, 2), torch.ones(2).int(), [0.5], 0.5, True, 0):
        with pytest.raises(ValueError, match="slopes must be"):
            sr.alibi(bad, 3)
    with pytest.raises(ValueError, match="radius must be at least 0"):
        sr.alibi(slopes, -1)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_a_sink_that_is_none_has_gradients_of_0_in_empty_rows(backend: str):
    leaves = [*inputs(CASE, torch.float32), torch.full((4,), -torch.inf, requires_grad=True)]
    call = {"sink": leaves[3], "backend": backend}
    out = sr.attention(*leaves[:3], sr.Documents((40, 51)), q_start=30, **call)
    for grad in gradients([out], leaves):
        assert grad.isfinite().all()
    out = sr.attention(*leaves[:3], sr.GlobalTokens(0), **call)
    for grad in gradients([out], leaves):
        assert not grad.any()
