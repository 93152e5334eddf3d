"""Rollouts by transformers' continuous batching: a finished completion makes room for the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_trainer.config import options
from grpo_trainer.rollout.base import (
    Completions,
    EngineContext,
    Sampling,
    TokenIds,
    WeightSource,
    cut_after_eos,
)
from grpo_trainer.rollout.transformers import generation_config


class ContinuousBatchingEngine:
    """Samples with the policy itself, in a paged cache; it reports log-probabilities.

    Args:
        policy: gives the unwrapped policy; asked at every call, since wrapping happens late.
        tokenizer: for its special tokens.
        settings: fields of transformers' ContinuousBatchingConfig, such as ``num_blocks``.

    Raises:
        ValueError: the installed transformers has no such batching, or ``settings`` are wrong.
    """

    def __init__(
        self,
        policy: Callable[[], PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        settings: Mapping[str, Any],
    ) -> None:
        try:
            from transformers.generation import ContinuousBatchingConfig
        except ImportError as error:
            raise ValueError(f"use_transformers_continuous_batching: {error}") from error
        try:
            self._batching = ContinuousBatchingConfig(**{"return_logprobs": True, **settings})
        except TypeError as error:
            raise ValueError(f"transformers_continuous_batching_config: {error}") from error
        self._policy = policy
        self._tokenizer = tokenizer

    @classmethod
    def from_context(cls, context: EngineContext) -> ContinuousBatchingEngine:
        name = "transformers_continuous_batching_config"
        settings = options(name, getattr(context.args, name))
        return cls(context.policy, context.tokenizer, settings)

    def generate(self, prompt_ids: list[TokenIds], sampling: Sampling) -> Completions:
        """Return one completion per prompt.

        Raises:
            ValueError: a prompt was not completed, such as one that the cache has no room for.
        """
        if not prompt_ids:
            return Completions([])
        model = self._policy()
        was_training = model.training
        model.eval()
        with torch.no_grad():
            outputs = model.generate_batch(
                prompt_ids,
                generation_config=generation_config(sampling, self._tokenizer),
                continuous_batching_config=self._batching,
                progress_bar=False,
            )
        model.train(was_training)
        done = list(outputs.values())  # in the order of the prompts
        failed = [output.error for output in done if output.error is not None]
        if failed or len(done) != len(prompt_ids):
            raise ValueError(
                f"use_transformers_continuous_batching: {len(prompt_ids)} prompts, "
                f"{len(done) - len(failed)} completed; {failed[:1]}"
            )
        ids = [cut_after_eos(output.generated_tokens, sampling.eos_token_ids) for output in done]
        if not self._batching.return_logprobs:
            return Completions(ids)
        pairs = zip(done, ids, strict=True)
        return Completions(ids, [output.logprobs[: len(row)] for output, row in pairs])

    def update_weights(self, weights: WeightSource) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
