"""Rollout engines: they turn prompts into completions.

May know ``common``, ``config``, ``data``, ``model`` and ``monitor``.
"""

from grpo_trainer.rollout.base import (
    BackgroundEngine,
    Completions,
    EngineContext,
    Pending,
    RolloutEngine,
    WeightsLostError,
    WeightSource,
    cut_after_eos,
)
from grpo_trainer.rollout.http import NoServerError, ServerError
from grpo_trainer.rollout.registry import make_rollouts, register_rollout_engine
from grpo_trainer.rollout.sampling import MAX_LOGPROBS, Sampling
from grpo_trainer.rollout.sync import Rollouts, Sampled, Source, Started
from grpo_trainer.rollout.transformers import TransformersEngine, pad_token_id
from grpo_trainer.rollout.vllm_client import VLLMClient
from grpo_trainer.rollout.weights import policy_weights
