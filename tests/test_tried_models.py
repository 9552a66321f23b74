"""The code that `sparsering try` prints makes a model that runs, of the tried kind and pattern."""

import pytest
import torch
import transformers

import sparsering as sr
from sparsering.cli import main
from sparsering.integrations import transformers as hf

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
PATTERN = "Causal() & (SlidingWindow(7) | GlobalTokens(2, rows=False))"


def printed_code(capsys) -> str:
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("write "))
    return "\n".join(line[10:] for line in lines[begin:])


def tried(capsys, path, *options: str):
    """Runs `try`, then the code that it printed with nothing else defined; returns the model."""
    assert main(["try", "--model", str(path), "--length", "24", "--seconds", "0.1", *options]) == 0
    names = {"__name__": "__main__"}
    exec(printed_code(capsys), names)
    return names["model"].eval()


def config_of(kind: str):
    return {"llama": transformers.LlamaConfig, "bert": transformers.BertConfig}[kind](**SIZES)


@pytest.mark.parametrize("options", [[], ["--pattern", PATTERN]], ids=["own masks", "pattern"])
@pytest.mark.parametrize("place", ["file", "folder", "weights"])
@pytest.mark.parametrize("named", [True, False], ids=["architecture", "no architecture"])
def test_the_printed_code_runs(capsys, tmp_path, place, named, options):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_of("llama")).eval()
    model.config.architectures = ["LlamaForCausalLM"] if named else None
    if place == "weights":
        model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    if named is False:
        text = (tmp_path / "config.json").read_text()
        assert "architectures" not in text or "null" in text
    found = tried(capsys, tmp_path / "config.json" if place == "file" else tmp_path, *options)
    assert type(found) is transformers.LlamaForCausalLM
    assert found.config._attn_implementation == "sparsering"
    assert found.config.num_hidden_layers == 3  # all of them, although `try` ran two
    model.load_state_dict(found.state_dict())
    if options:
        hf.apply(model, sr.parse(PATTERN))
    ids = torch.randint(128, (1, 24))
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
        if options:
            hf.apply(model, {})
            assert (found(ids).logits - model(ids).logits).abs().max() > 1e-4
    if place == "weights":
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(x, saved[name]) for name, x in found.state_dict().items())


def test_an_encoder_without_a_named_class_becomes_an_encoder(capsys, tmp_path):
    config_of("bert").save_pretrained(tmp_path)
    found = tried(capsys, tmp_path / "config.json")
    assert type(found) is transformers.BertModel
