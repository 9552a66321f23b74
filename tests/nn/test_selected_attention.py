"""`SelectedAttention` against dense mathematics over what it chose; what it chooses by; learning.

Beside it a small replica of the prior library's scorer, which the same criterion rejects.
"""

import math
from typing import Any

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import assert_close, dense_attention, dense_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparsering as sr
from sparsering.nn import SelectedAttention
from sparsering.nn.pooled import pooled_scores
from sparsering.nn.transformer import rotary_table
from sparsering.selection import block_scores, pool_blocks, select_blocks

E, H, HKV, SIZE = 24, 4, 2, 16

KINDS: dict[str, dict[str, Any]] = {
    "sub": {},
    "mean": {"scorer": "mean", "query_block": 4},
    "exact, rows of a block": {"scorer": "exact", "query_block": 16},
    "learned": {"scorer": "learned"},
    "window": {"window": 11},
    "pooled": {"pooled": (8, 4), "scorer": "pooled"},
    "all three": {"pooled": (6, 5), "scorer": "pooled", "window": 7, "local": 2},
    "learned, pooled": {"pooled": (16, 16), "scorer": "learned", "query_block": 8},
    "zero": {"pooled": (8, 4), "scorer": "pooled", "window": 7, "gate": "zero"},
    "encoder": {"causal": False, "sink": 0},
    "encoder, all three": {
        "causal": False,
        "pooled": (8, 8),
        "scorer": "pooled",
        "window": 7,
        "query_block": 4,
    },
    "encoder, learned": {"causal": False, "scorer": "learned", "query_block": 2, "local": 0},
}
LENGTHS = [1, 5, 47, 48, 49, 77]


def made(**options: Any) -> SelectedAttention:
    """A layer in float64 of which no weight is 0: gates begin there."""
    options = {"num_kv_heads": HKV, "block_size": SIZE, "k": 3, **options}
    layer = SelectedAttention(E, H, **options).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return layer


def drawn(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, E, dtype=torch.float64)


def projected(layer: SelectedAttention, x: Tensor) -> list[Tensor]:
    """Query, key, value [B, Hq, N, D]: keys repeated for the query heads that share them."""
    parts = [p(x).unflatten(2, (-1, E // H)) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
    return [y.transpose(1, 2).repeat_interleave(H * (E // H) // y[0, 0].numel(), 1) for y in parts]


def visible(layer: SelectedAttention, length: int) -> Tensor:
    return torch.ones(length, length).tril() > 0 if layer.causal else torch.ones(length, length) > 0


def chosen_pairs(layer: SelectedAttention, indices: Tensor, length: int) -> Tensor:
    """Bool [B, Hq, N, N] of int64 [B, Hkv, R, k]: token by token."""
    blocks = -(-length // SIZE)
    listed = torch.zeros(*indices.shape[:3], blocks + 1).scatter(
        3, torch.where(indices < 0, blocks, indices), 1.0
    )[..., :blocks]
    row, block = torch.arange(length) // layer.query_block, torch.arange(length) // SIZE
    return (listed[:, :, row][..., block] > 0).repeat_interleave(H // HKV, 1)


def choice_of(layer: SelectedAttention, x: Tensor) -> Tensor:
    query, key, _ = projected(layer, x)
    with torch.no_grad():
        scores = layer.scores(query, key[:, :: H // HKV])
    return select_blocks(
        scores,
        layer.k,
        block_size=SIZE,
        query_block=layer.query_block,
        sink=layer.sink,
        local=layer.local,
        causal=layer.causal,
    )


def windows(layer: SelectedAttention, key: Tensor, x: Tensor, starts: list[int]) -> Tensor:
    """[B, Hq, Np, D]: tokens of each window, by the softmax of u . k over it."""
    gate = (key * layer.pool_gate.repeat_interleave(H // HKV, 0)[:, None]).sum(-1, keepdim=True)
    size = layer.pooled[0]
    parts = [(x[:, :, c : c + size], gate[:, :, c : c + size].softmax(2)) for c in starts]
    return torch.stack([(x * weight).sum(2) for x, weight in parts], 2)


def by_dense_mathematics(layer: SelectedAttention, x: Tensor, dense: bool = False) -> Tensor:
    length, seen = x.shape[1], visible(layer, x.shape[1])
    query, key, value = projected(layer, x)
    pairs = seen if dense else seen & chosen_pairs(layer, choice_of(layer, x), length)
    outs = [dense_attention(query, key, value, pairs)[0]]
    if layer.window is not None:
        apart = (torch.arange(length)[:, None] - torch.arange(length)).abs()
        outs.append(dense_attention(query, key, value, seen & (apart < layer.window))[0])
    if layer.pooled is not None:
        size, stride = layer.pooled
        starts = [*range(0, max(1, length - size + stride), stride)]
        coarse = [windows(layer, key, y, starts) for y in (key, value)]
        past = torch.arange(length)[:, None] >= torch.tensor(starts) + size - 1
        past = past if layer.causal else torch.ones_like(past)
        outs.append(dense_attention(query, *coarse, past)[0])
    out = outs[0]
    if layer.gate_proj is not None:
        gate = (x @ layer.gate_proj.weight.T + layer.gate_proj.bias).unflatten(2, (H, -1, 1))
        gates = [g.transpose(1, 2) for g in gate.unbind(3)]
        if layer.gate == "sigmoid":
            out = sum(outs[i] / (1 + (-g).exp()) for i, g in enumerate(gates))
        else:
            out = out + sum(outs[i + 1] * g for i, g in enumerate(gates))
    return out.transpose(1, 2).reshape(x.shape) @ layer.out_proj.weight.T


@pytest.mark.parametrize(("kind", "length"), thinned(2, KINDS, LENGTHS))
def test_it_is_dense_mathematics_over_what_it_chose(kind, length):
    layer, x = made(**KINDS[kind]), drawn(length)
    weight = torch.randn_like(x)
    results = []
    for attend in (layer, lambda x: by_dense_mathematics(layer, x)):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        out = attend(given)
        (out * weight).sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        results.append((out.detach(), given.grad, grads))
    (out, grad, grads), (expected, expected_grad, expected_grads) = results
    assert_close(out, expected, 1e-11)
    assert_close(grad, expected_grad, 1e-10, "x")
    assert grads.keys() == expected_grads.keys()
    for name, one in grads.items():
        assert_close(one, expected_grads[name], 1e-9, name)


@pytest.mark.parametrize("kind", ["sub", "learned", "all three", "encoder"])
def test_dense_where_all_is_chosen_anyway_and_where_it_is_told_to_be(kind, monkeypatch):
    layer, x = made(**KINDS[kind]), drawn(77)
    sparse = layer(x)
    assert (sparse - by_dense_mathematics(layer, x, dense=True)).abs().max() > 1e-3
    everything = layer.k = 5
    assert everything * SIZE >= 77 and layer.is_dense(77) and not layer.is_dense(81)
    assert_close(layer(x), by_dense_mathematics(layer, x), 1e-11)  # all of what is chosen
    assert_close(layer(x), by_dense_mathematics(layer, x, dense=True), 1e-11)
    layer.k, layer.dense_below = 3, 78
    monkeypatch.setattr(layer, "scores", None)  # not asked
    assert_close(layer(x), by_dense_mathematics(layer, x, dense=True), 1e-11)
    assert not layer.is_dense(78)


@pytest.mark.parametrize("method", ["mean", "sub", "gauss", "bounds", "antidiagonal", "exact"])
def test_methods_are_those_of_block_scores(method):
    layer = made(scorer=method, query_block=4)
    query, key, _ = projected(layer, drawn(50))
    key = key[:, :: H // HKV]
    with torch.no_grad():
        expected = block_scores(query, key, SIZE, method=method, query_block=4)
    got = layer.scores(query, key)
    assert torch.equal(got, expected) and not got.requires_grad


@pytest.mark.parametrize(
    ("shape", "query_block", "causal"),
    thinned(
        2, [(8, 4, 64), (8, 4, 50), (5, 3, 37), (20, 20, 70), (40, 16, 61)], [1, 4], [True, False]
    ),
    ids=str,
)
def test_scores_of_pooled_keys_token_by_token(shape, query_block, causal, monkeypatch):
    size, stride, length = shape
    monkeypatch.setattr("sparsering.nn.pooled._AT_A_TIME", 500)  # in several parts
    query = torch.randn(2, H, length, 6, dtype=torch.float64)
    starts = [*range(0, max(1, length - size + stride), stride)]
    pooled = torch.randn(2, HKV, len(starts), 6, dtype=torch.float64)
    got = pooled_scores(
        query, pooled, SIZE, (size, stride), length, query_block=query_block, causal=causal
    )
    blocks, rows = -(-length // SIZE), -(-length // query_block)
    expected = torch.zeros(2, HKV, rows, blocks, dtype=torch.float64)
    for p in range(length):
        seen = [c for c, s in enumerate(starts) if not causal or p >= s + size - 1]
        if not seen:
            continue
        keys = pooled[:, :, seen].repeat_interleave(H // HKV, 1)
        share = (keys @ query[:, :, p, :, None])[..., 0].div(math.sqrt(6)).softmax(-1)
        share = share.view(2, HKV, H // HKV, -1).sum(2)
        for i, c in enumerate(seen):
            for token in range(starts[c], min(length, starts[c] + size)):
                expected[:, :, p // query_block, token // SIZE] += share[..., i] / size
    assert torch.equal(got == -torch.inf, expected == 0)
    assert_close(got.exp(), expected, 1e-12)


def test_scores_of_pooled_keys_rank_as_the_double_sum_of_nsa():
    """Equation 9 with l = 2d: keys that lie in a block count twice, by half of them once."""
    query, pooled = torch.randn(1, 2, 64, 6).double(), torch.randn(1, 1, 15, 6).double()
    got = pooled_scores(query, pooled, 16, (8, 4), 64, query_block=1, causal=False).exp()
    share = (query @ pooled.mT / math.sqrt(6)).softmax(-1).sum(1)
    for block in range(4):
        double = sum(
            share[..., c]
            for m in range(4)
            for n in range(2)
            if 0 <= (c := 4 * block + m - n) < share.shape[-1]
        )
        assert_close(got[:, 0, :, block], double / 2, 1e-12)


@pytest.mark.parametrize(("size", "stride"), [(8, 4), (5, 3), (7, 7), (40, 16)])
def test_pools_without_weights_are_means(size, stride):
    layer, x = made(pooled=(size, stride)), drawn(33)
    key, value = (y[:, :: H // HKV] for y in projected(layer, x)[1:])
    layer.pool_gate.data.zero_()
    assert_close(layer.pool(key, value), pool_blocks(value, size, stride), 1e-14)


@pytest.mark.parametrize("kind", ["sub", "learned", "all three", "window"])
def test_no_token_knows_a_later_one(kind):
    layer, x = made(**KINDS[kind]), drawn(70)
    out = layer(x)
    for p in (0, 5, 15, 16, 40, 63, 68):
        later = x.clone()
        later[:, p + 1 :] = 10 * torch.randn_like(later[:, p + 1 :])
        assert_close(layer(later)[:, : p + 1], out[:, : p + 1], 1e-11)
        assert not torch.equal(layer(later)[:, p + 1 :], out[:, p + 1 :])


def shares_of_blocks(layer: SelectedAttention, x: Tensor, pairs: Tensor) -> Tensor:
    """[B, Hkv, R, Nb]: dense softmax mass of each block, summed over a row's queries and heads."""
    query, key, _ = projected(layer, x)
    length = x.shape[1]
    blocks = -(-length // SIZE)
    each = torch.eye(blocks, dtype=x.dtype)[torch.arange(length) // SIZE]
    mass = dense_attention(query, key, each[None, None], pairs)[0].unflatten(1, (HKV, -1)).sum(2)
    row = torch.arange(length) // layer.query_block
    rows = torch.zeros(*mass.shape[:2], int(row[-1]) + 1, blocks, dtype=x.dtype)
    return rows.index_add(2, row, mass)


@pytest.mark.parametrize("kind", ["learned", "learned, pooled", "encoder, learned"])
@pytest.mark.parametrize("dense", [False, True])
def test_the_loss_is_of_the_mass_of_what_attended(kind, dense):
    layer, x = made(**KINDS[kind]), drawn(77)
    layer.k = 5 if dense else 3
    indices = choice_of(layer, x)
    pairs = visible(layer, 77) & (chosen_pairs(layer, indices, 77) | dense)
    mass = shares_of_blocks(layer, x, pairs).detach()
    query, key, _ = (y.detach() for y in projected(layer, x))
    scores = layer.scores(query, key[:, :: H // HKV])
    chosen = torch.zeros(*scores.shape[:3], 6).scatter(3, torch.where(indices < 0, 5, indices), 1.0)
    seen = (scores > -torch.inf) & ((chosen[..., :5] > 0) | dense)
    log_share = scores.masked_fill(~seen, -torch.inf).log_softmax(3).masked_fill(~seen, 0.0)
    share = mass / mass.sum(3, keepdim=True)
    expected = (share.xlogy(share) - share * log_share).sum(3).mean()
    out, loss = layer(x, return_loss=True)
    assert abs(loss.item() - expected.item()) < 1e-5  # the mass of dense scores is float32
    assert_close(out, layer(x), 1e-14)
    got = torch.autograd.grad(loss, [*layer.block_scorer.parameters()])
    wanted = torch.autograd.grad(expected, [*layer.block_scorer.parameters()])
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 1e-5)
    x.requires_grad_()
    _, loss = layer(x, return_loss=True)
    layer.zero_grad()
    loss.backward()
    learning = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert learning == {f"block_scorer.{n}" for n, _ in layer.block_scorer.named_parameters()}
    assert x.grad is None


def parameters_that_do_not_learn(layer: nn.Module, length: int = 77) -> list[str]:
    """The criterion: after one backward of all that is to be minimised every row has a gradient."""
    x = drawn(length)
    if getattr(layer, "block_scorer", None) is None:
        out, loss = layer(x), 0.0
    else:
        out, loss = layer(x, return_loss=True)
    layer.zero_grad()
    ((out * torch.randn_like(out)).sum() + loss).backward()
    return [
        name
        for name, weight in layer.named_parameters()
        if weight.grad is None or not (weight.grad != 0).any(-1).all()
    ]


@pytest.mark.parametrize("length", [30, 77])  # dense, and choosing
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_parameter(kind, length):
    assert parameters_that_do_not_learn(made(**KINDS[kind]), length) == []


def test_gates_begin_half_open_or_shut_and_learn_from_there():
    # nothing is learned behind a gate that is shut, but the gate
    for gate, begins, waiting in (("sigmoid", 0.5, []), ("zero", 0.0, ["pool_gate"])):
        layer = SelectedAttention(
            E, H, num_kv_heads=HKV, block_size=SIZE, k=3, window=9, pooled=(8, 4), gate=gate
        ).double()
        assert parameters_that_do_not_learn(layer) == waiting
        x = drawn(77)
        alone = SelectedAttention(E, H, num_kv_heads=HKV, block_size=SIZE, k=3).double()
        alone.load_state_dict({k: v for k, v in layer.state_dict().items() if "gate" not in k})
        if begins == 0.0:
            assert_close(layer(x), alone(x), 1e-14)
        else:
            layer.gate_proj.bias.data.view(H, -1)[:, 1:] = -torch.inf  # the other branches shut
            assert_close(layer(x), begins * alone(x), 1e-14)


class PriorAdaptive(nn.Module):
    """The prior library's adaptive attention, in small: a scorer whose scores end in a top-k.

    Its importance net was read by `topk(...).indices` alone, through which no gradient flows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(E, E, bias=False, dtype=torch.float64) for _ in range(4)
        )
        self.importance = nn.Sequential(
            nn.Linear(2 * E, 16, dtype=torch.float64),
            nn.ReLU(),
            nn.Linear(16, 1, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        blocks = x.shape[1] // SIZE
        means = key[:, : blocks * SIZE].unflatten(1, (blocks, SIZE)).mean(2)
        rows = query[:, : blocks * SIZE].unflatten(1, (blocks, SIZE)).mean(2)
        both = torch.cat(torch.broadcast_tensors(rows[:, :, None], means[:, None]), -1)
        indices = self.importance(both)[..., 0].topk(2, -1).indices
        pattern = sr.SelectedBlocks(indices[:, None], SIZE) & sr.Causal()
        x = (y[:, None, : blocks * SIZE] for y in (query, key, value))
        return self.out_proj(sr.attention(*x, pattern)[:, 0])


def test_the_criterion_rejects_a_scorer_that_no_gradient_reaches():
    cut = parameters_that_do_not_learn(PriorAdaptive())
    assert cut == [f"importance.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    assert parameters_that_do_not_learn(made(**KINDS["learned"])) == []
    layer = made(**KINDS["learned"])
    scores = layer.scores
    layer.scores = lambda *tensors: scores(*tensors).detach().requires_grad_()
    assert parameters_that_do_not_learn(layer) == [
        "block_scorer.pool",
        "block_scorer.project_key",
        "block_scorer.project_query",
    ]


def test_rotary_positions_turn_queries_and_keys():
    layer, x = made(), drawn(60)
    cos, sin = rotary_table(60, E // H, 100.0, x.device)
    cos, sin = cos.double(), sin.double()

    def turned(kind):
        even, odd = kind.chunk(2, -1)
        return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1)

    query, key, value = projected(layer, x)
    query, key = turned(query), turned(key)
    indices = select_blocks(block_scores(query, key[:, :: H // HKV], SIZE), 3, block_size=SIZE)
    pairs = visible(layer, 60) & chosen_pairs(layer, indices, 60)
    expected = dense_attention(query, key, value, pairs)[0].transpose(1, 2).reshape(x.shape)
    assert_close(layer(x, rope=(cos, sin)), expected @ layer.out_proj.weight.T, 1e-11)


def test_under_checkpointing_and_twice_the_bits_are_the_same():
    layer, x = made(**KINDS["learned, pooled"]), drawn(77).requires_grad_()

    def gradients(through):
        layer.zero_grad()
        out, loss = through(lambda x: layer(x, return_loss=True))
        return torch.autograd.grad(out.sum() + loss, [x, *layer.parameters()])

    plain = gradients(lambda call: call(x))
    for again in (lambda call: checkpoint(call, x, use_reentrant=False), lambda call: call(x)):
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(again), strict=True))


@pytest.mark.parametrize("kind", ["sub", "learned", "all three"])
def test_half_precision_and_autocast_follow_float64(kind):
    layer, x = made(**KINDS[kind]), drawn(77)
    layer.k = 4
    expected = layer(x)
    layer.float()
    single = layer(x.float())
    assert single.dtype == torch.float32
    assert_close(single.double(), expected, 1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16
    half = layer.to(torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16 and half.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_goes_to_another_layer_and_no_tokens_are_fine(kind):
    layer, other, x = made(**KINDS[kind]), made(**KINDS[kind]), drawn(77)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))
    assert layer(x[:, :0]).shape == (2, 0, E) and layer(x[:0]).shape == (0, 77, E)


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("learned", 77),
        pytest.param("learned", 47, marks=pytest.mark.slow),  # dense
        pytest.param("learned, pooled", 77, marks=pytest.mark.slow),
        pytest.param("encoder, learned", 77, marks=pytest.mark.slow),
    ],
)
def test_the_loss_compiles_as_one_graph(kind, length):
    layer = made(**KINDS[kind])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in (0, 1):
        x = torch.randn(2, length, E, dtype=torch.float64, generator=torch.manual_seed(seed))
        found, expected = compiled(x, return_loss=True), layer(x, return_loss=True)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, 1e-12)
        weights = list(layer.parameters())
        grads = [torch.autograd.grad(out.square().sum() + loss, weights, allow_unused=True)
                 for out, loss in (found, expected)]  # fmt: skip
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a - b).abs().max() <= 1e-10 * (1 + b.abs().max())
        assert expected[1] > 0


def test_presets_are_what_they_say():
    nsa = SelectedAttention.nsa(E, H, num_kv_heads=1)
    told = (nsa.block_size, nsa.k, nsa.query_block, nsa.window, nsa.pooled, nsa.sink, nsa.local)
    assert told == (64, 16, 1, 512, (32, 16), 1, 2) and nsa.scorer == "pooled"
    assert nsa.gate_proj.out_features == 3 * H
    moba = SelectedAttention.moba(E, H)
    assert (moba.block_size, moba.k, moba.sink, moba.local) == (512, 3, 0, 1)
    assert moba.scorer == "mean" and moba.gate_proj is None and moba.num_kv_heads == H
    adaptive = SelectedAttention.adaptive(E, H, num_kv_heads=HKV, k=4)
    assert adaptive.block_scorer is not None and adaptive.k == 4
    hierarchical = SelectedAttention.hierarchical(E, H)
    assert hierarchical.pooled == (64, 64) and hierarchical.window == 256


def test_moba_by_its_definition():
    """Each head: the query's block and, of those before it, the 2 of largest q . mean(keys)."""
    layer = SelectedAttention.moba(E, H, block_size=SIZE).double()
    x = drawn(77)
    query, key, value = projected(layer, x)
    pairs = torch.zeros(2, H, 77, 77, dtype=torch.bool)
    for p in range(77):
        own = p // SIZE
        means = [key[:, :, b * SIZE : (b + 1) * SIZE].mean(2) for b in range(own)]
        pairs[:, :, p, own * SIZE : p + 1] = True
        if own:
            gate = torch.stack([(m * query[:, :, p]).sum(-1) for m in means], -1)
            for b, h in ((b, h) for b in range(2) for h in range(H)):
                for block in gate[b, h].topk(min(2, own)).indices.tolist():
                    pairs[b, h, p, block * SIZE : (block + 1) * SIZE] = True
    expected = dense_attention(query, key, value, pairs)[0].transpose(1, 2).reshape(x.shape)
    assert_close(layer(x), expected @ layer.out_proj.weight.T, 1e-11)


def test_a_learned_scorer_learns_what_the_layer_attends_to():
    """Trained by its loss alone, dense, then choosing: what it chooses captures more attention."""
    layer = SelectedAttention.adaptive(E, H, num_kv_heads=HKV, block_size=SIZE, k=3, sink=0)
    topics = 2.0 * torch.randn(6, E)  # of tokens; blocks are of one topic each

    def drawn_topics() -> Tensor:
        return topics[torch.randint(6, (4, 12))].repeat_interleave(SIZE, 1) + torch.randn(4, 192, E)

    def loss() -> Tensor:
        layer.k = 12
        found: Tensor = layer(drawn_topics(), return_loss=True)[1]
        layer.k = 3
        return found

    def captured() -> float:
        x = drawn_topics()
        query, key, _ = projected(layer, x)
        pairs = visible(layer, 192)
        chosen = chosen_pairs(layer, choice_of(layer, x), 192)
        share = (dense_weights(query, key, pairs) * chosen).sum(-1)
        return share[:, :, 96:].mean().item()

    with torch.no_grad():
        layer.q_proj.weight.mul_(2)
        layer.k_proj.weight.mul_(2)
        before, first = captured(), loss().item()
    optimizer = torch.optim.Adam(layer.block_scorer.parameters(), 1e-2)
    for step in range(120):
        layer.k = 12 if step < 80 else 3
        found = layer(drawn_topics(), return_loss=True)[1]
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
    with torch.no_grad():
        after, last = captured(), loss().item()
    assert last < 0.25 * first and after > before + 0.15, (first, last, before, after)


def learns_flagged_facts(gate: str, steps: int) -> bool:
    """From scratch, choosing 2 of 17 blocks: whether 9 of 10 questions are answered in the end.

    A block has 16 facts (a key and a value), one of them flagged; keys of the others repeat those
    of flagged ones. A question is a key; its answer is the value of the flagged fact with it.
    """
    keys_, values, blocks, asked, dim = 64, 8, 16, 16, 16
    torch.manual_seed(0)
    of_key, of_value = nn.Embedding(keys_, dim), nn.Embedding(values, dim)
    flag, asking = (nn.Parameter(torch.randn(dim)) for _ in range(2))
    readout = nn.Linear(dim, values)
    layer = SelectedAttention(
        dim, 1, block_size=16, k=2, sink=0, local=0, pooled=(16, 16), scorer="pooled", gate=gate
    )
    modules = nn.ModuleList((of_key, of_value, readout, layer))
    optimizer = torch.optim.Adam([*modules.parameters(), flag, asking], 1e-2)
    recent = 0.0
    for _ in range(steps):
        flagged = torch.rand(8, keys_).argsort(1)[:, :blocks]
        keys, value = (torch.randint(n, (8, blocks, 16)) for n in (keys_, values))
        place = torch.randint(16, (8, blocks, 1))
        keys.scatter_(2, place, flagged[..., None])
        marked = torch.zeros(8, blocks, 16, 1).scatter_(2, place[..., None], 1.0)
        question = torch.randint(blocks, (8, asked))
        answer = value.gather(2, place)[..., 0].gather(1, question).flatten()
        facts = of_key(keys) + of_value(value) + marked * flag
        x = torch.cat((facts.flatten(1, 2), of_key(flagged.gather(1, question)) + asking), 1)
        logits = readout(layer(x)[:, -asked:]).flatten(0, 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, answer).backward()
        optimizer.step()
        recent = 0.95 * recent + 0.05 * (logits.argmax(1) == answer).double().mean().item()
        if recent > 0.9:
            return True
    return False


@pytest.mark.slow  # a minute: hundreds of steps
def test_the_pooled_branch_learns_to_choose_from_scratch_behind_a_gate_that_is_open():
    assert learns_flagged_facts("sigmoid", 600)
    assert not learns_flagged_facts("zero", 600)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_heads": 5}, "multiple of num_heads"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"scorer": "best"}, "scorer must be one of mean"),
        ({"scorer": "antidiagonal"}, "parts must divide"),
        ({"scorer": "pooled"}, r"pooled=\(32, 16\)"),
        ({"pooled": 32}, "size, stride"),
        ({"pooled": (32, 0)}, "stride must be at least 1"),
        ({"pooled": (16, 32)}, "stride must be at most 16"),
        ({"gate": "softmax"}, "gate must be one of"),
        ({"k": 1}, "at most k=1"),
        ({"query_block": 48}, "query_block must divide"),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        SelectedAttention(**{"embed_dim": E, "num_heads": H, **options})


def test_calls_that_do_not_fit_are_refused():
    layer = made()
    with pytest.raises(ValueError, match=r"\[B, N, 24\]"):
        layer(torch.zeros(3, E + 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="needs scorer='learned'"):
        layer(drawn(5), return_loss=True)
