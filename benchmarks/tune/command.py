"""``python -m benchmarks.tune``: sweeps the tile sizes on this GPU and rewrites their table.

The measurements go to ``tune/<device>.json`` in the folder that the variable OUT names, by default
``benchmarks/results``; ``--table-from FILE`` writes the table from such a file, on any machine.
The exit code is 1 where an entry is missing, and 2 where there is no GPU to tune for.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import slug
from benchmarks.tune import table
from benchmarks.tune.contest import Trial
from benchmarks.tune.sweep import Entry, facts, measure, settings, sweep, updated

RESULTS = Path(__file__).parent.parent / "results"
_LIMIT = 420.0  # seconds after which no further entry is begun


def main() -> int:
    start, arguments = time.monotonic(), _parser().parse_args()
    if arguments.table_from is not None:
        data = json.loads(arguments.table_from.read_text())
        return finish(data, arguments.dry_run)
    if not torch.cuda.is_available():
        print(f"no GPU to tune for: torch {torch.__version__} finds none")
        return 2
    data = {**facts(), "entries": []}
    path = arguments.out / "tune" / f"{slug(data['environment']['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for entry in sweep(settings(), *measure(), start + (arguments.limit or _LIMIT)):
        data["entries"].append(asdict(entry))
        path.write_text(json.dumps(data, indent=1) + "\n")  # whole after each, if it is stopped
    print(f"measurements: {path}")
    return finish(data, arguments.dry_run)


def finish(data: dict[str, Any], dry_run: bool) -> int:
    """Write the table from the measurements; return the exit code."""
    entries = [load_entry(entry) for entry in data["entries"]]
    new = updated(table.read(), data, entries)
    if dry_run:
        print(new.text(), end="")
    else:
        new.write()
        print(f"written: {table.PATH}")
    missing = [entry for entry in entries if entry.skipped]
    if missing:
        print(f"{len(missing)} of {len(entries)} entries are missing: the defaults serve")
    return 1 if missing else 0


def load_entry(data: dict[str, Any]) -> Entry:
    trials = [Trial(**{**trial, "value": tuple(trial["value"])}) for trial in data["trials"]]
    return Entry(**{**data, "trials": trials})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = Path(os.environ.get("OUT") or RESULTS)
    parser.add_argument("--out", type=Path, default=out, help="folder for the measurements")
    parser.add_argument("--dry-run", action="store_true", help="print the table, do not write it")
    parser.add_argument("--table-from", type=Path, metavar="FILE", help="measurements to use")
    parser.add_argument("--limit", type=float, help=f"seconds of measuring [{_LIMIT:.0f}]")
    return parser
