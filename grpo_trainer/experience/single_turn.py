"""Completions by one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_kernels.losses import Metrics
from grpo_trainer.agents import TurnParser
from grpo_trainer.data import Sample
from grpo_trainer.engines import Completions, Images, Sampler, TokenIds
from grpo_trainer.monitor import phase


class SingleTurn:
    """Completes samples by one call of the engine."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._parser = TurnParser(sampler.context.tokenizer, sampler.eos_token_ids)

    def __call__(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples``; ValueError for a prompt that cannot be encoded."""
        self.sampler.context.encode(samples)
        prompt_ids, images = prompts_of(samples)
        with phase("generate"):
            completions = self.sampler.generate(prompt_ids, images=images)
        self.complete(samples, completions)
        return Metrics({})

    def complete(self, samples: Sequence[Sample], completions: Completions) -> None:
        """Add what an engine made of the prompts of ``samples``."""
        prompts = [sample.prompt for sample in samples]
        prompt_ids, _ = prompts_of(samples)
        texts = self._parser.completions(prompts, prompt_ids, completions.token_ids)
        for sample, text, row in zip(samples, texts, completions.rows(), strict=True):
            sample.logprobs, sample.sampling_mask = row.logprobs, row.sampling_mask
            sample.completed(text, row.token_ids, self.sampler.eos_token_ids)


def prompts_of(samples: Sequence[Sample]) -> tuple[list[TokenIds], Images]:
    """Return what an engine is asked to complete."""
    return [sample.prompt_ids for sample in samples], [sample.images for sample in samples]
