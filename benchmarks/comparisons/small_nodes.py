"""Trees of nodes shorter than a tile, beside patterns of the same pairs, and groups of answers.

- "chain": 1,024 nodes of 2 tokens, beside `BlockCausal(2)`.
- "drafts": a draft of 16 tokens behind each of 512 anchors in a context of 4,096 tokens, as DFlash
  trains them, beside a `mask_mod`.
- "answers": 16 answers of 400 tokens to a prompt of 1,024 tokens, alone.

Times are of attention alone, with a cached layout; the layout has a time of its own.
"""

import time
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from sparsering.functional import attention
from sparsering.layouts.cache import layout_cache
from sparsering.patterns.algebra import Pattern
from sparsering.patterns.blocks import BlockCausal
from sparsering.patterns.mask_mod import from_mask_mod
from sparsering.patterns.positions import Full
from sparsering.patterns.tree import Tree

from ..measure import Row, distance_of, interleaved_times, spread_of

HEADS, DIM = 4, 64
DRAFT = 16


def of_small_nodes(quick: bool) -> list[Row]:
    """Times each way of each case in turns, forward and with backward; `quick`: few tokens."""
    rounds = 2 if quick else 9
    rows: list[Row] = []
    for case, (ways, queries, keys) in cases(quick).items():
        for passes in ("forward", "step"):
            rows += in_turns(case, passes, ways, (queries, keys), rounds)
    return rows


def cases(quick: bool) -> dict[str, tuple[dict[str, Pattern], int, int]]:
    """Returns for each case the patterns by name, the number of queries and of keys."""
    nodes, anchors, answer = (32, 8, 40) if quick else (1024, 512, 400)
    prompt = 64 if quick else 1024
    chain = Tree((2,) * nodes, tuple(range(-1, nodes - 1)), Full())
    answers = Tree((prompt, *(answer,) * 16), (-1, *(0,) * 16))
    context, drafts = 8 * anchors, DRAFT * anchors
    tree, function = draft_patterns(anchors)
    total = prompt + 16 * answer
    return {
        "chain": ({"tree": chain, "BlockCausal(2)": BlockCausal(2)}, 2 * nodes, 2 * nodes),
        "drafts": ({"tree": tree, "mask_mod": function}, drafts, context + drafts),
        "answers": ({"tree": answers}, total, total),
    }


def draft_patterns(anchors: int) -> tuple[Pattern, Pattern]:
    """Returns patterns of drafts behind anchors, as a tree and as a function of pairs.

    Queries are the drafts, keys the context (8 tokens for each anchor) and the drafts. A draft sees
    the context up to its anchor, and itself.
    """
    context = 8 * anchors
    generator = torch.Generator().manual_seed(0)
    ends = torch.randperm(context - 1, generator=generator)[:anchors].sort().values + 1
    sizes = [b - a for a, b in pairwise([0, *ends.tolist(), context])]
    lengths = (*sizes, *(DRAFT,) * anchors)
    parents = (*range(-1, anchors), *range(anchors))

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        draft = q // DRAFT  # q counts queries from 0
        return torch.where(k < context, k < ends[draft], draft == (k - context) // DRAFT)

    return Tree(lengths, parents, Full()), from_mask_mod(visible)


def in_turns(
    case: str, passes: str, ways: dict[str, Pattern], sizes: tuple[int, int], rounds: int
) -> list[Row]:
    """Times a forward pass, or one with a backward pass, of each way; checks that all agree."""
    torch.manual_seed(0)
    lengths = sizes[0], sizes[1], sizes[1]
    inputs = [torch.randn(1, HEADS, n, DIM, requires_grad=passes == "step") for n in lengths]
    results: dict[str, list[Tensor]] = {}

    def run(way: str) -> None:
        query, key, value = inputs
        out = attention(query, key, value, ways[way])
        grads = torch.autograd.grad(out.sum(), inputs) if passes == "step" else ()
        results[way] = [out.detach(), *grads]

    of_layouts = {}
    for way, pattern in ways.items():
        layout_cache.clear()
        begin = time.perf_counter()
        of_layouts[way] = pattern.layout(*sizes), 1e3 * (time.perf_counter() - begin)
    times = interleaved_times({way: partial(run, way) for way in ways}, rounds)
    exact = results[next(reversed(ways))]
    rows: list[Row] = []
    for way, (layout, layout_ms) in of_layouts.items():
        rows.append({
            "case": case, "passes": passes, "way": way, "queries": sizes[0], "keys": sizes[1],
            **spread_of(times[way]), "layout_ms": layout_ms, "density": layout.density,
            "block_size": layout.block_size, "layout_bytes": layout.nbytes,
            "apart": distance_of(results[way], exact),
        })  # fmt: skip
    return rows
