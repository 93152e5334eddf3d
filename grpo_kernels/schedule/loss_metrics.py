"""The metrics of a loss, from the statistics that a schedule found."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch, host
from grpo_kernels.engine import REPORT
from grpo_kernels.losses import LossConfig, Stat, loss_stats, static_weights
from grpo_kernels.schedule.rows_with_gradient import rows_with_gradient


def loss_metrics(
    logp: Tensor,  # (T,), or (K,) with metric_rows="active"
    entropy: Tensor,
    entropy_gate: Tensor | None,  # (T,)
    bounded: Tensor | None,  # (6,), or nothing
    batch: TokenBatch,
    config: LossConfig,
    metric_rows: str,
) -> Mapping[str, Stat]:
    """Compute the statistics behind the metrics of ``linear_policy_loss``."""
    active = rows_with_gradient(batch, config)
    if metric_rows == "active":
        if logp.numel() != active.batch.num_tokens:
            logp, entropy = active.take(logp), active.take(entropy)
        weights = active.take_weights(static_weights(batch, config))
        stats = loss_stats(logp, entropy, active.batch.occupied(), config, None, weights)
    else:
        stats = loss_stats(logp, entropy, batch, config, entropy_gate)
    stats = {**stats, "frac_rows_skipped": _skipped(active.batch, batch)}
    if bounded is not None and bounded.numel():
        stats.update(_of_backward(**dict(zip(REPORT, bounded, strict=True))))
    return stats


def _of_backward(
    entries: Tensor, whole: Tensor, rows: Tensor, error: Tensor, norm: Tensor, bound: Tensor
) -> dict[str, Stat]:
    return {
        "backward_entries": Stat("mean", entries, rows),
        "backward_whole_rows": Stat("mean", whole, rows),
        "backward_error": Stat("norm_ratio", error, norm),
        "backward_error_bound": Stat("sum", bound, rows),
    }


def _skipped(active: TokenBatch, batch: TokenBatch) -> Stat:
    """Return the share of the caller's rows that got no backward."""
    total = 1
    for size in host.values(batch.layout):
        total *= size
    device, wide = batch.target.device, torch.float64
    skipped = torch.full((), total - active.num_tokens, dtype=wide, device=device)
    return Stat("mean", skipped, torch.full((), total, dtype=wide, device=device))
