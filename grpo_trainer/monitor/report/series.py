"""A run's log as curves."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from grpo_trainer.monitor.report.record import History, RunRecord

_NOT_METRICS = ("step", "epoch", "total_flos")
_SUMMARY = "train_"  # what the row at the end of training has of its own begins so


class Curve(NamedTuple):
    """Values by optimizer step; None where a value is not finite."""

    steps: list[int]
    values: list[float | None]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if value is not None]


class Curves:
    """The curves of a run, by the names of metrics.

    Args:
        history: the rows that the trainer logged.
    """

    def __init__(self, history: History) -> None:
        self._curves: dict[str, Curve] = {}
        for row in history:
            for name, value in row.items():
                if name in _NOT_METRICS or name.startswith(_SUMMARY):
                    continue
                if isinstance(value, int | float | None):
                    curve = self._curves.setdefault(name, Curve([], []))
                    curve.steps.append(int(row.get("step", 0)))
                    curve.values.append(_finite(value))
        self._add("tokens_per_second", tokens_per_second(history))

    def __contains__(self, name: object) -> bool:
        return name in self._curves

    def __getitem__(self, name: str) -> Curve:
        return self._curves[name]

    @property
    def names(self) -> list[str]:
        return list(self._curves)

    @property
    def evaluations(self) -> list[str]:
        """The prefixes of evaluations: ``eval``, or one per evaluation dataset."""
        return [name.removesuffix("_reward") for name in self._curves if _is_eval_reward(name)]

    def starting(self, prefix: str, suffix: str = "") -> list[str]:
        return [n for n in self._curves if n.startswith(prefix) and n.endswith(suffix)]

    def _add(self, name: str, curve: Curve) -> None:
        if curve.steps:
            self._curves[name] = curve


def curves_of(run: RunRecord) -> Curves:
    return Curves(run.history)


def tokens_per_second(history: History) -> Curve:
    """Return prompt and completion tokens per second of training steps, between two logged rows."""
    curve = Curve([], [])
    before: dict[str, Any] = {"step": 0, "num_tokens": 0}
    for row in history:
        if (speed := token_rate(before, row)) is not None:
            curve.steps.append(row["step"])
            curve.values.append(speed)
        before = row if "num_tokens" in row else before
    return curve


def token_rate(before: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return the tokens per second between two rows; None where they do not say."""
    seconds = row.get("step_time", 0.0) * (row.get("step", 0) - before["step"])
    if "num_tokens" not in row or seconds <= 0:
        return None
    return (row["num_tokens"] - before["num_tokens"]) / seconds


def _is_eval_reward(name: str) -> bool:
    return name.startswith("eval_") and name.endswith("_reward") and "/" not in name


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
