"""The bits of a row do not depend on its company: on what else a call computes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(autouse=True)
def in_mode() -> Iterator[None]:
    """Runs each test in the mode that promises these bits."""
    with sr.batch_invariant():
        yield


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


@pytest.mark.parametrize("slots", [64, 400])
def test_lists_of_neighbours_do_not_change_a_row(slots: int):
    """Lists of 384 keys or more of neighbouring queries share products outside of the mode."""
    (query, key, value), expected = [x.requires_grad_() for x in inputs(torch.float32)], []
    listed = torch.stack([torch.randperm(500)[:slots] for _ in range(TOKENS)])[None, None]
    grad = torch.randn(1, 4, TOKENS, 32)
    for rows in (slice(None), slice(7, 8)):
        first = rows.start or 0
        pattern = sr.SelectedBlocks(listed[:, :, rows], 1, query_block=1, first_row=first)
        call = {"q_start": first, "return_lse": True}
        out, lse = sr.attention(query[:, :, rows], key, value, pattern, **call)
        (dq,) = torch.autograd.grad(out, query, grad[:, :, rows])
        expected.append((out, lse, dq[:, :, rows]))
    for all_rows, own in zip(*expected, strict=True):
        assert torch.equal(all_rows[:, :, 7:8], own)


PADDED = {
    "causal": CAUSAL,
    "window": CAUSAL & sr.SlidingWindow(90),
    "both sides": sr.SlidingWindow(100, 50),
    "branches": sr.Mixture((CAUSAL, sr.SlidingWindow(64))),
}


@pytest.mark.parametrize("paddings", [(50,), (700,), (0, 513, 13, 513)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PADDED)
def test_a_row_behind_padding_has_the_bits_of_the_row_alone(
    name: str, dtype: torch.dtype, paddings: tuple[int, ...]
):
    pattern, batch = PADDED[name], len(paddings)
    query, key, value = inputs(dtype, batch)
    options = {"sink": torch.randn(4), "softcap": 20.0, "distance_bias": torch.randn(4, 61)}
    valid = torch.arange(TOKENS) >= torch.tensor(paddings)[:, None]
    padded = [x.clone().requires_grad_() for x in (query, key, value)]
    out, lse = sr.attention(*padded, pattern & sr.KeyMask(valid), return_lse=True, **options)
    grad = torch.randn_like(out)
    in_padding = ~valid[:, None, :, None]
    gradients = torch.autograd.grad(out, padded, grad.masked_fill(in_padding, 0))
    for entry, first in enumerate(paddings):
        own = [x[entry : entry + 1, :, first:].clone().requires_grad_() for x in padded]
        expected, of_row = sr.attention(*own, pattern, return_lse=True, **options)
        assert torch.equal(out[entry : entry + 1, :, first:], expected)
        assert torch.equal(lse[entry : entry + 1, :, first:], of_row)
        found = [x[entry : entry + 1, :, first:] for x in gradients]
        alone = torch.autograd.grad(expected, own, grad[entry : entry + 1, :, first:])
        assert all(map(torch.equal, found, alone))


def test_rows_and_gradients_in_padding_are_right():
    """Queries that stand in the padding may see keys behind it."""
    pattern, valid = sr.SlidingWindow(9, 600), torch.arange(TOKENS) >= torch.tensor([[70], [0]])
    tensors = [x.requires_grad_() for x in inputs(torch.float32, 2)]
    table, sink = torch.randn(4, 21, requires_grad=True), torch.randn(4, requires_grad=True)
    results = []
    for backend in (None, "reference"):
        mask = pattern & sr.KeyMask(valid)
        out = sr.attention(*tensors, mask, distance_bias=table, sink=sink, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), (*tensors, table, sink))
        results.append((out, *grads))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_drafts_rows_are_those_of_later_steps(dtype: torch.dtype):
    query, key, value = inputs(dtype)
    pattern, start = CAUSAL & sr.SlidingWindow(700), 1090
    cache = sr.KVCache(pattern, 1, 2, 32, num_heads=4, dtype=dtype)
    cache.attend(*(x[:, :, :start] for x in (query, key, value)))
    new = [x[:, :, start:] for x in (query, key, value)]
    chain = torch.arange(TOKENS - start) - 1
    drafted = cache.attend(*new, tree=chain)
    expected = sr.attention(query, key, value, pattern)[:, :, start:]
    assert torch.equal(drafted, expected)


IN_A_PROCESS = """
import torch, sparsering as sr
torch.manual_seed(0)
n = 700
for heads, size in ((4, 64), (1, 128)):
    q, k, v = (torch.randn(1, h, n, size).bfloat16() for h in (4, heads, heads))
    with sr.batch_invariant():
        for mask in (sr.Full(), sr.BlockCausal(16), sr.SlidingWindow(90)):
            pattern = sr.Causal() & mask
            whole = sr.attention(q, k, v, pattern)
            cache = sr.KVCache(pattern, 1, heads, size, num_heads=4)
            steps = [q.new_empty(1, 4, 0, size)]
            for stop in (600, 633, *range(634, n + 1)):
                start = sum(x.shape[2] for x in steps)
                steps.append(cache.attend(*(x[:, :, start:stop] for x in (q, k, v))))
            assert torch.equal(torch.cat(steps, 2), whole), pattern
            first = sr.attention(*(x[:, :, :99] for x in (q, k, v)), pattern)
            assert torch.equal(first, whole[:, :, :99])
            assert torch.equal(sr.attention(q, k, v, sr.Dense(pattern.to_dense(n)[0])), whole)
"""
"""The promise in bfloat16, in a process that has told oneDNN what it may use."""


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "ALL"])
def test_bits_hold_with_any_instructions(instructions: str):
    """OneDNN multiplies bfloat16 in three ways, of which a processor may have some."""
    limit = {"ONEDNN_MAX_CPU_ISA": instructions}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", IN_A_PROCESS]
    done = subprocess.run(
        command, cwd=root, env=os.environ | limit, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_explain_says_what_is_promised():
    query, key, value = inputs(torch.float32)
    lists = sr.SelectedBlocks(torch.arange(TOKENS)[None, None, :, None], 1, query_block=1)
    double = [x.double() for x in (query, key, value)]
    for tensors, pattern in (((query, key, value), CAUSAL), ((query, key, value), lists)):
        assert "bits:" not in sr.explain(*tensors, pattern)
        with sr.batch_invariant(False):
            assert "unless batch_invariant() asks" in sr.explain(*tensors, pattern)
    assert "bits: those of a row may depend" in sr.explain(*double, CAUSAL)


def test_the_context_is_a_decorator_nests_and_takes_a_flag():
    query, key, value = inputs(torch.float32)
    expected = sr.attention(query, key, value, CAUSAL)
    with sr.batch_invariant(False):
        plain = sr.attention(query, key, value, CAUSAL)
    assert not torch.equal(plain, expected)
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-6)

    @sr.batch_invariant()
    def attend() -> Tensor:
        with sr.batch_invariant(enabled=False):
            assert torch.equal(sr.attention(query, key, value, CAUSAL), plain)
        return sr.attention(query, key, value, CAUSAL)

    with sr.batch_invariant(False):
        assert torch.equal(attend(), expected)
    with pytest.raises(TypeError, match="enabled must be True or False"):
        sr.batch_invariant(1).__enter__()


def test_a_compiled_function_enters_the_context():
    query, key, value = inputs(torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend() -> Tensor:
        with sr.batch_invariant():
            return sr.attention(query, key, value, CAUSAL)

    expected = sr.attention(query, key, value, CAUSAL)
    with sr.batch_invariant(False):
        assert torch.equal(attend(), expected)


def test_a_backward_has_the_mode_of_its_forward():
    tensors, found = [x.requires_grad_() for x in inputs(torch.float32)], []
    for backward_in_mode in (True, False):
        out = sr.attention(*tensors, CAUSAL)
        with sr.batch_invariant(backward_in_mode):
            found.append(torch.autograd.grad(out.square().sum(), tensors))
    assert all(map(torch.equal, *found))
