"""The result file: raw data, written again after every table so that a kill loses little."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.check import reference_dtype
from benchmarks.environment import commit, environment, slug
from benchmarks.row import Row
from benchmarks.shapes import Case

# a list of numbers, which JSON with an indent spreads over as many lines
_NUMBERS = re.compile(r"\[(?:\s+(?:-?\d[-+.\de]*|-?Infinity|NaN),?)+\s+\]")


class Collector:
    """One run's file, ``<folder>/<device>/<date>-<commit>.json``."""

    def __init__(self, folder: Path, device: str) -> None:
        self._data: dict[str, Any] = {
            "environment": environment(device),
            "tables": [],
            "training": [],
            "accuracy": [],
            "savings": [],
            "rollouts": [],
            "tests": None,
        }
        self.path = _unused(folder, self._data["environment"])

    def add_table(self, case: Case, rows: list[Row]) -> None:
        self._data["tables"].append(table(case, rows, self._data["environment"]["kind"]))
        self._write()

    def add_training(self, entry: dict[str, Any]) -> None:
        self._data["training"].append(entry)
        self._write()

    def add_accuracy(self, entry: dict[str, Any]) -> None:
        self._data["accuracy"].append(entry)
        self._write()

    def add_savings(self, entry: dict[str, Any]) -> None:
        self._data["savings"].append(entry)
        self._write()

    def add_rollouts(self, entry: dict[str, Any]) -> None:
        self._data["rollouts"].append(entry)
        self._write()

    def add_tests(self, outcome: dict[str, Any]) -> None:
        self._data["tests"] = outcome
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(_NUMBERS.sub(_in_a_line, json.dumps(self._data, indent=1)) + "\n")
        partial.replace(self.path)


def table(case: Case, rows: list[Row], device: str) -> dict[str, Any]:
    """A case and its rows as plain data."""
    return {
        "work": case.work.name,
        "model": case.model.name,
        "tokens": case.tokens,
        "sequences": case.sequences,
        "hidden": case.model.hidden,
        "vocabulary": case.model.vocabulary,
        "softcap": case.model.softcap,
        "dtype": case.dtype,
        "reference": str(reference_dtype(case, device)).removeprefix("torch."),
        "rows": [asdict(row) for row in rows],
    }


def _in_a_line(numbers: re.Match[str]) -> str:
    return f"[{' '.join(numbers[0][1:-1].split())}]"


def _unused(folder: Path, facts: dict[str, Any]) -> Path:
    """A name that no earlier run has."""
    name = f"{facts['date'][:10]}-{commit()[:12]}"
    base = folder / slug(facts["device"])
    path, count = base / f"{name}.json", 1
    while path.exists():
        count += 1
        path = base / f"{name}-{count}.json"
    return path
