"""The examples run, and show what they say they show."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.slow
def test_a_lesion_that_was_never_marked_is_looked_at(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "slide_heatmap.py"))
    ratio = example["main"](["--out", str(tmp_path / "heatmap.png")])
    assert ratio > 3
    assert (tmp_path / "heatmap.png").read_bytes().startswith(b"\x89PNG")
