"""``python -m benchmarks.gpu.part NAME``: one part of the job, in this process."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.plan import PARTS, Part


def run(part: Part, notes: Notes, small: bool) -> str:
    """Run a part, which adds to the notes; return its summary, a line."""
    if part.needs_gpu and notes.device.type != "cuda":
        return f"{part.name} needs a GPU"
    module, _, name = part.function.partition(":")
    getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(notes, small)
    return notes.summary()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part", description=__doc__)
    parser.add_argument("name", choices=[part.name for part in PARTS if part.function])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, required=True, help="for which cases are begun")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    end = time.monotonic() + asked.seconds
    notes = Notes(part=asked.name, out=asked.out, device=device, end=end)
    try:
        print(run(next(x for x in PARTS if x.name == asked.name), notes, asked.small))
    except KeyboardInterrupt:
        print(f"interrupted: {notes.summary()}")
        return 1
    return 1 if notes.failed else 0


if __name__ == "__main__":
    sys.exit(main())
