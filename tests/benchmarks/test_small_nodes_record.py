"""The comparison "small-nodes" compares equal masks, and the record holds what the docs promise."""

import json
from pathlib import Path

import torch

from benchmarks.comparisons import small_nodes

ROOT = Path(__file__).resolve().parents[2]


def test_the_ways_of_a_case_have_the_same_pairs():
    for ways, queries, keys in small_nodes.cases(quick=True).values():
        masks = [pattern.to_dense(queries, keys).long() for pattern in ways.values()]
        for mask in masks[1:]:
            assert torch.equal(mask.expand(masks[0].shape), masks[0])


def test_a_quick_run_agrees_with_itself():
    for row in small_nodes.of_small_nodes(quick=True):
        assert row["apart"] < 1e-5
        assert row["ms"] > 0


def test_the_record_is_within_the_bars():
    record = json.loads((ROOT / "benchmarks/records/small-nodes.json").read_text(encoding="utf-8"))
    found = {(row["case"], row["passes"], row["way"]): row for row in record["rows"]}
    for passes in ("forward", "step"):
        for case, other in (("chain", "BlockCausal(2)"), ("drafts", "mask_mod")):
            assert found[case, passes, "tree"]["ms"] < 2 * found[case, passes, other]["ms"]
