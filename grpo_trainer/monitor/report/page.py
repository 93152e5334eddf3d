"""The HTML file: everything that it shows and the code that draws it, in one piece."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from grpo_trainer.monitor.report.charts import sections
from grpo_trainer.monitor.report.figures import figure_of, histogram_figure
from grpo_trainer.monitor.report.health import findings
from grpo_trainer.monitor.report.parts import (
    differences_table,
    facts_table,
    samples_block,
    tiles,
    warning_box,
)
from grpo_trainer.monitor.report.record import RunRecord, jsonable
from grpo_trainer.monitor.report.series import Curves, curves_of
from grpo_trainer.monitor.report.texts import prompt_samples, rewards_by_step

_HERE = Path(__file__).parent
_NO_FILES = "With <code>log_completions</code> a run keeps its completions, and they stand here."


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
    curves = {run.name: curves_of(run) for run in runs}
    figures: dict[str, Any] = {}
    body = [*_head(runs, curves), *_charts(runs, curves, figures), *_tables(runs)]
    parts = {
        "title": html.escape(" / ".join(names)),
        "style": (_HERE / "page.css").read_text(),
        "body": "\n".join(body),
        "figures": _inline(figures),
        "plotly": plotly,
        "script": (_HERE / "page.js").read_text(),
    }
    return Template((_HERE / "page.html").read_text()).substitute(parts)


def _head(runs: Sequence[RunRecord], curves: Mapping[str, Curves]) -> list[str]:
    blocks = [] if len(runs) == 1 else [_legend(runs)]
    for run in runs:
        found = findings(run.history)
        blocks.append(tiles(run, curves[run.name], named=len(runs) > 1))
        blocks += [warning_box(found)] if found else []
    return blocks


def _legend(runs: Sequence[RunRecord]) -> str:
    chips = "".join(
        f'<span class="chip"><i style="background:var(--c{index % 6})"></i>'
        f"{html.escape(run.name)}</span>"
        for index, run in enumerate(runs)
    )
    return f'<p class="legend">{chips}</p>'


def _charts(
    runs: Sequence[RunRecord], curves: Mapping[str, Curves], figures: dict[str, Any]
) -> Iterable[str]:
    """Return the sections; ``figures`` gets what is drawn in them, by the id of its place."""
    union = Curves([row for run in runs for row in run.history])
    several = len(runs) > 1
    for section in sections(union, apart=several):
        cards = []
        for chart in section.charts:
            note = "" if several else chart.note  # of bands and evaluations, which one run has
            cards.append(_card(chart.title, note, figure_of(chart, curves), figures))
        if section.title == "Completions" and not several:
            cards.append(_histogram(runs[0], figures))
        yield f'<h2>{html.escape(section.title)}</h2>\n<div class="grid">{"".join(cards)}</div>'
        if section.title == "Completions" and not several:
            yield samples_block(prompt_samples(runs[0].folder))


def _card(title: str, note: str, figure: dict[str, Any], figures: dict[str, Any]) -> str:
    place = f"chart-{len(figures)}"
    figures[place] = figure
    text = f"<p>{html.escape(note)}</p>" if note else ""
    return (
        f'<figure class="card"><h3>{html.escape(title)}</h3>{text}'
        f'<div class="chart" id="{place}"></div></figure>'
    )


def _histogram(run: RunRecord, figures: dict[str, Any]) -> str:
    steps, rewards = rewards_by_step(run.folder)
    title = "Rewards of the completions"
    if not steps:
        return f'<figure class="card"><h3>{title}</h3><p>{_NO_FILES}</p></figure>'
    note = "How they are distributed at each step; darker where more of them are."
    return _card(title, note, histogram_figure(steps, rewards), figures)


def _tables(runs: Sequence[RunRecord]) -> list[str]:
    if len(runs) > 1:
        return [
            differences_table("Settings that differ", [(r.name, r.settings) for r in runs]),
            differences_table("Recipes that differ", [(r.name, r.recipe) for r in runs]),
            differences_table("Environments that differ", [(r.name, r.environment) for r in runs]),
        ]
    [run] = runs
    changed = {name: run.settings[name] for name in run.changed if name in run.settings}
    tables = [
        facts_table("Recipe", run.recipe),
        facts_table("Settings that are not at their defaults", changed),
        facts_table("Environment", run.environment),
        facts_table("All settings", run.settings, folded=True),
    ]
    return [table for table in tables if table]


def _inline(data: Any) -> str:
    """Return JSON that may stand in a script element."""
    return json.dumps(jsonable(data)).replace("<", "\\u003c")


@functools.cache
def _plotly() -> str:
    """Return plotly.js, packed: a browser unpacks it on its own."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            "a report needs plotly: pip install 'grpo-kernels[report]', then `grpo-train report "
            "RUN` writes it"
        ) from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
