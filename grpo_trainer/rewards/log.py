"""What reward functions log beside their rewards, in one call of all of them."""

from __future__ import annotations

import numbers
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.common import plain
from grpo_trainer.monitor import OWN_COLUMNS, REWARD_PREFIX, is_own_metric


class RewardLog:
    """Columns and metrics that reward functions add for one batch of completions.

    Args:
        count: how many completions are scored.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._metrics: dict[str, list[float]] = {}
        self.columns: dict[str, list[Any]] = {}  # each of ``count`` values

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Add a column to the table of completions, one value per completion.

        What is no number, text, list or dictionary is kept as its text.

        Raises:
            ValueError: the column is the table's own, or has the wrong number of values.
        """
        if column in OWN_COLUMNS or column.startswith(REWARD_PREFIX):
            raise ValueError(f"log_extra: expected a new column, got {column!r}, which exists")
        if len(values) != self._count:
            raise ValueError(
                f"log_extra: expected {self._count} values of {column!r}, one per completion, "
                f"got {len(values)}"
            )
        self.columns[column] = [plain(value) for value in values]  # a checkpoint holds them, too

    def log_metric(self, name: str, value: float) -> None:
        """Add a sample to a metric, which is logged as the mean of its samples.

        Raises:
            ValueError: the value is not a finite number, or the name is that of a metric of the
                trainer's.
        """
        if is_own_metric(name):
            raise ValueError(
                f"log_metric: expected a new name, got {name!r}, which the trainer itself logs"
            )
        if not isinstance(value, numbers.Real) and hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, numbers.Real) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"log_metric: expected a finite number for {name!r}, got {value!r}")
        self._metrics.setdefault(name, []).append(float(value))

    def metrics(self, accelerator: Accelerator) -> Metrics:
        """Return this process's samples. All processes call it and get the same names."""
        names = sorted(set(gather_object(sorted(self._metrics))))

        def stat(samples: list[float]) -> Stat:
            sums = torch.tensor([sum(samples), len(samples)], dtype=torch.float64)
            return Stat("mean", *sums.to(accelerator.device))

        return Metrics({name: stat(self._metrics.get(name, [])) for name in names})
