"""Whole models leave Python: Gemma 3 with windows, and an encoder with dilated segments."""

import pytest
import torch
from by_tables import exported
from torch import Tensor

import sparsering as sr
from sparsering.export import decompositions
from sparsering.models import LongNetEncoder

transformers = pytest.importorskip("transformers")
from sparsering.integrations import transformers as hf  # noqa: E402


class Gemma(torch.nn.Module):
    """A Gemma 3 of two layers, a window and causal attention, from tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        hf.register()
        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=256,
            layer_types=["sliding_attention", "full_attention"],
            attn_implementation="sparsering",
        )
        self.model = transformers.Gemma3ForCausalLM(config).eval()

    def forward(self, tokens: Tensor, **options: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False, **options).logits


class Encoder(torch.nn.Module):
    """A LongNet encoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pattern = sr.LongNet((256, 512), (1, 2))
        self.model = LongNetEncoder(pattern, width=32, num_layers=2, num_heads=2).eval()
        for x in self.model.parameters():  # new blocks are the identity
            torch.nn.init.normal_(x, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


MODELS = {
    "gemma": (Gemma, lambda tokens: (torch.arange(tokens)[None] * 37 % 128,)),
    "longnet": (Encoder, lambda tokens: (torch.randn(1, tokens, 32),)),
}


def checked(name: str, tokens: int) -> torch.export.ExportedProgram:
    """Exports a model; asserts that its program has operators of aten alone and its results."""
    made, inputs = MODELS[name]
    model, given = made(), inputs(tokens)
    program = exported(model, given)
    with torch.no_grad():
        expected = model(*given)
        torch.testing.assert_close(program.module()(*given), expected, rtol=1e-5, atol=1e-5)
        assert expected.abs().mean() > 1e-2
    return program


@pytest.mark.parametrize("name", MODELS)
def test_a_model_leaves_python(name: str):
    checked(name, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_program_has_as_many_operators_at_any_length(name: str):
    sizes = {len(checked(name, tokens).graph.nodes) for tokens in (1024, 2048, 4096)}
    assert len(sizes) == 1


@pytest.mark.slow
def test_documents_and_padding_are_inputs_of_a_gemma():
    model, tokens = Gemma(), torch.arange(300)[None] * 37 % 128
    places = [torch.cat([torch.arange(n), torch.arange(300 - n)])[None] for n in (300, 100, 217)]
    program = exported(model, (tokens,), kwargs={"position_ids": places[1]}).module()
    for ids in places:
        with torch.no_grad():
            expected = model(tokens, position_ids=ids)
        got = program(tokens, position_ids=ids)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    masks = [torch.ones(2, 300, dtype=torch.int64) for _ in range(2)]
    masks[0][1, :70], masks[1][0, 120:] = 0, 0
    both = tokens.expand(2, -1)
    program = exported(model, (both,), kwargs={"attention_mask": masks[0]}).module()
    for mask in masks:
        with torch.no_grad():
            expected = model(both, attention_mask=mask)
        got = program(both, attention_mask=mask)
        real = mask.bool()
        torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_layers_own_pattern_needs_hf_using():
    tokens, pattern = (
        torch.arange(300)[None] * 37 % 128,
        sr.LongNet((64, 128), (1, 2)) & sr.Causal(),
    )
    model = Gemma()
    hf.apply(model.model, pattern)
    with torch.no_grad():
        program = torch.export.export(model, (tokens,))
    with pytest.raises(NotImplementedError, match=r"hf\.using\(model, pattern\)"):
        program.run_decompositions(decompositions())
    model = Gemma()
    with hf.using(model.model, pattern), torch.no_grad():
        program, expected = exported(model, (tokens,)), model(tokens)
    torch.testing.assert_close(program.module()(tokens), expected, rtol=1e-5, atol=1e-5)
