"""The one command for a GPU machine: ``python -m benchmarks.gpu``. It imports no torch itself."""
