"""Draws patterns, losses and the traffic of ranks, and returns the bytes of an image file.

Path("pattern.svg").write_bytes(pattern_image(LongNet((1024, 4096), (1, 4)), 1 << 20, kind="svg"))

Drawing needs matplotlib (the extra `plots`); without it, it raises ImportError.
"""
