"""The site that `make docs` builds of these pages and of the docstrings, by Sphinx.

Pages are plain Markdown, which GitHub shows too; what the site needs beyond it is added here while
a page is read: docs/index.md lists the pages, and its links become the navigation; the pages in
docs/reference list public names, and each becomes its docstring. Nothing is fetched. The pages are
those of one version; `tools/docs_site.py` puts them beside those of others.
"""

import functools
import html
import importlib
import inspect
import posixpath
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from addresses import addresses  # noqa: E402

import sparsering  # noqa: E402  (from the checkout, installed or not)

project = "sparsering"
author = "the sparsering authors"
release = version = sparsering.__version__
html_title = f"sparsering {release}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
root_doc = "index"
html_theme = "furo"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_static_path = ["_static"]
templates_path = ["_templates"]
# Furo's own, less those of Read the Docs, and the list of versions.
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "sidebar/search.html", "sidebar/scroll-start.html"),
        *("sidebar/navigation.html", "sidebar/scroll-end.html", "versions.html"),
    ]
}
# Pages of every version name those of the newest as the ones to find; no address, no such links.
ADDRESS = addresses(ROOT).get("Documentation")
html_baseurl = f"{ADDRESS}/stable/" if ADDRESS else ""

# Headings have the anchors that GitHub gives them; a link to one that is not there is a warning,
# and `make docs` takes each warning for an error.
myst_heading_anchors = 4
nb_execution_mode = "cache"  # run again only where a notebook has changed
nb_execution_cache_path = str(ROOT / "runs" / "docs" / "notebooks")
nb_execution_in_temp = True  # what a notebook writes does not stay among the pages
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # what a base class says is shown there, once
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_use_rtype = False
default_role = "code"

# --- navigation: the lists of docs/index.md -------------------------------------------------------

PAGE_LINK = re.compile(r"^- \[([^\]]+)\]\((?!https?:)([^)#]+)\.(?:md|ipynb)\)")


def navigation(index: str) -> str:
    """The toctrees of the index page: one for each of its headings, of the pages that it lists."""
    trees: dict[str, list[str]] = {}
    caption = ""
    for line in index.splitlines():
        if line.startswith("## "):
            caption = line.removeprefix("## ")
        elif found := PAGE_LINK.match(line):
            trees.setdefault(caption, []).append(f"{found[1]} <{found[2]}>")
    return "".join(
        "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])
        for caption, pages in trees.items()
    )


# --- reference: lists of names become docstrings --------------------------------------------------

MODULE_HEADING = re.compile(r"^## `(sparsering[\w.]*)`$")
NAME_ITEM = re.compile(r"^- `(\w+)`: ")


def directive(module: str, name: str) -> str:
    """What autodoc shows of a public name, as a block of a Markdown page."""
    value = getattr(importlib.import_module(module), name)
    kind, options = "autofunction", ""
    if inspect.isclass(value):
        kind, options = "autoclass", "   :members:\n"
        if issubclass(value, tuple):  # its fields are among the Attributes of the docstring
            options += f"   :exclude-members: {', '.join(value._fields)}\n"
    elif not callable(value):
        kind = "autodata"
        options = "   :no-value:\n"
    return f"```{{eval-rst}}\n.. {kind}:: {module}.{name}\n{options}```\n"


def reference(page: str) -> str:
    """A page of docs/reference, each public name that it lists replaced by its documentation."""
    lines, module = [], ""
    for line in page.splitlines():
        if found := MODULE_HEADING.match(line):
            module = found[1]
        if found := NAME_ITEM.match(line):
            line = directive(module, found[1])
        lines.append(line)
    return "\n".join(lines) + "\n"


LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]*)\)")


def without_repository(page: str, folder: Path) -> str:
    """The page, its links to folders and pages outside docs/ made text: the site has them not."""

    def written(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if target.is_relative_to(HERE) or not (target.is_dir() or target.suffix == ".md"):
            return found[0]
        path = str(target.relative_to(ROOT))
        name = found[1].strip("`")
        return f"`{path}`" if name == path else f"{found[1]} (`{path}` in the repository)"

    return LINK.sub(written, page)


def add_to_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds to a page what GitHub does without."""
    if app.env.doc2path(docname).suffix != ".md":
        return
    source[0] = without_repository(source[0], (HERE / docname).parent)
    if docname == root_doc:
        source[0] += navigation(source[0])
    elif docname.startswith("reference/"):
        source[0] = reference(source[0])


# --- docstrings: Markdown, as Google's style has it -----------------------------------------------

SECTION = re.compile(r"^\w+:$")
# "Returns:" alone on its line too: its text is not a type and a colon, as napoleon would have it.
LABEL = re.compile(
    r"^( *)(Returns(?=:$)|(?:Args|Cost|Differences|Example|Raises|Returns|Source|Yields)(?=: )):"
    r"\s*(.*)$"
)
CODE = re.compile(r"(`[^`]+`)")


@functools.cache
def places() -> dict[str, str]:
    """The full name of each public name that the pages of docs/reference list, by itself."""
    found: dict[str, str] = {}
    for page in (HERE / "reference").glob("*.md"):
        module = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if heading := MODULE_HEADING.match(line):
                module = heading[1]
            elif item := NAME_ITEM.match(line):  # of two with one name, that of the shorter place
                full = f"{module}.{item[1]}"
                found[item[1]] = min(found.get(item[1], full), full, key=len)
    return found


def in_rst(text: str) -> str:
    """A line of prose of a docstring: code as code, public names linked, no other markup."""
    parts = CODE.split(text)
    for i, part in enumerate(parts):
        if full := places().get(part[1:-1]) if i % 2 else None:
            parts[i] = f":py:obj:`{part[1:-1]} <{full}>`"
        elif i % 2:
            parts[i] = f"`{part}`"
        else:
            parts[i] = re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", part)
    return "".join(parts)


def joined(text: str) -> str:
    """The text, its code over two lines put on one."""
    parts = text.split("`")
    if len(parts) % 2:
        parts[1::2] = [re.sub(r"\n\s*", " ", part) for part in parts[1::2]]
    return "`".join(parts)


def indent_of(line: str) -> int:
    """Spaces in front."""
    return len(line) - len(line.lstrip())


def with_labels(lines: list[str]) -> list[str]:
    """Sections of running text ("Cost: ...", "Returns:") as paragraphs that begin with a label."""
    written: list[str] = []
    at: int | None = None  # the indentation of the section that we are in
    inside = 0  # that of its text
    for line in lines:
        if found := LABEL.match(line):
            at, inside = len(found[1]), 0
            written += [f"{found[1]}**{found[2]}:** {found[3]}"]
            continue
        if line.strip() and at is not None:
            inside = inside or indent_of(line)
            if indent_of(line) <= at:
                at = None
            elif written[-1].endswith(":** "):  # "Returns:" stood alone
                written[-1] += line.lstrip()
                continue
            else:
                line = line[min(inside, indent_of(line)) - at :]
        written.append(line)
    return written


def rewrite_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Makes reStructuredText of a docstring's Markdown: code, code blocks, lists, labels."""
    written: list[str] = []
    code_at: int | None = None  # the indentation of the code block that we are in
    list_at: int | None = None  # that of the list
    before = ""  # the last line that was not empty
    for line in joined("\n".join(lines)).splitlines():
        indent = indent_of(line)
        if not line.strip():
            written.append(line)
            continue
        if code_at is not None and indent < code_at:
            code_at = None
        deeper = indent >= indent_of(before) + 4
        follows_gap = bool(written) and not written[-1].strip()
        if code_at is None and deeper and follows_gap and before and not SECTION.match(before):
            code_at = indent
            written += [" " * (indent - 4) + ".. code-block:: python", ""]
        is_code = code_at is not None or line.lstrip().startswith((">>>", "..."))
        if list_at is not None and indent <= list_at and not line.lstrip().startswith("- "):
            list_at = None
        if not is_code and line.lstrip().startswith("- ") and list_at is None:
            list_at = indent
            written += [] if follows_gap else [""]
        written.append(line if is_code else in_rst(line))
        before = line
    lines[:] = with_labels(written)


def shown_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returned: str
) -> tuple[str, str] | None:
    """No arguments for what is not to be made: `Pattern`, `Mask`."""
    return ("", returned) if signature and signature.startswith("(*_") else None


def whole_text(docstring: GoogleDocstring) -> list[str]:
    """A property's docstring as it is: what stands before a colon is not its type."""
    return docstring._consume_to_end()


def show_no_overloads(analyze: Any) -> Any:
    """Leaves `@overload`s out: what is shown is the signature of the function itself."""

    def analyze_and_forget(analyzer: ModuleAnalyzer) -> None:
        analyze(analyzer)
        analyzer.overloads = {}

    return analyze_and_forget


# --- numbers --------------------------------------------------------------------------------------

NUMBER = re.compile(r"(\d+e-\d+|\d[\d,.]* (?:us|ms|s|min|[KMG]i?B)\b)")


def keep_numbers_whole(app: Sphinx, doctree: nodes.document) -> None:
    """Keeps browsers from breaking 6e-7 at its hyphen, and 15 ms before its unit, in columns."""
    for text in list(doctree.findall(nodes.Text)):
        parts = NUMBER.split(text)
        if len(parts) > 1 and isinstance(text.parent, nodes.paragraph):
            kept = [nodes.Text(part) for part in parts]
            spans = [nodes.inline("", "", part, classes=["number"]) for part in kept[1::2]]
            kept[1::2] = spans
            text.parent.replace(text, [part for part in kept if part.astext()])


# --- what search engines and messengers show of a page --------------------------------------------

SUMMARY = "Exact softmax attention over a declared pattern of pairs, in PyTorch."
CARD = "_static/card.png"  # of pages without a picture; tools/draw_card.py


def first_paragraph(doctree: nodes.document) -> str:
    """The first paragraph of a page's running text, cut to the 200 characters that are shown."""
    for paragraph in doctree.findall(nodes.paragraph):
        is_picture = next(paragraph.findall(nodes.image), None) is not None
        if isinstance(paragraph.parent, nodes.section) and not is_picture:
            text = " ".join(paragraph.astext().split())
            return textwrap.shorten(text, 200, placeholder=" ...")
    return SUMMARY


def preview(app: Sphinx, doctree: nodes.document, title: str, address: str) -> str:
    """The tags of a page for previews (ogp.me); those that need addresses only if there is one."""
    description = first_paragraph(doctree)
    tags = {
        "og:type": "website",
        "og:site_name": project,
        "og:title": title,
        "og:description": description,
    }
    if address:
        picture = next(doctree.findall(nodes.image), None)
        name = f"_images/{posixpath.basename(picture['uri'])}" if picture else CARD
        tags["og:url"] = address
        tags["og:image"] = app.config.html_baseurl + name
        tags["og:image:alt"] = (picture.get("alt") if picture else None) or title
    lines = [f'<meta name="description" content="{html.escape(description)}">']
    lines += [f'<meta property="{x}" content="{html.escape(tags[x])}">' for x in tags]
    if address:
        lines.append('<meta name="twitter:card" content="summary_large_image">')
    return "\n".join(["", *lines, ""])


def add_preview(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Adds the tags for previews to the head of a page; indexes and the search have none."""
    if doctree is not None:
        title = html.unescape(re.sub(r"<[^>]*>", "", context["title"]))
        context["metatags"] += preview(app, doctree, title, context["pageurl"] or "")


# --- links that leave the site --------------------------------------------------------------------


def list_external_links(app: Sphinx, exception: Exception | None) -> None:
    """Writes the addresses that the pages name to external-links.txt; none of them is fetched."""
    if exception is not None or app.builder.name != "html":
        return
    found: dict[str, set[str]] = {}
    for docname in sorted(app.env.found_docs):
        for node in app.env.get_doctree(docname).findall(nodes.reference):
            if re.match(r"https?:", address := node.get("refuri", "")):
                found.setdefault(address, set()).add(docname)
    text = "".join(f"{address}  {' '.join(sorted(found[address]))}\n" for address in sorted(found))
    path = Path(app.outdir).parent / "external-links.txt"
    path.write_text(text, encoding="utf-8")
    print(f"{len(found)} external links, not fetched: {path}")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    # Pages that were read by another form of this file are read again.
    app.add_config_value("read_by", Path(__file__).read_text(encoding="utf-8"), "env")
    ModuleAnalyzer.analyze = show_no_overloads(ModuleAnalyzer.analyze)  # type: ignore[method-assign]
    app.connect("source-read", add_to_page)
    GoogleDocstring._parse_attribute_docstring = whole_text  # type: ignore[method-assign]
    app.connect("autodoc-process-docstring", rewrite_docstring, priority=400)
    app.connect("autodoc-process-signature", shown_signature)
    app.connect("doctree-read", keep_numbers_whole)
    app.connect("html-page-context", add_preview)
    app.connect("build-finished", list_external_links)
