"""The triton backend, its kernels interpreted in Python on CPU tensors, or run (`device_runs`).

What is sharper than `test_attention` runs here: each pattern, head dim and block size; tiles that
are cut, packed heads, heads in turn, tensor descriptors. Speed wants a GPU (`benchmarks/gpu`);
`test_triton_compile` compiles for GPUs that are not there.
"""

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from helpers.device_runs import ON_GPU, checked, placed
from helpers.forked import run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    dense_attention,
    dense_counts,
    errors,
    gradients,
    inputs,
)
from oracles.patterns_oracle import build
from oracles.strategies import cases
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsering as sr
from sparsering.kernels import tune
from sparsering.kernels.problem import Problem
from sparsering.kernels.triton import call as backend
from sparsering.kernels.triton import configs, operands
from sparsering.kernels.triton import walk as triton_walk
from sparsering.kernels.triton.configs import Config
from sparsering.layouts.compile import build_layout
from sparsering.patterns.algebra import Frame


def attend(*args, **options) -> tuple[Tensor, Tensor]:
    options = {"backend": "triton", "return_lse": True, **options}
    if options["backend"] == "reference":
        return sr.attention(*args, **options)
    options = {name: placed(x) for name, x in options.items()}
    out, lse = sr.attention(*map(placed, args), **options)
    return out.cpu(), lse.cpu()


def assert_is_the_reference(pattern: sr.Pattern, case: Case, **options) -> None:
    """Out, lse and gradients in float32 are within float32's rounding of the exact ones."""
    args = inputs(case, torch.float32)
    exact_args = [x.detach().double().requires_grad_() for x in args]
    options = {"q_start": case.q_start, "block_size": case.block_size, **options}
    exact = attend(*exact_args, pattern, **options, backend="reference")
    assert_rounded(lambda: attend(*args, pattern, **options), exact, args, exact_args)


def assert_rounded(call: Callable[[], tuple[Tensor, Tensor]], exact, wrt, exact_wrt) -> None:
    """Results and gradients are within float32's rounding of the exact ones."""
    expected = [x.detach().float() for x in (*exact, *gradients(exact, exact_wrt))]

    def check(found: Sequence[Tensor]) -> None:
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            what = ("out", "lse")[i] if i < 2 else f"gradient {i - 2}"
            assert_close(a.detach(), b, 2e-6 if i < 2 else 4e-6, what)

    checked(lambda: [*(got := call()), *gradients(got, wrt)], check)


SHAPES = [
    Case(1, 2, 2, 50, 50, 16, 16),
    Case(1, 4, 2, 30, 60, 17, 5, 32, arrange="tokens before heads"),
    Case(2, 2, 1, 20, 40, 8, 20, 16, arrange="width before tokens"),
    Case(1, 2, 1, 60, 33, 8, 12, 48),
    Case(1, 3, 1, 20, 40, 3, 2, 16, 31, "every other of a larger tensor"),
    Case(2, 4, 2, 1, 77, 40, 48, None, arrange="one head expanded"),
]


PLAIN = [
    *("mixture under masks", "global rows", "dense of each head", "longnet, offset of each head"),
    "blocks of each batch entry",
]
FAST = [(name, i + 1) for i, name in enumerate(PLAIN)]
FAST += [("a mixture of each head", 1), ("blocks of unlike sizes", 2)]
ALL = [(name, (i // 2 + skip) % 6) for i, name in enumerate(PATTERNS) for skip in (0, 3)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [*FAST, *(pytest.param(*x, marks=pytest.mark.slow) for x in ALL if x not in FAST)],
)
def test_every_pattern_is_the_reference_forward_and_backward(name, shape):
    case = SHAPES[shape]
    assert_is_the_reference(PATTERNS[name](case), case)


@pytest.mark.slow  # the attack on calls draws some for `make test`
@settings(max_examples=36)
@given(cases(with_random=True, max_length=60), st.sampled_from((16, 32)))
def test_any_expression_is_the_reference(case, block_size):
    spec, scene = case
    assume(scene.kv_len)
    assert_is_the_reference(build(spec), Case.of(scene, 4, 3, block_size))


def first_fast(names: str, fast: list, slow: list) -> pytest.MarkDecorator:
    """Parametrizes with all of two lists; those of the second are slow tests."""
    return pytest.mark.parametrize(
        names, [*fast, *(pytest.param(x, marks=pytest.mark.slow) for x in slow)]
    )


TREES: dict[str, sr.Pattern] = {
    "drafts below a prompt": sr.Tree((27, 1, 1, 2, 1, 1), (-1, 0, 0, 1, 1, 2), sr.Causal()),
    "drafts that see a window": sr.Tree((27, 3, 1, 1, 1), (-1, 0, 0, 1, 2), sr.SlidingWindow(6)),
    "documents of nodes": sr.Tree((5, 9, 4, 8, 7), (-1, 0, 0, -1, 3), sr.Causal()),
    "a mixture along a tree": sr.Tree(
        (9, 7, 17), (-1, 0, 0), (sr.Causal() & sr.SlidingWindow(5)) + sr.Causal()
    ),
    "trees by batch entry": sr.Tree(
        ((20, 6, 7), (11, 11, 11)), ((-1, 0, 0), (-1, 0, 1)), sr.Causal()
    ),
}


@first_fast("name", ["drafts below a prompt", "trees by batch entry"], list(TREES)[1:-1])
@pytest.mark.parametrize("distances", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_small_trees(name, distances):
    """Nodes are smaller than tiles; distances count along a tree."""
    case, options = Case(2, 2, 1, 33, 33, 8, 12), {}
    if distances and name != "a mixture along a tree":
        options["distance_bias"] = torch.linspace(-1, 1, 2 * 9).view(2, 9)
    args = inputs(case, torch.float32)
    exact_args = [x.detach().double().requires_grad_() for x in args]
    wide = {key: x.double() for key, x in options.items()}
    exact = attend(*exact_args, TREES[name], **wide, backend="reference")
    assert_rounded(lambda: attend(*args, TREES[name], **options), exact, args, exact_args)


@first_fast(
    "widths",
    [(48, 48), (64, 80), (192, 128), (1, 1), (320, 512)],
    [(16, 16), (72, 72), (80, 16), (96, 96), (256, 256), (512, 512), (512, 64), (64, 512)],
)
def test_head_dims(widths):
    case = Case(1, 2, 1, 40, 40, *widths, 32)
    assert_is_the_reference(sr.Causal(), case)


def test_head_dims_above_512_are_refused():
    with pytest.raises(NotImplementedError, match="head dims up to 512"):
        attend(*inputs(Case(1, 1, 1, 4, 4, 513, 16), torch.float32), sr.Causal())


@first_fast("block_size", [48], [16, 80, 96, 112, 160, 208, 256])
def test_block_sizes(block_size):
    length = block_size + block_size // 2
    case = Case(1, 1, 1, length, length, 16, 16, block_size)
    assert_is_the_reference(sr.SlidingWindow(block_size) | sr.GlobalTokens(2, rows=False), case)


@first_fast("scale", [-0.5, 1e-50], [0.0, 1.0])
def test_scales(scale):
    assert_is_the_reference(sr.LongNet((16, 64), (1, 2)), Case(1, 1, 1, 40, 40), scale=scale)


@first_fast("name", ["union of steps"], ["causal", "longnet", "blocks of each head"])
def test_float16_errs_at_most_twice_as_much_as_dense_attention(name):
    assert_errs_at_most_twice_as_much(name, torch.float16)


@first_fast(
    "name", ["union of steps", "mixture under masks"], ["causal", "longnet", "blocks of each head"]
)
@pytest.mark.usefixtures("bfloat16_products")
def test_bfloat16_errs_at_most_twice_as_much_as_dense_attention(name):
    assert_errs_at_most_twice_as_much(name, torch.bfloat16)


def assert_errs_at_most_twice_as_much(name: str, dtype: torch.dtype) -> None:
    """Out, lse and gradients in a half precision, beside those of dense attention in it."""
    case = Case(1, 2, 1, 48, 48, 32, 32, 32)
    pattern = PATTERNS[name](case)
    args = inputs(case, dtype)
    exact_args = [x.detach().double().requires_grad_() for x in args]
    counts = dense_counts(pattern, case)
    exact, eager = (dense_attention(*x, counts) for x in (exact_args, args))
    exact, eager = (
        [*found, *gradients(found[:1], wrt)] for found, wrt in ((exact, exact_args), (eager, args))
    )

    def run() -> list[Tensor]:
        out, lse = attend(*args, pattern, block_size=32)
        return [out, lse, *gradients([out], args)]

    def check(found: Sequence[Tensor]) -> None:
        for ours, theirs, true in zip(found, eager, exact, strict=True):
            bound = errors(theirs, true.detach().double())
            mine = errors(ours, true.detach().double())
            assert mine[0] <= 2 * bound[0] + 1e-6 and mine[1] <= 4 * bound[1] + 1e-6

    checked(run, check)


@first_fast("size", [1e7], [1e3, 1e5])
def test_the_highest_of_huge_scores_takes_all(size):
    """Rounded, a maximum of 1e10 may lie further below a score than an exponential reaches."""
    case = Case(1, 1, 1, 40, 40, 16, 16)
    query, key, value = inputs(case, torch.float32)
    with torch.no_grad():
        query.mul_(size), key.mul_(1000)
    args = query, key, value
    out, lse = attend(*args, sr.Full(), scale=0.2236, block_size=16)
    score = 0.2236 * (query.double() @ key.double().mT)
    highest = score.amax(-1)
    assert ((lse - highest).abs() <= 4e-7 * highest.abs() + math.log(40)).all()
    sharp = score.topk(2).values.diff().abs()[..., 0] > 1e-6 * score.abs().amax() + 30
    first = value.gather(2, score.argmax(-1)[..., None].expand_as(value))
    assert sharp.double().mean() > 0.8 and torch.equal(out[sharp], first[sharp])
    for grad in gradients((out, lse), args):
        assert grad.isfinite().all()


def test_steps_of_16_tokens_read_their_own_bits(monkeypatch):
    case = Case(1, 1, 1, 40, 40, 16, 16, 32)
    for rows, streamed, masked in ((32, 16, 0), (16, 32, 0), (32, 32, 16)):
        config = Config(rows, streamed, 4, 2, tma=masked > 0, masked=masked)
        monkeypatch.setattr(backend, "config_for", lambda *rest, config=config: config)
        assert_is_the_reference(sr.Causal() + sr.SlidingWindow(3, 20), case)


@pytest.mark.parametrize("sizes", [{"kv_len": 0}, {"q_len": 0}, {"num_heads": 0}], ids=str)
def test_dims_of_size_0_on_hopper(sizes, monkeypatch):
    monkeypatch.setattr(configs, "generation", lambda device: 90)
    case = replace(Case(1, 1, 1, 20, 20, 16, 16), **sizes)
    args = inputs(case, torch.float16)
    out, lse = attend(*args, sr.Full(), q_start=0)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()
    assert all(grad.eq(0).all() for grad in gradients((out, lse), args))


def test_the_precision_that_the_user_asks_for_is_heard():
    code = (
        "import torch; from sparsering.kernels.triton.launch import precision as p;"
        "f = torch.float32;"
        "assert p(f) == 'tf32x3'; {}; assert p(f) == {!r}; assert p(torch.float16) == 'ieee'"
    )
    for ask, heard in (
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32"),
        ("torch.set_float32_matmul_precision('high')", "tf32"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32"),
        ("torch.set_float32_matmul_precision('highest')", "ieee"),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "ieee"),
    ):
        done = run(code.format(ask, heard))
        assert done.returncode == 0, done.stderr


# How work is cut


@pytest.mark.usefixtures("cut_tiles")
@first_fast(
    "name", ["global tokens"], ["full", "causal", "blocks of each head", "mixture with overlap"]
)
def test_tiles_cut_into_pieces_are_the_reference(name, launched):
    case = Case(1, 2, 1, 60, 60, 8, 12)
    assert_is_the_reference(PATTERNS[name](case), case)
    assert {"merge_kernel", "sum_kernel"} <= set(launched)


@pytest.mark.usefixtures("cut_tiles")
@pytest.mark.parametrize("queries", [1, 7])
def test_more_pieces_than_are_merged_at_once(queries, launched):
    """A tile has 19 pieces; the kernels that combine them load 16 at a time."""
    case = Case(1, 2, 1, queries, 300, 8, 12)
    assert_is_the_reference(sr.Full(), case)
    assert {"merge_kernel", "sum_kernel"} <= set(launched)


@pytest.mark.usefixtures("cut_tiles")
def test_a_block_bias_of_cut_tiles_is_the_reference():
    _assert_bias_is_the_reference(sr.Causal() + sr.SlidingWindow(5), Case(1, 2, 1, 35, 35, 8, 8))


@first_fast("name", ["union of steps"], ["full", "longnet", "blocks of each head"])
def test_a_block_bias_and_its_gradient_are_the_reference(name):
    case = Case(1, 4, 2, 40, 40, 8, 8, 32)
    _assert_bias_is_the_reference(PATTERNS[name](case), case)


def test_a_bias_of_minus_inf_takes_its_block_out():
    case = Case(1, 2, 1, 48, 48, 8, 8, 16)
    _assert_bias_is_the_reference(sr.Full(), case, torch.arange(9) % 2 == 1)


def _assert_bias_is_the_reference(
    pattern: sr.Pattern, case: Case, without: Tensor | None = None
) -> None:
    layout = pattern.layout(**case.heads, block_size=case.block_size)
    bias = torch.randn(1, case.num_heads, layout.num_blocks)
    if without is not None:
        bias[..., without] = -torch.inf
    bias.requires_grad_()
    exact_bias = bias.detach().double().requires_grad_()
    args = inputs(case, torch.float32)
    exact_args = [x.detach().double().requires_grad_() for x in args]
    options = {"block_size": case.block_size}
    exact = attend(*exact_args, pattern, block_bias=exact_bias, **options, backend="reference")
    assert_rounded(
        lambda: attend(*args, pattern, block_bias=bias, **options),
        exact, (*args, bias), (*exact_args, exact_bias),
    )  # fmt: skip


@first_fast("group", [5], [2, 8])
def test_few_tokens_of_a_group_of_heads_are_packed(group):
    case = Case(1, 2 * group, 2, 3, 90, 8, 8, 32)
    for queries, tokens, pack in ((1, 1, group), (3, 16, 2)):
        case = replace(case, q_len=queries)
        rows = rows_of(sr.Causal(), case, torch.float32)
        assert (rows["TOKENS"], rows["PACK"]) == (tokens, pack)
        assert_is_the_reference(sr.Causal(), case)


@pytest.mark.parametrize("cards", [4, 132])
def test_kernels_are_compiled_for_few_numbers_of_tokens_and_heads(cards, monkeypatch):
    monkeypatch.setattr(backend, "processors", lambda device: cards)
    forms, heads = set(), set()
    for queries in (1, 2, 3, 5, 9, 16, 17, 33, 64, 65, 128, 300, 2000):
        case = Case(1, 8, 1, queries, 2000, 16, 16, 128)
        layout = sr.SlidingWindow(9).layout(**case.heads, block_size=128)
        problem = Problem(layout, *inputs(case, torch.float16, requires_grad=False), 1.0)
        for kernel in ("forward", "query"):
            config = backend._config_for(kernel, problem)
            rows = backend._rows(problem, 0, config)
            forms.add((kernel, config, rows["TOKENS"], rows["PACK"], rows["ROWS"]))
        heads.add(backend._heads_at_a_time(problem))
    assert len(forms) == 2 * 3 and heads <= {1, 8}


def rows_of(pattern: sr.Pattern, case: Case, dtype=torch.float16, kernel="forward") -> dict:
    """How a program's rows are tokens and heads, for a case."""
    layout = pattern.layout(**case.heads, block_size=case.block_size)
    args = inputs(case, dtype, requires_grad=False)
    (part,) = backend._parts(Problem(layout, *args, 1.0), False)
    return backend._rows(part.problem, 0, backend._config_for(kernel, part.problem))


@pytest.mark.parametrize("kernel", ["forward", "query"])
@pytest.mark.parametrize(
    ("group", "block_size", "pack"),
    [
        *(
            (8, size, pack)
            for size, pack in ((16, 8), (32, 4), (48, 2), (64, 2), (128, 1), (192, 1))
        ),
        *((2, 16, 2), (6, 32, 2), (3, 64, 1), (1, 16, 1)),
    ],
)
def test_whole_tiles_of_a_group_fill_128_rows_and_lack_no_head(kernel, group, block_size, pack):
    case = Case(1, 2 * group, 2, 200, 200, 16, 16, block_size)
    rows = rows_of(sr.Causal(), case, kernel=kernel)
    tokens = 64 if block_size == 192 else -(-block_size // 16) * 16
    assert (rows["TOKENS"], rows["PACK"]) == (1 << (tokens - 1).bit_length(), pack)
    assert rows["programs"] == 2 * group // pack * -(-block_size // rows["TOKENS"])


def test_heads_with_tables_of_their_own_are_not_packed():
    case = Case(1, 8, 2, 200, 200, 16, 16, 64)
    assert rows_of(PATTERNS["blocks of each head"](case), case)["PACK"] == 1
    assert rows_of(sr.Causal(), case)["PACK"] == 2


def test_heads_in_turn_give_the_bits_of_all_at_once(launched, monkeypatch):
    case = Case(1, 2, 2, 40, 40, 16, 16)
    pattern = sr.LongNet((16, 64), (1, 2)) & sr.Causal()
    args = inputs(case, torch.float16)
    whole = attend(*args, pattern, block_size=16)
    grads = gradients(whole, args)
    monkeypatch.setattr(backend, "_LEAST_PROGRAMS", 0)
    launched.clear()
    parts = attend(*args, pattern, block_size=16)
    assert launched.count("forward_kernel") == 2 * 2  # passes, kv heads
    for a, b in zip((*parts, *gradients(parts, args)), (*whole, *grads), strict=True):
        assert torch.equal(a, b)


def test_a_group_is_shared_out_where_there_are_few_keys(monkeypatch):
    monkeypatch.setattr(backend, "processors", lambda device: 8)
    case = Case(1, 6, 1, 64, 64, 8, 8, 32)
    layout = sr.Causal().layout(**case.heads, block_size=32)
    args = inputs(case, torch.float32, requires_grad=False)
    (part,) = backend._parts(Problem(layout, *args, 1.0), False)
    assert backend._heads_at_a_time(part.problem) == 1
    assert_is_the_reference(sr.Causal(), case)


@first_fast("arrange", ["tokens before heads"], ["contiguous", "one head expanded"])
def test_tensor_descriptors_give_the_bits_of_pointers(arrange, monkeypatch):
    case = Case(2, 2, 2, 40, 40, 16, 16, 32, arrange=arrange)
    pattern = sr.Causal()
    args = inputs(case, torch.float32)

    def run(tma: bool) -> list[Tensor]:
        config = Config(32, 16, 4, 2, tma=tma)
        monkeypatch.setattr(backend, "config_for", lambda *rest: config)
        got = attend(*args, pattern, block_size=32)
        return [*got, *gradients(got, args)]

    used = []
    for name, of in (("matrix", operands.matrix), ("line", operands.line)):
        monkeypatch.setattr(operands, name, lambda *rest, of=of: used.append(of(*rest)) or used[-1])
    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)
    assert used and all(x is not None for x in used)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 2, 40, 24, dtype=torch.float16),  # not a power of 2
        torch.zeros(1, 2, 40, 64, dtype=torch.float16)[..., 1:33],  # not 16-byte aligned
        torch.zeros(1, 2, 40, 36, dtype=torch.float16)[..., :32],  # rows 72 bytes apart
        torch.zeros(2, 40, 3, 32).permute(0, 2, 1, 3)[:, :, ::3][:1].expand(1, 3, 14, 32)[:, :2],
        torch.zeros(1, 2, 1, 32).expand(1, 2, 40, 32),  # one token
    ],
    ids=["width", "base", "rows", "every third token", "one token"],
)
def test_what_is_no_matrix_of_tokens_has_no_descriptor(x):
    found = operands.matrix(x, 16)
    if found is None:
        return
    tiles, apart = found
    matrix = x.as_strided(tiles.shape, tiles.strides, x.storage_offset())
    for b, h in itertools.product(range(x.shape[0]), range(x.shape[1])):
        row, column = b * apart["batch"] + h * apart["head"], h * apart["side"]
        assert torch.equal(matrix[row : row + x.shape[2], column : column + 32], x[b, h])


# The walk


@settings(max_examples=25)
@given(cases(with_random=True, max_length=200), st.integers(1, 12), st.booleans())
def test_a_walk_visits_every_entry_once(case, limit, by_key):
    spec, scene = case
    layout = build(spec).layout(
        scene.q_len,
        scene.kv_len,
        num_heads=scene.num_heads,
        num_kv_heads=scene.num_kv_heads,
        q_start=scene.q_start,
        block_size=16,
    )
    for number in range(len(layout.passes)):
        w = triton_walk._walk(layout, number, by_key, limit)
        tables = w.units.shape[:2]
        for b, t in itertools.product(*(range(n) for n in tables)):
            head = t * layout.frame.num_heads // tables[1]
            _assert_walks_the_table(layout, number, by_key, limit, w, b, t, head)


def _assert_walks_the_table(layout, number, by_key, limit, w, b, t, head) -> None:
    p = layout.passes[number]
    row, key, bitmap, axis = layout.table(p, b, head)
    tile, other = (key, row) if by_key else (row, key)
    starts, stops = (p.query_start, p.query_stop) if by_key else (p.key_start, p.key_stop)
    first = [entry for entry, *_ in layout.visits(b, head)][number]
    expected = {
        (int(tile[e]), int(starts[axis, other[e]]), int(bitmap[e]), first + e)
        for e in range(len(row))
    }
    seen, slots, lengths = [], [], []
    for own, lower, masked, upper, slot in w.units[b, t].tolist():
        if own < 0:
            lengths.append(-1)
            continue
        lengths.append(upper - lower)
        assert lower <= masked <= upper and upper - lower <= limit
        if slot >= 0:
            slots.append((own, slot))
        for e in range(lower, upper):
            is_whole = w.tokens[b, t, e] == layout.block_size and w.bitmap[b, t, e] == -1
            assert is_whole == (e < masked)
            found = (own, *(int(x[b, t, e]) for x in (w.start, w.bitmap, w.entry)))
            seen.append(found)
            count = (stops - starts)[axis, other[found[3] - first]].clamp(min=0)
            assert w.tokens[b, t, e] == min(layout.block_size, -(-int(count) // p.step))
    assert len(seen) == len(set(seen)) and set(seen) == expected
    assert lengths == sorted(lengths, reverse=True)
    cuts = {own: range(begin, begin + n) for own, begin, n in w.cuts[b, t].tolist() if own >= 0}
    assert sorted(slots) == sorted((own, s) for own, run in cuts.items() for s in run)
    assert len({s for _, s in slots}) == len(slots) and all(s < w.slots for _, s in slots)


@pytest.mark.parametrize("kv_len", [1, 33, 65])
def test_gradients_of_one_query_read_no_key_past_the_last(kv_len):
    # Its walk is that of a whole page of queries, which see more keys.
    query = torch.randn(1, 2, 1, 16, requires_grad=True)
    stored = torch.full((2, 1, 2, 256, 16), math.nan)
    stored[..., :kv_len, :] = torch.randn(2, 1, 2, kv_len, 16)
    key, value = (x[..., :kv_len, :].requires_grad_() for x in stored)
    args, pattern = (query, key, value), sr.Causal()
    exact_args = [x.detach().double().requires_grad_() for x in args]
    exact = attend(*exact_args, pattern, backend="reference")
    assert_rounded(lambda: attend(*args, pattern, block_size=32), exact, args, exact_args)


def test_a_walk_over_selected_blocks_never_reads_a_value_from_the_device():
    with FakeTensorMode():  # raises on any read
        pattern = sr.SelectedBlocks(torch.randint(0, 9, (2, 4, 9, 3)), 16) & sr.Causal()
        frame = Frame.build(144, 144, 4, 4, None)
        layout = build_layout(pattern, frame, 16, torch.device("cpu"))
        for by_key in (False, True):
            for processors in (1, 10_000):
                w = triton_walk.walk(layout, 0, by_key=by_key, programs=2, processors=processors)
                assert w.units.shape[:2] == (2, 4)


# Choosing


def test_configs_fit_their_tiles():
    for kernel, width, tile, dtype in itertools.product(
        configs.KERNELS, (16, 64, 80, 128, 256), range(16, 257, 16), (2, 4)
    ):
        like = torch.zeros(1, dtype=torch.float16 if dtype == 2 else torch.float32)
        for config in configs.candidates(kernel, like, width, tile):
            for tokens in (config.rows, config.streamed):
                assert tokens >= 16 and tokens & (tokens - 1) == 0
                assert -(-tile // tokens) * tokens < 2 * max(16, tile)
            assert config.warps in (1, 2, 4, 8) and config.stages >= 1


@pytest.mark.skipif(ON_GPU, reason="it is about the interpreter")
def test_measured_choices_are_kept_and_used(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSERING_CACHE", str(tmp_path))
    configs.measured.forget()
    args = inputs(Case(1, 1, 1, 40, 40, 16, 16), torch.float32, requires_grad=False)
    expected = configs.default("forward", args[0].dtype, args[0].device, 16, 32)
    assert configs.config_for("forward", args[0], 16, 32) == expected
    assert configs.measured.block_size(sr.Causal().expression, args[0]) is None
    own = expected._replace(streamed=16)
    key = configs.config_key("forward", args[0].dtype, 16, 32)
    configs.measured.keep({key: own}, {}, args[0])
    path = configs.measured.keep({}, {sr.Causal().expression: 48}, args[0])
    assert path.parent == tmp_path
    assert configs.config_for("forward", args[0], 16, 32) == own
    assert configs.measured.block_size(sr.Causal().expression, args[0]) == 48
    sizes = []
    note = triton_walk._walk
    monkeypatch.setattr(
        triton_walk, "_walk", lambda layout, *r: sizes.append(layout.block_size) or note(layout, *r)
    )
    attend(*args, sr.Causal())
    attend(*args, sr.Full())
    attend(*args, sr.Causal(), block_size=16)
    assert sizes == [48, 64, 16]
    configs.measured.forget()


@pytest.mark.skipif(ON_GPU, reason="it is about the interpreter")
@pytest.mark.slow
def test_tune_keeps_the_fastest_that_is_right(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSERING_CACHE", str(tmp_path))
    configs.measured.forget()
    good = Config(32, 32, 4, 2)
    slow, wrong, broken = (good._replace(stages=n) for n in (3, 4, 5))
    monkeypatch.setattr(configs, "candidates", lambda *rest: [slow, good, wrong, broken])
    forward = backend._forward_pass

    def sabotaged(part, number, out, lse) -> None:
        stages = backend._config_for("forward", part.problem).stages
        if stages == broken.stages:
            raise RuntimeError("out of shared memory")
        forward(part, number, out, lse)
        if stages == wrong.stages:
            out.mul_(1.01)

    seconds = {slow: 2.0, good: 1.0}
    monkeypatch.setattr(backend, "_forward_pass", sabotaged)
    monkeypatch.setattr(
        tune._Turns,
        "milliseconds",
        lambda self, title, runs: {x: seconds.get(x, 3.0) for x in runs},
    )
    said = []
    path = tune.tune(
        "triton", sr.Causal(), tokens=40, num_heads=2, num_kv_heads=1, head_dim=16,
        dtype=torch.float32, block_sizes=(32, 48), say=said.append,
    )  # fmt: skip
    assert path.parent == tmp_path
    like = torch.zeros(1, 1, 1, 16)
    assert configs.config_for("forward", like, 16, 32, 64) == good  # two heads share a program
    assert configs.config_for("forward", like, 16, 32).rows == 32  # not for single heads
    assert configs.measured.block_size(sr.Causal().expression, like) in (32, 48)
    assert any("its results differ by 0.01" in line for line in said)
    assert any("RuntimeError: out of shared memory" in line for line in said)
    configs.measured.forget()


@pytest.mark.skipif(ON_GPU, reason="it is about the interpreter")
def test_reasons_name_what_is_wrong():
    half, double = torch.zeros(1, 1, 4, 16).bfloat16(), torch.zeros(1, 1, 4, 16).double()
    assert backend.reasons() == []
    assert backend.reasons(half.float(), half.float(), half.float()) == []
    for bad, told in ((half, "bfloat16"), (double, "float64"), (torch.zeros(1, 1, 4, 513), "512")):
        assert any(told in reason for reason in backend.reasons(bad))
        with pytest.raises(NotImplementedError, match="triton"):
            sr.attention(bad, bad, bad, sr.Full(), backend="triton")


@pytest.mark.skipif(ON_GPU, reason="it is about the interpreter")
def test_without_an_interpreter_a_gpu_is_missing(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert any("needs a GPU" in reason for reason in backend.reasons())
    assert any("cuda tensors" in reason for reason in backend.reasons(torch.zeros(1, 1, 4, 16)))


@pytest.mark.slow
def test_offsets_past_2_to_the_31_elements():
    length, width = (1 << 24) + 100, 128  # most of these 4 GB are never touched
    case = Case(1, 1, 1, 4, 4, width, width)
    few = inputs(case, torch.float16, requires_grad=False)
    key, value = (torch.zeros(1, 1, length, width, dtype=torch.float16) for _ in range(2))
    key[:, :, -4:], value[:, :, -4:] = few[1], few[2]
    assert key.numel() > 1 << 31
    pattern = sr.SlidingWindow(3)
    out, lse = attend(few[0], key, value, pattern, block_size=16)
    args = [x.double() for x in (few[0], key[:, :, -7:], value[:, :, -7:])]
    expected = sr.attention(*args, pattern, backend="reference", return_lse=True)
    assert (out - expected[0]).abs().max() < 2e-3
    assert (lse - expected[1]).abs().max() < 1e-4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_cache_is_copied_without_the_kernels_that_it_launched(copied):
    x = placed(torch.randn(3, 1, 1, 6, 8))
    first = sr.KVCache(sr.Causal(), 1, 1, 8)
    for start in (0, 2):
        first.attend(*x[..., start : start + 2, :], backend="triton")
    out = copied(first).attend(*x[..., 4:, :], backend="triton")
    whole = sr.attention(*x, sr.Causal(), backend="reference")
    assert (out - whole[:, :, 4:]).abs().max() < 1e-6
