"""Which rows of a batch can have a gradient, known before the forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import grpo_kernels.batch.host as host
from grpo_kernels.batch.token_batch import TokenBatch
from grpo_kernels.losses import LossConfig
from grpo_kernels.losses.weights import Weights


@dataclass(frozen=True)
class ActiveRows:
    """The rows that can have a gradient, and the others."""

    batch: TokenBatch  # of these rows, in the same sequences
    index: Tensor | None = None  # (K,) int64, which they are of all; None: all
    rest: Tensor | None = None  # (T - K,) int64, the others

    @property
    def waiting(self) -> int:
        """How many the others are."""
        return 0 if self.rest is None else self.rest.numel()

    def take(self, values: Tensor) -> Tensor:
        """(T, ...) values of these rows."""
        return values if self.index is None else values[self.index]

    def take_weights(self, weights: Weights) -> Weights:
        """Their weights in the whole batch."""
        return Weights(*(self.take(weight) for weight in weights))

    def merge(self, values: Tensor, others: Tensor) -> Tensor:
        """(T,) from (K,) values of these rows and (T - K,) of the others."""
        assert self.index is not None and self.rest is not None
        whole = values.new_empty(values.numel() + others.numel())
        return whole.index_copy(0, self.index, values).index_copy(0, self.rest, others)


def active_rows(batch: TokenBatch, config: LossConfig) -> ActiveRows:
    """The rows with an advantage, where a loss vanishes without one. No host transfer."""
    counts = batch.active_lengths
    penalised = config.beta != 0 or config.entropy_coef != 0
    if counts is None or penalised or not config.surrogate.vanishes_at_zero_advantage:
        return ActiveRows(batch)
    active = batch.advantages != 0
    if config.scope(batch.rollout_logprobs is not None) != "token":
        # one token's advantage reaches every log-probability of its sequence
        counts = tuple(n if few else 0 for few, n in zip(counts, batch.lengths, strict=True))
        active = batch.expand(batch.segment_sum(active.double())) > 0
    count = sum(counts)
    if count == batch.num_tokens:
        return ActiveRows(batch)
    order = torch.argsort(~active, stable=True)
    return ActiveRows(batch.select(order[:count], counts), order[:count], order[count:])


def rows_left_out(metrics: str, waiting: int, middle: str, hidden: Tensor) -> list[str]:
    """What happens to the rows that get no gradient, for ``explain``."""
    known = "rows of zero advantage: not computed"
    if metrics == "all":
        known = f"rows of zero advantage: {waiting} take the forward only, for the metrics"
    if middle == "row kernel":
        found = "multiplied as zeros, since the loss runs inside the row kernel"
    elif host.reading_is_free(hidden):
        found = "left out of the products of their gradients"
    else:
        found = "multiplied as zeros; to leave them out the host would have to wait for the device"
    return [known, f"rows that the loss clips or gates: {found}"]
