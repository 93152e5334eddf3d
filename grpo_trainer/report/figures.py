"""Charts as plotly.js draws them. Colours are numbers here; the page knows them, light and dark."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import numpy

from grpo_trainer.report.charts import Chart
from grpo_trainer.report.series import Curve, Curves, evaluations

_BINS = 24  # of the histograms

Trace = dict[str, Any]
Figure = dict[str, Any]  # "data": its traces, "log": whether the axis is logarithmic


def figure_of(chart: Chart, runs: Mapping[str, Curves]) -> Figure:
    """Return the chart for one run, or the first line of several runs over one another."""
    if len(runs) == 1:
        [curves] = runs.values()
        traces = [*_band(chart, curves), *_lines(chart, curves), *_evaluations(chart, curves)]
    else:
        traces = [
            trace
            for color, (name, curves) in enumerate(runs.items())
            for trace in _run_line(chart, curves, name, color)
        ]
    return {"data": traces, "log": chart.log}


def histogram_figure(rewards: Mapping[int, list[float]]) -> Figure:
    """Draw how the rewards of each step are distributed: a column each, darker where more are."""
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


def _lines(chart: Chart, curves: Curves) -> list[Trace]:
    present = {name: label for name, label in chart.lines.items() if name in curves}
    traces = []
    for index, (name, label) in enumerate(present.items()):
        look: Trace = {"meta": {"color": index, "smooth": not chart.exact}}
        if chart.total:
            look = {"meta": {"color": index, "area": True}, "stackgroup": "one"}
        traces.append(_trace(curves[name], label, showlegend=len(present) > 1, **look))
    return traces


def _run_line(chart: Chart, curves: Curves, run: str, color: int) -> list[Trace]:
    names = [chart.total] if chart.total else chart.lines
    meta = {"color": color, "smooth": not chart.exact}
    present = [curves[name] for name in names if name in curves]
    return [_trace(curve, run, showlegend=True, meta=meta) for curve in present[:1]]


def _band(chart: Chart, curves: Curves) -> list[Trace]:
    edges = _edges(chart, curves)
    if edges is None:
        return []
    hidden: Trace = {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    low, high = edges
    return [
        _trace(low, meta={"color": 0}, **hidden),
        _trace(high, meta={"color": 0, "band": True}, fill="tonexty", **hidden),
    ]


def _edges(chart: Chart, curves: Curves) -> tuple[Curve, Curve] | None:
    if chart.band is not None and all(name in curves for name in chart.band):
        low, high = chart.band
        return curves[low], curves[high]
    if chart.spread is None or chart.spread not in curves:
        return None
    middle, spread = curves[next(iter(chart.lines))], curves[chart.spread]
    around = dict(zip(spread.steps, spread.values, strict=True))
    both = [
        (step, value, around[step] or 0.0)
        for step, value in zip(middle.steps, middle.values, strict=True)
        if value is not None and step in around
    ]
    steps = [step for step, _, _ in both]
    return Curve(steps, [v - s for _, v, s in both]), Curve(steps, [v + s for _, v, s in both])


def _evaluations(chart: Chart, curves: Curves) -> list[Trace]:
    """Return dots for the first line's metric on held-out prompts."""
    metric = next(iter(chart.lines))
    names = {prefix: f"{prefix}_{metric}" for prefix in evaluations(curves) if chart.held_out}
    present = {prefix: curves[name] for prefix, name in names.items() if name in curves}
    marker = {"size": 8, "symbol": "diamond"}
    return [
        _trace(curve, prefix, mode="markers", marker=marker, meta={"color": 1 + index})
        for index, (prefix, curve) in enumerate(present.items())
    ]


def _trace(curve: Curve, name: str = "", **options: Any) -> Trace:
    drawn = {
        "x": curve.steps,
        "y": curve.values,
        "name": html.escape(name, quote=False),  # plotly reads tags in it
        "mode": "lines" if len(curve.steps) > 1 else "markers",
        "line": {"width": 2},
    }
    return drawn | options
