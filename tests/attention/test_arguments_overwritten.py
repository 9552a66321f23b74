"""Overwriting tensors after a call changes nothing that outlives the call."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsering as sr
from sparsering.selection import BlockSummaries, PatternRefiner, select_blocks

HEADS, KV_HEADS, DIM = 4, 2, 8


def drawn(n: int, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, n, DIM, generator=draw) for h in (HEADS, KV_HEADS, KV_HEADS)]


class Caller:
    """Passes copies of tensors and, where `spoils`, overwrites them after each call."""

    def __init__(self, spoils: bool) -> None:
        self.spoils = spoils

    def __call__(self, verb: Callable[..., Any], *given: Any, **options: Any) -> Any:
        given = tuple(x.clone() if isinstance(x, Tensor) else x for x in given)
        options = {n: x.clone() if isinstance(x, Tensor) else x for n, x in options.items()}
        result = verb(*given, **options)
        for x in (*given, *options.values()) if self.spoils else ():
            if isinstance(x, Tensor):
                x.fill_(torch.nan if x.is_floating_point() else x.numel() == 0)
        return result


def cache(pattern: sr.Pattern, **options: Any) -> sr.KVCache:
    return sr.KVCache(pattern, 2, KV_HEADS, DIM, num_heads=HEADS, page_size=16, **options)


WINDOW = sr.SlidingWindow(9, 0)


def attend_in_parts(call: Caller) -> Iterator[Tensor]:
    """A prompt, a page of single tokens, evictions, unlike lengths."""
    one = cache(WINDOW | sr.GlobalTokens(2, rows=False) & sr.Causal())
    for seed, n in enumerate((30, 1, 1, 7, 9, 20, 1)):
        yield call(one.attend, *drawn(n, seed))
    yield call(one.attend, *drawn(3, 8), lengths=torch.tensor([3, 1]))
    yield call(one.attend, *drawn(2, 9), sink=torch.randn(HEADS))


def first_page(call: Caller) -> Iterator[Tensor]:
    """Prompts that are kept whole: nothing is evicted from them."""
    one = cache(sr.Causal())
    yield call(one.attend, *drawn(5, 0))
    yield call(one.attend, *drawn(1, 1))


def draft(call: Caller) -> Iterator[Tensor]:
    one = cache(WINDOW)
    call(one.attend, *drawn(12, 0))
    yield call(one.attend, *drawn(4, 1), tree=torch.tensor([-1, 0, 1, 0]))
    call(one.keep, torch.tensor([0, 1, 2]))
    yield call(one.attend, *drawn(3, 2))


def loaded(call: Caller) -> Iterator[Tensor]:
    one, parts = cache(sr.Causal()), cache(sr.Causal())
    call(one.load, *drawn(12, 0)[1:])
    call(parts.load, *drawn(6, 0)[1:], torch.tensor([0, 1, 5, 6, 9, 11]), length=12)
    for each in (one, parts):
        yield call(each.attend, *drawn(3, 2))


def beams(call: Caller) -> Iterator[Tensor]:
    one = cache(sr.Causal())
    call(one.attend, *drawn(12, 0))
    call(one.reorder, torch.tensor([1, 0]))
    call(one.select, torch.tensor([1, 1]))
    yield call(one.attend, *drawn(3, 2))


def selected_cache(call: Caller) -> Iterator[Tensor]:
    one = sr.SelectedCache(2, KV_HEADS, DIM, 3, num_heads=HEADS, block_size=8, page_size=16)
    for seed, n in enumerate((21, 1, 3, 20, 1)):
        yield call(one.attend, *drawn(n, seed))


def compiled_steps(call: Caller) -> Iterator[Tensor]:
    one = cache(WINDOW)
    step = torch.compile(lambda *new: one.attend(*new), backend="eager", fullgraph=True)
    for seed, n in enumerate((12, 1, 1)):
        yield call(step, *drawn(n, seed))


def patterns(call: Caller) -> Iterator[Tensor]:
    """Patterns that hold tensors, made before their tensors are overwritten, used behind it."""
    draw = torch.Generator().manual_seed(3)
    table, dense = torch.rand(4, 4, generator=draw) < 0.7, torch.rand(32, 32, generator=draw) < 0.5
    chosen = torch.randint(0, 4, (2, KV_HEADS, 4, 2), generator=draw)
    listed = torch.randint(0, 32, (2, KV_HEADS, 32, 3), generator=draw)
    valid = torch.rand(2, 32, generator=draw) < 0.7
    lengths = torch.tensor([[20, 12], [9, 23]])
    made = [
        *(call(sr.Blocks, table, 8), call(sr.Dense, dense), call(sr.KeyMask, valid)),
        *(call(sr.SelectedBlocks, chosen, 8), call(sr.SelectedBlocks, listed, 1, query_block=1)),
        *(call(sr.Documents, lengths), call(sr.Packed, lengths, WINDOW)),
        call(sr.KeyPadding, torch.tensor([20, 32])),
        call(sr.Tree, lengths, torch.tensor([[-1, 0], [-1, -1]])),
    ]
    x = drawn(32, 0)
    for pattern in made:
        yield sr.attention(*x, pattern & sr.Full())


def refiner(call: Caller) -> Iterator[Tensor]:
    one = PatternRefiner(KV_HEADS, 4, 4, 3)
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        mass = torch.rand(1, KV_HEADS, 4, 3, generator=draw)
        call(one.observe, mass, one.table[None].clone())
        one.update()
        yield one.table.clone()
        yield torch.cat([x.double().flatten() for x in tensors_in(one.state_dict())])


def summaries(call: Caller) -> Iterator[Tensor]:
    one = BlockSummaries(8)
    query, key, _ = drawn(21, 0)
    for end in (13, 21):
        yield call(one.scores, query[:, :, :end] if end < 20 else query[:, :, 13:], key[:, :, :end])


def choice(call: Caller) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(1)
    scores = torch.randn(1, KV_HEADS, 4, 4, generator=draw)
    yield call(select_blocks, scores, 2, block_size=8, query_block=8)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    nested = value.values() if isinstance(value, dict) else value
    return (
        [x for part in nested for x in tensors_in(part)] if isinstance(value, dict | list) else []
    )


VERBS = [
    *(attend_in_parts, first_page, draft, loaded, beams, selected_cache, compiled_steps),
    *(patterns, refiner, summaries, choice),
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_nothing_changes(verb):
    torch.manual_seed(0)
    expected = [x.clone() for x in verb(Caller(spoils=False))]
    torch.manual_seed(0)
    found = list(verb(Caller(spoils=True)))
    assert len(found) == len(expected) > 0
    for number, (one, two) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, two), f"result {number}"
        assert not one.is_floating_point() or not one.isnan().any()


def test_each_verb_of_a_cache_that_takes_tensors_is_asked():
    asked = "".join(inspect.getsource(verb) for verb in VERBS)
    for kind in (sr.KVCache, PatternRefiner):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            takes = "Tensor" in str(list(inspect.signature(method).parameters.values()))
            assert name.startswith("_") or not takes or f".{name}" in asked, name
