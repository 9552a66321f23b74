"""docs/words.md gives each word one meaning, and classes of the package carry words as it says."""

import ast
import re

from helpers.pages import ROOT

TEXT = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
ITEM = re.compile(r"^- \*\*([a-z ]+)\*\*: (.*(?:\n  .*)*)", re.MULTILINE)
ITEMS = {word: " ".join(text.split()) for word, text in ITEM.findall(TEXT)}
# words with several meanings elsewhere: a class may carry one only as the page says
SHARED = ("call", "chunk", "entry", "group", "page", "part", "pass", "piece", "row", "segment")
SHARED += ("slot", "source", "step", "unit", "visit")


CLASSES = {
    node.name
    for path in sorted((ROOT / "sparsering").rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.ClassDef)
}


def carriers(word: str) -> set[str]:
    """Returns the classes of the package whose names have a word, in singular or plural."""
    forms = {word, word + "s", word.removesuffix("y") + "ies"}
    return {x for x in CLASSES if forms & {y.lower() for y in re.findall("[A-Z][a-z0-9]*", x)}}


def test_words_are_sorted_and_have_an_example():
    assert len(ITEMS) >= 30
    assert TEXT.count("\n- **") == len(ITEMS)
    assert list(ITEMS) == sorted(ITEMS)
    for word, text in ITEMS.items():
        assert re.search(r"\*[^*]+\.\*", text), f"{word} has no sentence of example"


def test_classes_carry_a_word_as_the_page_says():
    listed = {
        word: set(re.findall(r"`(\w+)`", text.partition("In code:")[2]))
        for word, text in ITEMS.items()
    }
    assert {word: carriers(word) for word in SHARED} == {word: listed[word] for word in SHARED}


def test_every_listed_class_carries_its_word():
    for word, text in ITEMS.items():
        if "In code:" in text:
            assert set(re.findall(r"`(\w+)`", text.partition("In code:")[2])) <= carriers(word)
