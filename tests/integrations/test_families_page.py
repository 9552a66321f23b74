"""docs/families.md has every model type of transformers once, in the section that its code says."""

import pytest
from families_page import PAGE, families_page, sorted_types
from transformers import AutoConfig, AutoModel, LongformerConfig, LongformerModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.config import attention_modules


def test_the_page_is_what_the_sources_say():
    found = sorted_types()
    listed = [kind for kinds in found.values() for kind in kinds]
    assert sorted(listed) == sorted(CONFIG_MAPPING_NAMES)
    assert PAGE.read_text(encoding="utf-8") == families_page()


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        *(("llama", "asks"), ("gemma3_text", "asks"), ("bert", "asks"), ("deepseek_v4", "asks")),
        *(
            ("longformer", "convert"),
            ("led", "convert"),
            ("gptj", "own"),
            ("codegen", "own"),
            ("mamba", "none"),
        ),
    ],
)
def test_a_section_is_what_a_model_does(kind, section):
    assert kind in sorted_types()[section]
    if section in ("asks", "own"):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_routed_experts": 4}
        sizes |= {"intermediate_size": 48, "vocab_size": 61, "head_dim": 8, "pad_token_id": 0}
        sizes |= {"q_lora_rank": 8, "o_lora_rank": 8, "qk_rope_head_dim": 4, "o_groups": 2}
        model = AutoModel.from_config(AutoConfig.for_model(kind, **sizes))
        assert bool(list(attention_modules(model))) == (section == "asks")


def test_a_longformer_is_converted_as_the_page_says():
    config = LongformerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    assert hf.convert(LongformerModel(config)) == ["encoder.layer.0.attention.self"]
