"""Each message that docs/troubleshooting.md explains is provoked."""

import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.pages import ROOT
from transformers import (
    DynamicCache,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import sparsering as sr
from sparsering.distributed import ring_attention
from sparsering.integrations import transformers as hf
from sparsering.layouts.cache import LayoutCache

PAGE = ROOT / "docs" / "troubleshooting.md"
CAUSAL = sr.Causal()
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
IDS = torch.arange(16)[None]


def explained() -> list[str]:
    """The messages that items of the page begin with; a RingError is described, not quoted."""
    return re.findall(r"^- `([^`]+)`: ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def call(pattern: object = CAUSAL, *, heads: int = 2, batch: int = 1, **options: object) -> object:
    query = torch.randn(batch, 2, 16, 8, requires_grad=True)
    key = torch.randn(batch, heads, 16, 8, dtype=options.pop("dtype", torch.float32))
    return sr.attention(query, key, key, pattern, **options)


def cache(tokens: int = 16, pattern: sr.Pattern = CAUSAL, **options: object) -> sr.KVCache:
    made = sr.KVCache(pattern, 1, num_kv_heads=2, head_dim=8, **options)
    made.attend(*torch.randn(3, 1, 2, tokens, 8))
    return made


def llama(**options: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options))


def second_derivative() -> None:
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    out = sr.attention(query, query, query, CAUSAL, backend="sdpa", q_start=0).square().sum()
    (first,) = torch.autograd.grad(out, query, create_graph=True)
    first.sum().backward()


def third_derivative() -> None:
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    found = sr.attention(query, query, query, CAUSAL).square().sum()
    for _ in range(3):
        (found,) = torch.autograd.grad(found.sum(), query, create_graph=True)


def without_compiler() -> None:
    def fails() -> Path:
        raise ImportError("no compiler")

    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules["sparsering.kernels.cpu.build"]
        patch.setattr(module, "build", fails)
        patch.setattr(module, "loaded_operators", lambda: None)
        module._load.__wrapped__()


def evicted() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))
    hf.apply(model, sr.SlidingWindow(7))
    kept = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (IDS, IDS[:, :1]):
            model(part, past_key_values=kept)


def with_another_attention() -> None:
    model = llama()
    hf.apply(model, sr.SlidingWindow(3))
    LlamaForCausalLM._from_config(model.config, attn_implementation="sdpa")


def in_using(**options: object) -> None:
    model = llama()
    with hf.using(model, CAUSAL), torch.no_grad():
        kept = model(IDS, use_cache=True).past_key_values
        model(IDS[:, :1], past_key_values=kept)


def packed() -> None:
    hf.register()
    llama(attn_implementation="sparsering")(IDS, position_ids=IDS % 8, use_cache=True)


def four_dims() -> None:
    model = llama()
    hf.apply(model, sr.SlidingWindow(3))
    model(IDS, attention_mask=torch.ones(1, 1, 16, 16).bool())


def compiled_for_new_masks():
    """Compiles a call for another mask_mod in each step; raises what torch then logs."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addHandler(handler)
    torch._dynamo.reset()
    compiled = torch.compile(lambda pattern: call(pattern), backend="eager")
    try:
        with torch._dynamo.config.patch(recompile_limit=2):
            for step in range(4):
                ids = torch.arange(16) // (step + 2)
                compiled(sr.from_mask_mod(lambda b, h, q, k, ids=ids: ids[q] == ids[k]))
    finally:
        logger.removeHandler(handler)
    assert any("MaskMod(" in text for text in records), records  # as the page says
    raise RuntimeError("".join(records))


PROVOKED: dict[str, Callable[[], object]] = {
    "pattern must be a sparsering pattern such as Causal(), got Tensor": lambda: call(
        torch.ones(16, 16).bool()
    ),
    "attention takes no attn_mask": lambda: call(attn_mask=None),
    "a pattern has no truth value": lambda: CAUSAL and CAUSAL,
    "a mixture counts them: use +": lambda: sr.LongNet((4, 8), (1, 2)) | CAUSAL,
    "query heads must be a multiple of key/value heads": lambda: call(heads=3),
    "query, key and value must be [batch, heads, tokens, head dim]": lambda: sr.attention(
        *torch.randn(3, 2, 16, 8), CAUSAL
    ),
    "heads of ... tokens; if tokens come before heads, transpose(1, 2)": lambda: sr.attention(
        *torch.randn(3, 1, 300, 2, 8), CAUSAL
    ),
    "query, key and value must share a dtype": lambda: call(dtype=torch.float16),
    "LongNet needs as many segment_lengths as dilation_rates": lambda: sr.LongNet((4, 8), (1,)),
    "KeyMask needs a bool tensor": lambda: sr.KeyMask(torch.ones(16)),
    "Documents lengths must sum to the key length": lambda: call(sr.Documents((4, 4))),
    "the pattern is for ... batch entries, got a query of ...": lambda: call(
        sr.KeyPadding((4, 4, 4)), batch=2
    ),
    "block_size must be a multiple of 16 from 16 to 256": lambda: call(block_size=100),
    "has first derivatives in reverse mode alone": second_derivative,
    "third derivatives, and forward mode over forward mode": third_derivative,
    "mask_mod must work under torch.vmap": lambda: call(
        sr.from_mask_mod(lambda b, h, q, k: q >= k and k >= 0)
    ),
    "triton: it needs a GPU": lambda: call(backend="triton"),
    "cpu: it computes in float32; float64 stays with gather": lambda: sr.attention(
        *torch.randn(3, 1, 2, 16, 8, dtype=torch.float64), CAUSAL, backend="cpu"
    ),
    "falls back to the slower 'gather' backend": without_compiler,
    "is not kept, since layout_cache has a limit of": lambda: LayoutCache()._warn_of_rebuilding(
        (torch.device("cuda"),), 1 << 40
    ),
    "attend keeps no gradients": lambda: cache().attend(
        *torch.randn(3, 1, 2, 1, 8, requires_grad=True)
    ),
    "sees key ..., which has not come": lambda: cache(pattern=sr.BlockCausal(12)),
    "which token ... has seen": lambda: cache(pattern=sr.BlockCausal(4), rollback=4).crop(14),
    "crop takes a length from ... to": lambda: cache(pattern=sr.SlidingWindow(3)).crop(4),
    "expected a pattern with a short period": lambda: cache(pattern=sr.RandomBlocks(0.5, 16)),
    "the cache is for ... tokens, got ... more": lambda: cache(max_length=8),
    "the cache has dropped the first ... keys": evicted,
    "computes attention in its own classes": lambda: hf.apply(
        GPTJForCausalLM(GPTJConfig(n_embd=32, n_layer=1, n_head=2, rotary_dim=4, vocab_size=16)),
        CAUSAL,
    ),
    "needs layer indices ... or layer types": lambda: hf.apply(llama(), {"local": CAUSAL}),
    "attention does not follow": with_another_attention,
    "gives no attention weights": lambda: llama(attn_implementation="sparsering")(
        IDS, output_attentions=True
    ),
    "that its config can hold as text": lambda: hf.apply(
        llama(), sr.KeyMask(torch.ones(16).bool())
    ),
    "needs the whole sequence in each call": in_using,
    "position_ids restart, but packed documents see each other": packed,
    "a mask of all pairs": four_dims,
    "hit config.recompile_limit": compiled_for_new_masks,
    "ranks cannot share calls of": lambda: hf.parallelize(
        MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=32, num_hidden_layers=1))
    ),
    "sharding must be one of": lambda: ring_attention(
        *torch.randn(3, 1, 2, 16, 8), CAUSAL, sharding="snake"
    ),
}


@pytest.mark.parametrize("message", explained())
def test_the_message_is_what_the_library_says(message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words = re.escape(message).replace(re.escape("..."), ".+")
    with warnings.catch_warnings(action="error"), pytest.raises(Exception, match=words):
        PROVOKED[message]()


def test_each_message_that_is_provoked_is_explained():
    assert set(PROVOKED) == set(explained())
