"""``python -m benchmarks.gpu.card [--dry]``: a line of JSON about this machine's GPU.

Fails if no GPU computes. With ``--dry`` it describes the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import torch

from benchmarks.results import environment


def main() -> None:
    device = "cpu" if "--dry" in sys.argv[1:] else "cuda"
    torch.ones(1, device=device).sum().item()  # it exists and computes
    has_xdist = importlib.util.find_spec("xdist") is not None
    workers = min(15, (os.cpu_count() or 1) - 1) if has_xdist else 0
    print(json.dumps({"environment": environment(device), "workers": workers}))


if __name__ == "__main__":
    main()
