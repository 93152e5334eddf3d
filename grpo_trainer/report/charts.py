"""A run's log as curves and charts, and warning signs in them.

The page's code draws the charts, and has their styles, light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from grpo_trainer.monitor import (
    CHARTS,
    EVERY_CHART,
    REWARD_PREFIX,
    WITHOUT_SIGNAL,
    Chart,
    History,
    nothing_to_learn,
    token_rate,
)

_NOT_METRICS = ("step", "epoch", "total_flos")
_SUMMARY = "train_"  # the prefix of metrics that only the last row of training has
# drawn elsewhere under another name, or covered by another curve
_NOT_DRAWN = {"num_tokens", "reward_std", "step_time"}
_FAMILIES = ("eval_", REWARD_PREFIX, "clip_ratio/", "completions/")
_LEARNED = 0.95  # share of the way from the first reward to the best at which all is learned
_OTHERS = "Other metrics"
_BINS = 24  # of the histograms

Curve = dict[int, float | None]  # by optimizer step; None if a value is not finite
Curves = dict[str, Curve]  # by the names of metrics
Figure = dict[str, Any]
Card = tuple[str, str, Figure]  # title, note, figure


def curves_of(history: History) -> Curves:
    """Return the curves of the logged metrics, and the curve of tokens per second."""
    curves: Curves = {}
    speeds: Curve = {}
    before: dict[str, Any] = {"step": 0, "num_tokens": 0}
    for row in history:
        step = int(row.get("step", 0))
        for name, value in row.items():
            if name in _NOT_METRICS or name.startswith(_SUMMARY):
                continue
            if isinstance(value, int | float | None):
                number = math.nan if value is None else float(value)
                curves.setdefault(name, {})[step] = number if math.isfinite(number) else None
        if (speed := token_rate(before, row)) is not None:
            speeds[step] = speed
        before = row if "num_tokens" in row else before
    return curves | ({"tokens_per_second": speeds} if speeds else {})


def finite(curves: Curves, name: str) -> list[float]:
    """Return the finite values of a curve; empty if there is no curve."""
    return [value for value in curves.get(name, {}).values() if value is not None]


def findings(curves: Curves, best: float | None = None) -> dict[str, str]:
    """Return the warning signs, most serious first, each with its meaning and remedies.

    Args:
        curves: of the run.
        best: the highest reward of any completion; None: unknown.
    """
    signs: dict[str, str] = {}
    not_finite = [
        (name, step)
        for name in ("loss", "grad_norm")
        for step, value in curves.get(name, {}).items()
        if value is None
    ]
    if not_finite:
        name, step = not_finite[0]
        signs["Numbers are no longer finite"] = (
            f"{name} is NaN or infinite at step {step}. Results after it are meaningless. Lower "
            "the learning rate, set max_grad_norm, and check the rewards."
        )
    learned = False
    if best is not None and (rewards := _ends(curves, "reward")):
        rise = rewards[1] - rewards[0]
        learned = rise > 0 and rise >= _LEARNED * (best - rewards[0])
    if equal := nothing_to_learn(finite(curves, WITHOUT_SIGNAL), curves):
        signs["Every group had equal rewards"] = _equal_rewards(curves)
    for chart in EVERY_CHART:
        sign, metric = chart.sign, chart.first(curves)
        ends = _ends(curves, metric) if sign and metric else None
        if not sign or not ends or (learned and sign.get("ends_well")):
            continue
        if metric == WITHOUT_SIGNAL and equal:  # already reported
            continue
        first, last = ends
        most = max(sign.get("above", math.inf), sign.get("growth", 0.0) * first)
        if last > most or last < sign.get("fall", 0.0) * first:
            signs[sign["title"]] = sign["text"].format(metric=metric, first=first, last=last)
    return signs


def _equal_rewards(curves: Curves) -> str:
    """Return the text for a run in which no group had two different rewards."""
    rewards = set(finite(curves, "reward"))
    which = "In each group, all completions got the same reward"
    if len(rewards) == 1 and not any(finite(curves, "reward_std")):
        which = f"Every completion got the reward {rewards.pop():.3g}"
    return (
        f"{which}, so nothing was learned. If no completion can score higher, the policy was "
        "right from the start and needs harder prompts. Otherwise the prompts are too hard, the "
        "reward is too coarse, or the reward checks the wrong thing: if prompts are messages, a "
        "completion is a list of messages, and grpo_trainer.rewards.text_of returns its text."
    )


def _ends(curves: Curves, name: str) -> tuple[float, float] | None:
    """Return the means of the first and the last fifth; None if a curve is too short for a
    trend."""
    values = finite(curves, name)
    part = len(values) // 5
    return (sum(values[:part]) / part, sum(values[-part:]) / part) if part else None


def cards_of(
    runs: Mapping[str, Curves],
) -> dict[str, tuple[list[Card], dict[str, dict[str, float]]]]:
    """Return the charts of each section, and the values of flat charts by their titles.

    Metrics without a chart come last. With several runs, each reward function has its own chart.
    """
    several = len(runs) > 1
    names = list(dict.fromkeys(name for curves in runs.values() for name in curves))
    reward, *learning = CHARTS["Learning"]
    table = CHARTS | {"Learning": [reward, *_by_function(names, apart=several), *learning]}
    sections = {
        section: [chart for chart in charts if chart.first(names)]
        for section, charts in table.items()
    }
    drawn = {name for charts in sections.values() for chart in charts for name in chart.metrics()}
    sections[_OTHERS] += [
        Chart(title=name, lines={name: name})
        for name in sorted(set(names) - drawn - _NOT_DRAWN)
        if not name.startswith(_FAMILIES)
    ]
    cards = {}
    for section, charts in sections.items():
        flat = {chart.title: _constants(chart, runs.values()) for chart in charts}
        moving = [
            # notes describe bands and evaluations, which only the page of a single run has
            (chart.title, "" if several else chart.note, _figure(chart, runs))
            for chart in charts
            if flat[chart.title] is None
        ]
        if charts:
            cards[section] = (moving, {title: values for title, values in flat.items() if values})
    return cards


def _by_function(names: list[str], apart: bool) -> list[Chart]:
    """Return charts of each function's rewards, if there are several functions."""
    lines = {
        name: name.removeprefix(REWARD_PREFIX).removesuffix("/mean")
        for name in names
        if name.startswith(REWARD_PREFIX) and name.endswith("/mean")
    }
    if len(lines) < 2:
        return []
    if apart:
        return [Chart(title=label, lines={name: label}) for name, label in lines.items()]
    return [Chart(title="Reward by function", lines=lines, note="Means, before weighting.")]


def _constants(chart: Chart, runs: Iterable[Curves]) -> dict[str, float] | None:
    """Return the value of each line if no run ever changes any of them, else None.

    A chart with evaluations is never flat; neither is a single point, or a chart that does not
    fold.
    """
    runs = list(runs)
    if not chart.folds:
        return None
    if chart.held_out and any(_evaluations(curves) for curves in runs):
        return None
    constant: dict[str, float] = {}
    for name in chart.metrics():
        drawn = [curves[name] for curves in runs if name in curves]
        values = {value for curve in drawn for value in curve.values()}
        if len(values) > 1 or None in values or any(len(curve) == 1 for curve in drawn):
            return None
        if name in chart.lines and values:
            constant[chart.lines[name]] = values.pop() or 0.0
    return constant


def _figure(chart: Chart, runs: Mapping[str, Curves]) -> Figure:
    """Return the chart of one run, or the first line of each of several runs."""
    band: list[Curve] = []
    dots: dict[str, Curve] = {}
    if len(runs) > 1:
        firsts = {run: chart.total or chart.first(curves) or "" for run, curves in runs.items()}
        lines = {run: curves.get(firsts[run], {}) for run, curves in runs.items()}
    else:
        [curves] = runs.values()
        lines = {label: curves[name] for name, label in chart.lines.items() if name in curves}
        band = _band(chart, curves)
        if chart.held_out:
            metric = next(iter(chart.lines))
            names = {prefix: f"{prefix}_{metric}" for prefix in _evaluations(curves)}
            dots = {prefix: curves[name] for prefix, name in names.items() if name in curves}
    return {
        "band": [_points("", curve) for curve in band],
        "lines": [_points(name, curve) for name, curve in lines.items()],
        "dots": [_points(prefix, curve) for prefix, curve in dots.items()],
        "stacked": chart.total is not None and len(runs) == 1,
        "smooth": not chart.exact,
        "log": chart.log,
    }


def _points(name: str, curve: Curve) -> tuple[str, list[int], list[float | None]]:
    return html.escape(name, quote=False), list(curve), list(curve.values())  # plotly reads tags


def _band(chart: Chart, curves: Curves) -> list[Curve]:
    """Return the curves below and above the first line, if there are any."""
    if chart.spread in curves:
        middle, spread = curves[next(iter(chart.lines))], curves[chart.spread]
        both = {
            step: (value, spread[step] or 0.0) for step, value in middle.items() if step in spread
        }
        return [
            {step: value + sign * wide for step, (value, wide) in both.items() if value is not None}
            for sign in (-1, 1)
        ]
    edges = [curves[name] for name in chart.band if name in curves]
    return edges if len(edges) == 2 else []


def _evaluations(curves: Curves) -> list[str]:
    """Return the prefixes of evaluations: ``eval``, or one per evaluation dataset."""
    return [
        name.removesuffix("_reward")
        for name in curves
        if name.startswith("eval_") and name.endswith("_reward") and "/" not in name
    ]


def histogram_figure(rewards: Mapping[int, list[float]]) -> Figure | None:
    """Draw the distribution of each step's rewards: one column per step, darker means more."""
    if not rewards:
        return None
    edges = numpy.histogram_bin_edges(numpy.concatenate([*rewards.values()]), _BINS)
    columns = [numpy.histogram(values, edges)[0] / len(values) for values in rewards.values()]
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    return {"heat": {"x": list(rewards), "y": middles, "z": numpy.transpose(columns).tolist()}}
