"""Measures masks at 131,072 tokens beside what a user would run instead: plan, forward, backward.

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.masks --out benchmarks/records

With that variable, torch's threads do not spin where they wait, which on a busy machine makes some
of its calls tens of times as slow.

`masks.json`: full, causal, window, window with sinks, documents, a tree, prefix, blocks, strided
blocks, block diffusion, which are unions of intervals of keys; and LongNet, a tree of drafts, a
grid in the order of tiles, random blocks and lists, which are not. On a CPU one head of 64 channels
in float32; with `--device cuda` four heads of 128 in bfloat16, as in cuDNN frontend's benchmark.

The libraries:

- `sparsering`: the plan is the pattern and its layout; cold, and again from an equal pattern.
- `sdpa by chunks`: what a user would write. Each chunk of rows attends by
  `scaled_dot_product_attention` to the keys that it needs, with a mask where one is needed. Of
  expensive masks every n-th chunk is timed; `sampled` is n, and times are scaled by their pairs.
- `FlexAttention`: the plan is `create_block_mask`, compiled; it has no backward on a CPU.
- `torch.sparse`: softmax of a sparse COO tensor of the pairs.
- On a GPU, where installed: cuDNN's `flex_attention`, FlashAttention, FlashInfer.

A row has either times or `refused`, the reason. Calls run in turns. Backward is of one graph that
the timed forward made. `bytes` is the peak of both beyond the inputs, and `plan_bytes` what the
plan holds. Errors are against float64 from the definition of the mask, which is written here and
shares no code with the library: some rows of out and of the gradient by query, and some keys of
the gradients by key and value.
"""

import argparse
import gc
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsering as sr
from sparsering.ground.turns import timed

from .grids import Boxes
from .measure import (
    Row,
    distance_of,
    give_back_freed,
    gradient_of,
    inputs_of,
    interleaved_times,
    memory,
    restart_peak,
    spread_of,
    write_record,
)

TOKENS, ROUNDS, SECONDS = 131_072, 3, 6.0
MOST_SPARSE = 10e9  # bytes of torch.sparse
LONG = 6.0  # seconds of a library's first round from which it is its only one
SHAPES = {"cpu": (1, 64, torch.float32), "cuda": (4, 128, torch.bfloat16)}  # heads, width, dtype
CHUNKS, FLEX, SPARSE = "sdpa by chunks", "FlexAttention", "torch.sparse"
OURS = "sparsering"
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of errors

Spans = list[tuple[Tensor, Tensor]]
"""Intervals [first, stop) of keys, disjoint, for some query positions."""


@dataclass(frozen=True)
class Chunk:
    """Some rows, the keys they need, and which of these they see.

    `keys` [R, k] are lists, of each row its own. `mask` is None where all rows see all keys, and
    `causal` says that `rows` and `keys` are the same tokens under a causal mask.
    """

    rows: Tensor
    keys: Tensor
    mask: Callable[[], Tensor] | None = None
    causal: bool = False

    @property
    def pairs(self) -> int:
        """Pairs that the chunk computes."""
        if self.keys.dim() == 2:
            return self.keys.numel()
        return len(self.rows) * len(self.keys) // (2 if self.causal else 1)


@dataclass(frozen=True)
class Case:
    """A mask: as a pattern of the library, and by its definition.

    Args:
        name: its name in the record and on the page.
        make: makes the pattern.
        holds: whether (query position, key) attend, or how often, by broadcasting.
        chunks: makes the chunks of the user's loop.
        spans: the intervals of keys of each query, where the mask is a union of some.
        queries: number of rows, the last ones of the tokens.
        tokens: number of keys.
        sampled: every how many chunks of the user's loop are timed.
        flex: whether FlexAttention is run; its plan takes most of a minute.
        pairs: number of pairs, where no layout counts them.
    """

    name: str
    make: Callable[[], sr.Pattern]
    holds: Callable[[Tensor, Tensor], Tensor]
    chunks: Callable[[], list[Chunk]]
    queries: int
    tokens: int
    spans: Callable[[Tensor], Spans] | None = None
    sampled: int = 1
    flex: bool = False
    pairs: int | None = None

    @property
    def start(self) -> int:
        """Position of the first query."""
        return self.tokens - self.queries


def of_spans(
    name: str,
    make: Callable[[], sr.Pattern],
    spans: Callable[[Tensor], Spans],
    tokens: int,
    *,
    queries: int | None = None,
    rows: int = 1024,
    chunks: Callable[[], list[Chunk]] | None = None,
    whole: bool = False,
    sampled: int = 1,
    flex: bool = False,
) -> Case:
    """A mask from its intervals; a chunk is `rows` rows, `whole` ones that see the same keys."""
    queries = queries or tokens

    def holds(q: Tensor, k: Tensor) -> Tensor:
        found = torch.zeros_like(q + k, dtype=torch.bool)
        for first, stop in spans(q):
            found = found | ((k >= first) & (k < stop))
        return found

    def split() -> list[Chunk]:
        found = []
        for own in torch.arange(tokens - queries, tokens).split(min(rows, queries)):
            parts = [
                torch.arange(int(first.min()), int(stop.max()))
                for first, stop in spans(own)
                if stop.max() > first.min()
            ]
            keys = torch.cat(parts).unique()
            mask = None if whole else partial(holds, own[:, None], keys)
            found.append(Chunk(own - (tokens - queries), keys, mask))
        return found

    return Case(
        name, make, holds, chunks or split, queries, tokens,
        spans=spans, sampled=sampled, flex=flex,
    )  # fmt: skip


def cases_of(tokens: int) -> dict[str, Case]:
    """All masks of a number of tokens, a power of two from 2,048 on; cheap ones first."""
    n = tokens
    small = n // 256  # 512 of 131,072
    documents = lengths_of_documents(n)
    ends = torch.tensor(documents).cumsum(0)
    starts = (ends - torch.tensor(documents)).repeat_interleave(torch.tensor(documents))
    size, prefix, strided = n // 32, n - n // 32, n // 64
    rates = tuple(range(16, 64, 16))
    found = [
        drafts(n),
        of_spans(
            "causal window",
            lambda: sr.SlidingWindow(small, 0),
            lambda q: [((q - small).clamp(min=0), q + 1)],
            n, flex=True,
        ),
        of_spans(
            "causal window with sinks",
            lambda: sr.Causal() & (sr.SlidingWindow(small, 0) | sr.GlobalTokens(4, rows=False)),
            lambda q: [(0 * q, (q + 1).clamp(max=4)), ((q - small).clamp(min=4), q + 1)],
            n,
        ),
        of_spans(
            "documents, causal",
            lambda: sr.Documents(documents) & sr.Causal(),
            lambda q: [(starts.to(q.device)[q], q + 1)],
            n,
            chunks=lambda: [
                Chunk(own, own, causal=True) for own in torch.arange(n).split(list(documents))
            ],
        ),
        tree(n),
        longnet(n),
        grid(n),
        of_spans(
            "strided blocks",
            lambda: sr.BlockDilated(rates, strided),
            lambda q: [
                ((q // strided % 16 + b) * strided, (q // strided % 16 + b + 1) * strided)
                for b in range(0, 64, 16)
            ],
            n, rows=strided, whole=True,
        ),
        random_blocks(n),
        of_spans(
            "full, last queries",
            sr.Full,
            lambda q: [(0 * q, 0 * q + n)],
            n, queries=n // 16, rows=n, whole=True,
        ),
        of_spans(
            "block-causal, last queries",
            lambda: sr.BlockCausal(size),
            lambda q: [(0 * q, (q // size + 1) * size)],
            n, queries=n // 16, rows=size, whole=True,
        ),
        lists(n),
        of_spans(
            "prefix, last queries",
            lambda: sr.Causal() | sr.GlobalTokens(prefix, rows=False),
            lambda q: [(0 * q, (q + 1).clamp(min=prefix))],
            n, queries=n // 16,
        ),
        of_spans(
            "causal, last queries",
            sr.Causal,
            lambda q: [(0 * q, q + 1)],
            n, queries=n // 16,
        ),
        block_diffusion(n),
    ]  # fmt: skip
    return {case.name: case for case in found}


def lengths_of_documents(tokens: int) -> tuple[int, ...]:
    """Draws lengths of 1/64 to 1/16 of the tokens, which sum to them."""
    generator = torch.Generator().manual_seed(0)
    found: list[int] = []
    while (left := tokens - sum(found)) > tokens // 16:
        drawn = int(torch.randint(tokens // 64, tokens // 16, (1,), generator=generator))
        found.append(min(drawn, left))
    return (*found, tokens - sum(found))


def drafts(tokens: int) -> Case:
    """A binary tree of 63 guesses behind a context, which all of them see."""
    nodes = 63
    context = tokens - nodes
    parents = (-1, *((i - 1) // 2 for i in range(1, nodes)))
    above = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        above[node] |= above[parents[node]]

    def holds(q: Tensor, k: Tensor) -> Tensor:
        node, guess = (q - context).clamp(min=0), (k - context).clamp(min=0)
        return (k < context) | above.to(q.device)[node, guess]

    def chunks() -> list[Chunk]:
        rows, keys = torch.arange(nodes), torch.arange(tokens)
        return [Chunk(rows, keys, partial(holds, context + rows[:, None], keys))]

    lengths, up = (context, *[1] * nodes), (-1, *(parent + 1 for parent in parents))
    return Case(
        "tree of 63 drafts", lambda: sr.Tree(lengths, up), holds, chunks, nodes, tokens
    )  # fmt: skip


def tree(tokens: int) -> Case:
    """A binary tree of 127 nodes, depth first; a token sees the ones before it on its path."""
    nodes, deepest = 127, 6
    order: list[tuple[int, int]] = []  # (number of the parent, depth)
    pending = [(-1, 0)]
    while pending:
        parent, depth = pending.pop()
        order.append((parent, depth))
        if depth < deepest:
            pending += [(len(order) - 1, depth + 1)] * 2
    parents = tuple(parent for parent, _ in order)
    lengths = tuple(tokens // nodes + (i < tokens % nodes) for i in range(nodes))
    ends = torch.tensor(lengths).cumsum(0)
    starts = ends - torch.tensor(lengths)
    owner = torch.arange(nodes).repeat_interleave(torch.tensor(lengths))
    above = torch.full((nodes, deepest), -1)
    for node, (parent, depth) in enumerate(order):
        if parent >= 0:
            above[node] = above[parent]
            above[node, depth - 1] = parent

    def spans(q: Tensor) -> Spans:
        node = owner.to(q.device)[q]
        found = []
        for depth in range(deepest):
            up = above.to(q.device)[node, depth]
            first, stop = (x.to(q.device)[up] for x in (starts, ends))
            stop = torch.where(up < 0, starts.to(q.device)[node], stop)
            found.append((torch.where(up < 0, stop, first), stop))
        return [*found, (starts.to(q.device)[node], q + 1)]

    return of_spans("tree of 127 nodes", lambda: sr.Tree(lengths, parents), spans, tokens)


def longnet(tokens: int) -> Case:
    """Segments of 1/64 to all of the tokens, dilated as much as they are longer; causal."""
    segments = tuple(tokens // 64 * 4**i for i in range(4))
    rates = (1, 4, 16, 64)

    def holds(q: Tensor, k: Tensor) -> Tensor:
        counts = torch.zeros_like(q + k)
        for segment, rate in zip(segments, rates, strict=True):
            same = q // segment == k // segment
            counts += same & (q % segment % rate == 0) & (k % segment % rate == 0)
        return counts * (k <= q)

    def chunks() -> list[Chunk]:
        found = []
        for own in torch.arange(tokens).split(segments[0]):
            parts = []
            for segment, rate in zip(segments, rates, strict=True):
                first = int(own[0]) // segment * segment
                parts.append(torch.arange(first, int(own[-1]) + 1, rate))
            keys = torch.cat(parts).unique()

            def bias(own: Tensor = own, keys: Tensor = keys) -> Tensor:
                return holds(own[:, None], keys).float().log()

            found.append(Chunk(own, keys, bias))
        return found

    return Case(
        "LongNet, causal", lambda: sr.LongNet(segments, rates) & sr.Causal(), holds, chunks,
        tokens, tokens,
    )  # fmt: skip


def grid(tokens: int) -> Case:
    """Windows of 5 x 9 x 9 over a film, in the order of tiles of 4 x 4 x 4."""
    side = 64 if tokens >= 1 << 17 else 16
    shape, window = (tokens // side**2, side, side), (5, 9, 9)
    tiles = sr.GridTiles(shape, 4)

    def holds(q: Tensor, k: Tensor) -> Tensor:
        found = torch.ones_like(q + k, dtype=torch.bool)
        ours, theirs = tiles.coordinates(q.cpu()), tiles.coordinates(k.cpu())
        for a, b, n, w in zip(ours, theirs, shape, window, strict=True):
            first = (a.to(q.device) - w // 2).clamp(0, n - w)
            found = found & (b.to(q.device) >= first) & (b.to(q.device) < first + w)
        return found

    def chunks() -> list[Chunk]:
        place = tiles.inverse
        parts = Boxes({"shape": shape, "window": window}).parts
        return [Chunk(place[q], place[k], partial(_same, mask)) for q, k, mask in parts]

    return Case(
        "grid in tile order",
        lambda: sr.Neighbourhood(shape, window=window, tile=4), holds, chunks, tokens, tokens,
    )  # fmt: skip


def _same(x: Tensor) -> Tensor:
    return x


def random_blocks(tokens: int) -> Case:
    """A tenth of all blocks of 128 tokens."""
    count = tokens // 128
    active = torch.rand(count, count, generator=torch.Generator().manual_seed(0)) < 0.1
    active |= torch.eye(count, dtype=torch.bool)

    def holds(q: Tensor, k: Tensor) -> Tensor:
        return active.to(q.device)[q // 128, k // 128]

    def chunks() -> list[Chunk]:
        tokens_of = torch.arange(tokens).view(count, 128)
        return [Chunk(tokens_of[b], tokens_of[active[b]].flatten()) for b in range(count)]

    return Case(
        "10% random blocks", lambda: sr.Blocks(active, 128), holds, chunks, tokens, tokens,
        sampled=4,
    )  # fmt: skip


def lists(tokens: int) -> Case:
    """For each query of the last sixteenth a list of 2,048 keys, or of all tokens / 16 if fewer."""
    queries, number = tokens // 16, min(2048, tokens // 16)
    step = tokens // number
    generator = torch.Generator().manual_seed(0)
    listed = torch.randint(step, (queries, number), generator=generator)
    listed += torch.arange(number) * step

    def holds(q: Tensor, k: Tensor) -> Tensor:
        return listed.to(q.device)[q - (tokens - queries), k // step] == k

    def chunks() -> list[Chunk]:
        return [Chunk(own, listed[own]) for own in torch.arange(queries).split(64)]

    return Case(
        f"lists of {number:,} keys, last queries",
        lambda: sr.SelectedBlocks(listed, 1, query_block=1, first_row=tokens - queries),
        holds, chunks, queries, tokens, sampled=16, pairs=listed.numel(),
    )  # fmt: skip


def block_diffusion(tokens: int) -> Case:
    """Blocks of 32 noisy tokens, in the first half, over the clean ones before them."""
    half, size = tokens // 2, 32

    def spans(q: Tensor) -> Spans:
        own, noisy = q % half // size * size, q < half
        last = torch.where(noisy, half + own, half + own + size)
        return [
            (torch.where(noisy, own, 0), torch.where(noisy, own + size, 0)),
            (0 * q + half, last),
        ]

    return of_spans(
        "block diffusion", lambda: sr.BlockDiffusion(half, size), spans, tokens, sampled=8
    )


class RefusedError(Exception):
    """Why a library does not compute a mask, or was not asked to."""


@dataclass
class Way:
    """A library on a mask: its forward, what its plan took, and which rows it computes."""

    forward: Callable[[Tensor, Tensor, Tensor], Any]
    plan_ms: float | None = None
    warm_plan_ms: float | None = None
    plan_bytes: int | None = None
    rows: Tensor | None = None  # of the output, where these are not all in order
    scale: float = 1.0
    sampled: int = 1
    no_backward: str = ""


def ours(case: Case, inputs: list[Tensor]) -> Way:
    """The library's attention, with its lse."""
    heads, device = inputs[0].shape[1], inputs[0].device
    sr.layout_cache.clear()
    held = [0]

    def plan() -> sr.Pattern:
        pattern = case.make()
        if case.pairs is None:
            layout = pattern.layout(case.queries, case.tokens, num_heads=heads, device=device)
            held[0] = layout.nbytes
        return pattern

    cold, warm = timed(plan, device) * 1e3, timed(plan, device) * 1e3
    pattern = plan()
    return Way(
        partial(sr.attention, pattern=pattern, return_lse=True),
        plan_ms=cold, warm_plan_ms=warm, plan_bytes=held[0],
    )  # fmt: skip


def by_chunks(case: Case, inputs: list[Tensor]) -> Way:
    """The user's loop over chunks of rows."""
    chunks = case.chunks()
    every = min(case.sampled, len(chunks))
    taken = chunks[every // 2 :: every]
    device = inputs[0].device

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = []
        for chunk in taken:
            q, k, v = _part(query, chunk.rows), _part(key, chunk.keys), _part(value, chunk.keys)
            if chunk.keys.dim() == 2:  # a row is an entry of the batch
                own = q[0].transpose(0, 1)[:, :, None]
                k, v = (x[0].transpose(0, 1) for x in (k, v))
                out = F.scaled_dot_product_attention(own, k, v)  # [rows, H, 1, D]
                found.append(out[:, :, 0].transpose(0, 1)[None])
                continue
            mask = None if chunk.mask is None else chunk.mask().to(device)
            found.append(F.scaled_dot_product_attention(q, k, v, mask, is_causal=chunk.causal))
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    scale = sum(x.pairs for x in chunks) / sum(x.pairs for x in taken)
    rows = torch.cat([x.rows for x in taken])
    return Way(forward, rows=rows, scale=scale, sampled=every)


def _part(x: Tensor, tokens: Tensor) -> Tensor:
    """Tokens of x [B, H, N, D]: a view where they follow one another, else a copy."""
    first, last = int(tokens.flatten()[0]), int(tokens.flatten()[-1])
    if tokens.dim() == 1 and last - first + 1 == len(tokens) and bool((tokens.diff() == 1).all()):
        return x[:, :, first : last + 1]
    return x[:, :, tokens.to(x.device)]


def flex(case: Case, inputs: list[Tensor]) -> Way:
    """Compiled FlexAttention, with its own plan of all pairs."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = inputs[0].device
    if case.name.startswith("LongNet"):
        raise RefusedError("a mask_mod has no counts of pairs, which branches of LongNet have")
    if not case.flex and device.type == "cpu":
        raise RefusedError("not run: its plan looks at all pairs, as in the first rows")
    torch._dynamo.reset()
    start = case.start

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return case.holds(q + start, k)

    build = torch.compile(create_block_mask)
    made: list[Any] = []

    def plan() -> None:
        made[:] = [build(sees, None, None, case.queries, case.tokens, device=device.type)]

    cold, warm = timed(plan, device) * 1e3, timed(plan, device) * 1e3
    attend = torch.compile(flex_attention)
    with torch.no_grad():
        attend(*(x.detach() for x in inputs), block_mask=made[0])  # compiles
    held = sum(x.nbytes for x in made[0].as_tuple() if isinstance(x, Tensor))
    return Way(
        partial(attend, block_mask=made[0]),
        plan_ms=cold, warm_plan_ms=warm, plan_bytes=held,
        no_backward="no backward on a CPU" if device.type == "cpu" else "",
    )  # fmt: skip


def torch_sparse(case: Case, inputs: list[Tensor]) -> Way:
    """Softmax of a COO tensor of the pairs, whose logits are products of gathered rows."""
    pairs = pairs_of(case)
    heads, _, _, width = inputs[0].shape
    needs = pairs * heads * (2 * width * inputs[0].element_size() + 20) * 2
    if needs > MOST_SPARSE:
        raise RefusedError(
            f"its pairs, with their rows of query and key, need {needs / 1e9:,.0f} GB"
        )
    device = inputs[0].device
    begin = time.perf_counter()
    seen = case.holds(torch.arange(case.start, case.tokens)[:, None], torch.arange(case.tokens))
    index = seen.nonzero().T.contiguous().to(device)
    counts = seen[index[0], index[1]].to(inputs[0].dtype).log().to(device)
    took = (time.perf_counter() - begin) * 1e3
    scale = width**-0.5

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = []
        for head in range(heads):
            score = (query[0, head][index[0]] * key[0, head][index[1]]).sum(-1) * scale + counts
            table = torch.sparse_coo_tensor(index, score, tuple(seen.shape), is_coalesced=True)
            out.append(torch.sparse.mm(torch.sparse.softmax(table, 1), value[0, head]))
        return torch.stack(out)[None]

    return Way(forward, plan_ms=took, warm_plan_ms=took, plan_bytes=index.nbytes)


def endpoints(case: Case, device: torch.device) -> Tensor:
    """The intervals as cuDNN takes them: int32 [1, 1 + 2 * intervals, rows]."""
    if case.spans is None:
        raise RefusedError("no union of few intervals of keys")
    spans = case.spans(torch.arange(case.start, case.tokens))
    if len(spans) > 15:
        raise RefusedError(f"{len(spans)} intervals; it takes 15")
    found = [torch.zeros_like(spans[0][0])]
    for first, stop in spans:
        found += [first, torch.maximum(first, stop)]
    return torch.stack(found).int()[None].contiguous().to(device)


def cudnn(case: Case, inputs: list[Tensor]) -> Way:
    """The `flex_attention` of cuDNN frontend: intervals, compiled to a plan."""
    _needs("cudnn", inputs)
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    device = inputs[0].device
    args = [x.transpose(1, 2).contiguous() for x in inputs]
    made: list[Any] = []

    def plan() -> None:
        made[:] = [create_mask_plan(endpoints(case, device), *args, build_backward=True)]

    cold, warm = timed(plan, device) * 1e3, timed(plan, device) * 1e3

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flex_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), mask_plan=made[0])
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Way(forward, plan_ms=cold, warm_plan_ms=warm)


def flash(case: Case, inputs: list[Tensor]) -> Way:
    """FlashAttention-3: causal, windows, or all pairs."""
    _needs("flash_attn_interface", inputs)
    options = _simple(case)
    from flash_attn_interface import flash_attn_func

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Way(forward)


def flashinfer(case: Case, inputs: list[Tensor]) -> Way:
    """FlashInfer's prefill of one sequence, forward alone."""
    _needs("flashinfer", inputs)
    options = _simple(case)
    left = options.pop("window_size", (-1, 0))[0]
    from flashinfer import single_prefill_with_kv_cache

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        args = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        out = single_prefill_with_kv_cache(*args, window_left=left, **options)
        return out.transpose(0, 1)[None]

    return Way(forward, no_backward="no backward")


def _needs(package: str, inputs: list[Tensor]) -> None:
    if inputs[0].device.type == "cpu":
        raise RefusedError("needs an NVIDIA GPU")
    if importlib.util.find_spec(package) is None:
        raise RefusedError("not installed")


def _simple(case: Case) -> dict[str, Any]:
    """Options of kernels that know causal masks and causal windows."""
    known: dict[str, dict[str, Any]] = {"causal, last queries": {"causal": True}}
    known["causal window"] = {"causal": True, "window_size": (case.tokens // 256, 0)}
    for name in known:
        if case.name == name:
            return known[name]
    if case.name.startswith("full"):
        return {"causal": False}
    raise RefusedError("knows causal masks and windows alone")


WAYS: dict[str, Callable[[Case, list[Tensor]], Way]] = {
    OURS: ours,
    CHUNKS: by_chunks,
    FLEX: flex,
    SPARSE: torch_sparse,
    "cudnn flex_attention": cudnn,
    "FlashAttention": flash,
    "FlashInfer": flashinfer,
}


def pairs_of(case: Case) -> int:
    """Number of pairs of a head; those of several branches count as often."""
    if case.pairs is not None:
        return case.pairs
    return case.make().layout(case.queries, case.tokens).num_pairs


def exact_rows(case: Case, inputs: list[Tensor], sent: Tensor, rows: Tensor) -> list[Tensor]:
    """Rows of out, lse and the gradient by query of head 0, in float64 on the CPU."""
    query, key, value = (x[0, 0].detach().cpu().double() for x in inputs)
    query = query[rows].requires_grad_()
    counts = case.holds(rows[:, None] + case.start, torch.arange(case.tokens))
    score = query @ key.T * key.shape[1] ** -0.5 + counts.double().log()
    out = score.softmax(-1) @ value
    (grad,) = torch.autograd.grad(out, query, sent[0, 0].cpu().double()[rows])
    return [out.detach(), score.logsumexp(-1).detach(), grad]


def exact_keys(
    case: Case, inputs: list[Tensor], sent: Tensor, result: tuple[Tensor, Tensor], keys: Tensor
) -> list[Tensor]:
    """Gradients by some keys and values of head 0, in float64, from out and lse of all rows."""
    query, key, value = (x[0, 0].detach().cpu().double() for x in inputs)
    given = sent[0, 0].cpu().double()
    out, lse = (x[0, 0].detach().cpu().double() for x in result)
    counts = case.holds(torch.arange(case.start, case.tokens)[:, None], keys)
    scale = key.shape[1] ** -0.5
    weight = (query @ key[keys].T * scale - lse[:, None]).exp() * counts
    inner = given @ value[keys].T - (given * out).sum(-1, keepdim=True)
    return [(weight * inner).T @ query * scale, weight.T @ given]


class Calls:
    """Forward and backward of one way, as the two calls that are timed."""

    def __init__(self, way: Way, inputs: list[Tensor], sent: Tensor) -> None:
        self.way = way
        self.inputs = [x.detach() for x in inputs] if way.no_backward else inputs
        self.sent = sent if way.rows is None else sent[:, :, way.rows.to(sent.device)]
        self.out: Any = None
        self.result: Any = None
        self.grads: tuple[Tensor, ...] = ()
        self.base, self.peak = 0, 0

    def forward(self) -> None:
        """Runs the forward, which stores what the backward needs."""
        self.out = self.result = None
        self.grads = ()
        with torch.set_grad_enabled(not self.way.no_backward):
            self.out = self.way.forward(*self.inputs)

    def backward(self) -> None:
        """Runs the backward of the last forward, and frees its graph."""
        out = self.out[0] if isinstance(self.out, tuple) else self.out
        self.grads = torch.autograd.grad(out, self.inputs, self.sent)

    def begin(self, device: torch.device) -> None:
        """Resets the peak, before the forward."""
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
            return
        give_back_freed()
        self.base = restart_peak()

    def end(self, device: torch.device) -> None:
        """Reads the peak."""
        cuda = device.type == "cuda"
        now = torch.cuda.max_memory_allocated() if cuda else memory("VmHWM")
        self.peak = now - self.base


def rows_of(
    case: Case, device: torch.device, rounds: int, seconds: float, libraries: list[str]
) -> list[Row]:
    """Measures some libraries on a mask."""
    heads, width, dtype = SHAPES[device.type]
    whole = inputs_of(heads, case.tokens, width, dtype)
    whole[0] = whole[0][:, :, case.start :].contiguous()
    inputs = [x.to(device).requires_grad_() for x in whole]
    sent = gradient_of(whole[0]).to(device)
    pairs = pairs_of(case)
    base: Row = {
        "mask": case.name, "queries": case.queries, "tokens": case.tokens, "heads": heads,
        "width": width, "dtype": str(dtype).removeprefix("torch."), "pairs": pairs,
        "density": pairs / (case.queries * case.tokens),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "intervals": None if case.spans is None else len(case.spans(torch.arange(1))),
    }  # fmt: skip
    found: dict[str, Row] = {}
    calls: dict[str, Calls] = {}
    for name in libraries:
        found[name] = {**base, "library": name}
        try:
            calls[name] = Calls(WAYS[name](case, inputs), inputs, sent)
        except RefusedError as error:
            found[name]["refused"] = str(error)
    timed_calls: dict[str, Callable[[], None]] = {}
    for name, call in calls.items():
        timed_calls[f"{name}: forward"] = call.forward
        if not call.way.no_backward:
            timed_calls[f"{name}: backward"] = call.backward

    def clock(run: Callable[[], None]) -> float:
        own = run.__self__  # type: ignore[attr-defined]
        if run.__name__ == "forward":
            own.begin(device)
        took = timed(run, device) * 1e3
        own.end(device)
        return took

    times = interleaved_times(timed_calls, 1, warm=True, clock=clock)
    check(case, inputs, sent, calls, found, BOUNDS[dtype])
    again: dict[str, Callable[[], None]] = {}
    for name, call in calls.items():
        call.out, call.grads = None, ()
        own = [x for x in timed_calls if x.startswith(f"{name}: ")]
        if sum(times[x][0] for x in own) < LONG * 1e3:
            again |= {x: timed_calls[x] for x in own}
    times |= interleaved_times(again, rounds, seconds=seconds, warm=True, clock=clock)
    for name, call in calls.items():
        way, row = call.way, found[name]
        row |= {"plan_ms": way.plan_ms, "warm_plan_ms": way.warm_plan_ms}
        row |= {"plan_bytes": way.plan_bytes, "sampled": way.sampled}
        for kind in ("forward", "backward"):
            if f"{name}: {kind}" in times:
                scaled = [x * way.scale for x in times[f"{name}: {kind}"]]
                row[kind] = spread_of(scaled)
        row["bytes"] = call.peak if way.sampled == 1 else None
        if way.no_backward:
            row["refused_backward"] = way.no_backward
    return list(found.values())


def check(
    case: Case,
    inputs: list[Tensor],
    sent: Tensor,
    calls: dict[str, Calls],
    found: dict[str, Row],
    bound: float,
) -> None:
    """Writes the errors of the first round into the rows; RuntimeError for a wrong result."""
    keys = torch.linspace(0, case.tokens - 1, 16).long()
    result = calls[OURS].out
    by_key = exact_keys(case, inputs, sent, result, keys)
    for name, call in calls.items():
        rows = torch.arange(case.queries) if call.way.rows is None else call.way.rows
        places = torch.linspace(0, len(rows) - 1, 32).long().unique()
        out, lse, grad = exact_rows(case, inputs, sent, rows[places])
        first = call.out[0] if isinstance(call.out, tuple) else call.out
        got, right = [first.detach()[0, 0, places]], [out]
        if isinstance(call.out, tuple):
            got.append(call.out[1].detach()[0, 0, places])
            right.append(lse)
        found[name]["error"] = distance_of([x.cpu() for x in got], right)
        worst = found[name]["error"]
        if call.grads:
            got, right = [call.grads[0][0, 0, rows[places]]], [grad]
            if call.way.sampled == 1:
                got += [x[0, 0, keys] for x in call.grads[1:]]
                right += by_key
            found[name]["error_backward"] = distance_of([x.cpu() for x in got], right)
            worst = max(worst, found[name]["error_backward"])
        if not worst < bound:
            raise RuntimeError(f"{name} on {case.name} is wrong by {worst}")


def warm_up(device: torch.device) -> Iterator[str]:
    """Runs our calls on few tokens, so that kernels are compiled and loaded; yields names."""
    for case in cases_of(4096).values():
        heads, width, dtype = SHAPES[device.type]
        inputs = inputs_of(heads, case.tokens, width, dtype)
        inputs[0] = inputs[0][:, :, case.start :]
        leaves = [x.to(device).requires_grad_() for x in inputs]
        out = ours(case, leaves).forward(*leaves)[0]
        torch.autograd.grad(out.sum(), leaves)
        yield case.name


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="a power of two from 2,048 on")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the rounds of a mask")
    parser.add_argument("--masks", nargs="*", help="names, or their beginnings; default all")
    parser.add_argument("--libraries", nargs="*", choices=tuple(WAYS), default=tuple(WAYS))
    arguments = parser.parse_args()
    libraries = [OURS, *(x for x in arguments.libraries if x != OURS)]
    device = torch.device(arguments.device)
    for _ in warm_up(device):
        pass
    found: list[Row] = []
    for name, case in cases_of(arguments.tokens).items():
        if arguments.masks and not name.startswith(tuple(arguments.masks)):
            continue
        found += rows_of(case, device, arguments.rounds, arguments.seconds, libraries)
        name = "masks" if device.type == "cpu" else "masks-cuda"
        write_record(arguments.out, name, found)  # A run that is cut short keeps its masks.


if __name__ == "__main__":
    main()
