"""Samples of the user's :class:`Prompts`: checked, and completed ones made alike with others."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator

from grpo_trainer.data import Sample, decode_completions
from grpo_trainer.engines import Sampler
from grpo_trainer.experience.rollout_func import check_completion


def check_samples(samples: Any, expected: int, sampler: Sampler, environments: bool) -> None:
    """Raise ValueError unless ``samples`` are as many different ones, and those that are completed
    have what the engine would have given them. Encode prompts that are not."""
    if not isinstance(samples, list) or not all(isinstance(one, Sample) for one in samples):
        raise ValueError(f"prompts: expected a list of Samples from next, got {type(samples)}")
    if len(samples) != expected or len({id(sample) for sample in samples}) != expected:
        raise ValueError(
            f"prompts: expected {expected} different samples of this process from next, got "
            f"{len(samples)} ({len({id(sample) for sample in samples})} different ones)"
        )
    for number, sample in enumerate(samples):
        if not sample.completion_ids:
            continue
        if environments:
            raise ValueError(
                "prompts: expected samples to complete with environment_factory, whose rewards "
                f"come from how they were completed, got a completed one as number {number}"
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
    """Give all samples log-probabilities if one on any process has them: NaN for unknown ones.

    Raises:
        ValueError: one has no sampling mask, where the loss needs ``masks``.
    """
    has_logprobs = any_process(any(one.logprobs is not None for one in samples), accelerator)
    for sample in samples:
        if masks and sample.sampling_mask is None:
            raise ValueError("use_sampling_mask: expected a sampling_mask of each sample, got none")
        if has_logprobs and sample.logprobs is None:
            sample.logprobs = [math.nan] * len(sample.completion_ids)


def any_process(here: bool, accelerator: Accelerator) -> bool:
    """Return whether it is so on any process. Every process calls it."""
    if accelerator.num_processes == 1:
        return here
    flag = torch.tensor([here], device=accelerator.device)
    return bool(accelerator.gather(flag).any())
