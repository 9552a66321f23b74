"""A checkpoint, and a copy of it to change."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from stranger import RECIPE

from sparsering.training import train


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder with a checkpoint of step 1, as it was written."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text("abc " * 400)
    recipe = dataclasses.replace(RECIPE, data=str(folder / "text.txt"))
    train(recipe, folder / "run", stop_after=1)
    return folder / "run"


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(whole, tmp_path / "run"))
