"""The lowest layer of the package: arguments, files, CUDA streams, numerics, dropout."""
