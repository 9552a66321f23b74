"""The language model: causal, tied, equal to its dense twin, whether checkpointed or not."""

import math

import pytest
import torch
import torch.nn.functional as F

import sparsering as sr
from sparsering.models import LongNetLM, longnet
from sparsering.models.longnet import dense_causal_attention
from sparsering.nn.rope import rotary_table, rotate

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
    torch.testing.assert_close(
        model(tokens), model(tokens, attend=dense_causal_attention), rtol=0, atol=1e-12
    )


def test_longnet_pattern_equals_softmax_over_the_multiset_of_its_branches():
    model, tokens = tiny().double(), random_bytes(100)
    counts = (PATTERN & sr.Causal()).to_dense(100, num_heads=4)

    def attend(q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + counts.double().log()
        return scores.softmax(-1) @ v

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


def test_greedy_sample_is_the_likeliest_byte_and_padding_is_not_seen():
    model = tiny()
    prompt = b"import os\n"
    expected = list(prompt)
    for _ in range(5):
        expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    for window in (16, 40):
        assert model.sample(prompt, 5, temperature=0, window=window) == bytes(expected[10:])


def test_sample_follows_its_seed():
    model = tiny()
    texts = [model.sample(b"a", 20, temperature=5.0, window=32, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(ValueError, match="at least one byte"):
        model.sample(b"", 1)


def test_lookahead_is_taken_out_once():
    pattern = PATTERN & sr.Causal()
    assert tiny(pattern).pattern == pattern
    assert tiny(PATTERN).pattern == pattern
    either = sr.Causal() | sr.SlidingWindow(4, 4)
    assert tiny(either).pattern == either & sr.Causal()


def test_width_must_fit_the_heads():
    with pytest.raises(ValueError, match="width 30 and 4 heads"):
        LongNetLM(PATTERN, width=30, num_heads=4)
