"""The presses of kvpress on "sparsering" attention; test_beside_packages.py installs and runs it.

    pytest tests/integrations/beside_kvpress.py    # where kvpress is installed

A press runs with the prompt; then tokens are decoded one by one. Logits are those under sdpa.
"""

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import sparsering as sr
from sparsering.integrations import transformers as hf

if "REGISTER_FIRST" in os.environ:
    hf.register()

with warnings.catch_warnings(action="ignore"):  # fire, which it asks for, imports pipes
    import kvpress as kv

hf.register()
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip
FAMILIES = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen": (Qwen3ForCausalLM, Qwen3Config)}
PROMPT, NEW = 64, 5
PRESSES = {
    "Knorm": lambda: kv.KnormPress(0.5),
    "Random": lambda: kv.RandomPress(0.5, seed=1),
    "StreamingLLM": lambda: kv.StreamingLLMPress(0.5),
    "SnapKV": lambda: kv.SnapKVPress(0.5, window_size=8),
    "TOVA": lambda: kv.TOVAPress(0.5),
    "ExpectedAttention": lambda: kv.ExpectedAttentionPress(0.5),
    "PyramidKV": lambda: kv.PyramidKVPress(0.5, window_size=8),
    "KeyDiff": lambda: kv.KeyDiffPress(0.5),
    "LagKV": lambda: kv.LagKVPress(0.5, n_sink=2, lag_size=8),
    "CUR": lambda: kv.CURPress(0.5),
    "LeverageScore": lambda: kv.LeverageScorePress(0.5),
    "NonCausalAttn": lambda: kv.NonCausalAttnPress(0.5, chunk_size=16),
    "Compactor": lambda: kv.CompactorPress(0.5),
    "CriticalKV": lambda: kv.CriticalKVPress(kv.KnormPress(0.5)),
    "ChunkKV": lambda: kv.ChunkKVPress(kv.KnormPress(0.5), chunk_length=8),
    "Chunk": lambda: kv.ChunkPress(kv.KnormPress(0.5), chunk_length=16),
    "Block": lambda: kv.BlockPress(kv.KnormPress(0.5), block_size=16),
    "Composed": lambda: kv.ComposedPress([kv.KnormPress(0.3), kv.SnapKVPress(0.3, window_size=8)]),
    "KeyRerotation": lambda: kv.KeyRerotationPress(kv.KnormPress(0.5)),
    "PerLayer": lambda: kv.PerLayerCompressionPress(kv.KnormPress(), [0.2, 0.5, 0.7]),
    "ThinK": lambda: kv.ThinKPress(0.5, window_size=8),
    "AdaKV": lambda: kv.AdaKVPress(kv.KnormPress(0.5)),
    "AdaKV of SnapKV": lambda: kv.AdaKVPress(kv.SnapKVPress(0.5, window_size=8)),
    "DMS": lambda: kv.DMSPress(kv.KnormPress(), threshold=-3.0, sliding_window_size=8),
}
HIDES = ("AdaKV", "AdaKV of SnapKV", "DMS")  # keys that stay in the cache
DROPS = tuple(x for x in PRESSES if x not in (*HIDES, "ThinK"))


def model_of(implementation: str, family: str = "llama") -> Any:
    torch.manual_seed(0)
    cls, config = FAMILIES[family]
    model = cls(config(**SIZES)).eval()
    for x in model.parameters():  # so that single keys matter, and norms of keys differ
        x.data *= 4 if x.dim() > 1 else 0.5 + torch.rand(x.shape)
    model.set_attn_implementation(implementation)
    return model


def tokens() -> Tensor:
    return torch.randint(3, 128, (2, PROMPT + NEW), generator=torch.Generator().manual_seed(0))


def pressed(model: Any, press: Any, **prompt: Any) -> DynamicCache:
    """Runs the prompt; transformers 5.23 hands layers no `cache_position` unless a call has it."""
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        at = {"cache_position": torch.arange(PROMPT)}
        model(tokens()[:, :PROMPT], past_key_values=cache, **at, **prompt)
    return cache


@torch.no_grad()
def decoded(model: Any, cache: DynamicCache) -> Tensor:
    """Logits of the new tokens, [2, NEW, vocabulary]."""
    logits = []
    for i in range(PROMPT, PROMPT + NEW):
        at = torch.full((2, 1), i)
        row = tokens()[:, i : i + 1]
        logits.append(model(row, past_key_values=cache, position_ids=at).logits)
    return torch.cat(logits, 1)


def sizes(cache: DynamicCache) -> list[int]:
    return [layer.keys.shape[2] for layer in cache.layers]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PRESSES)
def test_a_press_gives_the_logits_of_sdpa(name, family):
    found = {}
    for implementation in ("sdpa", "sparsering"):
        model = model_of(implementation, family)
        cache = pressed(model, PRESSES[name]())
        found[implementation] = sizes(cache), decoded(model, cache)
    assert found["sparsering"][0] == found["sdpa"][0]
    assert (min(found["sdpa"][0]) < PROMPT) == (name in DROPS)
    torch.testing.assert_close(found["sparsering"][1], found["sdpa"][1], rtol=0, atol=5e-6)
    if name != "ThinK":  # which drops channels of few keys here
        full = DynamicCache()
        model = model_of("sparsering", family)
        with torch.no_grad():
            model(tokens()[:, :PROMPT], past_key_values=full)
        assert (decoded(model, full) - found["sparsering"][1]).abs().max() > 1e-2


def test_the_other_order_of_imports():
    """Where `register` was called before kvpress was imported."""
    if "REGISTER_FIRST" not in os.environ:
        command = [sys.executable, "-m", "pytest", "-q", "-k", "AdaKV or DMS", __file__]
        subprocess.run(command, env={**os.environ, "REGISTER_FIRST": "1"}, check=True)


def test_a_press_that_reads_weights_says_that_it_needs_eager():
    with pytest.raises(AssertionError, match='Set attn_implementation="eager"'):
        pressed(model_of("sparsering"), kv.ObservedAttentionPress(0.5))


@pytest.mark.parametrize("name", ["Knorm", "AdaKV"])
def test_the_prompt_may_have_a_pattern_of_its_own(name):
    """Under `using`, for the prompt alone; sdpa gets the same pairs as a mask."""
    window = sr.SlidingWindow(20) | (sr.GlobalTokens(4) & sr.Causal())
    dense = model_of("sdpa")
    mask = torch.zeros(1, 1, PROMPT, PROMPT)
    mask.masked_fill_(~window.to_dense(PROMPT)[0], torch.finfo(mask.dtype).min)
    wanted = decoded(dense, pressed(dense, PRESSES[name](), attention_mask=mask))
    model = model_of("sparsering")
    with hf.using(model, window):
        cache = pressed(model, PRESSES[name]())
    torch.testing.assert_close(decoded(model, cache), wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", DROPS)
def test_a_pattern_of_apply_is_refused_where_keys_were_dropped(name):
    model = model_of("sparsering")
    hf.apply(model, sr.SlidingWindow(20))
    cache = pressed(model, PRESSES[name]())
    with pytest.raises(NotImplementedError, match=r"keys were dropped.*SparseCache\(model\)"):
        decoded(model, cache)


def test_a_pattern_of_apply_holds_beside_keys_that_single_heads_dropped():
    """They stay in the cache, so positions are known: each head sees its keys in the window."""
    model, dense = model_of("sparsering"), model_of("sdpa")
    hf.apply(model, sr.SlidingWindow(20))
    found = decoded(model, pressed(model, PRESSES["AdaKV"]()))
    near = sr.SlidingWindow(20).to_dense(PROMPT + NEW)[0]
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(1, 1, PROMPT + NEW, PROMPT + NEW).masked_fill_(~near, lowest)
    cache = pressed(dense, PRESSES["AdaKV"](), attention_mask=mask[:, :, :PROMPT, :PROMPT])
    wanted = []
    for i in range(PROMPT, PROMPT + NEW):
        at = {"position_ids": torch.full((2, 1), i)}
        at["attention_mask"] = mask[:, :, i : i + 1, : i + 1]
        with torch.no_grad():
            out = dense(tokens()[:, i : i + 1], past_key_values=cache, **at)
        wanted.append(out.logits)
    torch.testing.assert_close(found, torch.cat(wanted, 1), rtol=0, atol=5e-6)
