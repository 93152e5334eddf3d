"""Static weights: every aggregation is ``sum_t w_t l_t`` with ``w_t`` known before the forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.batch.token_batch import TokenBatch

if TYPE_CHECKING:
    from grpo_kernels.losses.config import LossConfig


class Weights(NamedTuple):
    """Per-token factors (T,) of the policy loss and of the entropy bonus (before its coef)."""

    policy: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Aggregation:
    """How per-token losses become one number."""

    weight: Callable[[TokenBatch, LossConfig], Tensor]  # (T,) or ()
    # divided by the gradient accumulation steps here; otherwise num_items_in_batch spans them
    per_micro_batch: bool


def _sequences(batch: TokenBatch) -> int:
    return max(batch.num_sequences, 1)


def _sequence_mean(batch: TokenBatch, config: LossConfig) -> Tensor:
    lengths = batch.cu_seqlens.diff().clamp(min=1).to(batch.advantages.dtype)
    return batch.expand(1.0 / (lengths * _sequences(batch)))


def _sequence_sum(batch: TokenBatch, config: LossConfig) -> Tensor:
    return batch.advantages.new_full((), 1.0 / _sequences(batch))


def _token_mean(batch: TokenBatch, config: LossConfig) -> Tensor:
    return _inverse(_tokens_in_micro_batch(batch), batch)


def _fixed_length(batch: TokenBatch, config: LossConfig) -> Tensor:
    assert config.max_completion_length is not None  # LossConfig checked it
    scale = _sequences(batch) * config.max_completion_length
    return batch.advantages.new_full((), 1.0 / scale)


def _window_token_mean(batch: TokenBatch, config: LossConfig) -> Tensor:
    items = batch.num_items_in_batch
    if items is None:
        items = batch.num_tokens * batch.gradient_accumulation_steps
    return _inverse(items, batch)


def _tokens_in_micro_batch(batch: TokenBatch) -> Tensor | float:
    given = batch.num_tokens_in_micro_batch
    return batch.num_tokens if given is None else given


def _inverse(count: Tensor | float, batch: TokenBatch) -> Tensor:
    """``1 / count``, (), or 1 for a count of 0."""
    device = batch.advantages.device
    if isinstance(count, Tensor):
        count = count.to(device, torch.float64)
    else:
        count = torch.full((), count, device=device, dtype=torch.float64)
    # 0 only when no process has a token; a fraction is a share of several processes or steps
    return (1.0 / torch.where(count > 0, count, 1.0)).to(batch.advantages.dtype)


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": Aggregation(_sequence_mean, per_micro_batch=True),
    "sequence_sum": Aggregation(_sequence_sum, per_micro_batch=True),
    "token_mean": Aggregation(_token_mean, per_micro_batch=True),
    "fixed_length": Aggregation(_fixed_length, per_micro_batch=True),
    "window_token_mean": Aggregation(_window_token_mean, per_micro_batch=False),
}


def static_weights(batch: TokenBatch, config: LossConfig) -> Weights:
    """The weights of every token of ``batch``."""
    aggregation = AGGREGATIONS[config.loss.aggregation]
    steps = batch.gradient_accumulation_steps
    policy = aggregation.weight(batch, config)
    if aggregation.per_micro_batch:
        policy = policy / steps
    entropy = _inverse(_tokens_in_micro_batch(batch), batch) / steps
    if batch.entropy_scale is not None:
        entropy = entropy * batch.entropy_scale
    shape = batch.advantages.shape
    return Weights(policy.expand(shape), entropy.expand(shape))
