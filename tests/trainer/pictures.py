"""Writes the pictures of docs/images from two runs: ``python -m tests.trainer.pictures RUN OTHER``.

The report of the first, the comparison of both, and the live view as it was at the end of the
first, as a captured terminal.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from transformers import TrainerControl, TrainerState

from grpo_trainer import GRPOConfig, RichProgressCallback
from grpo_trainer.monitor import load_run
from grpo_trainer.report.page import write_report
from tests.support.browser import open_page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZES = {"report.png": (1400, 1400), "comparison.png": (1400, 1150)}
WIDTH = 92  # characters


def main(runs: list[Path]) -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, folders in {"report.png": runs[:1], "comparison.png": runs}.items():
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            open_page(write_report(folders, place / "page.html"), place, size=SIZES[name])
            shutil.copyfile(place / "page.png", IMAGES / name)
    (IMAGES / "live.svg").write_text(live_view(runs[0]))


def live_view(folder: Path) -> str:
    """Return what a terminal shows four fifths into the run, by its log."""
    history = [row for row in load_run(folder).history if "num_tokens" in row]
    now = 0.0
    view = RichProgressCallback(Console(file=io.StringIO(), get_time=lambda: now))
    args, control = GRPOConfig(output_dir=str(folder), use_cpu=True), TrainerControl()
    state = TrainerState(max_steps=history[-1]["step"], is_world_process_zero=True)
    view.on_train_begin(args, state, control)
    for row in history[: len(history) * 4 // 5]:
        now += (row["step"] - state.global_step) * row["step_time"]
        state.global_step = row["step"]
        state.log_history.append(row)
        view.on_step_end(args, state, control)
        view.on_log(args, state, control, logs=row)
    console = Console(file=io.StringIO(), record=True, width=WIDTH)
    console.print(view.bar)
    return console.export_svg(title="grpo-train")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
