"""Rollouts with transformers, using the model being trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo_trainer.data import has_images, model_inputs
from grpo_trainer.engines.answers import Completions, TokenIds
from grpo_trainer.engines.base import (
    EngineContext,
    Images,
    RolloutEngine,
    Sampling,
    cut_after_eos,
)
from grpo_trainer.policy import base_policy, evaluating

# turns off transformers' own filters, which run after ours
NO_FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
_CACHE_NAMES = ("cache", "past_key_values")  # the latter before transformers 5.24
_LATER = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "watermarking_config")


class RecordingFilters(LogitsProcessor):
    """Applies temperature, top_k, top_p and min_p as transformers does, and records the result."""

    def __init__(self, sampling: Sampling) -> None:
        later = [name for name in _LATER if sampling.engine_options.get(name) is not None]
        if later:
            raise ValueError(
                f"generation_kwargs: expected no {', '.join(later)} with use_sampling_mask, which "
                "supports top_k, top_p and min_p"
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
        """Return the ids that the filters kept for each row's first ``lengths`` tokens."""
        rows: list[list[TokenIds]] = [[] for _ in lengths]
        for step, pairs in enumerate(self._steps):
            counts = torch.bincount(pairs[:, 0], minlength=len(lengths)).tolist()
            for row, ids in enumerate(pairs[:, 1].split(counts)):
                if step < lengths[row]:
                    rows[row].append(ids.tolist())
        return rows


@dataclass(eq=False)
class TransformersEngine(RolloutEngine):
    """Samples with ``model.generate``; does not report log-probabilities."""

    context: EngineContext

    @property
    def in_step(self) -> bool:
        """Whether all processes run every forward together."""
        return self.context.placement.sharded and not self.context.args.ds3_gather_for_generation

    def generate(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Completions:
        """Return one completion per prompt."""
        model = self.context.policy()
        whole = nullcontext() if self.in_step else self.context.placement.whole(model)
        # gradient checkpointing would also disable the cache
        with whole, evaluating(model), _without_defaults(model):
            if prompt_ids:
                return self.complete(model, prompt_ids, sampling, images)
            if self.in_step:  # use a dummy prompt
                self.complete(model, [[0]], sampling, images)
            return Completions([])

    def complete(
        self, model: Any, prompt_ids: list[TokenIds], sampling: Sampling, images: Images
    ) -> Completions:
        """Complete the prompts in one left-padded batch."""
        config = self.generation_config(sampling)
        rows = [torch.tensor(ids) for ids in prompt_ids]
        padded = partial(pad_sequence, batch_first=True, padding_side="left")
        ids = padded(rows, padding_value=config.pad_token_id).to(model.device)
        mask = padded([torch.ones_like(row) for row in rows]).to(model.device)
        lengths = [len(row) for row in prompt_ids]
        filters = RecordingFilters(sampling) if sampling.sampling_mask_size else None
        shares = min(lengths) > 1 and not self.in_step and not has_images(images)
        cache = _shared_cache(model, ids, mask, config) if shares else {}
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=None if filters is None else LogitsProcessorList([filters]),
            synced_gpus=self.in_step,
            **cache,
            **model_inputs(images or [], lengths, ids.shape[1], ids.device, left=True),
        )
        rows_ids = output[:, ids.shape[1] :].tolist()
        completions = [cut_after_eos(row, sampling.eos_token_ids) for row in rows_ids]
        left = None if filters is None else filters.sampling_mask([len(row) for row in completions])
        return Completions(completions, sampling_mask=left)

    def generation_config(self, sampling: Sampling) -> GenerationConfig:
        """Return the sampling as transformers' configuration."""
        tokenizer = self.context.tokenizer
        settings = sampling.parameters | {
            "do_sample": True,
            "use_cache": True,
            "max_new_tokens": sampling.max_tokens,
            "cache_implementation": self.context.args.cache_implementation,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": sorted(sampling.eos_token_ids) or None,
            "pad_token_id": pad_token_id(tokenizer),
        }
        if sampling.sampling_mask_size:
            settings |= NO_FILTERS  # RecordingFilters applies them
        settings |= sampling.engine_options
        never = {*(settings.get("suppress_tokens") or ()), *sampling.suppressed}
        return GenerationConfig(**settings | {"suppress_tokens": sorted(never) or None})


def _shared_cache(
    model: Any,
    ids: Tensor,  # (N, L), padded on the left
    mask: Tensor,  # (N, L)
    config: GenerationConfig,
) -> dict[str, Cache]:
    """Run the model once per distinct prompt, on all but its last token, and copy the cache.

    Returns:
        The argument of ``generate`` with the cache of all rows. Empty if no prompt repeats, or if
        the model caches something other than keys and values.
    """
    distinct, rows = torch.cat([ids, mask], dim=1).unique(dim=0, return_inverse=True)
    if len(distinct) == len(ids) or not _caches_keys_and_values(model, config):
        return {}
    first_ids, first_mask = distinct.view(-1, 2, ids.shape[1])[..., :-1].unbind(1)
    output = model.generate(
        input_ids=first_ids,
        attention_mask=first_mask,
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=1,
            return_dict_in_generate=True,
            bos_token_id=config.bos_token_id,
            pad_token_id=config.pad_token_id,
        ),
    )
    name = next((name for name in _CACHE_NAMES if name in output), None)
    if name is None:  # such as mpt
        return {}
    output[name].batch_select_indices(rows)
    return {name: output[name]}


def _caches_keys_and_values(model: Any, config: GenerationConfig) -> bool:
    """Return whether ``generate`` creates a cache of attention keys and values, in one pass."""
    one_pass = config.use_cache and not (
        config.prompt_lookup_num_tokens or config.prefill_chunk_size
    )
    usual = config.cache_implementation is None and config.num_beams in (None, 1)
    if not (one_pass and usual and model._supports_default_dynamic_cache()):
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """Hide the model's ``generation_config``, from which ``generate`` reads every setting that is
    not
    passed: filters, penalties and forbidden words, in this and later versions of transformers."""
    models = [each for each in (model, base_policy(model)) if "generation_config" in vars(each)]
    hidden = [each.generation_config for each in models]
    try:
        for each in models:
            each.generation_config = GenerationConfig()
        yield
    finally:
        for each, config in zip(models, hidden, strict=True):
            each.generation_config = config


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, or the end-of-sequence token of a tokenizer without one.

    Raises:
        ValueError: the tokenizer has neither.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("processing_class: expected a pad_token or an eos_token, got neither")
