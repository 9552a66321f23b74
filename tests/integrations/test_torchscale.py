"""torchscale's dilated attention: its results, gradients and state_dict; refusals by name."""

import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import torchscale_oracle as oracle
from torch import nn

import sparsering as sr
from sparsering.integrations import torchscale
from sparsering.integrations.torchscale import DilatedAttention, convert, integers, zero_sink

GIGAPATH = ((64, 362, 2048, 11585, 65536), (1, 2, 4, 8, 16))
"""Prov-GigaPath's segments, a sixteenth as long: rate 8 does not divide the fourth."""


def arguments(segments=(8, 16), rates=(1, 2), **changes):
    given = {
        "segment_length": list(segments),
        "dilated_ratio": list(rates),
        "flash_attention": False,
        "seq_parallel": False,
        "multiway": False,
        "layernorm_eps": 1e-5,
        "xpos_rel_pos": False,
        "xpos_scale_base": 512,
    }
    return SimpleNamespace(**{**given, **changes})


def twins(args, width=24, heads=4, zero_padding="exact", subln=True, **options):
    """The oracle's module and ours, in float64, of the same parameters."""
    options = {"self_attention": True, "subln": subln, **options}
    theirs = oracle.DilatedAttention(args, width, heads, **options).double()
    ours = DilatedAttention(args, width, heads, **options, zero_padding=zero_padding).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.4)
    theirs.zeros = zero_padding == "torchscale"
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def assert_same(theirs, ours, *inputs, tolerance=1e-11, **options):
    """Results agree, and the gradients of every input and parameter; all of them get some."""
    found = []
    for module in (theirs, ours):
        given = [x.clone().requires_grad_() for x in inputs]
        out, weights = module(*given, **options)
        assert weights is None
        generator = torch.Generator().manual_seed(7)
        grad = torch.randn(out.shape, generator=generator, dtype=out.dtype)
        names = [*(f"input {i}" for i in range(len(given))), *dict(module.named_parameters())]
        wrt = [*given, *module.parameters()]
        grads = torch.autograd.grad(out, wrt, grad, materialize_grads=True)
        found.append((out.detach(), dict(zip(names, grads, strict=True))))
    (expected, expected_grads), (got, grads) = found
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        scale = grad.abs().max().clamp(min=1.0)
        assert (grads[name] - grad).abs().max() <= tolerance * scale, name
        # a bias of all keys moves all scores alike; a single key has no rival
        learns = inputs[0].shape[1] > 1 and not name.startswith("k_proj")
        assert not learns or grad.abs().max() > 1e-6, name


@pytest.mark.parametrize("zero_padding", ["exact", "torchscale"])
@pytest.mark.parametrize(
    ("segments", "rates", "heads", "length"),
    [
        pytest.param((8, 16), (1, 2), 4, 32, id="whole segments"),
        pytest.param((8, 16), (1, 2), 4, 37, id="ragged"),
        pytest.param((8, 16), (1, 2), 4, 1, id="one token"),
        pytest.param((8, 16), (1, 2), 4, 9, id="a segment of one token"),
        pytest.param((4, 12, 100), (1, 4, 8), 4, 29, id="fewer heads than residues"),
        pytest.param((6, 100), (2, 5), 6, 23, id="heads that the rate does not divide"),
        pytest.param((5, 1000), (1, 7), 3, 23, id="a rate that does not divide its one segment"),
        pytest.param((12,), (4,), 4, 30, id="rows that no branch has"),
        pytest.param((16, 16), (2, 2), 4, 27, id="a branch twice"),
    ],
)
def test_results_and_gradients_are_those_of_the_contract(
    segments, rates, heads, length, zero_padding
):
    args = arguments(segments, rates)
    theirs, ours = twins(args, 4 * heads, heads, zero_padding)
    x = torch.randn(2, length, 4 * heads, dtype=torch.float64)
    q, k, v = x, x.flip(1), x + 1
    assert_same(theirs, ours, q, k, v)
    mask = torch.zeros(2, length, dtype=torch.bool)  # torchscale's encoder always passes one
    assert torch.equal(ours(q, k, v, key_padding_mask=mask)[0], ours(q, k, v)[0])


@pytest.mark.parametrize("zero_padding", ["exact", "torchscale"])
@pytest.mark.parametrize("length", [16, 29])
def test_causal_passes_see_no_zero_keys(length, zero_padding):
    theirs, ours = twins(arguments((8, 16), (1, 4)), zero_padding=zero_padding)
    x = torch.randn(2, length, 24, dtype=torch.float64)
    assert_same(theirs, ours, x, x, x, is_causal=True)
    triangle = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
    expected = ours(x, x, x, is_causal=True)[0]
    for mask in (triangle, triangle.bool()):
        assert torch.equal(ours(x, x, x, attn_mask=mask)[0], expected)


def test_zero_keys_are_counted_where_they_are_seen():
    args = arguments((8, 16, 64), (1, 2, 4))
    pattern = torchscale.checked_pattern(args, "exact")
    like = torch.zeros(1, dtype=torch.float64)
    counts = zero_sink(pattern, 4, 21, like).exp()[0].round().long()
    # segments of 8 are filled by 3, those of 16 by 11 and the one of 21 by 3 and its residues
    expected = torch.zeros(4, 21, dtype=torch.int64)
    expected[:, 16:] += 3
    for head, residue in enumerate((0, 0, 1, 1)):
        expected[head, 16 + residue :: 2] += len(range(5 + (5 + residue) % 2, 16, 2))
    for head in range(4):
        expected[head, head::4] += int(head >= 1)
    assert torch.equal(counts, expected)
    assert zero_sink(pattern, 4, 64, like) is None and zero_sink(pattern, 4, 0, like) is None
    assert zero_sink(pattern, 4, 1, like) is None  # those on the other grids have no row


def test_whole_segments_have_no_zero_keys_and_ragged_ones_change_results():
    args = arguments((8, 16), (1, 2))
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    _, exact = twins(args)
    ours = copy.deepcopy(exact)
    ours.zero_padding = "torchscale"
    assert torch.equal(exact(x[:, :32], x[:, :32], x[:, :32])[0], ours(*[x[:, :32]] * 3)[0])
    assert (exact(x, x, x)[0] - ours(x, x, x)[0]).abs().max() > 0.01


@pytest.mark.parametrize("length", [1, 63, 65, 257])
def test_a_small_gigapath(length):
    args = arguments(*GIGAPATH)
    theirs, ours = twins(args, 64, 16, "torchscale")
    x = torch.randn(1, length, 64, dtype=torch.float64)
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("pad", ["right", "left", "holes", "all of an entry"])
def test_padded_keys_are_not_seen(pad):
    theirs, ours = twins(arguments((8, 16), (1, 2)))
    x = torch.randn(2, 27, 24, dtype=torch.float64)
    mask = torch.zeros(2, 27, dtype=torch.bool)
    if pad == "holes":
        mask[0, 3::5] = True
    else:
        mask[1, {"right": slice(19, None), "left": slice(0, 9)}.get(pad, slice(None))] = True
    assert_same(theirs, ours, x, x, x, key_padding_mask=mask)
    changed = x.clone()
    changed[mask] = torch.nan  # neither as key nor as value
    before, after = (ours(x, y, y, key_padding_mask=mask)[0] for y in (x, changed))
    assert torch.equal(before, after)
    assert torch.equal(before, ours(x, x, x, key_padding_mask=mask.to(torch.uint8))[0])


@pytest.mark.parametrize("split", [-1, 0, 7, 29])
def test_multiway_halves_and_their_names(split):
    theirs, ours = twins(arguments(multiway=True), zero_padding="torchscale")
    assert "inner_attn_ln.B.bias" in ours.state_dict()

    def set_position(module):
        if hasattr(module, "split_position"):
            module.split_position = split

    theirs.apply(set_position), ours.apply(set_position)
    x = torch.randn(2, 29, 24, dtype=torch.float64)
    expected, got = theirs(x, x, x)[0], ours(x, x, x)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    loss = got.sum()
    grads = torch.autograd.grad(loss, list(ours.parameters()), allow_unused=True)
    used = {
        name.split(".")[1]
        for (name, _), grad in zip(ours.named_parameters(), grads, strict=True)
        if grad is not None and grad.abs().max() > 0
    }
    assert used == {-1: {"A"}, 0: {"B"}, 7: {"A", "B"}, 29: {"A"}}[split]


@pytest.mark.parametrize("zero_padding", ["exact", "torchscale"])
def test_xpos_turns_and_scales(zero_padding):
    theirs, ours = twins(arguments(xpos_rel_pos=True, xpos_scale_base=8), 24, 4, zero_padding)
    assert "xpos.scale" in ours.state_dict()
    x = torch.randn(2, 21, 24, dtype=torch.float64)
    assert_same(theirs, ours, x, x, x, tolerance=1e-9)
    assert_same(theirs, ours, x, x, x, tolerance=1e-9, is_causal=True)


@pytest.mark.parametrize("zero_padding", ["exact", "torchscale"])
@pytest.mark.parametrize("xpos", [False, True])
@pytest.mark.parametrize("steps", [[1] * 21, [13, 1, 1, 6], [21]])
def test_incremental_steps_equal_one_causal_pass(steps, xpos, zero_padding):
    args = arguments((8, 16), (1, 4), xpos_rel_pos=xpos, xpos_scale_base=16)
    _, ours = twins(args, zero_padding=zero_padding)
    x = torch.randn(2, 21, 24, dtype=torch.float64)
    expected = ours(x, x, x, is_causal=True)[0]
    state, outs = {}, []
    for number, part in enumerate(x.split(steps, 1)):
        options = {"is_first_step": number == 0, "is_causal": True}
        outs.append(ours(part, part, part, incremental_state=state, **options)[0])
    assert state["prev_key"].shape == state["prev_value"].shape == (2, 4, 21, 6)
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=0, atol=1e-11)


def test_incremental_steps_may_look_at_all_before_them():
    _, ours = twins(arguments((8, 16), (1, 2)))
    x = torch.randn(1, 21, 24, dtype=torch.float64)
    state = {}
    ours(x[:, :18], x[:, :18], x[:, :18], incremental_state=state)
    got = ours(x[:, 18:], x[:, 18:], x[:, 18:], incremental_state=state)[0]
    torch.testing.assert_close(got, ours(x, x, x)[0][:, 18:], rtol=0, atol=1e-11)


def test_a_refused_step_leaves_the_state_as_it_was():
    _, ours = twins(arguments(), zero_padding="torchscale")
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    state = {}
    ours(x, x, x, incremental_state=state)
    with pytest.raises(ValueError, match="incremental"):
        ours(x, x, x, incremental_state=state)
    assert state["prev_key"].shape[2] == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_and_autocast(dtype):
    theirs, ours = twins(arguments(*GIGAPATH), 64, 16, "torchscale")
    x = torch.randn(1, 150, 64, dtype=torch.float64)
    expected = theirs(x, x, x)[0].float()
    bound = {torch.bfloat16: 4e-2, torch.float32: 2e-6}[dtype] * expected.abs().max()
    got = copy.deepcopy(ours).to(dtype)(*[x.to(dtype)] * 3)[0]
    assert got.dtype == dtype and (got - expected).abs().max() < bound
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        cast = ours.float()(*[x.float()] * 3)[0]
    assert cast.dtype == dtype and (cast - expected).abs().max() < bound


def test_dropout_while_training_alone():
    args = arguments((64,), (1,))
    layer = DilatedAttention(args, 16, 2, dropout=0.5, self_attention=True)
    x = torch.randn(1, 64, 16)
    first, second = layer(x, x, x)[0], layer(x, x, x)[0]
    assert (first - second).abs().max() > 1e-3
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    without = DilatedAttention(args, 16, 2, self_attention=True)
    without.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, x, x)[0], without(x, x, x)[0])


def test_what_each_key_of_a_converted_layer_receives():
    """By `key_mass`, zero keys as a sink: the gradients of values."""
    theirs, ours = twins(arguments((8, 16), (1, 4)), zero_padding="torchscale", subln=False)
    x = torch.randn(1, 27, 24, dtype=torch.float64)
    with torch.no_grad():
        theirs.out_proj.weight.copy_(torch.eye(24))
    value = torch.randn(1, 27, 24, dtype=torch.float64, requires_grad=True)
    theirs.v_proj = nn.Identity()
    (received,) = torch.autograd.grad(theirs(x, x, value)[0].sum(), value)
    q, k = (p(x).view(1, 27, 4, 6).transpose(1, 2) for p in (ours.q_proj, ours.k_proj))
    sink = zero_sink(ours.pattern, 4, 27, x)
    mass = sr.key_mass(q, k, ours.pattern, sink=sink)
    torch.testing.assert_close(mass, received.view(27, 4, 6)[..., 0].T[None])
    assert (sr.key_mass(q, k, ours.pattern) - mass).abs().max() > 0.01


@pytest.mark.parametrize(
    "zero_padding", ["torchscale", pytest.param("exact", marks=pytest.mark.slow)]
)
def test_it_is_one_graph(zero_padding):
    _, ours = twins(arguments((8, 16), (1, 2), xpos_rel_pos=True), zero_padding=zero_padding)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 27, 24, dtype=torch.float64)
    torch.testing.assert_close(compiled(x, x, x)[0], ours(x, x, x)[0], rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(m(x, x, x)[0].sum(), ours.q_proj.weight) for m in (ours, compiled)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


# What args may be, and state_dicts


@pytest.mark.parametrize(
    "given",
    [
        *([1024, 5792], (1024, 5792), np.array([1024, 5792]), torch.tensor([1024, 5792])),
        [np.int64(1024), np.int64(5792)],
        *("[1024, 5792]", "(1024,5792,)", " 1024, 5792 "),
        *("[np.int64(1024), np.int64(5792)]", "[numpy.int32( 1024 ), int(5792)]"),
    ],
)
def test_lengths_as_text_or_numbers(given):
    assert integers(given, "segment_length") == (1024, 5792)
    rates = "[1, 2]" if isinstance(given, str) else [1, 2]
    layer = DilatedAttention(arguments(segment_length=given, dilated_ratio=rates), 16, 2, 0.0, True)
    assert layer.pattern == sr.LongNet((1024, 5792), (1, 2), offset="block")


def test_one_length_is_one_branch():
    for given in (1024, "1024", "[1024]", [1024]):
        assert integers(given, "segment_length") == (1024,)


@pytest.mark.parametrize(
    "given",
    [
        *("__import__('os').abort()", "[1024, abs(5792)]", "[2 ** 10]", "[1024)", "[1024 5792]"),
        *("[10.5]", "[-1]", "[]", "", "[" + "1," * 2000 + "]", None, 1.5),
    ],
)
def test_other_text_is_refused_and_never_run(given):
    with pytest.raises(ValueError, match=r"args.segment_length must be"):
        DilatedAttention(arguments(segment_length=given, dilated_ratio="[1, 2]"), 16, 2, 0.0, True)


@pytest.mark.parametrize(("multiway", "xpos", "subln"), [(0, 0, 1), (1, 1, 1), (0, 1, 0)])
def test_state_dict_has_torchscales_names(multiway, xpos, subln):
    args = arguments(multiway=bool(multiway), xpos_rel_pos=bool(xpos))
    layer = DilatedAttention(args, 16, 2, self_attention=True, subln=bool(subln))
    halves = ("A.", "B.") if multiway else ("",)
    parts = ["k_proj", "v_proj", "q_proj", "out_proj", *(["inner_attn_ln"] if subln else [])]
    names = {f"{p}.{half}{x}" for p in parts for half in halves for x in ("weight", "bias")}
    assert set(layer.state_dict()) == names | ({"xpos.scale"} if xpos else set())
    again = copy.deepcopy(layer)
    again.load_state_dict(layer.state_dict(), strict=True)
    x = torch.randn(1, 19, 16)
    assert torch.equal(again(x, x, x)[0], layer(x, x, x)[0])


def test_cross_attention_has_neither_norm_nor_xpos():
    args = arguments(xpos_rel_pos=True)
    layer = DilatedAttention(args, 16, 2, encoder_decoder_attention=True, subln=True)
    assert layer.inner_attn_ln is None and layer.xpos is None


def test_fresh_weights_are_drawn_as_torchscale_draws_them():
    args = arguments()
    torch.manual_seed(3)
    theirs = oracle.DilatedAttention(args, 16, 2, self_attention=True, subln=True)
    torch.manual_seed(3)
    ours = DilatedAttention(args, 16, 2, self_attention=True, subln=True)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, dict(ours.named_parameters())[name]), name
    ours.reset_parameters()
    bound = (6 / 32) ** 0.5
    assert 0.9 * bound < ours.out_proj.weight.abs().max() <= bound
    assert 0.9 * bound / 2**0.5 < ours.q_proj.weight.abs().max() <= bound / 2**0.5
    assert not ours.out_proj.bias.any()
    multiway = DilatedAttention(arguments(multiway=True), 16, 2, self_attention=True)
    before = multiway.k_proj.B.weight.clone()
    assert not torch.equal(before, multiway.k_proj.A.weight)
    multiway.reset_parameters()
    assert not torch.equal(before, multiway.k_proj.B.weight)


# Refusals


def test_misplaced_rows_are_refused_with_their_numbers():
    _, ours = twins(arguments((8, 30), (1, 4)), zero_padding="torchscale")
    x = torch.randn(1, 31, 24, dtype=torch.float64)
    ours(*[x[:, :30]] * 3)
    for causal in (False, True):
        with pytest.raises(ValueError, match=r"misplaces rows.*rate 4, segments of 30.*31 tokens"):
            ours(x, x, x, is_causal=causal)
    ours.zero_padding = "exact"
    ours(x, x, x)


def test_misplaced_rows_are_refused_in_the_step_that_comes_to_them():
    _, ours = twins(arguments((8, 30), (1, 4)), zero_padding="torchscale")
    x, state = torch.randn(1, 31, 24, dtype=torch.float64), {}
    ours(*[x[:, :30]] * 3, incremental_state=state, is_causal=True)
    with pytest.raises(ValueError, match="misplaces rows"):
        ours(*[x[:, 30:]] * 3, incremental_state=state, is_causal=True)
    assert state["prev_key"].shape[2] == 30


def test_padding_is_refused_where_torchscale_ignores_it():
    _, ours = twins(arguments(), zero_padding="torchscale")
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 8] = True
    with pytest.raises(ValueError, match=r"key_padding_mask.*exact"):
        ours(x, x, x, key_padding_mask=mask)


@pytest.mark.parametrize(
    ("zero_padding", "kind"), [("torchscale", ValueError), ("exact", NotImplementedError)]
)
def test_sequence_parallel_is_refused(zero_padding, kind):
    with pytest.raises(kind, match="seq_parallel"):
        DilatedAttention(
            arguments(seq_parallel=True), 16, 2, self_attention=True, zero_padding=zero_padding
        )


def test_other_masks_are_refused():
    _, ours = twins(arguments())
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    window = torch.full((9, 9), -torch.inf).triu(1)
    window[8, 0] = -torch.inf
    sloped = torch.full((9, 9), -torch.inf).triu(1)
    sloped[8, 0] = -0.5
    for mask in (window, sloped, torch.zeros(9, 9), torch.zeros(9, 8), torch.zeros(1, 9, 9)):
        with pytest.raises(NotImplementedError, match="attn_mask"):
            ours(x, x, x, attn_mask=mask)
    with pytest.raises(NotImplementedError, match="rel_pos"):
        ours(x, x, x, rel_pos=torch.zeros(9, 9))


def test_shapes_that_do_not_fit_are_refused():
    _, ours = twins(arguments())
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    for inputs in ((x, x[:, :8], x[:, :8]), (x, x, x[:1]), (x[0], x[0], x[0]), (x[..., :20],) * 3):
        with pytest.raises(ValueError, match="query, key and value"):
            ours(*inputs)
    with pytest.raises(ValueError, match=r"key_padding_mask must be \[2, 9\]"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool))


SELF = {"self_attention": True}


@pytest.mark.parametrize(
    ("args", "given", "options", "message"),
    [
        ({}, (16, 2), {}, "self_attention and encoder_decoder_attention"),
        ({}, (16, 2, 0.0, True, True), {}, "self_attention and encoder_decoder_attention"),
        ({}, (16, 3), SELF, "embed_dim"),
        ({"xpos_rel_pos": True}, (6, 2), SELF, "even head dim"),
        ({"segments": (8, 16), "rates": (1,)}, (16, 2), SELF, "as many"),
        ({}, (16, 2), {**SELF, "zero_padding": "zeros"}, "zero_padding"),
    ],
    ids=["neither kind", "both kinds", "width", "odd head dim", "fewer rates", "zero padding"],
)
def test_arguments_that_do_not_fit_are_refused(args, given, options, message):
    with pytest.raises(ValueError, match=message):
        DilatedAttention(arguments(**args), *given, **options)


def test_a_zero_padding_set_afterwards_is_refused():
    _, ours = twins(arguments())
    ours.zero_padding = "zeros"
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    with pytest.raises(ValueError, match="zero_padding"):
        ours(x, x, x)


# Converting a model


def encoder(args, depth=2, width=16, heads=4, **options):
    options = {"self_attention": True, "subln": True, **options}

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = oracle.DilatedAttention(args, width, heads, **options)

        def forward(self, x):
            return x + self.self_attn(x, x, x, key_padding_mask=torch.zeros(x.shape[:2]))[0]

    return nn.Sequential(*(Layer() for _ in range(depth))).double()


def test_a_converted_model_computes_the_same():
    model = encoder(arguments(xpos_rel_pos=True, multiway=True))
    x = torch.randn(2, 27, 16, dtype=torch.float64)
    expected = model(x)
    parameters, state = dict(model.named_parameters()), model.state_dict()
    assert convert(model) == ["0.self_attn", "1.self_attn"]
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-11)
    assert type(model[0].self_attn) is DilatedAttention
    text = repr(model)
    assert 'zero_padding="torchscale"' in text and "LongNet((8, 16), (1, 2), 'block')" in text
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    copied = copy.deepcopy(model)
    copied.load_state_dict(state, strict=True)
    assert torch.equal(copied(x), model(x))


def test_converting_again_changes_nothing():
    model = encoder(arguments())
    convert(model)
    assert convert(model, zero_padding="exact") == []
    assert model[0].self_attn.zero_padding == "torchscale"


def test_exact_on_request():
    model = encoder(arguments(), depth=1)
    x = torch.randn(1, 27, 16, dtype=torch.float64)
    convert(model, zero_padding="exact")
    theirs = encoder(arguments(), depth=1)
    theirs.load_state_dict(model.state_dict())
    theirs[0].self_attn.zeros = False
    torch.testing.assert_close(model(x), theirs(x), rtol=0, atol=1e-11)


def test_what_is_shared_or_hooked_or_the_model_itself_stays_so():
    model = encoder(arguments())
    model[1].self_attn = model[0].self_attn
    calls = []
    model[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert convert(model) == ["0.self_attn"]
    assert model[1].self_attn is model[0].self_attn
    model(torch.randn(1, 9, 16, dtype=torch.float64))
    assert len(calls) == 2
    alone = oracle.DilatedAttention(arguments(), 16, 4, self_attention=True)
    assert convert(alone) == [""] and type(alone) is DilatedAttention


def test_a_wrong_choice_is_refused_where_there_is_nothing_to_convert():
    with pytest.raises(ValueError, match="zero_padding"):
        convert(nn.Linear(2, 2), zero_padding="none")


def test_namesakes_and_subclasses_are_left_alone():
    namesake = type("DilatedAttention", (nn.Linear,), {})(4, 4)
    heir = type("Windowed", (oracle.DilatedAttention,), {})(arguments(), 16, 4, self_attention=True)
    assert convert(nn.Sequential(namesake, heir, nn.Linear(4, 4))) == []
    assert type(heir).__name__ == "Windowed"


def test_nothing_changes_where_one_cannot_be_converted():
    for fault in ("seq_parallel", "forward", "zero_padding"):
        model = encoder(arguments())
        last = model[1].self_attn
        if fault == "seq_parallel":
            last.args = arguments(seq_parallel=True)
        if fault == "forward":
            last.forward = lambda *_: None
        padding = "none" if fault == "zero_padding" else "torchscale"
        with pytest.raises(ValueError, match=re.escape(fault)):
            convert(model, zero_padding=padding)
        assert type(model[0].self_attn) is oracle.DilatedAttention
