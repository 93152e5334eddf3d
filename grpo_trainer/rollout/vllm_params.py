"""Sampling in vLLM's words, the same for an engine in this process and for a server."""

from __future__ import annotations

from typing import Any

from grpo_trainer.rollout.base import Sampling

MAX_LOGPROBS = 1024  # ids per token that an engine may be asked about


def vllm_params(sampling: Sampling) -> dict[str, Any]:
    """Return fields of vLLM's SamplingParams, without ``n`` and ``structured_outputs``.

    Raises:
        ValueError: generation_kwargs sets one of them again.
    """
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_tokens,
        "logprobs": sampling.sampling_mask_size,  # 0: of the sampled token alone
        # what ends a completion is said here; a model folder may name other tokens
        "stop_token_ids": sorted(sampling.eos_token_ids),
        "ignore_eos": True,
    }
    again = sorted(set(params) & set(sampling.engine_options))
    if again:
        raise ValueError(
            f"generation_kwargs: expected none of {', '.join(again)}, which are set already"
        )
    return params | dict(sampling.engine_options)
