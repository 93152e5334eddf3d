"""Tile sizes of the GPU path: ``python -m benchmarks.tune``."""
