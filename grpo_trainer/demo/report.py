"""What the demo leaves behind: summary.json, metrics.csv, curves.png and a table."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

History = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The keys of summary.json."""

    reward_first: float  # mean reward of the first and last logged training steps
    reward_last: float
    eval_reward_first: float  # of sampled completions on held-out prompts
    eval_reward_last: float
    loss_max_abs_diff: float  # fused fp32 against eager fp64
    grad_max_rel_diff: float
    head_peak_bytes_fused: int
    head_peak_bytes_eager: int
    seconds: float


def training_rows(history: History) -> History:
    """Return the entries that training steps logged."""
    return [row for row in history if "reward" in row]


def evaluation_rows(history: History) -> History:
    """Return the entries that evaluations logged."""
    return [row for row in history if "eval_reward" in row]


def write_csv(folder: Path, history: History) -> None:
    """Write one row per logged training step."""
    rows = training_rows(history)
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def plot_curves(folder: Path, history: History) -> None:
    """Plot reward, entropy and completion length over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, evaluations = training_rows(history), evaluation_rows(history)
    steps = [row["step"] for row in rows]
    panels = {
        "mean reward": "reward",
        "entropy (nats)": "entropy",
        "completion length (tokens)": "completions/mean_length",
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.2), layout="constrained")
    for axis, (title, name) in zip(axes, panels.items(), strict=True):
        axis.plot(steps, [row[name] for row in rows], label="training")
        held_out = [row[f"eval_{name}"] for row in evaluations]
        axis.plot([row["step"] for row in evaluations], held_out, "o", label="held-out prompts")
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(folder / "curves.png", dpi=120)
    pyplot.close(figure)


def table(summary: Summary, head: str) -> str:
    """Return the table of results. ``head`` names the head whose memory was measured."""
    megabytes = 2**20
    rows = [
        ("", "before", "after"),
        (
            "mean reward, held-out prompts (sampled)",
            f"{summary.eval_reward_first:.3f}",
            f"{summary.eval_reward_last:.3f}",
        ),
        ("mean reward, training", f"{summary.reward_first:.3f}", f"{summary.reward_last:.3f}"),
        ("", "", ""),
        ("", "fused", "eager"),
        ("loss, largest difference from eager fp64", f"{summary.loss_max_abs_diff:.1e}", "-"),
        ("gradient, largest relative difference from it", f"{summary.grad_max_rel_diff:.1e}", "-"),
        (
            f"peak memory of the head, {head}",
            f"{summary.head_peak_bytes_fused / megabytes:.0f} MiB",
            f"{summary.head_peak_bytes_eager / megabytes:.0f} MiB",
        ),
    ]
    lines = [f"{name:<58}{left:>12}{right:>12}".rstrip() for name, left, right in rows]
    return "\n".join([*lines, "", f"{summary.seconds:.0f} seconds"])
