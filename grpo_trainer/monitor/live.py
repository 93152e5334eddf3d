"""A view of the run that stays at the bottom of a terminal; what is printed scrolls above it."""

from __future__ import annotations

import sys

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import ProgressCallback, Trainer

from grpo_trainer.monitor.progress import PlainProgress, Progress, Snapshot, duration, gibibytes

_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40  # latest rewards
# one per phase, in their order
_COLOURS = ("blue", "cyan", "magenta", "yellow", "red", "green")
_BAR_WIDTH = 40


class LiveView(Progress):
    """Progress with the time left, the latest numbers, the reward's course, phases of a step."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._live: Live | None = None  # from the first step to the last
        self._at = (0, 1)
        self._latest: Snapshot | None = None
        self._rewards: list[float] = []

    def open(self, step: int, steps: int) -> None:
        self._at = (step, steps)
        self._live = Live(self.picture(), console=self._console, refresh_per_second=4)
        self._live.start()

    def step(self, step: int, steps: int) -> None:
        self._at = (step, steps)
        self._draw()

    def show(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        self._at = (snapshot.step, snapshot.steps)
        reward = snapshot.numbers.get("reward")
        if reward is not None:
            self._rewards = [*self._rewards, float(reward.split()[0])][-_SPARK_WIDTH:]
        self._draw(refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)  # above the view

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = None

    def _draw(self, refresh: bool = False) -> None:
        if self._live is not None:
            self._live.update(self.picture(), refresh=refresh)

    def picture(self) -> RenderableType:
        step, steps = self._at
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=steps, completed=step, width=_BAR_WIDTH)
        left = f"{duration(self._latest.seconds_left)} left" if self._latest else ""
        head.add_row(Text(f"step {step}/{steps}", style="bold"), bar, Text(left))
        if self._latest is None:
            return Panel(head, title="GRPO", title_align="left")
        parts: list[RenderableType] = [head, Text(), _numbers(self._latest)]
        if len(self._rewards) > 1:
            parts += [Text(), Text.assemble("reward  ", (sparkline(self._rewards), "green"))]
        if self._latest.shares:
            parts += [Text(), _phases(self._latest.shares)]
        return Panel(Group(*parts), title="GRPO", title_align="left")


def show_progress(trainer: Trainer, console: Console | None = None) -> None:
    """Replace the bar of transformers: a live view in a terminal, lines elsewhere.

    A notebook keeps its own table, and nothing is shown with ``disable_tqdm``.
    """
    if not any(type(item) is ProgressCallback for item in trainer.callback_handler.callbacks):
        return
    console = console or Console(file=sys.stderr)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LiveView(console) if console.is_terminal else PlainProgress(console))


def sparkline(values: list[float]) -> str:
    """Return one block per value, between the least and the greatest of them."""
    low, high = min(values), max(values)
    scale = (len(_SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARK[round((value - low) * scale)] for value in values)


def _numbers(snapshot: Snapshot) -> Table:
    cells = dict(snapshot.numbers)
    if snapshot.tokens_per_second is not None:
        cells["tokens/s"] = f"{snapshot.tokens_per_second:,.0f}"
    cells["memory"] = gibibytes(snapshot.memory_bytes)
    table = Table.grid(padding=(0, 3))
    items = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in cells.items()]
    for start in range(0, len(items), 4):
        table.add_row(*items[start : start + 4])
    return table


def _phases(shares: dict[str, float]) -> Text:
    """Return a bar of the step's time, and what its colours mean."""
    text = Text("phases  ")
    legend = Text("\n        ")
    for (name, share), colour in zip(shares.items(), _COLOURS, strict=False):
        text.append("█" * round(share * _BAR_WIDTH), style=colour)
        legend.append("■ ", style=colour)
        legend.append(f"{name} {share:.0%}  ")
    return text + legend
