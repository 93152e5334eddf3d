"""``python -m benchmarks.gpu [JOB ...]``: jobs for a GPU, as many as fit into the time.

A job with a result of these sources on this card is left out unless you name it. Exit status: 0 if
all chosen jobs ended well, 1 if one failed, was ended, or had no time, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.gpu import record
from benchmarks.gpu.jobs import choose
from benchmarks.gpu.runner import NoGPUError, make_runner

_LIMIT = 285.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="default: all jobs, in order")
    parser.add_argument("--out", type=Path, help="folder for results; default: $OUT")
    parser.add_argument("--limit", type=float, help="seconds; default: $LIMIT")
    parser.add_argument("--status", action="store_true", help="list the jobs and their results")
    parser.add_argument("--dry", action="store_true", help="run tiny shapes on a CPU")
    arguments = parser.parse_args(argv)
    try:
        jobs = choose(arguments.jobs)
        limit = float(arguments.limit or os.environ.get("LIMIT") or _LIMIT)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    usual = record.ROOT / ("build/gpu-dry" if arguments.dry else "benchmarks/results")
    out = (arguments.out or Path(os.environ.get("OUT") or usual)).resolve()
    if arguments.status:
        print(_written(record.status(jobs, record.read(out))))
        return 0
    try:
        runner = make_runner(out, limit, arguments.dry)
    except NoGPUError as error:
        print(error)
        return 2
    return runner.run(jobs, again=bool(arguments.jobs))


def _written(table: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
