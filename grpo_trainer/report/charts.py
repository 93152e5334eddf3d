"""Charts as plotly.js draws them. Colours are numbers here; the page knows them, light and dark."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy

from grpo_trainer.monitor import CHARTS, REWARD_PREFIX, Chart
from grpo_trainer.report.curves import Curve, Curves, evaluations

_BINS = 24  # of the histograms
# drawn elsewhere under another name, or said by another curve
_NOT_DRAWN = {"num_tokens", "reward_std", "step_time"}
_FAMILIES = ("eval_", REWARD_PREFIX, "clip_ratio/", "completions/")

Trace = dict[str, Any]
Figure = dict[str, Any]  # "data": its traces, "log": whether the axis is logarithmic


def sections(curves: Curves, apart: bool = False) -> dict[str, Sequence[Chart]]:
    """Return all charts that ``curves`` has something for, by the titles of their sections.

    What nobody knows comes last. With ``apart`` each reward function has a chart of its own.
    """
    reward, *learning = CHARTS["Learning"]
    charts = CHARTS | {"Learning": [reward, *_by_function(curves, apart), *learning]}
    shown = {title: [one for one in each if one.first(curves)] for title, each in charts.items()}
    drawn = {name for each in shown.values() for chart in each for name in chart.metrics()}
    others = sorted(curves.keys() - drawn - _NOT_DRAWN)
    shown["Other metrics"] = [
        Chart(title=name, lines={name: name}) for name in others if not name.startswith(_FAMILIES)
    ]
    return {title: charts for title, charts in shown.items() if charts}


def constants(chart: Chart, runs: Collection[Curves]) -> dict[str, float] | None:
    """Return the value of each line where no run ever moves any of them, else None.

    A chart with evaluations is never flat, nor is a single point.
    """
    if chart.held_out and any(evaluations(curves) for curves in runs):
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


def figure_of(chart: Chart, runs: Mapping[str, Curves]) -> Figure:
    """Return the chart for one run, or the first line of several runs over one another."""
    smooth = not chart.exact
    if len(runs) == 1:
        [curves] = runs.values()
        traces = [*_band(chart, curves), *_lines(chart, curves), *_evaluations(chart, curves)]
    else:
        traces = [
            _trace(curves[name], run, showlegend=True, meta={"color": color, "smooth": smooth})
            for color, (run, curves) in enumerate(runs.items())
            if (name := chart.total or chart.first(curves) or "") in curves
        ]
    return {"data": traces, "log": chart.log}


def histogram_figure(rewards: Mapping[int, list[float]]) -> Figure | None:
    """Draw how the rewards of each step are distributed: a column each, darker where more are."""
    if not rewards:
        return None
    edges = numpy.histogram_bin_edges(numpy.concatenate([*rewards.values()]), _BINS)
    columns = [numpy.histogram(values, edges)[0] / len(values) for values in rewards.values()]
    heat = {
        "type": "heatmap",
        "x": list(rewards),
        "y": ((edges[:-1] + edges[1:]) / 2).tolist(),
        "z": numpy.transpose(columns).tolist(),
        "hovertemplate": "step %{x}<br>reward %{y:.3g}<br>%{z:.0%}<extra></extra>",
        "colorbar": {"tickformat": ".0%", "thickness": 10},
        "meta": {"heat": True},
    }
    return {"data": [heat], "log": False}


def _by_function(curves: Curves, apart: bool) -> list[Chart]:
    """Return the rewards of each function, where there are several."""
    names = [name for name in curves if name.startswith(REWARD_PREFIX) and name.endswith("/mean")]
    if len(names) < 2:
        return []
    lines = {name: name.removeprefix(REWARD_PREFIX).removesuffix("/mean") for name in names}
    if apart:
        return [Chart(title=label, lines={name: label}) for name, label in lines.items()]
    return [Chart(title="Reward by function", lines=lines, note="Means, before their weights.")]


def _lines(chart: Chart, curves: Curves) -> Iterator[Trace]:
    present = {name: label for name, label in chart.lines.items() if name in curves}
    for color, (name, label) in enumerate(present.items()):
        look: Trace = {"meta": {"color": color, "smooth": not chart.exact}}
        if chart.total:
            look = {"meta": {"color": color, "area": True}, "stackgroup": "one"}
        yield _trace(curves[name], label, showlegend=len(present) > 1, **look)


def _band(chart: Chart, curves: Curves) -> list[Trace]:
    edges = [curves[name] for name in chart.band if name in curves]
    if chart.spread in curves:
        middle, spread = curves[next(iter(chart.lines))], curves[chart.spread]
        both = [
            (step, value, spread[step] or 0.0)
            for step, value in middle.items()
            if value is not None and step in spread
        ]
        edges = [{step: value + sign * wide for step, value, wide in both} for sign in (-1, 1)]
    if len(edges) < 2:
        return []
    hidden: Trace = {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    low, high = edges
    return [
        _trace(low, meta={"color": 0}, **hidden),
        _trace(high, meta={"color": 0, "band": True}, fill="tonexty", **hidden),
    ]


def _evaluations(chart: Chart, curves: Curves) -> list[Trace]:
    """Return dots for the first line's metric on held-out prompts."""
    metric = next(iter(chart.lines))
    prefixes = evaluations(curves) if chart.held_out else []
    present = [prefix for prefix in prefixes if f"{prefix}_{metric}" in curves]
    dots = {"mode": "markers", "marker": {"size": 8, "symbol": "diamond"}}
    return [
        _trace(curves[f"{prefix}_{metric}"], prefix, meta={"color": color}, **dots)
        for color, prefix in enumerate(present, 1)
    ]


def _trace(curve: Curve, name: str = "", **options: Any) -> Trace:
    drawn = {
        "x": list(curve),
        "y": list(curve.values()),
        "name": html.escape(name, quote=False),  # plotly reads tags in it
        "mode": "lines" if len(curve) > 1 else "markers",
        "line": {"width": 2},
    }
    return drawn | options
