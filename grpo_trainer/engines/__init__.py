"""Engines, which turn prompts into completions."""

from grpo_trainer.engines.answers import (
    NEVER,
    Completion,
    Completions,
    TokenIds,
    check_length,
    checked_ids,
)
from grpo_trainer.engines.base import (
    MAX_LOGPROBS,
    EngineContext,
    Images,
    RolloutEngine,
    Sampling,
    WeightSource,
    cut_after_eos,
    image_token_ids,
    on_first_process,
    raise_on_all,
    vllm_params,
)
from grpo_trainer.engines.sampler import (
    Sampler,
    Source,
    adapter_weights,
    make_sampler,
    policy_weights,
    register_rollout_engine,
)
from grpo_trainer.engines.transformers import TransformersEngine, pad_token_id
