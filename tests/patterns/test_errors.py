"""Errors of patterns: each says what was expected, in the caller's words, and what came."""

import operator
from typing import Any

import pytest
import torch
from oracles.every_pattern import INDICES, NAMES, one_of_each
from oracles.kinds import TABLE

import sparsering as sr
from sparsering.distributed import RingPlan


def raised(error: type[Exception] | tuple[type[Exception], ...], call: Any) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sr.SlidingWindow(-3), ["left", "-3"]),
        (lambda: sr.SlidingWindow(1, -2), ["right", "-2"]),
        (lambda: sr.SlidingWindow(1, 1, 0), ["dilation", "0"]),
        (lambda: sr.SlidingWindow(1, 1, -2), ["dilation", "-2"]),
        (lambda: sr.GlobalTokens(-1), ["count", "-1"]),
        (lambda: sr.Dilated(0, 1), ["segment", "0"]),
        (lambda: sr.Dilated(-4, 1), ["segment", "-4"]),
        (lambda: sr.Dilated(4, 0), ["rate", "0"]),
        (lambda: sr.Dilated(4, -2), ["rate", "-2"]),
        (lambda: sr.Dilated(4, 2, "heads"), ["offset", "heads", "head", "block"]),
        (lambda: sr.LongNet((4, 8), (1, 0)), ["rate", "0"]),
        (lambda: sr.LongNet((4, 0), (1, 2)), ["segment", "0"]),
        (lambda: sr.LongNet((4, 8), (1,)), ["segment_lengths", "dilation_rates", "2", "1"]),
        (lambda: sr.BlockDilated((1, 0), 16), ["rate", "0"]),
        (lambda: sr.BlockDilated((-1,), 16), ["rate", "-1"]),
        (lambda: sr.BlockDilated((1,), 0), ["block_size", "0"]),
        (lambda: sr.BlockWindow(-1, 16), ["radius", "-1"]),
        (lambda: sr.BlockWindow(1, 0), ["block_size", "0"]),
        (lambda: sr.BlockWindow(1, -16), ["block_size", "-16"]),
        (lambda: sr.RandomBlocks(0.0, 16), ["density", "0"]),
        (lambda: sr.RandomBlocks(-0.25, 16), ["density", "-0.25"]),
        (lambda: sr.RandomBlocks(1.5, 16), ["density", "1.5"]),
        (lambda: sr.RandomBlocks(float("nan"), 16), ["density", "nan"]),
        (lambda: sr.RandomBlocks(0.5, 0), ["block_size", "0"]),
        (lambda: sr.Hierarchical(((-16, 32),), 16), ["-16"]),
        (lambda: sr.Hierarchical(((16, -32),), 16), ["-32"]),
        (lambda: sr.Hierarchical(((16, 32),), 0), ["block_size", "0"]),
        (lambda: sr.Hierarchical((), 8), ["Hierarchical levels", "at least one", "got none"]),
        (lambda: sr.SlidingWindow(10**30), ["left", "at most 9007199254740992", "10000000000"]),
        (lambda: sr.SlidingWindow(3, 2**53 + 1), ["right", "at most"]),
        (lambda: sr.SlidingWindow(3, dilation=2**40), ["dilation", "at most 2147483648"]),
        (lambda: sr.Dilated(8, 2**32), ["dilation_rate", "at most 2147483648"]),
        (lambda: sr.Dilated(10**4000, 2), ["segment_length", "at most", " ... "]),
        (lambda: sr.GlobalTokens(2**60), ["count", "at most"]),
        (lambda: sr.RandomBlocks(0.5, 16, seed=2**63), ["seed", "at most 9223372036854775807"]),
        (lambda: sr.RandomBlocks(0.5, 16, seed=-(2**63) - 1), ["seed", "at least"]),
        (lambda: sr.KeyPadding((2**54,)), ["lengths", "at most"]),
        (lambda: sr.Documents((3, -1)), ["length", "-1"]),
        (lambda: sr.Packed((3, -1), sr.Causal()), ["length", "-1"]),
        (lambda: sr.Documents(((3, 4), (8, -1))), ["batch entry", "-1"]),
        (lambda: sr.KeyPadding((2, -5)), ["length", "-5"]),
        (lambda: sr.KeyMask(TABLE[0, 0]), ["KeyMask", "[Nk] or [B, Nk]", "got shape ()"]),
        (lambda: sr.KeyMask(TABLE[:, None, None]), ["KeyMask", "(2, 1, 1, 2)", "[:, 0, 0]"]),
        (lambda: sr.KeyMask(TABLE[None, None]), ["KeyMask", "(1, 1, 2, 2)", "Dense(mask)"]),
        (lambda: sr.KeyMask(TABLE.to("meta")), ["KeyMask", "meta device"]),
        (lambda: sr.KeyMask(TABLE.to_sparse()), ["KeyMask", "torch.sparse_coo", ".to_dense()"]),
        (lambda: sr.Blocks(ones(4), 16), ["Blocks", "4"]),
        (lambda: sr.Blocks(ones(1, 1, 1, 2, 2), 16), ["Blocks", "1, 1, 1, 2, 2"]),
        (lambda: sr.Blocks(TABLE, 0), ["block_size", "0"]),
        (lambda: sr.Dense(ones(4)), ["Dense", "4"]),
        (lambda: sr.Dense(ones(1, 1, 2, 2, 2)), ["Dense"]),
    ],
)
def test_value_error_at_construction_names_the_argument_and_the_value(
    call: Any, words: list[str]
) -> None:
    message = raised(ValueError, call)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sr.SlidingWindow("4"), ["left"]),
        (lambda: sr.SlidingWindow(1.5), ["left"]),
        (lambda: sr.SlidingWindow(1, dilation=None), ["dilation"]),
        (lambda: sr.GlobalTokens(None), ["count"]),
        (lambda: sr.Dilated("8", 2), ["segment"]),
        (lambda: sr.Dilated(8, 2.5), ["rate"]),
        (lambda: sr.Dilated(8, 2, offset=1.5), ["offset"]),
        (lambda: sr.LongNet(8, 2), ["segment_lengths"]),
        (lambda: sr.BlockDilated(3, 16), ["rates"]),
        (lambda: sr.BlockWindow(1, "16"), ["block_size"]),
        (lambda: sr.RandomBlocks("half", 16), ["density"]),
        (lambda: sr.Documents(7), ["lengths"]),
        (lambda: sr.Documents((3, 1.5)), ["length"]),
        (lambda: sr.Documents(((3, 4), 7)), ["batch entry", "7"]),
        (lambda: sr.Documents((3, (4,))), ["each of Documents lengths", "(4,)"]),
        (lambda: sr.Documents(("3", "4")), ["each of Documents lengths", "3"]),
        (lambda: sr.Packed((7,), "causal"), ["pattern"]),
        (lambda: sr.Packed((7,), sr.Causal), ["pattern"]),
        (lambda: sr.KeyPadding(7), ["lengths"]),
        (lambda: sr.KeyMask(torch.ones(2)), ["KeyMask", "bool", "torch.float32", "== 0"]),
        (lambda: sr.KeyMask(torch.ones(2).long()), ["KeyMask", "torch.int64", ".bool()"]),
        (lambda: sr.KeyMask([True, False]), ["KeyMask", "bool", "list"]),
        (lambda: sr.Blocks(torch.ones(2, 2), 16), ["Blocks", "bool", "float32"]),
        (lambda: sr.Blocks("table", 16), ["Blocks", "str"]),
        (lambda: sr.Dense(torch.ones(2, 2, dtype=torch.int64)), ["Dense", "bool", "int64"]),
    ],
)
def test_type_error_at_construction_names_the_argument(call: Any, words: list[str]) -> None:
    message = raised(TypeError, call)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


@pytest.mark.parametrize("symbol", ["&", "|", "+"])
@pytest.mark.parametrize("pattern", [sr.Causal(), sr.Causal() & sr.Full(), sr.Causal() + sr.Full()])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ones(2, 2), ["got Tensor", "Dense(mask)", "KeyMask(valid)"]),
        (torch.nn.Parameter(torch.ones(2)), ["got Parameter", "Dense(mask)"]),
        (ones(2, 2).numpy(), ["got ndarray", "Dense(mask)"]),
        (3, ["got int", "Causal()"]),
        (None, ["got NoneType", "Causal()"]),
        ("Causal()", ["got str", "parse(text)"]),
        ([sr.Causal()], ["got list", "Causal()"]),
        (sr.Causal, ["got the class Causal", "call it"]),
        (lambda b, h, q, k: q >= k, ["got function", "from_mask_mod"]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_pattern_beside_one_is_told_what_would_be(
    symbol: str, pattern: Any, other: Any, words: list[str]
) -> None:
    join = {"&": operator.and_, "|": operator.or_, "+": operator.add}[symbol]
    for left, right in ((pattern, other), (other, pattern)):
        message = raised(TypeError, lambda left=left, right=right: join(left, right))
        if symbol == "|" and isinstance(pattern, type(sr.Causal() + sr.Full())):
            assert message.startswith("| is for sets of pairs")
            continue
        for word in (f"{symbol} needs a pattern on both sides", *words):
            assert word in message, f"{word!r} is not in {message!r}"


USES = [
    pytest.param(lambda pattern, *a, **k: pattern.to_dense(*a, **k), id="to_dense"),
    pytest.param(lambda pattern, *a, **k: pattern.layout(*a, block_size=16, **k), id="layout"),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("pattern", "q_len", "arguments", "words"),
    [
        (sr.Documents((31, 16)), 40, {}, ["47", "40"]),
        (sr.Documents((31, 16)), 47, {"kv_len": 48}, ["47", "48"]),
        (sr.Packed((31, 16), sr.Causal()), 40, {}, ["47", "40"]),
        (sr.Packed((31, 16), sr.Causal() + sr.Full()), 48, {}, ["47", "48"]),
        (sr.Packed((20, 20), sr.Documents((20, 3))), 40, {}, ["23", "20"]),
        (sr.Causal() & sr.Documents((31, 16)), 40, {}, ["47", "40"]),
        (sr.Causal() + sr.Documents((31, 16)), 40, {}, ["47", "40"]),
        (sr.Dilated(8, 4, (0, 1, 2)), 8, {"num_heads": 2}, ["offset", "3", "2"]),
        (sr.Dilated(8, 4, (0, 1)), 8, {"num_heads": 4}, ["offset", "2", "4"]),
        (
            sr.Dilated(8, 4, (0, 1, 2, 3)),
            8,
            {"num_heads": 4, "num_kv_heads": 2},
            ["offset", "4", "2"],
        ),
        (sr.Blocks(ones(2, 3), 16), 48, {}, ["Blocks", "2", "3"]),
        (sr.Blocks(ones(3, 2), 16), 48, {}, ["Blocks", "2", "3"]),
        (sr.Blocks(ones(2, 3), 16), 1, {"kv_len": 48}, ["Blocks", "2", "3"]),
        (sr.Blocks(ones(2, 2), 16), 8, {"kv_len": 32, "q_start": 25}, ["Blocks", "2", "3"]),
        (sr.Blocks(ones(3, 2, 2), 16), 32, {"num_heads": 4, "num_kv_heads": 2}, ["3", "4", "2"]),
        (sr.Documents(((31, 16), (47,), (40, 6))), 47, {}, ["batch entry 2", "47", "46"]),
        (sr.Packed(((40,), (31, 16)), sr.Causal()), 40, {}, ["batch entry 1", "47", "40"]),
        (sr.Packed(((40,), (20, 20)), sr.Documents((20,))), 40, {}, ["20", "40"]),
        (sr.KeyMask(TABLE), 3, {}, ["KeyMask", "each of 3 keys", "(2, 2)", "pad it with False"]),
        (sr.KeyMask(TABLE[0]) & sr.Causal(), 2, {"kv_len": 1}, ["each of 1 keys", "(2,)"]),
        (sr.Packed((2, 3), sr.KeyMask(TABLE[0])), 5, {}, ["each of 3 keys", "(2,)"]),
        (sr.KeyMask(TABLE) & sr.KeyPadding((1, 2, 3)), 2, {}, ["2", "3"]),
        (sr.Documents(((4,), (4,))) & sr.KeyPadding((1, 2, 3)), 4, {}, ["[2, 3]"]),
        (sr.Packed(((4,), (4,)), sr.KeyPadding((1, 2, 3))), 4, {}, ["[2, 3]"]),
        (sr.Dense(TABLE), 3, {}, ["Dense", "2", "3"]),
        (sr.Dense(TABLE), 2, {"kv_len": 3}, ["Dense", "2", "3"]),
        (sr.Dense(ones(3, 2, 2)), 2, {"num_heads": 2}, ["Dense", "3", "2"]),
        (sr.KeyPadding((1, 2)) & sr.KeyPadding((1, 2, 3)), 4, {}, ["2", "3"]),
        (sr.KeyPadding((1, 2)) | sr.Blocks(ones(3, 1, 1, 1), 16), 4, {}, ["2", "3"]),
        (sr.Causal(), 8, {"num_heads": 6, "num_kv_heads": 4}, ["6", "4"]),
        (sr.Causal(), -1, {}, ["-1"]),
        (sr.Causal(), 8, {"kv_len": -8}, ["-8"]),
    ],
)
def test_value_error_at_use_tells_expected_and_got(
    use: Any, pattern: Any, q_len: int, arguments: dict[str, Any], words: list[str]
) -> None:
    message = raised(ValueError, lambda: use(pattern, q_len, **arguments))
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


@pytest.mark.parametrize("index", INDICES, ids=NAMES)
def test_truth_of_a_pattern_raises(index: int) -> None:
    pattern = one_of_each()[index]
    message = raised(TypeError, lambda: bool(pattern))
    assert "&" in message
    raised(TypeError, lambda: pattern and sr.Causal())
    raised(TypeError, lambda: pattern or sr.Causal())
    raised(TypeError, lambda: not pattern)


MIXTURES = [
    sr.Causal() + sr.Full(),
    sr.LongNet((4, 8), (1, 2)),
    (sr.Causal() + sr.Full()) & sr.Causal(),
    sr.Causal() & (sr.Causal() + sr.Full()),
    sr.Packed((3, 4), sr.LongNet((4, 8), (1, 2))),
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=repr)
def test_operators_that_a_mixture_has_not_raise(mixture: Any) -> None:
    mask, other = sr.Causal(), sr.Full() + sr.SlidingWindow(3)
    for call in (lambda: mixture | mask, lambda: mask | mixture, lambda: mixture | mixture):
        message = raised(TypeError, call)
        assert "a mixture counts" in message and "use +, or | inside each branch" in message
    for call in (lambda: mixture & mixture, lambda: mixture & other, lambda: other & mixture):
        message = raised(TypeError, call)
        assert "a mixture counts" in message and "or + of both" in message


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            sr.LongNet((8, 16), (1, 2), (0, 1, 2)) & sr.Causal(),
            ["per kv head (2)", "in LongNet((8, 16), (1, 2), (0, 1, 2)) & Causal()"],
        ),
        (sr.Causal() + sr.Documents((31, 16)), ["40", "in Causal() + Documents((31, 16))"]),
    ],
)
def test_an_error_at_use_quotes_the_pattern(pattern: Any, words: list[str]) -> None:
    for use in (pattern.to_dense, pattern.layout, plan_of(pattern), attention_over(pattern)):
        message = raised(ValueError, lambda use=use: use(40, num_heads=2))
        for word in words:
            assert word in message, f"{word!r} is not in {message!r}"


def plan_of(pattern: Any) -> Any:
    return lambda length, **heads: RingPlan.build(pattern, length, 2, **heads)


def attention_over(pattern: Any) -> Any:
    def run(length: int, num_heads: int) -> Any:
        return sr.attention(*torch.zeros(3, 1, num_heads, length, 4), pattern)

    return run


@pytest.mark.parametrize(
    "text",
    [
        "Causal() & " * 3000,
        "(" * 400 + "Causal()" + ")" * 400,
        "Causal() & (" * 90 + "Causal()" + ")" * 90 + " & foo",
        "Foo(" + "1, " * 5000 + ")",
        "SlidingWindow(" + "9" * 6000 + ")",
        "SlidingWindow(10**30)",
        "Documents((" + "1," * 3000 + ")) | (Causal() + Full())",
    ],
    ids=lambda text: text[:20],
)
def test_a_text_that_is_no_pattern_is_quoted_in_part(text: str) -> None:
    message = raised(ValueError, lambda: sr.parse(text))
    assert len(message) < 1200 and "\n" not in message


def test_a_long_pattern_is_quoted_in_part() -> None:
    pattern = sr.Documents((1,) * 5000)
    message = raised(ValueError, lambda: pattern.layout(40))
    assert len(message) < 500 and "5000" in message and " ... " in message


LARGE = 1 << 53


@pytest.mark.parametrize(
    "pattern",
    [
        sr.SlidingWindow(LARGE, LARGE),
        sr.SlidingWindow(LARGE, 0, 1 << 31),
        sr.SlidingWindow(5, 3, 70),  # more residues than tokens
        sr.GlobalTokens(LARGE),
        sr.Dilated(LARGE, 7),
        sr.Dilated(LARGE - 1, 1 << 31, 10**30),
        sr.BlockDilated((LARGE, 1), 16),
        sr.BlockDilated((LARGE,), LARGE),
        sr.BlockWindow(1 << 40, 1 << 30),
        sr.RandomBlocks(0.5, LARGE, -(1 << 63)),
        sr.Hierarchical(((LARGE, LARGE), (16, 16)), 16),
        sr.Hierarchical(((LARGE, None), (1, LARGE)), LARGE),
        sr.Packed((20, 20), sr.SlidingWindow(LARGE, 0, 1 << 31)),
    ],
    ids=repr,
)
def test_numbers_far_beyond_the_sequence_are_exact(pattern: Any) -> None:
    dense = pattern.to_dense(40, num_heads=2).long()
    for block_size in (16, 128):
        layout = pattern.layout(40, num_heads=2, block_size=block_size)
        assert torch.equal(layout.to_dense()[0].expand_as(dense), dense)
    args = torch.randn(3, 1, 2, 40, 8)
    out = sr.attention(*args, pattern)
    exact = sr.attention(*args.double(), pattern, backend="reference")
    assert (out - exact).abs().max() < 1e-5


def test_integers_of_other_kinds_become_ints() -> None:
    import numpy

    pattern = sr.SlidingWindow(torch.tensor(3), numpy.int64(2))
    assert pattern == sr.SlidingWindow(3, 2) and str(pattern) == "SlidingWindow(3, 2)"
    assert sr.parse(str(sr.BlockWindow(numpy.int32(1), 16))) == sr.BlockWindow(1, 16)
    assert sr.Hierarchical(((torch.tensor(16), None),), 16) == sr.Hierarchical(((16, None),), 16)
