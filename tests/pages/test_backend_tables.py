"""Tables and sentences about backends and options in README and docs are what the code computes."""

import pytest
from helpers.pages import ROOT

from sparsering.kernels.backends import NAMES
from tools.tabulate_backends import ABOUT, COMPUTED, PAGES, in_words, with_tables


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_tables_of_the_code(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert with_tables(page, text) == text, "run tools/tabulate_backends.py"


def test_each_backend_is_described():
    assert set(ABOUT) == set(NAMES)


def test_options_in_words():
    assert in_words(COMPUTED) == "all"
    assert in_words([]) == "none"
    assert in_words([x for x in COMPUTED if x != "sink"]) == "all but `sink`"


def test_a_page_without_its_comments_is_refused():
    with pytest.raises(ValueError, match=r"README\.md has no two lines <!-- backends -->"):
        with_tables("README.md", "# sparsering\n")
