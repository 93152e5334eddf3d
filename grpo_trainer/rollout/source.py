"""What makes completions in place of one call of the engine, such as tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_kernels.losses import Metrics
from grpo_trainer.data import Rollout, Row
from grpo_trainer.rollout.sync import Rollouts


@dataclass(frozen=True)
class Sampled:
    """n completions, and what came with them."""

    rollouts: list[Rollout]
    # more arguments of reward functions, one value per completion each
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=lambda: Metrics({}))


class Source(Protocol):
    """Where completions come from, if not from one call of the engine."""

    def sample(self, rows: list[Row], rollouts: Rollouts) -> Sampled:
        """Return one completion per row. In a distributed run every process calls it."""
        ...
