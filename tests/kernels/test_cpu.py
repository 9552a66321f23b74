"""The CPU kernel against float64: every pattern and shape, and both ways to sum dK and dV.

It also tests numbers of threads, and layouts with wrong tables. `test_cpu_library` tests the build;
tests/attention tests every backend for precision, NaN, empty rows and repeatable bits.
"""

import copy
import ctypes
import itertools
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from exactness import SWEEPS, assert_is_exact
from helpers.thinned import slow_except, thinned
from hypothesis import assume
from hypothesis import strategies as st
from oracles.attention_oracle import PATTERNS, Case, assert_close, dense_counts, gradients, inputs
from oracles.patterns_oracle import Spec, build
from oracles.strategies import Scene, cases, examples
from torch import Tensor

import sparsering as sr
from sparsering.kernels import cpu
from sparsering.kernels.cpu import call
from sparsering.kernels.cpu.call import backward, forward
from sparsering.kernels.problem import Problem
from sparsering.layouts import bitmaps


@pytest.fixture(autouse=True)
def two_threads(threads) -> None:
    """Uses two threads; with one, as in other tests, no work is shared."""
    torch.set_num_threads(2)


def attend(args, pattern: sr.Pattern, **options) -> tuple[Tensor, Tensor]:
    return sr.attention(*args, pattern, return_lse=True, **{"backend": "cpu", **options})


SHAPES = {
    "square": Case(),
    "grouped heads, odd widths": Case(1, 4, 2, 75, 75, 17, 5, 32, arrange="tokens before heads"),
    "one kv head": Case(2, 3, 1, 50, 70, 1, 3, 16, arrange="width before tokens"),
    "one query": Case(2, 4, 2, 1, 77, 48, 48, None, arrange="one head expanded"),
    "three queries, wide": Case(2, 2, 1, 3, 300, 65, 130, 64),
    "wide heads": Case(1, 2, 2, 90, 90, 200, 256, 48),
    "more queries than keys": Case(1, 2, 1, 60, 33, 8, 12, 48),
    "keys from 0": Case(2, 2, 2, 40, 90, 4, 4, 128, 0, "every other of a larger tensor"),
    "queries after the keys": Case(1, 6, 3, 20, 40, 3, 2, 64, 31),
    "one token": Case(1, 2, 2, 1, 1, 4, 4, None),
}


@pytest.mark.parametrize(
    ("name", "shape", "sweep"),
    [
        pytest.param(name, shape, sweep, marks=() if fast else pytest.mark.slow)
        for i, name in enumerate(PATTERNS)
        for j, shape in enumerate(SHAPES)
        for k, sweep in enumerate(SWEEPS)
        for fast in [(j - i) % len(SHAPES) == 0 and (i // len(SHAPES) + k) % 2]
    ],
    indirect=["sweep"],
)
@pytest.mark.usefixtures("sweep")
def test_is_the_reference_forward_and_backward(name, shape):
    assert_is_exact(PATTERNS[name](SHAPES[shape]), SHAPES[shape])


@examples(
    20,
    200,
    cases(max_length=300, max_heads=4, with_random=True),
    st.sampled_from((1, 16, 17, 64)),
    st.sampled_from((1, 32, 33)),
    st.sampled_from((16, 48, 128, None)),
    st.booleans(),
)
def test_is_the_reference_for_any_expression(
    case: tuple[Spec, Scene], width: int, value_width: int, block_size: int | None, by_head: bool
):
    spec, scene = case
    assume(scene.kv_len)
    shapes = Case.of(scene, width, value_width, block_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "_MOST_REPEATED_WORK", float("inf") if by_head else 0)
        assert_is_exact(build(spec), shapes)


@pytest.mark.parametrize("block_size", slow_except([16, 48, 256], range(16, 257, 16)))
@pytest.mark.parametrize("length", [17, 300])
def test_every_block_size(length, block_size, sweep):
    pattern = sr.Causal() & (sr.SlidingWindow(40) | sr.GlobalTokens(3))
    assert_is_exact(pattern, Case(1, 2, 1, length, length, 24, 16, block_size))


@pytest.mark.parametrize(
    ("name", "q_len"),
    thinned(2, ["causal", "longnet", "blocks of each head", "key padding"], [1, 75, 2]),
)
def test_block_bias_and_its_gradient(name, q_len, sweep):
    case = Case(2, 4, 2, q_len, 75, 20, 12, 32)
    pattern = PATTERNS[name](case)
    layout = pattern.layout(**case.heads, block_size=32)
    assert_is_exact(pattern, case, 2 * torch.randn(2, 4, layout.num_blocks))


def test_no_query_heads():
    query, key, value = inputs(Case(1, 0, 2, 64, 64), torch.float32)
    pattern = sr.SelectedBlocks(torch.zeros(4, 1, dtype=torch.int64), 16)
    out, lse = attend((query, key, value), pattern, block_size=16)
    assert out.shape == (1, 0, 64, 16) and lse.shape == (1, 0, 64)
    assert all(not grad.any() for grad in gradients((out, lse), (query, key, value)))


def test_scores_beyond_what_an_exponent_holds_are_one_hot():
    """Rounded, a maximum of 1e10 may lie further below a score than an exponential reaches."""
    args = [1e5 * x for x in inputs(Case(1, 1, 1, 64, 64, 32, 8), torch.float32, False)]
    exact = [x.double() for x in args]
    got = attend(args, sr.Full())[0]
    expected = sr.attention(*exact, sr.Full(), backend="reference")
    assert got.isfinite().all()
    sharp = (exact[0] @ exact[1].mT).topk(2).values.diff().abs()[..., 0] > 1e6
    assert sharp.any()
    assert_close(got[sharp].double() / 1e5, expected[sharp] / 1e5, 1e-6)


def test_a_bias_of_minus_inf_takes_its_block_out(sweep):
    case = Case(1, 2, 1, 64, 64, 8, 8, 16)
    layout = sr.Full().layout(**case.heads, block_size=16)
    bias = torch.zeros(1, 2, layout.num_blocks)
    bias[..., 1::2] = -torch.inf
    assert_is_exact(sr.Full(), case, bias)


@pytest.mark.parametrize("scale", [0.0, 1e-50, -1e-50, -0.5, 3])
def test_any_scale(scale, sweep):
    assert_is_exact(sr.LongNet((16, 64), (1, 2)), Case(1, 2, 1), scale=scale)
    assert_is_exact(sr.Full(), Case(1, 2, 1, 1, 40), scale=scale)


@pytest.mark.parametrize(
    ("q_len", "num_heads"), slow_except([(1, 8), (3, 1), (40, 2)], [1, 2, 3, 40], [1, 2, 8])
)
def test_rows_that_are_cut_into_pieces(q_len, num_heads):
    """64 tables of one row each would be 16 entries long at most: these are of 563.

    A piece has 8 segments of 512 keys.
    """
    case = Case(2, num_heads, 1, q_len, 9000, 16, 16, 16)
    assert_is_exact(sr.Causal() + sr.Dilated(9000, 2), case)
    assert_is_exact(sr.KeyPadding((4700, 0)), case)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("block_size", slow_except([128, 160], [128, 160, 192, 256]))
def test_large_tiles_whose_queries_see_few_keys(block_size, extras, sweep):
    """Where vectors are narrow, 32 queries at a time are multiplied with the keys they see."""
    length = 2 * block_size
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[:32, 40:57] = True  # and 32 queries without keys, then others in odd places
    mask[64:100, length - 70 : length - 3] = True
    mask[101, 5] = mask[110, block_size - 1] = mask[block_size - 1, block_size] = True
    mask[block_size:, :] = torch.ones(block_size, length).tril(17)
    options = {"softcap": 3.0, "distance_bias": torch.randn(2, 41)} if extras else {}
    case = Case(1, 2, 1, length, length, 24, 16, block_size)
    assert_is_exact(sr.Dense(mask), case, **options)


def test_one_heavy_row_among_light_ones(sweep):
    pattern = sr.Causal() & sr.SlidingWindow(16) | sr.GlobalTokens(2)
    assert_is_exact(pattern, Case(1, 2, 1, 900, 900, 16, 16, 16))


def test_a_heavy_row_of_several_groups_of_segments(sweep):
    """A piece of a query tile has 8 segments of 512 keys."""
    case = Case(1, 2, 1, 300, 9000, 16, 8, 16, 0)
    assert_is_exact(sr.SlidingWindow(20) | sr.GlobalTokens(2), case)


def test_heavy_rows_and_columns_with_every_gradient(sweep):
    """Backward cuts both; where there is a distance table, rows of a group stay in order."""
    case = Case(1, 4, 2, 700, 700, 16, 8, 16)
    pattern = sr.SlidingWindow(20) | sr.GlobalTokens(2)
    biases = torch.randn(1, 4, pattern.layout(**case.heads, block_size=16).num_blocks)
    assert_is_exact(pattern, case, biases)
    assert_is_exact(pattern, case, distance_bias=torch.randn(4, 2 * 30 + 1), softcap=3.0)


@pytest.mark.parametrize("q_len", [3, 300, 9000])
def test_no_bit_depends_on_how_many_pieces_are_in_memory(q_len, monkeypatch):
    """Tiles are cut in the middle where memory is for few pieces; 9,000 queries cut key tiles."""
    monkeypatch.setattr("sparsering.kernels.cpu.call._MOST_REPEATED_WORK", 0)  # "by tile"
    most = ctypes.c_int64.in_dll(ctypes.CDLL(str(cpu.build())), "sparsering_bytes_of_pieces")
    pattern = (sr.SlidingWindow(20) | sr.GlobalTokens(2)) + sr.KeyPadding((9000,))
    if q_len == 9000:
        pattern = sr.SlidingWindow(20) | sr.GlobalTokens(2)
    case = Case(1, 2, 1, q_len, 9000, 16, 8, 16, 0)
    args, results = inputs(case, torch.float32), []
    for number in (1 << 30, 0, 5000):
        monkeypatch.setattr(most, "value", number)
        found = attend(args, pattern, q_start=0, block_size=16)
        results.append([*found, *gradients(list(found), list(args))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize(("num_heads", "width"), thinned(2, range(1, 9), [16, 40, 64, 80]))
def test_few_queries_of_any_number_and_width(num_heads, width):
    """The kernel scores queries that share keys by fours, others one by one."""
    case = Case(2, num_heads, 1, 1, 150, width, 24, 64)
    assert_is_exact(sr.Causal() & sr.SlidingWindow(131), case)


@pytest.mark.covering(1)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(("q_len", "group"), [(1, 12), (1, 17), (3, 7), (5, 4), (8, 3)])
def test_few_queries_of_more_heads_than_are_computed_at_once(q_len, group, extras):
    """At most eight rows share a turn; long rows are also cut into pieces."""
    case = Case(2, 2 * group, 2, q_len, 5000, 24, 16, 16)
    pattern = sr.Causal() & sr.SlidingWindow(4900) & sr.KeyPadding((5000, 1500))
    options = {"softcap": 3.0, "distance_bias": torch.randn(2 * group, 41)} if extras else {}
    assert_is_exact(pattern, case, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("q_len", [1, 100])
def test_half_precision_widths_that_no_vector_fits(dtype, q_len, sweep):
    for width, value_width in ((1, 1), (3, 7), (10, 6), (33, 47)):
        case = Case(1, 2, 1, q_len, 100, width, value_width, 32, arrange="from an odd address")
        assert_is_exact(sr.Causal(), case, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_of_a_sink_that_the_first_tiles_leave_out(dtype):
    query, key, value = torch.randn(3, 1, 2, 64, 16).to(dtype)
    sink = torch.tensor([1.5, 0.5])
    pattern = sr.Dilated(16, 2, 0)  # odd rows have the sink alone
    out = sr.attention(query, key, value, pattern, sink=sink, backend="cpu")
    wide = (x.double() for x in (query, key, value))
    expected = sr.attention(*wide, pattern, sink=sink.double(), backend="reference")
    assert (out - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


def test_every_pair_of_patterns_as_a_mixture():
    """Passes of different steps merge into each other's rows."""
    names = ("causal", "dilated", "block window", "documents", "nothing", "global rows")
    case = Case(1, 2, 1, 70, 70, 8, 8, 16)
    for a, b in itertools.permutations(names, 2):
        pattern = PATTERNS[a](case) + PATTERNS[b](case)
        assert dense_counts(pattern, case).max() <= 2
        assert_is_exact(pattern, case)


# Threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("q_len", [1, 700])
def test_forward_bits_do_not_depend_on_the_number_of_threads(dtype, q_len, threads):
    args = inputs(Case(1, 4, 2, q_len, 700, 32, 32), dtype, requires_grad=False)
    pattern = sr.LongNet((64, 256), (1, 4)) + (sr.SlidingWindow(30) | sr.GlobalTokens(3))
    results = []
    for number in (1, 2, 3, 7):
        torch.set_num_threads(number)
        results.append(attend(args, pattern, block_size=16))
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0]) and torch.equal(other[1], results[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_many_short_sequences_do_not_depend_on_who_computes_them(dtype, threads, sweep):
    """Threads take whole kv heads where these are even, else parts of them."""
    args = inputs(Case(3, 8, 4, 90, 90, 32, 24), dtype)
    pattern = sr.Dilated(64, 2) + (sr.Causal() | sr.GlobalTokens(3))
    results = []
    for number in (1, 2, 5, 7):
        torch.set_num_threads(number)
        results.append(attend(args, pattern, block_size=32))
        results[-1] += tuple(gradients(results[-1], args))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_gradients_of_heavy_rows_do_not_depend_on_the_number_of_threads(threads, sweep):
    args = inputs(Case(1, 2, 1, 900, 900, 16, 16), torch.float32)
    results = attend(args, sr.SlidingWindow(30) | sr.GlobalTokens(5), block_size=16)
    found = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(gradients(results, args))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_gradients_have_the_same_bits_at_every_repetition(number, threads, sweep):
    torch.set_num_threads(number)
    args = inputs(Case(1, 6, 3, 500, 500, 32, 32), torch.float32)
    results = attend(args, sr.LongNet((64, 256), (1, 4)), block_size=32)
    first = gradients(results, args)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(gradients(results, args), first, strict=True))


def test_one_thread_is_one_thread(threads):
    """Processor seconds to a second: on two they may be anything, on a busy machine."""
    args = inputs(Case(1, 4, 4, 2000, 2000, 32, 32), torch.float32, requires_grad=False)
    torch.set_num_threads(1)
    attend(args, sr.Full())
    before = os.times()
    for _ in range(8):
        attend(args, sr.Full())
    after = os.times()
    assert after.user - before.user < 1.2 * (after.elapsed - before.elapsed) + 0.02


@pytest.mark.parametrize("block_size", [16, 48, 128, 256])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_transposed_bitmaps(block_size, count):
    cells = torch.rand(count, block_size, block_size) > 0.5
    p = sr.Causal().layout(64, block_size=block_size).passes[0]
    p = replace(p, bitmaps=bitmaps.pack(cells).view(count, block_size**2 // 8))
    assert torch.equal(bitmaps.unpack(p.transposed_bitmaps, block_size), cells.mT)
    assert p.transposed_bitmaps is p.transposed_bitmaps


# Layouts with wrong tables


def causal_problem() -> Problem:
    args = inputs(Case(1, 2, 1, 100, 100), torch.float32, requires_grad=False)
    sr.layout_cache.clear()  # no other call may read a layout that a test changes
    layout = sr.Causal().layout(100, num_heads=2, num_kv_heads=1, block_size=16)
    sr.layout_cache.clear()
    return Problem(layout, *args, 0.25)


BROKEN = {
    ("key_tile", "key_tile must be in"): (10_000, -1),
    ("bitmap", "bitmap must be in"): (10_000, -2),
    ("row_ptr", "row_ptr must rise"): (10_000, -1),
    ("query_start", "query tile"): (-5,),
    ("query_stop", "query tile"): (10_000,),
    ("key_start", "key tile"): (-5,),
    ("key_stop", "key tile"): (10_000,),
}


@pytest.mark.parametrize(("name", "message"), BROKEN)
def test_an_index_outside_its_tensor_raises(name, message):
    for value in BROKEN[name, message]:
        x = causal_problem()
        out, lse = forward(x)
        tensor = getattr(x.layout.passes[0], name)
        tensor[..., tensor.shape[-1] // 2] = value
        with pytest.raises(RuntimeError, match=f"malformed layout: {message}"):
            forward(x)
        with pytest.raises(RuntimeError, match=f"malformed layout: {message}"):
            backward(x, out, lse, out, lse)


def test_a_transposed_table_that_lies_raises(monkeypatch):
    monkeypatch.setattr(call, "_MOST_REPEATED_WORK", 0)
    for name in ("row_ptr", "query_tile", "entry"):
        x = causal_problem()
        out, lse = forward(x)
        getattr(x.layout.passes[0].transpose, name)[..., 3] = 10_000
        with pytest.raises(RuntimeError, match="malformed layout"):
            backward(x, out, lse, out, lse)


def test_a_transposed_table_that_leads_to_padding_raises(monkeypatch):
    """Tables of a batch differ in length; what pads the shorter one was never checked."""
    monkeypatch.setattr(call, "_MOST_REPEATED_WORK", 0)
    case = Case(2, 2, 1, 100, 100)
    args = inputs(case, torch.float32, requires_grad=False)
    layout = sr.KeyPadding((100, 0)).layout(**case.heads, block_size=16)
    out, lse = forward(Problem(layout, *args, 0.25))
    p = layout.passes[0]
    p.bitmap[1, 0, 5] = 10**6
    p.transpose.row_ptr[1, 0, 1:], p.transpose.entry[1, 0, 0] = 1, 5
    with pytest.raises(RuntimeError, match="malformed layout"):
        backward(Problem(layout, *args, 0.25), out, lse, out, lse)
    sr.layout_cache.clear()


def test_query_tiles_that_overlap_leave_no_row_unwritten():
    x = causal_problem()
    p = replace(x.layout.passes[0], covers=(False, False))
    p.query_start[0, 1], p.query_stop[0, 1] = 0, 16
    out, lse = forward(x._replace(layout=replace(x.layout, passes=(p,))))
    assert (lse[..., 16:32] == -torch.inf).all() and (out[..., 16:32, :] == 0).all()


@pytest.mark.parametrize("name", ["out", "lse", "grad_out", "grad_lse", "bias", "dtype"])
def test_tensors_that_do_not_fit_each_other_raise(name):
    x = causal_problem()
    out, lse = forward(x)
    given = {"out": out, "lse": lse, "grad_out": out, "grad_lse": lse}
    if name in given:
        given[name] = given[name][:, :1]
    elif name == "bias":
        x = x._replace(block_bias=torch.zeros(1, 1, x.layout.num_blocks))
    else:
        x = x._replace(value=x.value.bfloat16())
    with pytest.raises(RuntimeError, match="sparsering cpu: "):
        backward(x, **given)


def test_a_layout_of_other_lengths_raises():
    layout = sr.Causal().layout(128, num_heads=2, num_kv_heads=1, block_size=16)
    with pytest.raises(RuntimeError, match="malformed layout"):
        forward(causal_problem()._replace(layout=layout))


def test_a_layout_that_was_called_raises_for_fewer_tokens_and_other_heads():
    x = causal_problem()
    forward(x)
    for case in (Case(1, 2, 1, 90, 100), Case(1, 2, 1, 100, 90)):
        with pytest.raises(RuntimeError, match=r"malformed layout: (query|key) tile"):
            forward(Problem(x.layout, *inputs(case, torch.float32, False), 0.25))
    dilated = sr.LongNet((16, 32), (1, 2)).layout(100, num_heads=2, block_size=16)
    forward(Problem(dilated, *inputs(Case(1, 2, 2, 100, 100), torch.float32, False), 0.25))
    with pytest.raises(RuntimeError, match="malformed layout: the shapes"):
        forward(Problem(dilated, *inputs(Case(1, 3, 3, 100, 100), torch.float32, False), 0.25))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_layout_is_a_layout(copied):
    x = causal_problem()
    expected = forward(x)
    for _ in range(2):
        found = forward(x._replace(layout=copied(x.layout)))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_too_few_biases_raise():
    x = causal_problem()
    with pytest.raises(RuntimeError, match="malformed layout: entries"):
        forward(x._replace(block_bias=torch.zeros(1, 2, x.layout.num_blocks - 1)))


# Reasons, and narrower vectors


def test_reasons_name_what_the_kernel_does_not_do():
    assert cpu.reasons(torch.zeros(1)) == []
    assert cpu.reasons(torch.zeros(1).double()) == [
        "it computes in float32; float64 stays with gather"
    ]
    assert cpu.reasons(torch.zeros(1, device="meta")) == ["it runs on the CPU alone"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "products"),
    [("avx2", "AVX2"), ("avx2", "DEFAULT"), ("default", "DEFAULT"), ("default", "SSE41")],
)
def test_with_narrower_vectors(capability, products, tmp_path):
    """The kernel, the matrix products that it calls, or both use narrower vectors."""
    environment = {
        "ATEN_CPU_CAPABILITY": capability,
        "ONEDNN_MAX_CPU_ISA": products,
        "SPARSERING_CACHE": str(tmp_path),
    }
    options = {"env": {**os.environ, **environment}, "capture_output": True, "text": True}
    asked = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    told = subprocess.run(asked, **options, check=True)
    assert told.stdout.strip() == capability.upper()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-k", "not library", __file__],
        **options,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
