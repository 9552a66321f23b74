"""`tools/docs_site.py` keeps the versions of the pages beside each other."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.chromium import find_chromium

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))  # of the module that the tool imports
SPEC = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
docs_site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs_site)

ADDRESS = "https://somebody.github.io/sparsering"
PAGES = ("genindex.html", "index.html", "reference/attention.html", "search.html")


def built(folder: Path, text: str, *more: str) -> Path:
    """Writes pages as Sphinx does, each with the text."""
    for name in (*PAGES, *more, "_static/part.html", "_images/a.png", "searchindex.js"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def held(folder: Path) -> dict[str, str]:
    """Returns the files below a folder, by their paths."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def versions(site: Path) -> dict:
    """Returns what versions.json says, which versions.js says too."""
    told = json.loads((site / "versions.json").read_text())
    script = (site / "versions.js").read_text()
    assert json.loads(script.removeprefix("const siteVersions = ").removesuffix(";\n")) == told
    return told


def test_a_version_has_a_folder_and_a_copy_that_is_stable(tmp_path):
    pages, site = built(tmp_path / "pages", "new"), tmp_path / "site"
    docs_site.put(pages, site, "0.3.1")
    assert {x.name for x in site.iterdir()} == {
        *("0.3", "stable", "index.html", "versions.json", "versions.js", ".nojekyll")
    }
    assert held(site / "0.3") == held(site / "stable") == held(pages)
    assert versions(site) == {"stable": "0.3", "pages": {"0.3": list(PAGES)}}
    index = (site / "index.html").read_text()
    assert 'content="0; url=stable/index.html"' in index and 'href="stable/index.html"' in index
    assert "http:" not in index and "https:" not in index


def test_a_second_version_keeps_the_first(tmp_path):
    site = tmp_path / "site"
    docs_site.put(built(tmp_path / "old", "old", "gone.html"), site, "0.9.0")
    docs_site.put(built(tmp_path / "new", "new"), site, "0.10.0")
    assert held(site / "0.9") == held(tmp_path / "old")
    assert held(site / "0.10") == held(site / "stable") == held(tmp_path / "new")
    told = versions(site)
    assert told["stable"] == "0.10" and list(told["pages"]) == ["0.10", "0.9"]
    assert sorted([*PAGES, "gone.html"]) == told["pages"]["0.9"]


def test_an_older_version_built_later_is_not_the_stable_one(tmp_path):
    site = tmp_path / "site"
    docs_site.put(built(tmp_path / "new", "new"), site, "0.10.0")
    docs_site.put(built(tmp_path / "old", "old"), site, "0.9.2")
    assert held(site / "stable") == held(tmp_path / "new")
    assert held(site / "0.9") == held(tmp_path / "old")
    assert versions(site)["stable"] == "0.10"


def test_pages_that_are_gone_do_not_stay(tmp_path):
    site = tmp_path / "site"
    docs_site.put(built(tmp_path / "first", "1", "gone.html"), site, "0.3.0", ADDRESS)
    (site / "CNAME").write_text("docs.sparsering.dev")
    docs_site.put(built(tmp_path / "second", "2"), site, "0.3.1")
    assert not [name for name in held(site) if name.endswith("gone.html")]
    assert (site / "CNAME").read_text() == "docs.sparsering.dev"
    assert not (site / "sitemap.xml").exists()


def test_a_folder_of_one_version_as_sphinx_writes_it_is_replaced(tmp_path):
    site = built(tmp_path / "site", "before")
    (site / ".buildinfo").write_text("")
    docs_site.put(built(tmp_path / "pages", "new"), site, "0.3.0")
    assert "before" not in held(site).values() and not (site / ".buildinfo").exists()


def test_the_sitemap_has_the_stable_pages_once_the_address_is_set(tmp_path):
    site = tmp_path / "site"
    docs_site.put(built(tmp_path / "old", "old", "gone.html"), site, "0.2.0", ADDRESS)
    docs_site.put(built(tmp_path / "new", "new", "a b & c.html"), site, "0.3.0", ADDRESS)
    space = "{http://www.sitemaps.org/schemas/sitemap/0.9}"
    sitemap = ElementTree.parse(site / "sitemap.xml").getroot()
    assert sitemap.tag == f"{space}urlset"
    assert [x.text for x in sitemap.iter(f"{space}loc")] == [
        f"{ADDRESS}/stable/{page}"
        for page in ("a%20b%20%26%20c.html", "index.html", "reference/attention.html")
    ]
    assert (
        f'<link rel="canonical" href="{ADDRESS}/stable/index.html">'
        in (site / "index.html").read_text()
    )


def refusal(function, *arguments) -> str:
    with pytest.raises(ValueError, match=r"^expected .+, got .+; .+$") as error:
        function(*arguments)
    return str(error.value)


def test_what_is_no_site_is_not_overwritten(tmp_path):
    pages, other = built(tmp_path / "pages", "new"), tmp_path / "other"
    (other / ".git").mkdir(parents=True)
    docs_site.put(pages, other, "0.3.0")  # an empty clone may become one
    assert (other / ".git").is_dir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    assert "got other files in" in refusal(docs_site.put, pages, tmp_path / "mine", "0.3.0")
    assert held(tmp_path / "mine") == {"letter.txt": "dear"}
    for site in (pages, pages / "html", tmp_path):
        assert "choose another --site" in refusal(docs_site.put, pages, site, "0.3.0")
    assert held(pages) == held(other / "0.3")


def test_pages_that_are_not_built_and_odd_versions_are_refused(tmp_path):
    site = tmp_path / "site"
    assert "run `make docs`" in refusal(docs_site.put, tmp_path / "none", site, "0.3.0")
    for version in ("0.3", "0.3.0rc1", "../up.0"):
        says = f"such as 0.3.0, got {version!r}"
        assert says in refusal(docs_site.put, built(tmp_path / "x", ""), site, version)
    assert not site.exists()


def test_the_command_says_where_the_site_is_and_what_it_lacks(tmp_path, capsys):
    built(tmp_path / "runs" / "docs" / "pages", "new")
    project = '[project]\nname = "sparsering"\nversion = "0.3.0"\n'
    (tmp_path / "pyproject.toml").write_text(project)
    assert docs_site.main(tmp_path, []) == 0
    said = capsys.readouterr().out
    assert "no sitemap" in said and str(tmp_path / "runs" / "docs" / "html" / "index.html") in said
    urls = f'[project.urls]\nDocumentation = "{ADDRESS}"\n'
    (tmp_path / "pyproject.toml").write_text(project + urls)
    assert docs_site.main(tmp_path, []) == 0
    assert f"for {ADDRESS}" in capsys.readouterr().out
    assert (tmp_path / "runs" / "docs" / "html" / "sitemap.xml").exists()
    (tmp_path / "pyproject.toml").write_text(project + urls.replace("https", "http"))
    assert docs_site.main(tmp_path, []) == 1
    assert re.fullmatch(r"docs: expected .+, got .+; .+\n", capsys.readouterr().err)


def test_a_missing_browser_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"^expected a browser .*; .* apt-get install chromium$"):
        find_chromium()
    (tmp_path / "chromium").touch(mode=0o755)
    assert find_chromium() == str(tmp_path / "chromium")
