"""Tests pages without building the site: each is in its navigation, and links are whole."""

import re
import unicodedata
from pathlib import Path

import pytest
from helpers.pages import ROOT

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(DOCS.rglob("*.ipynb"))]
LINKED = [*PAGES, *sorted(ROOT.glob("*.md"))]
each_linked = pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))

FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Where the links and pictures of a page lead, but for other sites."""
    prose = CODE.sub("", FENCE.sub("", text.replace('\\"', '"')))
    return [x for x in LINK.findall(prose) if not re.match(r"[a-z]+:", x)]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace("`", "")
        kept = [x for x in words if x in " -_" or unicodedata.category(x)[0] in "LN"]
        slug = "".join(kept).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    faults = []
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        leads = target.exists() and target.is_relative_to(ROOT)
        if leads and anchor:
            leads = anchor in anchors(target.read_text(encoding="utf-8"))
        if not leads:
            faults.append(link)
    return faults


@each_linked
def test_links_lead_somewhere(page):
    assert not broken(page)


def test_every_page_is_in_the_navigation():
    """Every page stands in docs/index.md: a new page needs a line there."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    in_lists = re.findall(r"^- \[[^\]]+\]\(([^)#:]+)\)", index, re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in PAGES} - {"index.md"}
    assert set(in_lists) == pages
    assert len(in_lists) == len(pages), "a page is listed twice"


def test_pages_are_for_github_too():
    """No page uses what only the site understands."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "```{" not in text and "\n:::" not in text, f"{page.name} has a directive of MyST"


def test_broken_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A `name`, and more\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-name-and-more) [c](#here) [d](missing.md) [e](other.md#no) "
        "`[f](code.md)` [g](https://example.org/x.md) ![h](lost.png) [i](other.md#twice-1)\n"
        "```\n[j](fenced.md)\n# fenced\n```\n# Here\n"
    )
    assert broken(page) == ["missing.md", "other.md#no", "lost.png"]


def test_docs_requirements_do_not_repeat_those_of_the_tests():
    """The site's tools change no version that `make test` installs."""

    def names(file: str) -> set[str]:
        text = (ROOT / file).read_text(encoding="utf-8")
        return set(re.findall(r"^([a-z][\w-]*)", text, re.MULTILINE))

    assert not names("requirements-docs.txt") & names("requirements-dev.txt")
