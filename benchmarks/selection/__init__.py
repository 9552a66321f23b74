"""Proof that choosing blocks by content learns: small tasks that no other selection solves.

    python -m benchmarks.selection.run --out benchmarks/records --jobs 2
    python -m benchmarks.selection.run --only flagged --seeds 0 --quick

`tasks` makes the data, `models` the networks, each experiment is a file (`flagged`, `recall`,
`language`, `captured`, `refine`, `embedding`), `run` calls them and writes a record for each, with
its bars and whether they were met; `pictures` draws from the records. Every figure is of a model
with the library's sparse operator in its forward pass, densities are read from layouts.
"""
