"""How long keys live, against what `to_dense` says of every pair: last visits, live keys, bounds.

An endless sequence is compared with a table of queries far beyond every reach of the patterns, in
whose last rows a whole period of each lies.
"""

import math
from itertools import pairwise
from time import thread_time
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume
from oracles.attention_oracle import PATTERNS, Case
from oracles.every_pattern import INDICES, NAMES, one_of_each
from oracles.patterns_oracle import Spec, build, leaves
from oracles.strategies import HEADS, Scene, examples, head_offsets, specs
from torch import Tensor

import sparsering as sr
from sparsering.layouts.lifetimes import FOREVER, last_visits, own_length
from sparsering.patterns.varlen_mask import Varlen


@sr.register_pattern
class LooksBack(sr.Mask):
    """Asked of every pair; all the same wherever it lies."""

    distances: tuple[int, ...]
    asks_frame = False

    def holds(self, p, k, frame):
        return torch.isin(p - k, torch.tensor(self.distances))


@sr.register_pattern
class LateEcho(sr.Mask):
    """Depends on the length, and says of tiles what it knows."""

    def holds(self, p, k, frame):
        return p - k == frame.kv_len // 2

    def status(self, q_first, q_last, k_first, k_last, frame):
        meet = (q_last - k_first >= frame.kv_len // 2) & (q_first - k_last <= frame.kv_len // 2)
        return meet.to(torch.int8)

    def candidates(self, q_first, q_last, frame):
        return q_first - frame.kv_len // 2, q_last - frame.kv_len // 2


@sr.register_pattern
class Backwards(sr.Mask):
    """A mask of a user's own that takes another one, made for one length."""

    inner: sr.Mask

    def holds(self, p, k, frame):
        return (k <= p) & self.inner.holds(p, k, frame)


def visited(pattern: Any, queries: int, keys: int, heads: int, kv_heads: int) -> Tensor:
    """[kv heads, queries, keys] whether any batch entry and query head of a kv head visits."""
    shape = {"q_len": queries, "kv_len": keys, "q_start": 0}
    dense = pattern.to_dense(**shape, num_heads=heads, num_kv_heads=kv_heads) > 0
    dense = dense if dense.dim() == 4 else dense[None]
    dense = dense.expand(-1, heads, -1, -1)
    return dense.unflatten(1, (kv_heads, heads // kv_heads)).any(2).any(0)


def last_in(table: Tensor, start: int) -> Tensor:
    """[kv heads, keys] the last row of [kv heads, queries, keys] from `start` on, or -1."""
    rows = torch.arange(table.shape[1])
    of_rows = torch.where(table & (rows >= start)[:, None], rows[:, None], -1)
    return of_rows.amax(1) if len(rows) else torch.full(table.shape[::2], -1)


def live_in(table: Tensor, length: int) -> list[list[int]]:
    return [torch.nonzero(seen)[:, 0].tolist() for seen in table[:, length:, :length].any(1)]


def assert_lifetimes(
    pattern: Any, table: Tensor, lengths: list[int], heads: dict[str, int], **given: int
) -> None:
    """Everything that is told of a sequence of as many tokens as the table has."""
    total = table.shape[1]
    for length in lengths:
        live = pattern.live_keys(length, **heads, **given)
        assert all(keys.dtype is torch.int64 for keys in live)
        assert [keys.tolist() for keys in live] == live_in(table, length)
    for start, stop in pairwise(sorted({0, *lengths, total})):
        last = last_visits(pattern, start, stop, **heads, **given)
        assert torch.equal(torch.stack(last), last_in(table, start)[:, start:stop])
    most = max(len(keys) for length in range(total + 1) for keys in live_in(table, length))
    assert pattern.cache_bound(**heads, **given) == most


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_of_the_contract_to_its_last_token(name):
    case = Case(num_heads=4, num_kv_heads=2, q_start=0)
    pattern, heads = PATTERNS[name](case), {"num_heads": 4, "num_kv_heads": 2}
    table = visited(pattern, 75, 75, 4, 2)
    assert_lifetimes(pattern, table, [0, 1, 17, 40, 63, 74, 75], heads, max_length=75)


@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_a_pattern_brings_its_length_along(index):
    pattern = one_of_each()[index]
    own = own_length(pattern)
    total = 40 if own is None else own
    table = visited(pattern, total, total, 2, 2)
    given = {"max_length": total} if own is None else {}
    assert_lifetimes(pattern, table, [*range(0, total + 1, 3)], {"num_heads": 2}, **given)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Spec, Scene, list[int]]:
    """An expression, a sequence that it fits, and some lengths of it."""
    total, (num_heads, num_kv_heads) = draw(st.integers(0, 70)), draw(st.sampled_from(HEADS))
    scene = Scene(total, total, num_heads, num_kv_heads, 0, draw(st.integers(1, 2)))
    lengths = st.lists(st.integers(0, total), min_size=1, max_size=3)
    return draw(specs(scene, with_random=True)), scene, draw(lengths)


@examples(25, 150, sequences())
def test_any_expression_over_a_sequence_that_ends(sequence):
    spec, scene, lengths = sequence
    pattern, total = build(spec), scene.kv_len
    heads = {"num_heads": scene.num_heads, "num_kv_heads": scene.num_kv_heads}
    table = visited(pattern, total, total, scene.num_heads, scene.num_kv_heads)
    assert_lifetimes(pattern, table, lengths, heads, max_length=total)


def endless(depth: int = 2) -> st.SearchStrategy[Spec]:
    """Expressions of patterns for any length, of few reaches and periods."""
    scene = Scene(12, 12, 4, 2, 0, 2)
    side, size = st.one_of(st.none(), st.integers(0, 15)), st.integers(1, 5)
    window = st.tuples(st.just("SlidingWindow"), side, side, st.sampled_from((1, 1, 2, 3, 4)))
    sinks = st.tuples(
        *(st.just("GlobalTokens"), st.integers(0, 9)), *(st.booleans(), st.booleans())
    )
    dilated = st.tuples(
        *(st.just("Dilated"), st.integers(1, 20), st.integers(1, 5)), head_offsets(scene)
    )
    rates = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
    level = st.tuples(st.integers(1, 12), st.one_of(st.none(), st.integers(0, 30)))
    leaf = st.one_of(
        *(st.just(("Causal",)), st.just(("Full",)), window, sinks, dilated),
        st.tuples(st.just("BlockDilated"), rates, size),
        st.tuples(st.just("BlockWindow"), st.integers(0, 4), size),
        st.tuples(st.just("BlockCausal"), size),
        st.tuples(st.just("ChunkedCausal"), size),
        st.tuples(st.just("Hierarchical"), st.lists(level, min_size=1, max_size=2), size),
        st.tuples(st.just("KeyPadding"), st.tuples(st.integers(0, 20), st.integers(0, 20))),
    )
    if not depth:
        return leaf
    below = endless(depth - 1)
    return st.one_of(leaf, st.tuples(st.sampled_from("&&|-"), below, below))


def period_of(spec: Spec) -> int:
    """A number of positions after which the pairs of every part of a spec repeat."""
    found = [1]
    for name, *rest in leaves(spec):
        if name == "SlidingWindow":
            found.append(rest[2])
        if name == "Dilated":
            found.append(rest[0])
        if name in ("BlockDilated", "BlockWindow", "Hierarchical"):
            found.append(rest[1])
        if name in ("BlockCausal", "ChunkedCausal"):
            found.append(rest[0])
        if name == "Hierarchical":
            found += [rest[1] * max(1, stride // rest[1]) for stride, _ in rest[0]]
    return math.lcm(*found)


@examples(
    100,
    400,
    endless(),
    st.sampled_from([(1, 1), (4, 2), (2, 2)]),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_any_expression_without_end(spec, heads, start, length):
    assume((period := period_of(spec)) <= 1000)
    if any(isinstance(leaf[-1], tuple) and leaf[0] == "Dilated" for leaf in leaves(spec)):
        heads = (4, 2)  # an offset for each
    pattern, named = build(spec), {"num_heads": heads[0], "num_kv_heads": heads[1]}
    reach = 60 + length + 150
    table = visited(pattern, reach + period, 60 + length, *heads)
    expected = last_in(table, start)
    expected[expected >= reach] = FOREVER
    found = last_visits(pattern, start, start + length, **named)
    assert torch.equal(torch.stack(found), expected[:, start : start + length])
    live = pattern.live_keys(length, **named)
    assert [keys.tolist() for keys in live] == live_in(table, length)


@examples(25, 200, endless(), st.sampled_from([(1, 1), (4, 2)]))
def test_the_bound_is_the_most_of_all_lengths(spec, heads):
    assume(period_of(spec) <= 60)
    if any(isinstance(leaf[-1], tuple) and leaf[0] == "Dilated" for leaf in leaves(spec)):
        heads = (4, 2)
    pattern = build(spec)
    table = visited(pattern, 600, 450, *heads)
    last, key = last_in(table, 0), torch.arange(450)
    length = torch.arange(450)[:, None]
    most = ((key < length) & (last[:, None] >= length)).sum(2)  # [kv heads, lengths]
    grows = bool((most[:, 300:].amax(1) > most[:, 150:300].amax(1)).any())
    expected = None if grows else int(most.max())
    assert pattern.cache_bound(num_heads=heads[0], num_kv_heads=heads[1]) == expected


def lists(tensors: list[Tensor]) -> list[list[int]]:
    return [x.tolist() for x in tensors]


def test_literal_last_visits():
    causal = sr.Causal()
    assert lists(last_visits(causal & sr.SlidingWindow(3), 0, 4)) == [[3, 4, 5, 6]]
    assert lists(last_visits(causal & sr.SlidingWindow(3), 5, 7, max_length=9)) == [[8, 8]]
    assert lists(last_visits(causal, 7, 9)) == [[FOREVER] * 2]
    assert lists(last_visits(causal, 7, 9, max_length=10)) == [[9, 9]]
    assert lists(last_visits(sr.GlobalTokens(2), 1, 4)) == [[FOREVER, 1, 1]]
    assert lists(last_visits(sr.Dilated(4, 2), 4, 8, num_heads=2)) == [[6, -1, 6, -1], [-1, 7] * 2]
    both = sr.SlidingWindow(None, 0, 2) & sr.SlidingWindow(None, 0, 3) & sr.SlidingWindow(9)
    assert lists(last_visits(both, 0, 2)) == [[6, 7]]
    apart = sr.SlidingWindow(50, 0, 7) & sr.SlidingWindow(50, 0, 11)
    assert lists(last_visits(apart, 0, 2)) == [[0, 1]]
    ahead = sr.SlidingWindow(9, 3) & sr.GlobalTokens(4, columns=False)
    assert lists(last_visits(ahead, 0, 8)) == [[3] * 7 + [-1]]
    early = causal & sr.GlobalTokens(4, columns=False)
    assert lists(last_visits(early, 0, 6, max_length=10)) == [[3] * 4 + [-1] * 2]
    never = sr.Dilated(8, 2, 0) & sr.Dilated(16, 2, 1)
    assert lists(last_visits(never, 0, 3)) == [[-1] * 3]


def test_literal_live_keys():
    sinks = sr.Causal() & (sr.SlidingWindow(2) | sr.GlobalTokens(1, rows=False))
    assert lists(sinks.live_keys(9)) == [[0, 7, 8]]
    assert lists(sinks.live_keys(9, max_length=9)) == [[]]
    assert lists(sinks.live_keys(0)) == [[]]
    longnet = sr.LongNet((4, 8), (1, 2)) & sr.Causal()
    assert lists(longnet.live_keys(6, num_heads=2)) == [[0, 2, 4, 5], [1, 3, 4, 5]]
    assert lists(longnet.live_keys(8, num_heads=2)) == [[], []]
    assert lists(longnet.live_keys(7, num_heads=4, num_kv_heads=1)) == [[4, 5, 6]]
    far = (sr.Causal() & sr.SlidingWindow(2)).live_keys(1 << 40)
    assert lists(far) == [[(1 << 40) - 2, (1 << 40) - 1]]


def test_heads_do_not_share_memory():
    window = sr.Causal() & sr.SlidingWindow(2)
    for found in (window.live_keys(4, num_heads=2), last_visits(window, 0, 4, num_heads=2)):
        found[0].zero_()
        assert found[1].any()


def test_literal_bounds():
    causal = sr.Causal()
    assert causal.cache_bound() is None
    assert causal.cache_bound(max_length=10) == 9
    assert sr.GlobalTokens(5, columns=False).cache_bound() == 4  # at length 4, for query 4
    assert (causal & sr.SlidingWindow(1 << 40)).cache_bound() == 1 << 40
    assert (causal & (sr.SlidingWindow(4096) | sr.GlobalTokens(64))).cache_bound() == 4160
    assert (causal & sr.LongNet((4, 8), (1, 2))).cache_bound() == 4
    passing = sr.GlobalTokens(2) & sr.SlidingWindow(9)
    assert (causal & (sr.Dilated(4, 1) | passing)).cache_bound() == 5  # 0, 1, 4, 5, 6 at 7
    assert (causal & sr.GlobalTokens(7) & sr.SlidingWindow(4)).cache_bound() == 4
    assert (causal & sr.SlidingWindow(None, 0, 3)).cache_bound() is None
    assert (sr.KeyPadding((3, 9)) & causal).cache_bound() == 9
    assert sr.PooledCausal(4, 1).cache_bound() is None
    assert (sr.PooledCausal(4, 1) & sr.Dilated(16, 2)).cache_bound() == 6


def test_a_custom_mask_has_the_length_of_its_argument():
    pattern = Backwards(sr.Documents((3, 4)))
    assert own_length(pattern) == 7
    assert lists(pattern.live_keys(5)) == [[3, 4]]
    assert pattern.cache_bound() == 3


def test_no_heads_and_no_batch_entries():
    assert sr.Causal().live_keys(3, num_heads=0) == []
    with pytest.raises(ValueError, match="num_kv_heads"):
        sr.Causal().live_keys(3, num_heads=4, num_kv_heads=0)
    assert lists(sr.Causal().live_keys(3, num_heads=0, num_kv_heads=2)) == [[], []]
    assert sr.KeyPadding(()).cache_bound(num_heads=2) == 0


@pytest.mark.parametrize("selected", [False, True])
def test_what_is_selected_is_not_known_beforehand(selected):
    pattern = sr.SelectedBlocks(torch.tensor([[0], [0]]), 4) if selected else sr.Full()
    assert lists((sr.Causal() & pattern).live_keys(6)) == [[*range(6)]]
    assert lists(last_visits(pattern, 3, 5, max_length=30)) == [[29, 29]]
    assert lists((sr.SlidingWindow(2) & pattern).live_keys(6)) == [[4, 5]]
    assert (sr.Causal() & pattern).cache_bound() is None


@pytest.mark.parametrize(
    "pattern",
    [
        LooksBack((3, 17)),
        LooksBack((90,)) | sr.GlobalTokens(2),
        LateEcho(),
        sr.Causal() & (LateEcho() | sr.SlidingWindow(3)),
        sr.from_mask_mod(lambda b, h, q, k: (q - k) % 7 == h),
        sr.Packed((60, 0, 70), LateEcho()),
        sr.Packed((60, 0, 70), sr.RandomBlocks(0.3, 8)),
        sr.Packed((60, 70), LooksBack((3,)) + sr.Dilated(8, 3)),
        Varlen((60, 70), (50, 80), sr.Causal()),
    ],
    ids=lambda pattern: str(pattern)[:40],
)
def test_masks_that_are_asked(pattern):
    table = visited(pattern, 130, 130, 2, 2)
    lengths = [0, 1, 50, 59, 60, 90, 129, 130]
    assert_lifetimes(pattern, table, lengths, {"num_heads": 2}, max_length=130)


def test_a_mask_that_says_where_it_holds_is_asked_of_few_pairs(monkeypatch):
    asked, holds = [], LateEcho.holds
    monkeypatch.setattr(
        LateEcho,
        "holds",
        lambda self, p, k, frame: asked.append((p + k).numel()) or holds(self, p, k, frame),
    )
    total = 1 << 15
    live = LateEcho().live_keys(total // 2, max_length=total)
    assert torch.equal(live[0], torch.arange(total // 2))
    assert sum(asked) < (1 << 6) * 20 * total  # of total^2 / 8


def test_a_mask_of_a_users_own_ends_where_the_rest_ends():
    pattern = LooksBack((2, 5, 90)) & sr.SlidingWindow(9)
    assert lists(last_visits(pattern, 3, 5)) == [[8, 9]]
    assert lists(pattern.live_keys(100)) == [[95, 96, 97, 98, 99]]
    with pytest.raises(ValueError, match="max_length"):
        pattern.cache_bound()
    assert pattern.cache_bound(max_length=40) == 5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sr.Causal().live_keys(-1), ["length", "at least 0", "-1"]),
        (lambda: sr.Causal().live_keys(5, max_length=4), ["length", "at most the 4", "5"]),
        (lambda: sr.Causal().live_keys(0, max_length=-4), ["max_length", "at least 0", "-4"]),
        (lambda: sr.Causal().live_keys(3, num_heads=3, num_kv_heads=2), ["num_kv_heads", "3"]),
        (lambda: sr.Documents((3, 4)).live_keys(8), ["at most the 7", "8", "Documents((3, 4))"]),
        (lambda: sr.Documents((3, 4)).cache_bound(max_length=8), ["sum to", "8", "7"]),
        (lambda: sr.KeyMask(torch.ones(5) > 0).cache_bound(max_length=8), ["8", "(5,)"]),
        (lambda: (sr.Documents((3, 4)) | sr.Documents((3, 5))).cache_bound(), ["7", "8"]),
        (lambda: sr.Dense(torch.ones(2, 5) > 0).cache_bound(), ["Dense", "(2, 5)"]),
        (
            lambda: sr.Blocks(torch.ones(2, 2) > 0, 16).live_keys(0, max_length=33),
            ["Blocks", "3", "(2, 2)"],
        ),
        (lambda: sr.RandomBlocks(0.5, 16).live_keys(9), ["pass max_length", "RandomBlocks(0.5"]),
        (lambda: sr.RandomBlocks(0.5, 16).cache_bound(), ["pass max_length", "RandomBlocks(0.5"]),
        (lambda: LateEcho().live_keys(9), ["pass max_length", "LateEcho()"]),
        (lambda: LooksBack((1,)).live_keys(9), ["pass max_length", "LooksBack"]),
        (lambda: sr.BlockWindow(1, (1 << 26) + 1).cache_bound(), ["67108865", "pass max_length"]),
        (
            lambda: sr.SlidingWindow(None, 0, (1 << 31) - 1).live_keys(3, max_length=9.5),
            ["max_length", "9.5"],
        ),
        (
            lambda: (
                sr.SlidingWindow(None, 0, (1 << 31) - 1) & sr.SlidingWindow(None, 0, 1 << 31)
            ).live_keys(3),
            ["period", "pass max_length"],
        ),
        (
            lambda: (sr.GlobalTokens(4) & sr.SlidingWindow(1 << 40)).cache_bound(),
            [str(3 + (1 << 40)), "pass max_length"],
        ),
        (lambda: sr.Causal().live_keys(True), ["length", "True"]),
        (lambda: sr.Causal().live_keys(3.0), ["length", "3.0"]),
        (lambda: last_visits(sr.Causal(), 4, 3), ["stop", "at least 4", "3"]),
        (lambda: last_visits(sr.Causal(), 4, 9, max_length=8), ["stop", "at most the 8", "9"]),
    ],
)
def test_errors_say_what_came(call, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def test_patterns_in_errors_are_shortened():
    pattern = sr.RandomBlocks(0.5, 16)
    for _ in range(50):
        pattern = pattern | sr.RandomBlocks(0.5, 16)
    with pytest.raises(ValueError, match=r"max_length") as caught:
        pattern.live_keys(3)
    assert len(str(caught.value)) < 400


CAUSAL = sr.Causal()


@pytest.mark.parametrize(
    "pattern",
    [
        CAUSAL,
        CAUSAL & sr.SlidingWindow(4096),
        CAUSAL & sr.SlidingWindow(4096, dilation=3),
        CAUSAL & (sr.SlidingWindow(4096) | sr.GlobalTokens(64, rows=False)),
        sr.LongNet((2048, 4096, 8192), (1, 2, 4)) & CAUSAL,
        sr.LongNet((2048, 8192, 32768), (1, 4, 16)) & CAUSAL,
    ],
    ids=str,
)
@pytest.mark.parametrize("of", ["live_keys", "cache_bound"])
def test_long_sequences_take_milliseconds(pattern, of):
    heads = 1 if isinstance(pattern, sr.Mask) else 8

    def once() -> float:
        began = thread_time()
        if of == "live_keys":
            pattern.live_keys((1 << 20) - 5, num_heads=heads)
        else:
            pattern.cache_bound(num_heads=heads)
        return thread_time() - began

    assert min(once() for _ in range(4)) < 0.5  # seconds; one step for each key takes more
