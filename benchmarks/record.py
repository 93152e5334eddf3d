"""Results as JSON, with what is needed to repeat them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Row
from benchmarks.shapes import Shape

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Machine, versions and commit."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--", "grpo_kernels", "csrc", "setup.py")),
        "device": _cpu_model(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "trl", "liger-kernel")},
    }


def record(rows: list[Row], shape: Shape, dtype: str, work: str) -> dict[str, Any]:
    """One table as plain data."""
    return {
        "work": work,
        "dtype": dtype,
        "shape": asdict(shape),
        "environment": environment(),
        "rows": [_row(row, rows) for row in rows],
    }


def save(data: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes ``<work>-<shape>-<dtype>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{data['work']}-{data['shape']['name']}-{data['dtype']}.json"
    path.write_text(json.dumps(data, indent=2) + "\n")
    return path


def _row(row: Row, rows: list[Row]) -> dict[str, Any]:
    others = {other.provider.name: other for other in rows}
    floor, ours = others.get("floor"), others.get("ours")
    return {
        "provider": row.provider.name,
        "note": row.provider.note,
        "absent": row.absent,
        "failure": row.check.failure,
        "errors": {key: value for key, value in asdict(row.check).items() if key != "failure"},
        "seconds": row.seconds,
        "median": row.median,
        "minimum": row.minimum,
        "maximum": max(row.seconds, default=None),
        "to_floor": _ratio(row.median, floor and floor.median),
        "minimum_to_floor": _ratio(row.minimum, floor and floor.minimum),
        "to_ours": _ratio(row.median, ours and ours.median),
        "memory": {**asdict(row.memory), "extra": row.memory.extra} if row.memory else None,
    }


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent.parent
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return None
    return run.stdout.strip()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
