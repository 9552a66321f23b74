"""`a - b`: the pairs of a that b does not have. All tests of patterns draw it; here is the rest."""

import pytest
import torch

import sparsering as sr

WINDOW, TEXT = sr.SlidingWindow(2), "(Causal() - SlidingWindow(2)) & Dilated(8, 2)"


def test_its_text_is_read_back_in_the_order_of_its_parts():
    pattern = sr.Causal() - WINDOW & sr.Dilated(8, 2)
    assert str(pattern) == TEXT and sr.parse(TEXT) == pattern
    assert sr.parse("Causal() - (Full() - Causal())") == sr.Causal() - (sr.Full() - sr.Causal())
    nested = (sr.Causal() | sr.GlobalTokens(2)) - WINDOW - sr.Dilated(4, 2)
    assert sr.parse(str(nested)) == nested


def test_documents_on_both_sides_are_those_of_a_difference_inside():
    documents = sr.Packed((9, 12), sr.Causal()) - sr.Packed((9, 12), sr.SlidingWindow(1))
    expected = sr.Packed((9, 12), sr.Causal() - sr.SlidingWindow(1))
    assert torch.equal(documents.to_dense(21), expected.to_dense(21))
    x = torch.randn(3, 1, 2, 21, 8, dtype=torch.float64)
    table = torch.randn(2, 5, dtype=torch.float64)
    for pattern in (documents, expected):
        outs = [
            sr.attention(*x, pattern, distance_bias=table, backend=b)
            for b in ("gather", "reference")
        ]
        assert torch.allclose(*outs, rtol=0, atol=1e-12)


def test_a_cache_drops_the_keys_that_are_left_out_for_good():
    pattern = sr.Causal() - (sr.GlobalTokens(4, rows=False) | sr.Dilated(64, 1))
    (live,) = pattern.live_keys(100, max_length=128)
    assert live.tolist() == list(range(4, 64))  # its own chunk is subtracted, and the sinks are
    assert (sr.Causal() - sr.SlidingWindow(None, 0)).live_keys(50)[0].tolist() == []
    assert (sr.Causal() - sr.Causal()).cache_bound() == 0


CHOSEN = sr.SelectedBlocks(torch.zeros(2, 1, dtype=torch.int64), 16)
NO_SELECTION = r"SelectedBlocks cannot be subtracted.*out of its indi"
NO_PATTERN = "- needs a pattern on both sides"
WRONG = {
    "a selection": (lambda: sr.Causal() - CHOSEN, NO_SELECTION),
    "a selection in &": (lambda: sr.Causal() - (CHOSEN & sr.Causal()), NO_SELECTION),
    "a selection in |": (lambda: sr.Causal() - (WINDOW | CHOSEN), NO_SELECTION),
    "a mixture": (
        lambda: sr.Causal() - sr.LongNet((4, 8), (1, 2)),
        r"- removes a set of pairs.*subtract each branch",
    ),
    "a number": (lambda: sr.Causal() - 3, NO_PATTERN),
    "from a number": (lambda: 3 - sr.Causal(), NO_PATTERN),
    "a complement": (lambda: ~sr.Causal(), r"subtract it from.*Full\(\) - pattern"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_subtracted_is_told(what):
    call, message = WRONG[what]
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sr.BlockDiffusion(10, 4), "n must be a multiple of block_size 4, got 10; pad"),
        (lambda: sr.BlockDiffusion(8, 4).layout(17), r"n 8 is for 16 tokens.*got 17; pass half"),
        (lambda: sr.ChunkedCausal(0), "ChunkedCausal size"),
    ],
    ids=["part of a block", "a longer sequence", "empty chunks"],
)
def test_sizes_that_do_not_fit_are_told(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_layouts_of_many_tokens_cost_is_what_is_visited():
    tokens, block = 1 << 20, 128
    chunks = sr.ChunkedCausal(8192).layout(tokens, block_size=block)
    tiles = tokens // block
    assert chunks.num_blocks == tiles * (8192 // block + 1) // 2
    halves = sr.BlockDiffusion(1 << 13, 64).layout(1 << 14, block_size=64)
    assert halves.num_blocks == 128 + 128 * 127 // 2 + 128 * 129 // 2
