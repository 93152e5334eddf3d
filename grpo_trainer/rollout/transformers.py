"""Rollouts by ``model.generate`` of the model being trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.microbatch import pad_rows
from grpo_trainer.rollout.base import TokenIds, cut_after_eos


class TransformersEngine:
    """Samples with the policy itself.

    Args:
        model: gives the unwrapped policy; asked at every call, since wrapping happens late.
        tokenizer: for its special tokens.
        args: sampling settings.
    """

    def __init__(
        self,
        model: Callable[[], PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        args: GRPOConfig,
    ) -> None:
        self._model = model
        settings = {
            "do_sample": True,
            "use_cache": True,
            "max_new_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": pad_token_id(tokenizer),
        }
        settings |= options("generation_kwargs", args.generation_kwargs)
        self.config = GenerationConfig(**settings)
        eos = self.config.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())

    def generate(self, prompt_ids: list[TokenIds]) -> list[TokenIds]:
        """One completion per prompt, in one left-padded batch."""
        model = self._model()
        rows = [torch.tensor(ids) for ids in prompt_ids]
        ids = pad_rows(rows, self.config.pad_token_id, left=True).to(model.device)
        mask = pad_rows([torch.ones_like(row) for row in rows], 0, left=True).to(model.device)
        was_training = model.training
        model.eval()  # no dropout, and gradient checkpointing would disable the cache
        with torch.no_grad():
            output = model.generate(
                input_ids=ids, attention_mask=mask, generation_config=self.config
            )
        model.train(was_training)
        completions = output[:, ids.shape[1] :].tolist()
        return [cut_after_eos(row, self.eos_token_ids) for row in completions]


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, or the end-of-sequence token of a tokenizer without one.

    Raises:
        ValueError: the tokenizer has neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("processing_class: expected a pad_token or an eos_token, got neither")
