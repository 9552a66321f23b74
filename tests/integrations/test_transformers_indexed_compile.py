"""Models whose indexers choose keys, inside torch.compile: all is as without it."""

from typing import Any

import pytest
import torch
from indexed_caches import BY_ENTRY, BY_TOKEN
from torch import Tensor
from transformers import DynamicCache
from transformers_families import tiny

from sparsering.integrations import transformers as hf

TOKENS = 24
KINDS = ("whole", "left", "right", "packed")
SLOW = pytest.mark.slow
FAMILIES = (*BY_TOKEN, *BY_ENTRY)
ONE_LAYER: dict[str, dict[str, Any]] = {  # that chooses keys or entries: half of a whole trace
    "deepseek_v4": {"num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"]},
    "qwen4_exp_text": {"num_hidden_layers": 1, "layer_types": ["indexed_attention"]},
}

# Where a graph breaks, torch itself looks for the .grad of tensors between the graphs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# Torch's aot_eager fails in the backward of Qwen 4's linear attention, under "sdpa" too.
BACKENDS = {"qwen4_exp_text": "eager"}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def ours(family: str, **more: Any) -> Any:
    """Builds a tiny model with "sparsering" attention, which nobody has called."""
    hf.register()
    model = tiny(family, **more)
    model.set_attn_implementation("sparsering")
    return model


def built_of(model: Any) -> Any:
    """Builds the same model with "sparsering" attention from the beginning, as loading does."""
    built = type(model)._from_config(model.config, attn_implementation="sparsering")
    built.double().eval().load_state_dict(model.state_dict())
    return built


def batch(kind: str) -> dict[str, Tensor]:
    tokens = torch.randint(4, 61, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    if kind == "packed":
        places = torch.cat((torch.arange(9), torch.arange(TOKENS - 9)))
        return {"input_ids": tokens, "position_ids": places.expand(2, -1)}
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, {"whole": slice(0, 0), "left": slice(0, 7), "right": slice(19, TOKENS)}[kind]] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def results(call: Any, model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Returns the logits of real tokens, and the gradient of each parameter."""
    model.zero_grad()
    logits = call(**inputs, use_cache=False).logits
    if "attention_mask" in inputs:
        logits = logits[inputs["attention_mask"].bool()]
    logits.square().sum().backward()
    grads = [torch.zeros(()) if x.grad is None else x.grad for x in model.parameters()]
    return [logits.detach(), *grads]


FIRST_CALLS = [
    pytest.param(
        "deepseek_v4", "left", ONE_LAYER["deepseek_v4"], "eager", id="deepseek_v4-left, one layer"
    ),
    *(
        pytest.param(
            family, kind, {}, BACKENDS.get(family, "aot_eager"), id=f"{family}-{kind}", marks=SLOW
        )
        for family in FAMILIES
        for kind in KINDS
    ),
]


@pytest.mark.parametrize(("family", "kind", "more", "backend"), FIRST_CALLS)
def test_the_first_call_and_later_ones_are_those_without_compile(family, kind, more, backend):
    model = ours(family, **more)
    fast = torch.compile(model, backend=backend)
    found = [results(fast, model, batch(kind)) for _ in range(2)]
    assert found[0][0].abs().max() > 1e-3
    wanted = results(model, model, batch(kind))
    for each in found:
        torch.testing.assert_close(each, wanted, rtol=0, atol=1e-10)


DECODED = [
    pytest.param(
        "qwen4_exp_text", ONE_LAYER["qwen4_exp_text"], "eager", True, id="eager", marks=SLOW
    ),
    pytest.param("deepseek_v4", ONE_LAYER["deepseek_v4"], "eager", False, id="deepseek_v4, steps"),
    pytest.param(
        "qwen4_exp_text", ONE_LAYER["qwen4_exp_text"], "aot_eager", True, id="aot", marks=SLOW
    ),
    *(pytest.param(x, {}, "aot_eager", True, id=f"{x}, all layers", marks=SLOW) for x in FAMILIES),
]


@pytest.mark.parametrize(("family", "more", "backend", "with_prompt"), DECODED)
def test_decoded_tokens_are_those_without_compile(family, more, backend, with_prompt):
    """Steps are compiled, and the prompt before them too `with_prompt`."""
    model, rows = built_of(ours(family, **more)), []
    tokens = batch("whole")["input_ids"]
    for call in (torch.compile(model, backend=backend), model):
        cache, parts = DynamicCache(config=model.config), []
        with torch.no_grad():
            for start, stop in ((0, 13), (13, 14), (14, 15), (15, 16)):
                some = tokens[:, start:stop]
                run = call if start or with_prompt else model
                parts.append(run(input_ids=some, past_key_values=cache).logits)
        rows.append(torch.cat(parts, 1))
    torch.testing.assert_close(*rows, rtol=0, atol=1e-10)
