"""The first block of README and of four pages runs alone, in a process of its own, strictly.

Warnings are errors there. It is with the tests of the integration, which also run beside the newest
transformers.
"""

import pytest
from helpers import forked
from helpers.pages import README, ROOT, blocks

PAGES = [
    README,
    *(ROOT / "docs" / f"{x}.md" for x in ("start", "selection", "transformers", "ring")),
]
STRICT = "import warnings\nwarnings.simplefilter('error')\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_first_block_runs_alone_without_warnings(page):
    found = blocks(page.read_text(encoding="utf-8"))
    code = next(x.code for x in found if x.language == "python")
    done = forked.run(STRICT + code)
    assert done.returncode == 0, done.stderr
