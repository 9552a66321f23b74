"""Extras of a call against their formulas: forward, every gradient, alone and all together."""

from typing import Any

import pytest
import torch
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    assert_same_attention,
    gradients,
    inputs,
)
from oracles.extras_oracle import attend_with_extras, branches_of
from torch import Tensor

import sparsering as sr
from sparsering.patterns.varlen import Varlen

CASE = Case(num_heads=4, num_kv_heads=2, q_len=75, kv_len=91, head_dim=12, value_dim=20)
SOME = [
    "causal",
    "two-sided window",
    "dilated window",
    "global tokens",
    "longnet",
    "packed longnet",
    "blocks of each batch entry",
    "union of steps",
    "mixture with overlap",
    "mixture under masks",
    "key padding",
    "nothing",
]
SEED = 11


def extras_of(case: Case, names: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of a call, with gradients where they have some; `names` separated by spaces."""
    heads, made = case.num_heads, {}
    for name in names.split():
        if name == "softcap":
            made["softcap"] = 0.7
        elif name == "distance_bias":
            made["distance_bias"] = torch.randn(heads, 2 * 17 + 1, dtype=dtype)
        elif name == "far_distance_bias":
            made["distance_bias"] = torch.randn(1, 2 * 200 + 1, dtype=dtype)
        elif name == "sink":
            made["sink"] = torch.randn(heads, dtype=dtype)
        elif name == "sink_of_rows":
            made["sink"] = torch.randn(case.batch, heads, case.q_len, dtype=dtype)
        elif name == "sink_of_entries":
            made["sink"] = torch.randn(case.batch, heads, 1, dtype=dtype)
        else:
            assert name == "dropout"
            made |= {"dropout_p": 0.3, "dropout_seed": SEED}
    return {k: x.requires_grad_() if isinstance(x, Tensor) else x for k, x in made.items()}


EXTRAS = [
    "softcap",
    "distance_bias",
    "far_distance_bias",
    "sink",
    "sink_of_rows",
    "sink_of_entries",
    "dropout",
    "softcap distance_bias sink_of_rows dropout",
]


def expected_of(pattern, case: Case, x: tuple[Tensor, ...], options: dict[str, Any], **more: Any):
    heads = {**case.heads, "q_start": case.kv_len - case.q_len}
    branches = branches_of(pattern, case.batch, **heads)
    return attend_with_extras(*x, branches, q_start=heads["q_start"], **options, **more)


@pytest.mark.parametrize("backend", ["reference", "gather"])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("name", SOME)
def test_float64_equals_the_formulas(name: str, extras: str, backend: str):
    case, pattern = CASE, PATTERNS[name](CASE)
    x, options = inputs(case), extras_of(case, extras)
    leaves = [*x, *(t for t in options.values() if isinstance(t, Tensor))]
    expected = expected_of(pattern, case, x, options)
    got = sr.attention(*x, pattern, block_size=16, backend=backend, return_lse=True, **options)
    assert_same_attention(got, expected, leaves)


@pytest.mark.parametrize("threads_of_call", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("name", ["causal", "longnet", "mixture under masks", "dilated window"])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extras", ["sink", "sink_of_rows", "sink_of_entries"])
@pytest.mark.parametrize("name", PART_OF_THE_QUERIES)
def test_a_sink_where_some_queries_have_no_tile(
    name: str, extras: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    if name == "walked":
        monkeypatch.setattr("sparsering.kernels.cpu.call._is_walked", lambda problem, p: 1)
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


ALL = "softcap distance_bias sink_of_rows dropout"


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
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("value", [torch.inf, torch.nan, -torch.inf])
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=pytest.mark.slow if long else ())
        for name in NOT_FINITE
        for backend in ("reference", "gather", "cpu", "triton", "torch_sparse")
        for long in [backend == "triton" and name in ("block_bias", "distance_bias")]
        if (backend, name) != ("triton", "slot_bias, rows of one query")  # slow in its interpreter
        and (backend != "torch_sparse" or "distance" not in name)
    ],
)
def test_a_score_of_minus_inf_is_no_pair_and_one_of_inf_or_nan_makes_a_row_nan(
    name: str, value: float, backend: str
):
    """As a softmax of such scores has it; other heads have the gradients that they had."""
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
    """By its distances: out and gradients are 0, lse is -inf or the row's sink."""
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


# Key masks as data


def masked_pattern(valid: Tensor) -> sr.Pattern:
    return sr.LongNet((16, 91), (1, 3)) & sr.KeyMask(valid)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_masked_keys_reach_nothing_whatever_they_hold(backend: str):
    """NaN and infinities; entries whose keys are all masked give 0, and 0 to all gradients."""
    case = CASE
    valid = torch.rand(case.batch, case.kv_len) < 0.6
    valid[1] = False
    x = [t.detach() for t in inputs(case, torch.float32)]
    sink = extras_of(case, "sink", torch.float32)["sink"].detach()
    for options in ({}, {"sink": sink, "softcap": 2.0, "dropout_p": 0.2, "dropout_seed": 3}):
        clean = [t.clone().requires_grad_() for t in x]
        dirty = [t.clone() for t in x]
        for t, bad in zip(dirty[1:], (torch.nan, torch.inf), strict=True):
            t.masked_fill_(~valid[:, None, :, None], bad)
        dirty = [t.requires_grad_() for t in dirty]
        pattern = masked_pattern(valid)
        got, expected = (
            sr.attention(*t, pattern, backend=backend, return_lse=True, **options)
            for t in (dirty, clean)
        )
        assert_close(got[0], expected[0], 1e-6)
        assert_close(got[1], expected[1], 1e-6)
        assert not got[0][1].any()
        lse_of_none = sink[:, None] if options else torch.tensor(-torch.inf)
        assert torch.equal(got[1][1], lse_of_none.expand_as(got[1][1]))
        weights = torch.randn_like(got[0])
        for a, b in zip(
            torch.autograd.grad((got[0] * weights).sum(), dirty),
            torch.autograd.grad((expected[0] * weights).sum(), clean),
            strict=True,
        ):
            assert_close(a, b, 1e-5)
            assert not a[1].any()


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_another_key_mask_needs_no_other_layout(backend: str):
    case = CASE
    x = inputs(case, torch.float32, requires_grad=False)
    sr.layout_cache.clear()
    made = []
    for number in range(3):
        valid = torch.rand(case.kv_len) < 0.5
        padding = sr.KeyPadding((40 + number, 60))
        for keys in (sr.KeyMask(valid), padding, padding & sr.KeyMask(valid)):
            pattern = sr.Causal() & keys
            got = sr.attention(*x, pattern, backend=backend)
            assert_close(got, sr.attention(*x, pattern, backend="reference"), 1e-6)
        made.append(sr.layout_cache.info().misses)
    assert made == [1, 1, 1]  # that of Causal() alone


def test_a_key_mask_has_the_results_of_its_pattern_laid_out_whole():
    """Where blocks have a bias the mask is part of the layout, else data: the same attention."""
    case = CASE
    x = inputs(case, torch.float32, requires_grad=False)
    pattern = masked_pattern(torch.rand(case.batch, case.kv_len) < 0.6)
    blocks = pattern.layout(**case.heads, block_size=32).num_blocks
    call = {"block_size": 32, "backend": "cpu", "return_lse": True}
    whole = sr.attention(*x, pattern, block_bias=torch.zeros(1, 1, blocks), **call)
    for a, b in zip(sr.attention(*x, pattern, **call), whole, strict=True):
        assert_close(a, b, 1e-6)


@pytest.mark.parametrize("backend", ["cpu", "gather", "reference", "torch_sparse"])
def test_a_key_mask_of_other_sizes_is_told(backend: str):
    x = inputs(CASE, torch.float32, requires_grad=False)
    with pytest.raises(ValueError, match="91"):
        sr.attention(*x, sr.Causal() & sr.KeyMask(torch.ones(90).bool()), backend=backend)
    with pytest.raises(ValueError, match="3 batch entries, got a query of 2"):
        sr.attention(*x, sr.Causal() & sr.KeyMask(torch.ones(3, 91).bool()), backend=backend)


# What torch makes of a call


def call_with_all(query, key, value, table, sink, seed=SEED):
    return sr.attention(
        query, key, value, sr.LongNet((16, 91), (1, 3)) & sr.Causal(), softcap=0.8,
        distance_bias=table, sink=sink, dropout_p=0.3, dropout_seed=seed, return_lse=True,
    )  # fmt: skip


def leaves_of(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    options = extras_of(CASE, "distance_bias sink", dtype)
    return [*inputs(CASE, dtype), *options.values()]


def test_all_extras_compile_to_one_graph():
    torch.compiler.reset()
    leaves = leaves_of()
    compiled = torch.compile(call_with_all, fullgraph=True, backend="aot_eager")
    assert_same_attention(compiled(*leaves), call_with_all(*leaves), leaves)
    seed = torch.tensor(5)
    assert_same_attention(compiled(*leaves, seed), call_with_all(*leaves, 5), leaves)


def test_a_seed_that_torch_draws_compiles_and_differs_from_call_to_call():
    torch.compiler.reset()
    leaves = [x.detach() for x in leaves_of()]
    compiled = torch.compile(call_with_all, fullgraph=True, backend="aot_eager")
    first, second = (compiled(*leaves, None)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_the_same_dropout(use_reentrant: bool):
    from torch.utils.checkpoint import checkpoint

    leaves = leaves_of(torch.float32)
    grads = []
    for run in (
        lambda: call_with_all(*leaves, None),
        lambda: checkpoint(call_with_all, *leaves, None, use_reentrant=use_reentrant),
    ):
        torch.manual_seed(7)
        out, lse = run()
        for x in leaves:
            x.grad = None
        (out.sum() + lse.sum()).backward()
        grads.append([out, lse, *(x.grad for x in leaves)])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_tables_keep_their_dtype_under_autocast_and_beside_half_precision():
    leaves = leaves_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = call_with_all(*leaves)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    low = [x.detach().bfloat16() for x in leaves[:3]]
    assert torch.equal(out, call_with_all(*low, *leaves[3:])[0])
    assert [x.dtype for x in gradients((out, lse), leaves)] == [torch.float32] * 5
    small = [x.detach().bfloat16().requires_grad_() for x in leaves[3:]]
    of_small = gradients(call_with_all(*leaves[:3], *small), small)
    assert [x.dtype for x in of_small] == [torch.bfloat16] * 2


@pytest.mark.parametrize("backend", ["gather", "cpu", "reference"])
def test_vmap_over_tables_and_sinks_is_a_loop(backend: str):
    query, key, value, _, _ = (x.detach().float() for x in leaves_of())
    table, sink = torch.randn(3, 4, 9), torch.randn(3, 4)
    pattern = sr.Causal()

    def call(table: Tensor, sink: Tensor) -> Tensor:
        options = {"distance_bias": table, "sink": sink, "dropout_p": 0.2, "dropout_seed": 4}
        if backend == "reference":
            options = {"distance_bias": table, "sink": sink}
        return sr.attention(query, key, value, pattern, softcap=3.0, backend=backend, **options)

    got = torch.func.vmap(call)(table, sink)
    for i in range(3):
        assert_close(got[i], call(table[i], sink[i]), 1e-6)
    of_sum = torch.func.grad(lambda t, s: call(t, s).sin().sum(), (0, 1))
    leaves = [table[0].clone().requires_grad_(), sink[0].clone().requires_grad_()]
    expected = torch.autograd.grad(call(*leaves).sin().sum(), leaves)
    for a, b in zip(of_sum(table[0], sink[0]), expected, strict=True):
        assert_close(a, b, 1e-5)


def test_the_reference_differentiates_the_extras_twice():
    case = Case(1, 2, 1, 4, 5, 3, 2)
    x, options = inputs(case), extras_of(case, "distance_bias sink")

    def call(*leaves: Tensor) -> Any:
        return sr.attention(
            *leaves[:3], sr.Causal(), softcap=1.3, distance_bias=leaves[3], sink=leaves[4],
            dropout_p=0.3, dropout_seed=2, backend="reference", return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradgradcheck(call, (*x, *options.values()))


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_a_table_that_learns_nothing_changes_no_other_gradient(backend: str):
    leaves = leaves_of(torch.float32)
    call = {"sink": leaves[4], "softcap": 1.5, "backend": backend}
    fixed = sr.attention(*leaves[:3], sr.Causal(), distance_bias=leaves[3].detach(), **call)
    learned = sr.attention(*leaves[:3], sr.Causal(), distance_bias=leaves[3], **call)
    others = [*leaves[:3], leaves[4]]
    for a, b in zip(gradients([fixed], others), gradients([learned], others), strict=True):
        assert torch.equal(a, b)


def test_flops_of_extras_are_those_of_the_pattern():
    from torch.utils.flop_counter import FlopCounterMode

    totals = []
    for options in ({}, extras_of(CASE, ALL, torch.float32)):
        with FlopCounterMode(display=False) as counter:
            out = sr.attention(*inputs(CASE, torch.float32), sr.Causal(), **options)
            out.sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


# Bits, bounds and refusals


@pytest.mark.parametrize("threads_of_call", [1, 2])
def test_the_same_call_has_the_same_bits(threads_of_call: int, threads: None):
    torch.set_num_threads(threads_of_call)
    leaves = leaves_of(torch.float32)
    runs = []
    for _ in range(2):
        got = call_with_all(*leaves)
        runs.append([*got, *gradients(got, leaves)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
def test_scores_of_any_size_stay_under_the_cap(size: float, backend: str):
    query, key, value = (x.detach() for x in inputs(CASE, torch.float32))
    out, lse = sr.attention(
        query * size, key, value, sr.Causal(), softcap=30.0, backend=backend, return_lse=True
    )
    assert out.isfinite().all() and lse.isfinite().all()
    score = (query.double() * size) @ key.double().repeat_interleave(2, 1).mT * 12**-0.5
    held = sr.Causal().to_dense(75, 91)
    score = (30 * (score / 30).tanh()).masked_fill(~held, -torch.inf)
    assert_close(lse.double(), score.logsumexp(-1), 2e-6)


def test_the_cap_is_as_exact_as_float32():
    """Scores of one key, read off lse: within a few units of the last place of the exact cap."""
    x = torch.cat((torch.logspace(-6, 3, 4000), -torch.logspace(-6, 3, 4000)))
    lse = sr.attention(
        x[None, None, :, None], torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), sr.Full(),
        scale=1.0, softcap=50.0, backend="cpu", return_lse=True,
    )[1][0, 0]  # fmt: skip
    exact = 50 * (x.double() / 50).tanh()
    assert ((lse - exact).abs() / exact.abs()).max() < 5e-7


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


@pytest.mark.filterwarnings("ignore:flex_attention called")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_adapters_compute_what_they_can_and_refuse_the_rest_by_name():
    x = inputs(CASE, torch.float32, requires_grad=False)
    pattern = sr.LongNet((16, 91), (1, 3)) & sr.Causal()
    options = extras_of(CASE, "softcap distance_bias sink_of_rows", torch.float32)
    options = {k: t.detach() if isinstance(t, Tensor) else t for k, t in options.items()}
    expected = expected_of(pattern, CASE, x, options)
    got = sr.attention(*x, pattern, backend="flex", return_lse=True, **options)
    for a, b in zip(got, expected, strict=True):
        assert_close(a.double(), b, 2e-6)
    del options["distance_bias"]
    expected = expected_of(pattern, CASE, x, options)
    got = sr.attention(*x, pattern, backend="torch_sparse", return_lse=True, **options)
    for a, b in zip(got, expected, strict=True):
        assert_close(a.double(), b, 2e-6)
    with pytest.raises(NotImplementedError, match="torch_sparse: it has no distance_bias"):
        sr.attention(*x, pattern, distance_bias=torch.zeros(1, 3), backend="torch_sparse")
    for backend in ("flex", "torch_sparse"):
        with pytest.raises(NotImplementedError, match="it has no dropout_p"):
            sr.attention(*x, pattern, dropout_p=0.1, backend=backend)
    told = sr.explain(*x, pattern, dropout_p=0.1)
    assert "flex: it has no dropout_p" in told and "cpu: usable" in told


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
    for bad in (torch.ones(2, 2), torch.ones(2).int(), [0.5], 0.5):
        with pytest.raises(ValueError, match="slopes must be"):
            sr.alibi(bad, 3)
    with pytest.raises(ValueError, match="radius must be at least 0"):
        sr.alibi(slopes, -1)


# What looks at a call sees the operator


def watched_by(name: str, call: Any) -> list[str]:
    """Names of the operators that a watcher of torch's sees in a call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []
    if name == "dispatch mode":

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        with Watch():
            call()
    elif name == "profiler":
        with torch.profiler.profile() as profile:
            call()
        seen += [event.name for event in profile.events()]
    elif name == "make_fx":
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(call)()
        seen += [str(node.target) for node in graph.graph.nodes]
    return seen


@pytest.mark.parametrize("watcher", ["dispatch mode", "profiler", "make_fx"])
@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_watchers_see_the_operator_where_no_gradient_is_wanted(backend: str, watcher: str):
    x = inputs(CASE, torch.float32, requires_grad=False)
    sr.layout_cache.clear()
    seen = watched_by(watcher, lambda: sr.attention(*x, sr.Causal(), backend=backend))
    assert any("sparsering" in name and name.split("::")[-1].split(".")[-2:-1] != ["forward"]
               and "attention" in name for name in seen)  # fmt: skip


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_a_transform_leaves_no_tensor_of_its_own_in_a_layout(backend: str):
    x = inputs(CASE, torch.float32, requires_grad=False)
    sr.layout_cache.clear()
    call = lambda *x: sr.attention(*x, sr.Causal(), backend=backend)  # noqa: E731
    got = torch.func.functionalize(call)(*x)
    assert torch.equal(call(*x), got)


def test_lazily_negated_tensors_are_what_they_stand_for():
    query, key, value = inputs(CASE, torch.float32, requires_grad=False)
    negated = torch._neg_view(query)
    assert negated.is_neg()
    assert torch.equal(
        sr.attention(negated, key, value, sr.Causal(), backend="cpu"),
        sr.attention(-query, key, value, sr.Causal(), backend="cpu"),
    )


def test_calls_that_nothing_watches_skip_the_operator(monkeypatch: pytest.MonkeyPatch):
    from sparsering import ops

    def never(**call: Any) -> None:
        raise AssertionError("the operator ran")

    monkeypatch.setattr(ops, "_attention", never)
    x = inputs(CASE, torch.float32, requires_grad=False)
    sr.attention(*x, sr.Causal())
    with torch.no_grad():
        sr.attention(*(t.requires_grad_() for t in x), sr.Causal())
    with pytest.raises(AssertionError, match="the operator ran"):
        sr.attention(*x, sr.Causal())


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_masked_keys_reach_nothing_beside_a_block_bias(backend: str):
    query, key, value = inputs(CASE, torch.float32, requires_grad=False)
    valid = torch.arange(91) % 3 > 0
    pattern = sr.Causal() & sr.KeyMask(valid)
    blocks = pattern.layout(**CASE.heads, block_size=16).num_blocks
    call = {"block_bias": torch.randn(1, 4, blocks), "block_size": 16, "backend": backend}
    hidden = [x.masked_fill(~valid[:, None], torch.nan) for x in (key, value)]
    got = sr.attention(query, *hidden, pattern, **call)
    assert_close(got, sr.attention(query, key, value, pattern, **call), 1e-6)


def test_masked_keys_reach_nothing_in_a_ring():
    from sparsering.distributed import simulate_ring

    whole = [x.detach() for x in inputs(Case(1, 4, 2, 75, 75, 8, 8), torch.float32)]
    valid = torch.arange(75) % 3 > 0
    pattern = (sr.Causal() | sr.GlobalTokens(5)) & sr.KeyMask(valid)
    dirty = [whole[0], *(x.masked_fill(~valid[:, None], torch.nan) for x in whole[1:])]
    for world in (1, 2, 3, 5):
        dirty = [x.detach().requires_grad_() for x in dirty]
        clean = [x.detach().requires_grad_() for x in whole]
        got, expected = (simulate_ring(*x, pattern, world_size=world) for x in (dirty, clean))
        assert_close(got, expected, 1e-6)
        found = torch.autograd.grad(got.sin().sum(), dirty)
        for a, b in zip(found, torch.autograd.grad(expected.sin().sum(), clean), strict=True):
            assert_close(a, b, 1e-5)


def test_vmap_of_calls_of_one_batch_entry_drops_as_each_would():
    x = torch.randn(3, 3, 1, 4, 30, 16)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sr.attention(query, key, value, sr.Causal(), dropout_p=0.3, dropout_seed=3)

    got = torch.func.vmap(call)(*x)
    for i in range(3):
        assert_close(got[i], call(*(t[i] for t in x)), 1e-6)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("backend", ["reference", "gather", "cpu", "torch_sparse"])
def test_a_sink_that_is_none_has_gradients_of_0_in_empty_rows(backend: str):
    leaves = [*inputs(CASE, torch.float32), torch.full((4,), -torch.inf, requires_grad=True)]
    call = {"sink": leaves[3], "backend": backend}
    out = sr.attention(*leaves[:3], sr.Documents((40, 51)), q_start=30, **call)
    for grad in gradients([out], leaves):
        assert grad.isfinite().all()
    out = sr.attention(*leaves[:3], sr.GlobalTokens(0), **call)
    for grad in gradients([out], leaves):
        assert not grad.any()
