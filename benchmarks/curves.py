"""The picture of a pretrained model's rewards: trainers next to each other. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.results import Group

NAME = "rewards.png"
TITLE = "Reward of SmolLM2-135M-Instruct over the optimizer steps, by trainer"
_SMOOTHED = 5  # steps
_PANELS = {
    "whole model": {"ours": "grpo_trainer", "trl": "TRL", "trl-our-head": "TRL with our head"},
    "LoRA": {"ours-lora": "grpo_trainer", "trl-lora": "TRL"},
}
_COLORS = {"grpo_trainer": "#0050d8", "TRL": "#d1620a", "TRL with our head": "#2a9d57"}


def save_curves(groups: Sequence[Group], folder: Path) -> None:
    """Draw the mean over the seeds, between the lowest and the highest; without runs, nothing."""
    runs = [group for group in groups if _is_run(group)]
    panels = {title: names for title, names in _PANELS.items() if _curves(runs, next(iter(names)))}
    path = folder / NAME
    if not panels:
        path.unlink(missing_ok=True)
        return
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 3.2), squeeze=False, sharey=True
    )
    for axis, (title, names) in zip(axes[0], panels.items(), strict=True):
        for name, label in names.items():
            curves = _curves(runs, name)
            if not curves:
                continue
            steps = range(1, 1 + min(map(len, curves)))
            columns = list(zip(*curves, strict=False))
            color = _COLORS[label]
            axis.plot(steps, list(map(statistics.fmean, columns)), color=color, label=label)
            axis.fill_between(
                steps,
                list(map(min, columns)),
                list(map(max, columns)),
                color=color,
                alpha=0.15,
                linewidth=0,
            )
        seeds = len(_curves(runs, next(iter(names))))
        axis.set_title(f"{title}, {seeds} seed{'s' * (seeds > 1)}", fontsize=10, loc="left")
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel(f"mean reward, {_SMOOTHED} steps")
    figure.tight_layout()
    # without the version and the date the same results give the same file
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _is_run(group: Group) -> bool:
    return group.benchmark == "real" and group.facts["kind"] != "time"


def _curves(groups: Sequence[Group], name: str) -> list[list[float]]:
    """Return the smoothed rewards of a trainer, by seed."""
    rows = [row for group in groups for row in group.rows if row.provider == name and row.runs]
    return [_smoothed(row.info["rewards"]) for row in rows]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return means over a window that is shorter at both ends."""
    half = _SMOOTHED // 2
    windows = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return list(map(statistics.fmean, windows))
