"""The CPU kernel's walk by key tile, for rows that choose their blocks, against float64.

Every shape of row and every pattern, walked by force; which passes are walked; the softmax mass of
each visited block.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from exactness import FORWARD, SWEEPS, assert_is_exact
from helpers.thinned import thinned
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    dense_scores,
    gradients,
    inputs,
)
from torch import Tensor

import sparsering as sr
from sparsering.kernels.cpu import call
from sparsering.kernels.cpu.call import backward, entry_mass, forward
from sparsering.kernels.problem import Problem
from sparsering.layouts.lists import Lists


@pytest.fixture(autouse=True)
def two_threads(threads) -> None:
    torch.set_num_threads(2)


@pytest.fixture
def walked(monkeypatch):
    """Every pass is walked by key tile."""
    sr.layout_cache.clear()  # with each layout the arguments of its call are kept
    monkeypatch.setattr(call, "_is_walked", lambda layout, p: 1)
    yield
    sr.layout_cache.clear()


def selection(case: Case, tokens: int, k: int = 3, block: int = 32, tables: int | None = None):
    """Random blocks of each row, -1 and repeated ones among them; row 1 lists nothing."""
    blocks, rows = -(-case.kv_len // block), -(-(case.last_position + 1) // tokens)
    heads = case.num_kv_heads if tables is None else tables
    indices = torch.randint(-1, blocks, (case.batch, heads, rows, k))
    indices[..., 1:2, :] = -1
    return sr.SelectedBlocks(indices, block, query_block=tokens)


def bias_of(pattern: sr.Pattern, case: Case) -> Tensor:
    layout = pattern.layout(**case.heads, block_size=case.block_size)
    return 2 * torch.randn(case.batch, case.num_heads, layout.num_blocks)


SHAPES = {
    "square": Case(block_size=32),
    "grouped heads": Case(1, 4, 2, 150, 150, 32, 32, 32),
    "odd widths": Case(1, 4, 2, 75, 75, 17, 5, 32, arrange="tokens before heads"),
    "key wider than value": Case(1, 2, 1, 90, 90, 128, 64, 32, arrange="width before tokens"),
    "value wider than key": Case(1, 3, 1, 70, 70, 64, 130, 32),
    "80 wide": Case(1, 2, 2, 50, 50, 80, 80, 16),
    "from the middle": Case(2, 4, 2, 37, 64, 16, 16, 32, 20, "every other of a larger tensor"),
    "last queries": Case(1, 4, 2, 33, 150, 16, 16, 32),
    "one query": Case(2, 4, 2, 1, 77, 48, 48, 32, arrange="one head expanded"),
    "one token": Case(1, 2, 2, 1, 1, 4, 4, 32),
    "values of no width": Case(1, 2, 1, 40, 40, 16, 0, 32),
}


@pytest.mark.parametrize(("shape", "tokens"), thinned(2, SHAPES, [1, 4, 32]))
@pytest.mark.usefixtures("walked")
def test_rows_are_the_reference_forward_and_backward(shape, tokens, sweep):
    case = SHAPES[shape]
    assert_is_exact(selection(case, tokens) & sr.Causal(), case)
    assert_is_exact(selection(case, tokens, tables=case.num_heads), case)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", ["grouped heads", "from the middle"])
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.usefixtures("walked")
def test_block_bias_and_its_gradient(shape, tokens, sweep):
    case = SHAPES[shape]
    for tables in (1, case.num_heads):
        pattern = selection(case, tokens, tables=tables) & sr.Causal()
        assert_is_exact(pattern, case, bias_of(pattern, case))


@pytest.mark.parametrize(("name", "sweep"), thinned(2, PATTERNS, SWEEPS), indirect=["sweep"])
@pytest.mark.usefixtures("walked", "sweep")
def test_any_pattern_may_be_walked(name):
    """Strided tiles, bitmaps of every kind, several passes, tables of batch entries and heads."""
    case = Case(2, 6, 3, 40, 75)
    assert_is_exact(PATTERNS[name](case), case)


@pytest.mark.usefixtures("walked")
def test_many_chunks_of_rows(sweep):
    """A thousand rows to a chunk."""
    case = Case(1, 8, 1, 600, 600, 16, 8, 16)
    pattern = selection(case, 1, k=4, block=16) & sr.Causal()
    assert_is_exact(pattern, case, bias_of(pattern, case))


@pytest.mark.parametrize("num_heads", [3, 24, 80])
@pytest.mark.usefixtures("walked")
def test_groups_that_fit_no_gathered_tile(num_heads, sweep):
    """Their heads do not divide it, or are more than its rows; entries span several of them."""
    case = Case(1, num_heads, 1, 70, 70, 8, 8, 16)
    pattern = selection(case, 16, block=16) & sr.Causal()
    assert_is_exact(pattern, case, bias_of(pattern, case))


@pytest.mark.usefixtures("walked")
def test_tables_that_groups_do_not_fit():
    """Six heads of two groups over three tables."""
    case = Case(1, 6, 2, 64, 64, 8, 8, 16)
    args = inputs(case, torch.float32, requires_grad=False)
    layout = selection(case, 1, block=16, tables=6).layout(**case.heads, block_size=16)
    (p,) = layout.passes
    tables = [x[:, ::2].contiguous() for x in (p.row_ptr, p.key_tile, p.bitmap)]
    p = replace(p, row_ptr=tables[0], key_tile=tables[1], bitmap=tables[2], slot=None)
    got, lse = forward(Problem(replace(layout, passes=(p,)), *args, 0.25))
    for head in range(6):
        q, (k, v) = args[0][:, head : head + 1], (x[:, head // 3 : head // 3 + 1] for x in args[1:])
        alone = replace(
            p, **{n: getattr(p, n)[:, head // 2, None] for n in ("row_ptr", "key_tile", "bitmap")}
        )
        frame = layout.frame._replace(num_heads=1, num_kv_heads=1)
        of_head = replace(layout, frame=frame, passes=(alone,))
        expected = forward(Problem(of_head, q, k, v, 0.25))
        assert_close(got[:, head], expected[0][:, 0], FORWARD)
        assert_close(lse[:, head], expected[1][:, 0], FORWARD)


@pytest.mark.usefixtures("walked")
def test_a_bias_of_minus_inf_takes_its_block_out(sweep):
    case = Case(1, 4, 2, 64, 64, 8, 8, 16)
    pattern = selection(case, 1, block=16)
    bias = bias_of(pattern, case)
    bias[..., ::2] = -torch.inf
    assert_is_exact(pattern, case, bias)


@pytest.mark.usefixtures("walked")
def test_sinks_and_keys_that_are_masked(sweep):
    case = Case(2, 4, 2, 75, 75, 16, 16, 32)
    mask = torch.rand(2, 75) > 0.3
    mask[1, 32:64] = False  # a whole block
    pattern = selection(case, 1) & sr.Causal() & sr.KeyMask(mask)
    args = inputs(case, torch.float32)
    with torch.no_grad():
        for x in args[1:]:
            x.transpose(1, 2)[~mask] = torch.nan
    assert_is_exact(pattern, case, args=args, sink=torch.randn(4))


@pytest.mark.parametrize("scale", [0.0, -0.5, 3])
@pytest.mark.usefixtures("walked")
def test_any_scale(scale):
    case = Case(1, 4, 2, block_size=32)
    assert_is_exact(selection(case, 1) & sr.Causal(), case, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("block", "width", "value_width"), [(16, 33, 47), (48, 64, 64), (64, 1, 1)]
)
@pytest.mark.usefixtures("walked")
def test_half_precision(dtype, block, width, value_width, sweep):
    for tokens in (1, 16):
        case = Case(1, 4, 2, 100, 100, width, value_width, block)
        pattern = selection(case, tokens, block=block) & sr.Causal()
        assert_is_exact(pattern, case, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("walked")
def test_bits_do_not_depend_on_the_number_of_threads(dtype, threads, sweep):
    case = Case(1, 4, 2, 700, 700, 32, 32, 16)
    pattern = selection(case, 1, k=5, block=16) & sr.Causal()
    bias = bias_of(pattern, case).requires_grad_()
    args = inputs(case, dtype)
    results = []
    for number in (1, 2, 3, 7, 2):
        torch.set_num_threads(number)
        options = {"block_size": 16, "block_bias": bias, "backend": "cpu", "return_lse": True}
        results.append(sr.attention(*args, pattern, **options))
        results[-1] += tuple(gradients(results[-1], [*args, bias]))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.usefixtures("walked")
def test_numbers_of_blocks_that_a_row_does_not_list_never_reach_it(sweep):
    """Rows are gathered with strangers, none of whose keys they meet."""
    case = Case(1, 4, 2, 64, 64, 8, 8, 16)
    rows = torch.arange(64)
    indices = torch.stack((rows // 16, torch.where(rows % 3 == 0, 2, 1)), 1)
    pattern = sr.SelectedBlocks(indices, 16, query_block=1)
    args = inputs(case, torch.float32)
    broken = [x.detach().clone() for x in args]
    for x in broken[1:]:
        x[:, :, 32:48] = torch.nan
    broken = [x.requires_grad_() for x in broken]
    sees = (indices == 2).any(1)
    options = {"block_size": 16, "backend": "cpu", "return_lse": True}
    whole, got = (sr.attention(*x, pattern, **options) for x in (args, broken))
    for a, b in zip(whole, got, strict=True):
        assert torch.equal(a[:, :, ~sees], b[:, :, ~sees])
        assert b[:, :, sees].isnan().all()
    expected, grads = gradients(whole, args), gradients(got, broken)
    assert torch.equal(expected[0][:, :, ~sees], grads[0][:, :, ~sees])


def test_scores_beyond_what_an_exponent_holds_are_one_hot(walked):
    case = Case(1, 2, 1, 64, 64, 32, 8, 16)
    pattern = sr.SelectedBlocks(torch.arange(4).expand(64, 4), 16, query_block=1)
    args = [1e5 * x for x in inputs(case, torch.float32, False)]
    exact = [x.double() for x in args]
    got = sr.attention(*args, pattern, block_size=16, backend="cpu")
    expected = sr.attention(*exact, sr.Full(), backend="reference")
    assert got.isfinite().all()
    products = exact[0] @ exact[1].mT
    sharp = products.topk(2).values.diff().abs()[..., 0] > 1e6
    assert sharp.any()
    assert_close(got[sharp].double() / 1e5, expected[sharp] / 1e5, 1e-6)


# Which passes are walked


def problem(pattern: sr.Pattern, case: Case, **options) -> Problem:
    layout = pattern.layout(**case.heads, block_size=case.block_size)
    return Problem(layout, *inputs(case, torch.float32, False), 0.25, **options)


def is_walked(pattern: sr.Pattern, case: Case, **options) -> list[int]:
    return call._walked(problem(pattern, case, **options))


def test_short_rows_are_walked_and_nothing_else():
    case = Case(1, 4, 2, 256, 256, 16, 16, 64)
    for tokens in (1, 4, 16):
        assert is_walked(selection(case, tokens, block=64) & sr.Causal(), case) == [1]
    assert is_walked(selection(case, 32, block=64), case) == [0]
    assert is_walked(selection(case, 64, block=64), case) == [0]
    few = replace(case, q_len=8)
    assert is_walked(selection(few, 1, block=64), few) == [0]
    long = replace(case, q_len=32, kv_len=16384)  # whose rows hardly ever meet
    assert is_walked(selection(long, 1, block=64), long) == [0]
    for q_len, name in itertools.product(
        (1, 256), ("causal", "longnet", "documents", "global rows")
    ):
        other = replace(case, q_len=q_len)
        assert not any(is_walked(PATTERNS[name](other), other))


@pytest.mark.parametrize("extra", ["softcap", "distance_bias", "dropout_p"])
def test_what_goes_by_positions_is_not_walked_and_exact(extra):
    case = Case(1, 4, 2, 128, 128, 16, 16, 32)
    pattern = selection(case, 1) & sr.Causal()
    value = {"softcap": 2.0, "distance_bias": torch.randn(4, 21), "dropout_p": 0.3}[extra]
    options = {extra: value} | ({"dropout_seed": 5} if extra == "dropout_p" else {})
    assert_is_exact(pattern, case, **options)
    assert is_walked(pattern, case, **{extra: value}) == [0]


def test_rows_that_are_walked_by_themselves(sweep):
    """The rule of calls walks them; the second call has the same layout."""
    case = Case(1, 8, 2, 130, 130, 32, 32, 32)
    pattern = selection(case, 1) & sr.Causal()
    assert is_walked(pattern, case) == [1]
    assert_is_exact(pattern, case)
    assert_is_exact(pattern, case, softcap=1.5)
    assert_is_exact(pattern, case, bias_of(pattern, case))


# Layouts with wrong tables


@pytest.mark.parametrize(
    ("name", "value"),
    [("key_tile", 10_000), ("bitmap", 10_000), ("row_ptr", 10_000), ("query_stop", 10_000)],
)
@pytest.mark.usefixtures("walked")
def test_an_index_outside_its_tensor_raises(name, value):
    case = Case(1, 2, 1, 100, 100, block_size=16)
    pattern = selection(case, 1, block=16) & sr.Causal()
    x = problem(pattern, case)
    out, lse = forward(x)
    getattr(x.layout.passes[0], name)[..., 20] = value
    for broken in (
        lambda: forward(x),
        lambda: backward(x, out, lse, out, lse),
        lambda: entry_mass(x, lse),
    ):
        with pytest.raises(RuntimeError, match="malformed layout"):
            broken()


def test_a_walk_of_what_goes_by_positions_raises():
    case = Case(1, 2, 1, 100, 100, block_size=16)
    arguments = call._arguments(problem(selection(case, 1, block=16), case, softcap=1.0))
    assert arguments["walked"] == [0]
    with pytest.raises(RuntimeError, match="not walked by key tile"):
        call.library().forward(**{**arguments, "walked": [1]}, sink=None, slots=[])


@pytest.mark.parametrize("operator", ["forward", "backward", "mass"])
def test_arguments_stand_in_the_order_of_the_schema(operator):
    case = Case(1, 2, 1, 40, 40, block_size=16)
    schema = getattr(call.library(), operator).default._schema
    arguments = call._arguments(problem(sr.Causal(), case))
    assert [x.name for x in schema.arguments][: len(arguments)] == list(arguments)


@pytest.mark.parametrize("operator", ["forward_lists", "backward_lists"])
def test_arguments_of_lists_stand_in_the_order_of_the_schema(operator):
    case = Case(1, 2, 1, 40, 40, block_size=16)
    schema = getattr(call.library(), operator).default._schema
    lists = Lists(keys=torch.zeros(1, 1, 40, 1, dtype=torch.int32), branch=0)
    arguments = call._list_arguments(problem(sr.Causal(), case), lists)
    assert [x.name for x in schema.arguments][: len(arguments)] == list(arguments)


# The mass of each entry


def exact_mass(x: Problem, lse: Tensor, weight: Tensor | None) -> Tensor:
    """Computes the mass of each entry by definition, in float64, pair by pair."""
    seen = torch.ones(1, 1, dtype=torch.bool) if x.key_mask is None else x.key_mask[:, None, None]
    score = dense_scores(x.query.double(), x.key.double(), seen, scale=x.scale)
    mass = torch.zeros(*lse.shape[:2], max(1, x.layout.num_blocks), dtype=torch.float64)
    for number in x.layout.entry_of_pairs(len(lse)):  # [B, H, Nq, Nk] of each pass
        entry = number.clamp(min=0).flatten(2)
        bias = 0 if x.block_bias is None else x.block_bias.gather(2, entry).view(score.shape)
        visible = (number >= 0) & (lse > -torch.inf)[..., None]
        share = torch.where(visible, (score + bias - lse[..., None]).exp(), 0.0)
        share = share if weight is None else share * weight[..., None]
        mass.scatter_add_(2, entry, share.flatten(2))
    return mass[..., : x.layout.num_blocks]


@pytest.mark.parametrize("name", thinned(2, PATTERNS))
def test_mass_of_any_layout(name):
    case = Case(2, 6, 3, 40, 75, 16, 16)
    x = problem(PATTERNS[name](case), case)
    _, lse = forward(x)
    weight = torch.rand(2, 6, 40)
    for w in (None, weight):
        assert_close(entry_mass(x, lse, w).double(), exact_mass(x, lse.double(), w), FORWARD)


@pytest.mark.parametrize(
    ("tokens", "tables", "dtype"),
    thinned(2, [1, 8, 64], [1, 2, 4], [torch.float32, torch.bfloat16]),
)
def test_mass_of_rows(tokens, tables, dtype):
    """Beside a bias, a mask of keys, and an lse of more keys than these."""
    case = Case(2, 4, 2, 40, 100, 32, 16, 64)
    pattern = selection(case, tokens, block=64, tables=tables) & sr.Causal()
    x = problem(pattern, case, block_bias=bias_of(pattern, case))
    x = x._replace(key_mask=torch.rand(2, 100) > 0.2, query=x.query.to(dtype))
    x = x._replace(key=x.key.to(dtype), value=x.value.to(dtype))
    _, lse = forward(x)
    joint = torch.logaddexp(lse, torch.randn_like(lse))
    for given, weight in ((lse, None), (joint, torch.randn(2, 4, 40))):
        mass = entry_mass(x, given, weight)
        assert mass.dtype == torch.float32
        assert_close(mass.double(), exact_mass(x, given.double(), weight), FORWARD)
        assert torch.equal(mass, entry_mass(x, given, weight))


def test_masses_of_a_row_sum_to_one():
    case = Case(1, 4, 2, 64, 64, 16, 16, 16)
    x = problem(selection(case, 1, block=16), case)
    _, lse = forward(x)
    mass = entry_mass(x, lse)
    for head in range(4):
        row = x.layout.table(x.layout.passes[0], 0, head)[0]
        of_row = torch.zeros(64).index_add(0, row, mass[0, head, : len(row)])
        assert_close(of_row, (lse[0, head] > -torch.inf).float(), FORWARD)


def test_mass_of_negative_scale_and_of_nothing():
    case = Case(1, 4, 2, 64, 64, 16, 16, 16)
    x = problem(selection(case, 1, block=16), case)._replace(scale=-0.7)
    _, lse = forward(x)
    assert_close(entry_mass(x, lse).double(), exact_mass(x, lse.double(), None), FORWARD)
    x = problem(sr.GlobalTokens(0), case)
    assert entry_mass(x, forward(x)[1]).shape == (1, 4, x.layout.num_blocks)


def _as_is(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    "wrong", [lambda x: x[:, :2], lambda x: x[..., :-1], lambda x: x.expand(2, -1, -1)]
)
def test_mass_of_tensors_that_do_not_fit_raises(wrong: Callable[[Tensor], Tensor]):
    case = Case(1, 4, 2, 64, 64, 16, 16, 16)
    x = problem(selection(case, 1, block=16), case)
    _, lse = forward(x)
    for of_lse, of_weight in ((wrong, _as_is), (_as_is, wrong)):
        with pytest.raises(RuntimeError, match="sparsering cpu"):
            entry_mass(x, of_lse(lse), of_weight(torch.ones_like(lse)))
    with pytest.raises(NotImplementedError, match="softcap"):
        entry_mass(x._replace(softcap=1.0), lse)
