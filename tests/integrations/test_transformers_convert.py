"""Families that do not ask transformers' interface: equal to their own attention once converted."""

import copy
import pickle

import pytest
import torch
from sharing_families import InFloat64
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LEDConfig, LEDModel, LongformerConfig, LongformerModel

import sparsering as sr
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers import families

NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
LENGTH = 50


def longformer(**more) -> LongformerModel:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "attention_window": [8, 4], "max_position_embeddings": 130}
    return sharpened(LongformerModel(LongformerConfig(**sizes | NO_DROPOUT | more)))


def led() -> LEDModel:
    sizes = {"vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_encoder_position_embeddings": 130}
    return sharpened(LEDModel(LEDConfig(**sizes, attention_window=8)))


def chronos(**more):
    config = pytest.importorskip("chronos.chronos2.config")
    from chronos.chronos2 import Chronos2Model

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    core = config.Chronos2CoreConfig(**sizes | {"dropout_rate": 0.0, "vocab_size": 2} | more)
    core.chronos_config = {
        **{"context_length": 64, "input_patch_size": 4, "input_patch_stride": 4},
        **{"output_patch_size": 4, "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True},
        **{"use_arcsinh": True, "max_output_patches": 4, "time_encoding_scale": 64},
    }
    model = sharpened(Chronos2Model(core))
    for x in model.modules():
        if hasattr(x, "inv_freq"):
            x.inv_freq = x.inv_freq.float()  # multiplied with float32 positions
    return model


def sharpened(model):
    """Makes scores and norms differ, so that a wrong mask shows."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.double().eval()


def texts(*, padded: bool, is_global: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(4, 61, (3, LENGTH))
    mask, places = torch.ones_like(tokens), torch.zeros_like(tokens)
    if padded:
        mask[1, 40:] = 0
        mask[2, :9] = 0
    if is_global:  # other numbers in each row, none in the last
        places[0, [0, 17, 49]] = 1
        places[1, 3] = 1
    return {"input_ids": tokens, "attention_mask": mask, "global_attention_mask": places}


def series(groups=(0, 0, 0, 7, 2, 2, 2, 2, 1), *, gaps: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    context = torch.randn(len(groups), 37).double().cumsum(1)
    if gaps:
        context[1, :22] = torch.nan  # a series that begins later
        context[5, 12:20] = torch.nan
    mixed = torch.randperm(len(groups))
    return {"context": context[mixed], "group_ids": torch.tensor(groups)[mixed]}


def results(model, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns outputs of valid rows, and gradients of a drawn sum of them."""
    if "context" in inputs:
        out = model(**inputs, num_output_patches=2).quantile_preds
    else:
        out = model(**inputs).last_hidden_state
        if isinstance(model, LongformerModel):
            out = out[inputs["attention_mask"].bool()]
    torch.manual_seed(1)
    used = [x for x in model.parameters() if x.requires_grad]
    grads = torch.autograd.grad((out * torch.randn_like(out)).sum(), used, allow_unused=True)
    return out.detach(), [torch.zeros(()) if x is None else x for x in grads]


def drawn(seed: int, model, inputs: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(seed)
    return results(model, inputs)[0]


def assert_equal(model, inputs: dict[str, Tensor], convert=hf.convert) -> None:
    ours = copy.deepcopy(model)
    assert convert(ours)
    with InFloat64():
        wanted, by_original = results(model, inputs)
        got, grads = results(ours, inputs)
    scale = wanted.abs().max()
    assert scale > 0.1
    torch.testing.assert_close(got / scale, wanted / scale, rtol=0, atol=1e-10)
    for a, b in zip(grads, by_original, strict=True):
        assert (a - b).abs().max() <= 1e-9 * max(1, b.abs().max())


@pytest.mark.parametrize("is_global", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("make", [longformer, led])
def test_longformer_and_led_are_what_they_were(make, padded, is_global):
    assert_equal(make(), texts(padded=padded, is_global=is_global))


@pytest.mark.parametrize("gaps", [True, False])
def test_chronos_is_what_it_was(gaps):
    assert_equal(chronos(), series(gaps=gaps))


def test_each_call_has_its_own_global_tokens_and_groups():
    model, theirs = longformer(), longformer()
    hf.convert(model)
    for inputs in (texts(padded=True, is_global=True), texts(padded=False, is_global=False)) * 2:
        assert (results(model, inputs)[0] - results(theirs, inputs)[0]).abs().max() < 1e-5
    model, theirs = chronos(), chronos()
    hf.convert(model)
    for groups in ((0,) * 9, tuple(range(9)), (0, 1, 0, 1, 1, 1, 0, 0, 0)):
        inputs = series(groups, gaps=False)
        wanted = results(theirs, inputs)[0]
        assert (results(model, inputs)[0] - wanted).abs().max() < 1e-5 * wanted.abs().max()


PLANTED = {
    "a window one key too short": ("SlidingWindow", lambda a, b: sr.SlidingWindow(a - 1, b)),
    "global keys that only global tokens see": ("KeyMask", lambda x: sr.KeyMask(x & False)),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found(fault, monkeypatch):
    name, wrong = PLANTED[fault]
    monkeypatch.setattr(families.longformer, name, wrong)
    with pytest.raises(AssertionError):
        assert_equal(longformer(), texts(padded=False, is_global=True))


def test_shared_projections_and_mixed_groups_are_found(monkeypatch):
    def shares(model):
        for x in model.modules():
            if hasattr(x, "query_global"):
                x.query_global = x.query
        return hf.convert(model)

    with pytest.raises(AssertionError):
        assert_equal(longformer(), texts(padded=False, is_global=True), shares)
    monkeypatch.setattr(
        families.chronos, "Documents", lambda lengths: sr.Documents(lengths.flip(0))
    )
    with pytest.raises(AssertionError):
        assert_equal(chronos(), series(gaps=False))


def test_dropout_acts_in_training_alone():
    for model, inputs in (
        (longformer(attention_probs_dropout_prob=0.3), texts(padded=True, is_global=True)),
        (chronos(dropout_rate=0.3), series(gaps=False)),
    ):
        before = results(model, inputs)[0]
        hf.convert(model)
        assert (results(model, inputs)[0] - before).abs().max() < 1e-5 * before.abs().max()
        model.train()
        one, two = (drawn(seed, model, inputs) for seed in (3, 4))
        assert torch.equal(one, drawn(3, model, inputs))
        assert (one - two).abs().max() > 1e-3


def test_models_stay_what_they_are_and_others_are_refused():
    model = longformer()
    parameters, keys = list(model.parameters()), list(model.state_dict())
    assert hf.convert(model) == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    assert hf.convert(model) == []
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert keys == list(model.state_dict())
    inputs = texts(padded=True, is_global=True)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(results(again, inputs)[0], results(model, inputs)[0])
    model.train().activation_checkpointing_enable({"use_reentrant": False})
    for a, b in zip(results(model, inputs)[1], results(again.train(), inputs)[1], strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1, b.abs().max())
    with pytest.raises(NotImplementedError, match="no attention weights"):
        model(**inputs, output_attentions=True)
    with pytest.raises(ValueError, match="one of the families Longformer, LED, Chronos-2"):
        hf.convert(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("scope", [FakeTensorMode, lambda: torch.device("meta")])
def test_chronos_runs_for_its_shapes_alone(scope):
    model = chronos()
    with scope():
        model = type(model)(model.config)
        shapes = []
        for _ in range(2):
            inputs = {"context": torch.zeros(9, 37), "group_ids": torch.zeros(9).long()}
            out = model(**inputs, num_output_patches=2).quantile_preds
            grads = torch.autograd.grad(out.sum(), [*model.parameters()], allow_unused=True)
            shapes.append([x if x is None else x.shape for x in (out, *grads)])
            hf.convert(model)
    assert shapes[0] == shapes[1] and shapes[0][0] == (9, 3, 8)


@pytest.mark.parametrize("scope", [FakeTensorMode, lambda: torch.device("meta")])
def test_a_layer_with_global_tokens_runs_for_its_shapes_alone(scope):
    """Longformer itself asks for numbers before its layers run, but a layer can run alone."""
    model = longformer()
    hf.convert(model)
    attention = model.encoder.layer[0].attention.self
    with scope():
        attention = type(model)._from_config(model.config).encoder.layer[0].attention.self
        attention.__class__ = families.longformer.LocalAndGlobalAttention
        states = torch.zeros(3, LENGTH, 32, requires_grad=True)
        masked = torch.zeros(3, LENGTH, dtype=torch.bool)
        (out,) = attention(states, torch.zeros(3, LENGTH), masked, masked, True)
        (grad,) = torch.autograd.grad(out.sum(), states)
    assert out.shape == grad.shape == (3, LENGTH, 32)
