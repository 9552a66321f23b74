"""Reads the addresses of the project: the site of its pages, and its repository.

They are set in one place, pyproject.toml, so that PyPI shows them too:

    [project.urls]
    Documentation = "https://OWNER.github.io/sparsering"
    Repository = "https://github.com/OWNER/sparsering"

While one is not there, nothing is written that needs it: no canonical link, no sitemap, no address
of a page or picture for previews, no project URL. A release needs both (`tools/release.py`).
"""

import re
import tomllib
from pathlib import Path

NAMES = ("Documentation", "Repository")
ADDRESS = re.compile(r"https://((?:[a-z0-9-]+\.)+[a-z][a-z0-9-]*)(?:/[\w.~-]+)*", re.ASCII)
# Names that belong to nobody: hosts of RFC 2606, and the word of this file and of CONTRIBUTING.md.
RESERVED = re.compile(r"(?:.*\.)?(?:example(?:\.com|\.net|\.org)?|invalid|localhost|test)")
PLACEHOLDER = "OWNER"


def addresses(root: Path) -> dict[str, str]:
    """Returns the addresses under [project.urls] in pyproject.toml, by their names."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text).get("project", {}).get("urls", {})
    for name, address in found.items():
        parts = ADDRESS.fullmatch(address)
        if not parts or RESERVED.fullmatch(parts[1]) or PLACEHOLDER in address:
            raise ValueError(
                f"expected `https://`, a host and a path without a slash at its end as {name} "
                f"under [project.urls] in pyproject.toml, got {address!r}; write the address that "
                "a browser shows, or delete the line"
            )
    return dict(found)


def check_addresses(root: Path) -> None:
    """Checks that the addresses that a release needs are set."""
    found = addresses(root)
    lacks = [name for name in NAMES if name not in found]
    if lacks:
        raise ValueError(
            f"expected {' and '.join(NAMES)} under [project.urls] in pyproject.toml, got no "
            f"{' and no '.join(lacks)}; write the addresses of the site and of the repository as "
            'CONTRIBUTING.md says under "A release"'
        )
