"""docs/families.md has every model type of transformers once, and what a run of each gives.

`make test` runs some types, `make test-all` all of them.
"""

import pytest
import transformers
from families_page import (
    PAGE,
    Line,
    caches_of_page,
    cell,
    page,
    place,
    places_of_page,
    section,
    ways_cell,
)
from helpers.thinned import slow_except
from indexed_caches import CACHES, FAMILIES, MINIMAX, ways
from running_families import run
from sharing_families import shared
from transformers import LongformerConfig, LongformerModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers_families import shared_name

from sparsering.integrations import transformers as hf

LISTED = places_of_page()
PLACES = dict(LISTED)
FAST = (
    *("albert", "bart", "bloom", "deepseek_v32", "diffllama", "gemma3_text", "inkling2_text"),
    *("llama", "longformer", "mamba", "qwen2_5_vl", "t5", "timesfm", "vit"),
)
SHARED = ("granite", "roberta", "bamba")
FAST_CACHES = {
    *((MINIMAX, "quantized"), (MINIMAX, "offloaded_static"), ("qwen4_exp_text", "dynamic")),
    *(("deepseek_v32", "static"), ("deepseek_v4", "dynamic"), ("glm5_next", "offloaded")),
}
as_tabulated = pytest.mark.skipif(
    transformers.__version__ != "5.23.0", reason="families change with versions"
)


@as_tabulated
def test_every_type_of_transformers_is_on_the_page_once():
    assert sorted(kind for kind, _ in LISTED) == sorted(CONFIG_MAPPING_NAMES)


@as_tabulated
def test_the_page_is_what_its_places_say():
    assert PAGE.read_text(encoding="utf-8") == page(PLACES, caches_of_page())


@as_tabulated
@pytest.mark.parametrize("kind", slow_except(FAST, sorted(PLACES)))
def test_a_type_stands_where_its_run_puts_it(kind):
    found, listed = place(run(kind)), PLACES[kind]
    if isinstance(found, Line) and isinstance(listed, Line):
        found = found._replace(ranks=listed.ranks)
    assert found == listed, "the page is out of date: tools/tabulate_families.py"


@as_tabulated
@pytest.mark.parametrize(
    "kind", slow_except(SHARED, [k for k, x in LISTED if isinstance(x, Line) and x.ranks != "-"])
)
def test_a_type_runs_over_ranks_as_the_page_says(four, kind):
    listed = PLACES[kind]
    assert isinstance(listed, Line)
    assert cell(shared(four, shared_name(kind))) == listed.ranks


@as_tabulated
@pytest.mark.parametrize(("family", "cache"), slow_except(FAST_CACHES, FAMILIES, CACHES))
def test_ways_to_generate_are_those_of_the_page(family, cache):
    assert ways_cell(ways(family, cache)) == caches_of_page()[family, cache]


@pytest.mark.parametrize(
    ("kind", "how"),
    [("llama", "asks"), ("deepseek_v4", "asks"), ("gptj", "own"), ("mamba", "none")],
)
def test_a_section_is_what_the_source_says(kind, how):
    assert section(kind) == how


def test_a_longformer_is_converted_as_the_page_says():
    config = LongformerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    assert hf.convert(LongformerModel(config)) == ["encoder.layer.0.attention.self"]
