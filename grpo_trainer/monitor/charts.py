"""The table of metrics: their labels, which share a chart, and which values are a warning sign."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Metrics on one axis. Metrics that a run has not logged are left out."""

    title: str
    lines: dict[str, str]  # metric -> label in the legend
    note: str = ""  # how to read it, one sentence
    label: str = ""  # of the first logged line, in the live view; empty: not shown
    tiles: dict[str, str] = field(default_factory=dict)  # metric -> label at the top of a report
    band: Sequence[str] = ()  # metrics below and above the first line
    spread: str | None = None  # metric with the distance from the first line, both ways
    total: str | None = None  # metric that the stacked lines add up to, or that replaces them
    log: bool = False  # logarithmic axis
    held_out: bool = False  # evaluations are drawn as dots
    folds: bool = True  # hidden if nothing changes
    exact: bool = False  # the values have no noise to smooth
    # a warning sign in the first logged line; charts.yaml describes its fields
    sign: Mapping[str, Any] | None = None

    def metrics(self) -> list[str]:
        """Return all metrics in the chart."""
        return [*self.lines, *self.band, *([self.spread] if self.spread else [])]

    def first(self, logged: Container[str]) -> str | None:
        """Return the first line that is ``logged``."""
        return next((name for name in self.lines if name in logged), None)


_TABLE = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text())
CHARTS = {section: [Chart(**fields) for fields in charts] for section, charts in _TABLE.items()}
EVERY_CHART = [chart for charts in CHARTS.values() for chart in charts]

# metrics that the trainer logs but no chart has, including transformers' metrics
_NOT_DRAWN = (
    "entropy_top", "epoch", "num_input_tokens_seen", "num_tokens", "step", "step_time",
    "total_flos", "weight_update_bytes",
)  # fmt: skip
# prefixes of families of metrics, which a run or a loss may extend
_FAMILIES = (
    "backward_", "clip_ratio/", "completions/", "dynamic_sampling/", "entropy/", "eval_",
    "micro_batches/", "profiling/", "ratio/", "rewards/", "sampling/", "tools/", "train_", "vespo/",
)  # fmt: skip
_OWN = {*_NOT_DRAWN, *(name for chart in EVERY_CHART for name in chart.metrics())} - {
    "tokens_per_second"  # the report computes it
}


WITHOUT_SIGNAL = "frac_reward_zero_std"
REWARD_PREFIX = "rewards/"
_MEAN = "/mean"  # the end of the names of single functions' rewards


def nothing_to_learn(shares: Sequence[float], logged: Container[str]) -> bool:
    """Return whether all groups of a run had equal rewards, and there was no teacher.

    Args:
        shares: the logged shares of groups without signal.
        logged: the metrics of the run.
    """
    return bool(shares) and min(shares) == 1 and "teacher_kl" not in logged


def is_own_metric(name: str) -> bool:
    """Return whether the trainer has a metric of this name, or with this prefix."""
    return name in _OWN or name.startswith(_FAMILIES)


def numbers_of(logs: dict[str, float]) -> dict[str, str]:
    """Return the metrics that charts have labels for; rewards of several functions follow their
    sum."""
    numbers: dict[str, str] = {}
    for chart in EVERY_CHART:
        name = chart.first(logs)
        if not chart.label or name is None:
            continue
        numbers[chart.label] = f"{logs[name]:.3g}"
        if name == "reward":
            if "reward_std" in logs:
                numbers["reward"] += f" \u00b1 {logs['reward_std']:.2g}"
            means = [n for n in logs if n.startswith(REWARD_PREFIX) and n.endswith(_MEAN)]
            if len(means) > 1:
                numbers |= {n.removesuffix(_MEAN): f"{logs[n]:.3g}" for n in means}
    return numbers
