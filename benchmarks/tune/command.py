"""``python -m benchmarks.tune``: sweeps the tile sizes on this GPU and rewrites their table.

With ``--schedules``, on a GPU or a CPU, it measures one_pass beside two_pass instead, fits the
speeds by which the library chooses, and rewrites their table.

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
from benchmarks.tune import rates, schedules, table
from benchmarks.tune.contest import Trial
from benchmarks.tune.sweep import Entry, facts, measure, settings, sweep, updated

RESULTS = Path(__file__).parent.parent / "results"
_LIMIT = 420.0  # seconds after which no further entry is begun
_LIMIT_OF_SCHEDULES = 330.0


def main() -> int:
    start, arguments = time.monotonic(), _parser().parse_args()
    if arguments.schedules:
        return _tune_schedules(start, arguments)
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


def _tune_schedules(start: float, arguments: argparse.Namespace) -> int:
    if arguments.table_from is not None:
        return finish_schedules(json.loads(arguments.table_from.read_text()), arguments.dry_run)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data: dict[str, Any] = {**schedules.facts(device), "samples": []}
    name = f"{slug(data['environment']['device'])}-schedules.json"
    path = arguments.out / "tune" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for sample in schedules.run(device, start + (arguments.limit or _LIMIT_OF_SCHEDULES)):
        data["samples"].append(sample)
        path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"measurements: {path}")
    return finish_schedules(data, arguments.dry_run)


def finish_schedules(data: dict[str, Any], dry_run: bool) -> int:
    """The speeds from measurements."""
    new, verdict = schedules.fitted(rates.read(), data)
    if dry_run:
        print(new.text(), end="")
    else:
        new.write()
        print(f"written: {rates.PATH}")
    print(verdict)
    return 0


def finish(data: dict[str, Any], dry_run: bool) -> int:
    """The table from measurements."""
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
    limits = f"seconds of measuring [{_LIMIT:.0f}; --schedules: {_LIMIT_OF_SCHEDULES:.0f}]"
    parser.add_argument("--limit", type=float, help=limits)
    parser.add_argument(
        "--schedules", action="store_true", help="the speeds of one_pass and two_pass"
    )
    return parser
