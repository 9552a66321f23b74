"""Trees of nodes shorter than a tile: exact beside walks up the parents, at the cost of tiles."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.torch_tables import only_torch
from layouts.test_native import check
from oracles.attention_oracle import dense_attention
from torch import Tensor

import sparsering as sr
from sparsering.distributed import simulate_ring
from sparsering.patterns.algebra import Frame

INNER: dict[str, tuple[sr.Mask, Callable[[int, int], bool]]] = {
    "full": (sr.Full(), lambda p, k: True),
    "causal": (sr.Causal(), lambda p, k: k <= p),
    "window": (sr.SlidingWindow(5, 1), lambda p, k: p - 5 <= k <= p + 1),
    "dilated window": (
        sr.SlidingWindow(8, 0, 2),
        lambda p, k: p - 8 <= k <= p and (p - k) % 2 == 0,
    ),
    "dilated": (
        sr.Dilated(12, 3, 1),
        lambda p, k: p // 12 == k // 12 and p % 12 % 3 == 1 == k % 12 % 3,
    ),
}


def drawn(rng: random.Random, tokens: int, longest: int) -> tuple[list[int], list[int]]:
    """Draws lengths and parents; some nodes are empty, some long, siblings stand anywhere."""
    lengths: list[int] = []
    while sum(lengths) < tokens:
        most = rng.choice((1, 3, longest, longest if rng.random() < 0.9 else 40))
        lengths.append(min(rng.randint(0, most), tokens - sum(lengths)))
    reach = rng.choice((1, 4, len(lengths)))
    return lengths, [rng.randint(max(-1, i - reach), i - 1) for i in range(len(lengths))]


def walked(lengths: list[int], parents: list[int]) -> tuple[list[int], list[dict[int, int]]]:
    """Returns the depth of each token, and each token's (token, depth) along its path."""
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    depths, paths = [], []
    for node, length in enumerate(lengths):
        chain, up = [node], parents[node]
        while up >= 0:
            chain.append(up)
            up = parents[up]
        path = [first[i] + j for i in reversed(chain) for j in range(lengths[i])]
        for j in range(length):
            depths.append(len(path) - length + j)
            paths.append({token: depth for depth, token in enumerate(path)})
    return depths, paths


def dense(lengths: list[int], parents: list[int], holds: Callable[[int, int], bool]) -> Tensor:
    depths, paths = walked(lengths, parents)
    mask = torch.zeros(len(depths), len(depths), dtype=torch.bool)
    for p, path in enumerate(paths):
        for k, depth in path.items():
            mask[p, k] = holds(depths[p], depth)
    return mask


def attended(
    inputs: list[Tensor],
    mask: Tensor,
    distance: Tensor | None = None,
    table: Tensor | None = None,
    kept: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention by its formula in float64; mask, distance [B or 1, n, n]; kept [B, H, n, n]."""
    bias = None
    if table is not None and distance is not None:
        radius = table.shape[1] // 2
        bias = table.double()[:, distance.clamp(-radius, radius) + radius].transpose(0, 1)
    sink = None if sink is None else sink.double()[None, :, None]
    doubles = (x.double() for x in inputs)
    return dense_attention(*doubles, mask[:, None], bias=bias, sink=sink, factor=kept)[0]


def inputs_of(
    rng: random.Random, batch: int, tokens: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor]:
    torch.manual_seed(rng.randint(0, 1 << 30))
    query = torch.randn(batch, 4, tokens, 8, dtype=dtype, requires_grad=True)
    key, value = (
        torch.randn(batch, 2, tokens, 8, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    table = torch.randn(4, 15, dtype=dtype, requires_grad=True)
    sink = torch.randn(4, dtype=dtype, requires_grad=True)
    return [query, key, value], table, sink


def compared(out: Tensor, wanted: Tensor, inputs: list[Tensor]) -> None:
    single = out.dtype == torch.float32
    most = 2e-5 if single else 1e-11
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=most)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    right = torch.autograd.grad(wanted, inputs, grad.double())
    for got, expected in zip(found, right, strict=True):
        torch.testing.assert_close(got, expected, rtol=most, atol=20 * most)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("longest", [2, 9])
def test_pairs_are_those_of_walks_up_the_parents(inner, longest):
    rng = random.Random(f"{inner} {longest}")
    for _ in range(4):
        lengths, parents = drawn(rng, rng.randint(30, 170), longest)
        pattern, holds = INNER[inner]
        wanted = dense(lengths, parents, holds)
        tree = sr.Tree(lengths, parents, pattern)
        n = len(wanted)
        assert torch.equal(tree.to_dense(n)[0].bool(), wanted)
        for size in (16, 48):
            sr.layout_cache.clear()
            layout = tree.layout(n, block_size=size)
            assert torch.equal(layout.to_dense()[0, 0].bool(), wanted)
            check(tree, Frame.build(n, n, 1, 1, None), size)


@pytest.mark.parametrize("native", [True, False])
def test_a_tile_whose_last_node_hangs_one_node_higher(native):
    """Its interval begins where that of the last node of the key tile ends."""
    parents = [*range(-1, 30), 14]
    wanted = dense([1] * 32, parents, INNER["full"][1])
    assert wanted[31, 14] and not wanted[31, 15]
    tree = sr.Tree((1,) * 32, parents, sr.Full())
    sr.layout_cache.clear()
    if native:
        layout = tree.layout(32, block_size=16)
    else:
        with only_torch():
            layout = tree.layout(32, block_size=16)
    assert torch.equal(layout.to_dense()[0, 0].bool(), wanted)


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu", "triton", "torch_sparse"])
@pytest.mark.parametrize("nested", [False, True], ids=["one tree", "a tree for each entry"])
def test_every_extra_is_exact(backend, nested):
    """Distances are of depths of each token's own path, in batches of unlike trees too."""
    rng = random.Random(f"{backend} {nested}")
    slow = backend == "triton"  # the interpreter takes seconds: two tiles, one of them partial
    for inner in ("causal",) if slow else ("causal", "full", "dilated window"):
        n = 20 if slow else rng.randint(40, 90)
        trees = [drawn(rng, n, 5) for _ in range(2 if nested else 1)]
        pattern, holds = INNER[inner]
        lengths, parents = ([list(x[i]) for x in trees] for i in range(2))
        if not nested:
            lengths, parents = lengths[0], parents[0]
        tree = sr.Tree(lengths, parents, pattern)
        dtype = torch.float32 if backend in ("cpu", "triton") else torch.float64
        inputs, table, sink = inputs_of(rng, 2, n, dtype)
        mask = torch.stack([dense(*x, holds) for x in trees])
        depth = torch.tensor([walked(*x)[0] for x in trees])
        distance = depth[:, None] - depth[:, :, None]
        size = 16 if slow else 32
        more: dict[str, Any] = {"distance_bias": table, "sink": sink, "block_size": size}
        more |= {"dropout_p": 0.25, "dropout_seed": 7, "backend": backend}
        batch, head = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
        token = torch.arange(n)
        kept = sr.dropout_kept(7, 0.25, batch, head, token[:, None], token).double() / 0.75
        if backend == "torch_sparse":
            kept, more = None, {k: x for k, x in more.items() if not k.startswith("dropout")}
        if backend == "reference":
            more["block_size"] = None
        out = sr.attention(*inputs, tree, **more)
        wanted = attended(inputs, mask, distance, table, kept, sink)
        compared(out, wanted, [*inputs, table, sink])


@pytest.mark.parametrize("backend", ["gather", "cpu", "triton"])
def test_a_block_bias_beside_distances(backend):
    """Entries are those of `layout()`, though a kernel may cut tiles at the ends of nodes."""
    rng = random.Random(backend)
    n, size = (24, 16) if backend == "triton" else (100, 32)
    lengths, parents = drawn(rng, n, 7)
    tree = sr.Tree(lengths, parents)
    dtype = torch.float64 if backend == "gather" else torch.float32
    inputs, table, _ = inputs_of(rng, 1, n, dtype)
    layout = tree.layout(n, num_heads=4, num_kv_heads=2, block_size=size)
    bias = torch.randn(1, 4, layout.num_blocks, dtype=dtype, requires_grad=True)
    options: dict[str, Any] = {"distance_bias": table, "block_bias": bias, "block_size": size}
    results = []
    for own in (backend, "reference"):
        tensors = [*inputs, table, bias]
        out = sr.attention(*inputs, tree, **options, backend=own)
        grad = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        results.append([out, *torch.autograd.grad(out, tensors, grad)])
    most = 1e-11 if dtype == torch.float64 else 2e-5
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=most, atol=20 * most)


@pytest.mark.parametrize("nested", [False, True], ids=["one tree", "a tree for each entry"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_rings(nested, ranks):
    rng = random.Random(f"ring {nested} {ranks}")
    trees = [drawn(rng, 97, 6) for _ in range(2 if nested else 1)]
    lengths, parents = (tuple(x[i] for x in trees) for i in range(2))
    tree = sr.Tree(lengths, parents) if nested else sr.Tree(*trees[0])
    inputs, table, _ = inputs_of(rng, 2, 97, torch.float64)
    mask = torch.stack([dense(*x, INNER["causal"][1]) for x in trees])
    depth = torch.tensor([walked(*x)[0] for x in trees])
    out = simulate_ring(*inputs, tree, world_size=ranks, distance_bias=table)
    wanted = attended(inputs, mask, depth[:, None] - depth[:, :, None], table)
    compared(out, wanted, [*inputs, table])


def test_caches():
    rng = random.Random(11)
    lengths, parents = drawn(rng, 120, 6)
    inputs, table, _ = inputs_of(rng, 2, 120, torch.float64)
    given = [x.detach() for x in inputs]
    mask = dense(lengths, parents, INNER["causal"][1])[None]
    depth = torch.tensor(walked(lengths, parents)[0])[None]
    wanted = attended(given, mask, depth[:, None] - depth[:, :, None], table).detach()
    tree = sr.Tree(lengths, parents)
    cache = sr.KVCache(tree, 2, 2, 8, num_heads=4, dtype=torch.float64)
    parts = [x.split([50, 1, 1, 68], 2) for x in given]
    rows = [cache.attend(*step, distance_bias=table.detach()) for step in zip(*parts, strict=True)]
    torch.testing.assert_close(torch.cat(rows, 2), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_lists_along_unlike_trees(backend):
    """A list of single keys has distances of its own entry's tree."""
    rng = random.Random(backend)
    trees = [drawn(rng, 60, 5) for _ in range(2)]
    lengths, parents = (tuple(x[i] for x in trees) for i in range(2))
    keys = torch.stack([torch.randperm(60)[:9] for _ in range(120)]).view(2, 1, 60, 9)
    pattern = sr.Tree(lengths, parents) & sr.SelectedBlocks(keys, 1)
    dtype = torch.float64 if backend == "gather" else torch.float32
    inputs, table, _ = inputs_of(rng, 2, 60, dtype)
    mask = torch.stack([dense(*x, INNER["causal"][1]) for x in trees])
    mask &= torch.zeros(2, 60, 60, dtype=torch.bool).scatter(2, keys[:, 0], True)
    depth = torch.tensor([walked(*x)[0] for x in trees])
    out = sr.attention(*inputs, pattern, distance_bias=table, backend=backend)
    wanted = attended(inputs, mask, depth[:, None] - depth[:, :, None], table)
    compared(out, wanted, [*inputs, table])


def test_parents_that_are_data():
    """Compiled once for batches of unlike trees, whose lengths and parents are tensors."""

    def call(query: Tensor, key: Tensor, value: Tensor, table: Tensor, tree: Any) -> Tensor:
        pattern = sr.Tree(*tree)
        return sr.attention(query, key, value, pattern, distance_bias=table, backend="gather")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    rng = random.Random(5)
    inputs, table, _ = inputs_of(rng, 2, 64, torch.float64)
    for _ in range(3):
        trees = [drawn(rng, 64, 4) for _ in range(2)]
        most = max(len(x[0]) for x in trees)
        lengths = torch.tensor([x + [0] * (most - len(x)) for x, _ in trees])
        parents = torch.tensor([x + [-1] * (most - len(x)) for _, x in trees])
        mask = torch.stack([dense(*x, INNER["causal"][1]) for x in trees])
        depth = torch.tensor([walked(*x)[0] for x in trees])
        out = compiled(*inputs, table, (lengths, parents))
        wanted = attended(inputs, mask, depth[:, None] - depth[:, :, None], table)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-11)


def test_long_nodes_keep_tiles_of_their_own():
    """Answers of two tiles each share their bitmaps: those of the prompt and of the diagonal."""
    layout = sr.Tree((256, *(200,) * 16), (-1, *(0,) * 16)).layout(256 + 3200, block_size=128)
    assert layout.passes[0].query_start.shape[1] == 2 + 16 * 2
    assert len(layout.passes[0].bitmaps) == 1


@pytest.mark.parametrize("inner", ["full", "causal", "dilated window"])
def test_a_chain_of_pairs_costs_tiles(inner):
    """A layout listed each pair of nodes: 2,050 times as many places as pairs."""
    count = 1024
    parents = tuple(range(-1, count - 1))
    tree = sr.Tree((2,) * count, parents, INNER[inner][0] | sr.Full())
    layout = tree.layout(2 * count)
    assert layout.density < 0.6
    assert layout.nbytes < 1 << 18
    with only_torch():
        sr.layout_cache.clear()
        assert tree.layout(2 * count, block_size=layout.block_size).num_blocks == layout.num_blocks


def test_a_draft_behind_each_anchor_costs_tiles():
    """512 drafts of 16 tokens see the context before their anchor, and themselves."""
    context, drafts = 4096, 512
    anchors = range(7, context, context // drafts)
    ends = [0, *(x + 1 for x in anchors)]
    of_context = [b - a for a, b in pairwise(ends)]
    lengths = of_context + [16] * drafts
    parents = [*range(-1, drafts - 1), *range(drafts)]
    tree = sr.Tree(lengths, parents, sr.Full())
    n = sum(lengths)
    layout = tree.layout(16 * drafts, n, block_size=128)
    assert layout.num_blocks <= 64 * 33 // 2 + 64
    dense_rows = tree.layout(512, n, block_size=128).to_dense()[0, 0]
    wanted = torch.zeros(512, n, dtype=torch.long)
    for i in range(512):
        draft = drafts - 32 + i // 16
        wanted[i, : ends[draft + 1]] = 1
        wanted[i, context + 16 * draft : context + 16 * (draft + 1)] = 1
    assert torch.equal(dense_rows, wanted)


@pytest.mark.parametrize("native", [True, False])
def test_a_tree_of_a_thousand_nodes_visits_what_its_paths_hold(native):
    rng = random.Random(0)
    tokens = 1 << 18
    parents = [-1, *(rng.randint(max(0, i - 5), i - 1) for i in range(1, 1000))]
    cuts = sorted(rng.randint(0, tokens) for _ in range(999))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
    depth = [0] * 1000  # tokens of a node's ancestors
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + sizes[parent] if parent >= 0 else 0
    tree = sr.Tree(sizes, parents)
    if native:
        layout = tree.layout(tokens, block_size=128)
    else:
        with only_torch():
            layout = tree.layout(tokens, block_size=128)
    pairs = sum(n * above + n * (n + 1) // 2 for n, above in zip(sizes, depth, strict=True))
    assert layout.num_pairs == pairs
    assert layout.num_blocks <= 3 * pairs / 128**2  # tiles end with their nodes
