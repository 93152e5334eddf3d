"""``python -m benchmarks.tune``; see command.py."""

from __future__ import annotations

import importlib.util
import sys


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        print(f"no GPU to tune for: torch is not installed for {sys.executable}")
        return 2
    from benchmarks.tune.command import main as run  # imports torch

    return run()


if __name__ == "__main__":
    sys.exit(main())
