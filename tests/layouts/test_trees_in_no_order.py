"""Layouts of trees whose nodes stand in no order: equal to the dense ones, and as cheap."""

import random

import pytest
import torch
from helpers.torch_tables import only_torch
from layouts.test_native import check

import sparsering as sr
from sparsering.layouts import compile as compiler
from sparsering.layouts.paths import OnPath
from sparsering.patterns.algebra import Frame


def trees(nodes: int, tokens: int, seed: int, reach: int | None = None) -> tuple[sr.Tree, sr.Tree]:
    """Returns a tree in a random order of nodes, and the same tree depth first.

    A node hangs below one of the `reach` nodes before it (None: below any of them).
    """
    rng = random.Random(seed)
    parents = [-1]
    for i in range(1, nodes):
        parents.append(rng.randint(0 if reach is None else max(0, i - reach), i - 1))
    cuts = sorted(rng.randint(0, tokens) for _ in range(nodes - 1))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
    children: list[list[int]] = [[] for _ in range(nodes)]
    for i, up in enumerate(parents[1:], 1):
        children[up].append(i)
    order, waiting = [], [0]
    while waiting:
        order.append(node := waiting.pop())
        waiting += reversed(children[node])
    number = {-1: -1} | {node: i for i, node in enumerate(order)}
    of_twin = [lengths[i] for i in order], [number[parents[i]] for i in order]
    return sr.Tree(lengths, parents), sr.Tree(*of_twin)


@pytest.mark.covering(2, keep=[{"size": 16, "nodes": 17, "reach": None}])
@pytest.mark.parametrize("reach", [None, 1, 5])
@pytest.mark.parametrize("nodes", [1, 2, 17, 90])
@pytest.mark.parametrize("size", [16, 64])
def test_tables_are_those_of_torch_and_of_the_dense_mask(nodes, reach, size):
    tree, twin = trees(nodes, 700, nodes, reach)
    for pattern in (tree, sr.Packed((700,), tree), tree | sr.SlidingWindow(5, 3)):
        check(pattern, Frame.build(700, 700, 1, 1, None), size)
    layout = tree.layout(700, block_size=size)
    assert layout.num_pairs == int(tree.to_dense(700).sum())
    assert layout.num_pairs == twin.layout(700, block_size=size).num_pairs


@pytest.mark.parametrize("native", [True, False])
def test_a_large_tree_has_the_pairs_of_its_twin(native):
    tree, twin = trees(300, 1 << 15, 7)
    frame = Frame.build(1 << 15, 1 << 15, 1, 1, None)
    found = []
    for pattern in (tree, twin):
        if native:
            found.append(compiler.build_layout(pattern, frame, 128, torch.device("cpu")))
        else:
            with only_torch():
                found.append(compiler.build_layout(pattern, frame, 128, torch.device("cpu")))
    assert found[0].num_pairs == found[1].num_pairs


def test_the_search_costs_what_it_finds(monkeypatch):
    """Key tiles of other branches were tested one by one, where nodes are in no order."""
    tested = []
    status = OnPath.status
    monkeypatch.setattr(
        OnPath, "status", lambda self, pairs: tested.append(len(pairs)) or status(self, pairs)
    )
    counts = []
    for pattern in trees(300, 1 << 16, 7):
        tested.clear()
        with only_torch():
            pattern.layout(1 << 16, block_size=128)
        sr.layout_cache.clear()
        counts.append(sum(tested))
    assert counts[0] < 4 * counts[1], counts


def test_the_nearest_ancestor():
    for seed, reach in ((1, None), (2, 1), (3, 4)):
        tree, _ = trees(120, 5000, seed, reach)
        nodes = tree.nodes
        count = len(nodes.depth)
        node, most = torch.arange(count).repeat(count), torch.arange(count).repeat_interleave(count)
        expected = []
        for here, bound in zip(node.tolist(), most.tolist(), strict=True):
            while here > bound:
                here = int(nodes.parent[here])
            expected.append(here)
        assert nodes.nearest(node, most).tolist() == expected
        up = nodes.parent[nodes.parent >= 0]
        assert nodes.sees(torch.nonzero(nodes.parent >= 0)[:, 0], up).all()
