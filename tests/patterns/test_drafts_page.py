"""The recipes of docs/drafts.md have the pairs of their masks, whose definitions are loops here."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.pages import ROOT, blocks
from helpers.ring_workers import workers_of
from oracles.attention_oracle import assert_close, attend_by_rows, dense_attention
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import sparsering as sr
from sparsering.distributed import ring_attention, shard, simulate_ring, unshard

PAGE = blocks((ROOT / "docs" / "drafts.md").read_text(encoding="utf-8"))
NAMES = ("eagle3", "sampled", "p_eagle", "dflash")
SIZE, STEP = 3, 2


def recipes() -> dict[str, Callable[..., Any]]:
    """The functions of the page, without the calls behind them."""
    names: dict[str, Any] = {"sr": sr, "torch": torch}
    for block in PAGE:
        for part in block.code.split("\n\n\n"):
            if part.startswith("def ") and part[4:].partition("(")[0] in NAMES:
                exec(part, names)
    return {name: names[name] for name in NAMES}


RECIPES = recipes()


def documents_of(lengths: list[int]) -> list[int]:
    """The document of each token."""
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def eagle3_pairs(lengths: list[int], n: int, step: int) -> Tensor:
    """Whether the query of a step sees a key of any step."""
    document = documents_of(lengths)
    pairs = torch.zeros(n, (step + 1) * n, dtype=torch.bool)
    for q in range(n):
        for k in range((step + 1) * n):
            if k < n:
                pairs[q, k] = k <= q and document[k] == document[q]
            else:
                pairs[q, k] = k % n == q
    return pairs


def p_eagle_pairs(lengths: list[int], n: int, anchors: list[int], depths: list[int]) -> Tensor:
    """Whether an element sees another; those with anchor n are padding."""
    document = documents_of(lengths)
    elements = list(zip(anchors, depths, strict=True))
    pairs = torch.eye(len(elements), dtype=torch.bool)
    for q, (anchor, depth) in enumerate(elements):
        for k, (other, above) in enumerate(elements):
            if anchor < n and other < n and document[anchor] == document[other]:
                context = above == 0 and other <= anchor
                pairs[q, k] = context or (other == anchor and above <= depth)
    return pairs


def dflash_pairs(lengths: list[int], n: int, anchors: list[int], size: int) -> Tensor:
    """Whether a token of a block sees a token of the row, or of a block."""
    document = documents_of(lengths)
    tokens = len(anchors) * size
    pairs = torch.zeros(tokens, n + tokens, dtype=torch.bool)
    for q in range(tokens):
        anchor = anchors[q // size]
        for k in range(n + tokens):
            if k < n:
                pairs[q, k] = anchor < n and k < anchor and document[k] == document[anchor]
            else:
                pairs[q, k] = (k - n) // size == q // size
    return pairs


def drawn_lengths(draw: random.Random, n: int) -> list[int]:
    """Three documents of n tokens; some may be empty."""
    first, second = sorted(draw.randint(0, n) for _ in range(2))
    lengths = [first, second - first, n - second]
    return [x for x in lengths if x] + [0] * lengths.count(0)


def drawn_elements(draw: random.Random, n: int, total: int) -> tuple[list[int], list[int]]:
    """Elements of random chains over four depths, with padding up to `total`."""
    kept, anchors, depths = list(range(n)), [], []
    for depth in range(4):
        anchors += kept
        depths += [depth] * len(kept)
        kept = sorted(draw.sample(kept, draw.randint(0, len(kept) // 2)))
    padding = total - len(anchors)
    return anchors + [n] * padding, depths + [3] * padding


def check(pattern: sr.Pattern, pairs: list[Tensor], **options: Any) -> None:
    """Checks the pairs [queries, keys] of each batch entry, and rows of attention."""
    expected = torch.stack(pairs)
    q_len, kv_len = expected.shape[1:]
    dense = pattern.to_dense(q_len, kv_len, **options)
    dense = dense if dense.dim() == 4 else dense[None]
    assert dense[:, 0].expand_as(expected).equal(expected)
    query = torch.randn(len(pairs), 2, q_len, 8, dtype=torch.float64)
    key, value = torch.randn(2, len(pairs), 2, kv_len, 8, dtype=torch.float64)
    out = sr.attention(query, key, value, pattern, **options)
    counts = expected[:, None].expand(-1, 2, -1, -1).int()
    assert_close(out, attend_by_rows(query, key, value, counts)[0], 1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_eagle3_has_the_pairs_of_its_steps(seed):
    draw = random.Random(seed)
    n = draw.randint(1, 12)
    rows = [drawn_lengths(draw, n) for _ in range(2)]
    for step in range(3):
        expected = [eagle3_pairs(lengths, n, step) for lengths in rows]
        check(RECIPES["eagle3"](torch.tensor(rows), n, step), expected, q_start=0)
        check(RECIPES["eagle3"](torch.tensor(rows[0]), n, step), expected[:1], q_start=0)


@pytest.mark.parametrize("seed", range(12))
def test_p_eagle_has_the_pairs_of_its_elements(seed):
    draw = random.Random(seed)
    n = draw.randint(1, 12)
    rows = [drawn_lengths(draw, n) for _ in range(2)]
    elements = [drawn_elements(draw, n, 2 * n + 3) for _ in rows]
    expected = [p_eagle_pairs(x, n, *y) for x, y in zip(rows, elements, strict=True)]
    anchors, depths = (torch.tensor(x) for x in zip(*elements, strict=True))
    check(RECIPES["p_eagle"](torch.tensor(rows), n, anchors, depths), expected)
    one = RECIPES["p_eagle"](torch.tensor(rows[0]), n, anchors[0], depths[0])
    check(one, expected[:1])


def test_sampled_elements_hang_below_one_another():
    anchors, depths = RECIPES["sampled"](50, 0.6, 5)
    assert depths.bincount().tolist() == [50, 30, 18, 10, 6]
    chains = [set(anchors[depths == depth].tolist()) for depth in range(5)]
    assert all(deep < shallow for shallow, deep in pairwise(chains))
    pattern = RECIPES["p_eagle"](torch.tensor([20, 30]), 50, anchors, depths)
    check(pattern, [p_eagle_pairs([20, 30], 50, anchors.tolist(), depths.tolist())])
    assert pattern.depths_of(torch.arange(len(anchors)))[0].equal(
        anchors + depths - 20 * (anchors >= 20)
    )


@pytest.mark.parametrize("seed", range(12))
def test_dflash_has_the_pairs_of_its_blocks(seed):
    draw = random.Random(seed)
    n = draw.randint(1, 14)
    rows = [drawn_lengths(draw, n) for _ in range(2)]
    anchors = [[draw.randint(0, n) for _ in range(4)] for _ in rows]
    expected = [dflash_pairs(x, n, y, SIZE) for x, y in zip(rows, anchors, strict=True)]
    check(RECIPES["dflash"](torch.tensor(rows), n, torch.tensor(anchors), SIZE), expected)
    one = RECIPES["dflash"](torch.tensor(rows[0]), n, torch.tensor(anchors[0]), SIZE)
    check(one, expected[:1])


def calls(n: int, most: int) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]]:
    """For each recipe: a call, and a function that draws its tensors and its pairs."""

    def eagle3(x: tuple[Tensor, ...], lengths: Tensor) -> Tensor:
        return sr.attention(*x, RECIPES["eagle3"](lengths, n, STEP), q_start=0)

    def p_eagle(x: tuple[Tensor, ...], lengths: Tensor, *elements: Tensor) -> Tensor:
        return sr.attention(*x, RECIPES["p_eagle"](lengths, n, *elements))

    def dflash(x: tuple[Tensor, ...], lengths: Tensor, anchors: Tensor) -> Tensor:
        return sr.attention(*x, RECIPES["dflash"](lengths, n, anchors, SIZE))

    def draw_eagle3(draw: random.Random, lengths: list[int]) -> Any:
        return [], eagle3_pairs(lengths, n, STEP)

    def draw_p_eagle(draw: random.Random, lengths: list[int]) -> Any:
        elements = drawn_elements(draw, n, most)
        return elements, p_eagle_pairs(lengths, n, *elements)

    def draw_dflash(draw: random.Random, lengths: list[int]) -> Any:
        anchors = [draw.randint(0, n) for _ in range(4)]
        return [anchors], dflash_pairs(lengths, n, anchors, SIZE)

    return {
        "eagle3": (eagle3, draw_eagle3),
        "p_eagle": (p_eagle, draw_p_eagle),
        "dflash": (dflash, draw_dflash),
    }


@pytest.mark.parametrize("name", ["eagle3", "p_eagle", "dflash"])
def test_rows_of_unlike_documents_share_a_graph(name):
    n, draw = 12, random.Random(0)
    call, draw_row = calls(n, 2 * n)[name]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for _ in range(4):
        lengths = drawn_lengths(draw, n)
        data, pairs = draw_row(draw, lengths)
        q_len, kv_len = pairs.shape
        x = tuple(torch.randn(1, 2, size, 8) for size in (q_len, kv_len, kv_len))
        out = compiled(x, torch.tensor(lengths), *map(torch.tensor, data))
        expected = attend_by_rows(*(y.double() for y in x), pairs[None, None].int())
        assert_close(out.double(), expected[0], 3e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_trees_over_ranks_are_those_of_one_process(sharding):
    n, lengths, draw = 24, [10, 14, 0], random.Random(1)
    elements = drawn_elements(draw, n, 2 * n)
    p_eagle = RECIPES["p_eagle"](torch.tensor(lengths), n, *map(torch.tensor, elements))
    anchors = [5, 10, 23, 11]
    blocks = RECIPES["dflash"](torch.tensor(lengths), n, torch.tensor(anchors), SIZE)
    dflash = blocks - sr.GlobalTokens(n, columns=False)
    no_queries = torch.zeros(n, n + len(anchors) * SIZE, dtype=torch.bool)
    both = {
        p_eagle: p_eagle_pairs(lengths, n, *elements),
        dflash: torch.cat([no_queries, dflash_pairs(lengths, n, anchors, SIZE)]),
    }
    for pattern, pairs in both.items():
        x = torch.randn(3, 1, 2, len(pairs), 8, dtype=torch.float64)
        out = simulate_ring(*x, pattern, world_size=3, sharding=sharding)
        assert_close(out, attend_by_rows(*x, pairs[None, None].int())[0], 1e-12)


two = workers_of(2)
LENGTHS = (9, 15)


def eagle3_step() -> tuple[list[Tensor], Tensor]:
    """Queries of step 2, keys and values of steps 0 to 2 [2, steps, ...], and weights of a loss."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(8, 1, 2, sum(LENGTHS), 8, dtype=torch.float64, generator=generator)
    query, weight, *rest = drawn
    return [query, torch.stack(rest[:3]), torch.stack(rest[3:])], weight


def eagle3_over_ranks(rank: int) -> list[Tensor]:
    """The output of all ranks, and gradients of queries, keys and values."""
    tensors, weight = eagle3_step()
    query, key, value = own = [
        shard(x.flatten(0, -4).contiguous(), dim=2).view(*x.shape[:-2], -1, 8).requires_grad_()
        for x in tensors
    ]
    n = query.shape[2]
    later = [x[1:].permute(1, 2, 0, 3, 4).flatten(2, 3) for x in (key, value)]
    context = sr.Packed(LENGTHS, sr.Causal())
    places = sr.SlidingWindow(None, None, dilation=n)
    parts = [
        ring_attention(query, key[0], value[0], context, return_lse=True),
        sr.attention(query, *later, places, q_start=0, return_lse=True),
    ]
    out, _ = sr.merge_attention(*zip(*parts, strict=True))
    (out * shard(weight)).sum().backward()
    assert dist.get_world_size() == 2
    found = [out, *(x.grad for x in own)]
    return [unshard(x.detach().flatten(0, -4), dim=2).view(*x.shape[:-2], -1, 8) for x in found]


def test_a_step_of_eagle3_over_ranks_is_that_of_one_process(two):
    tensors, weight = eagle3_step()
    query, key, value = (x.requires_grad_() for x in tensors)
    n = sum(LENGTHS)
    every = [x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in (key, value)]
    pairs = eagle3_pairs(list(LENGTHS), n, STEP)
    out, _ = dense_attention(query, *every, pairs)
    (out * weight).sum().backward()
    exact = [out, query.grad, key.grad, value.grad]
    for found in two.run(eagle3_over_ranks):
        for x, y in zip(found, exact, strict=True):
            assert_close(x, y.detach(), 1e-12)
