"""Engines: they turn prompts into completions."""

from grpo_trainer.engines.base import (
    BackgroundEngine,
    Completions,
    EngineContext,
    Images,
    Pending,
    RolloutEngine,
    TokenIds,
    WeightSource,
    cut_after_eos,
)
from grpo_trainer.engines.sampler import (
    Sampled,
    Sampler,
    Source,
    Started,
    make_sampler,
    register_rollout_engine,
)
from grpo_trainer.engines.sampling import MAX_LOGPROBS, Sampling, vllm_params
from grpo_trainer.engines.transformers import TransformersEngine, pad_token_id
from grpo_trainer.engines.weights import policy_weights
