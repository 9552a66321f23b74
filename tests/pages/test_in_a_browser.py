"""The pages that are read most, opened from disk in a real browser, as a reader does.

`make docs` writes the site that is looked at; the first test builds it if it is missing or old.
"""

import fcntl
import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from helpers.chromium import Chromium, find_chromium
from helpers.pages import ROOT

pytestmark = pytest.mark.slow
SITE = ROOT / "runs" / "docs" / "html"
MINUTES = 20  # of a build that runs each notebook
PAGES = (
    *("index.html", "start.html", "install.html", "commands.html", "concepts.html", "trees.html"),
    *("reference/attention.html", "notebooks/pattern-zoo.html"),
)
each_page = pytest.mark.parametrize("page", PAGES)
# Every text that is seen, with its contrast to what is behind it (WCAG 2.2, 1.4.3), as it is now.
CONTRASTS = """(() => {
  const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].map((x) => x / 255);
  };
  const over = ([r, g, b, alpha], back) =>
    [r, g, b].map((x, i) => x * alpha + back[i] * (1 - alpha));
  const behind = (element) => {
    if (!element) return rgba(getComputedStyle(document.body).backgroundColor).slice(0, 3);
    const color = rgba(getComputedStyle(element).backgroundColor);
    return color[3] === 1 ? color.slice(0, 3) : over(color, behind(element.parentElement));
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    const seen = element.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!text || !seen || element.closest("option, script, style, noscript")) continue;
    const style = getComputedStyle(element);
    const back = behind(element);
    const both = [luminance(back), luminance(over(rgba(style.color), back))];
    const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    const place = `${element.tagName}.${element.className} ${style.color}`;
    found[place] ??= {text: text.slice(0, 40), ratio, least: isLarge ? 3 : 4.5};
  }
  return Object.entries(found).map(([place, x]) => ({place, ...x}));
})()"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LINKS = """[...document.querySelectorAll("[href], [src]")].map((x) => x.href || x.src)
  .filter((x) => typeof x === "string")"""
# A picture below the window may not be read yet.
PICTURES = """Promise.all([...document.images].map(async (x) => {
  await x.decode().catch(() => {});
  return {source: x.src, width: x.naturalWidth, text: x.alt};
}))"""
# What is wider than the page, but for what scrolls by itself.
CUT_OFF = """[...document.querySelectorAll("article *")].filter((x) => {
  for (let box = x.parentElement; box.tagName !== "ARTICLE"; box = box.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return false;
  const {left, right, width} = x.getBoundingClientRect();
  return width > 0 && x.checkVisibility() && (right > innerWidth + 1 || left < -1)
    && !["auto", "scroll"].includes(getComputedStyle(x).overflowX);
}).map((x) => `${x.tagName}.${x.className} ${x.textContent.trim().slice(0, 40)}`)"""


def is_old(site: Path) -> bool:
    """Whether a file that the pages are made of is newer than the site, or there is none."""
    if not (site / "versions.json").exists():
        return True
    sources = [*ROOT.glob("docs/**/*"), *ROOT.glob("sparsering/**/*.py"), ROOT / "pyproject.toml"]
    sources += [ROOT / "tools" / "addresses.py", ROOT / "tools" / "docs_site.py"]
    written = (site / "versions.json").stat().st_mtime
    return any(x.stat().st_mtime > written for x in sources if x.suffix != ".pyc" and x.is_file())


@pytest.fixture(scope="module")
def site() -> Path:
    """Returns the folder of the newest version, which it builds if it must."""
    try:
        find_chromium()
    except RuntimeError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    runs = SITE.parent
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "building.lock").open("w") as lock:  # two processes of pytest may ask at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_old(SITE):
            if importlib.util.find_spec("myst_nb") is None:
                pytest.skip("no site was built, and there is no Sphinx to build it: make docs")
            stamps = [f"--old-file=.venv/.installed{x}" for x in ("", "-docs")]  # install nothing
            command = ["make", "docs", f"BIN={Path(sys.executable).parent}", *stamps]
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=60 * MINUTES, check=False
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return SITE / "stable"


@pytest.fixture(scope="module")
def browser(site, tmp_path_factory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@cache
def anchors(path: Path) -> set[str]:
    """Returns the anchors of a page."""
    return {html.unescape(x) for x in re.findall(r'\bid="([^"]*)"', path.read_text("utf-8"))}


def broken(links: list[str]) -> list[str]:
    """Returns the links to this machine that lead to no file, or to no place in it."""
    found = []
    for link in sorted(set(links)):
        parts = urllib.parse.urlsplit(link)
        if parts.scheme != "file":
            continue
        path = Path(urllib.parse.unquote(parts.path))
        anchor = urllib.parse.unquote(parts.fragment)
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            found.append(link)
    return found


@each_page
def test_links_lead_somewhere_pictures_load_and_nothing_is_fetched(browser, site, page):
    browser.open((site / page).as_uri())
    assert browser.faults == []
    links = browser.value(LINKS)
    assert len(links) > 60 and broken(links) == []
    pictures = browser.value(PICTURES)
    assert all(x["width"] > 50 and x["text"] for x in pictures), pictures
    asked = {urllib.parse.urlsplit(x).scheme for x in browser.requested}
    assert asked <= {"file", "data"}, browser.requested


FAULTY = """<!doctype html><html lang="en"><style>body {background: #fff; color: #000}</style>
<script src="script.js"></script><script>console.error("a fault"); missing();</script><article>
<p style="color: #777">pale</p><p style="color: #767676">strong enough</p>
<p style="font-size: 24px; color: #949494">large</p><p style="color: #0008">half</p>
<div style="background: #333"><p>dark on dark</p></div><div hidden style="color: #eee">hidden</div>
<p id="wide" style="width: 1500px">wide</p><div style="overflow: auto"><p id="scrolls"
style="width: 1500px">scrolls</p></div><img src="lost.png" alt="lost">
<a href="#wide">there</a> <a href="#lost">lost</a> <a href="lost.html">lost</a></article>"""


def test_faults_of_a_page_are_found(browser, tmp_path):
    page = tmp_path / "faulty.html"
    page.write_text(FAULTY)
    browser.prefer("light")
    browser.open(page.as_uri())
    faults = "\n".join(browser.faults)
    for part in ("error: a fault", "ReferenceError: missing", "script.js", "lost.png"):
        assert part in faults
    assert {Path(x).name for x in broken(browser.value(LINKS))} == {
        *("script.js", "lost.png", "faulty.html#lost", "lost.html")
    }
    assert [x["width"] for x in browser.value(PICTURES)] == [0]
    texts = {x["text"]: x["ratio"] / x["least"] for x in browser.value(CONTRASTS)}
    assert {text for text, ratio in texts.items() if ratio < 1} == {"pale", "half", "dark on dark"}
    assert texts["strong enough"] == pytest.approx(1.01, abs=0.01)
    assert texts["large"] == pytest.approx(1.01, abs=0.01)
    assert [x.split()[-1] for x in browser.value(CUT_OFF)] == ["wide"]


def test_the_pages_have_pictures(browser, site):
    """Otherwise the tests of pictures would find none at fault."""
    for page in ("index.html", "trees.html", "notebooks/pattern-zoo.html"):
        browser.open((site / page).as_uri())
        assert browser.value(PICTURES), page


@each_page
def test_text_can_be_read_in_light_and_dark(browser, site, page):
    backgrounds = {}
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open((site / page).as_uri())
        backgrounds[scheme] = [int(x) for x in re.findall(r"\d+", browser.value(BACKGROUND))[:3]]
        contrasts = browser.value(CONTRASTS)
        assert len(contrasts) > 15
        faint = [x for x in contrasts if x["ratio"] < x["least"]]
        assert not faint, f"{scheme}: {json.dumps(faint, indent=1)}"
        assert browser.faults == []
    assert min(backgrounds["light"]) > 200 and max(backgrounds["dark"]) < 60, backgrounds


@pytest.mark.parametrize("page", [*PAGES, "genindex.html"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off(browser, site, page, width):
    browser.open((site / page).as_uri(), width=width)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(CUT_OFF) == []


def test_figures_turn_dark_with_the_page(browser, site):
    filters = "[...document.images].map((x) => getComputedStyle(x).filter)"
    dark = "invert(0.92) hue-rotate(180deg)"
    for scheme, of_figure in (("light", "none"), ("dark", dark)):
        browser.prefer(scheme)
        browser.open((site / "index.html").as_uri())
        assert browser.value(filters) == [of_figure]
        browser.open((site / "notebooks" / "slide-heatmap.html").as_uri())
        assert browser.value(filters) == ["none"]  # brightness has a meaning there
    # The reader's choice on the page goes before what the system prefers.
    browser.open((site / "index.html").as_uri())
    browser.value("document.querySelector('.theme-toggle-content button').click()")
    chosen = browser.value("document.body.dataset.theme"), browser.value(filters)
    browser.value("localStorage.clear()")
    assert chosen == ("light", ["none"])


def test_numbers_stay_whole(browser, site):
    browser.open((site / "benchmarks.html").as_uri(), width=390)
    spans = "[...document.querySelectorAll('td .number')]"
    texts = browser.value(f"{spans}.map((x) => x.textContent)")
    assert {"6e-7", "156 ms"} <= set(texts)
    assert browser.value(f"{spans}.every((x) => x.getClientRects().length === 1)")


def test_the_search_works_from_disk(browser, site):
    browser.open((site / "search.html").as_uri() + "?q=sliding+window")
    browser.wait_until("document.querySelectorAll('#search-results ul.search li a').length > 5")
    browser.wait_until("!document.querySelector('#search-progress')?.textContent")
    found = browser.value("[...document.querySelectorAll('ul.search li > a')].map((x) => x.href)")
    assert broken(found) == [] and any("reference/patterns.html" in x for x in found)
    assert browser.faults == []
    browser.value("document.querySelector('ul.search li > a').click()")
    text = "document.querySelector('article')?.textContent.toLowerCase()"
    arrived = "document.readyState === 'complete' && !location.pathname.endsWith('/search.html')"
    browser.wait_until(f"{arrived} && {text}?.includes('window')")
    assert browser.faults == []


def test_a_word_typed_into_the_sidebar_is_searched_for(browser, site):
    browser.open((site / "start.html").as_uri())
    browser.value("document.querySelector('.sidebar-search').value = 'KVCache'")
    browser.value("document.querySelector('.sidebar-search-container').submit()")
    browser.wait_until("document.querySelectorAll('#search-results ul.search li a').length > 3")
    assert browser.faults == []


def test_the_first_page_leads_to_the_newest_version(browser, site):
    browser.open((site.parent / "index.html").as_uri())
    heading = "document.querySelector('h1')?.textContent.startsWith('sparsering')"
    browser.wait_until(f"location.pathname.endsWith('/stable/index.html') && {heading}")


def test_the_list_of_versions_leads_to_the_same_page(browser, site):
    newest = json.loads((site.parent / "versions.json").read_text("utf-8"))["stable"]
    browser.open((site / "reference" / "attention.html").as_uri())
    select = "document.getElementById('versions')"
    assert browser.value(f"{select}.selectedOptions[0].text") == f"stable ({newest})"
    assert browser.value(f"{select}.checkVisibility()")
    browser.value(
        f"{select}.value = [...{select}.options].find((x) => x.text === '{newest}').value;"
        f"{select}.dispatchEvent(new Event('change'))"
    )
    arrived = f"location.pathname.endsWith('/{newest}/reference/attention.html')"
    browser.wait_until(f"{arrived} && {select}?.selectedOptions[0]?.text === '{newest}'")


def test_two_versions_lead_to_each_other(browser, site, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from docs_site import put

    pages = Path(shutil.copytree(site, tmp_path / "pages"))
    put(pages, tmp_path / "site", "0.9.0")
    (pages / "start.html").unlink()
    put(pages, tmp_path / "site", "0.10.0")
    select = "document.getElementById('versions')"
    browser.open((tmp_path / "site" / "0.9" / "install.html").as_uri())
    names = browser.value(f"[...{select}.options].map((x) => x.text)")
    assert names == ["stable (0.10)", "0.10", "0.9"]
    assert browser.value(f"{select}.selectedOptions[0].text") == "0.9"
    for page, expected in (("install.html", "install.html"), ("start.html", "index.html")):
        browser.open((tmp_path / "site" / "0.9" / page).as_uri())
        options = browser.value(f"[...{select}.options].map((x) => x.value)")
        assert options == [
            (tmp_path / "site" / folder / name).as_uri()
            for folder, name in (("stable", expected), ("0.10", expected), ("0.9", page))
        ]
        assert broken(options) == [] and browser.faults == []
