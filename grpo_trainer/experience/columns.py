"""Log-probabilities that a loss needs, as columns of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from grpo_kernels import Metrics
from grpo_trainer.common import shortened
from grpo_trainer.config import Settings, import_path
from grpo_trainer.data import Column, MicroBatch
from grpo_trainer.monitor import phase
from grpo_trainer.policy import Placement, Reference, Teacher, target_logprobs


def fill_columns(batch: MicroBatch, columns: Sequence[Column], policy: nn.Module) -> Metrics:
    """Compute the columns of a micro-batch in order, and return the metrics to log.

    Raises:
        ValueError: one returns something other than metrics or None.
    """
    logged = []
    for column in columns:
        advantages, target = batch.advantages, batch.target
        versions = advantages._version, target._version
        with torch.no_grad():
            metrics = column(batch, policy)
        if metrics is not None and not isinstance(metrics, Metrics):
            raise ValueError(
                f"columns: expected Metrics or None from {import_path(column)}, got "
                f"{shortened(metrics)}"
            )
        logged += [] if metrics is None else [metrics]
        unchanged = batch.advantages is advantages and batch.target is target
        if not unchanged or versions != (advantages._version, target._version):
            batch.lengths = batch.active_lengths = None  # the old counts are no longer valid
    batch.samples = None
    return logged[0] if len(logged) == 1 else Metrics.merge(logged)


def old_logprobs(placement: Placement, settings: Settings, in_evaluation: bool) -> Column:
    """Return the column of the policy before it changes within a generation batch."""

    def column(batch: MicroBatch, policy: nn.Module) -> None:
        if policy.training or in_evaluation:
            with phase("old"):
                model = placement.runs(policy)
                batch.old_logprobs = target_logprobs(
                    model, batch, settings.loss.temperature, replays_routing=True
                )

    return column


def reference_logprobs(reference: Reference, settings: Settings) -> Column:
    """Return the column of the KL penalty's reference."""

    def column(batch: MicroBatch, policy: nn.Module) -> None:
        with phase("ref"), reference.running(policy) as model:
            batch.ref_logprobs = target_logprobs(model, batch, settings.loss.temperature)

    return column


def teacher_advantages(teacher: Teacher) -> Column:
    """Return the column that adds a teacher's log-probabilities to the advantages."""

    def column(batch: MicroBatch, policy: nn.Module) -> Metrics:
        with phase("ref"):
            return teacher.add_to_advantages(batch, policy)

    return column
