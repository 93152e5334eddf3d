"""What the demo leaves behind beside its summary: metrics.csv, curves.png and tables."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

History = list[dict[str, Any]]


def rows_with(metric: str, history: History) -> History:
    """Return the entries that log ``metric``."""
    return [row for row in history if metric in row]


def write_csv(folder: Path, history: History) -> None:
    """Write one row per logged training step."""
    rows = rows_with("reward", history)
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def plot_curves(folder: Path, history: History) -> None:
    """Plot reward, entropy and completion length over the steps."""
    from matplotlib.figure import Figure

    rows, evaluations = rows_with("reward", history), rows_with("eval_reward", history)
    panels = {
        "mean reward": "reward",
        "entropy (nats)": "entropy",
        "completion length (tokens)": "completions/mean_length",
    }
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (title, name) in zip(axes, panels.items(), strict=True):
        axis.plot([row["step"] for row in rows], [row[name] for row in rows], label="training")
        held_out = [row[f"eval_{name}"] for row in evaluations]
        axis.plot([row["step"] for row in evaluations], held_out, "o", label="held-out prompts")
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(folder / "curves.png", dpi=120)


def table(summary: dict[str, Any]) -> str:
    """Return the table of what the policy has learned."""
    rows = [
        ("", "before", "after"),
        ("mean reward, held-out prompts", *_three_digits(summary, "eval_reward")),
        ("mean reward, training", *_three_digits(summary, "reward")),
        (
            f"a completion of {summary['prompt']}",
            repr(summary["completion_first"]),
            repr(summary["completion_last"]),
        ),
    ]
    lines = [f"{name:<32}{left:>10}{right:>10}".rstrip() for name, left, right in rows]
    exact = (
        f"On a rollout the fused loss is within {summary['loss_max_abs_diff']:.1e} of full logits "
        f"in fp64, its gradients within {summary['grad_max_rel_diff']:.1e} of theirs."
    )
    return "\n".join([*lines, "", exact])


def head_table(heads: list[dict[str, Any]], shape: str) -> str:
    """Return the table of the heads. ``shape`` is that of the head."""
    lines = [
        f"One loss and its gradients, {shape}:",
        f"{'':<24}{'time':>10}{'peak memory':>14}{'gradient error':>16}",
    ]
    for head in heads:
        milliseconds, mebibytes = f"{1000 * head['seconds']:.0f} ms", head["peak_bytes"] >> 20
        row = f"{milliseconds:>10}{f'{mebibytes} MiB':>14}{head['error']:>16.0e}"
        lines.append(f"{head['name']:<24}{row}")
    return "\n".join(lines)


def _three_digits(summary: dict[str, Any], name: str) -> list[str]:
    return [f"{summary[f'{name}_{when}']:.3f}" for when in ("first", "last")]
