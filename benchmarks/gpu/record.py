"""A record of every run of a job: how it ended, on which card, and with which sources.

Result files have the measurements; this record shows whether they still apply to the kernels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.jobs import Job

ROOT = Path(__file__).parents[2]
FILE = "gpu-jobs.jsonl"
KERNELS = ("grpo_kernels/**/*.py",)
Line = dict[str, Any]


class Standing(NamedTuple):
    """The result of a job on a card."""

    result: str  # "current", "stale" or "none"
    line: Line | None = None  # its newest run

    @property
    def done(self) -> bool:
        """Whether the newest run has these sources and found nothing wrong."""
        return self.result == "current" and self.line is not None and self.line["state"] == "ok"


def fingerprint(job: Job, root: Path = ROOT) -> str:
    """Return a hash of the sources that determine a job's result."""
    paths = {path for each in (*KERNELS, *job.sources) for path in root.glob(each)}
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def read(out: Path) -> list[Line]:
    """Return all lines, the oldest first."""
    path = out / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(out: Path, line: Line) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / FILE).open("a") as file:
        file.write(f"{json.dumps(line)}\n")


def standing(job: Job, lines: Iterable[Line], device: str) -> Standing:
    """Return the result of a job on one kind of card."""
    found = [line for line in lines if (line["job"], line["device"]) == (job.name, device)]
    if not found:
        return Standing("none")
    current = found[-1]["sources"] == fingerprint(job)
    return Standing("current" if current else "stale", found[-1])


def status(jobs: Sequence[Job], lines: Sequence[Line]) -> list[list[str]]:
    """Return a table with a line for each job and each card that ran it."""
    table = [["job", "result", "card", "date", "decides"]]
    for job in jobs:
        cards = dict.fromkeys(line["device"] for line in lines if line["job"] == job.name)
        for device in cards or [""]:
            found = standing(job, lines, device)
            result, line = found.result, found.line or {"date": "", "state": "ok"}
            if line["state"] != "ok":
                result += f", {line['state']}"
            table.append([job.name, result, device, line["date"][:10], job.decides])
    return table
