"""The encoder: bidirectional, equal to its dense twin, on a line or a grid, alone or over ranks."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.ring_workers import Workers
from oracles.attention_oracle import dense_attention

import sparsering as sr
from sparsering.distributed import ring_attention, shard, simulate_ring, unshard
from sparsering.models import LongNetEncoder
from sparsering.nn.transformer import rotary_table

PATTERN = sr.LongNet((16, 128), (1, 4))


def tiny(pattern=PATTERN, **options):
    torch.manual_seed(0)
    options = {"in_width": 12, "width": 32, "num_layers": 2, "num_heads": 4, **options}
    model = LongNetEncoder(pattern, **options)
    with torch.no_grad():  # fresh blocks are the identity, which would hide what attention does
        for block in model.blocks:
            block.out.weight.normal_(std=0.3)
            block.down.weight.normal_(std=0.1)
        model.norm.weight.uniform_(0.5, 1.5)
    return model


def tiles(N, batch=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, N, 12, generator=generator, dtype=dtype)
    return x, torch.randint(0, 50, (batch, N, 2), generator=generator)


def dense(pattern, num_heads=4):
    def attend(q, k, v):
        return dense_attention(q, k, v, pattern.to_dense(q.shape[2], num_heads=num_heads))[0]

    return attend


def outputs_and_gradients(model, *inputs, **options):
    out = model(*inputs, **options)
    out = torch.stack(out) if isinstance(out, list) else out
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    model = getattr(model, "_orig_mod", model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad((out * weight).sum(), parameters)
    return out.detach(), dict(zip(names, grads, strict=True))


def assert_same(got, expected, tolerance):
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=tolerance)
    for name, grad in expected[1].items():
        scale = max(1.0, float(grad.abs().max()))
        assert (got[1][name] - grad).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("N", [1, 7, 130])
def test_results_and_gradients_are_those_of_dense_attention(axes, N):
    model = tiny(axes=axes).double()
    x, coordinates = tiles(N, 2, torch.float64)
    inputs = (x, coordinates) if axes == 2 else (x,)
    expected = outputs_and_gradients(model, *inputs, attend=dense(PATTERN))
    got = outputs_and_gradients(model, *inputs)
    assert got[0].shape == (2, N + 1, 32)
    assert_same(got, expected, 1e-10)
    assert all(grad.abs().max() > 0 for grad in got[1].values())


def test_tokens_see_what_comes_after_them_and_not_what_the_pattern_leaves_out():
    model = tiny(sr.Dilated(16, 1), num_layers=1)
    x, _ = tiles(40)
    changed = x.clone()
    changed[0, 20] += 1  # token 21, of the segment 16 to 31
    differs = (model(x) - model(changed)).abs().amax(-1)[0] > 0
    assert differs[16:32].all() and not differs[:16].any() and not differs[32:].any()


def test_the_class_token_is_first_and_learned():
    model = tiny()
    x, _ = tiles(9)
    assert model(x).shape == (1, 10, 32)
    states = model(x, all_layer_embed=True)
    first = F.rms_norm(model.class_token, (32,)) * model.norm.weight
    torch.testing.assert_close(states[0][0, 0], first)
    without = tiny(class_token=False)
    assert without(x).shape == (1, 9, 32)
    assert "class_token" not in without.state_dict()


def test_all_layer_embed_is_what_shorter_encoders_return():
    model = tiny(num_layers=3)
    x, _ = tiles(20, 2)
    states = model(x, all_layer_embed=True)
    assert len(states) == 4 and torch.equal(states[3], model(x))
    for depth in range(4):
        shorter = copy.deepcopy(model)
        shorter.blocks = shorter.blocks[:depth]
        assert torch.equal(states[depth], shorter(x))


# Positions


def scores_of(model, x, *coordinates):
    """The scores of the first block's attention."""
    found = []

    def attend(q, k, v):
        found.append(q @ k.mT)
        return v

    model(x, *coordinates, attend=attend)
    return found[0]


@pytest.mark.parametrize("axes", [1, 2])
def test_scores_see_differences_of_coordinates(axes):
    model = tiny(axes=axes, class_token=False).double()
    x, grid = tiles(12, 2, torch.float64)
    grid = grid if axes == 2 else grid[..., 0]
    before = scores_of(model, x, grid)
    torch.testing.assert_close(scores_of(model, x, grid + 17), before, rtol=0, atol=1e-4)
    moved = grid.clone()
    moved[1, 5] += 3
    after = scores_of(model, x, moved)
    assert torch.equal(before[0], after[0])  # each entry has its own
    same = torch.ones(12, 12, dtype=torch.bool)
    same[5], same[:, 5], same[5, 5] = False, False, True
    torch.testing.assert_close(after[1][:, same], before[1][:, same], rtol=0, atol=1e-4)
    assert (after[1] - before[1])[:, ~same].abs().max() > 0.01


def test_rows_and_columns_are_told_apart():
    model = tiny(axes=2, class_token=False)
    x, grid = tiles(12)
    before, turned = (scores_of(model, x, c) for c in (grid, grid.flip(-1)))
    assert (before - turned).abs().max() > 0.1
    for axis in (0, 1):
        moved = grid.clone()
        moved[0, 3, axis] += 2
        assert (scores_of(model, x, moved) - before).abs().max() > 0.01


def test_coordinates_of_a_line_default_to_the_sequence_and_may_be_shared():
    model = tiny()
    x, grid = tiles(12, 2)
    torch.testing.assert_close(model(x, torch.arange(1, 13)), model(x), rtol=0, atol=0)
    assert (model(x, torch.arange(2, 14)) - model(x)).abs().max() > 1e-3
    model = tiny(axes=2)
    shared = grid[:1].expand(2, -1, -1)
    torch.testing.assert_close(model(x, grid[0]), model(x, shared), rtol=0, atol=1e-6)


@pytest.mark.parametrize("given", ["coordinates", "positions"])
def test_arrays_in_place_of_tensors_name_the_way_out(given):
    model, (x, _) = tiny(), tiles(12, 2)
    for value in (torch.arange(12).numpy(), list(range(12))):
        with pytest.raises(ValueError, match=rf"{given} must be a tensor .*torch\.as_tensor"):
            model(x, **{given: value})


# Stochastic depth


def test_dropped_paths_leave_entries_as_they_are():
    model = tiny(num_layers=2, drop_path=0.5)
    x, _ = tiles(9, 64)
    model.eval()
    whole = model(x, all_layer_embed=True)
    model.train()
    torch.manual_seed(5)
    states = model(x, all_layer_embed=True)
    torch.testing.assert_close(states[1], whole[1], rtol=0, atol=1e-6)  # the first drops none
    changed = (states[2] - states[1]).abs().amax((1, 2)) > 1e-6
    assert 64 * 0.6 < changed.sum() < 64 * 0.9  # both parts are dropped in a quarter
    torch.manual_seed(5)
    assert torch.equal(model(x), states[2])


def test_each_part_of_a_block_is_scaled_by_its_own_share():
    block = tiny(sr.Full(), num_layers=1).double().blocks[0]
    x = torch.randn(3, 20, 32, dtype=torch.float64)
    cos, sin = rotary_table(20, 8, 100.0, x.device)
    run = partial(block, x, cos, sin, partial(sr.attention, pattern=sr.Full()))
    both = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(run(both), run()) and torch.equal(run(0 * both), x)
    attention, mlp = both.clone(), both.clone()
    attention[1], mlp[0] = 0, 0
    for part in (attention, mlp):
        added, scaled = run(part) - x, run(part * torch.tensor([0.0, 1.0, 2.5])) - x
        assert added.abs().amax((1, 2)).min() > 0.1 and not scaled[0].any()
        torch.testing.assert_close(scaled[1:], added[1:] * torch.tensor([1, 2.5])[:, None, None])
    assert (run(attention) - run(mlp)).abs().max() > 0.1


def test_kept_paths_are_scaled_up():
    model = tiny(drop_path=0.5, num_layers=3)
    shares = model.train()._shares(torch.zeros(4000, 1, 1))
    for share, rate in zip(shares, (0.0, 0.25, 0.5), strict=True):
        assert share.shape == (2, 4000)
        kept = share > 0
        torch.testing.assert_close(share[kept].unique(), torch.tensor([1 / (1 - rate)]))
        assert abs(kept.float().mean() - (1 - rate)) < 0.03
        assert rate == 0 or not torch.equal(kept[0], kept[1])
    assert model.eval()._shares(torch.zeros(4, 1, 1)) == [None] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointed_layers_give_the_same_results_and_gradients(dtype):
    x, grid = tiles(50, 2)
    results = []
    for checkpoint_layers in (False, True):
        model = tiny(axes=2, drop_path=0.5, checkpoint_layers=checkpoint_layers).train()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            results.append(outputs_and_gradients(model, x, grid))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(g, results[1][1][name]) for name, g in results[0][1].items())


@pytest.mark.parametrize("class_token", [True, False])
def test_the_residual_stream_stays_in_the_parameters_dtype_under_autocast(class_token):
    model = tiny(class_token=class_token)
    x, _ = tiles(20, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.float32
    assert 0 < (out - model(x)).abs().max() < 0.2


def test_it_is_one_graph():
    model = tiny(axes=2)
    x, grid = tiles(30)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(
        outputs_and_gradients(compiled, x, grid), outputs_and_gradients(model, x, grid), 1e-5
    )


def test_tokens_enter_with_one_size():
    model = tiny(in_width=None, class_token=False)
    x = torch.randn(1, 20, 32)
    torch.testing.assert_close(model(3 * x), model(x), rtol=0, atol=1e-4)


def test_copies_and_state_dicts_give_the_same():
    model = tiny(axes=2)
    x, grid = tiles(30)
    other = LongNetEncoder(PATTERN, in_width=12, width=32, num_layers=2, num_heads=4, axes=2)
    assert (other(x, grid) - model(x, grid)).abs().max() > 0.1
    other.load_state_dict(model.state_dict(), strict=True)
    for same in (other, copy.deepcopy(model)):
        assert torch.equal(same(x, grid), model(x, grid))
    half = model.bfloat16()(x.bfloat16(), grid)
    assert half.dtype == torch.bfloat16
    assert (half - other(x, grid)).abs().max() < 0.2


def test_it_learns():
    torch.manual_seed(0)
    model = LongNetEncoder(PATTERN, in_width=4, width=16, num_layers=1, num_heads=2)
    readout = torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *readout.parameters()], lr=1e-2)
    x = torch.randn(32, 20, 4)
    target = x[:, 3::4, 0].mean(1, keepdim=True)  # of the tokens on the class token's grid
    losses = []
    for _ in range(60):
        loss = F.mse_loss(readout(model(x)[:, 0]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


# Over ranks: each has a part of the sequence, and the gradients add up


def part_of(model, x, grid, weight, cut, rank_attend, here):
    """A rank's output and gradients; what stands where the class token will is not read."""
    x = F.pad(x, (0, 0, 1, 0), value=torch.nan)
    grid = F.pad(grid, (0, 0, 1, 0), value=99)
    part = cut(torch.arange(x.shape[1]), dim=0)
    out = model(cut(x, dim=1), cut(grid, dim=1), attend=rank_attend, positions=part)
    grads = torch.autograd.grad((out * cut(weight, dim=1)).sum(), list(model.parameters()))
    return out.detach(), grads


def encode_on_rank(rank, sharding, N):
    model = tiny(axes=2, drop_path=0.5).double().train()
    x, grid = tiles(N, 2, torch.float64)
    weight = torch.randn(2, N + 1, 32, generator=torch.Generator().manual_seed(2)).double()
    cut = partial(shard, sharding=sharding)
    ring = partial(ring_attention, pattern=PATTERN, sharding=sharding)
    torch.manual_seed(9)
    out, grads = part_of(model, x, grid, weight, cut, ring, rank)
    whole = unshard(out, dim=1, sharding=sharding, length=N + 1)
    for grad in grads:
        torch.distributed.all_reduce(grad)
    return whole, [grad.clone() for grad in grads]


@pytest.fixture(scope="module")
def two():
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.mark.parametrize(("sharding", "N"), [("contiguous", 100), ("zigzag", 37)])
def test_ranks_of_a_ring_give_the_results_and_gradients_of_one_process(two, sharding, N):
    model = tiny(axes=2, drop_path=0.5).double().train()
    x, grid = tiles(N, 2, torch.float64)
    weight = torch.randn(2, N + 1, 32, generator=torch.Generator().manual_seed(2)).double()
    torch.manual_seed(9)
    out = model(x, grid)
    grads = torch.autograd.grad((out * weight).sum(), list(model.parameters()))
    for whole, of_rank in two.run(encode_on_rank, sharding, N):
        torch.testing.assert_close(whole, out.detach(), rtol=0, atol=1e-11)
        for got, expected in zip(of_rank, grads, strict=True):
            scale = max(1.0, float(expected.abs().max()))
            assert (got - expected).abs().max() <= 1e-11 * scale


def test_a_simulated_ring_attends_alike():
    model = tiny(axes=2).double()
    x, grid = tiles(60, 1, torch.float64)
    ring = partial(simulate_ring, pattern=PATTERN, world_size=3)
    torch.testing.assert_close(model(x, grid, attend=ring), model(x, grid), rtol=0, atol=1e-11)


def test_attention_of_each_block_may_be_its_own():
    model = tiny()
    x, _ = tiles(40)
    own = [partial(sr.attention, pattern=p) for p in (PATTERN, sr.Full())]
    full = [partial(sr.attention, pattern=sr.Full())] * 2
    assert (model(x, attend=own) - model(x)).abs().max() > 1e-3
    assert (model(x, attend=own) - model(x, attend=full)).abs().max() > 1e-3
    with pytest.raises(ValueError):
        model(x, attend=own[:1])


def test_what_does_not_fit_is_refused():
    for wrong, options in (
        ("axes", {"axes": 3}),
        ("width", {"num_heads": 5}),
        ("width", {"num_heads": 16, "axes": 2}),
        ("drop_path", {"drop_path": 1.0}),
    ):
        with pytest.raises(ValueError, match=wrong):
            tiny(**options)
    x, grid = tiles(9, 2)
    model = tiny(axes=2)
    for wrong in (None, grid[..., 0], grid[:, :8], grid[:1], torch.zeros(9)):
        with pytest.raises(ValueError, match=r"coordinates must be \[9, 2\] or \[2, 9, 2\]"):
            model(x, wrong)
    with pytest.raises(ValueError, match=r"coordinates must be \[9\] or \[2, 9\]"):
        tiny()(x, grid)
    with pytest.raises(ValueError, match=r"positions must be \[9\]"):
        model(x, grid, positions=torch.arange(10))


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int32])
def test_pixels_are_warned_of_once_by_their_common_divisor(axes, batch, dtype):
    steps = torch.randint(0, 90, (*batch, 40, 2), generator=torch.Generator().manual_seed(3))
    steps = (steps if axes == 2 else steps[..., 0]).to(dtype)
    x = torch.randn(2, 40, 12)
    model = tiny(axes=axes)
    with pytest.warns(UserWarning, match=r"are multiples of 224, .* pass coordinates // 224"):
        model(x, 224 * steps + 7)
    model(x, 224 * steps + 7)  # warnings are errors here: it warns once
    for right in (steps, 2 * steps, steps + 0.5, 0 * steps, steps * 16.5):
        tiny(axes=axes)(x, right)
    assert torch.equal(model(x, steps), tiny(axes=axes)(x, steps))


@pytest.mark.parametrize("in_width", [12, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_features_of_half_precision_are_computed_in_the_parameters_dtype(in_width, dtype):
    model = tiny(in_width=in_width)
    x = torch.randn(1, 20, in_width or 32).to(dtype)
    out = model(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, model(x.float()))


def test_messages_about_features_say_what_helps():
    model, x = tiny(), torch.randn(20, 12)
    for wrong, said in (
        (x, r"got torch.float32 \(20, 12\); x\[None\] is a batch of one sequence"),
        (torch.ones(1, 20, 12, dtype=torch.uint8), r"x.float\(\) converts it"),
        (torch.randn(1, 20, 13), r"construct the encoder with in_width=x.shape\[2\]"),
        (torch.randn(20), "stack them by torch.stack"),
    ):
        with pytest.raises(ValueError, match=said):
            model(wrong)
