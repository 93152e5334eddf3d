"""How completions are drawn, and which tokens end one: the same for every engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.policy import base_policy

logger = logging.getLogger(__name__)

MAX_LOGPROBS = 1024  # ids per token that an engine may be asked about
_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_IMAGE_TOKENS = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
_NEVER = -100.0  # added to a logit: the least that vLLM takes
_TIES = 8  # top_k keeps all ids as likely as its last one; rounded logits make them frequent


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn, for every engine alike.

    Args:
        eos_token_ids: tokens that end a completion; it keeps the one it ends with.
        max_tokens: longest completion.
        temperature, top_p, top_k, min_p, repetition_penalty: as in GRPOConfig.
        suppressed: tokens that are never drawn: those that stand for parts of images, which a
            forward over the completion would look for.
        structured_outputs_regex: what the text of a completion must match; None: anything.
        sampling_mask_size: report what the filters left of so many of each token's likeliest ids;
            0: do not.
        engine_options: the rest of generation_kwargs, in the engine's own names.
    """

    eos_token_ids: frozenset[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    suppressed: frozenset[int] = frozenset()
    structured_outputs_regex: str | None = None
    sampling_mask_size: int = 0
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(
        cls,
        args: GRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel | None = None,
    ) -> Sampling:
        """Return what ``args`` asks for. generation_kwargs override the other fields.

        Completions end with the tokens that tokenizer and ``model`` name. An ``eos_token_id`` in
        generation_kwargs replaces them, ``stop_token_ids`` there come in addition.
        """
        extra = dict(options("generation_kwargs", args.generation_kwargs))
        settings = {name: extra.pop(name, getattr(args, name)) for name in _PARAMETERS}
        if args.use_sampling_mask:
            settings["sampling_mask_size"] = min(settings["top_k"] + _TIES, len(tokenizer))
        return cls(
            eos_token_ids=_end_token_ids(extra, tokenizer, model),
            max_tokens=args.max_completion_length,
            suppressed=frozenset() if model is None else _stand_for_images(model),
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            engine_options=extra,
            **settings,
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """What all engines have under the same name."""
        return {name: getattr(self, name) for name in _PARAMETERS}


def vllm_params(sampling: Sampling) -> dict[str, Any]:
    """Return what vLLM is asked, in the process or as a server, without ``n``.

    Raises:
        ValueError: generation_kwargs sets one of them again.
    """
    params = sampling.parameters | {
        "min_p": sampling.min_p or 0.0,
        "max_tokens": sampling.max_tokens,
        "logprobs": sampling.sampling_mask_size,  # 0: of the sampled token alone
        # what ends a completion is said here; a model folder may name other tokens
        "stop_token_ids": sorted(sampling.eos_token_ids),
        "ignore_eos": True,
    }
    if sampling.suppressed:
        params["logit_bias"] = dict.fromkeys(sorted(sampling.suppressed), _NEVER)
    if sampling.structured_outputs_regex is not None:
        params["structured_outputs"] = {"regex": sampling.structured_outputs_regex}
    again = sorted(set(params) & set(sampling.engine_options))
    if again:
        raise ValueError(
            f"generation_kwargs: expected none of {', '.join(again)}, which are set already"
        )
    return params | dict(sampling.engine_options)


def _end_token_ids(
    extra: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel | None,
) -> frozenset[int]:
    """Take ``eos_token_id`` and ``stop_token_ids`` out of ``extra``, and return all ends.

    The first replaces what tokenizer and model name, the second adds to it. Of tokenizer and model
    both count: a chat model ends its turn with another token than a document ends with.
    """
    size = len(tokenizer) if model is None else _text_config(model).vocab_size
    more = _checked("stop_token_ids", extra.pop("stop_token_ids", None), size)
    if "eos_token_id" in extra:
        return frozenset(_checked("eos_token_id", extra.pop("eos_token_id"), size) + more)
    named = _listed(tokenizer.eos_token_id) + ([] if model is None else _named_by(model))
    unknown = [token for token in named if not 0 <= token < size]
    if unknown:
        logger.warning("eos_token_id: %s end nothing, the model has %d tokens", unknown, size)
    return frozenset(token for token in named + more if token not in unknown)


def _named_by(model: PreTrainedModel) -> list[int]:
    generation = getattr(base_policy(model), "generation_config", None)
    named = _listed(getattr(generation, "eos_token_id", None))
    return named or _listed(getattr(_text_config(model), "eos_token_id", None))


def _stand_for_images(model: PreTrainedModel) -> frozenset[int]:
    config = base_policy(model).config
    named = {getattr(config, name, None) for name in _IMAGE_TOKENS}
    return frozenset(token for token in named if isinstance(token, int))


def _text_config(model: PreTrainedModel) -> Any:
    return base_policy(model).config.get_text_config()


def _listed(ids: Any) -> list[Any]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def _checked(name: str, ids: Any, size: int) -> list[int]:
    tokens = _listed(ids)
    if not all(type(token) is int and 0 <= token < size for token in tokens):
        raise ValueError(
            f"generation_kwargs[{name!r}]: expected ids of tokens, below {size}, got {ids!r}"
        )
    return tokens
