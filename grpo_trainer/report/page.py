"""The HTML file: everything that it shows and the code that draws it, in one piece."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader

from grpo_kernels.tools import install_command
from grpo_trainer.monitor import EVERY_CHART, RunRecord
from grpo_trainer.report.charts import Figure, constants, figure_of, histogram_figure, sections
from grpo_trainer.report.curves import Curves, curves_of, findings, finite
from grpo_trainer.report.texts import prompt_samples, rewards_by_step

Rewards = dict[int, list[float]]  # of the completions, by optimizer step
Card = tuple[str, str, Figure]  # with its title and a note


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page of one run, or of several that are compared.

    Raises:
        ImportError: plotly is not installed.
        ValueError: a run has logged nothing yet, or two have one name.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"report: expected runs of different names, got {', '.join(names)}")
    for run in runs:
        if not run.history:
            raise ValueError(f"report: expected a run that has logged something, got {run.name!r}")
    plotly = packed_plotly()
    curves = {run.name: curves_of(run.history) for run in runs}
    rewards = {run.name: rewards_by_step(run.folder) for run in runs}
    best = {name: max(map(max, steps.values()), default=None) for name, steps in rewards.items()}
    templates = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["number"] = number
    return templates.get_template("page.html").render(
        names=names,
        recipe=runs[0].recipe,
        heads=[
            (run.name, _tiles(run, curves[run.name]), findings(curves[run.name], best[run.name]))
            for run in runs
        ],
        sections=_cards(runs, curves),
        histogram=histogram_figure(rewards[names[0]]),
        samples=prompt_samples(runs[0].folder) if len(runs) == 1 else {},
        tables=_comparison(runs) if len(runs) > 1 else _facts(runs[0]),
        plotly=plotly,
    )


def number(value: float) -> str:
    """Return three digits, in full where they stand for more than that."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _tiles(run: RunRecord, curves: Curves) -> dict[str, list[float]]:
    """Return the values of which the page shows the first and the last."""
    tiles = {label: metric for chart in EVERY_CHART for metric, label in chart.tiles.items()}
    steps = max(row.get("step", 0) for row in run.history)
    values = {label: finite(curves, metric) for label, metric in tiles.items()}
    return {"steps": [steps]} | {label: each for label, each in values.items() if each}


def _cards(
    runs: Sequence[RunRecord], curves: Mapping[str, Curves]
) -> dict[str, tuple[list[Card], dict[str, dict[str, float]]]]:
    """Return the charts of each section, and by their titles the values of those that are flat."""
    union = curves_of([row for run in runs for row in run.history])
    several = len(runs) > 1
    cards = {}
    for section, charts in sections(union, apart=several).items():
        flat = {chart.title: constants(chart, curves.values()) for chart in charts}
        moving = [
            # notes are of bands and evaluations, which one run has
            (chart.title, "" if several else chart.note, figure_of(chart, curves))
            for chart in charts
            if flat[chart.title] is None
        ]
        cards[section] = (moving, {title: values for title, values in flat.items() if values})
    return cards


def _comparison(runs: Sequence[RunRecord]) -> dict[str, list[list[str]]]:
    """Return tables of what differs, by their titles: rows of a name and the value of each run."""
    tables = {
        "Settings that differ": [run.settings for run in runs],
        "Recipes that differ": [run.recipe for run in runs],
        "Environments that differ": [run.environment for run in runs],
    }
    return {
        title: [row for row in _rows(facts) if len(set(row[1:])) > 1]
        for title, facts in tables.items()
    }


def _facts(run: RunRecord) -> dict[str, list[list[str]]]:
    changed = {name: run.settings[name] for name in run.changed if name in run.settings}
    return {
        "Recipe": _rows([run.recipe]),
        "Settings that are not at their defaults": _rows([changed]),
        "Environment": _rows([run.environment]),
        "All settings": _rows([run.settings]),
    }


def _rows(facts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = dict.fromkeys(name for each in facts for name in each)
    values = {name: [each.get(name, "-") for each in facts] for name in names}
    return [
        [name, *(one if isinstance(one, str) else json.dumps(one) for one in each)]
        for name, each in values.items()
    ]


@functools.cache
def packed_plotly() -> str:
    """Return plotly.js, packed: a browser unpacks it on its own.

    Raises:
        ImportError: it is not installed; the message says what to install.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            f"a report needs plotly: {install_command('report')}, then `grpo-train report RUN` "
            "writes it"
        ) from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
