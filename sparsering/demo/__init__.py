"""Demos that train, measure and report, run by `sparsering demo` and `sparsering demo-ring`."""
