"""The compiled form of a pattern: passes of tiles, built at the cost of what the pattern visits.

In the order of a build: `cache` calls `compile`, which cuts axes into `tiles`, finds the pairs of
tiles by conditions and stores pairs of tiles that vary inside as `bitmaps`; it makes a `layout`.
`lower` gives the condition of a mask: `leaves` for its kind, `joints` of other conditions.
`selected_on_device` builds layouts of top-k selections on the device of the indices; `last_query`
and `gathered_keys` build those for decoding; `lifetimes` finds how long keys live; `drawing` draws
a layout.
"""
