"""Benchmarks of the library against its peers; they write the records and the report.

    python -m benchmarks bench --out benchmarks/records    # the comparisons, one record each
    python -m benchmarks report --out runs/report          # the tables and their page

`measure` is the common harness: interleaved timing, errors against float64, peak memory, records.
`comparisons` and `tables` define the measurements, `report` draws a page of the tables.
`selection`, `gpu` and the other files are separate commands.
"""
