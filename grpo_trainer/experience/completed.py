"""Samples from the user's :class:`Prompts`: checks them and aligns completed ones with others."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator

from grpo_trainer.data import Sample, decode_completions
from grpo_trainer.engines import Sampler
from grpo_trainer.experience.rollout_func import check_completion


def check_samples(samples: Any, expected: int, sampler: Sampler, environments: bool) -> None:
    """Raise ValueError unless there are ``expected`` distinct ``samples``, and completed ones have
    what the engine would add. Encodes prompts that are not encoded."""
    if not isinstance(samples, list) or not all(isinstance(one, Sample) for one in samples):
        raise ValueError(f"prompts: expected a list of Samples from next, got {type(samples)}")
    if len(samples) != expected or len({id(sample) for sample in samples}) != expected:
        raise ValueError(
            f"prompts: expected {expected} distinct samples for this process from next, got "
            f"{len(samples)} ({len({id(sample) for sample in samples})} distinct)"
        )
    for number, sample in enumerate(samples):
        if not sample.completion_ids:
            continue
        if environments:
            raise ValueError(
                "prompts: expected incomplete samples with environment_factory, whose rewards "
                f"depend on how they are completed, got a completed sample as number {number}"
            )
        if not sample.prompt_ids:
            sampler.context.encode([sample])
        try:
            check_completion(sample, sampler)
        except ValueError as error:
            raise ValueError(f"prompts: sample {number}: {error}") from error
        if sample.completion is None:
            tokenizer = sampler.context.tokenizer
            [text] = decode_completions([sample.completion_ids], [sample.prompt], tokenizer)
            sample.completed(text, sample.completion_ids, sampler.eos_token_ids)


def align_columns(samples: list[Sample], masks: bool, accelerator: Accelerator) -> None:
    """Give all samples log-probabilities if a sample on any process has them: NaN if unknown.

    Raises:
        ValueError: a sample has no sampling mask, and the loss needs ``masks``.
    """
    has_logprobs = any_process(any(one.logprobs is not None for one in samples), accelerator)
    for sample in samples:
        if masks and sample.sampling_mask is None:
            raise ValueError("use_sampling_mask: expected a sampling_mask in each sample, got none")
        if has_logprobs and sample.logprobs is None:
            sample.logprobs = [math.nan] * len(sample.completion_ids)


def any_process(here: bool, accelerator: Accelerator) -> bool:
    """Return whether ``here`` is true on any process. Every process calls it."""
    if accelerator.num_processes == 1:
        return here
    flag = torch.tensor([here], device=accelerator.device)
    return bool(accelerator.gather(flag).any())
