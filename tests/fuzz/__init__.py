"""Random tests of the library against oracles that share no code with it; `make fuzz` runs them.

`calls` tests `attention`, `caches` KVCache and SelectedCache, `selections` blocks selected by
content, `rings` `simulate_ring`, `hostile` every public name with bad values. Hypothesis draws the
cases; a case checks itself, and a script of three lines runs it again. `attack` draws the
combinations that were tested least so far. The same seed draws the same cases.
"""
