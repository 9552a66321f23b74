"""Measures every GPU claim of the project: `python -m benchmarks.gpu --out DIR`.

`parts` lists the measurements in order. `running` runs them in separate processes and writes the
record. `device` has all that differs between a GPU and a rehearsal in Triton's interpreter.
"""
