"""Declares a mask as intervals of keys for each query, for kernels that take masks in this form.

`endpoints(pattern, frame, most)` evaluates the conditions of `lower` on tiles of one token. A query
has few intervals in windows, documents, chunks, prefixes, paths of trees in depth-first order and
tables of few blocks, and in `&`, `|` and `-` of these. Dilated masks have one interval per key.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..ground.rows import expand_counts
from ..patterns import blocks, positions
from ..patterns.algebra import And, Frame, Mask, Not, Or, Pattern, check_fits, parts_of
from ..patterns.keys import KeyMask
from ..patterns.selected import SelectedBlocks
from ..patterns.tree import Tree
from .documents import Ground, ground_of, laid_in_documents
from .lower import condition
from .tiles import Grid, Origin, Spans

_QUERIES = 1 << 12  # queries whose intervals are listed at a time, to bound memory
_MOST_RUNS = 256  # runs of keys in a key mask, each of which every query is compared with
_KINDS: frozenset[type] = frozenset(
    (
        *(And, Or, Not, KeyMask, Tree),
        *(positions.Full, positions.Causal, positions.PooledCausal, positions.SlidingWindow),
        *(positions.GlobalTokens, positions.Dilated, positions.Documents, positions.Packed),
        *(blocks.BlockDilated, blocks.BlockWindow, blocks.BlockCausal, blocks.CausalBlocks),
        *(blocks.BlockDiffusion, blocks.Hierarchical, blocks.Blocks, blocks._RandomBlocksOfHead),
    )
)
"""Masks whose conditions list the keys of a query as intervals (`Condition.attending`)."""


def endpoints(pattern: Pattern, frame: Frame, most: int) -> Tensor | str:
    """Lists the keys of each query as [0, F0), [F1, F2), [F3, F4), ...: the endpoints F.

    Args:
        pattern: a pattern; its tensors are read on the CPU.
        frame: lengths and heads of a call.
        most: most intervals of a query.

    Returns: int32 [B or 1, H or 1, odd number of endpoints, Nq], ascending, on the CPU. Unused
        intervals are empty; F0 is 0 if a query does not see the first key. Or a text that says why
        the pattern has no such form.

    Raises: ValueError for a pattern of other lengths or heads.

    Cost: time and memory in proportion to the intervals of all queries, for each distinct mask.
    """
    check_fits(pattern, frame)
    if len(pattern.branches) > 1:
        return "a mixture counts some pairs twice"
    if any(isinstance(part, SelectedBlocks) for part in parts_of(pattern)):
        return "SelectedBlocks lists blocks, and others in each call"
    (mask,) = pattern.branches
    ground = ground_of(pattern, frame, 1, None, None)
    mask = laid_in_documents(mask) if ground.in_document else mask
    written: dict[Mask, Tensor] = {}
    tables = mask.num_tables(frame)
    heads, batches = (frame.num_heads if tables > 1 else 1), mask.num_batches()
    rows = [
        [mask.at(batch, head, frame) for head in range(heads)]
        for batch in range(1 if batches is None else batches)
    ]
    for own in dict.fromkeys(own for row in rows for own in row):
        if text := _misfit(own):
            return text
        parts = []
        for part in _intervals(own, ground):
            if len(part[0]) and (number := int(torch.bincount(part[0]).max())) > most:
                return f"a query sees {number} intervals of keys, more than {most}"
            parts.append(part)
        query, begin, end = map(torch.cat, zip(*parts, strict=True))
        written[own] = _written(query, begin, end, frame.q_len)
    width = max((len(table) for table in written.values()), default=1)
    shape = len(rows), heads, width, frame.q_len
    found = torch.empty(shape, dtype=torch.int32)
    for batch, row in enumerate(rows):
        for head, own in enumerate(row):
            table = written[own]
            found[batch, head, : len(table)] = table
            found[batch, head, len(table) :] = table[-1]
    return found


def _misfit(mask: Mask) -> str:
    """Returns why a mask of one head lists no intervals, or "" if it does."""
    for part in parts_of(mask):
        if type(part) not in _KINDS:
            return f"{type(part).__name__.strip('_')} declares no intervals of keys"
        strided = isinstance(part, positions.SlidingWindow) and part.dilation > 1
        if strided or (isinstance(part, positions.Dilated) and part.dilation_rate > 1):
            return f"the keys of {type(part).__name__} have a distance from each other"
        if isinstance(part, KeyMask) and (runs := int(part.valid.diff().sum()) // 2) > _MOST_RUNS:
            return f"KeyMask allows {runs} runs of keys or more, {_MOST_RUNS} is the most"
    return ""


def _intervals(mask: Mask, ground: Ground) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields (query, first key, exclusive end) of a mask's intervals, for some queries at a time.

    Queries ascend, and intervals of a query ascend and do not touch; all are indices in tensors.
    """
    none = torch.zeros(0, dtype=torch.int64)
    yield none, none, none
    rule = condition(mask, ground.frame, ground.in_document)
    grid = Grid(1, 1)
    queries, keys = ground.queries(grid, 1, 0), ground.keys(grid, 0)
    if not len(keys):
        return
    origin = ground.origin(queries)
    for some in torch.arange(len(queries)).split(_QUERIES):
        spans = rule.attending(queries[some], keys, Origin(*(x[some] for x in origin)))
        row, first, stop = _by_row(spans, len(keys))
        yield some[row], first, stop


def _by_row(spans: Spans, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts spans where a row ends: returns (row, first column, exclusive end) of each piece."""
    first, last = spans.begin // columns, (spans.end - 1) // columns
    span, number = expand_counts(last - first + 1)
    row = first[span] + number
    begin, end = spans.begin[span] - row * columns, spans.end[span] - row * columns
    return row, begin.clamp(min=0), end.clamp(max=columns)


def _written(row: Tensor, first: Tensor, stop: Tensor, rows: int) -> Tensor:
    """Writes intervals, as `_intervals` yields them, as endpoints int32 [odd number, rows]."""
    count = torch.bincount(row, minlength=rows)
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    later = torch.ones(rows, dtype=torch.int64)  # 0 where a row's first interval begins at key 0
    later[row[first == 0]] = 0
    slot = place + later[row]
    last = torch.zeros(rows, dtype=torch.int64).scatter_reduce(0, row, stop, "amax")
    width = 1 + (int(slot.max()) if len(slot) else 0)
    table = last.int().repeat(2 * width, 1)  # unused intervals are empty, after all others
    table[:2, later > 0] = 0
    table[2 * slot, row], table[2 * slot + 1, row] = first.int(), stop.int()
    return table[1:]
