"""The compiled form of a pattern: passes of tiles, built at the cost of what the pattern visits.

In the order of a build: `cache` asks `compile`, which cuts axes into `tiles`, finds the pairs of
tiles by `conditions` and stores what varies inside them as `bitmaps`; the result is a `layout`.
`selected_on_device` builds those of top-k selections where the indices are; `drawing` shows one.
"""
