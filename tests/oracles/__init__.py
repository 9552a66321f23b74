"""Results by definition, in code that shares none with the library, and the patterns to test.

`attention_oracle`, `blocks_oracle`, `extras_oracle`, `patterns_oracle`, `ring_oracle` and
`torchscale_oracle` compute what tests expect. `kinds` has a row for each kind of pattern, which
the other modules read. `drawings` has matrices drawn by hand. `strategies` draws patterns and
shapes for hypothesis; `every_pattern` lists one pattern of each constructor.
"""
