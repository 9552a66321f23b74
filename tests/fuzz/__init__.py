"""Random tests of the library against oracles that share no code with it; `make fuzz` runs them.

`calls` tests `attention`, `caches` KVCache and SelectedCache, `selections` blocks selected by
content, `rings` `simulate_ring`, `hostile` every public name with bad values. `trees` and `long`
draw calls with trees and with thousands of tokens on some threads, `ways` calls in threads, forked
processes and batches of gradients, `layouts` tables of two compilers, `models` models of
transformers, `ranks` the same models shared by processes, `derivatives` tangents, second and mixed
derivatives of calls. Hypothesis draws the cases; a case checks
itself, and a script of three lines runs it again. `attack` draws the combinations that were tested
least so far. The same seed draws the same cases.
"""
