"""The HTML file: its contents, including completions, the code that draws it, and its writer."""

from __future__ import annotations

import argparse
import base64
import functools
import gzip
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
from jinja2 import Environment, PackageLoader
from pyarrow import parquet
from transformers import Trainer, TrainerCallback, TrainerState

from grpo_kernels.tools import OneLineParser, install_command
from grpo_trainer.common import unfailing, whole
from grpo_trainer.monitor import EVAL_PREFIX, EVERY_CHART, IMAGES, RunRecord, load_run
from grpo_trainer.report.charts import cards_of, curves_of, findings, finite, histogram_figure

logger = logging.getLogger(__name__)

REPORT_NAME = "report.html"
_COMPARISON_NAME = "comparison.html"
_FILES = 200  # the most files of completions to read, evenly over the run
_COLUMNS = 5  # steps next to each other
_PROMPTS = 3
_PER_STEP = 3  # completions per prompt: the best, the middle one and the worst

PromptContent = tuple[str, tuple[str, ...]]  # the text, and data URLs of its images
ScoredText = tuple[str, float]  # a completion and its reward; NaN: none
Steps = dict[int, list[ScoredText]]  # completions of one prompt, by optimizer step


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page of one run, or of several that are compared.

    Raises:
        ImportError: plotly is not installed.
        ValueError: a run has logged nothing yet, or two runs have the same name.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"report: expected runs with distinct names, got {', '.join(names)}")
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
    templates.filters["number"] = _number
    return templates.get_template("page.html").render(
        runs=runs,
        names=names,
        charts=EVERY_CHART,
        curves=curves,
        finite=finite,
        findings={name: findings(curves[name], best[name]) for name in names},
        sections=cards_of(curves),
        histogram=histogram_figure(rewards[names[0]]),
        samples=prompt_samples(runs[0].folder) if len(runs) == 1 else {},
        rows_of=_rows,
        plotly=plotly,
    )


def _number(value: float) -> str:
    """Format with three significant digits, or all digits of large integers."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _rows(facts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return names and their values in each run; for several runs, only those that differ."""
    rows = []
    for name in dict.fromkeys(name for run in facts for name in run):
        values = [run.get(name, "-") for run in facts]
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if len(facts) == 1 or len(set(texts)) > 1:
            rows.append([name, *texts])
    return rows


def rewards_by_step(folder: Path) -> dict[int, list[float]]:
    """Return the rewards of each step's completions; empty without files."""
    rewards: dict[int, list[float]] = {}
    for row in _completions(folder, "", ["step", "reward"]):
        if not math.isnan(row["reward"]):
            rewards.setdefault(int(row["step"]), []).append(row["reward"])
    return dict(sorted(rewards.items()))


def prompt_samples(folder: Path) -> dict[PromptContent, Steps]:
    """Return the most frequent prompts, with samples from the first to the last step.

    All are from evaluations, whose prompts are always the same, or else all are from training. A
    step's samples come best first.
    """
    sources = []
    for prefix in (EVAL_PREFIX, ""):
        prompts: dict[PromptContent, Steps] = {}
        for row in _completions(folder, prefix, ["step", "prompt", IMAGES, "completion", "reward"]):
            steps = prompts.setdefault((row["prompt"], tuple(row.get(IMAGES) or ())), {})
            steps.setdefault(int(row["step"]), []).append((row["completion"], row["reward"]))
        most_frequent = sorted(prompts, key=lambda prompt: -len(prompts[prompt]))[:_PROMPTS]
        sources.append({prompt: _samples(prompts[prompt]) for prompt in most_frequent})
    return max(sources, key=lambda source: max(map(len, source.values()), default=0))


def _samples(steps: Steps) -> Steps:
    def rank(sample: ScoredText) -> tuple[float, str]:
        text, reward = sample
        return (math.inf if math.isnan(reward) else -reward, text)

    return {
        step: _evenly(sorted(steps[step], key=rank), _PER_STEP)
        for step in _evenly(sorted(steps), _COLUMNS)
    }


def _completions(folder: Path, prefix: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Read rows from the files of training or evaluation, with images if there are any.

    Damaged files are skipped: a run may have been killed while it wrote one.
    """
    files = sorted((folder / "completions").glob(f"{prefix}completions_*.parquet"))
    for file in _evenly(files, _FILES):
        try:
            missing = {IMAGES}.difference(parquet.read_schema(file).names)
            present = [name for name in columns if name not in missing]
            rows = parquet.read_table(file, columns=present).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            _warn(f"{file} cannot be read and is missing from the report: {error}")
            continue
        for row in rows:
            value = row["reward"]
            is_number = isinstance(value, int | float) and math.isfinite(value)
            yield row | {"reward": value if is_number else math.nan}


@functools.cache  # the report is written many times
def _warn(message: str) -> None:
    logger.warning("%s", message)


def _evenly(items: list[Any], count: int) -> list[Any]:
    """Return at most ``count`` items, including the first and the last."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


@functools.cache
def packed_plotly() -> str:
    """Return plotly.js, compressed; browsers can decompress it themselves.

    Raises:
        ImportError: it is not installed; the message has the install command.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            f"the report needs plotly: {install_command('report')}, then run `grpo-train report "
            "RUN`"
        ) from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the report on the runs in ``folders`` to ``path``, and return it."""
    runs = [load_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run.folder)) for run in runs]
    page = render(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as aside:
        aside.write_text(page, encoding="utf-8")
    return path


class ReportWriter(TrainerCallback):
    """Writes ``run.json`` at the start, and both ``run.json`` and ``report.html`` with every
    checkpoint and at the end.

    Without plotly it writes only ``run.json``, and warns at the start. Failures do not end the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with unfailing(f"report of {args.output_dir}"):
                RunRecord.of(self._trainer).save()
            with unfailing(f"report of {args.output_dir}"):
                packed_plotly()

    def on_save(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.log_history:
            with unfailing(f"report of {args.output_dir}"):
                record = RunRecord.of(self._trainer)
                record.save()
                write_report([record.folder], record.folder / REPORT_NAME)

    on_train_end = on_save


def main(argv: Sequence[str]) -> None:
    """Run ``grpo-train report``: write the page and print its path.

    Raises:
        ValueError: a folder has no run.
        ImportError: plotly is not installed.
    """
    options = report_arguments(argv)
    default = options.runs[0] / REPORT_NAME if len(options.runs) == 1 else Path(_COMPARISON_NAME)
    print(write_report(options.runs, options.out or default))


def report_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return ``runs`` and ``out``."""
    parser = OneLineParser(
        prog="grpo-train report",
        description="grpo-train report RUN [RUN ...]: write a run's report, or compare several.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"output file; default: {REPORT_NAME} in the run's folder, for several runs "
        f"{_COMPARISON_NAME} here",
    )
    return parser.parse_args(argv)
