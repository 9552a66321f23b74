"""Random attacks on the library, against oracles that share no code with it; `make fuzz` runs them.

`calls` attacks `attention`, `caches` KVCache, `selections` blocks chosen by content, `rings`
`simulate_ring`, `hostile` every public name with bad values. Each draws cases by hypothesis: a case
checks itself and prints itself as a short script. `attack` draws where the table of what was
covered is emptiest. The same seed draws the same cases.
"""
