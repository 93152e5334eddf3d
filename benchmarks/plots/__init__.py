"""Pictures of a device's results: time and memory over T, and errors. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import AccuracyTable, Table
from benchmarks.plots.accuracy import draw_accuracy
from benchmarks.plots.curves import draw_memory, draw_time
from benchmarks.plots.gradients import draw_gradients


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One picture."""

    name: str
    title: str
    draw: Callable[..., Any]  # of tables a figure, or None where there is nothing to show
    of_policy: bool = False  # tables of errors on a policy's distributions

    @property
    def file(self) -> str:
        return f"{self.name}.png"


PLOTS = (
    Plot(name="time", title="time over the number of tokens", draw=draw_time),
    Plot(name="memory", title="extra memory over the number of tokens", draw=draw_memory),
    Plot(name="accuracy", title="errors by output and provider", draw=draw_accuracy),
    Plot(
        name="gradients",
        title="errors of gradients on a policy's distributions",
        draw=draw_gradients,
        of_policy=True,
    ),
)


def save_plots(
    tables: Sequence[Table], folder: Path, policies: Sequence[AccuracyTable] = ()
) -> None:
    """Draws all of them; a picture that no result supports any more is deleted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for plot in PLOTS:
        figure = plot.draw(policies if plot.of_policy else tables)
        if figure is None:
            (folder / plot.file).unlink(missing_ok=True)
            continue
        # without the version and the date the same results give the same file
        figure.savefig(folder / plot.file, dpi=110, metadata={"Software": None})
        plt.close(figure)
