"""The comparison "trees" draws the trees that it names, and its ways to train agree."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsering as sr
from benchmarks.comparisons import trees
from benchmarks.measure import distance_of

SIZES = (12, 5, 3)


def test_depth_first_lists_each_child_before_the_next_sibling():
    #   0 -> 1 -> 3, 4;  0 -> 2 -> 5
    assert trees.depth_first((-1, 0, 0, 1, 1, 2)) == (-1, 0, 1, 1, 0, 4)
    assert trees.parents_of("binary, breadth first", 6, 0) == (-1, 0, 0, 1, 1, 2)
    assert trees.parents_of("binary", 6, 0) == (-1, 0, 1, 1, 0, 4)
    assert trees.parents_of("flat", 4, 0) == (-1, 0, 0, 0)
    assert trees.parents_of("chain", 4, 0) == (-1, 0, 1, 2)


def test_the_mask_for_flex_attention_has_the_pairs_of_the_tree():
    tree = sr.Tree((3, 0, 2, 1, 4, 2), (-1, 0, 1, 1, 0, -1))
    q, k = torch.arange(12)[:, None], torch.arange(12)
    seen = trees.tree_mask(tree)(q, q, q, k)
    assert torch.equal(seen, tree.to_dense(12, 12).squeeze().bool())


def test_layouts_are_never_taken_from_the_cache():
    rows = trees.tree_layouts(4096, 1)
    assert len(rows) == 2 * len(trees.KINDS)
    assert sr.layout_cache.info().entries <= 1
    chain = next(row for row in rows if (row["tree"], row["along"]) == ("chain", "causal"))
    assert chain["pairs"] == 4096 * 4097 // 2


@pytest.mark.parametrize("fault", [None, "siblings"])
def test_a_packed_step_is_that_of_padded_rows_and_of_exact_ones(monkeypatch, fault):
    model, sequences = trees.qwen(SIZES), trees.answers(SIZES)
    exact = trees.exact_scores(model, sequences, SIZES)
    padded = trees.run_once("step", trees.padded_loss, model, sequences, SIZES[0])
    if fault:
        pack = trees.pack_tree
        monkeypatch.setattr(trees, "pack_tree", lambda x: pack(x)._replace(pattern=sr.Causal()))
    packed = trees.run_once("step", trees.packed_loss, model, sequences, SIZES[0])
    assert distance_of(padded, exact) < 1e-5
    assert (distance_of(packed, exact) < 1e-5) == (fault is None)


def test_the_tables_of_the_page_are_those_of_the_record():
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("tabulate", root / "tools/tabulate_trees.py")
    assert spec is not None and spec.loader is not None
    tool: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    rows = json.loads(tool.RECORD.read_text(encoding="utf-8"))["rows"]
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(text, rows) == text
    slower = [{**row, "ms": 2 * row["ms"]} for row in rows]
    assert tool.page(text, slower) != text
