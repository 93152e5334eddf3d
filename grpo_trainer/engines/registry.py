"""Rollout engines by name. A package of its own registers another one with one call."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from grpo_trainer.config import GRPOConfig
from grpo_trainer.engines.base import BackgroundEngine, EngineContext, RolloutEngine
from grpo_trainer.engines.sampler import Rollouts
from grpo_trainer.engines.sampling import Sampling
from grpo_trainer.engines.transformers import ContinuousBatchingEngine, TransformersEngine

EngineFactory = Callable[[EngineContext], RolloutEngine]


def _imported(path: str) -> EngineFactory:
    """Return an engine of a room above, imported when it is made: vLLM is heavy."""
    return lambda context: pkgutil.resolve_name(path)(context)


ENGINES: dict[str, EngineFactory] = {
    "transformers": TransformersEngine.from_context,
    "transformers_continuous": ContinuousBatchingEngine,
    "vllm_colocate": _imported("grpo_trainer.vllm.colocate.ColocatedVLLM"),
    "vllm_server": _imported("grpo_trainer.vllm.server.VLLMServer"),
}


def register_rollout_engine(name: str, factory: EngineFactory) -> None:
    """Make ``rollout_engine=name`` a choice of GRPOConfig.

    Raises:
        ValueError: there is an engine of that name.
    """
    if name in ENGINES:
        raise ValueError(f"name: expected a new one, got {name!r}, which is registered")
    ENGINES[name] = factory


def make_rollouts(
    context: EngineContext, step: Callable[[], int], engine: RolloutEngine | None = None
) -> Rollouts:
    """Return completions of the policy, by ``engine`` or by the one that the configuration names.

    ``step`` counts the optimizer's steps.

    Raises:
        ValueError: there is no such engine, or it cannot run here.
    """
    args = context.args
    name = _engine_name(args)
    if engine is not None and name != "transformers":
        raise ValueError(f"rollout_engine: expected it once, got one beside the {name} of args")
    if name not in ENGINES:
        raise ValueError(f"rollout_engine: expected one of {', '.join(ENGINES)}; got {name!r}")
    sampling = Sampling.from_config(args, context.tokenizer, context.policy())
    engine = engine or ENGINES[name](context)
    if args.overlap_generation and not isinstance(engine, BackgroundEngine):
        raise ValueError(
            "overlap_generation: expected an engine with weights of its own, which can generate "
            "while the policy trains (use_vllm with vllm_mode='server', or one with the method "
            f"`start`), got {type(engine).__name__}"
        )
    sleeps, placement = args.vllm_enable_sleep_mode, context.placement
    return Rollouts(engine, context.policy, sampling, step, sleeps, placement)


def _engine_name(args: GRPOConfig) -> str:
    if args.rollout_engine is not None:
        return args.rollout_engine
    if args.use_vllm:
        return f"vllm_{args.vllm_mode}"
    continuous = args.use_transformers_continuous_batching
    return "transformers_continuous" if continuous else "transformers"
