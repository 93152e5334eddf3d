"""Completions of the policy as it is now, whichever engine samples them."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from transformers import PreTrainedModel

from grpo_kernels.losses import Metrics
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Row, Sample, has_images
from grpo_trainer.engines.base import (
    BackgroundEngine,
    Completions,
    EngineContext,
    Images,
    Pending,
    RolloutEngine,
    TokenIds,
)
from grpo_trainer.engines.sampling import Sampling
from grpo_trainer.engines.transformers import ContinuousBatchingEngine, TransformersEngine
from grpo_trainer.engines.weights import parameter_versions, policy_weights
from grpo_trainer.monitor import phase
from grpo_trainer.policy import WHOLE, Placement

EngineFactory = Callable[[EngineContext], RolloutEngine]

# by name; those of the room above are imported when they are made
ENGINES: dict[str, EngineFactory | str] = {
    "transformers": TransformersEngine.from_context,
    "transformers_continuous": ContinuousBatchingEngine,
    "vllm_colocate": "grpo_trainer.vllm.colocate.ColocatedVLLM",
    "vllm_server": "grpo_trainer.vllm.server.VLLMServer",
}


def register_rollout_engine(name: str, factory: EngineFactory) -> None:
    """Make ``rollout_engine=name`` a choice of GRPOConfig.

    Raises:
        ValueError: there is an engine of that name.
    """
    if name in ENGINES:
        raise ValueError(f"name: expected a new one, got {name!r}, which is registered")
    ENGINES[name] = factory


@dataclass(eq=False)
class Sampler:
    """Gives the engine the policy's weights whenever they have changed, then samples.

    An engine does one thing at a time: whoever asks for the next waits for what runs.
    """

    engine: RolloutEngine
    policy: Callable[[], PreTrainedModel]  # unwrapped
    sampling: Sampling
    step: Callable[[], int]  # optimizer steps taken
    placement: Placement = WHOLE  # of the policy's parameters
    _version: object = field(default=None, init=False)  # of the weights that the engine has
    _running: Started | None = field(default=None, init=False)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """A completion that ends in none of them was truncated."""
        return self.sampling.eos_token_ids

    def generate(
        self, prompt_ids: list[TokenIds], max_tokens: int | None = None, images: Images = None
    ) -> Completions:
        """Return one completion per prompt, by the policy as it is now.

        ``max_tokens`` is in place of max_completion_length. With several processes it is the same
        on all of them; some may have no prompts.

        Raises:
            ValueError: what the engine returns is no such thing, or it takes no ``images``.
        """
        self._wait()
        self._update()
        sampling = self.sampling
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=max_tokens)
        completions = self.engine.generate(prompt_ids, sampling, **self._with(images))
        return self._checked(completions, len(prompt_ids))

    def start(self, prompt_ids: list[TokenIds], images: Images = None) -> Started:
        """Start an engine that goes on while the policy moves: it returns at once."""
        assert isinstance(self.engine, BackgroundEngine)  # checked when it was made
        self._wait()
        self._update()
        pending = self.engine.start(prompt_ids, self.sampling, **self._with(images))
        checked = partial(self._checked, count=len(prompt_ids))
        self._running = Started(self.step(), pending, checked)
        return self._running

    def cancel(self) -> None:
        """End what was started, if it still runs."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    def close(self) -> None:
        self.cancel()
        self.engine.close()

    def outdated(self) -> None:
        """Send the weights before the next generation in any case: they were loaded."""
        self._version = None

    def _wait(self) -> None:
        """Wait for what was started. Weights are never sent in the middle of it."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def _update(self) -> None:
        policy = self.policy()
        # fused optimizers leave no trace on the parameters, and loading takes no step
        version = (self.step(), parameter_versions(policy, self.placement))
        if self._version != version or not getattr(self.engine, "keeps_weights", True):
            with phase("sync"):
                self.engine.update_weights(lambda: policy_weights(policy, self.placement))
            self._version = version

    def _with(self, images: Images) -> dict[str, Images]:
        """Return the engine's argument for ``images``, if there are any."""
        if not has_images(images):
            return {}
        if "images" not in inspect.signature(self.engine.generate).parameters:
            raise ValueError(
                "rollout_engine: expected one whose generate takes images, got "
                f"{type(self.engine).__name__} for prompts with images"
            )
        return {"images": images}

    def _checked(self, completions: Completions, count: int) -> Completions:
        """Return ``completions``; raise ValueError unless they are those of ``count`` prompts."""
        ids, logprobs, mask = completions
        if self.sampling.sampling_mask_size and mask is None:
            raise ValueError(
                "use_sampling_mask: expected an engine that reports which ids its filters left, "
                f"got none from {type(self.engine).__name__}"
            )
        if len(ids) != count or not all(ids):
            raise ValueError(
                f"rollout engine: expected {count} completions of one token or more, got "
                f"{len(ids)} with {sum(not row for row in ids)} empty ones"
            )
        lengths = [len(row) for row in ids]
        for name, column in (("log-probability", logprobs), ("sampling mask", mask)):
            if column is not None and [len(row) for row in column] != lengths:
                raise ValueError(
                    f"rollout engine: expected one {name} per token, got "
                    f"{sum(map(len, column))} for {sum(lengths)}"
                )
        return completions


@dataclass(eq=False)
class Started:
    """A generation that goes on while the policy trains, or has ended."""

    step: int  # optimizer steps that the weights had seen
    pending: Pending | None = None  # the engine's handle; None: it is over
    checked: Callable[[Completions], Completions] = lambda completions: completions
    completions: Completions | None = None

    def result(self) -> Completions:
        """Wait for the completions. Every process calls it.

        Raises:
            Exception: what went wrong on the other thread, with its traceback.
            ValueError: what the engine returns are no completions of the prompts.
        """
        if self.pending is not None:
            try:
                completions = self.pending.result()
            except Exception:
                self.pending = None  # it is over; after an interrupt it is not
                raise
            self.pending = None
            self.completions = self.checked(completions)
        if self.completions is None:
            raise RuntimeError("rollout engine: the generation has failed, or was cancelled")
        return self.completions

    def cancel(self) -> None:
        """End the generation if it runs."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.cancel()


def make_sampler(
    context: EngineContext, step: Callable[[], int], engine: RolloutEngine | None = None
) -> Sampler:
    """Return what samples by ``engine``, or by the one that the configuration names.

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
    if engine is None:
        factory = ENGINES[name]
        engine = (pkgutil.resolve_name(factory) if isinstance(factory, str) else factory)(context)
    if args.overlap_generation and not isinstance(engine, BackgroundEngine):
        raise ValueError(
            "overlap_generation: expected an engine with weights of its own, which can generate "
            "while the policy trains (use_vllm with vllm_mode='server', or one with the method "
            f"`start`), got {type(engine).__name__}"
        )
    return Sampler(engine, context.policy, sampling, step, context.placement)


def _engine_name(args: GRPOConfig) -> str:
    if args.rollout_engine is not None:
        return args.rollout_engine
    if args.use_vllm:
        return f"vllm_{args.vllm_mode}"
    continuous = args.use_transformers_continuous_batching
    return "transformers_continuous" if continuous else "transformers"


@dataclass(frozen=True)
class Sampled:
    """n completions, and what came with them."""

    samples: list[Sample]
    # more arguments of reward functions, one value per completion each
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=lambda: Metrics({}))


# makes one completion per row; in a distributed run every process calls it
Source: TypeAlias = Callable[[list[Row]], Sampled]
