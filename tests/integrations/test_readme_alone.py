"""Each block of the README runs alone, in a process of its own, with all warnings as errors.

It is with the tests of the integration, which also run beside the newest transformers.
"""

import pytest
from helpers import forked
from helpers.pages import README, blocks

BLOCKS = [x for x in blocks(README.read_text(encoding="utf-8")) if x.language == "python"]
STRICT = "import warnings\nwarnings.simplefilter('error')\n"


def test_there_are_four():
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.line}")
def test_a_block_runs_alone_without_warnings(block):
    done = forked.run(STRICT + block.code)
    assert done.returncode == 0, done.stderr
