"""Which tokens of a batch can have a gradient, known before the forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch, host
from grpo_kernels.engine import Selection
from grpo_kernels.losses import LossConfig, Weights


@dataclass(frozen=True)
class RowsWithGradient:
    """The tokens of a batch that can have a gradient, and the others."""

    batch: TokenBatch  # the K tokens that can, in the same sequences
    selection: Selection = Selection()  # noqa: RUF009, among T tokens
    forward_only: Tensor | None = None  # (T - K,) int64, the other tokens

    def select_weights(self, weights: Weights) -> Weights:
        """Return these tokens' weights, given the weights of the whole batch."""
        gather = self.selection.gather
        return Weights(*(None if weight is None else gather(weight) for weight in weights))  # type: ignore[arg-type]

    def merge(self, values: Tensor, others: Tensor | None = None) -> Tensor:
        """Merge (K,) values of these tokens and (T - K,) of the others, or zeros, into (T,)."""
        whole = self.selection.scatter(values)
        if others is None or self.forward_only is None:
            return whole
        return whole.index_copy(0, self.forward_only, others)


def rows_with_gradient(batch: TokenBatch, config: LossConfig) -> RowsWithGradient:
    """Find the rows with an advantage, if the loss vanishes without one. No host transfer."""
    lengths = batch.active_lengths
    group = batch.sequence_group
    penalised = config.beta != 0 or config.entropy_coef != 0
    if lengths is None or penalised or not config.surrogate.vanishes_at_zero_advantage:
        return RowsWithGradient(batch)
    by_sequence = config.scope(batch.rollout_logprobs is not None) != "token"
    if by_sequence:  # one token's advantage reaches every log-probability of its sequence
        whole = host.values(batch.whole_counts)[1]
        lengths = tuple(n if few else 0 for few, n in zip(whole, batch.lengths, strict=True))
    count = sum(lengths)
    left = None
    everything = count == batch.num_tokens
    if group is not None:  # either all of its ranks leave rows out, or none does
        left = group.of_active(by_sequence)
        everything = left.num_tokens == group.num_tokens
    if everything:
        return RowsWithGradient(batch)
    active = batch.advantages != 0
    if by_sequence:
        segments = batch.segments
        of_each = segments.sum(active.double()) if group is None else group.on_device[1]
        active = segments.expand(of_each > 0)
    order = torch.argsort(~active, stable=True)
    selection = Selection(order[:count], batch.num_tokens)
    selected = replace(batch.select(order[:count], host.to_host(lengths)), sequence_group=left)
    return RowsWithGradient(selected, selection, forward_only=order[count:])
