"""Measures the library beside its peers; the records and the report come from here.

    python -m benchmarks bench --out benchmarks/records    # the comparisons, one record each
    python -m benchmarks report --out runs/report          # the tables and their page

`measure` is the harness of all files: calls that take turns, errors against float64, peaks of
memory, records. `comparisons` and `tables` say what is measured, `report` draws the page of the
tables. `selection`, `gpu` and the other files are commands of their own.
"""
