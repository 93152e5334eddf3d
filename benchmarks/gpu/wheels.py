"""Installs carried wheels into a folder of their own, without a network."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.job import Finished, Job
from benchmarks.gpu.log import Log
from benchmarks.gpu.parts import Outcome

_PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
_OPTIONS = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]


def install_wheels(
    wheels: Sequence[Path], target: Path, limit: float, log: Log, environment: Mapping[str, str]
) -> Outcome:
    """All in one command; where that fails, all that pip would take by themselves.

    Not one by one: a second command into the same folder replaces packages that share a name
    space with the first's.
    """
    if not wheels:
        return Outcome(state="ok", note="there are none: peers run only if they are installed here")
    end = time.monotonic() + limit
    into = [*_OPTIONS, "--target", str(target)]

    def pip(options: Sequence[str], chosen: Sequence[Path]) -> Finished:
        command = [*_PIP, *options, *map(str, chosen)]
        with Job(command, environment, log.keep) as job:
            return job.wait(end - time.monotonic())

    finished = pip(into, wheels)
    if finished.state == "ok":
        return Outcome(state="ok", note=f"{len(wheels)} installed")
    bad: dict[Path, str] = {}
    for wheel in wheels:
        alone = pip([*_OPTIONS, "--dry-run"], [wheel])
        if alone.state != "ok":
            bad[wheel] = alone.last_line
    good = [wheel for wheel in wheels if wheel not in bad]
    if good and bad:
        finished = pip(into, good)
    lines = [f"{wheel.name}: {reason}" for wheel, reason in bad.items()]
    if good and finished.state == "ok":
        return Outcome(state="failed", note=f"{len(good)} installed, {len(bad)} not", lines=lines)
    return Outcome(state=finished.state, note=f"none installed: {finished.last_line}", lines=lines)
