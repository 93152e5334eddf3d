"""The table of metrics: how each is called, which are drawn together, when they are a bad sign."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Metrics over one axis. Those that a run has not logged are left out."""

    title: str
    lines: dict[str, str]  # metric -> how it is called in the legend
    note: str = ""  # how to read it, one sentence
    label: str = ""  # of the first line that a run has, in its view; empty: not there
    tiles: dict[str, str] = field(default_factory=dict)  # metric -> label at a report's head
    band: Sequence[str] = ()  # metrics below and above the first line
    spread: str | None = None  # metric that is a distance from the first line, both ways
    total: str | None = None  # metric that the lines, stacked, add up to, or that stands for them
    log: bool = False  # logarithmic axis
    held_out: bool = False  # evaluations are drawn as dots
    folds: bool = True  # away where nothing moves
    exact: bool = False  # the values have no noise to smooth
    # of ill health in the first of the lines that a run has; charts.yaml says what it has
    sign: Mapping[str, Any] | None = None

    def metrics(self) -> list[str]:
        """Return every metric that it draws."""
        return [*self.lines, *self.band, *([self.spread] if self.spread else [])]

    def first(self, logged: Container[str]) -> str | None:
        """Return the first of the lines that is ``logged``."""
        return next((name for name in self.lines if name in logged), None)


_TABLE = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text())
CHARTS = {section: [Chart(**fields) for fields in charts] for section, charts in _TABLE.items()}
EVERY_CHART = [chart for charts in CHARTS.values() for chart in charts]

# what the trainer logs beside the metrics of charts, transformers' part included
_NOT_DRAWN = (
    "entropy_top", "epoch", "num_input_tokens_seen", "num_tokens", "step", "step_time",
    "total_flos", "weight_update_bytes",
)  # fmt: skip
# of whole families, which a run or a loss may add to
_FAMILIES = (
    "backward_", "clip_ratio/", "completions/", "dynamic_sampling/", "entropy/", "eval_",
    "micro_batches/", "profiling/", "ratio/", "rewards/", "sampling/", "tools/", "train_", "vespo/",
)  # fmt: skip
_OWN = {*_NOT_DRAWN, *(name for chart in EVERY_CHART for name in chart.metrics())} - {
    "tokens_per_second"  # the report computes it
}


WITHOUT_SIGNAL = "frac_reward_zero_std"
REWARD_PREFIX = "rewards/"
_MEAN = "/mean"  # how the names of rewards of single functions end


def nothing_to_learn(shares: Sequence[float], logged: Container[str]) -> bool:
    """Return whether all groups of a run had equal rewards, and no teacher taught it.

    Args:
        shares: of the groups without signal, whenever they were logged.
        logged: the metrics of the run.
    """
    return bool(shares) and min(shares) == 1 and "teacher_kl" not in logged


def is_own_metric(name: str) -> bool:
    """Return whether the trainer gives this name, or one that begins so, to a metric of its own."""
    return name in _OWN or name.startswith(_FAMILIES)


def numbers_of(logs: dict[str, float]) -> dict[str, str]:
    """Return what charts have a label for; rewards of several functions stand behind their sum."""
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
