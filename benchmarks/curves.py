"""The picture of what is learned: a line for every seed, a colour for every arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import LearningTable

NAME = "learning"
_PANELS = {"reward": "mean reward", "entropy": "entropy (nats)"}
_STYLES = ("-", "--", ":", "-.")  # of the seeds


def save_curves(tables: Sequence[LearningTable], folder: Path) -> None:
    """Draw the newest table; where there is none no picture is left."""
    path = folder / f"{NAME}.png"
    if not tables:
        path.unlink(missing_ok=True)
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = tables[-1]
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(11, 4), layout="constrained")
    for axis, (name, title) in zip(axes, _PANELS.items(), strict=True):
        for index, row in enumerate(table.rows):
            for seed, curve in enumerate(row.curves.get(name, ())):
                axis.plot(
                    range(table.every, table.steps + 1, table.every), curve, color=f"C{index}",
                    linestyle=_STYLES[seed % len(_STYLES)], linewidth=1.2,
                    label=row.provider if seed == 0 else None,
                )  # fmt: skip
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("optimizer step", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(linewidth=0.4, alpha=0.5)
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{table.model}: one line for each seed", fontsize=10, fontweight="bold")
    # without the version and the date the same results give the same file
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
