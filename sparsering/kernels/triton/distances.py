"""The gradient of a distance bias: sums of dS along the diagonals of tiles, in a fixed order.

In each step, `query_kernel` writes a *line*: for each distance, the sum of dS over the step's pairs
that are this far apart. `sum_diagonals_kernel` adds up all lines.
"""

import triton
import triton.language as tl

from .device import kernel


@triton.jit
def store_diagonals(
    diagonals, ends, start, line, there, dscore, first, step, reach,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):
    """Writes one line (sums of dS by distance) for each head among a program's rows.

    Args:
        diagonals: [lines, TURNS * KEYS] sums of dscore [ROWS, KEYS] by distance, for distances
            between -reach and reach.
        ends: [lines, 2] sum over distances up to -reach, and sum over distances from reach on.
        start: [lines] int32 distance of the line's first sum; neighbours are `step` apart.
        line, there: index of each head's line, and whether that head exists.
        first: distance of the first key of dscore from its first query.
    """
    TURNS: tl.constexpr = (KEYS + TOKENS - 2) // KEYS + 1
    column = tl.arange(0, KEYS)
    shifted = (tl.arange(0, ROWS) % TOKENS)[:, None] + column[None, :]
    turned = tl.gather(dscore, shifted % KEYS, 1)  # now each diagonal is a part of a column
    low = tl.zeros([ROWS // TOKENS], tl.float32)
    high = tl.zeros([ROWS // TOKENS], tl.float32)
    first -= (TURNS - 1) * KEYS * step.to(tl.int32)
    tl.store(start + line, first, mask=there)
    for turn in tl.static_range(TURNS):
        part = tl.where(shifted // KEYS == TURNS - 1 - turn, turned, 0.0)
        sums = tl.sum(tl.reshape(part, [ROWS // TOKENS, TOKENS, KEYS]), 1)
        distance = (first + (turn * KEYS + column) * step.to(tl.int32))[None, :]
        low += tl.sum(tl.where(distance <= -reach, sums, 0.0), 1)
        high += tl.sum(tl.where((distance >= reach) & (distance > -reach), sums, 0.0), 1)
        place = line[:, None] * (TURNS * KEYS) + turn * KEYS + column[None, :]
        inside = (distance > -reach) & (distance < reach)
        tl.store(diagonals + place, sums, mask=there[:, None] & inside)
    tl.store(ends + line * 2, low, mask=there)
    tl.store(ends + line * 2 + 1, high, mask=there)


@kernel
def sum_diagonals_kernel(
    diagonals, diagonal_start, grad, num_lines: tl.int64, split_lines: tl.int64, step: tl.int32,
    reach: tl.int32, splits: tl.int32,
    SPAN: tl.constexpr, LINES: tl.constexpr, DISTANCES: tl.constexpr,
):
    """Adds up lines by distance: writes grad [heads, splits, 2 reach + 1] from `diagonals`.

    `diagonals` [heads, lines, SPAN] has the lines of `store_diagonals`. A split is a range of
    lines. The caller adds up the splits, and adds the `ends` of all lines.
    """
    program = tl.program_id(0).to(tl.int64)
    split, blocks = program % splits, (2 * reach + DISTANCES) // DISTANCES
    block = (program // splits % blocks).to(tl.int32)
    head = program // splits // blocks
    distance = block * DISTANCES - reach + tl.arange(0, DISTANCES)
    inside = (distance > -reach) & (distance < reach)
    total = tl.zeros([DISTANCES], tl.float32)
    last = tl.minimum((split + 1) * split_lines, num_lines)
    for first in range(split * split_lines, last, LINES):
        line = first + tl.arange(0, LINES)
        real = line < last
        line += head * num_lines
        begin = tl.load(diagonal_start + line, mask=real, other=1 << 30)
        meets = begin < block * DISTANCES - reach + DISTANCES
        meets &= begin + SPAN * step > block * DISTANCES - reach
        if tl.sum(meets.to(tl.int32)) > 0:
            along = distance[None, :] - begin[:, None]
            number = along // step
            found = (along >= 0) & (number < SPAN) & (number * step == along)
            found &= meets[:, None] & inside[None, :]
            place = (line * SPAN)[:, None] + number
            total += tl.sum(tl.load(diagonals + place, mask=found, other=0.0), 0)
    to = (head * splits + split) * (2 * reach + 1) + block * DISTANCES + tl.arange(0, DISTANCES)
    tl.store(grad + to, total, mask=distance <= reach)
