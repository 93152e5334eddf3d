"""Completions from one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from grpo_kernels.losses import Metrics
from grpo_trainer.agents import TurnParser
from grpo_trainer.common import in_background, together
from grpo_trainer.data import Sample
from grpo_trainer.engines import Completions, EngineContext, Sampler
from grpo_trainer.monitor import phase


class SingleTurn:
    """Completes samples with one call of the engine.

    Args:
        sampler: samples completions.
        context: has a processing class that no other thread uses.
    """

    def __init__(self, sampler: Sampler, context: EngineContext) -> None:
        self.sampler = sampler
        self._context = context
        self._parser = TurnParser(context.tokenizer, sampler.eos_token_ids)

    def __call__(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples``; ValueError for a prompt that cannot be encoded."""
        self._context.encode(samples)
        prompt_ids = [sample.prompt_ids for sample in samples]
        images = [sample.images for sample in samples]
        with phase("generate"):
            completions = self.sampler.generate(prompt_ids, images=images)
        self.add(samples, completions)
        return Metrics({})

    async def ahead(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples`` in the background; see :class:`Source`."""
        await in_background(partial(self._context.encode, samples))
        work = [self.sampler.complete(one.prompt_ids, images=one.images) for one in samples]
        self.add(samples, Completions.of(await together(work)))
        return Metrics({})

    def add(self, samples: Sequence[Sample], completions: Completions) -> None:
        """Add the engine's completions to ``samples``."""
        prompts = [sample.prompt for sample in samples]
        prompt_ids = [sample.prompt_ids for sample in samples]
        texts = self._parser.completions(prompts, prompt_ids, completions.token_ids)
        for sample, text, row in zip(samples, texts, completions.rows(), strict=True):
            sample.logprobs, sample.sampling_mask = row.logprobs, row.sampling_mask
            sample.rollout_versions = row.versions
            sample.routed_experts = row.routed_experts
            sample.completed(text, row.token_ids, self.sampler.eos_token_ids)
