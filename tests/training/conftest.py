"""A checkpoint, a copy of it to change, and a recipe for runs over ranks."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import rank_runs
from stranger import RECIPE

from sparsering.training import Recipe, train


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


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    """A recipe for runs over ranks, with a text of 20 files, of which 3 windows validate."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        (folder / f"{i:02d}.txt").write_text(f"file {i:02d} says so. " * 6)
    return dataclasses.replace(rank_runs.RECIPE, data=str(folder))
