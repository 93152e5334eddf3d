"""Charts as plotly figures. Colours are numbers here; the page knows them, light and dark."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_trainer.monitor.report.charts import Chart
from grpo_trainer.monitor.report.series import Curve, Curves

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Scatter

_WIDTH: dict[str, Any] = {"line": {"width": 2}}


def figure_of(chart: Chart, runs: Mapping[str, Curves]) -> dict[str, Any]:
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
    return _as_dict(traces, log=chart.log)


def histogram_figure(steps: list[int], rewards: list[list[float]], bins: int = 24) -> dict:
    """Draw how the rewards of each step are distributed: a column each, darker where more are."""
    from plotly import graph_objects

    lowest = min(min(values) for values in rewards)
    highest = max(max(values) for values in rewards)
    width = (highest - lowest) / bins or 1.0
    columns = [_shares(values, lowest, width, bins) for values in rewards]
    heat = graph_objects.Heatmap(
        x=steps,
        y=[lowest + width * (index + 0.5) for index in range(bins)],
        z=[list(row) for row in zip(*columns, strict=True)],
        hovertemplate="step %{x}<br>reward %{y:.3g}<br>%{z:.0%}<extra></extra>",
        colorbar={"tickformat": ".0%", "thickness": 10},
        meta={"heat": True},
    )
    return _as_dict([heat])


def _shares(values: Sequence[float], lowest: float, width: float, bins: int) -> list[float]:
    counts = [0.0] * bins
    for value in values:
        counts[min(int((value - lowest) / width), bins - 1)] += 1 / len(values)
    return counts


def _lines(chart: Chart, curves: Curves) -> list[Scatter]:
    present = {name: label for name, label in chart.lines.items() if name in curves}
    traces = []
    for index, (name, label) in enumerate(present.items()):
        look: dict[str, Any] = {"meta": {"color": index, "smooth": not chart.exact}}
        if chart.total:
            look = {"meta": {"color": index, "area": True}, "stackgroup": "one"}
        legend = len(present) > 1
        traces.append(_scatter(curves[name], name=label, showlegend=legend, **_WIDTH, **look))
    return traces


def _run_line(chart: Chart, curves: Curves, run: str, color: int) -> list[Scatter]:
    names = [chart.total] if chart.total else list(chart.lines)
    meta = {"color": color, "smooth": not chart.exact}
    return [
        _scatter(curves[name], name=run, showlegend=True, meta=meta, **_WIDTH)
        for name in [name for name in names if name in curves][:1]
    ]


def _band(chart: Chart, curves: Curves) -> list[Scatter]:
    edges = _edges(chart, curves)
    if edges is None:
        return []
    hidden: dict[str, Any] = {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    low, high = edges
    return [
        _scatter(low, meta={"color": 0}, **hidden),
        _scatter(high, meta={"color": 0, "band": True}, fill="tonexty", **hidden),
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


def _evaluations(chart: Chart, curves: Curves) -> list[Scatter]:
    """Return dots for the first line's metric on held-out prompts."""
    metric = next(iter(chart.lines))
    names = [f"{prefix}_{metric}" for prefix in curves.evaluations if chart.held_out]
    return [
        _scatter(
            curves[name],
            name=name.removesuffix(f"_{metric}"),
            mode="markers",
            marker={"size": 8, "symbol": "diamond"},
            meta={"color": 1 + index},
        )
        for index, name in enumerate(name for name in names if name in curves)
    ]


def _scatter(curve: Curve, mode: str | None = None, name: str = "", **options: Any) -> Scatter:
    from plotly import graph_objects

    return graph_objects.Scatter(
        x=curve.steps,
        y=curve.values,
        name=html.escape(name, quote=False),  # plotly reads tags in it
        mode=mode or ("lines" if len(curve.steps) > 1 else "markers"),
        **options,
    )


def _as_dict(traces: Sequence[Any], log: bool = False) -> dict[str, Any]:
    from plotly import graph_objects

    figure: Figure = graph_objects.Figure(data=traces)
    figure.update_layout(
        template=None,
        margin={"l": 48, "r": 12, "t": 8, "b": 34},
        height=250,
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    axis = {"type": "log", "dtick": "D2"} if log else {"type": "linear"}
    figure.update_yaxes(automargin=True, **axis)
    return json.loads(figure.to_json(engine="json"))
