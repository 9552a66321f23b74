"""The table of options: what derives from it agrees, and a verb refuses what it does not name."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsering as sr
from sparsering import weights
from sparsering.call import Call, Options
from sparsering.decoding.steps import NewTokens, fits_page
from sparsering.distributed import ring_attention, simulate_ring
from sparsering.kernels.backends import BACKENDS, reasons_against
from sparsering.kernels.problem import Problem
from sparsering.route.options import (
    ANYWHERE,
    IN_OPERATORS,
    OPTIONS,
    Option,
    checked_options,
    for_queries,
)

X = [torch.randn(1, 2, 8, 4) for _ in range(3)]
WHOLE = {"block_bias", "slot_bias"}
DROPOUT = {"dropout_p", "dropout_seed"}


def cached(*inputs: Any, **options: Any) -> Any:
    return sr.KVCache(sr.Causal(), 1, num_kv_heads=2, head_dim=4).attend(*inputs, **options)


VERBS: dict[str, Callable[..., Any]] = {
    "attention": lambda **options: sr.attention(*X, sr.Causal(), **options),
    "explain": lambda **options: sr.explain(*X, sr.Causal(), **options),
    "attention_varlen": lambda **options: sr.attention_varlen(
        *(x[0].transpose(0, 1) for x in X), [0, 8], [0, 8], sr.Causal(), **options
    ),
    "ring_attention": lambda **options: ring_attention(*X, sr.Causal(), **options),
    "simulate_ring": lambda **options: simulate_ring(*X, sr.Causal(), world_size=2, **options),
    "attention_weights": lambda **options: sr.attention_weights(*X[:2], sr.Causal(), **options),
    "key_mass": lambda **options: sr.key_mass(*X[:2], sr.Causal(), **options),
    "KVCache": lambda **options: cached(*X, **options),
}


@pytest.mark.parametrize("by", [None, "key", "call", "query", "head"])
@pytest.mark.parametrize("verb", VERBS)
def test_an_option_that_a_verb_does_not_name_is_refused_by_name(verb, by, monkeypatch):
    """Neither a name of no option, nor an option that only the table has so far, is ignored."""
    if by is not None:
        monkeypatch.setitem(OPTIONS, "logit_bias", Option("Tensor?", by, lambda x, call: x))
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="logit_bias"):
        VERBS[verb](logit_bias=torch.ones(1, 2, 8))


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        *((name, WHOLE) for name in ("ring_attention", "simulate_ring", "KVCache")),
        ("attention_varlen", WHOLE),
        *((name, {"slot_bias", *DROPOUT}) for name in ("attention_weights", "key_mass")),
    ],
)
def test_an_option_of_attention_is_refused_with_a_reason(verb, options):
    for name in options:
        message = rf"takes no {name}: \w.*; (leave it out|call attention)|block_mass computes"
        with pytest.raises(ValueError, match=message):
            VERBS[verb](**{name: 0.1})


@pytest.mark.parametrize(
    ("function", "without"),
    [
        (sr.attention, set()),
        (ring_attention, {*WHOLE, "score_mod"}),
        (simulate_ring, {*WHOLE, "score_mod"}),
        (sr.attention_weights, {"slot_bias", "score_mod", *DROPOUT}),
        (sr.key_mass, {"slot_bias", "score_mod", *DROPOUT}),
    ],
)
def test_signatures_spell_out_the_table(function, without):
    parameters = inspect.signature(function).parameters
    assert parameters.keys() & OPTIONS.keys() == OPTIONS.keys() - without
    for name in OPTIONS.keys() - without:
        assert parameters[name].default == (0.0 if name == "dropout_p" else None)
    named = [name for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY]
    if without >= DROPOUT:
        assert set(weights._OPTIONS) == set(named) - {"weight"}


@pytest.mark.parametrize(
    ("operator", "names"),
    [
        ("attention", IN_OPERATORS),
        ("ring_attention", ANYWHERE),
        ("cached_attention", ANYWHERE),
    ],
)
def test_operators_take_the_options_of_the_table(operator, names):
    schema = getattr(torch.ops.sparsering, operator).default._schema
    types = {x.name: str(x.type) for x in schema.arguments}
    expected = {"Tensor?": "Optional[Tensor]", "float?": "Optional[float]"}
    assert {name: types.get(name) for name in OPTIONS if name in types} == {
        name: expected[OPTIONS[name].schema] for name in OPTIONS if name in names
    }


def test_gradients_flow_to_the_options_that_learn():
    for name, option in OPTIONS.items():
        assert option.learns <= (option.schema == "Tensor?"), name
        if name != "slot_bias":  # kernels get it as a block bias
            assert name in Problem._fields
    pattern = sr.Causal()
    blocks = pattern.layout(8, 8, block_size=16).num_blocks
    values = {
        "block_bias": torch.zeros(1, 2, blocks),
        "distance_bias": torch.zeros(2, 3),
        "sink": torch.zeros(2),
    }
    learning = {name for name, option in OPTIONS.items() if option.learns}
    assert values.keys() == learning - {"slot_bias"}
    values = {name: x.requires_grad_() for name, x in values.items()}
    sr.attention(*X, pattern, block_size=16, **values).sum().backward()
    assert all(x.grad is not None for x in values.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernel_refuses_what_it_does_not_name(backend):
    assert "it has no logit_bias" in " ".join(reasons_against(backend, X, ["logit_bias"]))


def test_a_step_with_an_unknown_extra_leaves_the_page():
    """Its tensor would otherwise meet the slots of the cache, which are in no order of keys."""
    cache = sr.KVCache(sr.Causal(), 1, num_kv_heads=2, head_dim=4)
    cache.attend(*X)
    step = [x[:, :, :1] for x in X]
    for extras, fits in (({}, True), ({"softcap": 2.0}, True), ({"logit_bias": X[0]}, False)):
        tokens = NewTokens(*step, Options(extras))
        assert fits_page(cache._state, "gather", [1], tokens) == fits


def test_a_problem_names_the_extras_in_use():
    layout = sr.Causal().layout(8, 8, block_size=16)
    problem = Problem(layout, *X, 0.5)
    fields = {name for name, x in Problem._field_defaults.items() if x is None}
    named = {*OPTIONS, "key_mask", "coordinate_bias"} - {"slot_bias"}
    assert problem.in_use == set() and fields == named
    for name in fields:
        assert problem._replace(**{name: 1.0}).in_use == {name}


def test_options_hold_what_a_call_uses():
    options = checked_options(X[0], X[1], sr.Causal(), None, softcap=2.0, sink=None, dropout_p=0.0)
    assert options.in_use == {"softcap": 2.0} and options["sink"] is None
    assert checked_options(X[0], X[1], sr.Causal(), None).in_use == {}
    assert options.changed(softcap=None).in_use == {}
    rows = Options({"sink": torch.randn(1, 2, 8), "distance_bias": torch.randn(1, 2, 8)})
    cut = for_queries(rows, lambda x: x[:, :, :3])
    assert cut["sink"].shape == (1, 2, 3) and cut["distance_bias"].shape == (1, 2, 8)
    call = Call(query=X[0], key=X[1], value=X[2], pattern=sr.Causal(), scale=1.0, q_start=0)
    for value, name in ((options, "in_use"), (call, "options")):
        with pytest.raises(AttributeError):
            setattr(value, name, {})


REVERSED = """
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

class Reversed(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sparsering.route.options":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        run = spec.loader.exec_module

        def execute(module):
            run(module)
            rows = list(module.OPTIONS.items())[::-1]
            module.OPTIONS.clear()
            module.OPTIONS.update(rows)
            module.IN_OPERATORS.reverse()
            module.ANYWHERE.reverse()

        spec.loader.exec_module = execute
        return spec

sys.meta_path.insert(0, Reversed())
"""
CALLS = """
import hashlib
import torch
import sparsering as sr
from sparsering.distributed import simulate_ring

torch.manual_seed(0)
x = [torch.randn(1, 2, 48, 8, requires_grad=True) for _ in range(3)]
table, sink = torch.randn(2, 9, requires_grad=True), torch.randn(2, requires_grad=True)
options = {"softcap": 3.0, "distance_bias": table, "sink": sink}
dropped = {"dropout_p": 0.25, "dropout_seed": 7}
found = []
for attend, more in ((sr.attention, {}), (simulate_ring, {"world_size": 3})):
    out = attend(*x, sr.LongNet((16, 48), (1, 2)), **options, **dropped, **more)
    found += [out, *torch.autograd.grad(out.cos().sum(), [*x, table, sink])]
near = sr.SelectedBlocks(torch.arange(48)[:, None], 1, query_block=1)
bias = torch.randn(1, 2, 48, 1, requires_grad=True)
out = sr.attention(*x, near, slot_bias=bias, softcap=2.0)
found += [out, *torch.autograd.grad(out.cos().sum(), [*x, bias])]
with torch.no_grad():
    cache = sr.KVCache(sr.Causal(), 1, num_kv_heads=2, head_dim=8)
    found += [cache.attend(*(y[:, :, :40] for y in x), **options)]
    found += [cache.attend(*(y[:, :, 40:] for y in x), **options)]
print(hashlib.sha256(b"".join(y.detach().numpy().tobytes() for y in found)).hexdigest())
"""


def test_the_order_of_the_rows_changes_nothing():
    runs = [
        subprocess.run(
            [sys.executable, "-c", first + CALLS], capture_output=True, text=True, check=True
        ).stdout
        for first in ("", REVERSED)
    ]
    assert len(runs[0]) == 65
    assert runs[0] == runs[1]
