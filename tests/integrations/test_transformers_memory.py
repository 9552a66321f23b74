"""No mask of all pairs: a window over 65,536 tokens costs what it holds."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.measure import peak_extra_bytes

TOKENS = 1 << 16


def prefill(implementation: str, length: int) -> Iterator[None]:
    """One call of a Mistral's only attention layer, mask and all; measured is what it adds."""
    from transformers import MistralConfig
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.mistral.modeling_mistral import MistralAttention

    from sparsering.integrations import transformers as hf

    hf.register()
    torch.set_num_threads(1)
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(**sizes, num_hidden_layers=1, sliding_window=512, head_dim=64)
    config._attn_implementation = implementation
    module = MistralAttention(config, 0).eval()
    function = ALL_ATTENTION_FUNCTIONS[implementation]
    query = torch.randn(1, 2, length, 64)
    key, value = torch.randn(2, 1, 1, length, 64)
    embeds = torch.zeros(1, 1, 1).expand(1, length, 1)

    def step(n: int) -> torch.Tensor:
        mask = create_sliding_window_causal_mask(config, embeds[:, :n], None, None)
        inputs = (x[:, :, :n] for x in (query, key, value))
        return function(module, *inputs, mask, scaling=0.125, sliding_window=512)[0]

    with torch.no_grad():
        step(2048)  # what is built or cached once
        yield
        out = step(length)
    assert out.isfinite().all()


@pytest.mark.slow
def test_a_window_over_65536_tokens_takes_64_mb_beyond_its_inputs_and_result():
    out = TOKENS * 2 * 64 * 4
    assert peak_extra_bytes(prefill, "sparsering", TOKENS) - out <= 64 << 20
