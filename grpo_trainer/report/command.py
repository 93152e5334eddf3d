"""Writes reports: what ``grpo-train report`` is asked for, and that of a run which trains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState

from grpo_kernels.tools import OneLineParser
from grpo_trainer.common import unfailing, whole
from grpo_trainer.monitor import RunRecord, load_run
from grpo_trainer.report.page import packed_plotly, render

REPORT_NAME = "report.html"
_COMPARISON_NAME = "comparison.html"


class ReportWriter(TrainerCallback):
    """Writes ``run.json`` at the start, and it and ``report.html`` with every checkpoint and at
    the end.

    Without plotly it writes the former alone, and says at the start how to get the latter. Nothing
    that goes wrong ends the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self._unfailing():
                RunRecord.of(self._trainer).save()
            with self._unfailing():
                packed_plotly()

    def on_save(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.log_history:
            with self._unfailing():
                record = RunRecord.of(self._trainer)
                record.save()
                write_report([record.folder], record.folder / REPORT_NAME)

    on_train_end = on_save

    def _unfailing(self) -> AbstractContextManager[None]:
        return unfailing(f"report of {self._trainer.args.output_dir}")


def main(argv: Sequence[str]) -> None:
    """Write the page and print where it is.

    Raises:
        ValueError: a folder holds no run.
        ImportError: plotly is not installed.
    """
    options = report_arguments(argv)
    default = options.runs[0] / REPORT_NAME if len(options.runs) == 1 else Path(_COMPARISON_NAME)
    print(write_report(options.runs, options.out or default))


def report_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return ``runs`` and ``out``."""
    parser = OneLineParser(
        prog="grpo-train report",
        description="grpo-train report RUN [RUN ...]: a run's report, or a comparison of several.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"the file; default: {REPORT_NAME} in the run's folder, for several runs "
        f"{_COMPARISON_NAME} here",
    )
    return parser.parse_args(argv)


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Return the report on the runs in ``folders``, written to ``path``."""
    runs = [load_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run.folder)) for run in runs]
    page = render(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as aside:
        aside.write_text(page, encoding="utf-8")
    return path
