"""Gates: detached factors on the surrogate that depend on log-probabilities or entropy."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.batch import Segments
from grpo_kernels.losses.ratios import LOG_RATIO_LIMIT

_LARGEST_WEIGHT = math.exp(LOG_RATIO_LIMIT)


class CorrectionMode(NamedTuple):
    """One way to turn ``exp(lo - ls)`` into a bounded weight."""

    per_sequence: bool
    truncate: bool  # clamp to the bounds; otherwise zero outside of them


CORRECTION_MODES: dict[str, CorrectionMode] = {
    "token_truncate": CorrectionMode(per_sequence=False, truncate=True),
    "token_mask": CorrectionMode(per_sequence=False, truncate=False),
    "sequence_truncate": CorrectionMode(per_sequence=True, truncate=True),
    "sequence_mask": CorrectionMode(per_sequence=True, truncate=False),
}


def rollout_log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return ``lo - ls`` (T,); 0, which corrects nothing, where the engine reported NaN."""
    return (old_logprobs - rollout_logprobs).nan_to_num(nan=0.0).detach()


def rollout_correction(
    log_ratio: Tensor,  # (T,) of `rollout_log_ratio`
    mode: CorrectionMode,
    low: float | None,
    high: float | None,
    segments: Segments,
) -> Tensor:
    """Return the importance weight against the rollout engine: (T,), or (B,) per sequence.

    Without an upper bound it ends at ``exp(LOG_RATIO_LIMIT)``: an infinite one times 0 is NaN.
    """
    weight = (segments.sum(log_ratio) if mode.per_sequence else log_ratio).exp()
    if mode.truncate:
        return weight.clamp(min=low, max=_LARGEST_WEIGHT if high is None else high)
    outside = torch.zeros_like(weight, dtype=torch.bool)
    if low is not None:
        outside = outside | (weight < low)
    if high is not None:
        outside = outside | (weight > high)
    return weight.clamp(max=_LARGEST_WEIGHT).masked_fill(outside, 0.0)


def off_policy_gate(
    logprobs: Tensor,  # (T,)
    sampling_logprobs: Tensor,  # (T,) of the rollout engine, or else the old ones; NaN: unknown
    advantages: Tensor,  # (T,)
    threshold: float,
    segments: Segments,
) -> Tensor:
    """Return 1 where ``A >= 0`` or the sequence drifted at most ``threshold`` nats, else 0.

    Off-policy sequence masking of DeepSeek-V3.2, arXiv:2512.02556. Returns (T,).
    """
    drift = (sampling_logprobs - logprobs.detach()).nan_to_num(nan=0.0)
    near = segments.expand(segments.mean(drift)) <= threshold
    return ((advantages >= 0) | near).to(logprobs.dtype)


def top_entropy_gate(entropy: Tensor, quantile: float, copies: int = 1) -> Tensor:
    """Return 1 where the entropy is in the top ``quantile`` of all processes; (T,) to (T,).

    "Beyond the 80/20 rule", arXiv:2506.01939. The threshold is the linearly interpolated quantile,
    found by sorting: ``torch.quantile`` refuses more than 2**24 values. ``copies`` processes have
    the same tokens, as those that share a vocabulary do.
    """
    entropy = entropy.detach()
    everyone = _gather_values(entropy)
    if everyone.numel() == 0:
        return torch.zeros_like(entropy)
    ordered = everyone.sort().values[::copies]
    position = (1 - quantile) * (ordered.numel() - 1)
    below = int(position)
    above = min(below + 1, ordered.numel() - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return (entropy >= threshold).to(entropy.dtype)


def _gather_values(values: Tensor) -> Tensor:
    """Return all processes' values, concatenated; sizes may differ."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return values
    size = torch.tensor([values.numel()], device=values.device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    counts = [int(item) for item in torch.cat(sizes).tolist()]
    padded = values.new_zeros(max(counts))
    padded[: values.numel()] = values
    gathered = [torch.zeros_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
