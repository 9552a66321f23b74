"""Lists of single keys in the CPU kernel, whose neighbours are merged where that is faster.

Neighbouring lists that share nearly all keys are merged, in a forward pass from 384 slots on; lists
without common keys are not. Both ways are compared with float64, for each shape and option.
"""

import pytest
import torch
from exactness import assert_is_exact
from helpers.thinned import thinned
from oracles.attention_oracle import Case, inputs
from torch import Tensor

import sparsering as sr

SHAPES = {
    "one head": Case(1, 1, 1, 150, 150, 64, 64),
    "grouped heads": Case(2, 6, 2, 70, 70, 32, 32),
    "16 heads of a list": Case(1, 16, 1, 40, 90, 128, 128),
    "more heads than are merged": Case(1, 70, 1, 20, 40, 8, 8),
    "odd widths": Case(1, 3, 1, 75, 75, 17, 5, arrange="tokens before heads"),
    "latents": Case(1, 4, 1, 40, 40, 576, 512),
    "from the middle": Case(2, 4, 2, 37, 64, 16, 16, 32, 20, "every other of a larger tensor"),
    "one query": Case(2, 4, 2, 1, 77, 48, 48),
}
OVERLAPS = ("none", "most", "some")


def lists(case: Case, overlap: str, slots: int = 400, tables: int = 1) -> Tensor:
    """Draws lists with repeats and -1 in any order; some neighbours share keys, or most, or all."""
    generator = torch.Generator().manual_seed(7)
    rows, keys = case.last_position + 1, case.kv_len
    row, slot = torch.arange(rows)[:, None], torch.arange(slots)
    listed = (row - slot * 35 // slots * 2) % keys  # one new key in each row
    if overlap == "none":
        listed = (row % 16 + slot * 16).where(slot * 16 + 16 <= keys, -1)
    listed = listed.expand(case.batch, tables, -1, -1).clone()
    if overlap == "some":  # runs of three rows between other lists, one of them empty
        other = torch.randint(-1, keys, listed.shape, generator=generator)
        listed[:, :, ::4] = other[:, :, ::4]
        listed[:, :, 8::16] = -1
    order = torch.rand(listed.shape, generator=generator).argsort(-1)
    return listed.gather(-1, order).masked_fill(
        torch.rand(listed.shape, generator=generator) < 0.1, -1
    )


@pytest.mark.parametrize(("shape", "overlap"), thinned(2, SHAPES, OVERLAPS))
def test_every_shape_and_overlap(shape, overlap):
    case = SHAPES[shape]
    for tables in {1, case.num_kv_heads, case.num_heads}:
        for slots in (70, 400):
            listed = lists(case, overlap, slots, tables)
            assert_is_exact(sr.SelectedBlocks(listed, 1), case)


OPTIONS = {
    "softcap": {"softcap": 2.0},
    "sink": {"sink": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "distances": {"distance_bias": torch.linspace(-2, 2, 4 * 41).view(4, 41)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
}
OPTIONS["all"] = {name: x for options in OPTIONS.values() for name, x in options.items()}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("beside", [None, sr.SlidingWindow(5, 2)])
def test_every_option(options, overlap, beside):
    for case in (Case(2, 4, 1, 50, 50, 16, 24), Case(1, 4, 4, 50, 50, 16, 16)):
        listed = lists(case, overlap, tables=case.num_kv_heads)
        pattern = sr.SelectedBlocks(listed, 1)
        pattern = (pattern if beside is None else pattern | beside) & sr.Causal()
        extras = dict(OPTIONS[options])
        assert_is_exact(pattern, case, **extras)
        if beside is None and "dropout_p" not in extras:
            bias = torch.randn(listed.shape, generator=torch.Generator().manual_seed(5))
            assert_is_exact(pattern, case, slot_bias=bias, **extras)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_half_precision(dtype, overlap):
    for width in (20, 64, 128):
        case = Case(1, 2, 1, 60, 60, width, width)
        assert_is_exact(sr.SelectedBlocks(lists(case, overlap), 1), case, dtype=dtype)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_threads_do_not_change_what_a_query_gets(threads, overlap):
    case = Case(1, 2, 1, 150, 150, 64, 64)
    pattern, args, results = sr.SelectedBlocks(lists(case, overlap), 1), inputs(case), []
    args = [x.detach().float().requires_grad_() for x in args]
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        out = sr.attention(*args, pattern, backend="cpu")
        results.append((out, *torch.autograd.grad(out.square().sum(), args[:1])))
    for again in results[1:]:
        assert all(map(torch.equal, again, results[0]))


@pytest.mark.parametrize("spoiled", ["query", "key", "value", "gradient", "a number of a key"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_reaches_no_neighbour(spoiled, number):
    """Query 40 alone lists key 3; all others list nearly the same keys, without it."""
    case = Case(1, 2, 1, 64, 64, 16, 16)
    listed = 20 + (torch.arange(64)[:, None] // 8 + torch.arange(400) % 24) % 40
    listed[40, 5] = 3
    pattern, clean = sr.SelectedBlocks(listed, 1), [x.detach().float() for x in inputs(case)]

    def results(args: list[Tensor], sent: Tensor) -> list[Tensor]:
        args = [x.clone().requires_grad_() for x in args]
        out = sr.attention(*args, pattern, backend="cpu")
        return [out, *torch.autograd.grad(out, args, sent)]

    clean[0][:, :, 40, 0] = 1.0  # so that a key's -inf is a score of -inf, and lse stays finite
    sent = torch.ones(1, 2, 64, 16)
    expected = results(clean, sent)
    bad, bad_sent = [x.clone() for x in clean], sent.clone()
    place = {
        "query": (bad[0], 40),
        "key": (bad[1], 3),
        "value": (bad[2], 3),
        "gradient": (bad_sent, 40),
    }
    if spoiled == "a number of a key":
        bad[1][:, :, 3, 0] = number
    else:
        tensor, row = place[spoiled]
        tensor[:, :, row] = number
    got = results(bad, bad_sent)
    others = torch.arange(64) != 40  # rows of query 40, and of the keys that it lists, are spoiled
    unseen = torch.ones(64, dtype=torch.bool).index_fill(0, listed[40], False)
    for a, b, rows in zip(got, expected, (others, others, unseen, unseen), strict=True):
        torch.testing.assert_close(a[:, :, rows], b[:, :, rows], rtol=1e-5, atol=1e-5)


def test_repeats_in_a_few_slots_of_many_keys():
    """So few slots of so many keys are sorted; longer lists mark a bit for each key."""
    keys, queries = 6000, 3
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, queries, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, keys, 16, generator=generator)
    listed = torch.tensor([[5, 5], [4000, 17], [17, 17]])
    pattern = sr.SelectedBlocks(listed[None, None], 1, first_row=keys - queries)
    out = sr.attention(query, key, value, pattern, backend="cpu")
    exact = [x.double() for x in (query, key, value)]
    torch.testing.assert_close(
        out, sr.attention(*exact, pattern, backend="reference").float(), rtol=0, atol=2e-6
    )
    torch.testing.assert_close(out[:, :, 2], value[:, :, 17])
    # a repeat beside another key would weigh twice
    listed = torch.tensor([[5, 9, 5], [4000, 17, 4000], [17, 3, 3]])
    key, value = (torch.cat((x, x[:, :, :1000]), 2) for x in (key, value))
    pattern = sr.SelectedBlocks(listed[None, None], 1, first_row=7000 - queries)
    out = sr.attention(query, key, value, pattern, backend="cpu")
    exact = [x.double() for x in (query, key, value)]
    torch.testing.assert_close(
        out, sr.attention(*exact, pattern, backend="reference").float(), rtol=0, atol=2e-6
    )
