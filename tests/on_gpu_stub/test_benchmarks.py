"""The parts of `python -m benchmarks.gpu`, each to its end on the stub: launches, rows, no results.

Inputs are drawn on the host, sizes are small, and wrong numbers are accepted (`device.STUB`).
"""

import json
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import sparsering as sr

NO_COMPILER = "torch.compile"  # inductor does not trace the stub's operators
QUICK = ("smoke", "stages, compiled", "stages and tiles", "share of dense", "new masks")
SLOW = {
    "ten results are right", "launches are right", "kernel tests are right",
    "memory and races are right", "profiles",
    "main shapes are right", "calls are right", "ceilings", "main shapes", "lists", "packed heads",
    "founding table", "overhead", "layouts",
    "longnet", "windows", "documents", "selected blocks", "decoding", "every pattern is right",
    "shapes are right", "extras are right", "other calls are right", "backends are right",
    "tuning, compiled", "tuning", "tuned shapes", "memory", "beside tuned FlexAttention",
    "grid, 32K tokens", "grid, 8K tokens", "grid, 128K tokens", "grid, 1M tokens",
}  # fmt: skip


@pytest.fixture
def parts(hopper, monkeypatch, tmp_path) -> Iterator[ModuleType]:
    """The list of parts, imported while the stub is the current device."""
    from benchmarks.gpu import device, parts, running, tuned

    assert device.STUB and device.DEVICE == "cuda" and device.HALF is torch.bfloat16
    monkeypatch.setenv(tuned.FOLDER, str(tmp_path / "tuned"))
    monkeypatch.setenv("SPARSERING_CACHE", str(tmp_path / "plain"))
    yield parts
    running._forget()


def rows_of(parts: ModuleType, name: str) -> list[dict[str, object]]:
    rows = []
    for case, run in parts.PARTS[name].cases.items():
        if case != NO_COMPILER:
            own = list(run())
            assert own, case
            rows += own
    json.dumps(rows)
    return rows


@pytest.mark.parametrize("name", QUICK)
def test_a_part_of_the_first_half_hour_runs_to_its_end(parts, name):
    rows = rows_of(parts, name)
    for row in rows:
        assert "cannot" not in row, row
        assert "failed" not in row or "is not installed" in row["failed"], row
    if name.startswith("stages"):
        assert all(row["shared_bytes"] > 0 for row in rows)
    if name == "stages and tiles":
        assert {row["kernel"] for row in rows} == {"forward", "query", "key"}
        assert {row["pattern"] for row in rows} == {"random blocks", "dense"}
        assert all(row["ms"] > 0 and row["bits_after"] for row in rows)
    if name == "share of dense":
        dense = [row["share_of_dense"] for row in rows if row["backend"] == "ours, dense"]
        assert dense == [1.0, 1.0]
        missing = [row["failed"] for row in rows if "failed" in row]
        assert len(missing) == 3 and all("package" in text for text in missing)
    if name == "new masks":
        ours = {row["backend"] for row in rows if "first_tile_ms" in row}
        assert ours == {"ours, indices", "ours, scores", "ours, bool mask"}


def test_a_part_of_the_first_half_hour_that_fits_no_gpu_is_named(parts):
    from benchmarks.gpu import stages

    kernels = stages._Kernels(sr.Full(), 2, 512, 128, 128)
    of_stages = {}
    for config in stages.tried("forward", kernels.args[0], 128, 128):
        if (config.streamed, config.warps) == (128, 8):
            of_stages[config.stages] = kernels.compiled("forward", config)[1]
    assert of_stages[3]["shared_bytes"] == 229400 and "cannot" not in of_stages[2]
    assert of_stages[4]["cannot"].startswith("OutOfResources: out of resource: shared memory")


def test_every_part_is_rehearsed(parts):
    assert SLOW.isdisjoint(QUICK) and SLOW.union(QUICK) == set(parts.PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_a_part_runs_to_its_end(parts, name):
    for row in rows_of(parts, name):
        flex = str(row.get("backend", "")).startswith("flex")
        assert flex or "failed" not in row, row
