"""``python -m benchmarks.tune``: sweeps the tile sizes on this GPU and rewrites their table.

The measurements go to ``tune/<device>.json`` in the folder that the variable OUT names, by default
``benchmarks/results``; ``--table-from FILE`` writes the table from such a file, on any machine.
The exit code is 1 where an entry is missing, and 2 where there is no GPU to tune for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment, slug
from benchmarks.measure import device_is_lost
from benchmarks.results import RESULTS
from benchmarks.timing import make_timer
from benchmarks.tune import table
from benchmarks.tune.contest import Trial
from benchmarks.tune.sweep import Entry, gpu_candidates, settings, sweep, updated
from grpo_kernels.backends.configs.rows import device_class

_LIMIT = 420.0  # seconds after which no further entry is begun


def main() -> int:
    end = time.monotonic() + _LIMIT
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--table-from", type=Path, metavar="FILE", help="measurements to use")
    if path := parser.parse_args().table_from:
        return write_table(json.loads(path.read_text()))
    if not torch.cuda.is_available():
        print(f"no GPU to tune for: torch {torch.__version__} finds none")
        return 2
    data: dict[str, Any] = {
        "device_class": device_class(torch.device("cuda", torch.cuda.current_device())),
        "environment": environment("cuda"),
        "entries": [],
    }
    folder = Path(os.environ.get("OUT") or RESULTS) / "tune"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(data['environment']['device'])}.json"
    timer, lost = make_timer("cuda"), lambda: device_is_lost("cuda")
    for entry in sweep(settings(), gpu_candidates, timer, lost, end):
        data["entries"].append(asdict(entry))
        path.write_text(json.dumps(data, indent=1) + "\n")  # whole after each, if it is stopped
    print(f"measurements: {path}")
    return write_table(data)


def write_table(data: dict[str, Any]) -> int:
    """Write the table from the measurements; return the exit code."""
    entries = [_entry(**entry) for entry in data["entries"]]
    table.write(updated(table.read(), data, entries))
    print(f"written: {table.PATH}")
    missing = sum(entry.skipped is not None for entry in entries)
    if missing:
        print(f"{missing} of {len(entries)} entries are missing: the defaults serve")
    return 1 if missing else 0


def _entry(key: list[Any], trials: list[dict[str, Any]], **rest: Any) -> Entry:
    """Return an entry as it was, with tuples that JSON made lists."""
    was = [Trial(**{**trial, "value": tuple(trial["value"])}) for trial in trials]
    return Entry(key=tuple(key), trials=was, **rest)


if __name__ == "__main__":
    sys.exit(main())
