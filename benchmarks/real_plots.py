"""Pictures of what a pretrained model was measured with. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.results import Group
from benchmarks.test_accuracy import BANDS

_SMOOTHED = 5  # steps
_PANELS = {
    "whole model": {"ours": "grpo_trainer", "trl": "TRL", "trl-our-head": "TRL with our head"},
    "LoRA": {"ours-lora": "grpo_trainer", "trl-lora": "TRL"},
    "vLLM in bf16": {"ours-vllm": "corrected", "ours-vllm-uncorrected": "not corrected"},
}
_HEADS = {
    "vllm, eager": "trainer in bf16, logits rounded",
    "vllm, ours": "trainer in bf16, our head",
    "vllm, fp32": "trainer in fp32",
}
_OURS, _THEIRS, _BOTH = "#0050d8", "#d1620a", "#2a9d57"
# equal curves are all visible: a dashed line lies on a solid one, a dotted line on both
_LINES = {
    "grpo_trainer": (_OURS, "-"), "TRL": (_THEIRS, "--"), "TRL with our head": (_BOTH, ":"),
    "corrected": (_OURS, "-"), "not corrected": (_THEIRS, "--"),
}  # fmt: skip


def save_pictures(groups: Sequence[Group], folder: Path) -> None:
    """Draw all of them; a picture that no result supports is deleted."""
    for name, (_, draw) in PICTURES.items():
        path = folder / f"{name}.png"
        if figure := draw(groups):
            figure.tight_layout()
            # without the version and the date the same results give the same file
            figure.savefig(path, dpi=110, metadata={"Software": None})
            plt.close(figure)
        else:
            path.unlink(missing_ok=True)


def _rewards(groups: Sequence[Group]) -> Any:
    """Draw a line for each seed."""
    runs = [group for group in groups if group.benchmark == "curves"]
    curves = {
        title: {label: _curves(runs, name) for name, label in names.items()}
        for title, names in _PANELS.items()
    }
    panels = {title: found for title, found in curves.items() if any(found.values())}
    if not panels:
        return None
    size = 4.6 * len(panels), 3.2
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    for axis, (title, found) in zip(axes[0], panels.items(), strict=True):
        for label, seeds in found.items():
            color, style = _LINES[label]
            for number, rewards in enumerate(seeds):
                name = "_" if number else f"{label}, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
                steps = range(1, 1 + len(rewards))
                axis.plot(steps, rewards, style, color=color, label=name)  # _: not in the legend
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel(f"reward, mean of {_SMOOTHED} steps")
    return figure


def _curves(groups: Sequence[Group], name: str) -> list[list[float]]:
    """Return the smoothed rewards of a trainer, by seed."""
    rows = [row for group in groups for row in group.rows if row.provider == name and row.runs]
    return [_smoothed(row.info["rewards"]) for row in rows]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return means over a window that is shorter at both ends."""
    half = _SMOOTHED // 2
    windows = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return list(map(statistics.fmean, windows))


def _mismatch(groups: Sequence[Group]) -> Any:
    """Draw mean and 99th percentile of the difference by probability, for each head."""
    rows = [row for group in groups if group.benchmark == "mismatch" for row in group.rows]
    found = {
        label: row.info["by_probability"]
        for name, label in _HEADS.items()
        for row in rows
        if row.runs and row.provider == name
    }
    if not found:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.2), squeeze=False)
    for axis, place, title in zip(axes[0], (0, 1), ("mean", "99th percentile"), strict=True):
        for number, (label, bands) in enumerate(found.items()):
            names = [band for band in BANDS if band in bands]
            places = [index + 0.28 * (number - 1) for index in range(len(names))]
            heights = [bands[band][place] for band in names]
            axis.bar(places, heights, 0.26, label=label, color=(_THEIRS, _OURS, _BOTH)[number])
            axis.set_xticks(range(len(names)), names)
        axis.set_title(f"|log p of vLLM - log p of the trainer|, {title}", fontsize=10, loc="left")
        axis.set_ylabel("nats")
        axis.grid(alpha=0.3, axis="y")
        axis.legend(fontsize=8)
    return figure


# what a picture shows, and what draws it
PICTURES: dict[str, tuple[str, Callable[[Sequence[Group]], Any]]] = {
    "rewards": ("Reward of SmolLM2-135M-Instruct over optimizer steps, by trainer", _rewards),
    "mismatch": ("Difference of log-probabilities between vLLM and the trainer", _mismatch),
}
