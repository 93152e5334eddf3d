"""``grpo-train report RUN [RUN ...]``: a run's report, or a comparison of several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_kernels.tools import OneLineParser
from grpo_trainer.monitor.report.page import render
from grpo_trainer.monitor.report.record import REPORT_NAME, load_run

_COMPARISON_NAME = "comparison.html"


def main(argv: Sequence[str]) -> Path:
    """Write the page and print where it is.

    Raises:
        ValueError: a folder holds no run.
        ImportError: plotly is not installed.
    """
    options = report_arguments(argv)
    default = options.runs[0] / REPORT_NAME if len(options.runs) == 1 else Path(_COMPARISON_NAME)
    path = write_report(options.runs, options.out or default)
    print(path)
    return path


def report_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return ``runs`` and ``out``."""
    parser = OneLineParser(prog="grpo-train report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"the file; default: {REPORT_NAME} in the run's folder, for several runs "
        f"{_COMPARISON_NAME} here",
    )
    return parser.parse_args(list(argv))


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Return the report on the runs in ``folders``, written to ``path``."""
    runs = [load_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(run.folder)) for run in runs]
    page = render(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
