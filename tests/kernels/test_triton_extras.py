"""Extras of the triton backend against their formulas, where `device_runs` says."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from helpers.device_runs import DEVICE, checked, placed
from helpers.thinned import slow_except
from oracles.attention_oracle import PATTERNS, Case, assert_close, dense_attention, inputs
from torch import Tensor

import sparsering as sr
from sparsering.ground.dropout import batch_seeds, kept_pairs
from sparsering.kernels.problem import Problem
from sparsering.kernels.triton import call as backend
from sparsering.kernels.triton import extra_arguments
from sparsering.kernels.triton.configs import Config


def expected_of(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 by the definition of each extra, every pass a copy of all the keys."""
    query, key, value = (x.double() for x in (problem.query, problem.key, problem.value))
    batch, heads, q_len, _ = query.shape
    shape = batch, heads, q_len, key.shape[2]
    there = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool)
    if problem.key_mask is not None:
        there = problem.key_mask[:, None, None]
        key, value = (torch.where(there.mT, x, 0.0) for x in (key, value))
    numbers = problem.layout.entry_of_pairs(batch)
    pairs, biases, kept = [], [], []
    for number, p in zip(numbers, problem.layout.passes, strict=True):
        q_position, k_position, stream = positions(problem.layout, p)
        of_pass = torch.zeros(shape, dtype=torch.float64)
        if (table := problem.distance_bias) is not None:
            reach = table.shape[2] // 2
            distance = (k_position[:, None] - q_position[:, :, None]).clamp(-reach, reach)
            distance = (distance + reach).flatten(1).expand(batch, -1, -1)
            of_pass = of_pass + table.double().gather(2, distance).view(shape)
        if (bias := problem.block_bias) is not None and bias.numel():
            of_entry = bias.double().gather(2, number.clamp(min=0).flatten(2))
            of_pass = of_pass + of_entry.view(shape)
        biases.append(of_pass)
        pairs.append(((number >= 0) & there).expand(shape))
        if problem.dropout_p is not None:
            places = (
                torch.arange(heads)[:, None, None],
                q_position[..., None],
                k_position[:, None],
            )
            seed = problem.dropout_seed[:, stream][..., None]
            kept.append(kept_pairs(seed, problem.dropout_p, *places, p.branch))
    return dense_attention(
        query,
        *(torch.cat([x] * len(numbers), 2) for x in (key, value)),
        torch.cat(pairs, -1),
        scale=problem.scale,
        softcap=problem.softcap,
        bias=torch.cat(biases, -1),
        sink=problem.sink,
        factor=torch.cat(kept, -1).double() / (1 - problem.dropout_p) if kept else None,
    )


def positions(layout, p) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of queries [H, Nq] and keys [H, Nk], and streams [H, Nq], of a pass."""
    frame = layout.frame
    found = []
    for length, start, stop, origin in (
        (frame.q_len, p.query_start, p.query_stop, p.query_origin),
        (frame.kv_len, p.key_start, p.key_stop, p.key_origin),
        (frame.q_len, p.query_start, p.query_stop, p.stream),
    ):
        of_heads = torch.zeros(frame.num_heads, length, dtype=torch.int64)
        for h, tile in itertools.product(range(frame.num_heads), range(start.shape[1])):
            axis = h * len(start) // frame.num_heads
            tokens = range(int(start[axis, tile]), int(stop[axis, tile]), p.step)
            for i, token in enumerate(tokens[: layout.block_size]):
                if origin is None:
                    of_heads[h, token] = token + (frame.q_start if not found else 0)
                else:
                    of_heads[h, token] = origin[axis, tile] + i * p.step * (len(found) < 2)
        found.append(of_heads)
    return found[0], found[1], found[2] if p.stream is not None else torch.zeros_like(found[2])


def extras_of(names: str, case: Case, layout, reach: int = 7) -> dict[str, object]:
    """Some extras for a case, as the fields of a `Problem`."""
    batch, heads = case.batch, case.num_heads
    masked = torch.rand(batch, case.kv_len) < 0.8
    masked[0] &= torch.arange(case.kv_len) > 15  # rows that lose all their keys
    every = {
        "softcap": 1.5,
        "distance_bias": torch.randn(batch, heads, 2 * reach + 1),
        "block_bias": torch.randn(batch, heads, layout.num_blocks),
        "sink": torch.randn(batch, heads, case.q_len),
        "dropout_p": 0.3,
        "dropout_seed": batch_seeds(torch.tensor(-7), batch)[:, None],
        "key_mask": masked,
    }
    return {name: x for name, x in every.items() if name.split("_")[0] in names}


def assert_follows_the_formulas(
    pattern: sr.Pattern | None, case: Case, given, *, layout=None, dtype=torch.float32, bound=4e-6
) -> None:
    """Forward and every gradient; `given`: the extras, or which. Masked keys hold no numbers."""
    layout = layout or pattern.layout(**case.heads, block_size=case.block_size)
    given = extras_of(given, case, layout) if isinstance(given, str) else given
    args = inputs(case, dtype, requires_grad=False)
    if (mask := given.get("key_mask")) is not None:
        for x, bad in zip(args[1:], (torch.nan, torch.inf), strict=True):
            x.masked_fill_(~mask[:, None, :, None], bad)
    problem = Problem(layout, *args, 0.3 * case.head_dim**-0.25, **given)
    names = ["query", "key", "value", "block_bias", "distance_bias", "sink"]
    names = [name for name in names if getattr(problem, name) is not None]
    leaves = {name: getattr(problem, name).double().requires_grad_() for name in names}
    exact = expected_of(problem._replace(**leaves))
    loose = bound / 2 if dtype == torch.float32 else bound
    grad_out = torch.randn(exact[0].shape).to(dtype)
    grad_lse = torch.randn(exact[1].shape)
    grads = torch.autograd.grad(
        exact, list(leaves.values()), (grad_out.double(), grad_lse.double()), allow_unused=True
    )
    there = on_device(problem)

    def run() -> list[Tensor]:
        out, lse = backend.forward(there)
        own = backend.backward(there, out, lse, placed(grad_out), placed(grad_lse))._asdict()
        got = [own.pop(name) for name in names]
        assert own.pop("captured") == ()  # no function of scores, whose tensors these would be
        assert all(x is None for x in own.values())
        return [x.cpu() for x in (out, lse, *got)]

    def check(found: Sequence[Tensor]) -> None:
        out, lse, *got = found
        assert_close(out, exact[0].detach().to(dtype), loose, "out")
        assert_close(lse, exact[1].detach().float(), loose, "lse")
        for name, ours, true in zip(names, got, grads, strict=True):
            like = getattr(problem, name)
            true = torch.zeros_like(like) if true is None else true.to(like.dtype)
            assert_close(ours, true, bound, f"gradient of {name}")

    checked(run, check)


def on_device(problem: Problem) -> Problem:
    """The problem with its layout and tensors on the device of the tests."""
    problem = Problem(*map(placed, problem))
    passes = tuple(p.to(DEVICE) for p in problem.layout.passes)
    return problem._replace(layout=replace(problem.layout, passes=passes))


def mixture(case: Case) -> sr.Pattern:
    return sr.LongNet((16, 64), (1, 2)) & sr.Causal()


SMALL = Case(1, 2, 1, 20, 30, 8, 12)
EVERY = "softcap distance block sink dropout key"


@pytest.mark.parametrize("name", EVERY.split())
def test_an_extra_alone_follows_its_formula(name):
    assert_follows_the_formulas(mixture(SMALL), SMALL, name)


SOME = ["blocks of each head", "dilated, offset of each head"]


@pytest.mark.parametrize(
    "name", slow_except(SOME, [*SOME, "mixture with overlap", "dilated window", "nothing"])
)
def test_all_extras_together_follow_their_formulas(name):
    case = Case(1, 2, 1, 18, 30, 24, 8, q_start=5)
    assert_follows_the_formulas(PATTERNS[name](case), case, EVERY)


@pytest.mark.usefixtures("cut_tiles")
def test_all_extras_of_cut_tiles_follow_their_formulas(launched):
    case = Case(1, 2, 1, 10, 40, 8, 12)
    pattern = sr.Causal() + sr.SlidingWindow(5, 3)
    assert_follows_the_formulas(pattern, case, EVERY)
    assert {"merge_kernel", "sum_kernel"} <= set(launched)


@pytest.mark.parametrize("tma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_extras_of_steps_over_part_of_a_tile_follow_their_formulas(tma, monkeypatch):
    case = Case(1, 1, 1, 30, 60, 16, 16, 48)
    for rows, streamed in ((32, 32), (64, 16)):
        config = Config(rows, 2 * streamed, 4, 2, tma)  # halved where pairs have biases
        monkeypatch.setattr(backend, "config_for", lambda *rest, config=config: config)
        assert_follows_the_formulas(sr.SlidingWindow(30, 9), case, EVERY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_extras_of_wide_grouped_heads_follow_their_formulas(dtype):
    case = Case(1, 2, 1, 20, 36, 320, 512)
    bound = 4e-6 if dtype == torch.float32 else 4e-3
    assert_follows_the_formulas(sr.Causal(), case, EVERY, dtype=dtype, bound=bound)


def test_few_tokens_of_a_packed_group_have_extras():
    case = Case(1, 5, 1, 3, 40, 8, 8, 32)
    assert_follows_the_formulas(sr.Causal(), case, EVERY)


@pytest.mark.parametrize("block_size", slow_except([64], [16, 32, 64]))
def test_all_extras_of_a_packed_group_follow_their_formulas(block_size, monkeypatch):
    config, rows, packs = Config(128, 32, 4, 2), backend._rows, set()
    monkeypatch.setattr(backend, "config_for", lambda *rest: config)
    monkeypatch.setattr(backend, "_rows", lambda *x: packs.add((y := rows(*x))["PACK"]) or y)
    case = Case(1, 4, 1, 70, 72, 8, 12, block_size)
    assert_follows_the_formulas(sr.SlidingWindow(60, 5), case, EVERY)
    assert packs == {min(4, 128 // block_size)}


def test_extras_of_a_packed_group_in_half_precision_follow_their_formulas():
    case = Case(1, 4, 1, 40, 40, 16, 16, 32)
    assert_follows_the_formulas(sr.Causal(), case, EVERY, dtype=torch.float16, bound=4e-3)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.usefixtures("bfloat16_products")
def test_extras_in_half_precision_follow_their_formulas(dtype, bound):
    case = replace(SMALL, head_dim=16)
    assert_follows_the_formulas(mixture(case), case, EVERY, dtype=dtype, bound=bound)


def test_rows_without_keys_have_their_sink_or_nothing():
    case = Case(2, 2, 1, 20, 20, 8, 8, 32, q_start=-10)
    layout = sr.Causal().layout(**case.heads, block_size=32)
    sink = torch.randn(2, 2, 1)
    sink[0, 0] = -torch.inf
    for some in (sink, torch.full((1, 1, 1), -torch.inf).expand(2, 2, 1)):
        assert_follows_the_formulas(None, case, {"sink": some}, layout=layout)
    nothing = torch.zeros(2, 20, dtype=torch.bool)
    assert_follows_the_formulas(None, case, {"key_mask": nothing}, layout=layout)
    assert_follows_the_formulas(None, case, {"key_mask": nothing, "sink": sink}, layout=layout)
    assert_follows_the_formulas(None, case, {"key_mask": nothing[:1]}, layout=layout)


@pytest.mark.parametrize("reach", slow_except([20], [20, 0, 1, 300]))
def test_a_table_of_any_reach_that_heads_share(reach):
    case = Case(2, 2, 1, 20, 40, 8, 8, 32)
    table = torch.randn(1, 1, 2 * reach + 1).expand(2, 2, -1)
    given = {"distance_bias": table}
    assert_follows_the_formulas(sr.Full(), case, given)


def test_a_distance_of_minus_inf_is_no_pair():
    case = Case(1, 2, 2, 20, 20, 8, 8)
    table = torch.zeros(1, 2, 11)
    table[:, 0, :3] = -torch.inf
    table[:, 1] = -torch.inf
    assert_follows_the_formulas(sr.Full(), case, {"distance_bias": table})


@pytest.mark.parametrize("far", [1 << 33, pytest.param(0, marks=pytest.mark.slow)])
def test_positions_are_those_that_tiles_tell(far):
    """Tiles lie anywhere in memory, as in a ring or among documents; each has a stream."""
    case = Case(2, 2, 2, 20, 30, 8, 8)
    layout = mixture(case).layout(**case.heads, block_size=16)
    generator = torch.Generator().manual_seed(0)

    def moved(start: Tensor, most: int) -> Tensor:
        return torch.randint(0, most, start.shape, generator=generator)

    passes = [
        replace(
            p,
            query_origin=moved(p.query_start, 60) + far,
            key_origin=moved(p.key_start, 60) + (far and far + 20),
            stream=moved(p.query_start, 3),
        )
        for p in layout.passes
    ]
    layout = replace(layout, passes=tuple(passes))
    given = extras_of("softcap distance dropout", case, layout, reach=30)
    given["dropout_seed"] = batch_seeds(torch.tensor(1), 6).view(2, 3)
    assert_follows_the_formulas(None, case, given, layout=layout)


def test_distances_past_32_bits_have_the_ends_of_a_table():
    case = Case(1, 1, 1, 20, 20, 8, 8, q_start=(1 << 33) - 10)
    assert_follows_the_formulas(sr.Full(), case, "distance dropout")


def test_heads_that_share_memory_for_diagonals_get_the_bits_of_all_at_once(launched, monkeypatch):
    case = Case(1, 2, 2, 20, 30, 8, 8)
    layout = mixture(case).layout(**case.heads, block_size=16)
    args = inputs(case, torch.float32, requires_grad=False)
    problem = on_device(Problem(layout, *args, 1.0, **extras_of(EVERY, case, layout)))
    out, lse = backend.forward(problem)

    def run() -> list[Tensor]:
        *grads, captured = backend.backward(problem, out, lse, out.cos(), lse.cos())
        assert captured == () and len(grads) == 6
        return grads

    whole = run()
    monkeypatch.setattr(extra_arguments, "_DIAGONAL_BYTES", 0)
    launched.clear()
    parts = run()
    assert launched.count("query_kernel") == 2 * 2
    for a, b in zip(parts, whole, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", slow_except([1e-3, 40.0], [1e-3, 40.0, 0.1, 2.0]))
def test_a_capped_score_is_right_to_its_last_bits(size):
    key = torch.linspace(-1, 1, 400)[None, None, :, None]
    problem = Problem(
        sr.SlidingWindow(0).layout(400, 400, block_size=64),
        *(torch.ones_like(key), key, key), size, softcap=5.0,
    )  # fmt: skip
    expected = 5.0 * torch.tanh(torch.tensor(size).double() * key.double() / 5.0)[..., 0]
    _, lse = backend.forward(on_device(problem))  # of one key: its score
    assert ((lse.cpu() - expected).abs() <= 4e-7 * expected.abs() + 1e-30).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("lengths", "parents"),
    [
        (((2, 1), (2, 1)), ((-1, 0), (-1, 0))),
        (((2, 1), (1, 2)), ((-1, 0), (-1, 0))),
        (((1, 1, 1), (1, 1, 1)), ((-1, 0, 0), (-1, 0, 1))),
        (((0,), (0,)), ((-1,), (-1,))),
    ],
)
def test_entries_that_share_a_table_have_depths_of_their_own(lengths, parents, biased):
    tree = sr.Tree(lengths, parents, sr.Causal())
    tokens = sum(lengths[0])
    args = inputs(Case(2, 2, 2, tokens, tokens, 16, 16), torch.float32, True)
    table = torch.linspace(-1, 1, 5)[None] if biased else None
    found = [
        sr.attention(*args, tree, backend=name, distance_bias=table, return_lse=True)
        for name in ("triton", "reference")
    ]
    for got, exact in zip(*found, strict=True):
        assert_close(got, exact, 3e-6)
    weight = torch.randn(2, 2, tokens, 16, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((out * weight).sum(), args) for out, _ in found]
    for got, exact in zip(*grads, strict=True):
        assert_close(got, exact, 3e-6)
