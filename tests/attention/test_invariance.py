"""The bits of a row do not depend on its company: on what else a call computes."""

import pytest
import torch
from fuzz import company
from fuzz.attack import attack
from torch import Tensor

import sparsering as sr

CAUSAL = sr.Causal()
PATTERNS = {
    "causal": CAUSAL,
    "window": CAUSAL & sr.SlidingWindow(700),
    "window and sinks": CAUSAL & (sr.SlidingWindow(90) | sr.GlobalTokens(4)),
    "LongNet": CAUSAL & sr.LongNet((256, 512, 1024), (1, 2, 4)),
    "two steps": CAUSAL & (sr.SlidingWindow(60) | sr.SlidingWindow(900, dilation=4)),
    "blocks": CAUSAL & sr.BlockCausal(32),
}
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = 1100  # more than two segments of 512


def inputs(dtype: torch.dtype, batch: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(batch, heads, TOKENS, 32).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_tokens_decoded_one_by_one_have_the_bits_of_one_pass(name: str, dtype: torch.dtype):
    pattern, (query, key, value) = PATTERNS[name], inputs(dtype)
    out, lse = sr.attention(query, key, value, pattern, return_lse=True)
    cache = sr.KVCache(pattern, 1, 2, 32, num_heads=4, dtype=dtype)
    start = 900
    parts = [cache.attend(query[:, :, :start], key[:, :, :start], value[:, :, :start])]
    parts = [x[:, :, -1:] for x in parts]
    for i in range(start, TOKENS):
        new = (x[:, :, i : i + 1] for x in (query, key, value))
        found, of_row = cache.attend(*new, return_lse=True)
        parts.append(found)
        assert torch.equal(of_row, lse[:, :, i : i + 1])
    assert torch.equal(torch.cat(parts, 2), out[:, :, start - 1 :])


@pytest.mark.parametrize("name", ["causal", "window and sinks"])
def test_tiles_of_any_size_give_the_same_bits(name: str):
    """Keys are summed in segments of 512, whatever the tiles that a segment consists of."""
    tensors = inputs(torch.float32)
    expected = sr.attention(*tensors, PATTERNS[name], block_size=128, return_lse=True)
    for size in (16, 32, 64):
        found = sr.attention(*tensors, PATTERNS[name], block_size=size, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_share_keys_do_not_change_each_other(dtype: torch.dtype):
    query, key, value = inputs(dtype)
    last = sr.attention(query, key, value, CAUSAL)[:, :, -1:]
    for heads in (1, 2):  # of each group of two
        some = query.unflatten(1, (2, 2))[:, :, :heads].flatten(1, 2)
        alone = sr.attention(some[:, :, -1:], key, value, CAUSAL)
        expected = last.unflatten(1, (2, 2))[:, :, :heads].flatten(1, 2)
        assert torch.equal(alone, expected)


@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_depend_on_no_other_entry_and_on_no_thread(name: str):
    pattern, dtype = PATTERNS[name], torch.float32
    wide = [x.requires_grad_() for x in inputs(dtype, 3)]
    out = sr.attention(*wide, pattern)
    grad = torch.randn_like(out)
    of_three = torch.autograd.grad(out, wide, grad)
    before = torch.get_num_threads()
    for threads in (1, 2):  # whole heads, then tiles
        torch.set_num_threads(threads)
        one = [x.detach()[1:2].requires_grad_() for x in wide]
        found = torch.autograd.grad(sr.attention(*one, pattern), one, grad[1:2])
        torch.set_num_threads(before)
        for own, others in zip(found, of_three, strict=True):
            assert torch.equal(own, others[1:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spellings_of_one_mask_have_equal_bits(dtype: torch.dtype):
    query, key, value = inputs(dtype)
    spellings = (
        sr.SlidingWindow(99, 0),
        CAUSAL & sr.SlidingWindow(99),
        sr.from_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 100)),
        sr.Causal() - sr.from_mask_mod(lambda b, h, q, k: q - k >= 100),
    )
    first, *others = (sr.attention(query, key, value, x) for x in spellings)
    for other in others:
        assert torch.equal(other, first)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_document_has_its_bits_wherever_it_stands(name: str):
    pattern, own = PATTERNS[name], [x.requires_grad_() for x in inputs(torch.float32)]
    out = sr.attention(*own, pattern)
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, own, grad)
    before = 300
    both = [torch.cat((x.detach()[:, :, :before], x), 2) for x in own]
    packed = sr.attention(*both, sr.Packed((before, TOKENS), pattern))[:, :, before:]
    assert torch.equal(packed, out)
    for one, two in zip(torch.autograd.grad(packed, own, grad), gradients, strict=True):
        assert torch.equal(one, two)


def test_one_key_costs_no_more_than_a_rounding():
    query, key, value = inputs(torch.float32)
    out, lse = sr.attention(query, key, value, CAUSAL, return_lse=True)
    scores = (query[:, :, :1] * key.repeat_interleave(2, 1)[:, :, :1]).sum(-1) * 32**-0.5
    first = value.repeat_interleave(2, 1)[:, :, :1]
    torch.testing.assert_close(out[:, :, :1], first, rtol=3e-7, atol=0)
    torch.testing.assert_close(lse[:, :, :1], scores, rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize(
    ("rounds", "cases"), [(1, 4), pytest.param(9, 256, marks=pytest.mark.slow)]
)
def test_drawn_rows_keep_their_bits_in_other_company(rounds: int, cases: int):
    coverage = attack(company, 600.0, seed="company", rounds=rounds, cases=cases)
    assert coverage.right.total() > cases


@pytest.mark.parametrize("slots", [3, 64, 400])
def test_the_order_of_slots_changes_no_bit(slots: int):
    tensors, results = [x.requires_grad_() for x in inputs(torch.float32)], []
    listed = torch.stack([torch.randperm(TOKENS)[:slots] for _ in range(TOKENS)])[None, None]
    order = torch.stack([torch.randperm(slots) for _ in range(TOKENS)])[None, None]
    bias = torch.randn(1, 4, TOKENS, slots)
    of_heads = order.expand(-1, 4, -1, -1)
    for keys, of_slots in ((listed, bias), (listed.gather(3, order), bias.gather(3, of_heads))):
        pattern = sr.SelectedBlocks(keys, 1, query_block=1)
        out, lse = sr.attention(*tensors, pattern, slot_bias=of_slots, return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out.pow(2).sum(), tensors)])
    assert all(map(torch.equal, *results))


def test_explain_says_what_cannot_be_kept():
    query, key, value = inputs(torch.float32)
    assert "bits:" not in sr.explain(query, key, value, CAUSAL)
    indices = torch.arange(TOKENS)[None, None, :, None]
    lists = sr.SelectedBlocks(indices, 1, query_block=1)
    assert "lists of neighbouring queries" in sr.explain(query, key, value, lists)
    double = (x.double() for x in (query, key, value))
    assert "bits: those of a row may depend" in sr.explain(*double, CAUSAL)


def test_the_context_changes_nothing_and_takes_a_flag():
    query, key, value = inputs(torch.float32)

    @sr.batch_invariant()
    def attend() -> Tensor:
        with sr.batch_invariant(enabled=False):
            return sr.attention(query, key, value, CAUSAL)

    assert torch.equal(attend(), sr.attention(query, key, value, CAUSAL))
    with pytest.raises(TypeError, match="enabled must be True or False"):
        sr.batch_invariant(1).__enter__()


def test_a_compiled_function_enters_the_context():
    query, key, value = inputs(torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend() -> Tensor:
        with sr.batch_invariant():
            return sr.attention(query, key, value, CAUSAL)

    assert torch.equal(attend(), sr.attention(query, key, value, CAUSAL))
