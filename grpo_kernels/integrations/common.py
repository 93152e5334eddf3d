"""Shared by several adapters: a weight next to hidden states, distillation, summed losses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch
from grpo_kernels.head import Head, autocast_dtype
from grpo_kernels.linear_divergence import LinearDivergence, linear_divergence
from grpo_kernels.losses import (
    LossConfig,
    Metrics,
    PolicyLossOutput,
    Weights,
    check_loss_inputs,
    loss_stats,
    weighted_loss,
)

_AT_THE_ENDS: dict[float, str] = {0: "forward_kl", 1: "reverse_kl"}


def in_dtype_of(hidden: Tensor, head: Head) -> Head:
    """Return the head in the dtype of the hidden states, unless autocast chooses one."""
    if autocast_dtype(hidden.device) is not None:
        return head
    return replace(head, weight=head.weight.to(hidden.dtype))


def divergence_of(
    beta: float,
    *,
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    **options: Any,
) -> LinearDivergence:
    """Compute the generalized JSD with a ``beta`` (arXiv:2306.13649) from a fixed teacher.

    For ``beta`` 0 and 1, where the JSD vanishes, trainers use KL(teacher, student) and the reverse.
    """
    kind = _AT_THE_ENDS.get(beta)
    options |= {"kind": "jsd", "beta": beta} if kind is None else {"kind": kind}
    teacher = in_dtype_of(teacher_hidden, teacher)
    bias = None if teacher.bias is None else teacher.bias.detach()
    return linear_divergence(
        hidden,
        in_dtype_of(hidden, head),
        teacher_hidden.detach(),
        replace(teacher, weight=teacher.weight.detach(), bias=bias),
        **options,
    )


def summed_loss(
    logprobs: Tensor, batch: TokenBatch, config: LossConfig, weights: Tensor | None = None
) -> PolicyLossOutput:
    """Compute the loss as a sum over the T tokens, for trainers that normalize it themselves.

    The aggregation of ``config`` is not used. ``logprobs``, fp32 or fp64, and the optional
    ``weights`` of the tokens' losses have the layout that ``batch`` was built from.

    Raises:
        ValueError: ``batch`` lacks an input that the loss needs.
    """
    check_loss_inputs(batch, config)
    logprobs = batch.of_tokens("logprobs", logprobs)
    factors = torch.ones_like(logprobs)
    if weights is not None:
        factors = batch.of_tokens("weights", weights).to(logprobs.dtype)
    loss, gate = weighted_loss(
        logprobs=logprobs, batch=batch, config=config, entropy=None, weights=Weights(factors, None)
    )
    known = logprobs.detach()
    metrics = Metrics(partial(loss_stats, known, None, batch, config, gate), known)
    return PolicyLossOutput(loss, metrics)
