"""Our losses for hosts that hand over log-probabilities, want a sum and normalise by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch
from grpo_kernels.losses import (
    LOSSES,
    LossConfig,
    Metrics,
    PolicyLossOutput,
    Weights,
    check_loss_inputs,
    check_name,
    loss_stats,
    weighted_loss,
)

# settings that none of these hosts lets a loss honour, and why
_REFUSED = {
    "loss_type": "it is the name of the loss",
    "temperature": "the host's log-probabilities are at its own",
    "max_completion_length": "the host normalises",
    "loss_aggregation": "the host normalises",
    "exclude_zero_variance": "the host normalises",
    "entropy_coef": "the host gives a loss no entropies",
    "top_entropy_quantile": "the host gives a loss no entropies",
}


def host_aggregation(
    loss_type: str, known: Mapping[str, str], host: str, aggregation: str | None = None
) -> str:
    """Return what ``host`` calls the loss's own aggregation, or the ``aggregation`` in its place.

    Args:
        loss_type: a name of ``grpo_kernels.losses.LOSSES``.
        known: our name of each aggregation that the host has, and the host's.
        host: its name, for messages.
        aggregation: None: the loss's own.

    Raises:
        ValueError: the host has no such aggregation, or there is no such loss.
    """
    check_name("loss_type", loss_type, LOSSES)
    if aggregation is not None:
        check_name("loss_aggregation", aggregation, known)
        return known[aggregation]
    if LOSSES[loss_type].aggregation not in known:
        possible = [name for name, loss in LOSSES.items() if loss.aggregation in known]
        raise ValueError(
            f"loss_type: expected one of {', '.join(possible)}, which normalise as {host} does, "
            f"got {loss_type!r} ({LOSSES[loss_type].aggregation})"
        )
    return known[LOSSES[loss_type].aggregation]


def config_of(
    loss_type: str, settings: Mapping[str, Any], refused: Mapping[str, str]
) -> LossConfig:
    """Return the config of a loss whose aggregation is left to the host.

    A setting that the host gives no way to honour, ``refused`` says why, is a ValueError.
    """
    refused = {**_REFUSED, **refused}
    for name, value in settings.items():
        if name in refused:
            raise ValueError(f"{name}: expected none here ({refused[name]}), got {value!r}")
    # a sum has no aggregation, this one needs nothing of a batch; no correction unless asked for
    values = {"rollout_correction_mode": None, **settings}
    return LossConfig(loss_type=loss_type, loss_aggregation="window_token_mean", **values)


def summed_loss(
    logprobs: Tensor, batch: TokenBatch, config: LossConfig, weights: Tensor | None = None
) -> PolicyLossOutput:
    """Compute the loss as a sum over the T tokens, in place of the aggregation of ``config``.

    ``logprobs``, fp32 or fp64, and the factors ``weights`` on the tokens' losses, if there are
    some, are laid out as ``batch`` was built. What the loss needs and ``batch`` does not have is a
    ValueError.
    """
    check_loss_inputs(batch, config)
    logprobs = batch.of_tokens("logprobs", logprobs)
    factors = torch.ones_like(logprobs)
    if weights is not None:
        factors = batch.of_tokens("weights", weights).to(logprobs.dtype)
    loss, gate = weighted_loss(logprobs, batch, config, None, Weights(factors, None))
    known = logprobs.detach()
    metrics = Metrics(partial(loss_stats, known, None, batch, config, gate), known)
    return PolicyLossOutput(loss, metrics)
