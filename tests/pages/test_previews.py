"""Reads what search engines and messengers show of a page, in pages that Sphinx builds of a few."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.pages import ROOT

pytest.importorskip("sphinx", reason="make docs installs it")
pytestmark = pytest.mark.slow
SITE = "https://somebody.github.io/sparsering"
INDEX = """# A title with `code` & more

![A picture](drawn.png)

The first *paragraph* of "the page", with a [link](other.md) and `a < b`.

## A list

- [Other](other.md): a page
- [Nothing](folder/nothing.md): a page
"""
LONG = "Words that go on. " * 30
PAGES = {
    "index.md": INDEX,
    "other.md": f"# Other\n\n- an item\n\n| a | b |\n|---|---|\n| c | d |\n\n{LONG}\n",
    "folder/nothing.md": "# Nothing\n\n![Same](../drawn.png)\n",
}


class Head(HTMLParser):
    """The tags of a page's head, by their property or name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: dict[str, str | None] = {}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "link" and given.get("rel") == "canonical":
            self.tags["canonical"] = given["href"]
        elif tag == "meta" and (name := given.get("property") or given.get("name")):
            assert name == "viewport" or name not in self.tags, f"{name} is there twice"
            self.tags[name] = given.get("content")


def build(folder: Path, project: str) -> Path:
    """Builds pages as `make docs` does, in a tree with this pyproject.toml."""
    docs = folder / "docs"
    for name in ("_static", "_templates"):
        shutil.copytree(ROOT / "docs" / name, docs / name)
    shutil.copy(ROOT / "docs" / "conf.py", docs)
    shutil.copy(ROOT / "docs" / "patterns.png", docs / "drawn.png")
    for name, text in PAGES.items():
        (docs / name).parent.mkdir(exist_ok=True)
        (docs / name).write_text(text)
    for name in ("sparsering", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "pyproject.toml").write_text(project)
    built = folder / "built"
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", docs, built]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_pages_name_their_address_once_it_is_set(tmp_path):
    built = build(tmp_path, f'[project]\n[project.urls]\nDocumentation = "{SITE}"\n')
    picture, card = (f"{SITE}/stable/{name}" for name in ("_images/drawn.png", "_static/card.png"))
    first = "The first paragraph of \u201cthe page\u201d, with a link and a < b."
    head = Head(built / "index.html").tags
    assert head["description"] == head["og:description"] == first
    assert head["og:title"] == "A title with code & more"
    assert head["og:url"] == head["canonical"] == f"{SITE}/stable/index.html"
    assert head["og:image"] == picture and head["og:image:alt"] == "A picture"
    assert (head["og:type"], head["og:site_name"]) == ("website", "sparsering")
    assert head["twitter:card"] == "summary_large_image"
    head = Head(built / "other.html").tags
    assert head["og:image"] == card and head["og:image:alt"] == "Other"
    assert 150 < len(head["description"]) <= 200 and LONG.startswith(head["description"][:-4])
    assert head["description"].endswith(" ...")
    head = Head(built / "folder" / "nothing.html").tags
    assert head["og:image"] == picture
    assert head["og:url"] == head["canonical"] == f"{SITE}/stable/folder/nothing.html"
    assert head["description"].startswith("Exact softmax attention")
    for name in (picture, card):
        assert (built / name.removeprefix(f"{SITE}/stable/")).is_file()
    assert not [x for x in Head(built / "search.html").tags if x.startswith("og:")]


def test_without_an_address_pages_name_none(tmp_path):
    built = build(tmp_path, "[project]\n")
    for page in built.rglob("*.html"):
        assert not set(Head(page).tags) & {"canonical", "og:url", "og:image", "og:image:alt"}
        links = re.findall(r'<(?:link|meta)[^>]*"https?:[^>]*>', page.read_text(encoding="utf-8"))
        assert not links, page
    assert Head(built / "index.html").tags["og:title"] == "A title with code & more"
