"""The figures of README and of docs/start.md are those of their records."""

import json
from typing import Any

import pytest
from helpers.pages import ROOT


def rows(record: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "records" / f"{record}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def row(record: str, **wanted: Any) -> dict[str, Any]:
    """The first row of a record with some values."""
    return next(x for x in rows(record) if wanted.items() <= x.items())


BLOCKS = {"case": "forward", "dtype": "float32", "head_dim": 64, "block_size": 128}
OURS, FLEX = (row("random-blocks", backend=x, **BLOCKS) for x in ("cpu", "flex"))
LAST = {"batch": 1, "tokens": 131072, "dtype": "float32"}
CACHE = row("decoding", backend="cache", pattern="Causal() & SlidingWindow(4095)", **LAST)
DENSE = row("decoding", backend="dense", **LAST)
(MILLION,) = rows("million-tokens")


def megabytes(found: dict[str, Any]) -> str:
    return f"{found['bytes'] / 1e6:.0f}"


README = [
    f"{OURS['ms']:.0f} ms, error {OURS['error']:.0e}".replace("e-0", "e-"),
    f"compiled FlexAttention: {FLEX['ms']:.0f} ms, error {FLEX['error']:.0e}".replace("e-0", "e-"),
    f"{CACHE['mean_ms']:.1f} ms a token, {megabytes(CACHE)} MB held",
    f"dense SDPA: {DENSE['mean_ms']:.0f} ms a token, {megabytes(DENSE)} MB",
    f"{MILLION['seconds']:.1f} s, error {MILLION['error']:.0e}".replace("e-0", "e-"),
    f"{MILLION['density']:.2%} of all pairs of blocks",
]
START = [
    f"**{FLEX['ms'] / OURS['ms']:.1f} times as fast as compiled FlexAttention**",
    f"**{CACHE['mean_ms']:.1f} ms a token after 131,072**",
    f"where dense attention takes {DENSE['mean_ms']:.0f}",
    f"**{MILLION['seconds']:.1f} s for 1,048,576 tokens**",
]


@pytest.mark.parametrize("figure", README)
def test_readme_has_the_figures_of_its_records(figure):
    assert figure in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("figure", START)
def test_start_has_the_figures_of_its_records(figure):
    assert figure in " ".join((ROOT / "docs" / "start.md").read_text(encoding="utf-8").split())
