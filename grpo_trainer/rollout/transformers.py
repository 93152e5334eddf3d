"""Rollouts by ``model.generate`` of the model being trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_trainer.data import pad_rows
from grpo_trainer.rollout.base import (
    Completions,
    EngineContext,
    Sampling,
    TokenIds,
    WeightSource,
    cut_after_eos,
)
from grpo_trainer.rollout.filters import NO_FILTERS, RecordingFilters


class TransformersEngine:
    """Samples with the policy itself, so it has its weights. Reports no log-probabilities.

    Args:
        policy: gives the unwrapped policy; asked at every call, since wrapping happens late.
        tokenizer: for its special tokens.
        cache_implementation: kind of key-value cache; None: transformers' default.
    """

    def __init__(
        self,
        policy: Callable[[], PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        cache_implementation: str | None = None,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._cache = cache_implementation

    @classmethod
    def from_context(cls, context: EngineContext) -> TransformersEngine:
        return cls(context.policy, context.tokenizer, context.args.cache_implementation)

    def generate(self, prompt_ids: list[TokenIds], sampling: Sampling) -> Completions:
        """Return one completion per prompt, in one left-padded batch."""
        if not prompt_ids:
            return Completions([])
        model = self._policy()
        config = generation_config(sampling, self._tokenizer, self._cache)
        rows = [torch.tensor(ids) for ids in prompt_ids]
        ids = pad_rows(rows, config.pad_token_id, left=True).to(model.device)
        mask = pad_rows([torch.ones_like(row) for row in rows], 0, left=True).to(model.device)
        filters = RecordingFilters(sampling) if sampling.sampling_mask_size else None
        processors = None if filters is None else LogitsProcessorList([filters])
        was_training = model.training
        model.eval()  # no dropout, and gradient checkpointing would disable the cache
        with torch.no_grad():
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=processors,
            )
        model.train(was_training)
        found = output[:, ids.shape[1] :].tolist()
        completions = [cut_after_eos(row, sampling.eos_token_ids) for row in found]
        left = None if filters is None else filters.sampling_mask([len(row) for row in completions])
        return Completions(completions, sampling_mask=left)

    def update_weights(self, weights: WeightSource) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def generation_config(
    sampling: Sampling, tokenizer: PreTrainedTokenizerBase, cache: str | None = None
) -> GenerationConfig:
    """Return the sampling in transformers' words."""
    settings = {
        "do_sample": True,
        "use_cache": True,
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "cache_implementation": cache,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": sorted(sampling.eos_token_ids) or None,
        "pad_token_id": pad_token_id(tokenizer),
    }
    if sampling.sampling_mask_size:
        settings |= NO_FILTERS  # RecordingFilters has them
    return GenerationConfig(**(settings | dict(sampling.engine_options)))


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, or the end-of-sequence token of a tokenizer without one.

    Raises:
        ValueError: the tokenizer has neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("processing_class: expected a pad_token or an eos_token, got neither")
