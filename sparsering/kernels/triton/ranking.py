"""Triton kernels that rank blocks by their scores, and write the tables of selected blocks.

The tables equal those of `layouts.selected_on_device` and of walk.py, bit for bit. An entry is a
visited pair of tiles. A program computes ROWS consecutive query tiles (a run) of one table, in
arrays [ROWS, LANES] with a column (lane) for each entry that a query tile may have. Entries are
counted in bins: bin 2k has the entries of key tile k that need no mask, bin 2k + 1 the others.
"""

import triton
import triton.language as tl

from .device import kernel

_LAST = tl.constexpr((1 << 30) - 1)  # these three must equal the constants of selection/choose.py
_FORCED = tl.constexpr((1 << 61) + (1 << 30) - 1)
_NOT_CHOSEN = tl.constexpr(-(1 << 62))
LANE = tl.constexpr(256)  # an item of `lists` is key tile * LANE + lane of that key tile
_CHUNKS = tl.constexpr(32)  # number of runs whose counts are added up in one loop step
_TILES = tl.constexpr(128)  # number of tiles, units or bins that are computed in one loop step


@kernel
def rank_kernel(
    scores, chosen, outer: tl.int64, of_row: tl.int64, of_block: tl.int64, num_rows: tl.int32,
    num_blocks: tl.int32, k: tl.int32, sink: tl.int32, local: tl.int32, first_row: tl.int64,
    query_block: tl.int64, block_size: tl.int64,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BEST: tl.constexpr,
):
    """Writes the k best blocks of ROWS rows, in the order of `selection.select_blocks`."""
    runs = tl.cdiv(num_rows, ROWS)
    entry = (tl.program_id(0) // runs).to(tl.int64)
    row = (tl.program_id(0) % runs) * ROWS + tl.arange(0, ROWS)
    own = (first_row + row) * query_block // block_size
    last = tl.minimum(own, num_blocks - 1).to(tl.int32)[:, None]
    source = scores + entry * outer + row.to(tl.int64)[:, None] * of_row
    best = tl.full([ROWS, BEST], _NOT_CHOSEN, tl.int64)
    stop = tl.minimum(tl.max(last) + 1, num_blocks) if CAUSAL else num_blocks
    for begin in range(0, stop, BLOCKS):
        block = (begin + tl.arange(0, BLOCKS)[None, :]).to(tl.int64)
        seen = (row[:, None] < num_rows) & (block < num_blocks)
        if CAUSAL:
            seen = seen & (block <= last)
        score = tl.load(source + block * of_block, mask=seen, other=float("-inf"))
        bits = score.to(tl.float32).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        bits = tl.where(magnitude == 0, 0, bits)  # -0.0 ranks like 0.0
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # sorts like the floats
        below = (magnitude > 0x7F800000) | ((magnitude == 0x7F800000) & (bits < 0))  # NaN and -inf
        rank = tl.where(below, _NOT_CHOSEN, (ordered << 30) + (_LAST - block))
        forced = (block < sink) | ((block <= last) & (block > last - local))
        rank = tl.where(forced, _FORCED - block, rank)
        rank = tl.where(seen, rank, _NOT_CHOSEN)
        both = tl.join(best, tl.topk(rank, BEST))
        best = tl.topk(tl.reshape(both, [ROWS, 2 * BEST]), BEST)
    place = tl.arange(0, BEST)[None, :]
    to = chosen + (entry * num_rows + row[:, None]) * k + place
    found = tl.where(best == _NOT_CHOSEN, -1, _LAST - (best & _LAST))
    tl.store(to, found, mask=(row[:, None] < num_rows) & (place < k))


@triton.jit
def tile_at(tile, q_start, q_stop, tokens):
    """Returns a query tile's start (a multiple of `tokens`), its first query and its end."""
    begin = (q_start // tokens + tile) * tokens
    return begin, tl.maximum(begin, q_start), tl.minimum(begin + tokens, q_stop)


@triton.jit
def key_at(source, lane, real, own, parts, num_keys, CAUSAL: tl.constexpr):
    """Returns the key tile that a lane lists, or `num_keys` for none.

    CAUSAL excludes tiles after `own`, the tile's own key tile.
    """
    block = tl.load(source + lane // parts, mask=real, other=-1)
    listed = (block >= 0) & (block < num_keys)
    key = tl.where(listed, tl.minimum(block * parts + lane % parts, num_keys), num_keys)
    if CAUSAL:
        key = tl.where(key > own, num_keys, key)
    return key.to(tl.int32)


@kernel
def rows_kernel(
    indices, lists, counts, lengths, bins, query_start, query_stop, key_start, key_stop, bitmaps,
    turned, num_rows: tl.int64, slots: tl.int64, parts: tl.int32, tokens: tl.int32,
    row_size: tl.int32, first_row: tl.int32, q_start: tl.int32, q_stop: tl.int32,
    kv_len: tl.int32, num_tiles: tl.int32, num_keys: tl.int32, width: tl.int32,
    num_bitmaps: tl.int32,
    TILE: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    LENGTHS: tl.constexpr, BINS: tl.constexpr,
):
    """Lists the distinct visible key tiles of each query tile in order; counts them by bin.

    It also writes, for each run: `lengths`, how many query tiles have n entries, for each n; and
    `bins`, how many entries are in lower bins, for each bin. The programs of table 0 also write the
    bounds of tiles and the bitmaps.
    """
    chunks = tl.cdiv(num_tiles, ROWS)
    table, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    tile, lane = chunk * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    real = tile < num_tiles
    begin, first, stop = tile_at(tile, q_start, q_stop, tokens)
    own = first // TILE
    source = indices + (table * num_rows + begin // row_size - first_row) * slots
    inside = real[:, None] & (lane < width)
    key = key_at(source[:, None], lane, inside, own[:, None], parts, num_keys, CAUSAL)
    place = tl.zeros([ROWS, LANES], tl.int32)
    again = tl.zeros([ROWS, LANES], tl.int32)
    for i in range(0, width):
        other = key_at(source, i, real, own, parts, num_keys, CAUSAL)
        same = key == other[:, None]
        is_first = tl.sum((same & (lane < i)).to(tl.int32), 1) == 0
        place += ((is_first & (other < num_keys))[:, None] & (key > other[:, None])).to(tl.int32)
        again += (same & (lane > i)).to(tl.int32)
    kept = inside & (key < num_keys) & (again == 0)
    count = tl.sum(kept.to(tl.int32), 1)
    of_tile = table * num_tiles + tile
    tl.store(counts + of_tile, count, mask=real)
    tl.store(lists + of_tile[:, None] * width + place, key * LANE + lane, mask=kept)
    length = tl.arange(0, LENGTHS)[None, :]
    of_length = tl.sum(((count[:, None] == length) & real[:, None]).to(tl.int32), 0)
    of_chunk = table * chunks + chunk
    length = tl.arange(0, LENGTHS)
    tl.store(lengths + of_chunk * (width + 1) + length, of_length, mask=length <= width)

    masked = (stop - first < TILE)[:, None] | (lane < 0)
    if CAUSAL:
        masked = masked | (key == own[:, None])
    bin = tl.reshape(tl.where(kept, 2 * key + masked.to(tl.int32), -1), [ROWS * LANES])
    lower = 0
    for low in range(0, 2 * num_keys + 1, BINS):
        number = tl.arange(0, BINS)
        here = (bin >= low) & (bin < low + BINS)
        found = tl.histogram(tl.where(here, bin - low, 0), BINS, mask=here)
        to = bins + of_chunk * (2 * num_keys + 1) + low + number
        tl.store(to, lower + tl.cumsum(found) - found, mask=low + number <= 2 * num_keys)
        lower += tl.sum(found)

    if table == 0:
        tl.store(query_start + tile, (first - q_start).to(tl.int64), mask=real)
        tl.store(query_stop + tile, (stop - q_start).to(tl.int64), mask=real)
        for low in range(chunk * _TILES, num_keys, chunks * _TILES):
            number = low + tl.arange(0, _TILES)
            at, exists = number.to(tl.int64) * TILE, number < num_keys
            tl.store(key_start + number, at, mask=exists)
            tl.store(key_stop + number, tl.minimum(at + TILE, kv_len), mask=exists)
        LINE: tl.constexpr = TILE // 8
        for low in range(chunk * LANE, num_bitmaps * TILE * LINE, chunks * LANE):
            byte = low + tl.arange(0, LANE)
            number, line, at = byte // (TILE * LINE), byte // LINE % TILE, byte % LINE * 8
            offset = tl.where(number * tokens == TILE, q_start, number * tokens)
            if num_tiles <= TILE // tokens:
                offset = tl.maximum((q_start // tokens + number) * tokens, q_start)
            offset = offset % TILE
            seen = tl.minimum(tl.maximum(offset + line + 1 - at, 0), 8)
            unseen = tl.minimum(tl.maximum(line - offset - at, 0), 8)
            exists = byte < num_bitmaps * TILE * LINE
            tl.store(bitmaps + byte, ((1 << seen) - 1).to(tl.uint8), mask=exists)
            tl.store(turned + byte, (255 - ((1 << unseen) - 1)).to(tl.uint8), mask=exists)


@kernel
def place_kernel(
    lists, counts, lengths, bins, offsets, begins, spans, row_ptr, key_tile, bitmap, slot, units,
    start, count, entry, slots: tl.int64, parts: tl.int32, tokens: tl.int32, row_size: tl.int32,
    first_row: tl.int32, q_start: tl.int32, q_stop: tl.int32, kv_len: tl.int32,
    num_tiles: tl.int32, num_keys: tl.int32, width: tl.int32, tables: tl.int32,
    TILE: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Writes a pass's table and its work units by query tile.

    Further programs run `add_bins`. `begins` is the index of each bin's first entry when all
    entries are sorted by bin. `offsets` is what to add, for each run and bin, to an entry's index
    among the run's sorted entries to get its index among all of them. `spans` has, for each query
    tile, the index of its first entry and of its first entry that needs a mask; its last item is
    the number of entries.
    """
    chunks = tl.cdiv(num_tiles, ROWS)
    if tl.program_id(0) >= tables * chunks:
        program, blocks = tl.program_id(0) - tables * chunks, tl.cdiv(2 * num_keys + 1, _TILES)
        add_bins(bins, offsets, begins, (program // blocks).to(tl.int64), program % blocks * _TILES,
                 chunks, 2 * num_keys)
        return
    table, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    length = tl.arange(0, LENGTHS)[None, :]
    total = tl.zeros([LENGTHS], tl.int32)
    before = tl.zeros([LENGTHS], tl.int32)
    for low in range(0, chunks, _CHUNKS):
        other = (low + tl.arange(0, _CHUNKS))[:, None]
        inside = (other < chunks) & (length <= width)
        found = tl.load(lengths + (table * chunks + other) * (width + 1) + length, mask=inside,
                        other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(other < chunk, found, 0), 0)
    longer = tl.sum(total) - tl.cumsum(total)
    sizes = tl.arange(0, LENGTHS)
    num_real = tl.sum(total * sizes)

    tile, lane = chunk * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    real = tile < num_tiles
    size = tl.load(counts + table * num_tiles + tile, mask=real, other=0)
    end = tl.sum(before * sizes) + tl.cumsum(size)
    begin = end - size
    to = row_ptr + table * (num_tiles + 1) + tile
    tl.store(to + 1, end, mask=real)
    tl.store(to, begin, mask=tile == 0)
    row_begin, first, _ = tile_at(tile, q_start, q_stop, tokens)
    inside = real[:, None] & (lane < width)
    kept = inside & (lane < size[:, None])
    listed = tl.load(lists + (table * num_tiles + tile)[:, None] * width + lane, mask=kept, other=0)
    key = listed // LANE
    number = tl.full([ROWS, LANES], -1, tl.int32)
    if CAUSAL:
        apart = TILE // tokens
        kind = first % TILE // tokens
        kind = tl.where((q_start % tokens != 0) & (first == q_start), apart, kind)
        kind = tl.where(num_tiles <= apart, tile, kind)
        number = tl.where(kept & (key == (first // TILE)[:, None]), kind[:, None], -1)
    tokens_of_key = tl.minimum(kv_len - key * TILE, TILE)
    at = begin[:, None] + lane
    at = tl.where(kept, at, num_real + (tile * width - end)[:, None] + lane)  # padding at the end
    choice = (row_begin // row_size - first_row).to(tl.int64)[:, None] * slots
    choice = tl.where(kept, choice + listed % LANE // parts, -1)
    place = table * num_tiles * width + at
    tl.store(key_tile + place, key, mask=inside)
    tl.store(bitmap + place, number, mask=inside)
    tl.store(slot + place, choice, mask=inside)
    tl.store(start + place, key * TILE, mask=inside)
    tl.store(count + place, tokens_of_key, mask=inside)
    tl.store(entry + place, at, mask=inside)

    of_length = ((size[:, None] == length) & real[:, None]).to(tl.int32)
    earlier = tl.cumsum(of_length, 0) - of_length + (longer + before)[None, :]
    unit = tl.sum(earlier * of_length, 1)  # longest units first
    masked = (number >= 0) | (tokens_of_key < TILE)
    middle = end - tl.sum((kept & masked).to(tl.int32), 1)
    to = spans + table * (2 * num_tiles + 1) + 2 * tile
    tl.store(to, begin, mask=real)
    tl.store(to + 1, middle, mask=real)
    tl.store(to + 2, end, mask=tile == num_tiles - 1)
    to = units + (table * num_tiles + unit) * 5
    tl.store(to, tile, mask=real)
    tl.store(to + 1, begin, mask=real)
    tl.store(to + 2, middle, mask=real)
    tl.store(to + 3, end, mask=real)
    tl.store(to + 4, tl.full([ROWS], -1, tl.int32), mask=real)


@triton.jit
def add_bins(bins, offsets, begins, table, low, chunks, num_bins):
    """Adds up the entries per bin over all runs, so that each run knows where it writes.

    `keys_kernel` reads the results.
    """
    bin = (low + tl.arange(0, _TILES))[None, :]
    total = tl.zeros([_TILES], tl.int32)
    for first in range(0, chunks, _CHUNKS):
        chunk = (first + tl.arange(0, _CHUNKS))[:, None]
        inside = (chunk < chunks) & (bin <= num_bins)
        at = (table * chunks + chunk) * (num_bins + 1) + bin
        total += tl.sum(tl.load(bins + at, mask=inside, other=0), 0)
    number = low + tl.arange(0, _TILES)
    tl.store(begins + table * (num_bins + 1) + number, total, mask=number <= num_bins)
    for first in range(0, chunks, _CHUNKS):
        chunk = (first + tl.arange(0, _CHUNKS))[:, None]
        inside = (chunk < chunks) & (bin < num_bins)
        at = (table * chunks + chunk) * (num_bins + 1) + bin
        lower = tl.load(bins + at, mask=inside, other=0)
        found = tl.load(bins + at + 1, mask=inside, other=0) - lower
        tl.store(offsets + at, total[None, :] + tl.cumsum(found, 0) - found - lower, mask=inside)
        total += tl.sum(found, 0)


@kernel
def keys_kernel(
    counts, row_ptr, bitmap, key_tile, offsets, begins, start, count, key_bitmap, entry, units,
    unit_lengths, cuts, tokens: tl.int32, q_start: tl.int32, q_stop: tl.int32,
    num_tiles: tl.int32, num_keys: tl.int32, width: tl.int32, tables: tl.int32, limit: tl.int32,
    num_units: tl.int32, num_cuts: tl.int32,
    TILE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):
    """Writes entries by key tile, one program per run; one more per table writes the units."""
    chunks = tl.cdiv(num_tiles, ROWS)
    if tl.program_id(0) >= tables * chunks:
        table = (tl.program_id(0) - tables * chunks).to(tl.int64)
        write_units(begins + table * (2 * num_keys + 1), units + table * num_units * 5,
                    unit_lengths + table * num_units, cuts + table * num_cuts * 3, num_keys, limit,
                    num_units, num_cuts)
        return
    table, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    tile, lane = chunk * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)[None, :]
    real = tile < num_tiles
    row_ptr += table * (num_tiles + 1)
    size = tl.load(counts + table * num_tiles + tile, mask=real, other=0)
    begin = tl.load(row_ptr + tile, mask=real, other=0)
    _, first, stop = tile_at(tile, q_start, q_stop, tokens)
    inside = real[:, None] & (lane < width)
    kept = inside & (lane < size[:, None])
    of_table = table * num_tiles * width
    at = of_table + begin[:, None] + lane
    key = tl.load(key_tile + at, mask=kept, other=0)
    masked = (tl.load(bitmap + at, mask=kept, other=0) >= 0) | (stop - first < TILE)[:, None]

    _, last_first, last_stop = tile_at(num_tiles - 1, q_start, q_stop, tokens)
    at = tl.load(row_ptr + num_tiles) + (tile * width - begin - size)[:, None] + lane
    padding = inside & (lane >= size[:, None])
    nothing = tl.zeros([ROWS, LANES], tl.int32)
    tl.store(start + of_table + at, nothing + (last_first - q_start), mask=padding)
    tl.store(count + of_table + at, nothing + (last_stop - last_first), mask=padding)
    tl.store(key_bitmap + of_table + at, nothing - 1, mask=padding)
    tl.store(entry + of_table + at, at, mask=padding)

    NUMBER: tl.constexpr = ROWS * LANES
    bin = tl.where(kept, 2 * key + masked.to(tl.int32), 2 * num_keys)
    code = bin * NUMBER + tl.arange(0, ROWS)[:, None] * LANES + lane
    code = tl.sort(tl.reshape(code, [NUMBER]))
    bin, place = code // NUMBER, code % NUMBER
    kept_ = bin < 2 * num_keys
    tile_ = chunk * ROWS + place // LANES
    _, first_, stop_ = tile_at(tile_, q_start, q_stop, tokens)
    at_ = tl.load(row_ptr + tile_, mask=kept_, other=0) + place % LANES
    of_chunk = (table * chunks + chunk) * (2 * num_keys + 1)
    to = tl.load(offsets + of_chunk + bin, mask=kept_, other=0) + tl.arange(0, NUMBER) + of_table
    number = tl.load(bitmap + of_table + at_, mask=kept_, other=0)
    tl.store(start + to, first_ - q_start, mask=kept_)
    tl.store(count + to, stop_ - first_, mask=kept_)
    tl.store(key_bitmap + to, number, mask=kept_)
    tl.store(entry + to, at_, mask=kept_)


@kernel
def units_kernel(
    spans, units, unit_lengths, cuts, num_tiles: tl.int32, limit: tl.int32, num_units: tl.int32,
    num_cuts: tl.int32,
):
    """Writes the work units of query tiles, and cuts long ones; one program per table."""
    table = tl.program_id(0).to(tl.int64)
    write_units(spans + table * (2 * num_tiles + 1), units + table * num_units * 5,
                unit_lengths + table * num_units, cuts + table * num_cuts * 3, num_tiles, limit,
                num_units, num_cuts)


@triton.jit
def write_units(begins, units, unit_lengths, cuts, num_keys, limit, num_units, num_cuts):
    """Writes a table's work units, the longest first, and the tiles that are cut into several.

    `begins` has two numbers per tile, like `spans` of `place_kernel`; walk.py describes units and
    `cuts`.
    """
    for low in range(0, num_units, 64):
        unit = low + tl.arange(0, 64)
        tile, lower, middle, upper, slot, length = unit_of(begins, unit, num_keys, limit)
        tl.store(unit_lengths + unit, length, mask=unit < num_units)
    tl.debug_barrier()  # other threads of this program read the lengths
    for low in range(0, num_units, 64):
        unit = low + tl.arange(0, 64)
        tile, lower, middle, upper, slot, length = unit_of(begins, unit, num_keys, limit)
        place = tl.zeros([64], tl.int32)
        for first in range(0, num_units, _TILES):
            other = (first + tl.arange(0, _TILES))[None, :]
            its = tl.load(unit_lengths + other, mask=other < num_units, other=-2)
            before = (its > length[:, None]) | ((its == length[:, None]) & (other < unit[:, None]))
            place += tl.sum(before.to(tl.int32), 1)
        exists = unit < num_units
        tl.store(units + place * 5, tile, mask=exists)
        tl.store(units + place * 5 + 1, lower, mask=exists)
        tl.store(units + place * 5 + 2, middle, mask=exists)
        tl.store(units + place * 5 + 3, upper, mask=exists)
        tl.store(units + place * 5 + 4, slot, mask=exists)
    found, slots = 0, 0
    for low in range(0, num_keys, _TILES):
        tile = low + tl.arange(0, _TILES)
        pieces = pieces_of(begins, tile, num_keys, limit)
        cut = (pieces > 1).to(tl.int32)
        own = pieces * cut
        to = cuts + (found + tl.cumsum(cut) - cut) * 3
        tl.store(to, tile, mask=cut > 0)
        tl.store(to + 1, slots + tl.cumsum(own) - own, mask=cut > 0)
        tl.store(to + 2, pieces, mask=cut > 0)
        found += tl.sum(cut)
        slots += tl.sum(own)
    for low in range(3 * found, 3 * num_cuts, _TILES):
        place = low + tl.arange(0, _TILES)
        tl.store(cuts + place, tl.full([_TILES], -1, tl.int32), mask=place < 3 * num_cuts)


@triton.jit
def pieces_of(begins, tile, num_keys, limit):
    """Returns the number of pieces of each tile: 1 if it is not cut, 0 past the last tile."""
    exists = tile < num_keys
    begin = tl.load(begins + 2 * tile, mask=exists, other=0)
    end = tl.load(begins + 2 * tile + 2, mask=exists, other=0)
    return tl.where(exists, tl.maximum((end - begin + limit - 1) // limit, 1), 0)


@triton.jit
def unit_of(begins, unit, num_keys, limit):
    """Returns (tile, first entry, first masked entry, end, slot, length) of units.

    walk.py explains them.
    """
    tile, before, slot = unit * 0, unit * 0, unit * 0
    seen = 0
    for low in range(0, num_keys, _TILES):
        number = low + tl.arange(0, _TILES)
        pieces = pieces_of(begins, number, num_keys, limit)
        past = (seen + tl.cumsum(pieces))[None, :] <= unit[:, None]
        past = (past & (number < num_keys)[None, :]).to(tl.int32)
        tile += tl.sum(past, 1)
        before += tl.sum(past * pieces[None, :], 1)
        slot += tl.sum(past * tl.where(pieces > 1, pieces, 0)[None, :], 1)
        seen += tl.sum(pieces)
    real = tile < num_keys
    at = tl.minimum(tile, num_keys - 1)
    pieces = pieces_of(begins, at, num_keys, limit)
    before -= tl.where(real, 0, pieces)
    slot -= tl.where(real | (pieces == 1), 0, pieces)
    begin, masked, end = (tl.load(begins + 2 * at), tl.load(begins + 2 * at + 1),
                          tl.load(begins + 2 * at + 2))
    size, piece = (end - begin).to(tl.int64), unit - before
    lower = (begin + size * piece // pieces).to(tl.int32)
    upper = (begin + size * (piece + 1) // pieces).to(tl.int32)
    middle = tl.minimum(tl.maximum(masked, lower), upper)
    slot = tl.where(pieces > 1, slot + piece, -1)
    length = tl.where(real, upper - lower, -1)
    return tl.where(real, tile, -1), lower, middle, upper, slot, length
