"""The notebooks of docs/notebooks run from top to bottom, and hold no output.

Here their code runs as a script does; `make docs` runs it in a Jupyter kernel, with its output.
"""

import json
from pathlib import Path

import pytest
from helpers.pages import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@each_notebook
def test_cells_run_in_order(path, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path)):
        source = "".join(cell["source"])
        exec(compile(source, f"{path.name}, code cell {number}", "exec"), namespace)


@each_notebook
def test_no_output_is_kept(path):
    for cell in code_cells(path):
        assert not cell["outputs"] and cell["execution_count"] is None, (
            f"{path.name} has output: clear it (jupyter nbconvert --clear-output --inplace)"
        )


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {"pattern-zoo", "slide-heatmap", "train-your-own"}
