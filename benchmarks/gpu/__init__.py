"""Everything that is claimed of a GPU, measured: `python -m benchmarks.gpu --out DIR`.

`parts` lists what is measured, in order; `running` runs it in processes of its own and keeps the
record; `device` is where a GPU differs from the interpreter that tries all of this out without one.
"""
