"""What GPU kernels should take, from their machine code: `python -m benchmarks.forecast`."""
