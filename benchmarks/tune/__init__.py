"""Tile sizes of the GPU path, and speeds of the schedules: ``python -m benchmarks.tune``."""
