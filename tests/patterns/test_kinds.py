"""Every pattern of the library has a row in `kinds`, and all that test patterns read every row."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzz import long, specs
from fuzz.sane import SANE
from oracles import strategies
from oracles.attention_oracle import PATTERNS
from oracles.drawings import DRAWINGS
from oracles.every_pattern import one_of_each
from oracles.kinds import DOCUMENTS, EQUAL_DOCUMENTS, KINDS, PATHS, WHOLE, Kind
from oracles.patterns_oracle import leaves

import sparsering as sr
from sparsering.patterns.expression import BUILT_IN

ABSTRACT = {"Mask", "Mixture", "Pattern"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "patterns.md"


def public_patterns() -> set[str]:
    """Returns the names of all pattern classes and constructors that users may call."""
    values = {name: getattr(sr, name) for name in sr.__all__}
    classes = {n for n, x in values.items() if inspect.isclass(x) and issubclass(x, sr.Pattern)}
    return (classes | set(BUILT_IN) | {"from_mask_mod"}) - ABSTRACT - {"Varlen"}


def check_all_have_rows() -> None:
    missing = public_patterns() - {kind.public for kind in KINDS.values()}
    assert not missing, f"tests/oracles/kinds.py has no row for {sorted(missing)}"


def check_row(kind: Kind) -> None:
    """Asserts that a row says all that its readers need, or where else that stands."""
    read = {
        "rule": kind.rule is not None,
        "examples": bool(kind.examples()),
        "cases": bool(kind.cases),
        "drawing": bool(kind.drawing),
        "sane": kind.sane is not None or kind.inner == "both",
    }
    for name, there in read.items():
        assert there or name in kind.elsewhere, f"the row {kind.name} has no {name}"
        assert not (there and name in kind.elsewhere), f"{kind.name} has {name}: drop the exception"
    assert kind.stands in (PATHS, DOCUMENTS, EQUAL_DOCUMENTS, WHOLE)
    assert kind.inner in ("", "last", "each head", "both")
    assert kind.max_length in ("", "always", "if blocks are selected")
    assert not kind.public or f"- `{kind.public}`:" in PAGE.read_text(encoding="utf-8")


def test_every_pattern_of_the_library_has_a_row() -> None:
    check_all_have_rows()


@pytest.mark.parametrize("name", KINDS)
def test_a_row_is_whole(name: str) -> None:
    check_row(KINDS[name])


def test_all_readers_read_every_row() -> None:
    drawn = {part for drawing in DRAWINGS for part in specs.classes_of(drawing.spec)}
    assert drawn >= {name for name, kind in KINDS.items() if kind.drawing}
    assert set(specs.CLASSES) == set(KINDS)
    containers = {
        "Packed",
        "Tree",
        "Rearranged",
        *specs.OPERATORS,
    }
    assert set(specs.LEAVES) == set(KINDS) - containers
    assert set(long.CLASSES) == {name for name, kind in KINDS.items() if kind.long}
    assert set(SANE) >= {name for name, kind in KINDS.items() if kind.sane}
    joined = set(strategies.named(PATHS, DOCUMENTS, EQUAL_DOCUMENTS, WHOLE))
    alone = {n for n, kind in KINDS.items() if not (kind.joined or kind.inner or kind.is_mixture)}
    others = {*containers, "PerHead", "LongNet"}
    assert joined | alone | others == set(KINDS)
    assert len(one_of_each()) == sum(len(kind.examples()) for kind in KINDS.values())
    assert set(PATTERNS) - {"nothing"} == {name for k in KINDS.values() for name in k.cases}


def test_a_pattern_without_a_row_is_noticed(monkeypatch: Any) -> None:
    for name in ("Tree", "BlockCausal", "from_mask_mod"):
        with monkeypatch.context() as patch:
            for row in [row for row, kind in KINDS.items() if kind.public == name]:
                patch.delitem(KINDS, row)
            with pytest.raises(AssertionError, match=rf"no row for \['{name}'\]"):
                check_all_have_rows()


def test_a_row_without_a_part_is_noticed() -> None:
    nothing = {"rule": None, "examples": list, "cases": {}, "drawing": "", "sane": None}
    for part, empty in nothing.items():
        with pytest.raises(AssertionError, match=f"the row Causal has no {part}"):
            check_row(replace(KINDS["Causal"], **{part: empty}))
    with pytest.raises(AssertionError, match="Causal has rule: drop the exception"):
        check_row(replace(KINDS["Causal"], elsewhere={"rule": "a test"}))


def test_every_drawing_has_a_rule() -> None:
    assert all(KINDS[leaf[0]].rule for drawing in DRAWINGS for leaf in leaves(drawing.spec))


def test_every_example_is_its_text() -> None:
    for pattern in one_of_each():
        tensors = {f"t{i}": x for i, x in enumerate(pattern.tensors)}
        text = pattern.expression
        assert tensors or sr.parse(text) == pattern, text
