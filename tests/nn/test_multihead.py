"""`MultiheadAttention` against torch's, with every option; what surrounds it; `convert`."""

import copy
import pickle
from typing import Any

import pytest
import torch
from oracles.attention_oracle import assert_close
from torch import Tensor, nn

import sparsering as sr
from sparsering.nn import MultiheadAttention, convert

B, L, S, E, H = 2, 7, 9, 12, 3
WINDOW = sr.SlidingWindow(2, 1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def pair(seed: int = 0, **options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Ours and torch's from one seed, float64."""
    made = []
    for kind in (MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(seed)
        made.append(kind(E, H, dtype=torch.float64, **options))
    ours, torchs = made
    with torch.no_grad():  # torch's biases begin at 0
        for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(a, b)
            a.add_(0.1 * torch.randn_like(a))
            b.copy_(a)
    return ours, torchs


def inputs(self_attention: bool, kdim: int = E, vdim: int = E) -> list[Tensor]:
    x = drawn(B, L, E)
    return [x, x, x] if self_attention else [x, drawn(B, S, kdim), drawn(B, S, vdim)]


def blocked(*shape: int) -> Tensor:
    """A mask of torch's that leaves each query the first key."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


def compare(ours: nn.Module, torchs: nn.Module, x: list[Tensor], **call: Any) -> None:
    """Outputs, weights and gradients of inputs, parameters and float masks are equal."""
    results = []
    for module in (ours, torchs):
        leaves: dict[int, Tensor] = {id(y): y.clone().requires_grad_() for y in x}
        given = [leaves[id(y)] for y in x]
        module.zero_grad()
        out, weights = module(*given, **call)
        loss = (out * torch.arange(out.numel()).view_as(out).cos()).sum()
        if weights is not None:
            loss = loss + (weights * torch.arange(weights.numel()).view_as(weights).sin()).sum()
        loss.backward()
        grads = [leaf.grad for leaf in leaves.values()]
        grads += [parameter.grad for parameter in module.parameters()]
        results.append((out, weights, *grads))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert_close(a, b, 1e-12)


OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "more keys": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "both, without bias": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "other widths": {"kdim": 5, "vdim": 8, "batch_first": True},
    "other widths and more keys": {"kdim": 5, "vdim": 8, "add_bias_kv": True},
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_gives_what_torch_gives(name, need_weights):
    options = OPTIONS[name]
    ours, torchs = pair(**options)
    widths = {width: options[width] for width in ("kdim", "vdim") if width in options}
    for self_attention in (False,) if widths else (False, True):
        x = inputs(self_attention, **widths)
        x = x if "batch_first" in options else [y.transpose(0, 1) for y in x]
        if self_attention:
            x = [x[0]] * 3
        compare(ours, torchs, x, need_weights=need_weights)
        compare(ours, torchs, x, need_weights=need_weights, average_attn_weights=False)
        alone = [y[0] if "batch_first" in options else y[:, 0] for y in x]
        alone = [alone[0]] * 3 if self_attention else alone
        compare(ours, torchs, alone, need_weights=need_weights)


def masks() -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(1)
    keys, pairs, each = blocked(B, S), blocked(L, S), blocked(B * H, L, S)
    as_floats = torch.zeros(L, S, dtype=torch.float64).masked_fill(pairs, -torch.inf)
    return {
        "keys": {"key_padding_mask": keys},
        "pairs": {"attn_mask": pairs},
        "pairs of heads": {"attn_mask": each},
        "both": {"key_padding_mask": keys, "attn_mask": each},
        "floats of pairs": {"attn_mask": as_floats},
        "numbers of keys": {"key_padding_mask": drawn(B, S)},
        "numbers of pairs": {"attn_mask": drawn(L, S)},
        "numbers of pairs of heads": {"attn_mask": drawn(B * H, L, S)},
        "numbers of both": {"attn_mask": drawn(L, S), "key_padding_mask": drawn(B, S)},
    }


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", masks())
def test_masks_block_and_add_as_torchs_do(name, need_weights):
    for options in ({}, {"add_bias_kv": True, "add_zero_attn": True}):
        ours, torchs = pair(batch_first=True, **options)
        compare(ours, torchs, inputs(False), need_weights=need_weights, **masks()[name])


def test_causal_is_a_mask_whether_or_not_one_is_given():
    ours, torchs = pair(batch_first=True)
    x = inputs(True)
    causal = ~torch.ones(L, L, dtype=torch.bool).tril()
    expected, _ = torchs(*x, attn_mask=causal, need_weights=False)
    for given in ({}, {"attn_mask": causal}):
        for need_weights in (False, True):
            out, _ = ours(*x, is_causal=True, need_weights=need_weights, **given)
            assert_close(out, expected, 1e-12)
    other = blocked(L, L)  # which torch drops where the hint is wrong
    expected, _ = torchs(*x, attn_mask=other | causal)
    assert_close(ours(*x, attn_mask=other, is_causal=True)[0], expected, 1e-12)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "pattern", [WINDOW, sr.Dilated(4, 2), sr.Causal() & sr.SlidingWindow(3)], ids=str
)
def test_a_pattern_is_a_mask_that_costs_less(pattern, need_weights):
    ours, torchs = pair(batch_first=True)
    ours.pattern = pattern
    x = inputs(True)
    seen = pattern.to_dense(L, L, num_heads=H).bool().expand(H, L, L).clone()
    seen[:, :, 0] |= ~seen.any(-1)  # torch gives NaN where a query sees none
    some = pattern.to_dense(L, L, num_heads=H).bool().expand(H, L, L).any(-1)
    out, weights = ours(*x, need_weights=need_weights, average_attn_weights=False)
    mask = ~seen.repeat(B, 1, 1)
    expected, their_weights = torchs(*x, attn_mask=mask, average_attn_weights=False)
    whole = some.all(0)
    assert_close(out[:, whole], expected[:, whole], 1e-12)
    if need_weights:
        assert_close(weights[:, some], their_weights[:, some], 1e-12)


def test_a_mixture_counts_what_its_branches_share():
    ours, _ = pair(batch_first=True)
    ours.pattern = sr.LongNet((4, 8), (1, 2)) & sr.Causal()
    x = inputs(True)
    sparse, none = ours(*x, need_weights=False)
    dense, weights = ours(*x)
    assert none is None
    assert_close(sparse, dense, 1e-12)
    assert_close(weights.sum(-1), torch.ones(B, L, dtype=torch.float64), 1e-12)


def test_a_scale_of_ones_own():
    ours, torchs = pair(batch_first=True)
    ours.scale = 1.0
    with torch.no_grad():
        torchs.in_proj_weight[:E] *= (E // H) ** 0.5
        torchs.in_proj_bias[:E] *= (E // H) ** 0.5
    x = inputs(False)
    for need_weights in (False, True):
        out, _ = ours(*x, need_weights=need_weights)
        assert_close(out, torchs(*x)[0], 1e-12)


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_query_that_sees_no_key_attends_to_nothing(need_weights):
    ours, _ = pair(batch_first=True)
    x = inputs(False)
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[1] = True
    x[1] = x[1].clone()
    x[1][1] = torch.nan  # which nobody sees
    out, weights = ours(*x, key_padding_mask=mask, need_weights=need_weights)
    assert_close(out[1], ours.out_proj.bias.expand(L, E), 1e-15)
    assert weights is None or not weights[1].any()
    out.sum().backward()
    given = ours.in_proj_weight.grad[:E], ours.out_proj.weight.grad
    assert all(grad.isfinite().all() for grad in given)


def test_state_dicts_go_both_ways():
    for options in OPTIONS.values():
        ours, torchs = pair(**options)
        assert list(ours.state_dict()) == list(torchs.state_dict())
        ours.load_state_dict(torchs.state_dict(), strict=True)
        torchs.load_state_dict(ours.state_dict(), strict=True)


def test_a_layer_in_eval_mode_does_not_pass_by_the_pattern():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = drawn(B, L, E)
    dense = layer(x)
    assert convert(layer, WINDOW) == ["self_attn"]
    trained = layer(x)
    seen = WINDOW.to_dense(L, L).bool()[0]
    torch.manual_seed(0)
    other = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    expected = other(x, src_mask=~seen)
    assert_close(trained, expected, 1e-12)
    assert (trained - dense).abs().max() > 1e-3
    for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        made.eval()
        with torch.no_grad():
            assert_close(made(x), expected, 1e-12)
            assert_close(made.self_attn(x, x, x)[0], layer.self_attn(x, x, x)[0], 1e-12)


@pytest.mark.parametrize("mask", ["x", [True] * 4])
def test_a_padding_mask_that_is_no_tensor_is_named_also_without_a_batch(mask):
    layer, x = sr.nn.MultiheadAttention(E, 2), drawn(4, E)
    with pytest.raises(ValueError, match="key_padding_mask must be a tensor"):
        layer(x, x, x, key_padding_mask=mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_an_encoder_with_padding_gives_in_eval_mode_what_it_gives_in_training():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2)
    assert convert(encoder, WINDOW) == ["layers.0.self_attn", "layers.1.self_attn"]
    x, padding = drawn(B, L, E), torch.zeros(B, L, dtype=torch.bool)
    padding[1, 4:] = True
    expected = encoder(x, src_key_padding_mask=padding)
    encoder.eval()
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=padding)
    real = ~padding[:, : found.shape[1]]
    assert_close(found[real], expected[:, : found.shape[1]][real], 1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_entries_of_their_own_lengths(layout):
    ours, _ = pair(batch_first=True)
    ours.pattern = WINDOW
    rows = [drawn(5, E), drawn(3, E)]
    x = torch.nested.as_nested_tensor(rows, layout=layout)
    out, _ = ours(x, x, x, need_weights=False)
    assert out.is_nested
    assert out.layout is layout
    for row, found in zip(rows, out.unbind(), strict=True):
        assert_close(found, ours(row, row, row)[0], 1e-12)
    keys = torch.nested.as_nested_tensor([drawn(4, E), drawn(9, E)], layout=layout)
    cross, weights = ours(x, keys, keys)
    for i, row in enumerate(rows):
        key = keys.unbind()[i]
        out, of_row = ours(row, key, key)
        assert_close(cross.unbind()[i], out, 1e-12)
        assert_close(weights[i, : len(row), : len(key)], of_row, 1e-12)
    with pytest.raises(ValueError, match="and no masks"):
        ours(x, x, x, attn_mask=blocked(5, 5))


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_leaves_the_mean_and_is_of_training_alone(more, need_weights):
    ours, _ = pair(batch_first=True, dropout=0.3, add_bias_kv=more, add_zero_attn=more)
    x = [y[:1].expand(4000, -1, -1) for y in inputs(False)]
    out, weights = ours(*x, need_weights=need_weights)
    ours.eval()
    expected, _ = ours(*(y[:1] for y in x), need_weights=need_weights)
    apart = (out.mean(0) - expected[0]).abs() / (out.std(0) / 4000**0.5)
    assert apart.max() < 6
    assert out.std(0).min() > 1e-3
    again = ours(*(y[:2] for y in x), need_weights=need_weights)[0]
    assert_close(again[1], expected[0], 1e-12)
    if need_weights:
        assert ((weights[..., 0] == 0).double().mean() - 0.3**H).abs() < 0.01


def test_weights_are_bounded():
    ours = MultiheadAttention(4, 2, batch_first=True, pattern=sr.SlidingWindow(2))
    x = torch.randn(1, 6000, 4)
    assert ours(x, x, x, need_weights=False)[0].shape == x.shape
    with pytest.raises(ValueError, match=r"2\^26.*1 x 2 x 6000 x 6000.*need_weights=False"):
        ours(x, x, x)


def test_modules_are_converted_once_and_shared_ones_stay_shared():
    shared = nn.MultiheadAttention(E, H, dropout=0.2)
    model = nn.ModuleDict({
        "a": nn.ModuleDict({"attention": shared}),
        "b": nn.ModuleDict({"attention": shared, "norm": nn.LayerNorm(E)}),
        "c": nn.MultiheadAttention(E, 2, bias=False),
    })  # fmt: skip
    before = dict(model.named_parameters())
    called = []
    shared.register_forward_hook(lambda *_: called.append(1))
    model.eval()
    assert convert(model, WINDOW) == ["c", "a.attention", "b.attention"]
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert model["a"]["attention"] is model["b"]["attention"]
    made = model["a"]["attention"]
    assert type(made) is MultiheadAttention
    assert (made.pattern, made.dropout, made.training) == (WINDOW, 0.2, False)
    x = torch.randn(L, B, E)
    made(x, x, x)
    assert called == [1]
    assert not shared._forward_pre_hooks  # which is as it was
    assert convert(model, sr.Full()) == []
    assert made.pattern == WINDOW
    with pytest.raises(ValueError, match="below its argument"):
        convert(shared, WINDOW)
    with pytest.raises(TypeError, match="pattern must be"):
        convert(model, "SlidingWindow(3)")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"key_padding_mask": torch.zeros(B, S, dtype=torch.int64)}, "must be bool"),
        ({"key_padding_mask": torch.zeros(B, S + 1, dtype=torch.bool)}, r"\(2, 9\)"),
        ({"attn_mask": torch.zeros(B, L, S, dtype=torch.bool)}, r"\(7, 9\) or \(6, 7, 9\)"),
    ],
)
def test_masks_that_do_not_fit_are_refused(call, message):
    ours, _ = pair(batch_first=True)
    with pytest.raises(ValueError, match=message):
        ours(*inputs(False), **call)


def test_inputs_that_do_not_fit_are_refused():
    ours, _ = pair()
    with pytest.raises(ValueError, match="this module has batch_first=False"):
        ours(*inputs(False))
    with pytest.raises(ValueError, match=r"\[batch, tokens, 12\]"):
        ours(drawn(L, B, E + 1), drawn(S, B, E), drawn(S, B, E))
    with pytest.raises(TypeError, match="pattern must be"):
        MultiheadAttention(E, H, pattern="Causal()")


def test_it_compiles_and_runs_under_autocast():
    ours = MultiheadAttention(32, 2, batch_first=True, pattern=WINDOW)
    x = torch.randn(2, 20, 32)
    out, _ = ours(x, x, x, need_weights=False)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, x, x, need_weights=False)[0], out, 1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(ours(x, x, x, need_weights=False)[0].float(), out, 0.03)
