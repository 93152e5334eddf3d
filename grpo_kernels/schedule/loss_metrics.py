"""The metrics of a loss, from the statistics that a schedule found."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch, host
from grpo_kernels.losses import LossConfig, Stat, loss_stats, static_weights
from grpo_kernels.schedule.rows_with_gradient import rows_with_gradient


def loss_metrics(
    logp: Tensor,  # (T,), or (K,) with metric_rows="active"
    entropy: Tensor,
    entropy_gate: Tensor | None,  # (T,)
    bounded: Tensor | None,  # (6,) REPORT, or empty
    batch: TokenBatch,
    config: LossConfig,
    metric_rows: str,
) -> Mapping[str, Stat]:
    """Compute the statistics behind the metrics of ``linear_policy_loss``."""
    active = rows_with_gradient(batch, config)
    if metric_rows == "active":
        if logp.numel() != active.batch.num_tokens:
            logp = active.selection.gather(logp)
            entropy = active.selection.gather(entropy)
        weights = active.select_weights(static_weights(batch, config))
        stats = loss_stats(
            logprobs=logp,
            entropy=entropy,
            batch=active.batch.occupied(),
            config=config,
            entropy_gate=None,
            weights=weights,
        )
    else:
        stats = loss_stats(
            logprobs=logp, entropy=entropy, batch=batch, config=config, entropy_gate=entropy_gate
        )
    # the share of the caller's rows that skipped the backward
    total = math.prod(host.values(batch.layout))
    skipped, count = (
        torch.full((), number, dtype=torch.float64, device=batch.target.device)
        for number in (total - active.batch.num_tokens, total)
    )
    stats = {**stats, "frac_rows_skipped": Stat("mean", skipped, count)}
    if bounded is not None and bounded.numel():
        entries, whole, rows, error, norm, bound = bounded
        stats["backward_entries"] = Stat("mean", entries, rows)
        stats["backward_whole_rows"] = Stat("mean", whole, rows)
        stats["backward_error"] = Stat("norm_ratio", error, norm)
        stats["backward_error_bound"] = Stat("sum", bound, rows)
    return stats
