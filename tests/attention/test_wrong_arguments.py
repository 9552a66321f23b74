"""Arguments of a wrong kind: a ValueError or TypeError that names them, wherever they come in."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsering as sr
from sparsering import models, nn, selection
from sparsering.distributed import RingPlan, last_traffic, simulate_ring

PATTERN = sr.Causal() & sr.SlidingWindow(9)
META = torch.tensor(3, device="meta")
SEVERAL = torch.randn(3)
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
with warnings.catch_warnings(action="ignore"):  # of what torch calls a prototype
    STRIDED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def qkv(tokens: int = 8) -> list[Tensor]:
    return [torch.randn(1, 2, tokens, 8) for _ in range(3)]


def cache() -> sr.KVCache:
    made = sr.KVCache(PATTERN, 1, 2, 8)
    made.attend(*qkv())
    return made


def attended(**given: Any) -> Any:
    x = torch.randn(1, 8, 16)
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    return layer(**{"query": x, "key": x, "value": x, **given})


def generated(**given: Any) -> Any:
    model = models.LongNetLM(PATTERN, width=16, num_layers=1, vocab_size=11)
    return model.generate(**{"tokens": torch.arange(5)[None], "num_tokens": 1, **given})


def selected(**given: Any) -> Any:
    return nn.SelectedAttention(16, 2, block_size=16, k=2, **given)


def kept(**given: Any) -> Tensor:
    places = {"query_positions": torch.arange(3), "key_positions": 2}
    return sr.dropout_kept(**{"seed": 3, "p": 0.5, "batch": 1, "head": 0, **places, **given})


def biased(block_bias: Tensor) -> Tensor:
    query, key, _ = qkv()
    weights = sr.attention_weights(query, key, PATTERN, block_size=16, block_bias=block_bias)
    return weights.values


def observed(mass: Tensor, indices: Tensor) -> Any:
    return selection.PatternRefiner(2, 3, 3, 2).observe(mass, indices)


SLOTS = torch.zeros(1, 2, 3, 2, dtype=torch.int64)
PLAN = RingPlan.build(PATTERN, 32, 2)
WIDTHS: dict[str, Any] = {"head_dim": 8, "dtype": torch.float32}
SCHEDULE = selection.Schedule(((0, 1.0), (9, 0.0)))
LM: Callable[..., Any] = models.LongNetLM
ENCODER: Callable[..., Any] = models.LongNetEncoder

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: sr.SlidingWindow(META), "left must be an int"),
    (lambda: sr.BlockWindow(torch.tensor(True), 8), "radius must be an int"),
    (lambda: sr.KeyPadding(torch.empty(2, device="meta")), "lengths must be numbers"),
    (lambda: sr.Documents(NESTED), "lengths must be numbers"),
    (lambda: sr.RandomBlocks(0.5, 16, per_head=SEVERAL), "per_head must be True or False"),
    (lambda: sr.parse("Causal()", [1]), "tensors must be a sequence of tensors"),
    (lambda: PATTERN.layout(8, block_size=[[]]), "block_size must be"),
    (lambda: PATTERN.layout(8, device=2**64), "device must be"),
    (lambda: PATTERN.layout(8, num_heads=2**31), "num_heads must be at most 1048576"),
    (lambda: PATTERN.layout(8, block_size=16).entries(head=2**63), "head must be at most 0"),
    (lambda: PATTERN.layout(8, block_size=16).entries(head=SEVERAL), "head must be an int"),
    (lambda: sr.attention(*qkv(), PATTERN, return_lse=SEVERAL), "return_lse must be True or"),
    (lambda: sr.attention(*qkv(), PATTERN, scale=NESTED), "scale must be a number"),
    (lambda: sr.attention(*qkv(), PATTERN, dropout_p=0.5, dropout_seed=NESTED), "dropout_seed"),
    (lambda: sr.alibi(NESTED, 3), "slopes must be a dense tensor"),
    (lambda: sr.attention_varlen(*[x[0] for x in qkv()], NESTED, NESTED), "cu_q must be"),
    (lambda: sr.set_workspace(SEVERAL), "limit must be an int"),
    (lambda: sr.KVCache(PATTERN, 1, 2, 8, dtype="float32"), "dtype must be a dtype"),
    (lambda: sr.KVCache(PATTERN, 1, 2, 8, device=ValueError), "device must be"),
    (lambda: cache().attend(None, None, None), "query must be a tensor"),
    (lambda: cache().attend(*[x.sum() for x in qkv()]), "query, key and value must be"),
    (lambda: cache().attend(*qkv(), lengths=5), "lengths must be 1 ints"),
    (lambda: cache().attend(*qkv(), stored=SEVERAL), "stored must be True or False"),
    (lambda: cache().positions(5), "head must be at most 1"),
    (lambda: cache().positions(0, None), "entry must be an int"),
    (lambda: cache().select(torch.ones(2, 2).to_sparse()), "select must be a dense tensor"),
    (lambda: sr.KVCache(PATTERN, 1, 2, 8).load(None, None), "key must be a tensor"),
    (lambda: sr.KVCache(PATTERN, 1, 2, 8).load(*qkv()[1:], "cpu"), "positions must be"),
    (lambda: sr.SelectedCache(1, 2, 8, 2, method=SEVERAL), "method must be one of"),
    (lambda: selection.PatternRefiner(2, 3, 3, 2).update(SEVERAL), "group must be a ProcessGroup"),
    (lambda: SCHEDULE(SEVERAL), "step must be a number"),
    (lambda: selection.GatedSchedule(sr.Full, 0.5), "schedule must be a Schedule"),
    (lambda: simulate_ring(*qkv(), PATTERN, world_size=2, return_lse=SEVERAL), "return_lse"),
    (lambda: last_traffic(backward=-1), "backward must be True or False"),
    (lambda: RingPlan.build(PATTERN, 8, 2, num_heads=2, num_kv_heads=0), "num_heads must be"),
    (lambda: PATTERN.layout(8, num_heads=2, num_kv_heads=0), "num_heads must be a multiple"),
    (lambda: PLAN.bytes_received(SEVERAL, **WIDTHS), "rank must be an int"),
    (lambda: PLAN.bytes_received(0, head_dim=1j, dtype=torch.float32), "head_dim must be an int"),
    (lambda: PLAN.bytes_received(0, head_dim=8, dtype="float32"), "dtype must be"),
    (lambda: PLAN.bytes_received(0, **WIDTHS, compression=[]), "compression must be"),
    (lambda: sr.estimate(PATTERN, tokens=64, backward=SEVERAL), "backward must be True or False"),
    (lambda: sr.choose_batch_size(PATTERN, tokens=64, memory=10**400), "memory must be bytes"),
    (lambda: nn.MultiheadAttention(16, 3), "embed_dim must be a multiple of num_heads"),
    (lambda: nn.MultiheadAttention(16, None), "num_heads must be an int"),
    (lambda: nn.MultiheadAttention(16, 2, vdim=1j), "vdim must be an int"),
    (lambda: nn.MultiheadAttention(16, 2, scale=10**400), "scale must be a finite float"),
    (lambda: attended(query=1), "query must be a tensor"),
    (lambda: attended(key=torch.tensor(1.0)), "query, key and value must be"),
    (lambda: attended(query=torch.ones(1, 8, 16).long()), "query must be of torch.float32"),
    (lambda: attended(attn_mask="causal"), "attn_mask must be a tensor"),
    (lambda: attended(key_padding_mask=NESTED), "key_padding_mask must be a dense tensor"),
    (lambda: attended(need_weights=SEVERAL), "need_weights must be True or False"),
    (lambda: nn.convert(3, PATTERN), "module must be a torch.nn.Module"),
    (lambda: LM([1.5], width=16), "pattern must be a sparsering pattern"),
    (lambda: LM(PATTERN, width="x"), "width must be an int"),
    (lambda: LM(PATTERN, width=16, num_layers=1.5), "num_layers must be an int"),
    (lambda: LM(PATTERN, width=16, rope_base=[1.5]), "rope_base must be a finite number"),
    (lambda: ENCODER(PATTERN, width=16, num_heads=0), "num_heads must be at least 1"),
    (lambda: ENCODER(PATTERN, width=16, in_width=2.0), "in_width must be an int"),
    (lambda: ENCODER(PATTERN, width=16, drop_path=""), "drop_path must be a finite number"),
    (lambda: ENCODER(PATTERN, width=16)(torch.ones(1, 8, 15)), "x must be floating point"),
    (lambda: generated(tokens=[1]), "tokens must be a tensor"),
    (lambda: generated(temperature=None), "temperature must be a finite number"),
    (lambda: generated(generator=[1]), "generator must be on the CPU"),
    (lambda: generated(caches=[-1]), "caches must be a KVCache list, one for each"),
    (lambda: generated(tokens=torch.tensor([[3, 11]])), "tokens must be from 0 to 10"),
    (lambda: generated(tokens=torch.tensor([[-1]])), "tokens must be from 0 to 10"),
    (lambda: generated(tokens=torch.zeros(1, 2).long().to("meta")), "expected tokens with numbers"),
    (lambda: selection.Schedule(((0, 1.0),), SEVERAL.numpy()), "kind must be one of"),
    (lambda: selected(scorer=SEVERAL.numpy()), "scorer must be one of"),
    (lambda: selected(gate=SEVERAL.numpy()), "gate must be one of"),
    (lambda: selected()(torch.ones(8, 16)), "add a missing dim with unsqueeze()"),
    (lambda: nn.MultiheadAttention(16, 2, device="x"), "device must be one that"),
    (lambda: nn.MultiheadAttention(16, 2, device=2**64), "device must be one that"),
    (lambda: attended(value=NESTED), "value must be a dense tensor"),
    (lambda: attended(query=NESTED), "query must be a dense tensor"),
    (lambda: (PATTERN + PATTERN) & (PATTERN + PATTERN), "& needs a pattern that is a mask"),
    (lambda: sr.from_mask_mod(lambda b, h, q, k: q > b, batch_size=2**31), "batch_size must be"),
    (lambda: kept(p=STRIDED), "dropout_p must be a number"),
    (lambda: kept(head=META), "head must be an int or a dense int64 tensor"),
    (lambda: kept(query_positions=NESTED.long()), "query_positions must be an int or a dense"),
    (lambda: observed(torch.rand(1, 2, 3, 2, device="meta"), SLOTS), "expected mass and"),
    (lambda: sr.merge_attention(STRIDED, [SEVERAL]), "sequences of dense tensors, got nested"),
    (lambda: sr.estimate(PATTERN, tokens=64, batch_size=2**53), "fewer than 2^60 numbers"),
    (lambda: sr.longest_sequence(PATTERN, memory="1GB", head_dim=2**53), "fewer than 2^60"),
    (lambda: biased(torch.zeros(1, 1, 1).to(torch.float8_e4m3fn)), "of 16 bits or more"),
    (lambda: attended(attn_mask=torch.ones(8, 8, device="meta").bool()), "expected attn_mask with"),
    (lambda: selected()(torch.ones(1, 8, 16).double()), "x must be of torch.float32, got"),
    (lambda: observed(torch.rand(1, 2, 3, 2), SLOTS.to("meta")), "expected mass and"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_an_argument_of_a_wrong_kind_is_named(number: int) -> None:
    call, words = WRONG[number]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert words in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "call",
    [
        lambda x: simulate_ring(*qkv(), PATTERN, world_size=2, sharding=x),
        lambda x: sr.choose_batch_size(PATTERN, tokens=64, memory=x),
        lambda x: sr.estimate(PATTERN, tokens=64, dtype=x),
        lambda x: sr.estimate(PATTERN, tokens=64, machine=x),
        lambda x: sr.Hierarchical(x, 16),
        lambda x: PATTERN.layout(8, device=x),
    ],
)
def test_a_long_text_is_quoted_in_part(call: Callable[[str], Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call("x" * 100_000)
    assert len(str(caught.value)) < 2000


def test_integers_of_numpy_and_torch_are_ints_from_then_on() -> None:
    found = sr.estimate(PATTERN, tokens=torch.tensor(64), num_heads=torch.tensor(2))
    assert type(found.tokens) is int and type(found.num_heads) is int
    layout = PATTERN.layout(torch.tensor(64), block_size=16)
    assert type(layout.frame.q_len) is int
    held = sr.KVCache(PATTERN, torch.tensor(1), torch.tensor(2), torch.tensor(8))
    x = qkv()
    torch.testing.assert_close(held.attend(*x), sr.attention(*x, PATTERN))


def lazily_negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


@pytest.mark.parametrize("which", range(3))
def test_lazily_negated_tensors_in_a_cache(which: int) -> None:
    x = qkv(40)
    given = [lazily_negated(y) if i == which else y for i, y in enumerate(x)]
    table = torch.randn(2, 7)
    held = sr.KVCache(PATTERN, 1, 2, 8)
    parts = [
        held.attend(*[y[:, :, a:b] for y in given], distance_bias=lazily_negated(table))
        for a, b in ((0, 30), (30, 35), (35, 40))
    ]
    expected = sr.attention(*x, PATTERN, distance_bias=table, backend="reference")
    torch.testing.assert_close(torch.cat(parts, 2), expected, rtol=1e-5, atol=1e-6)


def test_lazily_negated_positions_of_loaded_keys() -> None:
    x = qkv(40)
    expected = sr.attention(*x, PATTERN, backend="reference")[:, :, 30:]
    held = sr.KVCache(PATTERN, 1, 2, 8)
    held.load(*[y[:, :, :30] for y in x[1:]], lazily_negated(torch.arange(30)))
    found = held.attend(*[y[:, :, 30:] for y in x])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["sub", "exact"])
@pytest.mark.parametrize("which", range(2))
def test_lazily_negated_tensors_in_block_scores(method: str, which: int) -> None:
    x = qkv(80)[:2]
    given = [lazily_negated(y) if i == which else y for i, y in enumerate(x)]
    found = selection.block_scores(*given, 16, method=method)
    expected = selection.block_scores(*[y.double() for y in x], 16, method=method)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_query_block_of_torch_in_block_scores() -> None:
    x = qkv(40)[:2]
    found = selection.block_scores(*x, 16, query_block=torch.tensor(8))
    torch.testing.assert_close(found, selection.block_scores(*x, 16, query_block=8))


def test_lazily_negated_tensors_in_key_mass() -> None:
    query, key, _ = qkv(40)
    lse, table = torch.randn(1, 2, 40), torch.randn(2, 7)
    expected = sr.key_mass(query, key, PATTERN, lse, distance_bias=table)
    found = sr.key_mass(
        *map(lazily_negated, (query, key)),
        PATTERN,
        lazily_negated(lse),
        distance_bias=lazily_negated(table),
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_messages_escape_control_characters():
    name, (query, key, value) = "\x1b[31mred\u202e", qkv()
    for call in (
        lambda: sr.explain(query, key, value, PATTERN, **{name: 1}),
        lambda: cache().attend(query, key, value, **{name: 1}),
        lambda: sr.attention(query, key, value, PATTERN, backend=name),
        lambda: PATTERN.layout(8, device=name),
        lambda: sr.parse(name),
    ):
        with pytest.raises((TypeError, ValueError), match=r"\\x1b\[31mred\\u202e") as caught:
            call()
        assert str(caught.value).isprintable()
