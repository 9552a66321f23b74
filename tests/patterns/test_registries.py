"""Every mask of the library is in every list of masks that tests read: a new one fails by name."""

from typing import Any

import pytest
from fuzz.specs import CLASSES
from oracles.attention_oracle import PATTERNS, Case
from oracles.drawings import DRAWINGS
from oracles.every_pattern import one_of_each
from oracles.patterns_oracle import RULES, leaves

import sparsering as sr
from sparsering.patterns.algebra import Pattern
from sparsering.patterns.expression import BUILT_IN

FUNCTIONS = {"LongNet", "ChunkedCausal"}  # their patterns have other names
ALL = set(BUILT_IN) - {"Varlen"}  # `attention_varlen` makes it; no user does

# What stands elsewhere, and where.
ELSEWHERE = {
    "rules": {"RandomBlocks": "oracles/blocks_oracle.py"},
    "examples": {"SelectedBlocks": "tests/attention/test_selected_blocks.py"},
    "drawings": {
        "RandomBlocks": "its choice is random: tests/patterns/test_random_blocks.py",
        "SelectedBlocks": "tests/attention/test_selected_blocks.py",
    },
    "attention": {
        "KeyMask": "tests/attention/test_key_masks.py",
        "PooledCausal": "tests/selection",
        "SelectedBlocks": "tests/attention/test_selected_blocks.py",
        "Tree": "tests/patterns/test_tree.py",
    },
}


def classes_of(pattern: Pattern) -> set[str]:
    """The names of all classes in a pattern, as its text has them."""
    found, waiting = set(), [pattern]
    while waiting:
        part = waiting.pop()
        found.add(type(part).__name__)
        waiting += part._components()
    return found


def drawn_by(specs: Any) -> set[str]:
    return {leaf[0] for spec in specs for leaf in leaves(spec)}


REGISTRIES = {
    "rules": set(RULES),
    "examples": set().union(*map(classes_of, one_of_each())) | FUNCTIONS,
    "drawings": drawn_by(drawing.spec for drawing in DRAWINGS),
    "strategies and the fuzzer": set(CLASSES),
    "attention": set().union(*(classes_of(make(Case())) for make in PATTERNS.values())) | FUNCTIONS,
}


@pytest.mark.parametrize("registry", REGISTRIES)
def test_every_mask_is_in_every_registry(registry: str) -> None:
    elsewhere = ELSEWHERE.get(registry, {})
    missing = ALL - REGISTRIES[registry] - set(elsewhere)
    assert not missing, f"no {registry} for {sorted(missing)}"
    needless = set(elsewhere) & REGISTRIES[registry]
    assert not needless, f"{sorted(needless)} are in the {registry} now: drop the exception"


def test_a_mask_that_no_list_has_is_noticed(monkeypatch: Any) -> None:
    monkeypatch.setattr("test_registries.ALL", ALL | {"Unlisted"})
    for registry in REGISTRIES:
        with pytest.raises(AssertionError, match="Unlisted"):
            test_every_mask_is_in_every_registry(registry)


def test_every_example_is_its_text() -> None:
    for pattern in one_of_each():
        tensors = {f"t{i}": x for i, x in enumerate(pattern.tensors)}
        text = pattern.expression
        assert tensors or sr.parse(text) == pattern, text
