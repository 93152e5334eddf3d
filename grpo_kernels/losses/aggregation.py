"""Aggregations: each is ``sum_t w_t l_t`` with static weights ``w_t``, known before the forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch, host


@dataclass(frozen=True)
class Aggregation:
    """How per-token losses become one number."""

    # of a batch, and the constant length: (T,), () or a number
    weight: Callable[[TokenBatch, int | None], Tensor | float]
    # divided by the gradient accumulation steps here; otherwise num_items_in_batch spans them
    per_micro_batch: bool
    divides_by_max_length: bool = False
    by_sequence: bool = False  # it reduces each sequence first; else all tokens are alike


def _sequences(batch: TokenBatch) -> float:
    return batch.sequences_per_rank or 1


def _sequence_mean(batch: TokenBatch, max_length: int | None) -> Tensor:
    lengths = batch.segments.lengths.clamp(min=1).double()
    return batch.segments.expand((lengths * _sequences(batch)).reciprocal())


def _sequence_sum(batch: TokenBatch, max_length: int | None) -> float:
    return 1.0 / _sequences(batch)


def _token_mean(batch: TokenBatch, max_length: int | None) -> Tensor | float:
    return inverse(tokens_in_micro_batch(batch))


def _fixed_length(batch: TokenBatch, max_length: int | None) -> float:
    assert max_length is not None  # LossConfig checked it
    return 1.0 / (_sequences(batch) * max_length)


def _window_token_mean(batch: TokenBatch, max_length: int | None) -> Tensor | float:
    items = batch.num_items_in_batch
    if items is None:
        return inverse(batch.tokens_per_rank * batch.gradient_accumulation_steps)
    return inverse(items)


def tokens_in_micro_batch(batch: TokenBatch) -> Tensor | float:
    """Return what the means over a micro-batch divide by."""
    given = batch.num_tokens_in_micro_batch
    return batch.tokens_per_rank if given is None else given


def inverse(count: Tensor | float) -> Tensor | float:
    """Return ``1 / count``, or 1 for a count of 0: a tensor only where it is on a device."""
    if isinstance(count, Tensor):
        if not host.reading_is_free(count):
            # 0 only when no process has a token; a fraction is a share of processes or steps
            return torch.where(count > 0, count.double(), 1.0).reciprocal()
        count = host.values(count)
    return 1.0 / count if count > 0 else 1.0


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": Aggregation(_sequence_mean, per_micro_batch=True, by_sequence=True),
    "sequence_sum": Aggregation(_sequence_sum, per_micro_batch=True, by_sequence=True),
    "token_mean": Aggregation(_token_mean, per_micro_batch=True),
    "fixed_length": Aggregation(_fixed_length, per_micro_batch=True, divides_by_max_length=True),
    "window_token_mean": Aggregation(_window_token_mean, per_micro_batch=False),
}
