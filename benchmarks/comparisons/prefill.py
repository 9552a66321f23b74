"""Dense causal prompts of a Llama under "sparsering" beside "sdpa": what a new user tries first.

The model has heads of 64 or 128 and grouped key heads, as models of today; weights are random.
`error` is the distance of the last logits from those of "sdpa" in float32, relative to the largest.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..measure import Row, distance_of, interleaved
from .transformers import OURS

PEERS = (OURS, "sdpa")


def prefill(quick: bool) -> list[Row]:
    """Measures one forward pass over each length, dtype and head dim; calls take turns."""
    rounds_of = {512: 1} if quick else {4096: 7, 8192: 5, 16384: 3, 32768: 1}
    rows = []
    for head_dim in (64, 128):
        for dtype in (torch.float32, torch.bfloat16):
            for length, rounds in rounds_of.items():
                rows += _rows(head_dim, dtype, length, rounds)
    return rows


def _rows(head_dim: int, dtype: torch.dtype, length: int, rounds: int) -> list[Row]:
    tokens = torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(1))
    models = {name: _model(name, head_dim, length).to(dtype) for name in PEERS}
    outs: dict[str, Tensor] = {}

    def call(name: str) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                outs[name] = models[name](tokens, use_cache=False, logits_to_keep=64).logits

        return run

    times = interleaved({name: call(name) for name in PEERS}, rounds)
    exact = outs["sdpa"]
    if dtype != torch.float32:
        with torch.no_grad():
            model = _model("sdpa", head_dim, length)
            exact = model(tokens, use_cache=False, logits_to_keep=64).logits
    most = 1e-4 if dtype == torch.float32 else 0.1
    rows: list[Row] = []
    for name in PEERS:
        if (error := distance_of([outs[name]], [exact])) > most:
            raise RuntimeError(f"{name} is wrong: error {error:.3g}")
        rows.append({
            "case": "prefill", "attention": name, "dtype": str(dtype)[6:], "tokens": length,
            "head_dim": head_dim, "heads": 8, "kv_heads": 2, "layers": 1, "density": 1.0,
            "ms": times[name], "times_sdpa": times["sdpa"] / times[name], "error": error,
        })  # fmt: skip
    return rows


def _model(name: str, head_dim: int, length: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from sparsering.integrations import transformers as hf

    hf.register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 8 * head_dim, "num_hidden_layers": 1, "num_attention_heads": 8}
    sizes |= {"vocab_size": 256, "max_position_embeddings": length, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16 * head_dim))
    model.set_attn_implementation(name)
    return model.eval()
