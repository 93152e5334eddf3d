"""A run's log as curves, and known signs in them that it is unwell, said in plain words."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from grpo_trainer.monitor import EVERY_CHART, History, token_rate

_NOT_METRICS = ("step", "epoch", "total_flos")
_SUMMARY = "train_"  # what the row at the end of training has of its own begins so
_FEWEST_POINTS = 5  # a trend needs so many
_LEARNED = 0.95  # share of the way from the first reward to the best one: then all is learned

Curve = dict[int, float | None]  # by optimizer step; None where a value is not finite
Curves = dict[str, Curve]  # by the names of metrics


def curves_of(history: History) -> Curves:
    """Return the curves of what the trainer logged, and that of the tokens per second."""
    curves: Curves = {}
    speeds: Curve = {}
    before: dict[str, Any] = {"step": 0, "num_tokens": 0}
    for row in history:
        step = int(row.get("step", 0))
        for name, value in row.items():
            if name in _NOT_METRICS or name.startswith(_SUMMARY):
                continue
            if isinstance(value, int | float | None):
                curves.setdefault(name, {})[step] = _finite(value)
        if (speed := token_rate(before, row)) is not None:
            speeds[step] = speed
        before = row if "num_tokens" in row else before
    return curves | ({"tokens_per_second": speeds} if speeds else {})


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def finite(curves: Curves, name: str) -> list[float]:
    """Return the values of a curve that are finite, none where there is no curve."""
    return [value for value in curves.get(name, {}).values() if value is not None]


def evaluations(curves: Curves) -> list[str]:
    """Return the prefixes of evaluations: ``eval``, or one per evaluation dataset."""
    return [
        name.removesuffix("_reward")
        for name in curves
        if name.startswith("eval_") and name.endswith("_reward") and "/" not in name
    ]


class Finding(NamedTuple):
    """A sign, what it means and what helps."""

    title: str
    text: str


def findings(curves: Curves, best: float | None = None) -> list[Finding]:
    """Find the signs of what is wrong, the gravest first.

    Args:
        curves: of the run.
        best: the highest reward of any completion; None: not known.
    """
    signs = _not_finite(curves)
    learned = _all_learned(curves, best)
    for chart in EVERY_CHART:
        sign, metric = chart.sign, chart.first(curves)
        if sign is None or metric is None or (sign.ends_well and learned):
            continue
        values = finite(curves, metric)
        if len(values) < _FEWEST_POINTS:
            continue
        first, last = _ends(values)
        if last > max(sign.above, sign.growth * first) or last < sign.fall * first:
            text = sign.text.format(metric=metric, first=first, last=last)
            signs.append(Finding(sign.title, text))
    return signs


def _all_learned(curves: Curves, best: float | None) -> bool:
    rewards = finite(curves, "reward")
    if best is None or len(rewards) < _FEWEST_POINTS:
        return False
    first, last = _ends(rewards)
    return last - first >= _LEARNED * (best - first)


def _ends(values: list[float]) -> tuple[float, float]:
    """Return the means of the first and the last fifth."""
    part = len(values) // 5
    return sum(values[:part]) / part, sum(values[-part:]) / part


def _not_finite(curves: Curves) -> list[Finding]:
    for name in ("loss", "grad_norm"):
        for step, value in curves.get(name, {}).items():
            if value is None:
                text = (
                    f"{name} is NaN or infinite at step {step}. A lower learning rate, "
                    "max_grad_norm and a look at the rewards help; what comes after that step is "
                    "worth nothing."
                )
                return [Finding("Numbers are no longer finite", text)]
    return []
