"""Each reader's page begins with an install line and a first result; docs/index.md lists them."""

import re

import pytest
from helpers.pages import ROOT, SHELLS, blocks

INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
LISTED = re.findall(
    r"^- \[[^\]]+\]\(([\w-]+\.md)\)",
    INDEX.partition("\n## What you do\n")[2].partition("\n## ")[0],
    re.MULTILINE,
)
READERS = [
    *("finetune.md", "packing.md", "trees.md", "invariance.md", "diffusion.md", "drafts.md"),
    *(
        "selection.md",
        "decoding.md",
        "serving.md",
        "eviction.md",
        "export.md",
        "streaming.md",
        "longnet.md",
    ),
    *("slides.md", "encoders.md", "grids.md", "spheres.md", "graphs.md", "video.md"),
    *("derivatives.md", "parallel.md"),
]
SCREEN = 30  # lines


def faults(text: str) -> list[str]:
    """Lists faults of the first screen of a page; tests/pages/test_docs.py runs its code."""
    found = blocks(text)
    install = next((x for x in found if x.language in SHELLS and "pip install" in x.code), None)
    first = next((x for x in found if x.language == "python"), None)
    if install is None or first is None:
        return ["no install line, or no Python"]
    needs_models = re.search(r"\btransformers\b", first.code) is not None
    checks = {
        "the install line stands too low": install.line <= SCREEN,
        "the first Python stands too low": first.line <= SCREEN,
        "the first Python stands before the install line": install.line < first.line,
        "the first Python prints nothing": "print(" in first.code,
        "the install line leaves transformers out": not needs_models or "[hf]" in install.code,
    }
    return [fault for fault, holds in checks.items() if not holds]


def test_there_is_a_page_for_each_reader():
    assert LISTED == READERS


@pytest.mark.parametrize("page", ["start.md", *READERS])
def test_the_first_screen_has_a_first_result(page):
    assert not faults((ROOT / "docs" / page).read_text(encoding="utf-8"))


def test_faults_are_found():
    shell, code = "```bash\npip install .\n```\n", "```python\nimport transformers\n```\n"
    assert len(faults(code)) == 1
    assert faults(shell + code) == [
        "the first Python prints nothing",
        "the install line leaves transformers out",
    ]
    assert len(faults("\n" * SCREEN + code + shell)) == 5
    assert not faults(shell + "```python\nprint(1)\n```\n")
