"""The HTML file: everything that it shows and the code that draws it, in one piece."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader

from grpo_kernels.tools import install_command
from grpo_trainer.report.charts import constants, sections
from grpo_trainer.report.figures import Figure, figure_of, histogram_figure
from grpo_trainer.report.health import findings
from grpo_trainer.report.record import RunRecord
from grpo_trainer.report.series import Curves, curves_of
from grpo_trainer.report.texts import prompt_samples, rewards_by_step

# metric -> its name on a tile
_TILES = {
    "reward": "reward",
    "eval_reward": "reward, held out",
    "kl": "KL",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "tokens_per_second": "tokens/s",
    "step_time": "seconds per step",
}


Rewards = dict[int, list[float]]  # of the completions, by optimizer step


class Card(NamedTuple):
    """A chart's place on the page."""

    title: str
    note: str
    figure: Figure | None  # None: the run has not kept what it would show


class Table(NamedTuple):
    """Rows of a name and the value of each run."""

    title: str
    rows: list[list[str]]
    folded: bool = False


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
    plotly = _plotly()
    curves = {run.name: curves_of(run.history) for run in runs}
    rewards = {run.name: rewards_by_step(run.folder) for run in runs}
    templates = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["number"] = number
    return templates.get_template("page.html").render(
        names=names,
        about=_about(runs[0]) if len(runs) == 1 else "",
        heads=[
            (
                run.name,
                _tiles(run, curves[run.name]),
                findings(run.history, _best(rewards[run.name])),
            )
            for run in runs
        ],
        sections=_cards(runs, curves, rewards),
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
    tiles = {"steps": [max(row.get("step", 0) for row in run.history)]}
    for metric, label in _TILES.items():
        if metric in curves and curves[metric].finite:
            tiles[label] = curves[metric].finite
    return tiles


def _about(run: RunRecord) -> str:
    """Return what is trained on what: the run's name may be that of its folder alone."""
    parts = [run.recipe.get(name) for name in ("model", "dataset", "loss_type")]
    return ", ".join(str(part) for part in parts if part)


def _best(rewards: Rewards) -> float | None:
    return max((max(each) for each in rewards.values()), default=None)


def _cards(
    runs: Sequence[RunRecord], curves: Mapping[str, Curves], rewards: Mapping[str, Rewards]
) -> dict[str, tuple[list[Card], dict[str, dict[str, float]]]]:
    """Return the charts of each section, and by their titles the values of those that are flat."""
    union = curves_of([row for run in runs for row in run.history])
    several = len(runs) > 1
    cards = {}
    for section, charts in sections(union, apart=several).items():
        flat = {chart.title: constants(chart, curves.values()) for chart in charts}
        moving = [
            # notes are of bands and evaluations, which one run has
            Card(chart.title, "" if several else chart.note, figure_of(chart, curves))
            for chart in charts
            if flat[chart.title] is None
        ]
        if section == "Completions" and not several:
            moving.append(_histogram(rewards[runs[0].name]))
        cards[section] = (moving, {title: values for title, values in flat.items() if values})
    return cards


def _histogram(rewards: Rewards) -> Card:
    title = "Rewards of the completions"
    if not rewards:
        return Card(title, "", None)
    note = "How they are distributed at each step; darker where more of them are."
    return Card(title, note, histogram_figure(rewards))


def _comparison(runs: Sequence[RunRecord]) -> list[Table]:
    tables = [
        Table("Settings that differ", _rows([run.settings for run in runs])),
        Table("Recipes that differ", _rows([run.recipe for run in runs])),
        Table("Environments that differ", _rows([run.environment for run in runs])),
    ]
    return [
        table._replace(rows=[row for row in table.rows if len(set(row[1:])) > 1])
        for table in tables
    ]


def _facts(run: RunRecord) -> list[Table]:
    changed = {name: run.settings[name] for name in run.changed if name in run.settings}
    return [
        Table("Recipe", _rows([run.recipe])),
        Table("Settings that are not at their defaults", _rows([changed])),
        Table("Environment", _rows([run.environment])),
        Table("All settings", _rows([run.settings]), folded=True),
    ]


def _rows(facts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = dict.fromkeys(name for each in facts for name in each)
    return [[name, *(_text(each.get(name, "-")) for each in facts)] for name in names]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def require_plotly() -> None:
    """Raise ImportError, which says what to install, if no report can be drawn."""
    _plotly()


@functools.cache
def _plotly() -> str:
    """Return plotly.js, packed: a browser unpacks it on its own."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            f"a report needs plotly: {install_command('report')}, then `grpo-train report RUN` "
            "writes it"
        ) from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
