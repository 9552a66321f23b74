"""Puts the pages that Sphinx has built into a site that has a folder for each version.

    python tools/docs_site.py       # runs/docs/pages into runs/docs/html, at the end of `make docs`

    html/0.3/           these pages; those of other versions stay as they are
    html/stable/        a copy of the newest version, for links that last
    html/index.html     leads to stable/
    html/versions.json  the versions and their pages; versions.js is for pages opened from disk
    html/sitemap.xml    the pages of stable/, once the address is set (`tools/addresses.py`)

Other files there, such as a CNAME or .git, stay. Any static host serves the folder as it is: links
are relative.
"""

import argparse
import json
import re
import shutil
import sys
import tomllib
import urllib.parse
from pathlib import Path

from addresses import addresses

ROOT = Path(__file__).resolve().parent.parent
FOLDER = re.compile(r"\d+\.\d+")
INDEX = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url=stable/index.html">
<title>sparsering</title>{canonical}
</head>
<body><a href="stable/index.html">sparsering</a></body>
</html>
"""


def folder_of(version: str) -> str:
    """Returns the folder of a version: 0.3 of 0.3.1."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(
            f"expected a version such as 0.3.0, got {version!r}; correct it in pyproject.toml"
        )
    return version.rpartition(".")[0]


def pages_of(folder: Path) -> list[str]:
    """Returns the pages below a folder, sorted."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.html"))
    return sorted(path.as_posix() for path in paths if not path.parts[0].startswith("_"))


def check_folders(pages: Path, site: Path) -> None:
    """Checks that there are pages, and that nothing but a site will be overwritten."""
    if not (pages / "index.html").is_file():
        raise ValueError(f"expected pages in {pages}, got no index.html there; run `make docs`")
    inside = site.resolve(), pages.resolve()
    if inside[0].is_relative_to(inside[1]) or inside[1].is_relative_to(inside[0]):
        raise ValueError(
            f"expected two folders that do not hold each other, got the pages {pages} and the site "
            f"{site}; choose another --site"
        )
    # Sphinx leaves .buildinfo: `make docs` had it write here before there were versions.
    is_site = any((site / name).is_file() for name in ("versions.json", ".buildinfo"))
    if not is_site and any(site.glob("[!.]*")):
        raise ValueError(
            f"expected a site or an empty folder, got other files in {site}; choose another --site"
        )


def put(pages: Path, site: Path, version: str, address: str | None = None) -> None:
    """Writes a version's pages into the site, and anew what follows from the versions there.

    Args:
        pages: folder of the built pages.
        site: folder of the site; it is made if it is not there.
        version: the version that the pages describe, such as 0.3.0.
        address: where the site will be, without a slash at the end; None: it has no sitemap.
    """
    name = folder_of(version)
    check_folders(pages, site)
    site.mkdir(parents=True, exist_ok=True)
    old = {name, "stable", "sitemap.xml"}
    if (site / ".buildinfo").is_file():
        old |= {path.name for path in site.iterdir()}
    for path in [site / x for x in old]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    shutil.copytree(pages, site / name)
    folders = [path.name for path in site.iterdir() if FOLDER.fullmatch(path.name)]
    folders.sort(key=lambda folder: [int(number) for number in folder.split(".")], reverse=True)
    shutil.copytree(site / folders[0], site / "stable")

    versions = {"stable": folders[0], "pages": {x: pages_of(site / x) for x in folders}}
    text = json.dumps(versions, indent=1)
    (site / "versions.json").write_text(text + "\n", encoding="utf-8")
    (site / "versions.js").write_text(f"const siteVersions = {text};\n", encoding="utf-8")
    (site / ".nojekyll").touch()  # GitHub Pages hides folders such as _static without it
    stable = f"{address}/stable/" if address else None
    canonical = f'\n<link rel="canonical" href="{stable}index.html">' if stable else ""
    (site / "index.html").write_text(INDEX.format(canonical=canonical), encoding="utf-8")
    if stable:
        content = [
            x for x in pages_of(site / "stable") if x not in ("search.html", "genindex.html")
        ]
        lines = [f"<url><loc>{stable}{urllib.parse.quote(page)}</loc></url>" for page in content]
        head = '<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/'
        text = "\n".join([f'{head}schemas/sitemap/0.9">', *lines, "</urlset>\n"])
        (site / "sitemap.xml").write_text(text, encoding="utf-8")


def main(root: Path = ROOT, arguments: list[str] | None = None) -> int:
    """Put the pages of this checkout into its site."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=Path, default=root / "runs" / "docs" / "pages")
    parser.add_argument("--site", type=Path, default=root / "runs" / "docs" / "html")
    given = parser.parse_args(arguments)
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        address = addresses(root).get("Documentation")
        put(given.pages, given.site, project["version"], address)
    except ValueError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    told = f"for {address}" if address else "without its address: no sitemap, no canonical links"
    print(f"the site, {told}: {given.site / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
