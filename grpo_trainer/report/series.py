"""A run's log as curves."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from grpo_trainer.monitor import token_rate
from grpo_trainer.report.record import History

_NOT_METRICS = ("step", "epoch", "total_flos")
_SUMMARY = "train_"  # what the row at the end of training has of its own begins so


class Curve(NamedTuple):
    """Values by optimizer step; None where a value is not finite."""

    steps: list[int]
    values: list[float | None]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if value is not None]


Curves = dict[str, Curve]  # by the names of metrics


def curves_of(history: History) -> Curves:
    """Return the curves of what the trainer logged."""
    curves: Curves = {}
    for row in history:
        for name, value in row.items():
            if name in _NOT_METRICS or name.startswith(_SUMMARY):
                continue
            if isinstance(value, int | float | None):
                curve = curves.setdefault(name, Curve([], []))
                curve.steps.append(int(row.get("step", 0)))
                curve.values.append(_finite(value))
    speed = tokens_per_second(history)
    return curves | ({"tokens_per_second": speed} if speed.steps else {})


def evaluations(curves: Curves) -> list[str]:
    """Return the prefixes of evaluations: ``eval``, or one per evaluation dataset."""
    return [
        name.removesuffix("_reward")
        for name in curves
        if name.startswith("eval_") and name.endswith("_reward") and "/" not in name
    ]


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


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
