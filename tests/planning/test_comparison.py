"""`sr.compare` and `sparsering try`: errors by definition, planted faults, and lines that hold."""

import re

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import dense_attention

import sparsering as sr
from sparsering.cli import main
from sparsering.planning import comparison
from sparsering.planning.comparison import Cost, beside, error_of, hides_later_keys, peak_of

PATTERNS = [
    (sr.SlidingWindow(30) & sr.Causal(), True),
    (sr.LongNet((32, 64), (1, 2)), False),
    (sr.Documents((100, 200)), False),
    (sr.RandomBlocks(0.2, 32), False),
    (sr.Tree((100, 100, 100), (-1, 0, 0)), True),
    (sr.SelectedBlocks(torch.arange(600).view(1, 1, 300, 2) % 5, 64, 1), False),
    (sr.KeyMask(torch.arange(300) % 3 > 0), False),
]


@pytest.mark.parametrize(("pattern", "causal"), PATTERNS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("rows", [1 << 24, 0], ids=["all rows", "some rows"])
def test_an_error_is_that_of_softmax_by_its_definition(monkeypatch, pattern, causal, rows):
    monkeypatch.setattr(comparison, "_ALL_ROWS", rows)
    query, key, value = torch.randn(3, 1, 4, 300, 16)
    out = sr.attention(query, key, value, pattern)
    assert error_of(out, query, key, value, pattern) < 2e-6
    doubles = (x.double() for x in (query, key, value))
    exact, _ = dense_attention(*doubles, pattern.to_dense(300, num_heads=4))
    wrong = out.clone()
    wrong[0, 2, 299] += 0.01
    largest = float(exact.abs().max())
    if rows:
        assert error_of(wrong, query, key, value, pattern) == pytest.approx(0.01 / largest, 1e-3)
    else:
        assert error_of(wrong, query, key, value, pattern) >= 0.01 / largest * 0.999
    assert hides_later_keys(pattern, 300, 4) == causal


def test_a_comparison_measures_both_and_says_so_in_four_lines():
    query = torch.randn(1, 4, 500, 16)
    key, value = torch.randn(2, 1, 2, 500, 16)
    pattern = sr.SlidingWindow(30) & sr.Causal()
    found = sr.compare(query, key, value, pattern, seconds=1)
    assert 0 < found.error < 2e-6
    assert found.density == pytest.approx(pattern.layout(500).num_pairs / (500 * 501 / 2))
    assert None not in (found.dense_forward, found.dense_training)
    costs = found.forward, found.training, found.dense_forward, found.dense_training
    assert all(cost is not None and cost.seconds > 0 and cost.bytes >= 0 for cost in costs)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["equal", "forward", "training", "write"]
    assert str(pattern) in lines[3] and query.grad is None


def test_dense_attention_is_left_out_where_it_would_take_too_long():
    inputs = torch.randn(3, 1, 2, 4096, 32)
    found = sr.compare(*inputs, sr.SlidingWindow(8) & sr.Causal(), seconds=1e-6)
    assert found.dense_forward is None and found.dense_training is None
    assert str(found).count("dense takes longer than the seconds given") == 2


def test_wrong_arguments_are_told():
    x = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match="seconds must be above 0"):
        sr.compare(x, x, x, sr.Causal(), seconds=0)
    with pytest.raises(ValueError, match="head dim"):
        sr.compare(x[0], x, x, sr.Causal())


def test_a_line_tells_the_direction():
    ours, theirs = Cost(1.0, 10**6), Cost(2.5, 3 * 10**6)
    assert beside("x", ours, theirs, "p").endswith("p 2.5 s: 2.5 times faster; memory 1 MB, p 3 MB")
    assert "2.5 times slower" in beside("x", theirs, ours, "p")
    assert "memory" not in beside("x", ours._replace(bytes=0), theirs, "p")


def test_a_peak_is_what_a_call_adds():
    def call():
        torch.empty(64 << 20, dtype=torch.uint8).fill_(1)

    peak = peak_of(call, torch.device("cpu"))
    assert peak == 0 or 60 << 20 < peak < 80 << 20


MODELS = {
    "llama": {"num_key_value_heads": 2},
    "gemma3_text": {"head_dim": 16, "sliding_window": 32, "num_hidden_layers": 8},
    "modernbert": {"num_hidden_layers": 6, "local_attention": 32},
    "gpt2": {},
}


@pytest.mark.parametrize(
    ("pattern", "kind"),
    thinned(3, [None, "SlidingWindow(31) | GlobalTokens(4, rows=False)"], MODELS),
)
def test_a_model_is_tried_with_its_own_masks_and_with_a_pattern(tmp_path, capsys, kind, pattern):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    sizes |= {"intermediate_size": 96} if kind != "gpt2" else {}
    config = transformers.AutoConfig.for_model(kind, **(sizes | MODELS[kind]))
    config.save_pretrained(tmp_path)
    path = tmp_path if pattern else tmp_path / "config.json"
    words = ["try", "--model", str(path), "--length", "600", "--seconds", "1"]
    assert main([*words, *(["--pattern", pattern] if pattern else [])]) == 0
    lines = capsys.readouterr().out.splitlines()
    layers = {"llama": 2, "gemma3_text": 6, "modernbert": 2, "gpt2": 2}[kind]
    assert f"{layers} of {config.num_hidden_layers} layers" in lines[0]
    errors = [float(x) for line in lines[1:3] for x in re.findall(r"within (\S+?)[, ]", line)]
    assert len(errors) == (2 if pattern else 1) and all(1e-9 < x < 1e-5 for x in errors)
    assert [x for x in lines if x.startswith(("forward", "training")) and " sdpa " in x]
    assert any(line.startswith("          model = transformers.") for line in lines[3:])


def test_a_model_that_is_none_is_one_line(tmp_path, capsys):
    pytest.importorskip("transformers")
    assert main(["try", "--model", str(tmp_path), "--length", "64"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
