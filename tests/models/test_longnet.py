"""The language model: causal, tied, equal to its dense twin, whether checkpointed or not."""

import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.thinned import thinned
from oracles.attention_oracle import dense_attention

import sparsering as sr
from sparsering.models import LongNetLM, longnet
from sparsering.models.next_token import Sampling
from sparsering.nn.transformer import rotary_table, rotate

PATTERN = sr.LongNet((16, 64), (1, 4))


def tiny(pattern=PATTERN, **options):
    torch.manual_seed(0)
    model = LongNetLM(pattern, width=32, num_layers=2, num_heads=4, **options)
    with torch.no_grad():  # fresh blocks are the identity, which would hide what attention does
        for block in model.blocks:
            block.out.weight.normal_(std=0.3)
            block.down.weight.normal_(std=0.1)
    return model


def random_bytes(length, batch=1):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pattern", [PATTERN, sr.Full(), sr.Causal() | sr.GlobalTokens(3)])
def test_changing_a_byte_changes_no_earlier_logit(pattern):
    model, tokens = tiny(pattern), random_bytes(100, batch=2)
    changed = tokens.clone()
    changed[:, 60] = (changed[:, 60] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :60], after[:, :60])
    assert not torch.equal(before[:, 60:], after[:, 60:])


def test_a_distant_byte_reaches_through_the_dilated_branch_alone():
    tokens = random_bytes(64)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 256

    def reach(pattern):
        model = tiny(pattern)
        return (model(tokens) - model(changed)).abs().amax(-1)[0] > 0

    assert not reach(sr.Dilated(16, 1))[16:].any()
    assert reach(PATTERN)[16:].any()


def test_causal_pattern_equals_dense_causal_attention():
    model, tokens = tiny(sr.Causal()).double(), random_bytes(150, batch=2)
    dense = model(tokens, attend=partial(F.scaled_dot_product_attention, is_causal=True))
    torch.testing.assert_close(model(tokens), dense, rtol=0, atol=1e-12)


def test_longnet_pattern_equals_softmax_over_the_multiset_of_its_branches():
    model, tokens = tiny().double(), random_bytes(100)
    counts = (PATTERN & sr.Causal()).to_dense(100, num_heads=4)

    def attend(q, k, v):
        return dense_attention(q, k, v, counts)[0]

    torch.testing.assert_close(model(tokens), model(tokens, attend=attend), rtol=0, atol=1e-12)


def test_the_embedding_is_also_the_readout():
    model = tiny()
    names = {name for name, p in model.named_parameters() if 256 in p.shape}
    assert names == {"embedding.weight"}
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model.loss(tokens, tokens).backward()
    assert (model.embedding.weight.grad[1:].abs().sum(1) > 0).all()  # bytes that were never read


def test_loss_in_pieces_is_the_cross_entropy_of_the_logits(monkeypatch):
    monkeypatch.setattr(longnet, "READOUT_TOKENS", 24)
    model, tokens = tiny().double(), random_bytes(51, batch=2)
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    (wanted,) = torch.autograd.grad(expected, model.embedding.weight)
    (got,) = torch.autograd.grad(loss, model.embedding.weight)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointed_layers_give_the_same_loss_and_gradients(dtype):
    tokens = random_bytes(81)
    results = []
    for checkpoint_layers in (False, True):
        model = tiny(checkpoint_layers=checkpoint_layers)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rotary_scores_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator).expand(1, 1, 200, 8) for _ in range(2))
    cos, sin = rotary_table(200, 8, 100.0, torch.device("cpu"))
    scores = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 17, 100):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)
    assert abs(scores[1, 0] - scores[0, 0]) > 0.01


# Generation: what the caches forgot, no later token sees. Each pattern at its own reach, at prompts
# of one token, of less than a segment or block, and of several.

GENERATED = 24
PATTERNS = [
    PATTERN,
    sr.LongNet((8, 32, 64), (1, 2, 8)),
    sr.Full(),
    sr.SlidingWindow(5),
    sr.SlidingWindow(4, 4, 3),
    sr.Causal() & (sr.SlidingWindow(7) | sr.GlobalTokens(3)),
    sr.Causal() + sr.SlidingWindow(9),
    sr.Dilated(16, 4, offset=(0, 1, 2, 3)),
    sr.BlockWindow(2, 16),
    sr.BlockDilated((1, 4), 16),
    sr.Hierarchical(((16, 64), (64, None)), 16),
    sr.RandomBlocks(0.5, 16, seed=3),
]


def talkative(pattern):
    """One that says more than the byte it has just read."""
    model = tiny(pattern)
    with torch.no_grad():
        for block in model.blocks:
            block.out.weight.normal_(std=1.5)
            block.down.weight.normal_(std=0.5)
    return model


def padded_model(model, tokens, total):
    """Logits of tokens [B, N] in a sequence of `total`: a causal model does not see the padding."""
    return model(F.pad(tokens, (0, total - tokens.shape[1])))[:, : tokens.shape[1]]


@pytest.mark.parametrize(("pattern", "length"), thinned(3, PATTERNS, [1, 10, 100]), ids=str)
@torch.no_grad()
def test_generation_is_that_of_the_model_without_caches(pattern, length):
    model, prompt = talkative(pattern), random_bytes(length, batch=2)
    total = length + GENERATED
    added = torch.stack(list(model.generate(prompt, GENERATED, temperature=0)), 1)
    assert added.shape == (2, GENERATED)
    text = torch.cat((prompt, added), 1)
    expected = model(text)[:, length - 1 : -1]
    assert torch.equal(added, expected.argmax(-1))
    assert len(added.unique()) > 4  # not one byte again and again

    caches = model.caches(2, max_length=total)
    parts = [prompt, *added[:, :-1].split(1, dim=1)]
    logits = torch.stack([model.next_logits(part, caches) for part in parts], 1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert caches[0].length == total - 1


@pytest.mark.parametrize("pattern", PATTERNS[::4], ids=str)
@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}])
@torch.no_grad()
def test_draws_are_those_of_the_model_without_caches(pattern, options):
    model, prompt = talkative(pattern), random_bytes(20, batch=3)
    added = list(
        model.generate(
            prompt, 12, temperature=2.0, generator=torch.Generator().manual_seed(5), **options
        )
    )
    generator, text = torch.Generator().manual_seed(5), prompt
    for token in added:
        logits = padded_model(model, text, 32)[:, -1]
        drawn = Sampling(2.0, **options).draw(logits, generator)
        assert torch.equal(token, drawn)
        text = torch.cat((text, drawn[:, None]), 1)


def test_every_layer_keeps_what_its_pattern_visits_and_no_more():
    model = tiny(sr.SlidingWindow(20))
    caches = model.caches()
    for count, _ in enumerate(model.generate(random_bytes(500), 300, caches=caches)):
        assert len(caches) == 2
        assert all(cache.length == 500 + count and cache.kept <= 20 + 128 for cache in caches)
        held, full = model.cache_bytes(caches)
        assert (
            full == 2 * 2 * 4 * 8 * (500 + count) * 4
        )  # layers, k and v, heads, head dim, float32
        assert held == sum(cache.nbytes for cache in caches) < full


def test_generation_in_inference_mode_is_the_same():
    model, prompt = tiny(), random_bytes(40)
    expected = list(model.generate(prompt, 10, temperature=0))
    with torch.inference_mode():
        assert list(model.generate(prompt, 10, temperature=0)) == expected


def test_generation_goes_on_from_its_caches():
    model, prompt = tiny(), random_bytes(40)
    whole = list(model.generate(prompt, 20, temperature=0))
    caches = model.caches()
    first = list(model.generate(prompt, 8, temperature=0, caches=caches))
    rest = model.generate(first[-1][:, None], 12, temperature=0, caches=caches)
    assert torch.equal(torch.stack([*first, *rest]), torch.stack(whole))


def test_generation_of_its_own_weights_follows_its_generator():
    model, prompt = tiny(), random_bytes(10)
    texts = [
        list(model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(1)
    assert list(model.generate(prompt, 20)) == texts[0]
    assert list(model.generate(prompt, 0)) == []


def test_each_text_ends_with_its_stop():
    model, prompt = tiny(), random_bytes(30, batch=2)
    free = torch.stack(list(model.generate(prompt, 20, temperature=0)), 1)
    for entry, place in ((0, 4), (1, 9), (1, 19)):
        stop = free[entry, place - 1 : place + 1].tolist()
        ends = []
        for row in free.tolist():
            found = [i + 2 for i in range(19) if row[i : i + 2] == stop]
            ends.append(min(found, default=20))
        got = torch.stack(list(model.generate(prompt, 20, temperature=0, stop=stop)), 1)
        assert got.shape[1] == max(ends)
        for row, known, end in zip(got, free, ends, strict=True):
            assert torch.equal(row[:end], known[:end])
            assert (row[end:] == -1).all()


def test_a_stop_in_bytes_that_is_only_in_the_prompt_stops_nothing():
    model = tiny()
    prompt = torch.tensor([list(b"a\n\n")])
    free = bytes(int(x) for x in model.generate(prompt, 20, temperature=0))
    assert b"\n\n" not in free
    kept = bytes(int(x) for x in model.generate(prompt, 20, temperature=0, stop=b"\n\n"))
    assert kept == free
    across = b"\n" + free[:1]
    assert across not in free
    assert len(list(model.generate(prompt, 20, temperature=0, stop=across))) == 20


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": torch.zeros(1, 0, dtype=torch.int64)}, "at least one token, got int64 [1, 0]"),
        ({"tokens": torch.zeros(1, 2)}, "int64 [B, N] of at least one token, got float32 [1, 2]"),
        ({"tokens": torch.zeros(2, dtype=torch.int64)}, "pass a newline"),
        ({"num_tokens": -1}, "num_tokens must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature must be a finite number from 0 up, got -0.5"),
        ({"temperature": math.nan}, "got nan"),
        ({"temperature": math.inf}, "got inf"),
        ({"top_k": 0}, "top_k must be an int above 0, got 0; None keeps all"),
        ({"top_k": 2.5}, "got 2.5"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0; 1 keeps all"),
        ({"top_p": 1.5}, "got 1.5"),
        ({"top_p": math.nan}, "got nan"),
        ({"stop": b""}, "stop must have a token, got an empty sequence"),
        ({"stop": [256]}, "each of stop must be at most 255, got 256"),
        ({"caches": []}, "one for each of 2 blocks, got 0; model.caches() makes them"),
    ],
)
def test_what_does_not_fit_is_said_at_the_call(changes, said):
    arguments = {"tokens": random_bytes(4), "num_tokens": 3} | changes
    with pytest.raises(ValueError, match=re.escape(said)):
        tiny().generate(**arguments)


def test_scores_that_are_not_finite_are_no_text():
    model = tiny()
    with torch.no_grad():
        model.embedding.weight[7, 0] = math.inf
    with pytest.raises(FloatingPointError, match="expected finite scores"):
        next(model.generate(random_bytes(4), 1))


def test_lookahead_is_taken_out_once():
    pattern = PATTERN & sr.Causal()
    assert tiny(pattern).pattern == pattern
    assert tiny(PATTERN).pattern == pattern
    either = sr.Causal() | sr.SlidingWindow(4, 4)
    assert tiny(either).pattern == either & sr.Causal()


def test_width_must_fit_the_heads():
    with pytest.raises(ValueError, match="width 30 and 4 heads"):
        LongNetLM(PATTERN, width=30, num_heads=4)
