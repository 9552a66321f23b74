"""Layouts: patterns compiled to lists of the (query tile, key tile) pairs that kernels visit.

`cache` calls `compile`, which cuts positions into `tiles`, finds the visited pairs of tiles by
conditions, stores a bitmap (`bitmaps`) for each pair of tiles in which only some positions attend,
and returns a `layout`. `lower` converts a mask to one of the conditions in `leaves` and `joints`.
`selected_on_device` builds layouts of top-k selections, `last_query` and `gathered_keys` build
layouts for decoding. `lifetimes` computes how long keys live; `drawing` draws a layout.
"""
