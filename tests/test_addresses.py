"""The addresses of the site and of the repository are set in one place, or not written at all."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from addresses import ADDRESS, addresses, check_addresses  # noqa: E402

DOCUMENTATION = 'Documentation = "https://somebody.github.io/sparsering"'
REPOSITORY = 'Repository = "https://github.com/somebody/sparsering"'


def tree(folder: Path, *lines: str) -> Path:
    """Writes a pyproject.toml with these lines as its addresses."""
    text = "\n".join(['[project]\nname = "sparsering"', "[project.urls]" if lines else "", *lines])
    (folder / "pyproject.toml").write_text(text + "\n")
    return folder


def test_none_are_set_and_both_are_read(tmp_path):
    assert addresses(tree(tmp_path)) == {}
    assert addresses(tree(tmp_path, DOCUMENTATION, REPOSITORY)) == {
        "Documentation": "https://somebody.github.io/sparsering",
        "Repository": "https://github.com/somebody/sparsering",
    }


def test_those_of_this_project_are_valid():
    for address in addresses(ROOT).values():
        assert ADDRESS.fullmatch(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "http://docs.sparsering.dev",
        "docs.sparsering.dev",
        "https://docs.sparsering.dev/",
        "https://docs.sparsering.dev/stable?x=1",
        "https://docs.sparsering.dev/#top",
        "https://docs.sparsering.dev and more",
        " https://docs.sparsering.dev",
        "https://docs.sparsering.dev//stable",
        "https://user:word@docs.sparsering.dev",
        "https://docs.sparsering.dev:8000",
        "https://sparsering",
        "https://127.0.0.1",
        'https://docs.sparsering.dev/<a href=\\"x\\">',
        "https://example.org/sparsering",
        "https://docs.example.com",
        "https://docs.sparsering.test",
        "https://OWNER.github.io/sparsering",
        "https://github.com/OWNER/sparsering",
    ],
)
def test_a_wrong_address_is_an_error(tmp_path, address):
    given = address.replace('\\"', '"')
    says = f"as Documentation under [project.urls] in pyproject.toml, got {given!r}; write the add"
    for function in (addresses, check_addresses):
        with pytest.raises(ValueError, match=rf"^expected `https://`, .*{re.escape(says)}"):
            function(tree(tmp_path, f'Documentation = "{address}"', REPOSITORY))


@pytest.mark.parametrize(
    ("lines", "lacks"),
    [
        ((), "no Documentation and no Repository"),
        ((DOCUMENTATION,), "no Repository"),
        ((REPOSITORY,), "no Documentation"),
        ((DOCUMENTATION.replace("Doc", "doc"), REPOSITORY), "no Documentation"),
    ],
)
def test_a_release_needs_both(tmp_path, lines, lacks):
    with pytest.raises(ValueError, match=rf"^expected Documentation and .*, got {lacks}; write "):
        check_addresses(tree(tmp_path, *lines))
    check_addresses(tree(tmp_path, DOCUMENTATION, REPOSITORY))
