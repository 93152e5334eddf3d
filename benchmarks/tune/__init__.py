"""Sweeps the tile sizes of the GPU path: ``python -m benchmarks.tune``."""
