"""Sampling filters that remember which ids they left for each token."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_trainer.rollout.base import TokenIds
from grpo_trainer.rollout.sampling import Sampling

# transformers' own filters, which run after ours, off
NO_FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
_LATER = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "watermarking_config")


class RecordingFilters(LogitsProcessor):
    """Does what transformers does for temperature, top_k, top_p and min_p, in its order.

    Raises:
        ValueError: generation_kwargs ask for a filter that runs later.
    """

    def __init__(self, sampling: Sampling) -> None:
        later = [name for name in _LATER if sampling.engine_options.get(name) is not None]
        if later:
            raise ValueError(
                f"generation_kwargs: expected no {', '.join(later)} with use_sampling_mask, which "
                "knows top_k, top_p and min_p"
            )
        self._filters = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
        self._filters.append(TopKLogitsWarper(top_k=sampling.top_k))
        if sampling.top_p < 1:
            self._filters.append(TopPLogitsWarper(top_p=sampling.top_p))
        if sampling.min_p is not None:
            self._filters.append(MinPLogitsWarper(min_p=sampling.min_p))
        self._steps: list[Tensor] = []  # (N, 2): row of the batch, id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = self._filters(input_ids, scores)
        self._steps.append((scores > -math.inf).nonzero())
        return scores

    def sampling_mask(self, lengths: list[int]) -> list[list[TokenIds]]:
        """Return the ids that were left for each row's first so many tokens."""
        rows: list[list[TokenIds]] = [[] for _ in lengths]
        for step, found in enumerate(self._steps):
            counts = torch.bincount(found[:, 0], minlength=len(lengths)).tolist()
            for row, ids in enumerate(found[:, 1].split(counts)):
                if step < lengths[row]:
                    rows[row].append(ids.tolist())
        return rows
